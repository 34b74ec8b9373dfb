"""The words of a report claim what the directory shows, and no more."""

import statistics
from pathlib import Path

import pytest

from nsa_core.rundir.data_account import Count, DataAccount
from nsa_core.rundir.layout import RunDir
from nsa_core.rundir.manifest import KernelChoice, read_manifest, write_manifest
from nsa_ops.report.record import parse_goodput, parse_samples, read_record
from nsa_ops.report.summary import (
    began_unix_s,
    describe_configuration,
    describe_outcome,
    describe_run,
    headline,
    last_step,
    reproduce_commands,
)
from nsa_ops.report.timeline import attempt_spans
from tests.ops.report.builder import RunBuilder, two_attempts


def _builder(root: Path) -> RunBuilder:
    return RunBuilder(RunDir(root / "run"), steps=40)


def test_a_finished_run_says_what_held_out_text_did(tmp_path: Path) -> None:
    outcome = describe_outcome(read_record(two_attempts(tmp_path)))
    assert (outcome.word, outcome.tone) == ("finished", "good")
    assert outcome.sentence == (
        "Finished after 400 of 400 steps in 2 attempts; on held-out text it fell from 8.396 bits "
        "per byte at step 0 to 2.454 at step 400."
    )


def test_a_run_without_an_exit_record_is_not_called_finished(tmp_path: Path) -> None:
    builder = _builder(tmp_path).launch().train(0, 20)
    outcome = describe_outcome(read_record(builder.run))
    assert outcome.word == "not ended"
    assert "nothing is known about held-out text" in outcome.sentence


def test_a_failed_run_names_its_exit_code_and_reason(tmp_path: Path) -> None:
    builder = _builder(tmp_path).launch().train(0, 22)
    builder.end(12, "loss is not finite", 22)
    outcome = describe_outcome(read_record(builder.run))
    assert outcome.tone == "bad"
    assert outcome.sentence.startswith("Failed with exit code 12 (loss is not finite) after 22 of")


def test_a_loss_that_rose_again_names_its_lowest_value(tmp_path: Path) -> None:
    builder = _builder(tmp_path).launch()
    builder.run.validation_csv.write_text("step,bits_per_byte\n0,8\n10,2.5\n20,9\n")
    sentence = describe_outcome(read_record(builder.run)).sentence
    assert "rose from 8.000 bits per byte at step 0 to 9.000 at step 20" in sentence
    assert "(lowest 2.500 at step 10)" in sentence


def test_synthetic_data_is_never_presented_as_text(tmp_path: Path) -> None:
    builder = _builder(tmp_path).launch()
    text = builder.run.manifest.read_text().replace('"source": "stdlib"', '"source": "synthetic"')
    builder.run.manifest.write_text(text)
    builder.validate(0).validate(40)
    assert "say nothing about text" in describe_outcome(read_record(builder.run)).sentence


def test_an_empty_directory_gives_a_record_that_names_what_is_missing(tmp_path: Path) -> None:
    record = read_record(RunDir(tmp_path))
    missing = " ".join(record.missing)
    for name in ("manifest.json", "training.csv", "val.csv", "events.jsonl", "goodput.json"):
        assert name in missing
    assert last_step(record) == 0
    assert headline(record)[0].value == "0"
    assert describe_run(record)[0].remark == "manifest.json is missing"


def test_damaged_files_are_named_and_the_rest_is_read(tmp_path: Path) -> None:
    run = two_attempts(tmp_path)
    run.goodput.write_text("{torn")
    run.manifest.write_text("[]")
    record = read_record(run)
    assert record.manifest is not None, "attempt 1 still has its manifest"
    assert any("goodput.json cannot be read" in line for line in record.missing)
    assert any("cannot be used" in line for line in record.missing)
    assert record.training is not None
    run.goodput.unlink()
    run.goodput.mkdir()
    assert "goodput.json cannot be read: Is a directory" in read_record(run).missing


def test_a_flipped_bit_in_a_checkpoint_is_found(tmp_path: Path) -> None:
    run = two_attempts(tmp_path)
    target = run.checkpoint(300) / "model.safetensors"
    content = bytearray(target.read_bytes())
    content[-1] ^= 1
    target.write_bytes(content)
    damage = {one.step: one.damage for one in read_record(run).checkpoints}
    assert damage[400] == ""
    assert "model.safetensors" in str(damage[300])


def test_what_was_set_comes_before_the_defaults(tmp_path: Path) -> None:
    manifest = read_record(two_attempts(tmp_path)).manifest
    assert manifest is not None
    facts = describe_configuration(manifest)
    chosen = [(fact.name, fact.remark) for fact in facts if fact.remark != "default"]
    assert facts[: len(chosen)] == [fact for fact in facts if fact.remark != "default"]
    assert ("schedule.steps", "flag --set") in chosen


def test_reproducing_begins_with_the_first_launch_and_not_with_the_resume(tmp_path: Path) -> None:
    run = two_attempts(tmp_path)
    commands = reproduce_commands(read_record(run))
    assert commands[0].startswith("git checkout 4f1c9a7e")
    assert commands[1] == "nsa-ops launch --profile cpu --set schedule.steps=400"


def test_attempts_have_spans_that_do_not_overlap(tmp_path: Path) -> None:
    first, second = attempt_spans(read_record(two_attempts(tmp_path)))
    assert (first.tone, second.tone) == ("warn", "good")
    assert first.start < first.end < second.start < second.end


def test_goodput_and_samples_of_another_shape_are_left_out() -> None:
    buckets = {"step": 3, "hang": 0.0, "down": True, "another": 1}
    assert parse_goodput({"buckets": buckets, "wall_s": 3}) == {"step": 3.0}
    assert parse_goodput(["not", "a", "mapping"]) == parse_goodput({"buckets": 1}) == {}
    assert [one.text for one in parse_samples([{"prompt": "a", "text": "b"}, "c", 7])] == ["b"]
    assert parse_samples(None) == parse_samples({"text": "alone"}) == []


def test_the_kernels_that_were_proven_stand_in_the_report_with_their_reason(
    tmp_path: Path,
) -> None:
    builder = _builder(tmp_path).launch()
    manifest = read_manifest(builder.run)
    kernels = {"selected": KernelChoice(name="triton", reason="flash-attn is not installed")}
    write_manifest(builder.run, manifest.model_copy(update={"kernels": kernels}))
    facts = {fact.name: fact for fact in describe_run(read_record(builder.run))}
    found = facts["kernels, selected"]
    assert (found.value, found.remark) == ("triton", "flash-attn is not installed")


def test_the_report_has_what_was_dropped_of_the_data(tmp_path: Path) -> None:
    builder = _builder(tmp_path).launch()
    builder.run.data.mkdir()
    account = DataAccount(num_documents=3, num_lost=1, rejected={"malformed JSON": Count(count=1)})
    builder.run.data_account.write_text(account.model_dump_json())
    facts = {fact.name: fact for fact in describe_run(read_record(builder.run))}
    assert facts["data"].remark == "3 documents; 25.00 % dropped (malformed JSON: 1)"
    builder.run.data_account.write_text("[")
    assert any("account.json cannot be read" in line for line in read_record(builder.run).missing)


def test_the_speed_is_beside_what_the_profile_expects(tmp_path: Path) -> None:
    builder = _builder(tmp_path).launch()
    builder.train(1, 20)
    record = read_record(builder.run)
    plain = {fact.name: fact for fact in headline(record)}["tokens per second"]
    assert "expects" not in plain.remark
    assert record.training is not None
    median = statistics.median(rate for _, rate in record.training.column("tokens_per_s"))
    manifest = read_manifest(builder.run)
    limits = manifest.config.watchdog.model_copy(update={"expected_tokens_per_s": 2 * median})
    config = manifest.config.model_copy(update={"watchdog": limits})
    write_manifest(builder.run, manifest.model_copy(update={"config": config}))
    found = {fact.name: fact for fact in headline(read_record(builder.run))}
    assert "; 50 % of the" in found["tokens per second"].remark
    assert "that the profile expects" in found["tokens per second"].remark


@pytest.mark.parametrize("ahead_s", [-7200.0, 7200.0])
def test_a_laptop_whose_clock_is_off_moves_nothing_on_the_timeline(
    tmp_path: Path, ahead_s: float
) -> None:
    """The manifest says when the laptop launched it; all else is by the pod's clock."""
    builder = _builder(tmp_path)
    builder.launch(created_unix_s=builder.clock + ahead_s).train(0, 40).end(0, "done", 40)
    record = read_record(builder.run)
    (span,) = attempt_spans(record)
    assert began_unix_s(record) == span.start == record.events[0].ts
    assert span.end - span.start < 3600
