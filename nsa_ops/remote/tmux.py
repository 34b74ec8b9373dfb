"""tmux as a pure mapping: what to run, as argument lists, and what its answers mean."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from nsa_ops.quantities import parse_count

#: Stands between the fields of a line. It must be printable: outside a UTF-8 locale, as on a pod
#: that is reached by ssh, tmux prints `_` for a tab.
_BETWEEN = "|"
#: One line a window: session, window, pid of its first process, dead or not, folder of the session.
_LIST_FORMAT = _BETWEEN.join(
    ("#{session_name}", "#{window_name}", "#{pane_pid}", "#{pane_dead}", "#{session_path}")
)
#: What tmux prints as it is in every locale; for anything else it may print `_`.
_UNCERTAIN = re.compile(r"[^ -^`-~]")

#: All but the first two are for a client that reaches a server as its last session ends.
_NO_SERVER = (
    "no server running", "error connecting to", "server exited", "lost server", "no current ",
    "no sessions",
)  # fmt: skip
_SESSION_CHANGED = ("duplicate session", "can't find session")


@dataclass(frozen=True)
class Window:
    """One tmux window.

    Attributes:
        session: Session it belongs to.
        name: `train` or `watchdog`.
        pid: First process in it.
        is_dead: The process ended and tmux kept the window.
        folder: Where its session was started.
    """

    session: str
    name: str
    pid: int
    is_dead: bool
    folder: str

    def is_of(self, folder: str) -> bool:
        """Whether its session was started in this folder, as far as tmux can print it."""
        return _UNCERTAIN.sub("", self.folder) == _UNCERTAIN.sub("", folder)


@dataclass(frozen=True)
class Tmux:
    """Argument lists for one tmux server, whose socket has a name of its own.

    The server is started without a configuration file, without TMUX, and with a TERM that every
    machine knows (an unknown TERM ends tmux at once). Nothing is typed into a window and no state
    is read from a screen.
    """

    socket: str = "nsa"

    def _argv(self, *words: str) -> tuple[str, ...]:
        head = ("env", "-u", "TMUX", "TERM=xterm-256color", "tmux", "-L", self.socket)
        return (*head, "-f", "/dev/null", *words)

    def new_session(
        self, session: str, window: str, folder: str, command: Sequence[str]
    ) -> tuple[str, ...]:
        """Start a session whose first window runs a command in a folder, without a shell."""
        where = ("-s", session, "-n", window, "-c", folder, "-x", "200", "-y", "50")
        return self._argv("new-session", "-d", *where, "--", *command)

    def new_window(
        self, session: str, window: str, folder: str, command: Sequence[str]
    ) -> tuple[str, ...]:
        """Add a window that runs a command in a folder."""
        where = ("-t", f"={session}:", "-n", window, "-c", folder)
        return self._argv("new-window", "-d", *where, "--", *command)

    def list_windows(self) -> tuple[str, ...]:
        """List every window of every session."""
        return self._argv("list-panes", "-a", "-F", _LIST_FORMAT)

    def kill_session(self, session: str) -> tuple[str, ...]:
        """End a session; processes in sessions of their own stay alive."""
        return self._argv("kill-session", "-t", f"={session}")


def session_name(run_id: str) -> str:
    """Name of a run's session, its own: tmux allows no dot in it, and a run id holds no plus."""
    return f"nsa-{run_id.replace('.', '+')}"


def parse_windows(stdout: str) -> list[Window]:
    """Windows from the output of `list_windows`; lines of another form are passed over."""
    windows = []
    for line in stdout.splitlines():
        fields = line.split(_BETWEEN, 4)
        if len(fields) != len(_LIST_FORMAT.split(_BETWEEN)):
            continue
        pid, is_dead = parse_count(fields[2]), fields[3] == "1"
        if pid is not None:
            windows.append(Window(fields[0], fields[1], pid, is_dead, fields[4]))
    return windows


def is_no_server(stderr: str) -> bool:
    """Whether tmux says that no server runs, or one that is just ending: nothing runs in it."""
    return any(said in stderr for said in _NO_SERVER)


def is_session_changed(stderr: str) -> bool:
    """Whether tmux refused because a session of that name exists, or because it is gone."""
    return is_no_server(stderr) or any(said in stderr for said in _SESSION_CHANGED)
