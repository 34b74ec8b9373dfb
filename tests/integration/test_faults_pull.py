"""Faults of a pull over a real sshd: the link, the file, either disk, the process that pulls."""

import hashlib
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from nsa_core.rundir.checkpoint import (
    MANIFEST_NAME,
    CheckpointFile,
    CheckpointManifest,
    inspect_checkpoint,
    list_checkpoints,
)
from nsa_ops.backup.folder import BackupFolder
from nsa_ops.backup.pull import execute_pull, plan_pull
from nsa_ops.backup.transfer import Pulled
from nsa_ops.errors import LocalResourceError, OpsError, PodUnreachableError, StateConflictError
from nsa_ops.remote.openssh import OpenSSHTransport
from nsa_ops.remote.transport import MAX_OUTPUT_BYTES, Completed, Transport
from tests.integration.ssh_server import SshServer, openssh
from tests.integration.tcp_proxy import Proxy
from tests.ops.backup.case import RUN_ID, Case

pytestmark = pytest.mark.integration
SIZE = 4_000_000
#: What ssh and the pipes hold when a link is cut, and what a poll of the run directory takes.
ON_THE_WAY = 600_000


@pytest.fixture
def link(server: SshServer, proxy: Proxy, tmp_path: Path) -> Iterator[OpenSSHTransport]:
    with openssh(server.target(tmp_path / "s", proxy.port)) as opened:
        yield opened


class BigCase(Case):
    """A run whose newest checkpoint has one file that takes a while."""

    @property
    def big(self) -> Path:
        return self.run.checkpoint(40) / "state.bin"

    def save(self, content: bytes) -> None:
        folder = self.run.checkpoint(40)
        folder.mkdir(parents=True, exist_ok=True)
        self.big.write_bytes(content)
        digest = hashlib.sha256(content).hexdigest()
        manifest = CheckpointManifest(
            run_id=RUN_ID, attempt=1, step=40, tokens_seen=1, created_unix_s=1.0,
            config_sha256="0" * 64,
            files=[CheckpointFile(name="state.bin", size=len(content), sha256=digest)],
        )  # fmt: skip
        (folder / MANIFEST_NAME).write_text(manifest.model_dump_json())

    def pull(self, transport: Transport, folder: BackupFolder | None = None) -> Pulled:
        opened = self.link(transport)
        planned = plan_pull(opened, RUN_ID, folder or self.backup, "latest")
        return execute_pull(self.operator, opened, planned)


@pytest.fixture
def case(tmp_path: Path) -> BigCase:
    made = BigCase(tmp_path)
    made.build(20)
    made.save(os.urandom(SIZE))
    return made


def whole_steps(case: BigCase) -> list[int]:
    """Steps in the backup; each must be whole."""
    kept = list_checkpoints(case.backup.run)
    assert [inspect_checkpoint(one.path).damage for one in kept] == [""] * len(kept)
    return [one.step for one in kept]


def test_a_pull_cut_at_every_tenth_goes_on_where_it_stopped(
    case: BigCase, link: OpenSSHTransport, proxy: Proxy
) -> None:
    case.pull(link)
    case.backup.run.checkpoint(40).rename(case.root / "first")
    arrived = 0
    for tenth in range(1, 10):
        link.run(["true"], timeout_s=20)
        proxy.cut_in(SIZE // 10)
        with pytest.raises(PodUnreachableError):
            case.pull(link)
        proxy.cut_after = None
        part = case.backup.pulling(40) / ".state.bin.part"
        now = part.stat().st_size if part.exists() else 0
        assert now >= arrived, f"the cut at tenth {tenth} lost bytes"
        assert case.big.read_bytes().startswith(part.read_bytes() if part.exists() else b"")
        assert whole_steps(case) == []
        arrived = now
    assert arrived > SIZE // 2
    before = proxy.from_server
    assert case.pull(link).newest_step == 40
    assert whole_steps(case) == [40]
    assert proxy.from_server - before < SIZE - arrived + ON_THE_WAY


class InterruptedOnce:
    """A door through which Ctrl-C comes once in the middle of each call."""

    def __init__(self, inner: OpenSSHTransport) -> None:
        self._inner = inner
        self.interrupted: list[str] = []
        self.where = inner.where

    def run(
        self, argv: Sequence[str], *, stdin: bytes = b"", timeout_s: float,
        max_bytes: int = MAX_OUTPUT_BYTES,
    ) -> Completed:  # fmt: skip
        done = self._inner.run(argv, stdin=stdin, timeout_s=timeout_s, max_bytes=max_bytes)
        self._interrupt_once(" ".join(argv))
        return done

    def stream(
        self, path: str, offset: int, sink: Callable[[bytes], object],
        *, max_bytes: int, timeout_s: float,
    ) -> None:  # fmt: skip
        def interrupted(piece: bytes) -> None:
            sink(piece)
            self._interrupt_once(path)

        self._inner.stream(path, offset, interrupted, max_bytes=max_bytes, timeout_s=timeout_s)

    def run_into(
        self, argv: Sequence[str], sink: Callable[[bytes], object],
        *, stdin: bytes = b"", timeout_s: float, max_bytes: int,
    ) -> Completed:  # fmt: skip
        def interrupted(piece: bytes) -> None:
            sink(piece)
            self._interrupt_once(f"many from {stdin.decode().splitlines()[0]}")

        return self._inner.run_into(
            argv, interrupted, stdin=stdin, timeout_s=timeout_s, max_bytes=max_bytes
        )

    def _interrupt_once(self, call: str) -> None:
        if call not in self.interrupted:
            self.interrupted.append(call)
            raise KeyboardInterrupt


def test_ctrl_c_in_the_middle_of_any_call_of_a_pull_leaves_what_the_next_one_completes(
    case: BigCase, link: OpenSSHTransport
) -> None:
    door = InterruptedOnce(link)
    done = None
    while done is None:
        try:
            done = case.pull(door)
        except KeyboardInterrupt:
            assert len(door.interrupted) < 60
            assert whole_steps(case) == []
    assert (done.newest_step, whole_steps(case)) == (40, [40])
    names = {Path(one).name for one in door.interrupted}
    assert "state.bin" in names
    assert sum(one.startswith("many from ") for one in door.interrupted) > 1
    assert case.operator.store.open_intents() == []


PULL_AND_DIE = """
import os, signal, sys
from pathlib import Path
from tests.integration.ssh_server import SshServer
from tests.integration.test_faults_pull import BigCase
from nsa_ops.remote.openssh import OpenSSHTransport
folder, port, sockets, root, state, moment = sys.argv[1:]
replace = Path.replace
def die(self, target):
    if str(target).endswith("/state.bin") and moment == "before":
        os.kill(os.getpid(), signal.SIGKILL)
    done = replace(self, target)
    if str(target).endswith("/state.bin"):
        os.kill(os.getpid(), signal.SIGKILL)
    return done
Path.replace = die
server = SshServer(Path(folder), int(port), Path(sockets))
BigCase(Path(root)).pull(OpenSSHTransport(server.target(Path(state))))
"""


@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_pull_killed_around_the_rename_of_a_part_costs_no_byte(
    case: BigCase, server: SshServer, link: OpenSSHTransport, tmp_path: Path, moment: str
) -> None:
    case.operator.store.close()
    shutil.rmtree(case.root / "state")  # the child makes its own
    words = [
        server.folder, server.port, server.sockets, case.root, tmp_path / "s2", moment
    ]  # fmt: skip
    killed = subprocess.run(
        [sys.executable, "-c", PULL_AND_DIE, *map(str, words)],
        cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert killed.returncode == -9, killed.stderr
    assert whole_steps(case) == []
    shutil.rmtree(case.root / "state")
    again = BigCase(case.root)
    done = again.pull(link)
    assert (done.newest_step, whole_steps(case)) == (40, [40])
    assert done.num_bytes < SIZE // 100


def test_a_checkpoint_replaced_while_it_is_pulled_is_never_mixed(
    case: BigCase, link: OpenSSHTransport, proxy: Proxy
) -> None:
    old, new = case.big.read_bytes(), os.urandom(SIZE)
    link.run(["true"], timeout_s=20)
    proxy.delay_s = 0.002
    before = proxy.from_server

    def replace_in_the_middle() -> None:
        while proxy.from_server - before < SIZE // 4:
            time.sleep(0.001)
        fresh = case.big.with_name("fresh")
        fresh.write_bytes(new)
        fresh.replace(case.big)

    replacing = threading.Thread(target=replace_in_the_middle)
    replacing.start()
    first: list[OpsError] = []
    try:
        case.pull(link)
    except OpsError as error:  # the hash of its manifest, or the old file that was open: both hold
        first.append(error)
    replacing.join()
    for path in case.backup.root.rglob("state.bin"):
        assert path.read_bytes() == old
    case.save(new)
    if first:
        assert "sha256" in first[0].message
        case.pull(link)
    else:  # the old one is held, and the new one is kept beside it
        with pytest.raises(StateConflictError, match="both are kept"):
            case.pull(link)
    assert whole_steps(case) == [40]
    held = case.backup.run.checkpoint(40) / "state.bin"
    assert held.read_bytes() == (new if first else old)
    assert {path.read_bytes() for path in case.backup.root.rglob("state.bin")} >= {new}


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 2 MiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(folder)]
    refused = subprocess.run(command, capture_output=True, text=True, check=False)
    if refused.returncode:
        pytest.skip(f"this machine refuses a tmpfs mount: {refused.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def test_a_disk_here_that_fills_up_is_named_and_what_came_is_kept(
    case: BigCase, link: OpenSSHTransport, small_disk: Path, tmp_path: Path
) -> None:
    small = BackupFolder(small_disk / "backup")
    opened = case.link(link)
    planned = plan_pull(opened, RUN_ID, small, "latest")
    with pytest.raises(LocalResourceError, match="to spare"):
        execute_pull(case.operator, opened, planned)
    assert not small.root.exists()
    with pytest.raises(LocalResourceError, match="is full; what arrived before is kept"):
        execute_pull(case.operator, opened, planned, free_bytes=lambda _path: 2**40)
    part = small.pulling(40) / ".state.bin.part"
    assert case.big.read_bytes().startswith(part.read_bytes())
    assert part.stat().st_size > 500_000
    assert list_checkpoints(small.run) == []
    subprocess.run(["mount", "-o", "remount,size=12m", str(small_disk)], check=True)
    done = execute_pull(case.operator, opened, planned, free_bytes=lambda _path: 2**40)
    assert done.pulled_steps == [40]
    assert done.num_bytes < SIZE


def test_a_disk_of_the_pod_that_is_full_is_named_and_nothing_is_left_there(
    link: OpenSSHTransport, small_disk: Path, tmp_path: Path
) -> None:
    big = tmp_path / "big"
    big.write_bytes(bytes(SIZE))
    (small_disk / "there").write_text("good")
    with pytest.raises(LocalResourceError, match="No space left on device"):
        link.put(big, str(small_disk / "there"), timeout_s=20)
    assert [(one.name, one.read_text()) for one in small_disk.iterdir()] == [("there", "good")]
