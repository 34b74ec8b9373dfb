"""ToolOutput: everything that one text about a machine's cards says, whatever tool printed it."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from nsa_ops.gpu.card import GPU, join_cards
from nsa_ops.gpu.dcgm import Diagnosis, parse_diagnoses
from nsa_ops.gpu.driver_errors import DriverVersions, ErrorText, parse_errors, parse_versions
from nsa_ops.gpu.kernel_log import KernelLog, parse_kernel_log
from nsa_ops.gpu.out_of_memory import OutOfMemory, parse_out_of_memory
from nsa_ops.gpu.smi_fields import parse_bus
from nsa_ops.gpu.smi_records import parse_csv, parse_num_attached, parse_query_text, parse_xml
from nsa_ops.gpu.smi_table import parse_devices, parse_instances, parse_list, parse_table
from nsa_ops.gpu.topology import NVLinks, Topology, parse_nvlinks, parse_peers, parse_topology

Kind = Literal[
    "nvidia-smi -q", "nvidia-smi -q -x", "nvidia-smi --query", "nvidia-smi", "nvidia-smi -L",
    "nvidia-smi mig", "CUDA devices", "nvidia-smi topo", "nvidia-smi nvlink", "kernel log",
    "dcgmi diag", "failure", "out of memory", "driver version", "system", "lspci",
]  # fmt: skip
#: Empty where nothing says so, as on plain Linux.
System = Literal["", "wsl", "windows", "macos"]
#: One parser for each form in which a tool prints cards; each gives what it finds as `GPU`.
CARD_PARSERS: Mapping[Kind, Callable[[str], tuple[GPU, ...]]] = {
    "nvidia-smi -q": parse_query_text,
    "nvidia-smi -q -x": parse_xml,
    "nvidia-smi": parse_table,
    "nvidia-smi --query": parse_csv,
    "nvidia-smi -L": parse_list,
    "nvidia-smi mig": parse_instances,
    "CUDA devices": parse_devices,
}
#: The longest line that matters is a CSV header with every field, of 6,000 characters.
_MAX_LINE = 16_000
_MAX_SHORT_LINE = 1000
#: With or without its escape character, which some terminals and pasters remove.
_ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\[\d+(?:;\d+)*m")
#: No value has so many digits, and Python refuses to read some thousands of them.
_LONG_NUMBER = re.compile(r"\d{19,}")
_PLACE = re.compile(r"^\((container|host|guest|vm|pod)\)\s*[$#]", re.IGNORECASE)
_PROMPT = re.compile(r"^\S*\s*[$#]\s+\S")
_INSIDE = frozenset({"container", "guest", "pod"})
#: 0300 and 0302 are the classes of cards; audio devices and switches of NVIDIA have others.
_PCI_CARD = re.compile(
    r"^((?:[0-9a-f]{4}:)?[0-9a-f]{2}:[0-9a-f]{2}\.0) "
    r"(?:VGA compatible controller|3D controller)(?: \[030[02]\])?: NVIDIA",
    re.IGNORECASE,
)
_SYSTEMS: Sequence[tuple[System, re.Pattern[str]]] = (
    (
        "wsl",
        re.compile(r"microsoft-standard|-WSL2\b|/usr/lib/wsl/|\bdxgk(?:rnl|io)", re.IGNORECASE),
    ),
    (
        "windows",
        re.compile(
            r"Microsoft Windows \[Version|^(?:PS )?[A-Z]:\\[^>]*>"
            r"|is not recognized as (?:an internal or external command|(?:the|a) name of a cmdlet)",
            re.IGNORECASE,
        ),
    ),
    ("macos", re.compile(r"\bDarwin Kernel Version|^Darwin \d+\.\d|^Darwin \S+ \d+\.\d")),
)


@dataclass(frozen=True)
class ToolOutput:
    """What one text says."""

    source: str  # a file's name, or a command
    kinds: tuple[Kind, ...] = ()  # forms that it holds; empty if none is known
    cards: tuple[GPU, ...] = ()  # joined over all forms in the text
    num_attached: int | None = None  # cards of the machine, where the text says
    topology: Topology | None = None
    no_peers: tuple[tuple[int, int], ...] = ()  # pairs that cannot reach each other's memory
    nvlinks: tuple[NVLinks, ...] = ()
    kernel: KernelLog = field(default_factory=KernelLog)
    diagnoses: tuple[Diagnosis, ...] = ()
    errors: tuple[ErrorText, ...] = ()
    versions: DriverVersions = field(default_factory=DriverVersions)
    out_of_memory: tuple[OutOfMemory, ...] = ()
    pci_cards: tuple[str, ...] = ()  # PCI addresses of cards that the bus shows
    system: System = ""
    num_host_cards: int = 0  # that the host sees, where host and container are told apart
    first_line: str = ""  # for a text of no known form


def parse_output(text: str, source: str = "") -> ToolOutput:
    """Everything that a text says; a text of no known form gives a `ToolOutput` without kinds."""
    whole = _LONG_NUMBER.sub("?", _ANSI.sub("", text))
    inside, outside = _places("\n".join(line[:_MAX_LINE] for line in whole.splitlines()))
    # An XML or JSON document may be one long line.
    by_kind = {
        kind: parse(whole if kind == "nvidia-smi -q -x" else inside)
        for kind, parse in CARD_PARSERS.items()
    }
    has_record = by_kind["nvidia-smi -q"] or by_kind["nvidia-smi -q -x"]
    cards = join_cards(card for found in by_kind.values() for card in found)
    output = ToolOutput(
        source=source,
        cards=cards,
        num_attached=parse_num_attached(whole) if has_record else None,
        topology=parse_topology(inside),
        no_peers=parse_peers(inside),
        nvlinks=parse_nvlinks(inside),
        kernel=parse_kernel_log(inside),
        diagnoses=parse_diagnoses(whole if whole.lstrip().startswith("{") else inside),
        errors=parse_errors(inside),
        versions=parse_versions(inside),
        out_of_memory=parse_out_of_memory(inside),
        pci_cards=_parse_pci_cards(inside),
        system=parse_system(inside) or next(filter(None, map(_system_of, cards)), ""),
        num_host_cards=len(parse_list(outside)),
        first_line=next((line.strip()[:200] for line in inside.splitlines() if line.strip()), ""),
    )
    kinds = [kind for kind, found in by_kind.items() if found]
    return replace(output, kinds=(*kinds, *_other_kinds(output)))


def _other_kinds(output: ToolOutput) -> Iterator[Kind]:
    present: dict[Kind, bool] = {
        "nvidia-smi topo": output.topology is not None or bool(output.no_peers),
        "nvidia-smi nvlink": bool(output.nvlinks),
        "kernel log": bool(output.kernel.num_lines or output.kernel.events),
        "dcgmi diag": bool(output.diagnoses),
        "failure": bool(output.errors),
        "out of memory": bool(output.out_of_memory),
        "system": bool(output.system),
        "lspci": bool(output.pci_cards),
        "driver version": output.versions != DriverVersions(),
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


def _parse_pci_cards(text: str) -> tuple[str, ...]:
    """PCI addresses of the cards that `lspci` lists, whether or not the driver serves them."""
    found = (_PCI_CARD.match(line[:_MAX_SHORT_LINE]) for line in text.splitlines())
    addresses = (match[1] for match in found if match)
    whole = (one if one.count(":") > 1 else f"0000:{one}" for one in addresses)
    return tuple(dict.fromkeys(parse_bus(one) for one in whole))


def parse_system(text: str) -> System:
    """Which system a text is from, by its first line that says so; WSL before the Windows below."""
    lines = [line[:_MAX_SHORT_LINE].strip() for line in text.splitlines()]
    return next(
        (system for system, words in _SYSTEMS for line in lines if words.search(line)),
        "",
    )


def _system_of(card: GPU) -> System:
    """Which system a card's driver is from.

    Windows' driver has a model, and no persistence mode. Inside WSL it is asked through a library
    of another version, which says that persistence is on.
    """
    is_other = bool(card.tool_version) and card.tool_version != card.driver_version
    if is_other and card.driver_version.count(".") == 1:
        return "wsl"
    if card.driver_model:
        return "wsl" if card.is_persistent else "windows"
    return ""
