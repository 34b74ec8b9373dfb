"""`python -m nsa_core.generate`: the run's own model and tokenizer, one line on bad input."""

import io
import json
import sys
from pathlib import Path

import pytest
import torch

from nsa_core.evaluate import device
from nsa_core.evaluate import sampling as evaluate
from nsa_core.evaluate.sampling import stream
from nsa_core.generate import main, rate_of, read_prompt
from nsa_core.rundir.exit import TrainerExit
from nsa_core.rundir.manifest import read_manifest
from tests.core.evaluate.run_case import flip_a_bit, make_run, save


@pytest.fixture(scope="module", params=["byte", "bpe"])
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    """A run, its model and its tokenizer's name."""
    run = make_run(tmp_path_factory.mktemp("run"), tokenizer=request.param)
    model, _ = save(run, read_manifest(run).config, 5)
    return run, model


def call(run, *words) -> int:
    return main(["--run", str(run.root), "--device", "cpu", *words])


def test_json_says_which_weights_wrote_what(trained, capsys: pytest.CaptureFixture[str]) -> None:
    run, _ = trained
    words = ("--prompt", "Wet sand", "--max-new-tokens", "6", "--temperature", "0.9", "--seed", "3")
    assert call(run, *words, "--json") == TrainerExit.FINISHED
    first = json.loads(capsys.readouterr().out)
    assert (first["step"], first["prompt"], first["seed"]) == (5, "Wet sand", 3)
    assert first["weights"].endswith("step_000005/model.safetensors")
    assert call(run, *words) == TrainerExit.FINISHED
    assert capsys.readouterr().out == first["text"] + "\n"


def test_a_prompt_may_come_from_stdin_or_be_empty(
    trained, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, _ = trained
    monkeypatch.setattr(sys, "stdin", io.StringIO("Dry sand"))
    assert call(run, "--prompt", "-", "--max-new-tokens", "2", "--json") == 0
    assert json.loads(capsys.readouterr().out)["prompt"] == "Dry sand"
    assert call(run, "--prompt", "", "--max-new-tokens", "2", "--json") == 0


def test_a_prompt_on_stdin_is_read_to_a_limit() -> None:
    assert read_prompt(io.StringIO("Dry"), most=3) == "Dry"
    with pytest.raises(ValueError, match="the prompt on stdin has more than 2 characters"):
        read_prompt(io.StringIO("Dry"), most=2)


class Terminal(io.StringIO):
    """What is printed on a terminal."""

    def isatty(self) -> bool:
        return True


def test_what_a_model_writes_steers_no_terminal_and_reaches_a_file_as_it_is(
    trained, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, _ = trained
    hostile = "a\x1b[2Jb\u202e\u2028é\u00a0東\tc\n"
    monkeypatch.setattr(evaluate, "pieces", lambda *_: iter([hostile]))
    for stream_, said in (
        (Terminal(), "a\\x1b[2Jb\\u202e\\u2028é\u00a0東\tc\n"), (io.StringIO(), hostile)
    ):  # fmt: skip
        monkeypatch.setattr(sys, "stdout", stream_)
        assert call(run, "--prompt", "a", "--max-new-tokens", "1") == 0
        assert stream_.getvalue() == said + "\n"


def test_the_text_is_the_greedy_continuation_and_only_ids_of_the_tokenizer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(tmp_path)
    model, _ = save(run, read_manifest(run).config, 7)
    wanted = [
        token
        for token in stream(model, list(b"Wet"), max_new_tokens=5)
        if token < 256
    ]  # fmt: skip
    assert call(run, "--prompt", "Wet", "--max-new-tokens", "5", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["text"] == bytes(wanted).decode("utf-8", "replace")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--max-new-tokens", "0"), "--max-new-tokens must be at least 1"),
        (("--max-new-tokens", "100000000000"), "at most 1,048,576, got 100000000000"),
        (("--temperature", "-1"), "temperature"),
        (("--temperature", "nan"), "--temperature nan"),
        (("--temperature", "inf"), "--temperature inf"),
        (("--temperature", "1e-40"), "0, or 1e-06 to 1e+06, got 1e-40"),
        (("--top-p", "0"), "top_p"),
        (("--seed", "18446744073709551616"), "--seed 18446744073709551616"),
        (("--seed", "-1"), "--seed -1"),
        (("--step", "3"), "steps there: 5"),
    ],
)
def test_bad_input_is_one_line_on_stderr(
    trained, capsys: pytest.CaptureFixture[str], words: tuple[str, str], says: str
) -> None:
    code = call(trained[0], "--prompt", "x", *words)
    output = capsys.readouterr()
    assert code == (TrainerExit.CHECKPOINT if "--step" in words else TrainerExit.CONFIGURATION)
    assert output.out == ""
    assert output.err.startswith("error: ")
    assert output.err.count("\n") == 1
    assert says in output.err


@pytest.mark.parametrize("folder", ["nope", "."], ids=["missing", "holds no tokenizer"])
def test_a_tokenizer_folder_without_the_tokenizer_is_refused_for_bytes_as_well(
    trained, tmp_path: Path, capsys: pytest.CaptureFixture[str], folder: str
) -> None:
    place = tmp_path / folder
    code = call(trained[0], "--prompt", "x", "--tokenizer", str(place))
    output = capsys.readouterr()
    assert (code, output.out) == (TrainerExit.DATA, "")
    assert output.err.startswith("error: ")
    assert f"is not in {place}; name the run's staged data folder with --tokenizer" in output.err
    assert output.err.count("\n") == 1


def test_the_staged_folder_of_a_run_has_its_tokenizer(
    trained, capsys: pytest.CaptureFixture[str]
) -> None:
    run, _ = trained
    (staged,) = (run.pod_root / "staged").glob("*/")
    words = ("--prompt", "x", "--max-new-tokens", "2", "--tokenizer", str(staged))
    assert call(run, *words) == TrainerExit.FINISHED
    assert capsys.readouterr().out


def test_a_folder_that_is_no_run_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--run", str(tmp_path), "--prompt", "x"]) == TrainerExit.CONFIGURATION
    assert "not a run directory" in capsys.readouterr().err


def test_a_run_whose_only_checkpoint_is_damaged_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(tmp_path)
    _, checkpoint = save(run, read_manifest(run).config, 5)
    flip_a_bit(checkpoint.path / "config.json")
    assert call(run, "--prompt", "x") == TrainerExit.CHECKPOINT
    lines = capsys.readouterr().err.splitlines()
    assert "config.json should be sha256" in lines[0]
    assert lines[1].startswith("error: ")


def test_the_rate_counts_the_tokens_after_the_first() -> None:
    assert rate_of([10.0, 10.5, 11.0, 12.0]) == 1.5
    assert rate_of([10.0]) is None
    assert rate_of([]) is None
    assert rate_of([10.0, 10.0]) is None


def test_how_it_was_computed_and_how_fast_is_said_on_stderr_and_in_json(
    trained, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(trained[0], "--prompt", "Wet", "--max-new-tokens", "3", "--json") == 0
    output = capsys.readouterr()
    found = json.loads(output.out)
    assert found["decode"] == "gathered attention, no CUDA graph"
    assert found["tokens_per_s"] is None or found["tokens_per_s"] > 0
    rate = "" if found["tokens_per_s"] is None else f", {found['tokens_per_s']:.1f} tokens/s"
    assert output.err.splitlines()[-1] == f"{found['num_tokens']} tokens{rate} ({found['decode']})"


def test_a_text_whose_cache_no_memory_here_could_hold_is_refused_with_both_sizes(
    trained, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "memory_bytes", lambda _: 5 << 20)
    assert call(trained[0], "--prompt", "x", "--max-new-tokens", "100000") == 2
    output = capsys.readouterr()
    assert output.out == ""
    # 16 numbers of 4 bytes for a token, and the same for a compressed block every 2 tokens
    assert "a decode cache of 100,001 tokens takes 9 MiB, and cpu has 5;" in output.err
    assert call(trained[0], "--prompt", "x", "--max-new-tokens", "10") == 0


def test_the_memory_of_this_machine_is_what_linux_says() -> None:
    lines = Path("/proc/meminfo").read_text().splitlines()
    total_kib = next(int(line.split()[1]) for line in lines if line.startswith("MemTotal"))
    assert device.memory_bytes(torch.device("cpu")) == total_kib << 10


def test_ids_that_only_pad_the_vocabulary_are_never_drawn(
    trained, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, model = trained
    known = {"byte": 257, "bpe": 320}[read_manifest(run).config.data.tokenizer]
    assert model.config.vocab_size == 340
    widths, pick = set(), evaluate.pick_token

    def spy(logits_V: torch.Tensor, *rest):
        widths.add(len(logits_V))
        return pick(logits_V, *rest)

    monkeypatch.setattr(evaluate, "pick_token", spy)
    assert call(run, "--prompt", "x", "--temperature", "1000", "--max-new-tokens", "9") == 0
    assert widths == {known}
