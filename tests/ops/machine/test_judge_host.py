import pytest

from nsa_core.config.profile import load_profile
from nsa_core.rundir.report import CheckResult
from nsa_ops.machine.host import TOOLS, HostFacts, PythonFacts
from nsa_ops.machine.judge_host import judge_host, judge_python
from nsa_ops.preflight.preflight import blocking_checks

GIB = 2**30
A100 = load_profile("a100")
CPU = load_profile("cpu")
HOST = HostFacts(
    python_version="3.11.7", num_cpus=8, memory_bytes=64 * GIB, memory_free_bytes=60 * GIB,
    disk_free_bytes=500 * GIB, disk_path="/pod", shm_free_bytes=8 * GIB, open_files_limit=65536,
    tools={name: f"/usr/bin/{name}" for name in TOOLS}, unix_s=1000.0,
    system="Linux 6.1.0-18-amd64",
)  # fmt: skip


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
