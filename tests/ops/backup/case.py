"""A pod on this machine with a run on it, an operator, and links that can be cut."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from nsa_core.rundir.layout import RunDir
from nsa_ops.backup.folder import BackupFolder
from nsa_ops.context import Operator, PodLink
from nsa_ops.errors import PodUnreachableError
from nsa_ops.remote.local import LocalTransport
from nsa_ops.remote.tmux import Tmux
from nsa_ops.remote.transport import MAX_OUTPUT_BYTES, Completed, Transport
from nsa_ops.settings import read_settings
from nsa_ops.store import PodRecord, Store
from tests.ops.fakes import FakeClock
from tests.ops.report.builder import RunBuilder

ENVIRONMENT = {"PATH": "/usr/bin:/bin"}
RUN_ID = "20261127-1403-tiny-cpu-a1b2"


class CutLink:
    """A transport to this machine that dies after a number of bytes and gives small pieces."""

    where = "a pod behind a bad link"

    def __init__(self, budget: int, piece: int = 700) -> None:
        self._inner = LocalTransport(ENVIRONMENT)
        self.budget = budget
        self._piece = piece

    def run(
        self, argv: Sequence[str], *, stdin: bytes = b"", timeout_s: float,
        max_bytes: int = MAX_OUTPUT_BYTES,
    ) -> Completed:  # fmt: skip
        return self._inner.run(argv, stdin=stdin, timeout_s=timeout_s, max_bytes=max_bytes)

    def run_into(
        self, argv: Sequence[str], sink: Callable[[bytes], object],
        *, stdin: bytes = b"", timeout_s: float, max_bytes: int,
    ) -> Completed:  # fmt: skip
        def in_pieces(content: bytes) -> None:
            for start in range(0, len(content), self._piece):
                piece = content[start : start + self._piece]
                self._spend(len(piece))
                sink(piece)

        return self._inner.run_into(
            argv, in_pieces, stdin=stdin, timeout_s=timeout_s, max_bytes=max_bytes
        )

    def put(self, source: Path, target: str, *, timeout_s: float) -> None:
        self._spend(source.stat().st_size)
        self._inner.put(source, target, timeout_s=timeout_s)

    def get(self, source: str, target: Path, *, timeout_s: float) -> None:
        self._inner.get(source, target, timeout_s=timeout_s)

    def stream(
        self, path: str, offset: int, sink: Callable[[bytes], object],
        *, max_bytes: int, timeout_s: float,
    ) -> None:  # fmt: skip
        end = offset + max_bytes
        while piece := self._inner.tail(
            path, offset, max_bytes=min(end - offset, self._piece), timeout_s=timeout_s
        ):
            self._spend(len(piece))
            sink(piece)
            offset += len(piece)

    def tail(self, path: str, offset: int, *, max_bytes: int, timeout_s: float) -> bytes:
        content = self._inner.tail(path, offset, max_bytes=max_bytes, timeout_s=timeout_s)
        self._spend(len(content))
        return content

    def _spend(self, num_bytes: int) -> None:
        self.budget -= num_bytes
        if self.budget < 0:
            message = "The link to the pod was lost"
            raise PodUnreachableError(message)


@dataclass
class Case:
    """Everything one test needs."""

    root: Path
    told: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.pod = PodRecord(
            "here", "pod-1", "local", str(self.root / "pod"), "python3", "cpu", 0.0
        )
        self.operator = Operator(
            settings=read_settings(folder=self.root),
            store=Store(self.root / "state" / "registry.sqlite"),
            clock=FakeClock(),
            tell=self.told.append,
            connect=lambda pod, settings: LocalTransport(ENVIRONMENT),
        )
        self.operator.store.add_pod(self.pod)
        (self.root / "pod" / "runs").mkdir(parents=True, exist_ok=True)

    @property
    def run(self) -> RunDir:
        return RunDir(self.root / "pod" / "runs" / RUN_ID)

    @property
    def backup(self) -> BackupFolder:
        return self.backup_of(RUN_ID)

    def backup_of(self, run_id: str) -> BackupFolder:
        return BackupFolder(self.root / "backups" / run_id)

    def link(self, transport: Transport | None = None) -> PodLink:
        return PodLink(self.pod, transport or LocalTransport(ENVIRONMENT), Tmux("nsa"))

    def build(self, *steps: int) -> RunBuilder:
        """A run with a checkpoint at each of these steps."""
        builder = RunBuilder(self.run, steps=max(steps)).launch()
        done = 0
        for step in steps:
            builder.train(done, step, every=5).save(step)
            done = step
        return builder.validate(done)


def flip_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
