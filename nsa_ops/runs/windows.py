"""The tmux windows of a run on its pod: one that trains and one that watches."""

from collections.abc import Callable, Sequence

from nsa_ops.context import PodLink, RunHandle
from nsa_ops.errors import LocalResourceError, StateConflictError, VerificationError
from nsa_ops.machine.host import HostFacts
from nsa_ops.machine.judge_host import TOOL_HINTS
from nsa_ops.plan import Step
from nsa_ops.remote.tmux import (
    Window,
    is_no_server,
    is_session_changed,
    parse_windows,
    session_name,
)
from nsa_ops.remote.transport import QUICK_S

TRAINER_MODULE = "nsa_core.train"
TRAIN = "train"
WATCHDOG = "watchdog"
#: Another command may make the session between our look and our start, or its last window may
#: end, and with it the server: the next look shows it.
_TRIES = 3
_LOG_END_BYTES = "4096"
#: Output goes to a file of the run: a window dies with its process, the file does not.
_INTO_FILE = 'exec "$@" >>"$0" 2>&1'


def train_command(run: RunHandle, module: str) -> tuple[str, ...]:
    """What the window `train` runs: the runner, which starts the trainer in its own session."""
    return _into_file(run, "training.log", "nsa_ops.pod.runner", module)


def watchdog_command(run: RunHandle, module: str) -> tuple[str, ...]:
    """What the window `watchdog` runs."""
    return _into_file(run, "watchdog.log", "nsa_ops.pod.watchdog", module)


def _into_file(run: RunHandle, log: str, program: str, module: str) -> tuple[str, ...]:
    argv = run.module(program, "--run-dir", str(run.run_dir), "--module", module)
    return ("sh", "-c", _INTO_FILE, str(run.run_dir / log), *argv)


def start_step(run: RunHandle, module: str) -> Step:
    """The step of a plan that starts both."""
    detail = f"tmux session {session_name(run.run_id)}, windows train and watchdog"
    return Step("start training", detail, command=train_command(run, module))


def require_tmux(link: PodLink, facts: HostFacts) -> None:
    """Refuse a pod on which no run could be started, before anything is written."""
    if not facts.tools.get("tmux"):
        message = f"Pod `{link.record.name}` has no tmux on its PATH, in which runs are started"
        raise LocalResourceError(message, hint=TOOL_HINTS["tmux"])


def start_session(run: RunHandle, module: str = TRAINER_MODULE) -> None:
    """Start what is not there yet: the session, the runner in it, the watchdog in it.

    Asking twice starts nothing twice: the runner and the watchdog hold locks of the run.

    Raises:
        StateConflictError: If tmux does not start them.
        VerificationError: If the runner ended as soon as it was started.
    """
    _until_started(run, lambda: _start_missing(run, module))


def _start_missing(run: RunHandle, module: str) -> str:
    """Start what the list lacks; the words of tmux if the session came or went since the list."""
    names = {window.name for window in list_windows(run)}
    if {TRAIN, WATCHDOG} <= names:
        return ""
    if TRAIN not in names:
        refusal = _open(run, TRAIN, train_command(run, module), in_session=bool(names))
        if refusal:
            return refusal
    # A watchdog beside no runner is of an attempt that ended, and may be about to leave: the new
    # one waits for its lock, and ends if the old one stays.
    refusal = _open(run, WATCHDOG, watchdog_command(run, module), in_session=True)
    if refusal and not list_windows(run):  # the session went with its first window
        raise runner_ended(run)
    return refusal


def runner_ended(run: RunHandle) -> VerificationError:
    """The end of a runner that has not even recorded itself, in the last words of its log."""
    argv = ("tail", "-c", _LOG_END_BYTES, str(run.run_dir / "training.log"))
    done = run.link.transport.run(argv, timeout_s=QUICK_S)
    lines = [line.strip() for line in done.text.splitlines() if line.strip()]
    said = f"training.log ends with: {lines[-1]}" if lines else "training.log is empty"
    message = f"The runner of `{run.run_id}` ended as soon as it was started; {said}"
    hint = f"See `nsa-ops logs {run.run_id}`; its interpreter is `{run.link.record.python}`"
    return VerificationError(message, hint=hint)


def start_watchdog(run: RunHandle, module: str = TRAINER_MODULE) -> None:
    """Start the watchdog of a run that nobody watches; a second one would refuse by its lock.

    Raises:
        StateConflictError: If tmux does not start it.
    """
    command = watchdog_command(run, module)
    _until_started(run, lambda: _open(run, WATCHDOG, command, in_session=bool(list_windows(run))))


def _until_started(run: RunHandle, start: Callable[[], str]) -> None:
    refusal = ""
    for _ in range(_TRIES):
        refusal = start()
        if not refusal:
            return
    raise _not_started(run, refusal)


def list_windows(run: RunHandle) -> list[Window]:
    """Windows of the run's session; none if there is no session or no tmux server.

    Raises:
        LocalResourceError: If tmux cannot be asked.
        StateConflictError: If a run of the same id in another directory has the session.
    """
    tmux = run.link.tmux
    done = run.link.transport.run(tmux.list_windows(), timeout_s=QUICK_S)
    stderr = done.stderr.decode(errors="replace")
    if done.exit_code != 0 and not is_no_server(stderr):
        message = f"tmux on pod `{run.pod}` cannot be asked: {done.last_error_line}"
        raise LocalResourceError(message, hint=f"Try `nsa-ops preflight {run.pod}`")
    session = session_name(run.run_id)
    windows = [window for window in parse_windows(done.text) if window.session == session]
    foreign = [window for window in windows if not window.is_of(str(run.run_dir))]
    if foreign:
        message = (
            f"tmux on the machine of pod `{run.pod}` has a session `{session}` of "
            f"`{foreign[0].folder}`, which is not the directory of `{run.run_id}` on this pod"
        )
        end = f"`tmux -L {tmux.socket} kill-session -t ={session}`"
        raise StateConflictError(message, hint=f"Halt that run, or end it: {end}")
    return windows


def _open(run: RunHandle, window: str, command: Sequence[str], *, in_session: bool) -> str:
    """Run a command in a window of the run's session, or in the first one of a new session.

    Returns:
        Nothing, or the words of tmux if the session has come or gone since it was looked for.

    Raises:
        StateConflictError: If tmux refuses for any other reason.
    """
    tmux = run.link.tmux
    argv = (tmux.new_window if in_session else tmux.new_session)(
        session_name(run.run_id), window, str(run.run_dir), command
    )
    done = run.link.transport.run(argv, timeout_s=QUICK_S)
    if done.exit_code == 0:
        return ""
    if is_session_changed(done.stderr.decode(errors="replace")):
        return done.last_error_line
    raise _not_started(run, done.last_error_line)


def _not_started(run: RunHandle, refusal: str) -> StateConflictError:
    message = f"tmux on pod `{run.pod}` did not start `{run.run_id}`: {refusal}"
    return StateConflictError(message, hint=f"Try `nsa-ops preflight {run.pod}`")
