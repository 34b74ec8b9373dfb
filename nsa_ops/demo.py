"""The whole path on this machine: pod, preflight, launch, halt, exact resume, backup, report."""

import json
import shlex
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from nsa_core.rundir.layout import RunDir
from nsa_ops.backup.backups import backup_folder
from nsa_ops.backup.pull import execute_pull, plan_pull
from nsa_ops.backup.verification import check_verified, verify_backup
from nsa_ops.configure import RunChoice
from nsa_ops.context import Operator
from nsa_ops.errors import LocalResourceError, RefusedError, StateConflictError, VerificationError
from nsa_ops.pod.messages import RunReport
from nsa_ops.pod.processes import read_processes
from nsa_ops.pod.trainer_group import is_trainer_running
from nsa_ops.pods.known import execute_add, plan_add
from nsa_ops.preflight.preflight import run_preflight
from nsa_ops.quantities import count_of
from nsa_ops.report.prove import RepeatedLosses, await_replay, find_replay
from nsa_ops.report.record import parse_samples
from nsa_ops.report.write import WrittenReport, write_report
from nsa_ops.runs.choose import find_run
from nsa_ops.runs.halt import execute_halt, plan_halt
from nsa_ops.runs.launch import LaunchRequest, execute_launch, plan_launch
from nsa_ops.runs.resume import execute_resume, plan_resume
from nsa_ops.runs.wait import ENDED, describe_progress, poll
from nsa_ops.settings import Settings

POD = "this-machine"
PROFILE = "cpu"
RECIPE = "tiny-cpu"
STEPS = 160
HALT_AT = 65
#: The halt comes between two checkpoints, so that the resume has steps to do again.
SAVE_EVERY = 50
MARKER = "nsa-demo.json"
_RUN_S = 600.0


@dataclass(frozen=True)
class DemoPart:
    """One thing the demo did.

    Attributes:
        found: What came of it, in one sentence.
    """

    name: str
    command: str
    found: str
    seconds: float


@dataclass
class Demo:
    """What the demo has shown so far, and at its end.

    Attributes:
        folder: Everything the demo made.
        replay: Losses of the steps that were done twice.
        bits_per_byte: On held-out text, before the first step and after the last.
    """

    folder: Path
    run_id: str = ""
    parts: list[DemoPart] = field(default_factory=list)
    replay: RepeatedLosses | None = None
    bits_per_byte: tuple[float, float] | None = None
    sample: str = ""
    page: Path | None = None
    seconds: float = 0.0


class _Stage:
    """Keeps the time of each part and reports its outcome."""

    def __init__(self, operator: Operator, demo: Demo) -> None:
        self.operator = operator
        self.demo = demo

    @contextmanager
    def part(self, name: str, command: str) -> Iterator[Callable[[str], None]]:
        """Do one part; the body says what it found."""
        self.operator.tell("")
        self.operator.tell(f"{name}: {command}")
        began_s = self.operator.clock.monotonic_s()
        said: list[str] = []
        yield said.append
        seconds = round(self.operator.clock.monotonic_s() - began_s, 1)
        found = "; ".join(said)
        self.demo.parts.append(DemoPart(name, command, found, seconds))
        self.operator.tell(f"  {found} ({seconds:g} s)")


def prepare_folder(folder: Path) -> None:
    """Make the demo's folder; an earlier demo in it is replaced, anything else is not touched.

    Raises:
        StateConflictError: If the folder holds something that no demo made.
        LocalResourceError: If it cannot be made.
    """
    try:
        if folder.exists() and any(folder.iterdir()):
            if not (folder / MARKER).is_file():
                message = f"`{folder}` exists and is not an earlier demo"
                raise StateConflictError(message, hint="Name another folder with `--dir`")
            _refuse_running(folder)
            shutil.rmtree(folder)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / MARKER).write_text(
            json.dumps({"made_by": "nsa-ops demo"}) + "\n", encoding="utf-8"
        )
    except OSError as error:
        message = f"The demo cannot use `{folder}`: {error.strerror}"
        raise LocalResourceError(message, hint="Name another folder with `--dir`") from error


def _refuse_running(folder: Path) -> None:
    for path in (folder / "pod" / "runs").glob("*"):
        run = RunDir(path)
        if is_trainer_running(run, read_processes(run)):
            message = f"The demo in `{folder}` still trains run `{path.name}`"
            state = f"NSA_OPS_STATE_DIR={folder / 'state'}"
            hint = f"End it with `{state} nsa-ops halt {path.name}`"
            raise StateConflictError(message, hint=hint)


def demo_settings(settings: Settings, folder: Path) -> Settings:
    """Settings with a registry in the demo's folder, and without the shell's NSA_* variables."""
    return replace(
        settings,
        state_dir=folder / "state",
        values=settings.values.model_copy(update={"pod": "", "profile": "", "recipe": ""}),
        training_environment={},
    )


def run_demo(operator: Operator, folder: Path) -> Demo:
    """Walk the whole path once."""
    demo = Demo(folder)
    began_s = operator.clock.monotonic_s()
    stage = _Stage(operator, demo)
    state = shlex.quote(str(operator.settings.state_dir))
    operator.tell("each part names the command that does the same, to be typed after")
    operator.tell(f"  export NSA_OPS_STATE_DIR={state}")
    _check_machine(stage, folder)
    _launch(stage)
    _halt(stage)
    _resume(stage)
    _finish(stage)
    backup = _back_up(stage)
    _read_results(demo, RunDir(backup))
    _report(stage, backup)
    demo.seconds = round(operator.clock.monotonic_s() - began_s, 1)
    return demo


def _check_machine(stage: _Stage, folder: Path) -> None:
    operator = stage.operator
    address = f"local:{folder / 'pod'}"
    with stage.part("pod", f"nsa-ops pod add {POD} {address} --profile {PROFILE}") as found:
        pod, plan = plan_add(operator, POD, address, profile=PROFILE)
        found(f"this machine is pod `{execute_add(operator, pod, plan).name}`")
    with stage.part("preflight", f"nsa-ops preflight {POD}") as found:
        report = run_preflight(operator, POD, _choice(), {})
        if not report.is_green:
            message = f"Preflight is red: {', '.join(report.blocking)}"
            raise RefusedError(message, hint="See each check with `nsa-ops preflight`")
        names = [check.name for check in report.report.checks if check.status == "pass"]
        found(f"{count_of(len(names), 'check')} passed, verdict {report.verdict}")
        for name in ("causality.perturbation", "causality.sentinel"):
            check = next(one for one in report.report.checks if one.name == name)
            found(f"{name}: {check.measured}")


def _choice() -> RunChoice:
    sets = (
        f"schedule.steps={STEPS}",
        "batch.micro_batch=6",
        f"checkpoint.save_every={SAVE_EVERY}",
        "telemetry.log_every=1",
    )
    return RunChoice(RECIPE, PROFILE, sets)


def _launch(stage: _Stage) -> None:
    operator, demo = stage.operator, stage.demo
    flags = " ".join(f"--set {one}" for one in _choice().sets)
    command = f"nsa-ops launch --profile {PROFILE} --recipe {RECIPE} {flags}"
    with stage.part("launch", command) as found:
        request = LaunchRequest(_choice(), POD, command=("nsa-ops", "demo"))
        launched = execute_launch(operator, plan_launch(operator, request))
        demo.run_id = launched.run_id
        found(
            f"run {launched.run_id}: first heartbeat after {launched.first_beat_after_s or 0:.1f} s"
        )
    with stage.part("watch", f"nsa-ops watch {demo.run_id}") as found:
        report = _await(stage, lambda seen: _step(seen) >= HALT_AT, f"step {HALT_AT}")
        found(f"{report.state}: {describe_progress(report)}")


def _halt(stage: _Stage) -> None:
    operator, run_id = stage.operator, stage.demo.run_id
    with stage.part("halt", f"nsa-ops halt {run_id}") as found:
        reason = "the demo halts half-way"
        asked, _ = plan_halt(operator, run_id, reason)
        halted = execute_halt(operator, asked, reason)
        if halted.checkpoint is None:
            message = f"Run `{run_id}` halted without a whole checkpoint: {halted.why}"
            raise VerificationError(message, hint=f"See `nsa-ops logs {run_id}`")
        found(
            f"halted at step {halted.step}; every hash of checkpoint {halted.checkpoint.step} holds"
        )


def _resume(stage: _Stage) -> None:
    operator, demo = stage.operator, stage.demo
    with stage.part("resume", f"nsa-ops resume {demo.run_id} --prove") as found:
        path = find_replay(operator, demo.run_id, path="", sets=())
        planned = plan_resume(operator, demo.run_id, path=path)
        demo.replay = await_replay(operator, planned, execute_resume(operator, planned)).replay
        found(
            f"continued from step {planned.checkpoint.step if planned.checkpoint else 0}; the "
            f"losses of steps {demo.replay.first_step} to {demo.replay.last_step} came out the "
            "same to the last digit"
        )


def _finish(stage: _Stage) -> None:
    with stage.part("watch", f"nsa-ops watch {stage.demo.run_id}") as found:
        report = _await(stage, lambda seen: seen.state in ENDED, "the end")
        if report.state != "finished":
            message = f"Run `{report.run_id}` is {report.state}: {report.why}"
            raise VerificationError(message, hint=f"See `nsa-ops logs {report.run_id}`")
        found(f"{report.state}: {describe_progress(report)}")


def _back_up(stage: _Stage) -> Path:
    operator, run_id = stage.operator, stage.demo.run_id
    with stage.part("backup", f"nsa-ops backup pull {run_id}") as found:
        folder = backup_folder(operator, run_id)
        link = find_run(operator, run_id).link
        pulled = execute_pull(operator, link, plan_pull(link, run_id, folder, "latest"))
        files = count_of(pulled.num_files, "file")
        found(f"checkpoint {pulled.newest_step} and {files} in `{pulled.folder}`")
    with stage.part("verify", f"nsa-ops backup verify {run_id} --load") as found:
        receipts = operator.store.receipts()
        verification = verify_backup(folder.root, load=True, receipts=receipts)
        check_verified(verification)
        files = count_of(verification.num_files, "file")
        found(f"{files} hashed, {count_of(verification.num_tensors, 'tensor')} opened")
    return folder.root


def _report(stage: _Stage, backup: Path) -> None:
    demo, now_s = stage.demo, stage.operator.clock.unix_s()
    with stage.part("report", f"nsa-ops report {demo.run_id} --out {demo.folder}") as found:
        written: WrittenReport = write_report(backup, out=demo.folder, now_unix_s=now_s)
        demo.page = written.page
        found(f"{written.outcome} Page: {written.page}")


def _read_results(demo: Demo, run: RunDir) -> None:
    """Held-out bits per byte and the generated text, as the run wrote them."""
    metrics: dict[str, Any] = json.loads(run.metrics.read_text(encoding="utf-8"))
    first, last = metrics["validation_first"], metrics["validation_last"]
    demo.bits_per_byte = (first["bits_per_byte"], last["bits_per_byte"])
    drawn = parse_samples(json.loads(run.samples.read_text(encoding="utf-8")))[-1]
    demo.sample = drawn.prompt + drawn.text


def _await(stage: _Stage, is_done: Callable[[RunReport], bool], what: str) -> RunReport:
    found = find_run(stage.operator, stage.demo.run_id)
    return poll(
        stage.operator, found.run,
        lambda report: is_done(report) or report.state in ENDED, _RUN_S, what,
    )  # fmt: skip


def _step(report: RunReport) -> int:
    return report.last_beat.step if report.last_beat else 0
