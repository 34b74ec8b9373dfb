"""The JSON documents between the operator and the agents on the pod: one request, one reply."""

from collections.abc import Mapping
from enum import IntEnum
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, TypeAdapter

from nsa_core.config.base import FrozenModel, TolerantModel
from nsa_core.config.training import MAX_RANKS, WatchdogLimits
from nsa_core.rundir.data_account import DataAccount
from nsa_core.rundir.events import Beginning, Event
from nsa_core.rundir.heartbeat import Heartbeat, Phase
from nsa_core.rundir.manifest import AttemptId, Parent, RunManifest
from nsa_core.rundir.process import ProcessIdentity
from nsa_core.rundir.redaction import FreeText
from nsa_core.rundir.status import RunEvidence, State
from nsa_ops.pod.processes import RunProcesses
from nsa_ops.pod.rank_evidence import KEPT_STEPS, RankEvidence
from nsa_ops.pod.rank_figures import MOST_COUNT, Age, KnownAge
from nsa_ops.pod.rules.verdict import Verdict
from nsa_ops.quantities import count_of

SignalName = Literal["USR1", "USR2", "TERM", "KILL"]
#: What an agent of an older version does not say.
_LIMITS = WatchdogLimits()
Doing = Literal["watching", "halting", "restarting", "done"]
Outcome = Literal["done", "already", "refused", "conflict", "not_found"]


class ReplyCode(IntEnum):
    """How an action ended; the same numbers as the operator's exit codes."""

    OK = 0
    USAGE = 2
    NOT_FOUND = 6
    CONFLICT = 7
    LOCAL_RESOURCE = 11


_CODES: Mapping[Outcome, ReplyCode] = {
    "done": ReplyCode.OK,
    "already": ReplyCode.OK,
    "refused": ReplyCode.CONFLICT,
    "conflict": ReplyCode.CONFLICT,
    "not_found": ReplyCode.NOT_FOUND,
}


class HaltAction(FrozenModel):
    """Put a stop request for the current attempt into the run directory.

    Attributes:
        attempt: Attempt that is meant; None for the current one.
        grace_s: Seconds the trainer has before a signal follows.
    """

    action: Literal["halt"] = "halt"
    run_dir: Path
    attempt: int | None = None
    reason: FreeText
    by: str = "operator"
    grace_s: float = 60.0
    save_checkpoint: bool = True


class SignalAction(FrozenModel):
    """Send a signal to the recorded trainer: USR1 stacks, USR2 save now, TERM stop, KILL end."""

    action: Literal["signal"] = "signal"
    run_dir: Path
    attempt: int | None = None
    signal: SignalName
    reason: FreeText = ""
    by: str = "operator"


class PrepareRunAction(FrozenModel):
    """Make the run directory with its manifest, whole or not at all."""

    action: Literal["prepare-run"] = "prepare-run"
    run_dir: Path
    manifest: RunManifest


class NextAttemptAction(FrozenModel):
    """Begin attempt `from_attempt` + 1 of a run whose attempt `from_attempt` has ended.

    Attributes:
        from_attempt: The attempt that ended; asking again after it was done changes nothing.
        changes: Fields of the manifest that differ in the new attempt.
    """

    action: Literal["next-attempt"] = "next-attempt"
    run_dir: Path
    from_attempt: int
    changes: dict[str, Any] = {}
    by: str = "operator"


class JoinAttemptAction(FrozenModel):
    """Make this pod take part in an attempt of several pods, which pod 0 has begun.

    Attributes:
        manifest: That of pod 0, with the facts and the place of this pod.
    """

    action: Literal["join-attempt"] = "join-attempt"
    run_dir: Path
    manifest: RunManifest


class SetAsideAction(FrozenModel):
    """Rename a run directory of pod 1, 2 … so that pod 0's can be restored in its place."""

    action: Literal["set-aside"] = "set-aside"
    run_dir: Path


AnyAction = (
    HaltAction
    | SignalAction
    | PrepareRunAction
    | NextAttemptAction
    | JoinAttemptAction
    | SetAsideAction
)
Action = Annotated[AnyAction, Field(discriminator="action")]
ACTION: TypeAdapter[AnyAction] = TypeAdapter(Action)


class Reply(TolerantModel):
    """What an action did.

    Attributes:
        code: 0 when it is done or was done before; else why not.
        outcome: `already` says that nothing was left to do.
        attempt: Attempt of the run after the action.
        manifest: Manifest after the action, for `prepare-run` and `next-attempt`.
    """

    schema_version: int = 1
    action: str
    code: ReplyCode
    outcome: Outcome
    message: str
    hint: str = ""
    attempt: int | None = None
    manifest: RunManifest | None = None

    @classmethod
    def to(
        cls,
        asked: AnyAction,
        outcome: Outcome,
        message: str,
        hint: str = "",
        *,
        code: ReplyCode | None = None,
        attempt: int | None = None,
        manifest: RunManifest | None = None,
    ) -> Self:
        """The answer to an action; an outcome has its code, and a manifest its attempt."""
        return cls(
            action=asked.action,
            code=_CODES[outcome] if code is None else code,
            outcome=outcome,
            message=message,
            hint=hint,
            attempt=manifest.attempt if manifest is not None else attempt,
            manifest=manifest,
        )


class Offsets(FrozenModel):
    """Where the last probe of a run stopped reading, in bytes; 0 reads from the start.

    A negative offset asks for the newest records only.
    """

    heartbeats: int = -1
    events: int = -1


OFFSETS: TypeAdapter[dict[str, Offsets]] = TypeAdapter(dict[str, Offsets])


class ManifestSummary(TolerantModel):
    """What a list of runs shows of a manifest.

    Attributes:
        ranks_per_pod: 0 in the answer of an older version.
        straggler_factor: As in `WatchdogLimits`, like what follows; for ranks of several pods.
    """

    run_id: str
    attempt: int
    attempt_id: AttemptId = ""
    recipe: str
    profile: str
    config_sha256: str
    code_id: str
    code_commit: str
    steps: int
    tokens_per_step: int
    save_every: int
    created_unix_s: float
    parent: Parent | None = None
    pod_id: str = ""
    node_rank: int = Field(0, ge=0, le=MOST_COUNT)
    num_pods: int = Field(1, ge=1, le=MOST_COUNT)
    ranks_per_pod: int = Field(0, ge=0, le=MAX_RANKS)
    straggler_factor: float = Field(_LIMITS.straggler_factor, gt=1, allow_inf_nan=False)
    straggler_records: int = Field(_LIMITS.straggler_records, ge=1, le=KEPT_STEPS)


class CheckpointFact(TolerantModel):
    """One folder under checkpoints/.

    Attributes:
        step: Optimizer steps done, from the name of the folder.
        whole: It has a manifest and nothing is known against it; this probe hashes nothing.
        created_unix_s: From the manifest.
        damage: What is known against it: a file is missing or short, or the trainer rejected it.
    """

    name: str
    step: int
    size_bytes: int
    whole: bool
    created_unix_s: float | None = None
    damage: str = ""


class WatchdogRecord(TolerantModel):
    """Content of watchdog.json.

    Attributes:
        identity: The watchdog's process.
        why: One sentence about `doing`.
        restarts: Restarts it made by itself.
        best_tokens_per_s: Best median rate of all attempts so far, which later ones are held
            against; None if not known.
        ts: Unix seconds.
    """

    schema_version: int = 1
    run_id: str
    attempt: int
    identity: ProcessIdentity
    verdict: Verdict
    doing: Doing
    why: str = ""
    restarts: int = 0
    best_tokens_per_s: float | None = None
    ts: float


class PhaseUse(TolerantModel):
    """How much of its patience the current phase has used.

    Attributes:
        still_s: Seconds since anything moved in it.
        limit_s: Seconds after which the watchdog halts; None where it only warns.
        warn_s: Seconds after which it warns.
        rank: The rank that is judged, where others wait for it; else None.
    """

    phase: Phase
    still_s: KnownAge
    limit_s: Age = None
    warn_s: KnownAge
    rank: int | None = Field(None, ge=0, le=MOST_COUNT)


class RunFigures(TolerantModel):
    """The newest figures of an attempt, each from the newest record that carries it.

    Attributes:
        record: Newest record of training steps; None before the first.
        gates: Newest record with figures of the gates; they are written less often.
        usual_tokens_per_s: The rate that is normal for this run.
        pace_s: Wall seconds a step over the newest records, with validation and checkpoints.
        phase: Patience of the phase; None once the attempt has ended.
    """

    record: Heartbeat | None = None
    gates: Heartbeat | None = None
    usual_tokens_per_s: float | None = None
    pace_s: float | None = None
    phase: PhaseUse | None = None


class RunNews(TolerantModel):
    """The lines that are new since the last probe; both offsets are -1 where none are wanted.

    Attributes:
        beats: Heartbeats of all attempts.
        beats_offset: Where the next probe continues.
        beats_more: There was more than one probe may carry.
        beats_torn: Lines that did not parse.
        events_begin: Byte at which the events begin in the file; 0 if nothing lies before them.
    """

    beats: list[Heartbeat] = []
    beats_offset: int = 0
    beats_more: bool = False
    beats_torn: int = 0
    events: list[Event] = []
    events_begin: int = 0
    events_offset: int = 0
    events_more: bool = False


class PodShare(TolerantModel):
    """What one pod of a run of several shows of its part.

    Attributes:
        state: Its own; None where it does not answer, or is at another attempt.
        why: The evidence for it, or why there is none.
    """

    pod: str
    node_rank: int
    state: State | None = None
    why: str = ""


class RunReport(RunEvidence, RunNews):
    """Everything one probe says about one run: the records of the pod as they are, and a verdict.

    Attributes:
        why: The evidence for the state in one sentence.
        flags: `stale`, `unwatched`, and a line for each file that cannot be read.
        anomaly: Rule of the last anomaly; empty if there was none.
        figures: What people look at first; empty from an agent of an older version.
        data: What was dropped of the data, and why, in brief; None before it was opened.
        beginnings: Steps from which attempts continued; empty from an agent of an older version.
        ranks: Every rank of this pod, where the run has several; those of several pods go together.
        pods: Every pod of a run of several; filled in on the laptop.
    """

    run_id: str
    run_dir: str
    manifest: ManifestSummary
    state: State
    why: str
    flags: list[str] = []
    processes: RunProcesses | None = None
    verdict: Verdict
    watchdog: WatchdogRecord | None = None
    log_bytes: int = 0
    checkpoints: list[CheckpointFact] = []
    disk_free_bytes: int | None = None
    anomaly: str = ""
    figures: RunFigures = RunFigures()
    data: DataAccount | None = None
    beginnings: list[Beginning] = []
    ranks: tuple[RankEvidence, ...] = Field((), max_length=MAX_RANKS)
    pods: list[PodShare] = []


def keep_own(report: RunReport, node_rank: int, ranks_per_pod: int) -> RunReport:
    """What a pod says of its own ranks, each once and in order; what it says of others is a flag.

    Only the laptop knows how the pods are called and which there are, so a pod cannot say it.
    """
    first = node_rank * ranks_per_pod
    own = {
        rank.rank: rank.model_copy(update={"pod": ""})
        for rank in report.ranks
        if first <= rank.rank < first + ranks_per_pod
    }
    left_out = len(report.ranks) - len(own)
    has = f"ranks {first} to {first + ranks_per_pod - 1}"
    flag = (
        f"it has {has}, and {count_of(left_out, 'rank')} that it shows beside them count for none"
    )
    values = {
        "pods": [],
        "ranks": tuple(own[number] for number in sorted(own)),
        "flags": [*report.flags, *([flag] if left_out else [])],
    }
    return report.model_copy(update=values)


class RunProblem(TolerantModel):
    """A directory that is no run, or one whose manifest cannot be used."""

    run_id: str
    message: str


class ProbeDocument(TolerantModel):
    """Answer of `python -m nsa_ops.pod.probe`.

    Attributes:
        boot_id: The kernel's random id of this boot.
        runs: One report a run, newest run id first.
        problems: Runs that were asked for, or directories that were found, and cannot be read.
    """

    schema_version: int = 1
    pod_unix_s: float
    boot_id: str
    runs: list[RunReport] = []
    problems: list[RunProblem] = []
