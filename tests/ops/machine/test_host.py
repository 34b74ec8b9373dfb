"""What a machine and its interpreter say of themselves, and what is concluded from it."""

import os
import shutil
import sys
from pathlib import Path

import pytest

from nsa_core.config.profile import load_profile
from nsa_core.rundir.report import CheckResult
from nsa_ops.errors import DeadlineError, NotFoundError, VerificationError
from nsa_ops.machine.bare import parse_bare
from nsa_ops.machine.host import (
    NEEDED,
    TOOLS,
    HostFacts,
    PythonFacts,
    parse_answer,
    read_host,
    read_python,
)
from nsa_ops.machine.judge_host import judge_host, judge_python
from nsa_ops.preflight.preflight import blocking_checks
from nsa_ops.remote.local import LocalTransport
from tests.ops.fakes import FakeTransport, completed

GIB = 2**30
A100 = load_profile("a100")
CPU = load_profile("cpu")
HOST = HostFacts(
    python_version="3.11.7", num_cpus=8, memory_bytes=64 * GIB, memory_free_bytes=60 * GIB,
    disk_free_bytes=500 * GIB, disk_path="/pod", shm_free_bytes=8 * GIB, open_files_limit=65536,
    tools={name: f"/usr/bin/{name}" for name in TOOLS}, unix_s=1000.0,
    system="Linux 6.1.0-18-amd64",
)  # fmt: skip


def test_the_facts_of_this_machine_are_read() -> None:
    facts = read_host(LocalTransport({"PATH": os.environ["PATH"]}), sys.executable, "/none/such")
    assert facts.python_pair == sys.version_info[:2]
    assert facts.disk_path == "/"
    assert facts.num_cpus is not None
    assert facts.num_cpus >= 1
    assert set(facts.tools) == set(TOOLS)
    assert facts.system.startswith("Linux ")


def test_noise_before_the_answer_is_skipped() -> None:
    facts = parse_answer(
        HostFacts, 'Welcome to the pod\n{"python_version": "3.12.1", "unix_s": 1.0}\n'
    )
    assert facts is not None
    assert facts.python_pair == (3, 12)
    assert facts.memory_bytes is None


@pytest.mark.parametrize(
    "answer", ["", "Traceback", "{}", "[1]", '{"python_version": "three", "unix_s": 1.0}']
)
def test_an_answer_that_is_not_one_is_refused(answer: str) -> None:
    assert parse_answer(HostFacts, answer) is None
    with pytest.raises(VerificationError, match="gave no answer: boom"):
        read_host(FakeTransport({"-I": completed(answer, stderr="boom\n")}), "python3", "/pod")


def test_an_interpreter_without_a_readable_version_is_left_out() -> None:
    said = "uid\t0\nrights\troot\nclock\t1.0\npython\t/a\tthree\t1\t1\npython\t/b\t3.12.1\t1\t1\n"
    assert [one.pair for one in parse_bare(said).pythons] == [(3, 12)]


def test_every_tool_that_a_bare_machine_lacks_is_named(tmp_path: Path) -> None:
    for tool in ("sh", "head"):
        (tmp_path / tool).symlink_to(shutil.which(tool) or "")
    with pytest.raises(NotFoundError) as refused:
        read_host(LocalTransport({"PATH": str(tmp_path)}), "python3", "/pod")
    for tool in ("python3", *NEEDED):
        assert (tool in refused.value.message) == (tool != "head")


def test_a_torch_that_hangs_is_a_fact() -> None:
    facts = read_python(FakeTransport({"-I": DeadlineError("did not end")}), "python3")
    assert (facts.torch_version, facts.error) == (None, "did not end")


def test_an_interpreter_that_crashes_is_a_fact() -> None:
    transport = FakeTransport({"-I": completed("", exit_code=139, stderr="Segmentation fault\n")})
    assert read_python(transport, "python3").error == "exit code 139: Segmentation fault"


def test_torch_facts_are_parsed() -> None:
    facts = parse_answer(
        PythonFacts, '{"missing": ["yaml"], "torch_version": "2.13.0", "cuda_available": true}'
    )
    assert facts is not None
    assert (facts.missing, facts.torch_version, facts.product) == (["yaml"], "2.13.0", None)


def host(**changes: object) -> dict[str, str]:
    facts = HOST.model_copy(update=changes)
    return {one.name: one.status for one in judge_host(facts, is_local=False, laptop_unix_s=1000.0)}


def status_of(results: list[CheckResult], name: str) -> str:
    return next(one.status for one in results if one.name == name)


def test_a_good_machine_passes_everything() -> None:
    assert set(host().values()) == {"pass"}


@pytest.mark.parametrize(
    ("name", "changes", "status"),
    [
        ("host.python", {"python_version": "3.10.9"}, "fail"),
        ("host.tmux", {"tools": {"rsync": "/usr/bin/rsync"}}, "fail"),
        ("host.tools", {"tools": {"tmux": "/usr/bin/tmux", "rsync": "/usr/bin/rsync"}}, "fail"),
        ("host.system", {"system": "Darwin 23.4.0"}, "fail"),
        ("host.system", {"system": "Linux 5.15.167.4-microsoft-standard-WSL2"}, "warn"),
        ("host.rsync", {"tools": {"tmux": "/usr/bin/tmux"}}, "warn"),
        ("host.disk", {"disk_writable": False}, "fail"),
        ("host.memory", {"memory_free_bytes": GIB}, "warn"),
        ("host.memory", {"memory_free_bytes": None}, "unknown"),
        ("host.shm", {"shm_free_bytes": 1024}, "warn"),
        ("host.open_files", {"open_files_limit": 256}, "warn"),
        ("host.open_files", {"open_files_limit": -1}, "pass"),
        ("host.logout", {"ends_at_logout": True}, "fail"),
        ("host.clock", {"unix_s": 1060.0}, "warn"),
    ],
)
def test_what_is_wrong_with_a_machine_is_named(
    name: str, changes: dict[str, object], status: str
) -> None:
    assert host(**changes)[name] == status


def test_every_warning_and_failure_says_what_to_do() -> None:
    facts = HOST.model_copy(update={"python_version": "3.8.1", "tools": {}, "unix_s": 0.0})
    results = judge_host(facts, is_local=False, laptop_unix_s=1000.0)
    assert all(one.hint for one in results if one.status in {"fail", "warn"})


def test_the_operators_own_machine_needs_no_clock_check() -> None:
    facts = HOST.model_copy(update={"tools": {"tmux": "/usr/bin/tmux"}, "unix_s": 0.0})
    results = judge_host(facts, is_local=True, laptop_unix_s=1000.0)
    assert status_of(results, "host.rsync") == "warn"
    assert status_of(results, "host.clock") == "skipped"


def test_a_torch_that_cannot_compute_on_the_card_fails() -> None:
    facts = PythonFacts(torch_version="2.13", cuda_available=True, product=0.0)
    assert status_of(judge_python(facts, A100), "python.cuda") == "fail"
    assert status_of(judge_python(facts, CPU), "python.cuda") == "skipped"
    right = facts.model_copy(update={"product": 262144.0})
    assert status_of(judge_python(right, A100), "python.cuda") == "pass"


def test_missing_packages_and_a_missing_torch_fail() -> None:
    results = judge_python(PythonFacts(missing=["yaml"], error="No module named torch"), CPU)
    assert [one.status for one in results] == ["fail", "fail", "skipped"]


def _check(name: str, status: str) -> CheckResult:
    return CheckResult(name=name, status=status, message="")  # type: ignore[arg-type]


def test_no_probe_is_not_a_pass() -> None:
    assert blocking_checks([_check("host.python", "pass")]) == ["causality (no probe passed)"]
    proven = _check("causality.perturbation", "pass")
    assert blocking_checks([proven, _check("host.shm", "warn")]) == []
    assert blocking_checks([proven, _check("parity.selected", "unknown")]) == ["parity.selected"]


def test_what_torch_said_of_the_driver_is_explained() -> None:
    facts = PythonFacts(
        torch_version="2.13", error="Error 804: forward compatibility was attempted"
    )
    found = next(one for one in judge_python(facts, A100) if one.name == "python.cuda")
    assert "cuda-compat" in found.message
    assert "driver" in found.hint
