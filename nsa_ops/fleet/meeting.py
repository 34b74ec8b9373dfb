"""Where the ranks of several pods meet, by what each pod reaches, and what a plan says; pure."""

import ipaddress
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pydantic import Field, field_validator

from nsa_core.config.base import TolerantModel
from nsa_core.config.counts import count_parameters
from nsa_core.rundir.manifest import Node, RunManifest
from nsa_ops.errors import ConfigurationError, RefusedError
from nsa_ops.quantities import format_bytes

#: Where ranks meet on pod 0; torch's own default for a rendezvous.
DEFAULT_PORT = 29_500
_MAX_PORT = 65_535
#: The rest of a pod's addresses is left out: each is called from every other pod.
MAX_ADDRESSES = 8
#: The first address is taken unless another is so many times as fast.
_FASTER = 2.0
_GRADIENT_BYTES = 4
_MICRO = 1e6


class PodAddress(TolerantModel):
    """One address of a pod and the interface that has it; both go into environments."""

    interface: str = Field(pattern=r"^[A-Za-z0-9_.@-]{1,32}$")
    address: str = Field(max_length=64)

    @field_validator("address")
    @classmethod
    def _check(cls, address: str) -> str:
        if "%" in address:  # behind it, any characters would pass as the name of a scope
            message = "an address with a scope is of no use to another pod"
            raise ValueError(message)
        return str(ipaddress.ip_address(address))


class PodNetwork(TolerantModel):
    """What a pod says of itself before other pods call it."""

    addresses: list[PodAddress] = Field(max_length=256)
    torch: str = Field("", max_length=64)
    boot_id: str = Field("", max_length=64)
    network_id: int = 0
    first_port: int = Field(ge=1, le=_MAX_PORT)
    last_port: int = Field(ge=1, le=_MAX_PORT)

    def usable(self, *, with_loopback: bool) -> list[str]:
        """Addresses that another pod may try, IPv4 first, loopback last."""
        found = [ipaddress.ip_address(one.address) for one in self.addresses]
        kept = [one for one in found if not one.is_loopback or with_loopback]
        kept.sort(key=lambda one: (one.is_loopback, one.version))  # else in the pod's order
        return [str(one) for one in kept][:MAX_ADDRESSES]

    def interface_of(self, address: str) -> str:
        """Interface that has an address; empty if none has."""
        return next((one.interface for one in self.addresses if one.address == address), "")


class CalledAddress(TolerantModel):
    """What one pod found at one address of another.

    Attributes:
        target: Number of the pod that was called.
        from_address: Own address that the call left from.
        port_problem: Why the chosen port cannot be used; empty if it can.
        free_port_problem: The same of a port as the kernel picks them for collectives.
        mb_per_s: How fast some MiB arrived, with all pods at work.
    """

    target: int = Field(ge=0, le=255)
    address: str = Field(max_length=64)
    from_address: str = Field("", max_length=64)
    port_problem: str = Field("", max_length=400)
    free_port_problem: str = Field("", max_length=400)
    mb_per_s: float = Field(0.0, ge=0, le=1e6)


@dataclass(frozen=True)
class PodCalls:
    """One pod of the probe: its name, its network, and what it found at the others.

    Attributes:
        listen_problem: Why it could not listen on the chosen port; empty if it could.
    """

    pod: str
    network: PodNetwork
    listen_problem: str = ""
    called: tuple[CalledAddress, ...] = ()

    def at(self, target: int, address: str) -> CalledAddress | None:
        """What it found at one address of another pod; None if it did not call it."""
        found = (one for one in self.called if (one.target, one.address) == (target, address))
        return next(found, None)


@dataclass(frozen=True)
class PodPath:
    """One pod reaches another."""

    source: str
    target: str
    mb_per_s: float

    def __str__(self) -> str:
        return f"{self.source} reaches {self.target} with {self.mb_per_s:,.0f} MB/s"


@dataclass(frozen=True)
class Meeting:
    """Where the ranks of a run meet.

    Attributes:
        order: Pods by node rank, as numbers of the list that was asked for.
        nodes: Rank, address, port and interface of each pod, by node rank.
        addresses: Address of each pod on its interface, by node rank.
        paths: Who reaches whom there.
    """

    order: tuple[int, ...]
    nodes: tuple[Node, ...]
    addresses: tuple[str, ...]
    paths: tuple[PodPath, ...]

    @property
    def slowest(self) -> PodPath | None:
        """The path that every step waits for; None with one pod."""
        return min(self.paths, key=lambda path: path.mb_per_s, default=None)


def choose_meeting(pods: Sequence[PodCalls], port: int, *, is_first_fixed: bool = False) -> Meeting:
    """The first pod that all others reach becomes node 0; then all have to reach each other.

    Args:
        pods: What each found, in the order that was asked for.
        port: Where they are to meet.
        is_first_fixed: Only the first may be node 0: the checkpoints are there.

    Raises:
        RefusedError: If no pod can be node 0, or two pods do not reach each other.
        ConfigurationError: If two pods have different versions of torch.
    """
    _require_one_torch(pods)
    for first in range(1 if is_first_fixed else len(pods)):
        address = _address_for_all(pods, first)
        if address:
            return _meet(pods, first, address, port)
    raise _nobody_reached(pods, port)


def _require_one_torch(pods: Sequence[PodCalls]) -> None:
    by_version: dict[str, str] = {}
    for one in pods:
        by_version.setdefault(one.network.torch or "none", one.pod)
    if len(by_version) > 1:
        found = ", ".join(f"{torch} on pod `{pod}`" for torch, pod in by_version.items())
        message = f"The pods have different versions of torch: {found}"
        raise ConfigurationError(message, hint="Provision them alike: `nsa-ops provision POD`")


def addresses_of(pods: Sequence[PodNetwork], number: int) -> list[str]:
    """Addresses of a pod that the others try; loopback where all are one machine and network."""
    is_one = len({(one.boot_id, one.network_id) for one in pods}) == 1 and pods[0].boot_id != ""
    return pods[number].usable(with_loopback=is_one)


def _address_for_all(pods: Sequence[PodCalls], first: int) -> str:
    """The address at which all others reach the chosen port of a pod; empty if there is none."""
    if pods[first].listen_problem:
        return ""
    networks = [one.network for one in pods]
    speeds: dict[str, float] = {}
    for address in addresses_of(networks, first):
        found = [one.at(first, address) for i, one in enumerate(pods) if i != first]
        whole = [one for one in found if one is not None and not one.port_problem]
        if len(whole) == len(found):
            speeds[address] = min((one.mb_per_s for one in whole), default=0.0)
    enough = max(speeds.values(), default=0.0) / _FASTER
    return next((address for address, speed in speeds.items() if speed >= enough), "")


def _meet(pods: Sequence[PodCalls], first: int, address: str, port: int) -> Meeting:
    order = (first, *(i for i in range(len(pods)) if i != first))
    addresses = {first: address}
    for i in order[1:]:
        call = pods[i].at(first, address)
        addresses[i] = call.from_address if call is not None else ""
    nodes = []
    for rank, i in enumerate(order):
        interface = pods[i].network.interface_of(addresses[i])
        if not interface:
            message = (
                f"Pod `{pods[i].pod}` calls from {addresses[i] or 'no address'}, which none of its "
                "interfaces has"
            )
            raise RefusedError(message, hint="Look at `ip address` there with `nsa-ops pod ssh`")
        nodes.append(Node(rank=rank, address=address, port=port, interface=interface))
    paths = _require_mesh(pods, order, addresses)
    return Meeting(order, tuple(nodes), tuple(addresses[i] for i in order), paths)


def _require_mesh(
    pods: Sequence[PodCalls], order: Sequence[int], addresses: Mapping[int, str]
) -> tuple[PodPath, ...]:
    """Every pod reaches every other on ports that the kernel picks, as collectives use them."""
    paths = []
    for i in order:
        for j in order:
            if i == j:
                continue
            call = pods[i].at(j, addresses[j])
            if call is None or call.free_port_problem:
                raise _blocked(pods[i], pods[j], addresses[j], call)
            paths.append(PodPath(pods[i].pod, pods[j].pod, call.mb_per_s))
    return tuple(paths)


def _blocked(
    source: PodCalls, target: PodCalls, address: str, call: CalledAddress | None
) -> RefusedError:
    ports = f"{target.network.first_port} to {target.network.last_port}"
    why = f": {call.free_port_problem}" if call is not None else ""
    message = (
        f"Pod `{source.pod}` cannot reach pod `{target.pod}` at {address} on a port that the "
        f"kernel picks ({ports}){why}"
    )
    return RefusedError(message, hint=_how_to_open(f"ports {ports} on both"))


def _nobody_reached(pods: Sequence[PodCalls], port: int) -> RefusedError:
    """Why the first pod cannot be node 0, by the first pod that does not reach it."""
    first = pods[0]
    if first.listen_problem:
        message = f"Port {port} of pod `{first.pod}` cannot be opened: {first.listen_problem}"
        return RefusedError(message, hint="Name another one with `--port`")
    hint = _how_to_open(f"port {port} and all above 1023")
    for one in pods[1:]:
        calls = _calls_of(one, 0)
        if all(call.port_problem for call in calls):
            tried = ", ".join(f"{call.address} ({call.port_problem})" for call in calls)
            message = f"Pod `{one.pod}` cannot reach pod `{first.pod}` on port {port}; tried "
            message += tried or "nothing, as it has no address beside loopback"
            return RefusedError(message, hint=hint)
    reached = "; ".join(
        f"`{one.pod}` at "
        + " and ".join(call.address for call in _calls_of(one, 0) if not call.port_problem)
        for one in pods[1:]
    )
    message = f"Pod `{first.pod}` has no address that all others reach on port {port}"
    return RefusedError(f"{message}: {reached}" if reached else message, hint=hint)


def _calls_of(pod: PodCalls, target: int) -> list[CalledAddress]:
    return [call for call in pod.called if call.target == target][:MAX_ADDRESSES]


def _how_to_open(ports: str) -> str:
    return f"Open {ports} between the pods, or let an engine run it: see docs/scale.md"


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
    paths = ", ".join(map(str, meeting.paths))
    num_pods = len(meeting.nodes)
    size = count_parameters(manifest.config.model).total * _GRADIENT_BYTES
    seconds = 2 * (num_pods - 1) / num_pods * size / _MICRO / max(slowest.mb_per_s, 1 / _MICRO)
    share = f"a step sends {format_bytes(size)} of gradients through it: about {seconds:.2g} s"
    return [paths, f"slowest path: {slowest}; {share}", data]
