"""What every use case works with: settings, registry, clock, progress, and the way to a pod."""

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import PurePosixPath

from nsa_ops.clock import Clock
from nsa_ops.errors import ConfigurationError
from nsa_ops.local_files import expand_home
from nsa_ops.remote.audit import AuditedTransport, AuditLog
from nsa_ops.remote.local import LocalTransport
from nsa_ops.remote.openssh import OpenSSHTransport
from nsa_ops.remote.ssh.config import resolve
from nsa_ops.remote.ssh.host_keys import HostKey, scan
from nsa_ops.remote.ssh.target import Address, SshSettings, SshTarget, parse_address
from nsa_ops.remote.tmux import Tmux
from nsa_ops.remote.transport import Transport
from nsa_ops.settings import Settings
from nsa_ops.store import REGISTRY_NAME, PodRecord, Store
from nsa_ops.store.audit_head import AuditHead

#: Kinds of pods: this machine, OpenSSH, Fabric (Paramiko).
LOCAL, SSH, FABRIC = "local", "ssh", "fabric"
#: The log of every command, in the state folder.
AUDIT_NAME = "audit.jsonl"

#: Takes one line of progress while a use case works.
Tell = Callable[[str], None]

#: Opens the transport to a pod.
Connect = Callable[[PodRecord, Settings], Transport]


@dataclass
class Work:
    """One piece of long work; it is changed while another thread shows it.

    Attributes:
        title: What is done, such as `pulling`.
        unit: What is counted: `bytes`, or the word for one, such as `step`; empty where only the
            share is known.
        done: How many are done; None where nothing is counted.
        total: How many there are; None where that is not known.
        detail: What is being done now, such as the name of a file.
    """

    title: str
    unit: str = ""
    done: float | None = None
    total: float | None = None
    detail: str = ""

    def add(self, number: float) -> None:
        """Count some more as done."""
        self.done = (self.done or 0) + number


#: Shows a piece of work as long as the block lasts.
ShowWork = Callable[[Work], AbstractContextManager[object]]


def show_nothing(_work: Work) -> AbstractContextManager[object]:
    """Show it to nobody."""
    return nullcontext()


@dataclass(frozen=True)
class PodLink:
    """A pod and the transport to it; the paths below its root are defined here and nowhere else."""

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
class RunHandle:
    """A run on a pod, and the version of the code whose agent answers for it."""

    link: PodLink
    code_id: str
    run_id: str

    @property
    def run_dir(self) -> PurePosixPath:
        """Its directory on the pod."""
        return self.link.run_dir(self.run_id)

    @property
    def pod(self) -> str:
        """Name of its pod."""
        return self.link.record.name

    def module(self, module: str, *words: str) -> tuple[str, ...]:
        """Argument list that runs a Python module of its code."""
        return self.link.module(self.code_id, module, *words)


@dataclass(frozen=True)
class Operator:
    """The laptop's side of every use case.

    Attributes:
        settings: Resolved settings.
        store: Registry.
        clock: Time.
        tell: Takes one line of progress.
        connect: Opens the transport to a pod.
        timeout_s: Deadline the operator gave; None leaves each use case its own.
        show_work: Shows long work while it is done.
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
        """Show long work while the block does it; the block says how far it is; see `Work`."""
        work = Work(title, unit, 0 if unit else None, total)
        with self.show_work(work):
            yield work

    def link(self, pod: PodRecord) -> PodLink:
        """Open the transport to a pod."""
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
    """Open the transport that the pod's kind names, with every command written to the audit log.

    Args:
        pod: Pod to reach.
        settings: Where the audit log is, and what the transport needs of this machine.
        tell: Takes a line for every command too; None keeps them to the log.
        unrecorded: Takes why a command cannot be logged, and it is run; None refuses it.
        timeout_s: Deadline the operator gave; no call takes longer.
        warn: Takes what was done to the link without being asked for.
    """
    log = audit_log(settings, unrecorded)
    longest_s = timeout_s or settings.values.timeout_s or math.inf
    transport = open_transport(pod, settings, longest_s=longest_s, tell=warn)
    return AuditedTransport(transport, log, pod.name, tell)


def open_transport(
    pod: PodRecord, settings: Settings, *, longest_s: float = math.inf, tell: Tell | None = None
) -> Transport:
    """The transport to a pod; nothing is connected before the first call.

    Args:
        pod: Pod to reach.
        settings: What the transport needs of this machine.
        longest_s: No call may take longer, whatever it asks for.
        tell: Takes what was done to the link without being asked for.

    Raises:
        ConfigurationError: If this version does not know the kind.
        LocalResourceError: If the kind needs a package that is not installed.
    """
    if pod.kind == LOCAL:
        return LocalTransport(settings.login_environment, longest_s=longest_s)
    if pod.kind == SSH:
        return OpenSSHTransport(target_of(pod, settings), longest_s=longest_s, tell=tell)
    if pod.kind == FABRIC:
        from nsa_ops.remote.fabric import FabricTransport  # needs packages that may be absent

        return FabricTransport(target_of(pod, settings), longest_s=longest_s)
    message = f"Pod `{pod.name}` is of kind `{pod.kind}`, and this version does not know it"
    raise ConfigurationError(message, hint="Update nsa-ops")


def look_at_host(kind: str, address: Address, settings: SshSettings) -> tuple[str, HostKey]:
    """The route to an address in words, and the host key that answers there."""
    if kind == FABRIC:
        from nsa_ops.remote import fabric

        return str(fabric.resolve_without_ssh(address, settings)), fabric.scan(address, settings)
    return str(resolve(address, settings)), scan(address, settings)


def target_of(pod: PodRecord, settings: Settings) -> SshTarget:
    """A pod as ssh reaches it."""
    address = parse_address(pod.address)
    return SshTarget(pod.name, pod.pod_id, address, ssh_settings(settings))


def ssh_settings(settings: Settings) -> SshSettings:
    """This machine's side of every connection."""
    config = settings.values.ssh_config
    return SshSettings(
        state_dir=settings.state_dir,
        socket_dirs=settings.socket_dirs,
        environment=settings.ssh_environment,
        config=expand_home(config).absolute() if config else None,
    )
