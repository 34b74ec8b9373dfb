"""Evidence: everything that one text about a machine's cards says, whatever tool printed it."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Literal

from nsa_ops.gpu.card import GPU, join_cards
from nsa_ops.gpu.read.cuda_devices import parse_devices
from nsa_ops.gpu.read.dcgm import Diagnosis, parse_diagnoses
from nsa_ops.gpu.read.failures import (
    Found,
    OutOfMemory,
    Versions,
    parse_failures,
    parse_out_of_memory,
    parse_versions,
)
from nsa_ops.gpu.read.kernel_log import KernelLog, parse_kernel_log
from nsa_ops.gpu.read.pci import parse_pci_cards
from nsa_ops.gpu.read.readings import strip_ansi
from nsa_ops.gpu.read.smi_csv import parse_csv
from nsa_ops.gpu.read.smi_records import parse_query_text, parse_xml
from nsa_ops.gpu.read.smi_table import parse_instances, parse_list, parse_table
from nsa_ops.gpu.read.system import System, parse_system, system_of
from nsa_ops.gpu.read.topology import (
    NVLinks,
    Topology,
    parse_nvlinks,
    parse_peers,
    parse_topology,
)

Kind = Literal[
    "nvidia-smi -q", "nvidia-smi -q -x", "nvidia-smi --query", "nvidia-smi", "nvidia-smi -L",
    "nvidia-smi mig",
    "CUDA devices",
    "nvidia-smi topo", "nvidia-smi nvlink", "kernel log", "dcgmi diag", "failure",
    "out of memory", "driver version", "system", "lspci", "unknown",
]  # fmt: skip
#: The longest that is evidence is a CSV header with every field, of 6,000 characters.
_MAX_LINE = 16_000
_PLACE = re.compile(r"^\((container|host|guest|vm|pod)\)\s*[$#]", re.IGNORECASE)
_PROMPT = re.compile(r"^\S*\s*[$#]\s+\S")
_INSIDE = frozenset({"container", "guest", "pod"})


@dataclass(frozen=True)
class Evidence:
    """What one text says.

    Attributes:
        source: Where the text came from: a file's name, or a command.
        kinds: What forms of evidence it holds; empty if none that we know.
        cards: Cards, joined over all forms in the text.
        num_attached: Cards of the machine, where the text tells.
        topology: How the cards are joined.
        no_peers: Pairs that cannot reach each other's memory.
        nvlinks: NVLink by card.
        kernel: What the kernel log says.
        diagnoses: Results of dcgmi.
        failures: Answers that are errors.
        versions: The driver's two halves, if the text names them.
        out_of_memory: Failed allocations.
        pci_cards: PCI addresses of cards that the bus shows.
        system: What the machine runs, where the text tells; empty for plain Linux.
        num_host_cards: Cards that the host sees, where the text tells host and container apart.
        first_line: First line that says something, for a text of no known form.
    """

    source: str
    kinds: tuple[Kind, ...] = ()
    cards: tuple[GPU, ...] = ()
    num_attached: int | None = None
    topology: Topology | None = None
    no_peers: tuple[tuple[int, int], ...] = ()
    nvlinks: tuple[NVLinks, ...] = ()
    kernel: KernelLog = field(default_factory=KernelLog)
    diagnoses: tuple[Diagnosis, ...] = ()
    failures: tuple[Found, ...] = ()
    versions: Versions = field(default_factory=Versions)
    out_of_memory: tuple[OutOfMemory, ...] = ()
    pci_cards: tuple[str, ...] = ()
    system: System = ""
    num_host_cards: int = 0
    first_line: str = ""


def parse_evidence(text: str, source: str = "") -> Evidence:
    """Everything that a text says; a text of no known form gives an `Evidence` without kinds."""
    whole = strip_ansi(text)
    lines = (line[:_MAX_LINE] for line in whole.splitlines())
    inside, outside = _places("\n".join(lines))
    query, xml = parse_query_text(inside), parse_xml(whole)
    by_kind: dict[Kind, tuple[GPU, ...]] = {
        "nvidia-smi -q": query.cards,
        "nvidia-smi -q -x": xml.cards,
        "nvidia-smi": parse_table(inside),
        "nvidia-smi --query": parse_csv(inside),
        "nvidia-smi -L": parse_list(inside),
        "nvidia-smi mig": parse_instances(inside),
        "CUDA devices": parse_devices(inside),
    }
    cards = join_cards(card for found in by_kind.values() for card in found)
    evidence = Evidence(
        source=source,
        cards=cards,
        num_attached=query.num_attached or xml.num_attached,
        topology=parse_topology(inside),
        no_peers=parse_peers(inside),
        nvlinks=parse_nvlinks(inside),
        kernel=parse_kernel_log(inside),
        diagnoses=parse_diagnoses(whole if whole.lstrip().startswith("{") else inside),
        failures=parse_failures(inside),
        versions=parse_versions(inside),
        out_of_memory=parse_out_of_memory(inside),
        pci_cards=parse_pci_cards(inside),
        system=parse_system(inside) or next(filter(None, map(system_of, cards)), ""),
        num_host_cards=len(parse_list(outside)),
        first_line=next((line.strip()[:200] for line in inside.splitlines() if line.strip()), ""),
    )
    kinds = [kind for kind, found in by_kind.items() if found]
    kinds += _other_kinds(evidence)
    return replace(evidence, kinds=tuple(kinds))


def detect_kind(text: str) -> Kind:
    """The first form of evidence that a text holds, or `unknown`."""
    return next(iter(parse_evidence(text).kinds), "unknown")


def _other_kinds(evidence: Evidence) -> Iterator[Kind]:
    present: dict[Kind, bool] = {
        "nvidia-smi topo": evidence.topology is not None or bool(evidence.no_peers),
        "nvidia-smi nvlink": bool(evidence.nvlinks),
        "kernel log": bool(evidence.kernel.num_lines or evidence.kernel.events),
        "dcgmi diag": bool(evidence.diagnoses),
        "failure": bool(evidence.failures),
        "out of memory": bool(evidence.out_of_memory),
        "system": bool(evidence.system),
        "lspci": bool(evidence.pci_cards),
        "driver version": evidence.versions != Versions(),
    }
    return (kind for kind, is_there in present.items() if is_there)


def _places(text: str) -> tuple[str, str]:
    """What was seen where the run would be, and what only the host saw, by the prompts' words."""
    inside: list[str] = []
    outside: list[str] = []
    current, has_inside = inside, False
    for line in text.splitlines():
        place = _PLACE.match(line)
        if place:
            is_inside = place[1].lower() in _INSIDE
            has_inside = has_inside or is_inside
            current = inside if is_inside else outside
        elif _PROMPT.match(line):
            current = inside
        current.append(line)
    if not has_inside:
        return text, ""
    return "\n".join(inside), "\n".join(outside)
