"""The tmux session of a run on its pod: a window that trains and a window that watches."""

from collections.abc import Sequence

from nsa_ops.context import PodLink
from nsa_ops.errors import LocalResourceError, StateConflictError, VerificationError
from nsa_ops.machine.host import HostFacts
from nsa_ops.machine.judge_host import TOOL_HINTS
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
#: Output goes to a file of the run: a window dies with its process, the file does not.
_LAST_WORDS_BYTES = "4096"
_INTO_FILE = 'exec "$@" >>"$0" 2>&1'


def train_command(link: PodLink, code_id: str, run_id: str, module: str) -> tuple[str, ...]:
    """What the window `train` runs: the runner, which starts the trainer in its own session."""
    run_dir = link.run_dir(run_id)
    words = ("--run-dir", str(run_dir), "--module", module)
    runner = link.module(code_id, "nsa_ops.pod.runner", *words)
    return ("sh", "-c", _INTO_FILE, str(run_dir / "training.log"), *runner)


def watchdog_command(link: PodLink, code_id: str, run_id: str, module: str) -> tuple[str, ...]:
    """What the window `watchdog` runs."""
    run_dir = link.run_dir(run_id)
    words = ("--run-dir", str(run_dir), "--module", module)
    watchdog = link.module(code_id, "nsa_ops.pod.watchdog", *words)
    return ("sh", "-c", _INTO_FILE, str(run_dir / "watchdog.log"), *watchdog)


def require_tmux(link: PodLink, facts: HostFacts) -> None:
    """Refuse a pod on which no run could be started, before anything is written.

    Raises:
        LocalResourceError: If it has no tmux.
    """
    if not facts.tools.get("tmux"):
        message = f"Pod `{link.record.name}` has no tmux on its PATH, in which runs are started"
        raise LocalResourceError(message, hint=TOOL_HINTS["tmux"])


def start_session(link: PodLink, code_id: str, run_id: str, module: str = TRAINER_MODULE) -> None:
    """Start what is not there yet: the session, the runner in it, the watchdog in it.

    Asking twice starts nothing twice: the runner and the watchdog hold locks of the run.

    Raises:
        StateConflictError: If tmux does not start them.
        VerificationError: If the runner ended as soon as it was started.
    """
    for _ in range(_TRIES):
        if _start_missing(link, code_id, run_id, module):
            return
    message = f"tmux on pod `{link.record.name}` refuses a session of `{run_id}` and lists none"
    raise StateConflictError(message, hint=f"Try `nsa-ops preflight {link.record.name}`")


def _start_missing(link: PodLink, code_id: str, run_id: str, module: str) -> bool:
    """Start what the list lacks; False if somebody else made the session meanwhile: list again."""
    names = {window.name for window in list_windows(link, run_id)}
    train = train_command(link, code_id, run_id, module)
    watchdog = watchdog_command(link, code_id, run_id, module)
    session, folder = session_name(run_id), str(link.run_dir(run_id))
    if not names:
        done = _tmux(link, link.tmux.new_session(session, TRAIN, folder, train))
        if done.exit_code:
            return False
    elif TRAIN not in names:
        _tmux(link, link.tmux.new_window(session, TRAIN, folder, train))
    if WATCHDOG not in names:
        try:
            _tmux(link, link.tmux.new_window(session, WATCHDOG, folder, watchdog))
        except StateConflictError:
            if not list_windows(link, run_id):  # the session went with its first window
                raise runner_ended(link, run_id) from None
            raise
    return True


def runner_ended(link: PodLink, run_id: str) -> VerificationError:
    """The end of a runner that has not even recorded itself, in the last words of its log."""
    log = link.run_dir(run_id) / "training.log"
    done = link.transport.run(("tail", "-c", _LAST_WORDS_BYTES, str(log)), timeout_s=QUICK_S)
    lines = [line.strip() for line in done.text.splitlines() if line.strip()]
    said = f"training.log ends with: {lines[-1]}" if lines else "training.log is empty"
    message = f"The runner of `{run_id}` ended as soon as it was started; {said}"
    hint = f"See `nsa-ops logs {run_id}`; its interpreter is `{link.record.python}`"
    return VerificationError(message, hint=hint)


def start_watchdog(link: PodLink, code_id: str, run_id: str, module: str = TRAINER_MODULE) -> None:
    """Start the watchdog of a run that nobody watches; a second one would refuse by its lock.

    Raises:
        StateConflictError: If tmux does not start it.
    """
    names = {window.name for window in list_windows(link, run_id)}
    start = link.tmux.new_window if names else link.tmux.new_session
    command = watchdog_command(link, code_id, run_id, module)
    _tmux(link, start(session_name(run_id), WATCHDOG, str(link.run_dir(run_id)), command))


def list_windows(link: PodLink, run_id: str) -> list[Window]:
    """Windows of the run's session; none if there is no session or no tmux server.

    Raises:
        LocalResourceError: If tmux cannot be asked.
        StateConflictError: If a run of the same id in another directory has the session.
    """
    done = link.transport.run(link.tmux.list_windows(), timeout_s=QUICK_S)
    stderr = done.stderr.decode(errors="replace")
    if done.exit_code != 0 and not is_no_server(stderr):
        message = f"tmux on pod `{link.record.name}` cannot be asked: {done.last_error_line}"
        raise LocalResourceError(message, hint=f"Try `nsa-ops preflight {link.record.name}`")
    session = session_name(run_id)
    windows = [window for window in parse_windows(done.text) if window.session == session]
    foreign = [window for window in windows if not window.is_of(str(link.run_dir(run_id)))]
    if foreign:
        message = (
            f"tmux on the machine of pod `{link.record.name}` has a session `{session}` of "
            f"`{foreign[0].folder}`, which is not the directory of `{run_id}` on this pod"
        )
        raise StateConflictError(message, hint=f"Halt that run, or end it: {_end(link, session)}")
    return windows


def _end(link: PodLink, session: str) -> str:
    return f"`tmux -L {link.tmux.socket} kill-session -t ={session}`"


def _tmux(link: PodLink, argv: Sequence[str]) -> Completed:
    done = link.transport.run(argv, timeout_s=QUICK_S)
    if done.exit_code == 0 or is_duplicate_session(done.stderr.decode(errors="replace")):
        return done
    message = f"tmux on pod `{link.record.name}` did not start it: {done.last_error_line}"
    raise StateConflictError(message, hint=f"Try `nsa-ops preflight {link.record.name}`")
