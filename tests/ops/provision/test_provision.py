"""Provision this machine for real, by its own `sh`: the installers alone are stand-ins."""

import json
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from nsa_ops.errors import (
    LocalResourceError,
    PodUnreachableError,
    RefusedError,
    VerificationError,
)
from nsa_ops.machine.bare import read_bare
from nsa_ops.provision.provisioning import Provisioned, execute_provision, plan_provision
from nsa_ops.remote.local import LocalTransport
from nsa_ops.remote.snapshot import take_snapshot
from nsa_ops.remote.transport import MAX_OUTPUT_BYTES, Completed
from nsa_ops.store import PodRecord, Store
from tests.ops.operators import Desk
from tests.ops.provision.machines import wheel

PROGRAMS = (
    "sh awk basename cat chmod cksum cp cut date df dirname env head id mkdir mv rm sed sha256sum "
    "touch true "
    "sleep timeout tmux find"
)

#: Makes environments that hold a stand-in interpreter; installs nothing.
UV = """#!/bin/sh
echo "uv $*" >>"{calls}"
case "$1" in
venv)
  for folder; do :; done
  mkdir -p "$folder/bin" && cp "{python}" "$folder/bin/python" && cp "$0" "$folder/bin/uv" ;;
esac
"""

#: Imports everything but what the test says it cannot, and knows the versions of what it holds.
PYTHON = """#!/bin/sh
case "$*" in
*importlib.metadata*) echo '{{"python_version": "3.11.2", "torch_version": "2.13.0+cpu"}}' ;;
*"import flash_attn"*) echo "ImportError: undefined symbol" >&2; [ -e "{importable}" ] ;;
*) echo "python $*" >>"{calls}" ;;
esac
"""


@dataclass
class CuttableTransport:
    """This machine, over a link that can be cut."""

    inner: LocalTransport
    left: int = 10**9
    asked: list[tuple[str, ...]] = field(default_factory=list)
    where: str = "this machine"

    def _cut(self, argv: Sequence[str]) -> None:
        self.asked.append(tuple(argv))
        self.left -= 1
        if self.left < 0:
            message = "the link ended"
            raise PodUnreachableError(message)

    def run(
        self, argv: Sequence[str], *, stdin: bytes = b"", timeout_s: float,
        max_bytes: int = MAX_OUTPUT_BYTES,
    ) -> Completed:  # fmt: skip
        done = self.inner.run(argv, stdin=stdin, timeout_s=timeout_s, max_bytes=max_bytes)
        self._cut(argv)  # it was done there, and the answer is lost
        return done

    def put(self, source: Path, target: str, *, timeout_s: float) -> None:
        self.inner.put(source, target, timeout_s=timeout_s)
        self._cut(("put", target))

    def get(self, source: str, target: Path, *, timeout_s: float) -> None:
        raise AssertionError(source)

    def tail(self, path: str, offset: int, *, max_bytes: int, timeout_s: float) -> bytes:
        raise AssertionError(path)


@dataclass
class Machine:
    """This machine as a bare pod whose PATH holds only what the test puts there."""

    folder: Path
    store: Store
    link: CuttableTransport
    desk: Desk

    @property
    def root(self) -> Path:
        return self.folder / "pod"

    @property
    def bin(self) -> Path:
        return self.folder / "bin"

    def put(self, name: str, script: str) -> None:
        (self.bin / name).write_text(script)
        (self.bin / name).chmod(0o755)

    def provision(self, wheel_path: Path | None = None) -> Provisioned:
        operator = replace(self.desk.operator, connect=lambda _pod, _settings: self.link)
        planned = plan_provision(operator, "bare", wheel=wheel_path, code=self.folder / "checkout")
        return execute_provision(operator, planned)

    def calls(self) -> list[str]:
        """What was installed since somebody asked."""
        path = self.folder / "calls"
        lines = path.read_text().splitlines() if path.exists() else []
        path.unlink(missing_ok=True)
        return lines


def make_checkout(folder: Path, repository: Path) -> None:
    """A small checkout with one file that is not committed."""
    for name in ("tools/setup.sh", "requirements/train.lock", "requirements/torch.txt"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(repository / name, folder / name)
    (folder / "nsa_core").mkdir()
    (folder / "nsa_core" / "loop.py").write_text("steps = 1\n")
    git = ["git", "-C", str(folder), "-c", "user.name=x", "-c", "user.email=x@example.org"]
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "first"]):
        subprocess.run([*git, *words], check=True)
    (folder / "nsa_core" / "new.py").write_text("new = 1\n")
    (folder / "nsa_core" / "loop.py").write_text("steps = 2\n")


@pytest.fixture
def machine(tmp_path: Path, desk: Desk, repository: Path) -> Machine:
    make_checkout(tmp_path / "checkout", repository)
    link = CuttableTransport(LocalTransport({"PATH": str(tmp_path / "bin"), "HOME": str(tmp_path)}))
    found = Machine(tmp_path, desk.store, link, desk)
    found.bin.mkdir()
    for name in PROGRAMS.split():
        program = shutil.which(name)
        assert program is not None, name
        (found.bin / name).symlink_to(program)
    (found.bin / "python3").symlink_to(Path(sys.executable).resolve())
    words = {"calls": tmp_path / "calls", "importable": tmp_path / "importable"}
    found.put("stand-in", PYTHON.format(**words))
    found.put("uv", UV.format(python=found.bin / "stand-in", **words))
    for path in (found.root / "runs", found.root / "code"):
        path.mkdir(parents=True)
    pod = PodRecord("bare", "pod-2", "local", str(found.root), "python3", "cpu", 0.0)
    desk.store.add_pod(pod)
    return found


def test_a_bare_machine_is_made_ready_and_runs_use_its_own_interpreter(machine: Machine) -> None:
    done = machine.provision()
    assert done.done == [
        "folders", "ship code", "pin source", "environment", "launcher", "receipt", "register",
    ]  # fmt: skip
    python = Path(done.pod.python)
    assert python.parent.parent == machine.root / "environments" / done.receipt.environment
    kept = machine.store.find_pod("bare")
    assert kept is not None
    assert kept.python == str(python)
    assert machine.store.provision("pod-2") == (machine.root / "provision.json").read_text()
    assert done.receipt.installed is not None
    assert done.receipt.installed.torch_version == "2.13.0+cpu"
    assert "git" in done.receipt.missing
    installs = [call for call in machine.calls() if call.startswith("uv pip install")]
    assert "--require-hashes --requirement requirements/train.lock" in installs[0]


def test_runs_get_the_caches_of_the_pod_unless_its_owner_named_others(machine: Machine) -> None:
    python = machine.provision().pod.python
    launcher = Path(python).read_text().replace('/bin/python "$@"', "/bin/show")
    Path(python).write_text(launcher)
    show = Path(python).with_name("show")
    show.write_text('#!/bin/sh\necho "$TRITON_CACHE_DIR"; echo "$HF_HUB_CACHE"\n')
    show.chmod(0o755)
    environment = {"PATH": str(machine.bin), "HF_HUB_CACHE": "/data/hub"}
    said = subprocess.run([python], env=environment, capture_output=True, text=True, check=True)
    assert said.stdout.splitlines() == [f"{machine.root}/caches/triton", "/data/hub"]


def test_a_second_run_looks_once_and_changes_nothing(machine: Machine) -> None:
    machine.provision()
    machine.calls()
    before = {path: path.stat().st_mtime_ns for path in machine.root.rglob("*")}
    machine.link.asked.clear()
    assert machine.provision().done == []
    assert len(machine.link.asked) == 1
    assert [call for call in machine.calls() if call.startswith("uv")] == []
    assert {path: path.stat().st_mtime_ns for path in machine.root.rglob("*")} == before


def test_a_link_that_is_cut_in_every_step_only_delays_it(machine: Machine) -> None:
    """Each attempt may look and do one thing, and loses the answer of the next."""
    cuts = 0
    while True:
        machine.link.left = 2
        try:
            machine.provision()
        except PodUnreachableError:
            cuts += 1
            assert cuts < 20
            continue
        break
    assert cuts >= 6  # folders, code, source, environment, launcher, receipt
    environments = [call for call in machine.calls() if call.startswith("uv venv")]
    assert len(environments) == 1
    machine.link.left = 10**9
    assert machine.provision().done == []
    assert [intent.act for intent in machine.store.open_intents()] == []


def test_an_environment_that_was_left_half_made_is_made_anew(machine: Machine) -> None:
    done = machine.provision()
    place = machine.root / "environments" / done.receipt.environment
    (place / "made-from-train").unlink()
    (place / "left-over").touch()
    assert machine.provision().done == ["environment", "launcher"]
    assert not (place / "left-over").exists()


def test_code_that_was_left_half_shipped_is_shipped_again(machine: Machine) -> None:
    done = machine.provision()
    code = machine.root / "code" / done.receipt.code_id
    (code / "CODE_ID").unlink()
    shutil.rmtree(code)
    assert machine.provision().done == ["ship code"]
    assert (code / "nsa_core" / "loop.py").read_text() == "steps = 2\n"


def test_the_bundle_and_the_difference_give_the_very_code_again(machine: Machine) -> None:
    receipt = machine.provision().receipt
    source, again = machine.root / "source", machine.folder / "again"
    bundle = source / f"{receipt.code_commit}.bundle"
    subprocess.run(["git", "clone", "--quiet", bundle, again], check=True)
    assert take_snapshot(again).code_id != receipt.code_id
    difference = source / f"{receipt.code_id}.diff"
    subprocess.run(["git", "-C", again, "apply", "--binary", difference], check=True)
    assert take_snapshot(again).code_id == receipt.code_id
    assert take_snapshot(again).commit == receipt.code_commit


def test_what_the_installer_says_is_what_the_operator_reads(machine: Machine) -> None:
    machine.put("uv", '#!/bin/sh\n[ "$1" = venv ] && mkdir -p "$6/bin"\n[ "$1" != pip ]\n')
    with pytest.raises(LocalResourceError) as failed:
        machine.provision()
    assert "Step `environment` failed on pod `bare`: the packages could not" in failed.value.message
    assert "check the network" in failed.value.hint


@pytest.mark.parametrize(
    ("last", "why", "hint"),
    [
        (
            "  cause: tcp connect error\n  cause: Connection refused (os error 111)",
            "the packages could not be installed: Connection refused (os error 111)",
            "check the network",
        ),
        (
            "  cause: `/x/torch.so`: No space left on device (os error 28)\nnote: pip tries now",
            "could not be installed: `/x/torch.so`: No space left on device (os error 28)",
            "Free space there, then repeat `nsa-ops provision`",
        ),
        ("", "the packages could not be installed: ", "check the network"),
    ],
)
def test_the_reason_of_the_installer_reaches_the_operator(
    machine: Machine, last: str, why: str, hint: str
) -> None:
    (machine.folder / "said").write_text(f"error: Failed\n{last}\n" if last else "")
    fails = f'cat "{machine.folder}/said" >&2; exit 1'
    machine.put("uv", f'#!/bin/sh\n[ "$1" = venv ] && exec mkdir -p "$6/bin"\n{fails}\n')
    with pytest.raises(LocalResourceError) as failed:
        machine.provision()
    assert why in failed.value.message
    assert "above" not in failed.value.message
    assert failed.value.hint.startswith(hint)


def test_a_wheel_of_flash_attention_that_cannot_be_imported_is_taken_out(machine: Machine) -> None:
    given = wheel(machine.folder)
    with pytest.raises(VerificationError, match="undefined symbol"):
        machine.provision(given)
    assert any("pip uninstall --quiet --yes flash-attn" in call for call in machine.calls())
    (machine.folder / "importable").touch()
    receipt = machine.provision(given).receipt
    assert receipt.flash_attention.startswith(f"{given.name} ")
    assert machine.provision(given).done == []


def test_a_machine_without_tmux_and_rights_is_refused_before_anything_changes(
    machine: Machine,
) -> None:
    (machine.bin / "tmux").unlink()
    before = sorted(machine.root.rglob("*"))
    with pytest.raises(RefusedError, match="lacks tmux"):
        machine.provision()
    assert sorted(machine.root.rglob("*")) == before


def test_a_disk_that_is_too_small_is_refused_with_what_is_needed(machine: Machine) -> None:
    (machine.bin / "df").unlink()
    machine.put("df", "#!/bin/sh\necho head\necho / 100 50 2048 50% /\n")
    with pytest.raises(RefusedError, match=r"host.disk.: 2 MiB free .* \(needs >= 4 GiB\)"):
        machine.provision()


@pytest.mark.parametrize("free", ["²", "9" * 400, "9" * 5000, "-5", "nan"])
def test_a_machine_that_tells_nonsense_of_its_disk_is_one_of_which_it_is_unknown(
    machine: Machine, free: str
) -> None:
    (machine.bin / "awk").unlink()
    machine.put("awk", f"#!/bin/sh\necho {free}\n")
    facts = read_bare(machine.link, str(machine.root), code_id="x", commit="y")
    assert (facts.disk_free_bytes, facts.shm_free_bytes, facts.memory_free_bytes) == (None,) * 3


def test_apt_is_run_as_root_or_by_a_sudo_without_a_password(machine: Machine) -> None:
    """`id` says that this is root; then that it is not, and sudo is there."""
    installed = " ".join(f'"{machine.bin}/{name}"' for name in ("tmux", "rsync", "git"))
    apt = f'#!/bin/sh\necho "apt-get $*" >>"{machine.folder}/calls"\n'
    install = f"case $* in *tmux*) touch {installed}; chmod +x {installed} ;; esac\n"
    machine.put("apt-get", apt + install)
    machine.put("dpkg", apt)
    (machine.bin / "tmux").unlink()
    (machine.bin / "id").unlink()
    machine.put("id", "#!/bin/sh\necho 0\n")
    assert machine.provision().done[0] == "tools"
    assert any(call.endswith("--no-install-recommends tmux rsync git") for call in machine.calls())

    (machine.bin / "tmux").unlink()
    machine.put("id", "#!/bin/sh\necho 1000\n")
    machine.put("sudo", '#!/bin/sh\n[ "$1" = -n ] && shift && exec "$@"\n')
    assert machine.provision().done[0] == "tools"


@pytest.mark.parametrize("sudo", ["read answer; exit 1", "exit 1"])
def test_a_sudo_that_asks_for_a_password_is_no_right(machine: Machine, sudo: str) -> None:
    machine.put("apt-get", "#!/bin/sh\n")
    machine.put("sudo", f"#!/bin/sh\n{sudo}\n")
    (machine.bin / "id").unlink()
    machine.put("id", "#!/bin/sh\necho 1000\n")
    facts = read_bare(machine.link, str(machine.root), code_id="x", commit="y")
    assert facts.rights == "none"


def test_a_tool_that_hangs_costs_its_deadline_and_no_more(machine: Machine) -> None:
    machine.put("timedatectl", "#!/bin/sh\nexec sleep 60\n")
    facts = read_bare(machine.link, str(machine.root), code_id="x", commit="y")
    assert facts.is_synchronised is None


def test_the_receipt_in_the_registry_survives_and_a_new_one_replaces_it(machine: Machine) -> None:
    machine.provision()
    first = json.loads(machine.store.provision("pod-2"))
    machine.store.save_provision("pod-2", 2.0, "{}")
    assert machine.provision().done == ["register"]
    assert json.loads(machine.store.provision("pod-2")) == first
    with sqlite3.connect(machine.store.path) as registry:
        assert registry.execute("SELECT count(*) FROM provisions").fetchone() == (1,)
