"""The JSON documents between the operator and the agents on the pod: one request, one reply."""

from enum import IntEnum
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter

from nsa_core.config.base import FrozenModel, TolerantModel
from nsa_core.rundir.attempt_id import AttemptId
from nsa_core.rundir.beginnings import Beginning
from nsa_core.rundir.data_account import DataAccount
from nsa_core.rundir.events import Event
from nsa_core.rundir.exit import ExitRecord
from nsa_core.rundir.halt import HaltRequest
from nsa_core.rundir.heartbeat import Heartbeat
from nsa_core.rundir.manifest import Parent, RunManifest
from nsa_core.rundir.process import ProcessIdentity
from nsa_core.rundir.redaction import FreeText
from nsa_core.rundir.status import State
from nsa_ops.pod.figures import RunFigures
from nsa_ops.pod.processes import RunProcesses
from nsa_ops.pod.rules.verdict import Verdict

SignalName = Literal["USR1", "USR2", "TERM", "KILL"]


class ReplyCode(IntEnum):
    """How an action ended; the same numbers as the operator's exit codes."""

    OK = 0
    USAGE = 2
    NOT_FOUND = 6
    CONFLICT = 7
    LOCAL_RESOURCE = 11


class HaltAction(FrozenModel):
    """Put a stop request for the current attempt into the run directory.

    Attributes:
        run_dir: Run directory on the pod.
        attempt: Attempt that is meant; None for the current one.
        reason: Why, in one line.
        by: Who asks.
        grace_s: Seconds the trainer has before it is told by signal.
        save_checkpoint: Save before stopping.
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
        run_dir: Run directory on the pod.
        from_attempt: The attempt that ended; asking again after it was done changes nothing.
        changes: Fields of the manifest that differ in the new attempt.
        by: Who asks.
    """

    action: Literal["next-attempt"] = "next-attempt"
    run_dir: Path
    from_attempt: int
    changes: dict[str, Any] = {}
    by: str = "operator"


Action = Annotated[
    HaltAction | SignalAction | PrepareRunAction | NextAttemptAction,
    Field(discriminator="action"),
]
ACTION: TypeAdapter[HaltAction | SignalAction | PrepareRunAction | NextAttemptAction] = TypeAdapter(
    Action
)


class Reply(TolerantModel):
    """What an action did.

    Attributes:
        action: The action that was asked for.
        code: 0 when it is done or was done before; else why not.
        outcome: `done`, `already` (nothing was left to do), `refused`, `conflict`, `not_found`.
        message: One line.
        hint: What to do about it; empty when all is well.
        attempt: Attempt of the run after the action.
        manifest: Manifest after the action, for `prepare-run` and `next-attempt`.
    """

    schema_version: int = 1
    action: str
    code: ReplyCode
    outcome: Literal["done", "already", "refused", "conflict", "not_found"]
    message: str
    hint: str = ""
    attempt: int | None = None
    manifest: RunManifest | None = None


class Offsets(FrozenModel):
    """Where the last probe of a run stopped reading, in bytes; 0 reads from the start.

    A negative offset asks for the newest records only.
    """

    heartbeats: int = -1
    events: int = -1


OFFSETS: TypeAdapter[dict[str, Offsets]] = TypeAdapter(dict[str, Offsets])


class ManifestSummary(TolerantModel):
    """What a list of runs shows of a manifest."""

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


class CheckpointFact(TolerantModel):
    """One folder under checkpoints/.

    Attributes:
        name: Folder.
        step: Optimizer steps done, from the name.
        size_bytes: Bytes of its files.
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
        run_id: Run.
        attempt: Attempt it watches.
        identity: The watchdog's process.
        verdict: Its last verdict.
        doing: `watching`, `halting`, `restarting` or `done`.
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
    doing: Literal["watching", "halting", "restarting", "done"]
    why: str = ""
    restarts: int = 0
    best_tokens_per_s: float | None = None
    ts: float


class RunReport(TolerantModel):
    """Everything one probe says about one run.

    Attributes:
        run_id: Run.
        run_dir: Its directory on the pod.
        manifest: What was launched.
        state: Derived state.
        why: The evidence for it in one sentence.
        flags: `stale`, `unwatched`, and a line for each file that cannot be read.
        processes: Recorded runner and trainer of this attempt.
        trainer_alive: The recorded trainer lives; None if none was recorded.
        runner_alive: The same for the runner.
        watchdog_alive: The same for the watchdog.
        same_boot: The recorded processes belong to this boot.
        last_beat: Newest heartbeat of rank 0 in this attempt.
        beat_age_s: Its age by the pod's clock.
        exit: How the attempt ended.
        halt: Stop request that means this attempt.
        verdict: What the rules say now.
        watchdog: What the watchdog wrote last.
        beats: Heartbeats since the offset, of all attempts.
        beats_offset: Where the next probe goes on.
        beats_more: There was more than one probe may carry.
        beats_torn: Lines that did not parse.
        events: Events since the offset.
        events_begin: Byte at which they begin in the file; 0 if nothing lies before them.
        events_offset: Where the next probe goes on.
        events_more: There was more.
        log_bytes: Size of training.log.
        checkpoints: Folders under checkpoints/, newest step first.
        disk_free_bytes: Free on the file system of the run.
        anomaly: Rule of the last anomaly; empty if there was none.
        figures: What people look at first; empty from an agent of an older version.
        data: What was dropped of the data, and why, in brief; None before it was opened.
        beginnings: Where attempts went on; empty from an agent of an older version.
    """

    run_id: str
    run_dir: str
    manifest: ManifestSummary
    state: State
    why: str
    flags: list[str] = []
    processes: RunProcesses | None = None
    trainer_alive: bool | None = None
    runner_alive: bool | None = None
    watchdog_alive: bool | None = None
    same_boot: bool = True
    last_beat: Heartbeat | None = None
    beat_age_s: float | None = None
    exit: ExitRecord | None = None
    halt: HaltRequest | None = None
    verdict: Verdict
    watchdog: WatchdogRecord | None = None
    beats: list[Heartbeat] = []
    beats_offset: int = 0
    beats_more: bool = False
    beats_torn: int = 0
    events: list[Event] = []
    events_begin: int = 0
    events_offset: int = 0
    events_more: bool = False
    log_bytes: int = 0
    checkpoints: list[CheckpointFact] = []
    disk_free_bytes: int | None = None
    anomaly: str = ""
    figures: RunFigures = RunFigures()
    data: DataAccount | None = None
    beginnings: list[Beginning] = []


class RunProblem(TolerantModel):
    """A directory that is no run, or one whose manifest cannot be used."""

    run_id: str
    message: str


class ProbeDocument(TolerantModel):
    """Answer of `python -m nsa_ops.pod.probe`.

    Attributes:
        pod_unix_s: The pod's clock.
        boot_id: The kernel's random id of this boot.
        runs: One report a run, newest run id first.
        problems: Runs that were asked for, or directories that were found, and cannot be read.
    """

    schema_version: int = 1
    pod_unix_s: float
    boot_id: str
    runs: list[RunReport] = []
    problems: list[RunProblem] = []
