"""The comparison of NSA and dense on a CPU: five steps of the real trainer each."""

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from nsa_core.bench import compare
from nsa_core.bench.__main__ import main
from nsa_core.bench.compare import TABLE, RunRow, find_excess, read_run_row
from nsa_core.rundir.bench_result import parse_bench_result
from nsa_core.rundir.layout import RunDir
from nsa_core.rundir.manifest import read_manifest
from tests.integration.trainer_runs import write_text_once

STEPS = 5


def flags(root, text):
    values = {
        "data.source": "fineweb_edu_local", "data.path": text, "data.validation_fraction": 0.1,
        "model.dim": 16, "model.num_layers": 1, "model.num_heads": 2, "model.num_kv_groups": 1,
        "model.head_dim_k": 8, "model.head_dim_v": 8, "model.mlp_width": 32, "batch.seq_len": 64,
        "batch.micro_batch": 2, "optimizer.learning_rate": 1e-4,
        "schedule.steps": STEPS, "schedule.warmup_steps": 1,
        "telemetry.log_every": 1, "telemetry.tensorboard": "false", "checkpoint.save_every": 0,
        "evaluation.eval_every": STEPS, "evaluation.eval_batches": 2, "evaluation.sample_tokens": 0,
        "runtime.threads": 1,
    }  # fmt: skip
    sets = [word for key, value in values.items() for word in ("--set", f"{key}={value}")]
    return ["compare", "--root", str(root), "--recipe", "tiny-cpu", *sets]


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory):
    root = tmp_path_factory.mktemp("compare")
    text = write_text_once(root / "text.jsonl")
    code = main([*flags(root, text), "--json", str(root / "result.json"), "--commit", "abc"])
    return root, text, code, parse_bench_result((root / "result.json").read_bytes(), "it")


def test_both_runs_saw_the_same_text_and_only_the_attention_differs(compared) -> None:
    root, _, code, result = compared
    assert code == 0
    assert [row["attention"] for row in result.rows] == ["nsa", "dense"]
    nsa, dense = (
        read_manifest(RunDir(root / "runs" / f"compare-{name}")).config.model_dump()
        for name in ("nsa", "dense")
    )
    nsa["model"]["attention"] = "dense"
    assert nsa == dense
    assert result.rows[0]["data"] == result.rows[1]["data"]


def test_the_held_out_documents_are_in_no_training_shard(compared) -> None:
    data = compared[3].rows[0]["data"]
    assert data["shared_documents"] == 0
    assert data["held_out_documents"] > 0
    assert data["held_out_bytes"] > 0


def test_the_result_is_what_the_run_directories_say(compared) -> None:
    root, _, _, result = compared
    for row in result.rows:
        run = RunDir(root / "runs" / f"compare-{row['attention']}")
        metrics = json.loads(run.metrics.read_text())
        assert row["bits_per_byte"] == metrics["validation_last"]["bits_per_byte"]
        assert [step for step, _, _ in row["loss_curve"]] == [1, 2, 3, 4, 5]
        assert [step for step, _, _ in row["validation"]] == [0, 5]
        assert row["tokens"] == STEPS * 2 * 64
        assert sum(row["buckets_s"].values()) == pytest.approx(row["wall_s"], abs=1)


def test_the_file_names_the_command_without_the_folder_of_the_file(compared) -> None:
    _, _, _, result = compared
    root = compared[0]
    assert str(root) not in json.dumps(result.model_dump(mode="json"))
    assert result.bench == "compare"
    assert result.commit == "abc"
    assert "--json result.json" in result.command


def test_a_folder_that_holds_such_runs_is_refused(
    compared, capsys: pytest.CaptureFixture[str]
) -> None:
    root, text, *_ = compared
    assert main(flags(root, text)) == 2
    assert "exists already" in capsys.readouterr().err


def test_text_that_is_not_there_is_said_in_one_line_after_where_it_was_to_be_staged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(flags(tmp_path, tmp_path / "missing.jsonl")) == 2
    staging, error = capsys.readouterr().err.splitlines()
    assert staging == f"staging the text below {tmp_path / 'data'}"
    assert "does not exist; correct data.path" in error


def test_steps_of_which_none_is_logged_are_refused_before_anything_is_staged(
    compared, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, text, *_ = compared
    root = tmp_path / "root"
    words = [*flags(root, text), "--set", f"telemetry.log_every={STEPS + 1}"]
    assert main(words) == 2
    output = capsys.readouterr()
    assert (output.out, output.err.count("\n")) == ("", 1)
    assert "schedule.steps 5 is below telemetry.log_every 6" in output.err
    assert not root.exists()


@pytest.mark.parametrize("table", ["training_csv", "validation_csv"])
def test_a_run_without_a_row_in_a_table_is_said_to_lack_it(
    compared, tmp_path: Path, table: str
) -> None:
    root, *_ = compared
    run = RunDir(shutil.copytree(root / "runs" / "compare-nsa", tmp_path / "run"))
    getattr(run, table).unlink()
    with pytest.raises(ValueError, match=r"no row in training\.csv or val\.csv"):
        read_run_row(run, "nsa", rows_of(compared)[0].data, ())


def test_a_run_that_fails_ends_the_comparison_with_the_end_of_its_log(
    compared, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, text, *_ = compared
    words = [*flags(tmp_path, text), "--set", "runtime.device=cuda"]
    assert main(words) == 2
    error = capsys.readouterr().err
    log = RunDir(tmp_path / "runs" / "compare-nsa").log
    assert f"training compare-nsa to step {STEPS}; its log is {log}\n" in error
    assert "compare-nsa ended with code" in error
    assert "torch sees no CUDA card here" in error


def rows_of(compared):
    rows = []
    for values in compared[3].rows:
        data = type("Data", (), values["data"])
        rows.append(RunRow(**{**values, "data": data}))
    return rows


def test_nsa_that_is_clearly_worse_fails_the_comparison(compared) -> None:
    nsa, dense = rows_of(compared)
    level = replace(nsa, bits_per_byte=dense.bits_per_byte + 0.019)
    worse = replace(nsa, bits_per_byte=dense.bits_per_byte + 0.021)
    assert find_excess([level, dense]) is None
    assert "against dense: nsa +0.0210; at most" in find_excess([worse, dense])
    assert find_excess([worse]) is None
    base = replace(dense, name="base")
    tried = replace(worse, name="runtime.precision=bf16")
    lost = replace(worse, name="optimizer.kind=muon", bits_per_byte=math.nan)
    assert find_excess([base, replace(level, name="optimizer.beta1=0.8")]) is None
    assert "base: runtime.precision=bf16 +0.0210; at" in find_excess([base, tried])
    assert "bf16 +0.0210, optimizer.kind=muon +nan; at" in find_excess([base, tried, lost])


def test_text_that_was_not_held_out_fails_the_comparison(compared) -> None:
    nsa, dense = rows_of(compared)
    shared = type("Data", (), {"shared_documents": 1})
    assert "in the training split as well" in find_excess([replace(nsa, data=shared), dense])


def test_a_row_is_one_line(compared) -> None:
    line = TABLE.line(rows_of(compared)[0])
    assert line.split()[:2] == ["5", "640"]
    assert line.endswith("  nsa")


def test_each_setting_that_is_tried_is_a_run_beside_the_base(
    compared,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    root, text, *_ = compared

    allocators = []

    def train(run: RunDir, allocator: str) -> None:
        """Leave what a run that was trained has left."""
        allocators.append(allocator)
        for file in (root / "runs" / "compare-nsa").iterdir():
            if file.is_file() and file != RunDir(file.parent).manifest:
                shutil.copy(file, run.root)

    monkeypatch.setattr(compare, "train", train)
    allocator = "runtime.allocator=backend:native"
    tried = ["--vary", allocator, "--vary", "optimizer.kind=muon"]
    result = tmp_path / "result.json"
    assert main([*flags(tmp_path, text), *tried, "--json", str(result)]) == 0
    rows = parse_bench_result(result.read_bytes(), "it").rows
    assert [row["name"] for row in rows] == ["base", *tried[1::2]]
    base, native, muon = (
        read_manifest(RunDir(tmp_path / "runs" / f"compare-{name}")).config
        for name in ("base", "1", "2")
    )
    assert base.model_copy(update={"runtime": native.runtime}) == native
    assert allocators == [one.runtime.allocator for one in (base, native, muon)]
    assert base.model_copy(update={"optimizer": muon.optimizer}) == muon
    assert [row["overrides"][-1] for row in rows[1:]] == tried[1::2]
    assert capsys.readouterr().out.splitlines()[-1].endswith("  optimizer.kind=muon")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["batch.seq_len=64"], "--vary batch.seq_len: the runs would not see the same tokens"),
        (["seed=2"], "--vary seed: the runs would not see the same tokens"),
        (["data.pack_documents=false"], "--vary data.pack_documents: the runs would not see"),
        (["schedule.steps=9"], "--vary schedule.steps: the runs would not see the same tokens"),
        (["recipe=other"], "--vary recipe=other: all runs have one recipe; choose it with"),
        (["optimizer.kind=muon", "optimizer.kind=muon"], "--vary optimizer.kind=muon is given tw"),
        (["optimizer.kind=adamw"], "--vary optimizer.kind=adamw changes nothing: the run would be"),
        (["optimizer.beta1=0.8", "optimizer.beta1= 0.80"], "would be that of optimizer.beta1=0.8"),
        (["nonsense"], "--vary 'nonsense' must look like"),
        (["optimiser.kind=muon"], "--vary: unknown key"),
        (["optimizer.kind=sgd"], "--vary optimizer.kind=sgd: optimizer.kind: "),
        (["runtime.half_residual=true"], "--vary runtime.half_residual=true: runtime.half_resid"),
        (["telemetry.log_every=100000"], "is below telemetry.log_every 100000"),
        (["runtime.cpu_ranks=2"], "this bench trains in one process, and the run has 2 ranks"),
    ],
)  # fmt: skip
def test_what_cannot_be_varied_is_refused_before_anything_is_staged(
    words: list[str],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(compare, "stage", None)
    varied = [flag for word in words for flag in ("--vary", word)]
    even = ["--set", "batch.accumulation=2"]
    assert main(["compare", "--root", str(tmp_path / "c"), *even, *varied]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert message in err
    assert not (tmp_path / "c").exists()


def test_a_kind_of_attention_is_refused_because_both_are_trained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--root", str(tmp_path / "compare"), "--set", "model.attention=dense"]
    assert main(["compare", *flags]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: --set model.attention: this bench trains both")
