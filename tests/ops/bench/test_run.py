"""A bench on a pod: the code that is here, its answer, and each way it can fail."""

import pytest

from nsa_core.config.run import RunConfig
from nsa_core.rundir.bench_result import parse_bench_result
from nsa_ops.bench.run import Benched, BenchRequest, run_bench, run_validation
from nsa_ops.configure import RunChoice
from nsa_ops.errors import ConfigurationError, LocalResourceError, OpsError, VerificationError
from tests.ops.bench.results import LONG_ROW, ROW, document
from tests.ops.cli_case import CommandLine
from tests.ops.fakes import completed
from tests.ops.operators import Desk


def bench_on(desk: Desk, *, stdout: str = "", exit_code: int = 0, stderr: str = "") -> None:
    """Let the pod have the code already and answer the bench."""
    desk.transport.answers["CODE_ID"] = completed()
    desk.transport.answers["nsa_core.bench"] = completed(stdout, exit_code=exit_code, stderr=stderr)


def test_the_pod_runs_the_shipped_code_and_is_told_the_commit(desk: Desk) -> None:
    bench_on(desk, stdout=document([ROW, LONG_ROW]))
    found = run_bench(desk.operator, None, BenchRequest("kernels", ("--length", "2048")))
    assert found.source == "pod a100-1"
    assert [row["T"] for row in found.result.rows] == [2048, 65536]
    assert found.error is None
    words = " ".join(desk.transport.asked[-1])
    assert "PYTHONPATH=/pod/code/" in words
    assert "-m nsa_core.bench kernels --json - --commit " in words
    assert words.endswith("--length 2048")


@pytest.mark.parametrize(
    ("exit_code", "expected", "said"),
    [
        (11, LocalResourceError, "`bench kernels` needs a CUDA card, and torch sees none here"),
        (2, ConfigurationError, "--length 3000: no whole number"),
        (1, VerificationError, "RuntimeError: CUDA error: an illegal memory access"),
        (137, VerificationError, "Killed"),
    ],
)
def test_each_end_without_a_result_has_its_own_code_and_the_pods_own_words(
    desk: Desk, exit_code: int, expected: type[OpsError], said: str
) -> None:
    bench_on(desk, exit_code=exit_code, stderr=f"a table\nerror: {said}\n")
    with pytest.raises(expected) as caught:
        run_bench(desk.operator, None, BenchRequest("kernels"))
    assert caught.type is expected
    assert said in caught.value.message
    assert "a100-1" in caught.value.message
    assert caught.value.hint


def test_an_answer_that_is_no_result_is_not_taken_for_one(desk: Desk) -> None:
    bench_on(desk, stdout='{"card": "NVIDIA T1000"}')
    with pytest.raises(VerificationError, match=r"answer of pod `a100-1` is no bench result: "):
        run_bench(desk.operator, None, BenchRequest("kernels"))


def test_a_result_that_proves_something_wrong_comes_back_with_what_is_wrong(desk: Desk) -> None:
    bench_on(desk, stdout=document([ROW]), exit_code=9, stderr="T 1\nerror: triton differs\n")
    found = run_bench(desk.operator, None, BenchRequest("kernels"))
    assert found.result.rows == [ROW]
    assert found.error is not None
    assert (found.error.message, found.error.exit_code) == ("triton differs", 9)


def test_what_a_comparison_writes_lies_below_the_root_of_the_pod(
    desk: Desk, cli: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[BenchRequest] = []

    def measure(_operator: object, _pod: object, request: BenchRequest) -> Benched:
        asked.append(request)
        return Benched("pod here", parse_bench_result(document([], bench="compare"), "it"))

    monkeypatch.setattr("nsa_ops.bench.run.run_bench", measure)
    for words in ((), ("--root", "mine"), ("--root", "/big/disk")):
        assert cli("bench", "compare", *words).exit_code == 0
    assert [one.root for one in asked] == ["compare", "mine", "/big/disk"]
    bench_on(desk, stdout=document([], bench="compare"))
    for request, root in zip(asked, ("/pod/compare", "/pod/mine", "/big/disk"), strict=True):
        run_bench(desk.operator, None, request)
        assert f" --root {root}" in " ".join(desk.transport.asked[-1])


def test_the_matrix_gets_the_resolved_configuration_and_the_pods_own_folder(desk: Desk) -> None:
    bench_on(desk, stdout=document([], bench="validate"))
    choice = RunChoice("tiny-cpu", "", ("batch.micro_batch=3",))
    run_validation(desk.operator, None, choice, ["--steps", "3"])
    words = " ".join(desk.transport.asked[-1])
    assert words.endswith("--root /pod --config - --steps 3")
    config = RunConfig.model_validate_json(desk.transport.inputs[-1])
    assert (config.recipe, config.batch.micro_batch, config.runtime.device) == (
        "tiny-cpu",
        3,
        "cpu",
    )
