"""The tmux windows of a run on its pod: one that trains and one that watches."""

from collections.abc import Sequence

from nsa_ops.context import PodLink, RunHandle
from nsa_ops.errors import LocalResourceError, StateConflictError, VerificationError
from nsa_ops.machine.host import HostFacts
from nsa_ops.machine.judge_host import TOOL_HINTS
from nsa_ops.plan import Step
from nsa_ops.remote.tmux import (
    Window,
    is_duplicate_session,
    is_no_server,
    parse_windows,
    session_name,
)
from nsa_ops.remote.transport import QUICK_S, Completed

TRAINER_MODULE = "nsa_core.train"
TRAIN = "train"
WATCHDOG = "watchdog"
#: Another command may make the session between our look and our start; its windows come next.
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
    for _ in range(_TRIES):
        if _start_missing(run, module):
            return
    message = f"tmux on pod `{run.pod}` refuses a session of `{run.run_id}` and lists none"
    raise StateConflictError(message, hint=f"Try `nsa-ops preflight {run.pod}`")


def _start_missing(run: RunHandle, module: str) -> bool:
    """Start what the list lacks; False if somebody else made the session meanwhile: list again."""
    names = {window.name for window in list_windows(run)}
    train, watchdog = train_command(run, module), watchdog_command(run, module)
    session, folder, tmux = session_name(run.run_id), str(run.run_dir), run.link.tmux
    if not names:
        done = _tmux(run, tmux.new_session(session, TRAIN, folder, train))
        if done.exit_code:
            return False
    elif TRAIN not in names:
        _tmux(run, tmux.new_window(session, TRAIN, folder, train))
    if WATCHDOG not in names:
        try:
            _tmux(run, tmux.new_window(session, WATCHDOG, folder, watchdog))
        except StateConflictError:
            if not list_windows(run):  # the session went with its first window
                raise runner_ended(run) from None
            raise
    return True


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
    """Start the watchdog of a run that nobody watches; a second one would refuse by its lock."""
    tmux, names = run.link.tmux, {window.name for window in list_windows(run)}
    start = tmux.new_window if names else tmux.new_session
    command = watchdog_command(run, module)
    _tmux(run, start(session_name(run.run_id), WATCHDOG, str(run.run_dir), command))


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


def _tmux(run: RunHandle, argv: Sequence[str]) -> Completed:
    done = run.link.transport.run(argv, timeout_s=QUICK_S)
    if done.exit_code == 0 or is_duplicate_session(done.stderr.decode(errors="replace")):
        return done
    message = f"tmux on pod `{run.pod}` did not start it: {done.last_error_line}"
    raise StateConflictError(message, hint=f"Try `nsa-ops preflight {run.pod}`")
