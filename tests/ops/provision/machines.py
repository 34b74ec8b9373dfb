"""Machines as the script of facts would describe them."""

from dataclasses import replace
from pathlib import Path, PurePosixPath

from nsa_core.config.profile import HardwareProfile, load_profile
from nsa_ops.machine.bare import FOLDERS, BareFacts, BasePython, MadeEnvironment
from nsa_ops.provision.want import PinnedSource, Wanted
from nsa_ops.remote.snapshot import Snapshot, code_root

DEBIAN = BasePython("/usr/bin/python3", "3.11.2", has_venv=True, has_headers=True)
ALL = {name: f"/usr/bin/{name}" for name in ("git", "tmux", "rsync", "find", "cc")}
BARE = BareFacts(
    uid=1000, rights="none", tools=ALL, pythons=(DEBIAN,), disk_path="/pods/me",
    disk_writable=True, unix_s=1000.0, disk_free_bytes=100 * 2**30, memory_free_bytes=2**35,
    shm_free_bytes=2**30, open_files_limit=4096, is_synchronised=True,
)  # fmt: skip
ROOT = PurePosixPath("/pods/me/nsa-pod")
SNAPSHOT = Snapshot(
    root=code_root(),
    files=("requirements/train.lock", "tools/setup.sh"),
    code_id="c0de",
    commit="a" * 40,
    dirty_sha256="d1",
    lock_sha256="10c",
    total_bytes=2048,
)


def without(facts: BareFacts, *tools: str) -> BareFacts:
    kept = {name: path for name, path in facts.tools.items() if name not in tools}
    return replace(facts, tools=kept)


def wanted(profile: HardwareProfile | str = "cpu", **fields: object) -> Wanted:
    hardware = load_profile(profile) if isinstance(profile, str) else profile
    plain = Wanted(
        pod="bare", pod_id="pod-1", root=ROOT, is_local=False, python="", profile=hardware,
        snapshot=SNAPSHOT, source=PinnedSource("a" * 40, b"diff"),
    )  # fmt: skip
    return replace(plain, **fields)  # type: ignore[arg-type]


def set_up(want: Wanted, facts: BareFacts, name: str, receipt: str = "") -> BareFacts:
    """The machine once everything but the registry is done."""
    return replace(
        facts,
        folders=frozenset(FOLDERS),
        has_code=True,
        bundle_sha256="b1",
        diff_sha256=want.source.diff_sha256,
        environments=(MadeEnvironment(name, want.launcher_sha256(name)),),
        receipt=receipt,
    )


def wheel(folder: Path, content: bytes = b"wheel") -> Path:
    path = folder / "flash_attn-2.8.3-cp311-cp311-linux_x86_64.whl"
    path.write_bytes(content)
    return path
