"""A laptop with an ended run on two pods that lie as they are told: `far` by ssh, `near` local."""

import json
import os
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

from nsa_ops.remote.snapshot import code_root
from nsa_ops.store import Receipt, Store
from tests.integration.hostile import tree_guard
from tests.integration.hostile.ended_run import HELD
from tests.integration.ssh_server import SshServer
from tests.integration.tcp_proxy import Proxy

LIMIT_S = 60.0
PEAK_MIB = 600
#: Bytes that may be on their way when a flood is cut: pipes, ssh's windows, the proxy.
SLACK_BYTES = 48 * 2**20


@dataclass(frozen=True)
class Heard:
    """What one command did."""

    words: tuple[str, ...]
    code: int
    out: bytes
    err: bytes
    seconds: float
    peak_mib: float
    is_late: bool

    @property
    def data(self) -> Any:
        return json.loads(self.out)["data"]

    def problems(self, codes: Sequence[int]) -> list[str]:
        """What no answer of a pod may do to a command."""
        found = []
        if self.is_late:
            found.append(f"did not end within {LIMIT_S:g} s")
        elif self.code not in codes:
            found.append(f"exit code {self.code}, and one of {sorted(codes)} was expected")
        for name, stream in (("stdout", self.out), ("stderr", self.err)):
            if raw := tree_guard.controls(stream):
                found.append(f"{name} holds control characters: {', '.join(raw)[:120]}")
        if b"Traceback" in self.err or b"This is a bug" in self.err:
            found.append("it crashed")
        if self.peak_mib > PEAK_MIB:
            found.append(f"it took {self.peak_mib:.0f} MiB of memory")
        return found

    @property
    def said(self) -> str:
        out, err = (stream[-1500:].decode(errors="replace") for stream in (self.out, self.err))
        return f"`nsa-ops {' '.join(self.words)}`\nstdout: {out}\nstderr: {err}"


@dataclass(frozen=True)
class Started:
    """A command that runs."""

    words: tuple[str, ...]
    out: Path
    err: Path
    result: Path

    def wait(self) -> Heard:
        end = time.monotonic() + 2 * LIMIT_S
        while not self.result.exists():
            assert time.monotonic() < end, self.words
            time.sleep(0.005)
        found = json.loads(self.result.read_text())
        heard = Heard(self.words, out=self.out.read_bytes(), err=self.err.read_bytes(), **found)
        for path in (self.out, self.err, self.result):
            path.unlink()
        return heard


@dataclass(frozen=True)
class Side:
    """One of the pods and its run."""

    name: str
    folder: Path
    backups: Path

    @property
    def run_id(self) -> str:
        return f"{self.name}-run"

    @property
    def root(self) -> Path:
        return self.folder / "pod"

    @property
    def run_dir(self) -> Path:
        return self.root / "runs" / self.run_id

    @property
    def backup(self) -> Path:
        return self.backups / self.run_id

    def checkpoint(self, step: int) -> Path:
        return self.run_dir / "checkpoints" / f"step_{step:06d}"

    def held(self, step: int = HELD) -> Path:
        return self.backup / "checkpoints" / f"step_{step:06d}"

    @property
    def lies(self) -> Path:
        return self.folder / "lies"

    def lie(self, *rules: dict[str, Any]) -> None:
        """Let the pod lie from now on; see liar.py for what a rule may hold."""
        self.be_honest()
        full = [{"asked": "", "answer": ""} | rule for rule in rules]
        if any("frame" in rule for rule in full):
            (self.lies / "frames").touch()
        (self.lies / "lie.json").write_text(json.dumps(full))

    def be_honest(self) -> None:
        for path in self.lies.iterdir():
            if path.is_file() and not path.is_symlink():
                path.unlink()

    @property
    def num_lies(self) -> int:
        """How often it has lied."""
        hits = self.lies / "hits"
        return len(hits.read_text().split()) if hits.exists() else 0

    @property
    def flooded_bytes(self) -> int:
        """Bytes of floods that somebody took from it."""
        sent = [int(path.read_text() or 0) for path in self.lies.glob("sent.*")]
        return max(sent, default=0)


@dataclass(frozen=True)
class Before:
    laptop: tree_guard.Tree
    other: tree_guard.Tree
    receipts: list[tuple[object, ...]]


@dataclass
class World:
    """The laptop, its pods, and a copy of all of it as it was before any lie."""

    base: Path
    server: SshServer
    proxy: Proxy
    socket: str
    sides: dict[str, Side]
    commands: subprocess.Popen[bytes]
    _numbers: Iterator[int] = field(default_factory=count)

    @property
    def laptop(self) -> Path:
        return self.base / "laptop"

    @property
    def state(self) -> Path:
        return self.laptop / "state"

    @property
    def home(self) -> Path:
        return self.laptop / "home"

    @property
    def work(self) -> Path:
        return self.laptop / "work"

    @property
    def environment(self) -> dict[str, str]:
        return {
            "PATH": f"{self.sides['near'].lies / 'bin'}:{os.environ['PATH']}",
            "HOME": str(self.home),
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(code_root()),
            "PYTHONDONTWRITEBYTECODE": "1",
            "LC_ALL": "C.UTF-8",
            "NSA_OPS_STATE_DIR": str(self.state),
            "NSA_OPS_TMUX_SOCKET": self.socket,
            "NSA_OPS_SSH_CONFIG": str(self.server.folder / "client.conf"),
            "XDG_RUNTIME_DIR": str(self.server.sockets),
        }

    def start(self, *words: str, limit_s: float = LIMIT_S) -> "Started":
        """Begin a command; several may run at once."""
        number = next(self._numbers)
        files = {name: self.base / f"{name}.{number}" for name in ("out", "err", "result")}
        asked = {name: str(path) for name, path in files.items()} | {
            "words": words,
            "folder": str(self.work),
            "environment": self.environment,
            "limit_s": limit_s,
            "is_bounded": True,
        }
        assert self.commands.stdin is not None
        self.commands.stdin.write(json.dumps(asked).encode() + b"\n")
        self.commands.stdin.flush()
        return Started(words, **files)

    def __call__(self, *words: str) -> Heard:
        return self.start(*words).wait()

    def must(self, *words: str) -> Heard:
        heard = self(*words)
        assert heard.code == 0, heard.said
        return heard

    def receipts(self) -> list[Receipt]:
        store = Store(self.state / "registry.sqlite")
        try:
            return sorted(store.receipts(), key=lambda one: one.path)
        finally:
            store.close()

    def before(self, side: Side) -> Before:
        other = self.sides["near" if side.name == "far" else "far"]
        held = [_bound(one) for one in self.receipts() if one.step == HELD]
        return Before(tree_guard.look(self.laptop), tree_guard.look(other.root), held)

    def harm(
        self,
        before: Before,
        side: Side,
        *,
        may_change: Sequence[str] = (),
        other: Sequence[str] = (),
    ) -> list[str]:
        """What a lying pod did to the laptop, to the other pod, or to what was good already."""
        now = tree_guard.look(self.laptop)
        own = f"state/backups/{side.run_id}"
        allowed = (*tree_guard.RECORDS, own, f"{own}/*", *may_change)
        found = [f"{name!r} changed" for name in tree_guard.changed(before.laptop, now, allowed)]
        held = f"{own}/checkpoints/step_{HELD:06d}"
        kept = tree_guard.below(before.laptop, held), tree_guard.below(now, held)
        found += [f"the good {name!r} changed" for name in tree_guard.changed(*kept)]
        other_root = self.sides["near" if side.name == "far" else "far"].root
        differing = tree_guard.changed(before.other, tree_guard.look(other_root), other)
        found += [f"{name!r} changed on another pod" for name in differing]
        receipts = self.receipts()
        if [_bound(one) for one in receipts if one.step == HELD] != before.receipts:
            found.append("the receipt of the good checkpoint changed")
        return found + tree_guard.flaws(side.backup, receipts)

    def reset(self) -> None:
        """Everything as it was before any lie."""
        for path in (self.laptop, *(side.root / "runs" for side in self.sides.values())):
            _remove(path)
            template = self.base / "template" / path.relative_to(self.base)
            subprocess.run(["cp", "-a", template, path], check=True)
        for side in self.sides.values():
            side.be_honest()
        self.proxy.cut_after, self.proxy.is_refusing, self.proxy.is_stalled = None, False, False

    def keep_template(self) -> None:
        for path in (self.laptop, *(side.root / "runs" for side in self.sides.values())):
            template = self.base / "template" / path.relative_to(self.base)
            template.parent.mkdir(parents=True, exist_ok=True)
            subprocess.run(["cp", "-a", path, template], check=True)


def _bound(receipt: Receipt) -> tuple[object, ...]:
    """What a receipt says, but for when it was last verified."""
    return (receipt.step, receipt.path, receipt.total_bytes, receipt.manifest_sha256)


def _remove(path: Path) -> None:
    """Remove a tree whose names may be deeper than one path can say."""
    subprocess.run(["rm", "-rf", "--", path], check=True)
