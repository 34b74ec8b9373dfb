"""Preflight: facts of a pod, guardrails and correctness probes on it; one report, one verdict."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from nsa_core.config.profile import HardwareProfile
from nsa_core.config.ranks import OfferedCards
from nsa_core.config.recipe import ResolvedConfig, config_sha256
from nsa_core.config.run import RunConfig
from nsa_core.rundir.bounded_json import parse_model
from nsa_core.rundir.report import CheckResult, MachineSpeed, ProbeBegun, Report
from nsa_ops.clock import moment_of
from nsa_ops.configure import (
    RunChoice,
    all_hardware,
    load_hardware,
    require_profile,
    resolve_choice,
)
from nsa_ops.context import Operator, PodLink, Work
from nsa_ops.errors import DeadlineError, RefusedError
from nsa_ops.estimate import estimate_run, settle_sharding
from nsa_ops.machine.hardware import HardwareFacts, judge_hardware, read_hardware
from nsa_ops.machine.host import HostFacts, PythonFacts, read_host, read_python
from nsa_ops.machine.judge_host import judge_host, judge_python
from nsa_ops.machine.offer import PodCards, cards_of
from nsa_ops.pods.known import meant_pod
from nsa_ops.preflight.guardrails import Subject, apply_overrides, check_guardrails
from nsa_ops.preflight.judge_speed import COMMAND, judge_speed, judge_staging, plan_gradient_sum
from nsa_ops.preflight.proof import (
    PROBED,
    blocking_checks,
    clear_mark,
    probed_sha256,
    red_preflight,
)
from nsa_ops.preflight.several_cards import num_cards
from nsa_ops.provision.receipt import judge_environment, parse_receipt
from nsa_ops.provision.want import known_lock_sha256
from nsa_ops.remote.snapshot import Snapshot, ship, take_snapshot
from nsa_ops.remote.transport import MAX_OUTPUT_BYTES

Tier = Literal["quick", "standard", "full"]
PROBE_S: Mapping[Tier, float] = {"quick": 0.0, "standard": 300.0, "full": 1800.0}
#: A card is used for three seconds; a hub may take a minute to answer, and several cards to sum.
SPEED_S = 240.0
_MIB_PER_GIB = 1024


@dataclass(frozen=True)
class PodFacts:
    """Everything that was read from a pod.

    Attributes:
        laptop_unix_s: The laptop's clock when the pod gave its own.
    """

    host: HostFacts
    python: PythonFacts
    hardware: HardwareFacts
    laptop_unix_s: float = 0.0

    @property
    def card_memory_mib(self) -> float | None:
        """Memory of the smallest card; None if unknown or there is none."""
        known = [gpu.memory_mib for gpu in self.hardware.gpus if gpu.memory_mib is not None]
        return min(known, default=None)

    @property
    def card_memory_gib(self) -> float | None:
        """The same in GiB."""
        memory_mib = self.card_memory_mib
        return memory_mib / _MIB_PER_GIB if memory_mib is not None else None

    @property
    def cards(self) -> PodCards:
        """Cards that a run can use, in the order of its ranks."""
        return cards_of(self.hardware.gpus, self.host.visible_devices)

    def summary(self) -> dict[str, object]:
        """What a manifest records of the pod."""
        return {
            "gpus": [gpu.name for gpu in self.hardware.gpus],
            "driver": next((gpu.driver_version for gpu in self.hardware.gpus), None) or None,
            "torch": self.python.torch_version,
            "cuda": self.python.cuda_version,
            "nccl": self.python.nccl_version,
            "num_cards": self.python.num_cards,
            "python": self.host.python_version,
            "num_cpus": self.host.num_cpus,
            "memory_bytes": self.host.memory_bytes,
        }


@dataclass(frozen=True)
class Preflight:
    """The outcome.

    Attributes:
        sha256: Hash of the report, which a manifest names.
        is_green: Whether a launch may follow.
        blocking: Checks that forbid it.
        flags: What makes the same choice again, behind `--profile NAME`: recipe and values.
    """

    pod: str
    report: Report
    verdict: str
    sha256: str
    is_green: bool
    blocking: list[str]
    flags: str = ""


@dataclass(frozen=True)
class Trial:
    """The code and the configuration that would train, on the pod where they would."""

    operator: Operator
    link: PodLink
    snapshot: Snapshot
    resolved: ResolvedConfig
    hardware: HardwareProfile
    facts: PodFacts


def run_preflight(
    operator: Operator,
    pod_name: str | None,
    choice: RunChoice,
    overrides: Mapping[str, str],
    tier: Tier = "standard",
) -> Preflight:
    """Look at a pod, use it, probe it, and keep the report.

    Args:
        operator: Who asks.
        pod_name: Pod; None where only one fits.
        choice: Recipe, profile and values that would be launched.
        overrides: Guardrails that may be passed, with the reason.
        tier: `quick` only looks, and is not kept: no launch may follow it; `full` adds the long
            probes.

    Raises:
        OpsError: If the pod cannot be asked or the configuration cannot be used.
    """
    pod = meant_pod(operator, pod_name)
    link = operator.link(pod)
    hardware = load_hardware(require_profile(operator, choice, pod.profile))
    operator.tell(f"reading pod {pod.name} ({link.transport.where})")
    facts = read_facts(operator, link)
    resolved = resolve_for(operator, choice, hardware, facts)
    trial = Trial(operator, link, take_snapshot(), resolved, hardware, facts)
    checks = _all_checks(trial, overrides, tier)
    report = Report.model_validate(
        {
            "at": operator.clock.unix_s(),
            "tier": tier,
            "pod_id": pod.pod_id,
            "code_id": trial.snapshot.code_id,
            "profile": hardware.name,
            "checks": checks,
            "facts": facts.summary(),
            PROBED: probed_sha256(resolved.config),
        }
    )
    if tier == "quick":
        failed = [check.name for check in checks if check.status == "fail"]
        return Preflight(pod.name, report, report.verdict, "", not failed, failed, choice.flags)
    sha256 = hashlib.sha256(report.model_dump_json().encode()).hexdigest()
    operator.store.save_report(sha256, report)
    blocking = blocking_checks(checks)
    if not blocking and clear_mark(link):
        operator.tell(f"pod {pod.name} was marked by a watchdog; the mark is removed")
    return Preflight(pod.name, report, report.verdict, sha256, not blocking, blocking, choice.flags)


def _all_checks(trial: Trial, overrides: Mapping[str, str], tier: Tier) -> list[CheckResult]:
    pod = trial.link.record
    receipt = parse_receipt(trial.operator.store.provision(pod.pod_id))
    guardrails = check_guardrails(subject_of(trial.resolved.config, trial.hardware, trial.facts))
    checks = [
        *judge_facts(trial.link, trial.facts, trial.hardware, num_cards(trial.resolved.config)),
        judge_environment(receipt, pod, known_lock_sha256(trial.snapshot)),
        *apply_overrides(guardrails, overrides),
    ]
    if tier == "quick":
        message = "a quick look uses no card and proves nothing about the kernels"
        return [*checks, CheckResult(name="causality.probe", status="skipped", message=message)]
    if any(check.status == "fail" for check in checks if check.name.startswith("python.")):
        return [*checks, _not_probed("the interpreter above cannot run it")]
    _ship(trial)
    return [*checks, *measure_speed(trial), *probe_correctness(trial, tier)]


def refusal_of(found: Preflight) -> RefusedError | None:
    """What a red preflight means for a launch; None if it is green."""
    if found.is_green:
        return None
    return red_preflight(found.pod, found.report.profile, found.flags, found.blocking)


def read_facts(operator: Operator, link: PodLink) -> PodFacts:
    """Ask the pod for everything that can be read without our code on it."""
    python = link.record.python
    began_s = operator.clock.unix_s()
    host = read_host(link.transport, python, link.record.root)
    laptop_unix_s = moment_of(host.unix_s, began_s, operator.clock.unix_s())
    operator.tell(f"python {host.python_version}; importing torch")
    with operator.work("looking at torch and cards"):
        packages, hardware = read_python(link.transport, python), read_hardware(link.transport)
    return PodFacts(host, packages, hardware, laptop_unix_s)


def resolve_for(
    operator: Operator, choice: RunChoice, hardware: HardwareProfile, facts: PodFacts
) -> ResolvedConfig:
    """The configuration for this very card."""
    memory_gib = facts.card_memory_gib if hardware.needs_card else None
    found = resolve_choice(
        operator.settings,
        choice,
        pod_profile=hardware.name,
        memory_gib=memory_gib,
        offered=offered_cards(hardware, facts),
    )
    config, notes = settle_sharding(found.config, memory_gib)
    values = {
        "config": config,
        "sha256": config_sha256(config),
        "notes": [*found.notes, *notes],
    }
    return found.model_copy(update=values)


def offered_cards(hardware: HardwareProfile, facts: PodFacts) -> OfferedCards:
    """What `runtime.num_gpus=auto` may take of a pod."""
    if not hardware.needs_card:
        return OfferedCards(0, f"profile {hardware.name} uses no card")
    return facts.cards.offer()


def subject_of(config: RunConfig, hardware: HardwareProfile, facts: PodFacts) -> Subject:
    """What the guardrails look at."""
    return Subject(
        config=config,
        profile=hardware,
        estimate=estimate_run(config, hardware),
        disk_free_bytes=facts.host.disk_free_bytes,
        card_memory_mib=facts.card_memory_mib,
        cards=facts.cards if facts.hardware.gpus else None,
        shm_free_bytes=facts.host.shm_free_bytes,
    )


def judge_facts(
    link: PodLink, facts: PodFacts, hardware: HardwareProfile, num_gpus: int
) -> list[CheckResult]:
    """Every check on the machine, its interpreter and its cards, of which a run takes so many."""
    is_local = link.record.kind == "local"
    host = judge_host(facts.host, is_local=is_local, laptop_unix_s=facts.laptop_unix_s)
    known = {check.name for check in host}
    cards = judge_hardware(facts.hardware, hardware, all_hardware())
    return [
        *host,
        *judge_python(facts.python, hardware, num_gpus),
        *(check for check in cards if check.name not in known),  # the system, reported by both
    ]


def _ship(trial: Trial) -> None:
    operator, link, snapshot = trial.operator, trial.link, trial.snapshot
    with operator.work("shipping code"):
        moved = ship(snapshot, link.transport, link.record.python, link.code(snapshot.code_id))
    operator.tell(f"code {snapshot.code_id} {'shipped' if moved else 'is there already'}")


def measure_speed(trial: Trial) -> list[CheckResult]:
    """Use the pod's cards, disk and data for a moment, and judge what they gave."""
    operator, link, config = trial.operator, trial.link, trial.resolved.config
    operator.tell("using cards, disk and data")
    words = ("--folder", str(link.root), "--config", "-")
    argv = link.module(trial.snapshot.code_id, "nsa_core.checks.machine", *words)
    stdin = config.model_dump_json().encode()
    try:
        with operator.work("using cards, disk and data"):
            done = link.transport.run(argv, stdin=stdin, timeout_s=operator.deadline_s(SPEED_S))
    except DeadlineError as error:
        return [_not_measured(error.message)]
    try:
        found = parse_model(MachineSpeed, done.stdout.strip().splitlines()[-1])
    except (ValueError, IndexError):
        said = done.last_error_line or "nothing"
        return [_not_measured(f"no answer (exit code {done.exit_code}): {said}")]
    estimate = estimate_run(config, trial.hardware)
    beside = estimate.disk_bytes - (estimate.staging.shard_bytes or 0)
    return [
        *judge_speed(
            found,
            trial.hardware,
            estimate.checkpoint_bytes,
            plan_gradient_sum(config, estimate),
        ),
        *judge_staging(found.first_batch, config, beside, trial.facts.host.disk_free_bytes),
    ]


def _not_measured(why: str) -> CheckResult:
    return CheckResult(
        name="machine.speed",
        status="fail",
        message=f"cards, disk and data were not used: {why}",
        command=COMMAND,
        hint="A card that hangs under load is a broken card: see `dmesg | grep -i xid`",
    )


def probe_correctness(trial: Trial, tier: Tier) -> list[CheckResult]:
    """Run the causality and parity probes on the pod, with the code and model that would train."""
    operator, config = trial.operator, trial.resolved.config
    operator.tell("probing causality and kernels")
    device = config.runtime.device
    words = ("--json", "--progress", "--tier", tier, "--device", device, "--config", "-")
    argv = trial.link.module(trial.snapshot.code_id, "nsa_core.checks", *words)
    stdin = config.model_dump_json().encode()
    timeout_s = operator.deadline_s(PROBE_S[tier])
    try:
        with operator.work("probing", "probe") as work:
            answer = _ProbeLines(work)
            done = trial.link.transport.run_into(
                argv, answer, stdin=stdin, timeout_s=timeout_s, max_bytes=MAX_OUTPUT_BYTES
            )
    except DeadlineError as error:
        return [_not_probed(error.message)]
    try:
        return list(parse_model(Report, answer.last_line).checks)
    except ValueError:
        said = done.last_error_line or "nothing"
        return [_not_probed(f"the probes gave no report (exit code {done.exit_code}): {said}")]


def _not_probed(why: str) -> CheckResult:
    return CheckResult(name="causality.probe", status="fail", message=f"not probed: {why}")


class _ProbeLines:
    """The answer of the probes as it arrives: lines that say which one begins, the Report last."""

    def __init__(self, work: Work) -> None:
        self._work = work
        self._rest = self._whole = b""

    @property
    def last_line(self) -> bytes:
        """The Report, once all has arrived: the last line that is not about a probe."""
        return self._rest.strip() or self._whole

    def __call__(self, piece: bytes) -> None:
        """Take the next bytes."""
        *lines, self._rest = (self._rest + piece).split(b"\n")
        for line in lines:
            try:
                begun = parse_model(ProbeBegun, line)
            except ValueError:  # the Report, or what the pod's start-up files print
                self._whole = line.strip() or self._whole
                continue
            self._work.done, self._work.total = begun.done, begun.total
            self._work.detail = begun.probe
