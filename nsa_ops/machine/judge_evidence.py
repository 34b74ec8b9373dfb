"""Judge evidence of any kind about a machine's cards: texts in, one result per check out; pure."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from nsa_core.config.profile import HardwareProfile
from nsa_core.rundir.report import CheckResult, Status
from nsa_ops.gpu.card import GPU, join_cards
from nsa_ops.gpu.judge.cards import judge_card
from nsa_ops.gpu.judge.failures import judge_diagnoses, judge_failures
from nsa_ops.gpu.judge.kernel import judge_kernel_log
from nsa_ops.gpu.judge.links import judge_nvlinks, judge_peers, judge_topology
from nsa_ops.gpu.judge.missing import judge_missing
from nsa_ops.gpu.judge.result import checked
from nsa_ops.gpu.read.evidence import Evidence, parse_evidence
from nsa_ops.gpu.read.failures import Versions
from nsa_ops.gpu.read.hardware import HardwareFacts, Unread
from nsa_ops.machine.judge import judge_system
from nsa_ops.quantities import count_of

#: First driver of CUDA 12, the oldest that current torch builds run on.
OLDEST_DRIVER = 525
_SEVERITY: Mapping[Status, int] = {"fail": 4, "warn": 3, "unknown": 2, "pass": 1, "skipped": 0}
_UNREAD = "evidence."
_FORMS = "nvidia-smi (table, -q, -x, -L, CSV, topo, nvlink), dmesg, dcgmi diag, errors of CUDA"


def judge_evidence(
    texts: Mapping[str, str] | Sequence[str],
    profile: HardwareProfile | None = None,
    others: Sequence[HardwareProfile] = (),
) -> list[CheckResult]:
    """Judge texts about one machine together.

    Args:
        texts: What tools printed, by source, or in order.
        profile: What is wanted of its cards; None, or a profile without cards, judges them alone.
        others: Profiles that may be named as nearer to a card that is not the wanted one.

    Returns:
        Checks for what the texts tell; a text of no known form is `unknown`.
    """
    by_source = (
        texts
        if isinstance(texts, Mapping)
        else {f"text {number}": text for number, text in enumerate(texts, 1)}
    )
    wanted = profile if profile is not None and profile.needs_card else None
    return judge_parsed(
        [parse_evidence(text, name) for name, text in by_source.items()], wanted, others
    )


def judge_parsed(
    evidences: Sequence[Evidence],
    profile: HardwareProfile | None,
    others: Sequence[HardwareProfile] = (),
) -> list[CheckResult]:
    """The same for texts that were read already."""
    cards = join_cards(card for evidence in evidences for card in evidence.cards)
    versions = _versions(evidences)
    told = [replace(evidence, versions=versions) for evidence in evidences]
    results = [result for evidence in told for result in _judge_one(evidence, cards)]
    results += judge_system(next((one.system for one in evidences if one.system), ""))
    results += _count(evidences, cards, profile)
    results += judge_missing(evidences, cards)
    results += _driver(cards)
    results += [result for card in cards for result in judge_card(card, profile, others)]
    return _once(results)


def _versions(evidences: Sequence[Evidence]) -> Versions:
    """The driver's two halves, which one tool each may have named."""
    found = [one.versions for one in evidences]
    library = next((one.library for one in found if one.library), "")
    return Versions(library, next((one.module for one in found if one.module), ""))


def is_unread(check: CheckResult) -> bool:
    """Whether a check says that a text is of no known form."""
    return check.status == "unknown" and check.name.startswith(_UNREAD)


def _judge_one(evidence: Evidence, cards: Sequence[GPU]) -> list[CheckResult]:
    if not evidence.kinds:
        name = f"{_UNREAD}{evidence.source}"
        hint = f"Give it the output of one of: {_FORMS}"
        return [
            checked(name, "unknown", f"{evidence.source}: nothing in it that we know", hint=hint)
        ]
    topology = evidence.topology
    return [
        *judge_failures(evidence),
        *judge_kernel_log(evidence.kernel, cards),
        *judge_diagnoses(evidence.diagnoses),
        *([judge_topology(topology)] if topology is not None else []),
        *judge_peers(evidence.no_peers),
        *judge_nvlinks(evidence.nvlinks),
    ]


def _count(
    evidences: Sequence[Evidence], cards: Sequence[GPU], profile: HardwareProfile | None
) -> list[CheckResult]:
    if not cards:
        return []
    attached = max((one.num_attached or 0 for one in evidences), default=0)
    count = max(len(cards), attached)
    wanted = int(profile.config.get("runtime", {}).get("num_gpus", 1)) if profile else 1
    message = "one card is told of" if len(cards) == 1 else f"{len(cards)} cards are told of"
    if attached > len(cards):
        message = f"{len(cards)} of {count_of(attached, 'attached card')} shown"
    return [
        checked(
            "gpu.cards", "pass" if count >= wanted else "fail", message, measured=str(count),
            limit=f">= {wanted}", command="nvidia-smi -L", hint="Take a pod with enough cards",
        )
    ]  # fmt: skip


def _driver(cards: Sequence[GPU]) -> list[CheckResult]:
    version = next((card.driver_version for card in cards if card.driver_version), "")
    major = version.partition(".")[0]
    if not major.isdigit():
        return []
    cuda = next((card.cuda_version for card in cards if card.cuda_version), "")
    good = int(major) >= OLDEST_DRIVER
    message = f"driver {version}{f', up to CUDA {cuda}' if cuda else ''}"
    if not good:
        message = (
            f"{message}: older than {OLDEST_DRIVER}, the first that serves CUDA 12 and current "
            "torch"
        )
    return [
        checked(
            "driver.version", "pass" if good else "warn", message, measured=version,
            limit=f">= {OLDEST_DRIVER}", command="nvidia-smi",
            hint="Take an image with a newer driver, or pin a torch build for the older CUDA",
        )
    ]  # fmt: skip


def _once(results: Sequence[CheckResult]) -> list[CheckResult]:
    """One result a name: where two texts say the same thing, the graver one stands."""
    kept: dict[tuple[str, str], CheckResult] = {}
    for result in results:
        key = (result.name, result.message if result.status in {"fail", "warn"} else "")
        known = kept.get(key)
        if known is None or _SEVERITY[result.status] > _SEVERITY[known.status]:
            kept[key] = result
    return list(kept.values())


def judge_hardware(
    facts: HardwareFacts, profile: HardwareProfile, others: Sequence[HardwareProfile] = ()
) -> list[CheckResult]:
    """Judge what a pod's own tools said."""
    if not profile.needs_card:
        return [checked("gpu.cards", "skipped", f"profile {profile.name} uses no card")]
    results = [_unread(one) for one in facts.unread]
    if facts.problem:
        hint = "Restart the pod or its driver, or take another one"
        results.append(checked("gpu.cards", "fail", facts.problem, command="nvidia-smi", hint=hint))
    known = [one for one in facts.evidences if one.kinds]
    return results + judge_parsed(known, profile, others)


def _unread(one: Unread) -> CheckResult:
    name = f"tool.{one.command.partition(' ')[0]}"
    if one.is_hung and one.command.startswith("nvidia-smi"):
        message = f"driver not answering: {one.reason}"
        hint = "See `dmesg | grep -i xid`; the card needs a reset or a reboot, or take another pod"
        return checked(name, "fail", message, command=one.command, hint=hint)
    return checked(name, "skipped", f"not looked at: {one.reason}", command=one.command)
