"""What a plan says of several pods: which ranks are where, and what the network gives; pure."""

from collections.abc import Mapping, Sequence

from nsa_core.config.counts import count_parameters
from nsa_core.rundir.manifest import RunManifest
from nsa_ops.fleet.meeting import Meeting, PodPath
from nsa_ops.quantities import format_bytes

_GRADIENT_BYTES = 4
_MICRO = 1e6


def rank_map(shares: Mapping[str, RunManifest], meeting: Meeting) -> list[str]:
    """Which ranks are on which pod, and where they meet, one line a pod.

    `shares`: manifests of the pods by name, in the order of their node ranks.
    """
    lines = []
    for (pod, manifest), address in zip(shares.items(), meeting.addresses, strict=True):
        ranks, node = manifest.pod_ranks, manifest.node
        name = f"ranks {ranks[0]} to {ranks[-1]}" if len(ranks) > 1 else f"rank {ranks[0]}"
        inside = f"({node.interface})" if address else node.interface
        where = " ".join(filter(None, (address, inside)))
        meets = f", all meet there on port {node.port}" if node.rank == 0 and node.port else ""
        lines.append(f"node {node.rank}: pod {pod}, {name}, {where}{meets}")
    return lines


def notes_of(notes: Mapping[str, Sequence[str]]) -> list[str]:
    """Notes of the pods by name; what holds for all of them once."""
    lists = list(notes.values())
    shared = [note for note in lists[0] if all(note in one for one in lists)]
    own = [f"pod {pod}: {note}" for pod, one in notes.items() for note in one if note not in shared]
    return [*shared, *own]


def meeting_notes(manifest: RunManifest, meeting: Meeting) -> list[str]:
    """What the network gives, what a step sends over it, and what the pods must agree on."""
    data = "every pod stages its own data; the ranks compare its manifest before the first step"
    slowest = meeting.slowest
    if slowest is None:
        return [data] * (len(meeting.nodes) > 1)
    paths = ", ".join(_path_text(path) for path in meeting.paths)
    num_pods = len(meeting.nodes)
    size = count_parameters(manifest.config.model).total * _GRADIENT_BYTES
    seconds = 2 * (num_pods - 1) / num_pods * size / _MICRO / max(slowest.mb_per_s, 1 / _MICRO)
    share = f"a step sends {format_bytes(size)} of gradients through it: about {seconds:.2g} s"
    return [paths, f"slowest path: {_path_text(slowest)}; {share}", data]


def _path_text(path: PodPath) -> str:
    return f"{path.source} reaches {path.target} with {path.mb_per_s:,.0f} MB/s"
