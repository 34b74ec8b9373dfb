import os
import shutil
import sys
from pathlib import Path

import pytest

from nsa_ops.errors import DeadlineError, NotFoundError, VerificationError
from nsa_ops.machine.host import (
    NEEDED,
    TOOLS,
    HostFacts,
    PythonFacts,
    parse_answer,
    read_host,
    read_python,
)
from nsa_ops.remote.local import LocalTransport
from tests.ops.fakes import FakeTransport, completed


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


@pytest.mark.parametrize("answer", ["", "Traceback", "{}", "[1]"])
def test_an_answer_that_is_not_one_is_refused(answer: str) -> None:
    assert parse_answer(HostFacts, answer) is None
    with pytest.raises(VerificationError, match="gave no answer: boom"):
        read_host(FakeTransport({"-I": completed(answer, stderr="boom\n")}), "python3", "/pod")


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
