"""Judge what tools printed about a machine's cards: texts in, one result a check out; pure.

This is the way in: `judge_texts` reads each text (`tool_output.py`) and holds the cards against a
profile (`fitness.py`, `condition.py`).
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence

from nsa_core.config.profile import HardwareProfile
from nsa_core.rundir.report import CheckResult, Status, checked
from nsa_ops.gpu.card import GPU, join_cards
from nsa_ops.gpu.dcgm import judge_diagnoses
from nsa_ops.gpu.driver_errors import DriverVersions, judge_errors
from nsa_ops.gpu.fitness import judge_card
from nsa_ops.gpu.kernel_log import judge_kernel_log
from nsa_ops.gpu.out_of_memory import judge_out_of_memory
from nsa_ops.gpu.tool_output import System, ToolOutput, parse_output
from nsa_ops.gpu.topology import judge_nvlinks, judge_peers, judge_topology
from nsa_ops.quantities import count_of, parse_count

#: First driver of CUDA 12, the oldest that current torch builds run on.
OLDEST_DRIVER = 525
#: A larger number is that of no card: what a machine prints is not believed without a bound.
_MAX_CARDS = 256
_SEVERITY: Mapping[Status, int] = {"fail": 4, "warn": 3, "unknown": 2, "pass": 1, "skipped": 0}
_UNREAD = "evidence."
_FORMS = "nvidia-smi (table, -q, -x, -L, CSV, topo, nvlink), dmesg, dcgmi diag, errors of CUDA"
_SYSTEMS = {"windows": "Windows", "macos": "macOS"}


def judge_texts(
    texts: Mapping[str, str] | Sequence[str],
    profile: HardwareProfile | None = None,
    others: Sequence[HardwareProfile] = (),
) -> list[CheckResult]:
    """Judge texts about one machine together; a text of no known form is `unknown`.

    Args:
        texts: What tools printed, by source, or in order.
        profile: What is wanted of its cards; None, or a profile without cards, judges them alone.
        others: Profiles that may be named as nearer to a card that is not the wanted one.
    """
    by_source = (
        texts
        if isinstance(texts, Mapping)
        else {f"text {number}": text for number, text in enumerate(texts, 1)}
    )
    wanted = profile if profile is not None and profile.needs_card else None
    return judge_outputs(
        [parse_output(text, name) for name, text in by_source.items()], wanted, others
    )


def judge_outputs(
    outputs: Sequence[ToolOutput],
    profile: HardwareProfile | None,
    others: Sequence[HardwareProfile] = (),
) -> list[CheckResult]:
    """The same for texts that were read already."""
    cards = join_cards(card for output in outputs for card in output.cards)
    versions = _versions(outputs)
    results = [result for output in outputs for result in _judge_one(output, cards, versions)]
    results += judge_system(next((one.system for one in outputs if one.system), ""))
    results += _count(outputs, cards, profile)
    results += _missing(outputs, cards)
    results += _driver(cards)
    results += [result for card in cards for result in judge_card(card, profile, others)]
    return _once(results)


def explain_error(text: str) -> tuple[str, str] | None:
    """Meaning and advice for what CUDA or torch said; None if it is no error that we know."""
    output = parse_output(text)
    results = _judge_errors(output, output.versions)
    return (results[0].message, results[0].hint) if results else None


def is_unread(check: CheckResult) -> bool:
    """Whether a check says that a text is of no known form."""
    return check.status == "unknown" and check.name.startswith(_UNREAD)


def _versions(outputs: Sequence[ToolOutput]) -> DriverVersions:
    """The driver's two halves, which one tool each may have named."""
    found = [one.versions for one in outputs]
    library = next((one.library for one in found if one.library), "")
    return DriverVersions(library, next((one.module for one in found if one.module), ""))


def _judge_one(
    output: ToolOutput, cards: Sequence[GPU], versions: DriverVersions
) -> list[CheckResult]:
    if not output.kinds:
        message = f"{output.source}: no known output in it"
        hint = f"Give it the output of one of: {_FORMS}"
        return [checked(f"{_UNREAD}{output.source}", "unknown", message, hint=hint)]
    topology = output.topology
    return [
        *_judge_errors(output, versions),
        *judge_kernel_log(output.kernel, cards),
        *judge_diagnoses(output.diagnoses),
        *([judge_topology(topology)] if topology is not None else []),
        *judge_peers(output.no_peers),
        *judge_nvlinks(output.nvlinks),
    ]


def _judge_errors(output: ToolOutput, versions: DriverVersions) -> list[CheckResult]:
    errors = judge_errors(output.errors, versions, output.kernel, output.num_host_cards)
    return [*errors, *map(judge_out_of_memory, output.out_of_memory)]


def judge_system(system: System) -> list[CheckResult]:
    """Whether the machine runs what runs are made for; nothing where that is plain Linux."""
    name, limit, command = "host.system", "Linux", "uname -sr"
    if system == "wsl":
        message = (
            "this is Linux inside Windows (WSL): Windows owns the card, its memory and its clocks, "
            "and ends what runs when it sleeps or restarts"
        )
        hint = "Use it to try things; for a long run take a machine that runs Linux itself"
        return [checked(name, "warn", message, limit=limit, command=command, hint=hint)]
    if system:
        message = f"this is {_SYSTEMS[system]}, not Linux: runs need Linux"
        hint = "Take a machine that runs Linux; on Windows, WSL 2 is enough to try things"
        return [checked(name, "fail", message, limit=limit, command=command, hint=hint)]
    return []


def _count(
    outputs: Sequence[ToolOutput], cards: Sequence[GPU], profile: HardwareProfile | None
) -> list[CheckResult]:
    if not cards:
        return []
    attached = _num_attached(outputs)
    count = max(len(cards), attached)
    named = profile.config.get("runtime", {}).get("num_gpus", 1) if profile else 1
    wanted = named if isinstance(named, int) else 1  # `auto` takes what there is
    message = f"{count_of(len(cards), 'card')} found"
    if attached > len(cards):
        message = f"{len(cards)} of {count_of(attached, 'attached card')} shown"
    return [
        checked(
            "gpu.cards", "pass" if count >= wanted else "fail", message, measured=str(count),
            limit=f">= {wanted}", command="nvidia-smi -L", hint="Take a pod with enough cards",
        )
    ]  # fmt: skip


def _num_attached(outputs: Sequence[ToolOutput]) -> int:
    return max((one.num_attached or 0 for one in outputs), default=0)


def _missing(outputs: Sequence[ToolOutput], cards: Sequence[GPU]) -> list[CheckResult]:
    """A warning that names each card which some source knows and the driver does not show.

    One record of one card says nothing of the others: `nvidia-smi -i` was asked for it.
    """
    numbers, buses = set(_hidden_numbers(outputs, cards)), set(_hidden_buses(outputs, cards))
    attached = _num_attached(outputs)
    num_unnamed = attached - len(cards) if len(cards) > 1 else 0
    if not numbers and not buses and num_unnamed > 0:
        numbers = set(_gaps(card.minor for card in cards))
    named = [f"GPU {number}" for number in sorted(numbers)]
    named += [f"the card at {bus}" for bus in sorted(buses)]
    if not named and num_unnamed <= 0:
        return []
    missing = ", ".join(named) or f"{num_unnamed} that no source names"
    return [
        checked(
            "gpu.missing", "warn",
            f"{count_of(len(cards), 'card')} shown; missing: {missing}",
            measured=str(len(cards)), limit=str(max(attached, len(cards) + len(named))),
            command="nvidia-smi -L; lspci -d 10de: -nn; dmesg | grep -iE 'nvrm|xid'",
            hint="The kernel log says why it does not answer; reboot, or take another pod",
        )
    ]  # fmt: skip


def _hidden_numbers(outputs: Sequence[ToolOutput], cards: Sequence[GPU]) -> Iterator[int]:
    """Numbers that are left out, or that only the table of connections has."""
    shown = {card.index for card in cards if card.index is not None}
    if len(shown) < len(cards) or not shown:
        return
    if len(shown) > 1:
        yield from _gaps(shown)
    for output in outputs:
        if output.topology is not None:
            yield from set(output.topology.cards) - shown


def _gaps(numbers: Iterable[int | None]) -> list[int]:
    """Numbers below the largest that are not there; none where one is unknown, or no card's."""
    known = list(numbers)
    found = {number for number in known if number is not None and 0 <= number < _MAX_CARDS}
    return sorted(set(range(max(found, default=0))) - found) if len(found) == len(known) else []


def _hidden_buses(outputs: Sequence[ToolOutput], cards: Sequence[GPU]) -> Iterator[str]:
    shown = {card.bus for card in cards}
    if shown and "" not in shown:
        for output in outputs:
            yield from set(output.pci_cards) - shown


def driver_branch(version: str) -> int | None:
    """The first number of a driver's version, such as 580; None for what is none; pure."""
    return parse_count(version.partition(".")[0])


def _driver(cards: Sequence[GPU]) -> list[CheckResult]:
    version = next((card.driver_version for card in cards if card.driver_version), "")
    branch = driver_branch(version)
    if branch is None:
        return []
    cuda = next((card.cuda_version for card in cards if card.cuda_version), "")
    is_good = branch >= OLDEST_DRIVER
    message = f"driver {version}{f', up to CUDA {cuda}' if cuda else ''}"
    if not is_good:
        message += f": older than {OLDEST_DRIVER}, the first for CUDA 12 and current torch"
    return [
        checked(
            "driver.version", "pass" if is_good else "warn", message, measured=version,
            limit=f">= {OLDEST_DRIVER}", command="nvidia-smi",
            hint="Take an image with a newer driver, or pin a torch build for the older CUDA",
        )
    ]  # fmt: skip


def _once(results: Sequence[CheckResult]) -> list[CheckResult]:
    """One result a name: where two texts say the same thing, the graver one is kept."""
    kept: dict[tuple[str, str], CheckResult] = {}
    for result in results:
        key = (result.name, result.message if result.status in {"fail", "warn"} else "")
        known = kept.get(key)
        if known is None or _SEVERITY[result.status] > _SEVERITY[known.status]:
            kept[key] = result
    return list(kept.values())
