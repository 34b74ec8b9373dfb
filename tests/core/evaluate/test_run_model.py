"""The model of a run directory is the newest whole one, with the tokenizer it was trained with."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from nsa_core.evaluate.run_model import RunModelError, open_run_model
from nsa_core.model.transformer import LanguageModel
from nsa_core.model.weights import model_tensors
from nsa_core.rundir.exit import TrainerExit
from nsa_core.rundir.manifest import read_manifest, write_manifest
from tests.core.evaluate.run_case import flip_a_bit, make_run, save

CPU = torch.device("cpu")


def opened(run, **options):
    told = []
    return open_run_model(run, CPU, tell=told.append, **options), told


def same_weights(one, other):
    return all(
        torch.equal(tensor, model_tensors(other)[name])
        for name, tensor in model_tensors(one).items()
    )


def test_the_newest_whole_checkpoint_is_opened(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    config = read_manifest(run).config
    save(run, config, 5)
    model, _ = save(run, config, 10)
    found, told = opened(run)
    assert found.weights.step == 10
    assert same_weights(found.model, model)
    assert told == []


def test_the_shards_of_two_ranks_are_opened_as_one_model(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    model, checkpoint = save(run, read_manifest(run).config, 10, num_ranks=2)
    assert checkpoint.manifest.num_shards == 2
    found, told = opened(run)
    assert found.weights.path == checkpoint.path
    assert same_weights(found.model, model)
    assert told == []


def test_the_residual_stream_is_that_of_the_run(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    manifest = read_manifest(run)
    runtime = {"precision": "bf16", "half_residual": True}
    config = manifest.config.model_copy(
        update={"runtime": manifest.config.runtime.model_copy(update=runtime)}
    )
    write_manifest(run, manifest.model_copy(update={"config": config}))
    save(run, config, 5)
    assert opened(run)[0].model.has_half_residual


def test_a_flipped_bit_is_reported_and_the_checkpoint_before_it_is_opened(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    config = read_manifest(run).config
    model, _ = save(run, config, 5)
    _, newest = save(run, config, 10)
    flip_a_bit(newest.path / "model.safetensors")
    found, told = opened(run)
    assert found.weights.step == 5
    assert same_weights(found.model, model)
    assert len(told) == 1
    assert "step_000010 is damaged" in told[0]
    assert "sha256" in told[0]


def test_a_named_step_is_opened_or_refused_with_what_there_is(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    config = read_manifest(run).config
    for step in (5, 10):
        save(run, config, step)
    assert opened(run, step=5)[0].weights.step == 5
    with pytest.raises(RunModelError, match="no whole checkpoint of step 7; steps there: 10, 5"):
        opened(run, step=7)


def test_the_final_weights_serve_where_no_checkpoint_was_kept(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    config = read_manifest(run).config
    model, checkpoint = save(run, config, 5)
    for path in checkpoint.path.iterdir():
        path.unlink()
    save_file(model_tensors(model), run.final_model)
    found, told = opened(run)
    assert same_weights(found.model, model)
    assert "no recorded hash" in told[0]


def test_a_run_without_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunModelError, match="no whole checkpoint") as caught:
        opened(make_run(tmp_path))
    assert caught.value.code == TrainerExit.CHECKPOINT


def test_weights_of_another_shape_are_refused_with_the_tensor(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    manifest = read_manifest(run)
    save_file(model_tensors(LanguageModel(manifest.config.model)), run.final_model)
    model = manifest.config.model.model_copy(update={"mlp_width": 48})
    config = manifest.config.model_copy(update={"model": model})
    write_manifest(run, manifest.model_copy(update={"config": config}))
    with pytest.raises(RunModelError, match=r"mlp.up.weight.*\[64, 16\].*\[96, 16\]"):
        opened(run)


def test_a_trained_bpe_is_found_by_its_fingerprint_among_the_staged_data(tmp_path: Path) -> None:
    run = make_run(tmp_path, tokenizer="bpe")
    config = read_manifest(run).config
    smaller = config.data.model_copy(update={"bpe_vocab_size": 310})
    _, checkpoint = save(run, config.model_copy(update={"data": smaller}), 5)
    _, wanted = save(run, config, 10)
    assert checkpoint.manifest.tokenizer_fingerprint != wanted.manifest.tokenizer_fingerprint
    for step, expected in ((5, checkpoint), (10, wanted)):
        tokenizer = opened(run, step=step)[0].tokenizer
        assert tokenizer.fingerprint == expected.manifest.tokenizer_fingerprint
        assert tokenizer.decode(tokenizer.encode("wet sand").tolist()) == "wet sand"


def test_a_tokenizer_that_is_gone_or_another_is_refused(tmp_path: Path) -> None:
    run = make_run(tmp_path, tokenizer="bpe")
    config = read_manifest(run).config
    save(run, config, 5)
    (staged,) = (tmp_path / "staged").glob("*/tokenizer.json")
    kept = staged.parent.rename(tmp_path / "kept")
    with pytest.raises(RunModelError, match="--tokenizer") as caught:
        opened(run)
    assert caught.value.code == TrainerExit.DATA
    assert opened(run, tokenizer_folder=kept)[0].tokenizer.name == "bpe"
    other = make_run(tmp_path / "other", tokenizer="bpe")
    data = config.data.model_copy(update={"bpe_vocab_size": 300, "cache_dir": "staged"})
    save(other, config.model_copy(update={"data": data}), 5)
    (folder,) = (tmp_path / "other" / "staged").glob("*/tokenizer.json")
    with pytest.raises(RunModelError, match="is not in"):
        opened(run, tokenizer_folder=folder.parent)
