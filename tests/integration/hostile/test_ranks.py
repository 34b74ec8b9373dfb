"""A run on two pods, one of which lies about ranks: what the laptop does with it."""

import json
import math
import shutil
from collections.abc import Iterator
from typing import Any

import pytest

from nsa_ops.pod.probe import probe
from nsa_ops.store import MemberPod, Store
from tests.integration.hostile.judged import told
from tests.integration.hostile.lying_pod import Side, World

pytestmark = pytest.mark.integration
RANK = {
    "rank": 1, "msg": "beat", "phase": "train", "step": 30, "beat_age_s": 900.0, "still_s": 900.0,
    "own_s": 50.0, "gpu_mem_peak": 70_000, "temp_c": 91.0,
}  # fmt: skip
EVIL = "\x1b[2J\x1b]0;owned\x07\r\n" + "x" * 2**18
NUMBERS = (math.nan, math.inf, 1e308, -1, 10**30)
#: Of another pod, twice, with numbers that are none, fields that no type knows, and words.
MIXED: list[dict[str, Any]] = [
    RANK | {"rank": 0},
    RANK,
    *(RANK | {"step_s": value, "own_s": value, "temp_c": value} for value in NUMBERS),
    RANK | {"surprise": math.nan, "more": [math.inf]},
    RANK | {"pod": EVIL, "throttle": EVIL, "problem": EVIL},
]
LIES = {
    "mixed": (MIXED, (("status", "--json"), ("watch", "--once"), ("health",))),
    "very-many": ([RANK | {"rank": number} for number in range(50_000)], (("status",),)),
}


@pytest.fixture
def together(world: World) -> Iterator[Side]:
    """The run of the far pod, with the near one as pod 1, which lies."""
    far, near = world.sides["far"], world.sides["near"]
    shutil.copytree(far.run_dir, near.root / "runs" / far.run_id)
    store = Store(world.state / "registry.sqlite")
    try:
        record = store.find_run(far.run_id)
        assert record is not None
        pod = store.find_pod("near")
        assert pod is not None
        store.save_run(record.with_others([MemberPod("near", pod.pod_id)]))
    finally:
        store.close()
    yield near


def answer_with(side: Side, run_id: str, ranks: list[dict[str, Any]]) -> str:
    document = json.loads(probe(side.root / "runs", [run_id], {}).model_dump_json())
    report = document["runs"][0]
    report["ranks"] = ranks
    report["manifest"] |= {"node_rank": 1, "num_pods": 2, "ranks_per_pod": 1}
    report["pods"] = [{"pod": "far", "node_rank": 0, "state": "failed", "why": "it lies"}]
    return json.dumps(document)


@pytest.mark.parametrize("lie", LIES)
def test_what_a_pod_says_of_ranks_ends_no_command_and_blames_no_other_pod(
    world: World, together: Side, lie: str
) -> None:
    run_id = world.sides["far"].run_id
    ranks, commands = LIES[lie]
    lied = answer_with(together, run_id, ranks)
    together.lie({"asked": "nsa_ops.pod.probe", "instead": lied, "code": 0})
    for name, *flags in commands:
        heard, problems = told(world, together, name, run_id, *flags, codes=(0,))
        assert problems == [], heard.said
        assert len(heard.out) < 200_000, heard.said
        assert b"far is failed" not in heard.out
        if "--json" in flags:
            report = json.loads(heard.out, parse_constant=refuse_constant)["data"]["report"]
            assert {(one["rank"], one["pod"]) for one in report["ranks"]} <= {(1, "near")}
            assert report["pods"][0]["state"] == "finished"
    assert together.num_lies


def refuse_constant(name: str) -> None:
    raise AssertionError(name)
