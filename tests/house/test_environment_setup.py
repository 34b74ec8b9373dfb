"""tools/setup.sh says what a machine lacks, uses a good environment again and remakes a broken one.

The interpreters and installers are stand-ins that record how they were called: what is tested is
what the script decides, not what a package index serves.
"""

import shutil
import subprocess
from pathlib import Path

import pytest

TOOLS = ["sh", "cat", "cksum", "dirname", "rm", "mkdir", "chmod", "env", "sed", "timeout"]

PYTHON = """#!/bin/sh
# A Python 3.12 whose environments hold copies of itself.
here=$(dirname "$0")
case "$*" in
*"import sys"*) exit {suits} ;;
-VV) echo "Python 3.12 stand-in" ;;
"-m venv "*)
  [ {venv} = yes ] || exit 1
  mkdir -p "$3/bin" && cat "$0" >"$3/bin/python" && cat "$here/uv-of-lock" >"$3/bin/uv-of-lock"
  chmod +x "$3/bin/python"
  ;;
*find_spec*) [ -e "$here/works" ] ;;
"-m pip install"*)
  echo "pip $*" >>"$PWD/calls"
  case "$*" in
  *--no-index*) exit {local_wheel} ;;
  *--editable*) : >"$here/works" ;;
  *.lock) [ {index} = 0 ] && cat "$here/uv-of-lock" >"$here/uv" && chmod +x "$here/uv" ;;
  esac
  exit {index}
  ;;
esac
"""

UV_OF_LOCK = """#!/bin/sh
echo "uv-of-lock $*" >>"$PWD/calls"
case "$*" in
*.lock) exit {uv_index} ;;
*) : >"$(dirname "$0")/works" ;;
esac
exit {uv_torch}
"""

UV = """#!/bin/sh
echo "uv $*" >>"$PWD/calls"
case "$1 $*" in
"venv "*) for folder; do :; done; exec "$(dirname "$0")/python3" -m venv "$folder" ;;
*--editable*) : >.venv/bin/works ;;
esac
"""


class Machine:
    """A copy of the set-up script and a PATH that holds only what the test puts there."""

    def __init__(self, root: Path, repository: Path) -> None:
        self.checkout = root / "checkout"
        self.bin = root / "bin"
        self.bin.mkdir()
        for name in TOOLS:
            found = shutil.which(name)
            assert found is not None
            (self.bin / name).symlink_to(found)
        (self.checkout / "tools").mkdir(parents=True)
        shutil.copy2(repository / "tools/setup.sh", self.checkout / "tools")
        shutil.copytree(repository / "requirements", self.checkout / "requirements")
        self.put("tmux", "#!/bin/sh\n")
        self.python()

    def put(self, name: str, script: str) -> None:
        (self.bin / name).write_text(script)
        (self.bin / name).chmod(0o755)

    def python(self, **answers: object) -> None:
        defaults = {
            "suits": 0, "venv": "yes", "local_wheel": 1, "index": 0, "uv_index": 0, "uv_torch": 0,
        }  # fmt: skip
        merged = {key: str(value) for key, value in (defaults | answers).items()}
        script, uv_of_lock = PYTHON, UV_OF_LOCK
        for key, value in merged.items():
            script = script.replace("{" + key + "}", value)
            uv_of_lock = uv_of_lock.replace("{" + key + "}", value)
        self.put("python3", script)
        self.put("uv-of-lock", uv_of_lock)

    def setup(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [self.checkout / "tools/setup.sh", *arguments],
            env={"PATH": str(self.bin)},
            capture_output=True,
            text=True,
            check=False,
            stdin=subprocess.DEVNULL,
        )

    def calls(self) -> list[str]:
        """What was installed since the last time somebody asked."""
        record = self.checkout / "calls"
        lines = record.read_text().splitlines() if record.exists() else []
        record.unlink(missing_ok=True)
        return lines


@pytest.fixture
def machine(tmp_path: Path, repository: Path) -> Machine:
    return Machine(tmp_path, repository)


def error_and_hint(done: subprocess.CompletedProcess[str]) -> tuple[str, str]:
    error, hint = done.stderr.splitlines()[-2:]
    assert error.startswith("error: ")
    assert hint.startswith("hint: ")
    assert done.returncode == 11
    return error, hint


def test_an_old_python_is_named_with_the_fix(machine: Machine) -> None:
    machine.python(suits=1)
    error, hint = error_and_hint(machine.setup("train"))
    assert "Python 3.11" in error
    assert "apt-get install python3" in hint
    assert not (machine.checkout / ".venv").exists()


def test_missing_tmux_is_named_with_the_fix(machine: Machine) -> None:
    (machine.bin / "tmux").unlink()
    error, hint = error_and_hint(machine.setup("train"))
    assert "tmux" in error
    assert "apt-get install tmux" in hint


def test_a_missing_venv_module_is_named_with_the_fix(machine: Machine) -> None:
    machine.python(venv="no")
    error, hint = error_and_hint(machine.setup("train"))
    assert "virtual environment" in error
    assert "python3-venv" in hint
    assert not (machine.checkout / ".venv").exists()


def test_an_index_out_of_reach_is_named_and_the_next_call_starts_again(machine: Machine) -> None:
    machine.python(index=1)
    error, hint = error_and_hint(machine.setup("train"))
    assert "packages could not be installed" in error
    assert "network" in hint
    machine.python()
    assert machine.setup("train").returncode == 0


def test_an_unknown_set_is_a_usage_error(machine: Machine) -> None:
    assert machine.setup("everything").returncode == 2


def test_without_uv_pip_installs_the_one_of_the_lock_and_that_one_the_rest(
    machine: Machine,
) -> None:
    assert machine.setup("train").returncode == 0
    pip, uv = machine.calls()[:2]
    assert pip.endswith(" --require-hashes --requirement .venv/uv.lock")
    assert uv.startswith("uv-of-lock pip install")
    assert uv.endswith(" --require-hashes --requirement requirements/train.lock")
    wanted = (machine.checkout / ".venv/uv.lock").read_text()
    assert wanted.startswith("uv==")
    assert "--hash=sha256:" in wanted
    assert wanted.count("==") == 1


def test_an_index_that_only_pip_knows_is_asked_by_pip(machine: Machine) -> None:
    machine.python(uv_index=2)
    done = machine.setup("train")
    assert done.returncode == 0
    assert "note: that failed with uv, for the reason above; pip tries now" in done.stderr
    last = [call for call in machine.calls() if call.endswith("requirements/train.lock")][-1]
    assert last.startswith("pip -m pip install")
    assert "--require-hashes" in last


def test_uv_installs_where_it_is_present(machine: Machine) -> None:
    machine.put("uv", UV)
    assert machine.setup("train").returncode == 0
    calls = machine.calls()
    assert calls[0].startswith("uv venv")
    assert any(call.startswith("uv pip install") and "--require-hashes" in call for call in calls)


def test_without_a_card_a_wheel_on_this_machine_comes_before_any_download(machine: Machine) -> None:
    machine.python(local_wheel=0)
    assert machine.setup("train").returncode == 0
    calls = machine.calls()
    assert any("--no-index --no-deps --requirement requirements/torch.txt" in c for c in calls)
    assert not any("--torch-backend" in call for call in calls)


def test_without_a_card_the_cpu_build_is_asked_for(machine: Machine) -> None:
    assert machine.setup("train").returncode == 0
    assert any("--torch-backend cpu" in call for call in machine.calls())


def test_with_a_card_the_build_that_fits_it_is_asked_for(machine: Machine) -> None:
    machine.put("nvidia-smi", "#!/bin/sh\n")
    machine.python(local_wheel=0)
    assert machine.setup("train").returncode == 0
    calls = machine.calls()
    assert any("--torch-backend auto" in call for call in calls)
    assert not any("--no-index" in call for call in calls)


def test_a_broken_driver_is_no_card(machine: Machine) -> None:
    machine.put("nvidia-smi", "#!/bin/sh\nexit 9\n")
    assert machine.setup("train").returncode == 0
    assert any("--torch-backend cpu" in call for call in machine.calls())


def test_the_large_build_is_taken_only_last_and_never_in_silence(machine: Machine) -> None:
    machine.python(uv_torch=1)
    done = machine.setup("train")
    assert done.returncode == 0
    assert "note: that build is out of reach" in done.stderr


def test_a_made_environment_is_used_again(machine: Machine) -> None:
    machine.setup("train")
    machine.calls()
    assert machine.setup("train").returncode == 0
    assert machine.calls() == []


def test_the_tests_packages_are_added_to_the_environment_of_the_demo(machine: Machine) -> None:
    machine.setup("train")
    machine.calls()
    assert machine.setup("dev").returncode == 0
    assert [call for call in machine.calls() if "pip install" in call] == [
        "uv-of-lock pip install --quiet --python .venv/bin/python"
        " --require-hashes --requirement requirements/dev.lock"
    ]
    assert machine.setup("train").returncode == 0
    assert machine.calls() == []


def test_a_changed_lock_makes_the_environment_anew(machine: Machine) -> None:
    machine.setup("train")
    machine.calls()
    with (machine.checkout / "requirements/train.lock").open("a") as lock:
        lock.write("# changed\n")
    (machine.checkout / ".venv/left-over").touch()
    assert machine.setup("train").returncode == 0
    assert machine.calls()
    assert not (machine.checkout / ".venv/left-over").exists()


@pytest.mark.parametrize("lost", ["made-from-train", "bin/works", "bin/python"])
def test_an_unfinished_or_broken_environment_is_made_anew(machine: Machine, lost: str) -> None:
    machine.setup("train")
    machine.calls()
    (machine.checkout / ".venv" / lost).unlink()
    (machine.checkout / ".venv/left-over").touch()
    assert machine.setup("train").returncode == 0
    assert machine.calls()
    assert not (machine.checkout / ".venv/left-over").exists()


def pod_environment(machine: Machine, build: str = "cpu") -> tuple[str, ...]:
    folder = machine.checkout.parent / "environments" / "py3.12-made-of-this"
    folder.parent.mkdir(exist_ok=True)
    return ("pod", str(folder), str(machine.bin / "python3"), build, "torch>=2.10")


def test_a_pods_environment_holds_no_product_and_is_used_again(machine: Machine) -> None:
    words = pod_environment(machine)
    assert machine.setup(*words).returncode == 0
    made = Path(words[1]) / "made-from-train"
    assert made.read_text() == "py3.12-made-of-this\n"
    assert not (machine.checkout / ".venv").exists()
    assert not any("--editable" in call for call in machine.calls())
    assert machine.setup(*words).returncode == 0
    assert machine.calls() == []


def test_a_pods_torch_is_the_pinned_one_that_its_profile_allows(machine: Machine) -> None:
    machine.setup(*pod_environment(machine, "cu130"))
    (torch,) = [call for call in machine.calls() if "--torch-backend" in call]
    assert torch.endswith("--torch-backend cu130 --requirement requirements/torch.txt torch>=2.10")


def test_a_driver_of_cuda_12_never_gets_the_newest_build_instead(machine: Machine) -> None:
    machine.python(uv_torch=1)
    error, hint = error_and_hint(machine.setup(*pod_environment(machine, "cu126")))
    assert "torch for cu126" in error
    assert "too new for the driver" in hint


def test_a_pods_set_up_without_all_its_words_is_a_usage_error(machine: Machine) -> None:
    assert machine.setup("pod", "/somewhere").returncode == 2
