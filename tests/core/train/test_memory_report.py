"""What is said when a card or the host runs out of memory."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from nsa_core.config.recipe import resolve
from nsa_core.rundir.bounded_json import read_model
from nsa_core.rundir.layout import RunDir
from nsa_core.train.memory_report import (
    MOST_KINDS,
    CardMemory,
    MemoryReport,
    advise_memory,
    count_blocks,
    make_memory_report,
    write_memory_report,
)

FULL = CardMemory(
    name="H100", total=81_000, others=600, allocated=79_000, reserved=80_000, peak=79_500
)
FULL_BY_OTHERS = FULL.model_copy(update={"others": 20_000.0})
IN_PIECES = FULL.model_copy(update={"allocated": 60_000.0})


@pytest.mark.parametrize(
    ("sets", "card", "advice"),
    [
        (
            ["batch.micro_batch=32", "batch.accumulation=4"], FULL,
            [
                "Set batch.micro_batch=16 and batch.accumulation=8: the same step",
                "Set runtime.activation_checkpointing=selective: less memory, more time",
                "Set runtime.activation_checkpointing=full: less memory, more time",
                "Use several cards with runtime.num_gpus and runtime.sharding=fsdp",
            ],
        ),
        (
            ["batch.micro_batch=9", "runtime.activation_checkpointing=selective"], None,
            [
                "Set batch.micro_batch=3 and batch.accumulation=48: the same step",
                "Set runtime.activation_checkpointing=full: less memory, more time",
                "Use several cards with runtime.num_gpus and runtime.sharding=fsdp",
            ],
        ),
        (
            ["batch.micro_batch=1", "batch.seq_len=256", "runtime.num_gpus=2"], FULL,
            [
                "Set runtime.sharding=fsdp: each card keeps a part of the state",
                "Set runtime.activation_checkpointing=selective: less memory, more time",
                "Set runtime.activation_checkpointing=full: less memory, more time",
            ],
        ),
        (
            [
                "batch.micro_batch=1", "runtime.activation_checkpointing=full",
                "optimizer.kind=muon",
            ],
            FULL,
            ["Take a card with more memory, or a smaller model"],
        ),
    ],
)  # fmt: skip
def test_the_advice_names_settings_that_make_the_step_smaller(
    sets: Sequence[str], card: CardMemory | None, advice: list[str]
) -> None:
    assert advise_memory(resolve("m7c-125m", None, sets).config, card) == advice


def test_what_others_hold_and_what_no_tensor_uses_comes_first() -> None:
    config = resolve("m7c-125m").config
    assert "hold 20,000 MiB" in advise_memory(config, FULL_BY_OTHERS)[0]
    assert "pieces" not in " ".join(advise_memory(config, IN_PIECES))
    loose = resolve("m7c-125m", None, ["runtime.allocator=backend:native"]).config
    assert "20,000 MiB are in pieces that no tensor uses" in advise_memory(loose, IN_PIECES)[0]


def test_blocks_in_use_are_counted_by_size_and_the_list_is_bounded() -> None:
    used = {"size": 2**20, "state": "active_allocated"}
    free = {"size": 2**30, "state": "inactive"}
    assert [(one.mib, one.count) for one in count_blocks([{"blocks": [used, free, used]}])] == [
        (1.0, 2)
    ]
    many = [{"blocks": [{"size": size, "state": "active_allocated"}]} for size in range(1, 99)]
    found = count_blocks(many)
    assert len(found) == MOST_KINDS
    assert found[0].mib == round(98 / 2**20, 3)


def test_a_report_is_written_whole_for_its_attempt_and_rank(tmp_path: Path) -> None:
    config = resolve("m7c-125m").config
    made = make_memory_report(config, attempt=3, rank=1, step=7, phase="train", error="x" * 9000)
    assert made.card is None
    write_memory_report(RunDir(tmp_path), made)
    kept = read_model(MemoryReport, tmp_path / "memory_attempt3_rank1.json")
    assert kept == made
    assert len(kept.error) == 2000
    assert sum(kept.estimate.values()) > 1000
