"""What every use case works with: settings, registry, clock, a voice, and the way to a pod."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import PurePosixPath

from nsa_ops.clock import Clock
from nsa_ops.doors import open_door
from nsa_ops.remote.audit import AuditedTransport, AuditLog
from nsa_ops.remote.tmux import Tmux
from nsa_ops.remote.transport import Transport
from nsa_ops.settings import Settings
from nsa_ops.store import REGISTRY_NAME, PodRecord, Store
from nsa_ops.store.audit_head import AuditHead
from nsa_ops.work import ShowWork, Work, show_nothing

#: The log of every command, in the state folder.
AUDIT_NAME = "audit.jsonl"

#: Takes one line of the story while a use case works.
Tell = Callable[[str], None]

#: Opens the door to a pod.
Connect = Callable[[PodRecord, Settings], Transport]


@dataclass(frozen=True)
class PodLink:
    """A pod and the open door to it; the paths of its root are spelled here and nowhere else."""

    record: PodRecord
    transport: Transport
    tmux: Tmux

    @property
    def root(self) -> PurePosixPath:
        """Folder that holds everything of ours on the pod."""
        return PurePosixPath(self.record.root)

    @property
    def runs(self) -> PurePosixPath:
        """Folder of the run directories."""
        return self.root / "runs"

    def run_dir(self, run_id: str) -> PurePosixPath:
        """Directory of one run."""
        return self.runs / run_id

    def code(self, code_id: str) -> PurePosixPath:
        """Folder of one version of the code."""
        return self.root / "code" / code_id

    def module(self, code_id: str, module: str, *words: str) -> tuple[str, ...]:
        """Argument list that runs a Python module of that version of the code, and no other."""
        # PYTHONSAFEPATH also holds for the trainer that the runner starts: the working folder must
        # never stand in for the pinned code.
        # UTF-8 whatever the locale of the pod: answers, file names and files are read elsewhere.
        pinned = ("PYTHONSAFEPATH=1", "PYTHONUNBUFFERED=1", "PYTHONUTF8=1")
        where = f"PYTHONPATH={self.code(code_id)}"
        return ("env", where, *pinned, self.record.python, "-m", module, *words)


@dataclass(frozen=True)
class Operator:
    """The laptop's side of every use case.

    Attributes:
        settings: Resolved settings.
        store: Registry.
        clock: Time.
        tell: Takes one line of the story.
        connect: Opens the door to a pod.
        timeout_s: Deadline the operator gave; None leaves each use case its own.
        show_work: Shows long work while it goes on.
    """

    settings: Settings
    store: Store
    clock: Clock
    tell: Tell
    connect: Connect
    timeout_s: float | None = None
    show_work: ShowWork = show_nothing

    @contextmanager
    def work(self, title: str, unit: str = "", total: float | None = None) -> Iterator[Work]:
        """Long work; the block says how far it is.

        Args:
            title: What is done.
            unit: What is counted; empty where nothing is.
            total: How many there are.
        """
        work = Work(title, unit, 0 if unit else None, total)
        with self.show_work(work):
            yield work

    def link(self, pod: PodRecord) -> PodLink:
        """Open the door to a pod."""
        tmux = Tmux(self.settings.values.tmux_socket)
        return PodLink(pod, self.connect(pod, self.settings), tmux)

    def deadline_s(self, default_s: float) -> float:
        """The operator's deadline, or the use case's own."""
        return self.timeout_s or self.settings.values.timeout_s or default_s


def audit_log(settings: Settings, unrecorded: Tell | None = None) -> AuditLog:
    """The log of every command, whose head the registry keeps."""
    head = AuditHead(settings.state_dir / REGISTRY_NAME, settings.scratch_dirs)
    return AuditLog(settings.state_dir / AUDIT_NAME, head, unrecorded)


def connect_audited(
    pod: PodRecord,
    settings: Settings,
    tell: Tell | None = None,
    unrecorded: Tell | None = None,
    timeout_s: float | None = None,
    warn: Tell | None = None,
) -> Transport:
    """Open the door that the pod's kind names, with every command written to the audit log.

    Args:
        pod: Pod to reach.
        settings: Where the audit log is, and what the door needs of this machine.
        tell: Takes a line for every command too; None keeps them to the log.
        unrecorded: Takes why a command cannot be logged, and it is run; None refuses it.
        timeout_s: Deadline the operator gave; no call takes longer.
        warn: Takes what was done to the link without being asked for.

    Raises:
        ConfigurationError: If this version does not know the kind.
    """
    log = audit_log(settings, unrecorded)
    longest_s = timeout_s or settings.values.timeout_s or math.inf
    return AuditedTransport(
        open_door(pod, settings, longest_s=longest_s, tell=warn), log, pod.name, tell
    )
