"""What the screens of a run show of its ranks, and that a run with one rank looks as before."""

import io
import json
import time

import pytest
from rich.console import Console

from nsa_ops.cli.console import envelope
from nsa_ops.cli.render_ranks import rank_rows, rank_table
from nsa_ops.cli.render_run import draw_health, draw_status, frame_rows, frame_view
from nsa_ops.pod.messages import PhaseUse, RunFigures, RunReport
from nsa_ops.pod.rank_evidence import RankEvidence
from nsa_ops.runs.status import RunStatusLine
from nsa_ops.runs.watch import Frame
from tests.ops.runs.documents import RUN, beat, report


def ranks(count: int, **changes) -> tuple[RankEvidence, ...]:
    """Ranks that train together; `r1={...}` changes one of them."""
    found = []
    for number in range(count):
        values = {
            "rank": number, "msg": "beat", "phase": "train", "step": 120, "beat_age_s": 3.0,
            "still_s": 1.0, "own_s": 0.8 + number / 1000, "gpu_mem_peak": 30_000 + number,
            "host_rss_mib": 3000, "temp_c": 60.0 + number, "gpu_util": 90.0 + number,
        }  # fmt: skip
        found.append(RankEvidence.model_validate(values | changes.get(f"r{number}", {})))
    return tuple(found)


def of_all_pods(shown: tuple[RankEvidence, ...], state: str) -> RunReport:
    """A report with these ranks, which may be more than one pod has."""
    return report(state).model_copy(update={"ranks": shown})


def rows(shown: tuple[RankEvidence, ...], state: str = "running") -> dict[str, str]:
    return {row.label: row.value for row in rank_rows(of_all_pods(shown, state))}


def table(shown: tuple[RankEvidence, ...], state: str = "running") -> list[str]:
    return [row.text for row in rank_table(of_all_pods(shown, state))]


def screens(**fields) -> list[str]:
    """What `watch`, `status` and `health` show."""
    record = beat(5, loss=1.0, gpu_mem_peak=20_480)
    seen = report(figures=RunFigures(record=record), **fields)
    console = Console(file=io.StringIO(), width=300)
    draw_status(console, RunStatusLine(RUN, seen))
    draw_health(console, RunStatusLine(RUN, seen))
    watched = "\n".join(row.text for row in frame_rows(Frame(seen, [], [], [record])))
    return [watched, console.file.getvalue()]  # type: ignore[attr-defined]


def test_a_run_with_one_rank_shows_no_ranks() -> None:
    assert rows(()) == {}
    assert table(()) == []
    for screen in screens():
        assert "memory       peak 20,480 MiB" in screen
        assert "RANK" not in screen
        assert "ranks" not in screen


def test_all_screens_show_the_spread_the_memory_of_each_rank_and_the_slowest() -> None:
    shown = ranks(4, r2={"own_s": 1.2})
    for screen in screens(ranks=shown):
        assert (
            "ranks        4 ranks, own time of a step 800 ms to 1.2 s, median 802 ms; slowest is "
            "rank 2 (1.50 times the others)" in screen
        )
        assert "memory       peak 30,000 to 30,003 MiB (most on rank 3), host 3,000 MiB" in screen
        assert "card         busy 90 to 93 %, 60 to 63 degrees C (hottest is rank 3)" in screen
        line = "2     train            120     3 s    1.2 s    30,002     3,000    62  slowest"
        assert line in screen
        assert "peak 20,480 MiB" not in screen  # that of rank 0 alone


@pytest.mark.parametrize("count", [2, 8])
def test_the_table_has_a_line_for_each_rank_and_fits_80_columns(count: int) -> None:
    wide = {
        "phase": "checkpoint", "step": 1_000_000, "beat_age_s": 59.0, "own_s": 0.999,
        "gpu_mem_peak": 143_000, "host_rss_mib": 999_999, "throttle": "sw_power_cap",
    }  # fmt: skip
    lines = table(ranks(count, r0=wide))
    assert len(lines) == count + 1
    assert max(len(line) for line in lines) <= 80
    assert lines[1].split() == [
        "0", "checkpoint", "1000000", "59", "s", "999", "ms", "143,000", "999,999", "60",
        "throttled",
    ]  # fmt: skip


def test_many_ranks_are_cut_off_with_a_line_that_says_so() -> None:
    lines = table(ranks(70))
    assert len(lines) == 66
    assert lines[-1] == "and 6 more ranks: see `--json`"


def test_a_silent_rank_and_one_that_the_others_wait_for_are_named() -> None:
    still = {f"r{number}": {"still_s": 100.0} for number in range(4)}
    waiting = ranks(4, **still | {"r3": {"still_s": 100.0, "phase": "data_wait"}})
    assert rows(waiting)["waiting"] == (
        "ranks 0, 1 and 2 in train at step 120 for rank 3 in data_wait at step 120"
    )
    assert table(waiting)[4].endswith("odd")
    silent = ranks(4, **still | {"r1": {"still_s": 100.0, "beat_age_s": 75.0}})
    assert rows(silent)["silent"] == "rank 1, up to 1 min 15 s without a heartbeat"
    assert table(silent)[2].endswith("silent")


def test_ranks_that_differ_for_a_moment_are_not_called_odd() -> None:
    moving = ranks(4, r3={"step": 119, "still_s": 100.0})
    assert "waiting" not in rows(moving)
    assert not any(line.endswith("odd") for line in table(moving))


def test_ranks_without_heartbeats_and_ended_ones_say_so() -> None:
    gone = {"msg": None, "phase": None, "beat_age_s": None, "still_s": None, "own_s": None}
    bad = gone | {"problem": "heartbeat_rank2.jsonl cannot be read: it is no regular file"}
    lines = table(ranks(4, r1=gone, r2=bad, r3={"msg": "end", "phase": "shutdown"}))
    assert [line.split()[-1] for line in lines[2:]] == ["beat", "unusable", "ended"]
    assert lines[2].split()[1:4] == ["-", "-", "-"]


def test_a_run_that_has_ended_shows_what_its_ranks_did_and_no_age() -> None:
    ended = ranks(2, r1={"msg": "end", "beat_age_s": 9e6, "still_s": 9e6, "own_s": 1.6})
    assert set(rows(ended, "finished")) == {"ranks", "memory", "card"}
    lines = table(ended, "finished")
    assert lines[2].split()[3] == "-"
    assert lines[2].endswith("slowest")


def test_ranks_of_several_pods_are_shown_in_one_table_with_their_pods() -> None:
    here, there = ranks(2, r0={"pod": "a"}, r1={"pod": "a"}), ranks(4)[2:]
    pods = (*here, *(rank.model_copy(update={"pod": "b" * 40}) for rank in there))
    lines = table(pods)
    assert lines[0].split()[:2] == ["RANK", "POD"]
    assert [line.split()[1] for line in lines[1:]] == ["a", "a", "b" * 12, "b" * 12]
    assert rows(pods)["ranks"].startswith("4 ranks, ")


def test_throttled_cards_are_named_with_their_reason() -> None:
    hot = ranks(4, r1={"temp_c": 91.0, "throttle": "sw_thermal_slowdown"}, r2={"throttle": "none"})
    assert rows(hot)["card"] == (
        "busy 90 to 93 %, 60 to 91 degrees C (hottest is rank 1), "
        "throttled: rank 1 (sw_thermal_slowdown)"
    )


def test_the_mask_of_a_card_that_nothing_slows_down_is_no_throttling() -> None:
    shown = rows(
        ranks(2, r0={"throttle": "0x0000000000000001"}, r1={"throttle": "0x0000000000000020"})
    )
    assert shown["card"].endswith("throttled: rank 1 (sw_thermal_slowdown)")


def test_cards_that_are_equally_hot_have_one_temperature_and_no_hottest() -> None:
    alike = ranks(2, r0={"temp_c": 60.2}, r1={"temp_c": 60.4})
    assert rows(alike)["card"].endswith(" %, 60 degrees C")


def test_the_phase_names_the_rank_that_is_judged() -> None:
    use = PhaseUse(phase="data_wait", still_s=60.0, limit_s=600.0, warn_s=30.0, rank=3)
    rows = frame_rows(Frame(report(figures=RunFigures(phase=use), ranks=ranks(4)), [], [], []))
    assert any(row.text.startswith("phase        data_wait of rank 3, last moved") for row in rows)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0, 1e308])
def test_figures_of_a_hostile_pod_are_drawn_and_end_nothing(value: float) -> None:
    hostile = {
        "pod": "\x1b[2J", "step": 10**400, "beat_age_s": value, "still_s": value,
        "own_s": value, "temp_c": value, "throttle": "\x1b[2J", "gpu_mem_peak": 10**400,
        "host_rss_mib": -5,
    }  # fmt: skip
    seen = report(ranks=ranks(3, r1=hostile, r2=hostile))
    assert "\x1b" not in frame_view(Frame(seen, [], [], []), "utf-8").plain
    assert len(rank_table(seen)) == 4


def test_each_frame_carries_the_ranks_as_json() -> None:
    seen = report(ranks=ranks(2))
    data = json.loads(envelope("watch", Frame(seen, [], [], [])))["data"]["report"]["ranks"]
    assert [(one["rank"], one["gpu_mem_peak"]) for one in data] == [(0, 30_000), (1, 30_001)]


def test_a_hostile_pod_with_very_many_ranks_is_drawn_in_a_moment() -> None:
    one = ranks(1)[0].model_dump()
    many = tuple(
        RankEvidence.model_construct(**one | {"rank": n, "step": n, "still_s": 100.0})
        for n in range(10_000)
    )
    began_s = time.process_time()
    assert rows(many)["waiting"].endswith(" for 9,999 ranks in train at step 0")
    assert len(table(many)) == 66
    assert time.process_time() - began_s < 5.0
