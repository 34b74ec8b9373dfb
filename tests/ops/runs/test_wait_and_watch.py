import json
from collections import deque
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from itertools import islice

import pytest

from nsa_core.rundir.events import Event
from nsa_ops.context import RunHandle, Work
from nsa_ops.errors import (
    ConfigurationError,
    DeadlineError,
    NotFoundError,
    PodUnreachableError,
    VerificationError,
)
from nsa_ops.pod.messages import RunFigures
from nsa_ops.pod.probe import MAX_BYTES
from nsa_ops.runs.attempt import await_first_beat
from nsa_ops.runs.choose import find_run
from nsa_ops.runs.status import exit_code_of, list_runs
from nsa_ops.runs.wait import POLL_S, describe_progress
from nsa_ops.runs.watch import MAX_IN_A_ROW, watch
from tests.ops.fakes import completed
from tests.ops.operators import POD, Desk
from tests.ops.runs.documents import RUN, Sequence, answer, beat, ended, report


def _await(desk: Desk) -> float:
    run = RunHandle(desk.operator.link(POD), "code-1", "r1")
    return await_first_beat(desk.operator, run, desk.clock.now_s).after_s or 0.0


def _shown(desk: Desk) -> list[Work]:
    """The long work that the operator shows from now on."""
    works: list[Work] = []

    def show(work: Work) -> AbstractContextManager[None]:
        works.append(work)
        return nullcontext()

    desk.show_work = show
    return works


def test_staging_is_shown_with_its_share_where_its_end_is_known(desk: Desk) -> None:
    works = _shown(desk)
    doing = "tokenise: 5 documents, 40 tokens (x)"
    staging = beat(0, phase="data", staging=doing, staging_share=0.25)
    desk.transport.answers["probe"] = Sequence(answer(report("staging", last_beat=staging)))
    _await(desk)
    assert works == [Work("waiting for the start", "", 0.25, 1.0, f"staging, {doing}")]


def test_a_beat_between_two_records_keeps_loss_and_speed_on_the_screen() -> None:
    figures = RunFigures(record=beat(60, loss=2.5, tokens_per_s=1000.0))
    told = describe_progress(report(last_beat=beat(63), figures=figures))
    assert told.startswith("step 63/")
    assert told.endswith(", loss 2.500 nats, 1,000 tokens/s")


def test_the_first_training_step_ends_the_wait(desk: Desk) -> None:
    up = answer(report(last_beat=beat(1)))
    desk.transport.answers["probe"] = Sequence(answer(report("planned")), up)
    assert _await(desk) == pytest.approx(POLL_S)


def test_a_heartbeat_without_a_step_is_trusted_after_a_while(desk: Desk) -> None:
    desk.transport.answers["probe"] = Sequence(answer(report("staging", last_beat=beat(0))))
    _await(desk)
    assert 5 <= sum(desk.clock.slept) <= 8


@pytest.mark.parametrize("step", [0, 500])
def test_a_heartbeat_before_torch_is_loaded_and_the_data_opened_is_not_trusted(
    desk: Desk, step: int
) -> None:
    boot = [answer(report("starting", last_beat=beat(step, phase="init")))] * 40
    reading = [answer(report("staging", last_beat=beat(step, phase="data")))] * 10
    dead = answer(report("failed", last_beat=beat(step, phase="data"), exit=ended(14, "no text")))
    desk.transport.answers["probe"] = Sequence(*boot, *reading, dead)
    with pytest.raises(ConfigurationError, match="ended with code 14: no text"):
        _await(desk)


def test_data_that_is_still_being_staged_after_a_minute_is_left_to_it(desk: Desk) -> None:
    staging = answer(report("staging", last_beat=beat(0, phase="data")))
    desk.transport.answers["probe"] = Sequence(staging)
    assert _await(desk) == 0.0
    assert 60 <= sum(desk.clock.slept) <= 62


def test_after_the_data_the_model_has_a_moment_to_fail(desk: Desk) -> None:
    phases = ["init", "data", "init"]
    looks = [answer(report("starting", last_beat=beat(0, phase=phase))) for phase in phases]
    desk.transport.answers["probe"] = Sequence(*looks)
    _await(desk)
    assert 7 <= sum(desk.clock.slept) <= 9


def test_a_trainer_that_never_gets_beyond_loading_is_not_called_up(desk: Desk) -> None:
    boot = answer(report("starting", last_beat=beat(0, phase="init")))
    desk.transport.answers["probe"] = Sequence(boot)
    with pytest.raises(DeadlineError, match="Waited 300 s for the start of `r1`; it is starting"):
        _await(desk)


@pytest.mark.parametrize(
    ("code", "error"),
    [(2, ConfigurationError), (14, ConfigurationError), (1, VerificationError)],
)
def test_a_run_that_ends_at_once_is_its_own_last_word(
    desk: Desk, code: int, error: type[Exception]
) -> None:
    dead = report("failed", last_beat=beat(0), exit=ended(code, "no text"), log_bytes=12)
    desk.transport.answers["probe"] = Sequence(answer(dead))
    desk.transport.files["/pod/runs/r1/training.log"] = b"first\nlast\n\n"
    with pytest.raises(error, match=f"Run `r1` ended with code {code}: no text"):
        _await(desk)
    assert desk.story == ["log: first", "log: last", "log: "]


def test_a_run_that_shows_nothing_is_left_alone_and_shown_as_long_work(desk: Desk) -> None:
    desk.transport.answers["probe"] = Sequence(answer(report("starting")))
    works = _shown(desk)
    with pytest.raises(DeadlineError, match="Waited 300 s for the start of `r1`"):
        _await(desk)
    assert works == [Work("waiting for the start", detail="starting, it is starting")]
    assert all("nsa_ops.pod.probe" in words for words in desk.transport.asked)


def test_watch_asks_from_where_it_stopped_and_ends_with_the_run(desk: Desk) -> None:
    desk.store.save_run(RUN)
    first = report(beats=[beat(1, loss=3.0)], beats_offset=100, events_offset=50)
    event = Event(ts=1.0, iso="x", attempt=1, kind="saved", by="trainer")
    last = report("finished", beats=[beat(2, loss=2.0)], beats_offset=200, events=[event])
    desk.transport.answers["probe"] = Sequence(answer(first), answer(last))
    frames = list(watch(desk.operator, None))
    assert [one.step for frame in frames for one in frame.beats] == [1, 2]
    assert [one.step for one in frames[-1].progress] == [1, 2]
    offsets = [json.loads(content)["r1"] for content in desk.transport.inputs]
    assert offsets == [
        {"heartbeats": -1, "events": -1},
        {"heartbeats": 100, "events": 50},
    ]


@pytest.mark.parametrize(
    ("news", "offsets", "num_asked", "why"),
    [
        ("beats", [7, 7], 2, "gives none of them"),
        ("events", [7, 6], 2, "gives none of them"),
        ("beats", range(1, 30), 20, "has said so 20 times in a row"),
    ],
)
def test_a_pod_that_says_for_ever_that_there_is_more_is_not_followed_for_ever(
    desk: Desk,
    monkeypatch: pytest.MonkeyPatch,
    news: str,
    offsets: Iterable[int],
    num_asked: int,
    why: str,
) -> None:
    assert MAX_IN_A_ROW * MAX_BYTES == 2**30
    monkeypatch.setattr("nsa_ops.runs.watch.MAX_IN_A_ROW", 20)
    desk.store.save_run(RUN)
    claims = ({f"{news}_more": True, f"{news}_offset": offset} for offset in offsets)
    answers = (answer(report("finished", **claim)) for claim in claims)
    desk.transport.answers["probe"] = Sequence(*answers)
    with pytest.raises(VerificationError, match=f"Pod `a100-1` says that `r1` has .* and {why}"):
        deque(islice(watch(desk.operator, "r1"), 40))
    assert len(desk.transport.asked) == num_asked


def test_a_lost_link_is_reported_and_changes_nothing(desk: Desk) -> None:
    desk.store.save_run(RUN)
    gone = PodUnreachableError("Pod `a100-1` did not answer")
    seen = answer(report(beats_offset=7))
    desk.transport.answers["probe"] = Sequence(seen, gone, gone, answer(report("finished")))
    assert [frame.report.state for frame in watch(desk.operator, "r1")] == ["running", "finished"]
    assert len(desk.story) == 2
    assert "the run is not affected" in desk.story[0]
    assert json.loads(desk.transport.inputs[-1])["r1"]["heartbeats"] == 7


def test_a_pod_that_does_not_answer_says_nothing_about_its_runs(desk: Desk) -> None:
    desk.store.save_run(RUN)
    desk.transport.answers["probe"] = PodUnreachableError("Pod `a100-1` did not answer")
    (line,) = list_runs(desk.operator)
    assert (line.state, line.problem) == ("unreachable", "Pod `a100-1` did not answer")


def test_a_run_that_its_pod_cannot_read_is_listed_with_the_reason(desk: Desk) -> None:
    desk.store.save_run(RUN)
    why = "/pod/runs/r1/manifest.json cannot be used: it is no JSON"
    problem = {"run_id": "r1", "message": why}
    document = {"pod_unix_s": 1.0, "boot_id": "b", "runs": [], "problems": [problem]}
    desk.transport.answers["probe"] = completed(json.dumps(document))
    (line,) = list_runs(desk.operator)
    assert (line.state, line.problem) == ("unreachable", why)
    desk.transport.answers["probe"] = answer()
    (line,) = list_runs(desk.operator)
    assert (line.state, line.problem) == ("unreachable", "its directory is not on the pod")


def test_many_runs_of_a_pod_are_one_round_trip(desk: Desk) -> None:
    desk.store.save_run(RUN)
    for number in range(2, 9):
        desk.store.save_run(RUN.__class__(f"r{number}", *list(vars(RUN).values())[1:]))
    desk.transport.answers["probe"] = answer(report("running"))
    assert len(list_runs(desk.operator)) == 8
    assert len(desk.transport.asked) == 1


def test_an_agent_that_gives_no_answer_is_named_with_its_last_line(desk: Desk) -> None:
    desk.store.save_run(RUN)
    broken = answer().__class__((), 1, b"", b"ModuleNotFoundError: No module named 'pydantic'\n")
    desk.transport.answers["probe"] = broken
    with pytest.raises(VerificationError, match="No module named 'pydantic'"):
        find_run(desk.operator, "r1")


def test_a_run_is_found_by_its_beginning_if_only_one_begins_so(desk: Desk) -> None:
    desk.store.save_run(RUN)
    desk.transport.answers["probe"] = answer(report())
    assert find_run(desk.operator, "r").record == RUN
    with pytest.raises(NotFoundError, match="No run `x` was launched from here"):
        find_run(desk.operator, "x")


@pytest.mark.parametrize(
    ("state", "by", "code"),
    [
        ("finished", "", 0),
        ("failed", "", 20),
        ("running", "", 21),
        ("starting", "", 21),
        ("halted", "watchdog", 22),
        ("lost", "", 23),
        ("preempted", "", 23),
        ("halted", "operator", 24),
    ],
)
def test_status_has_an_exit_code_for_every_state(state: str, by: str, code: int) -> None:
    halt = {"run_id": "r1", "attempt": 1, "reason": "x", "by": by, "at": 1.0} if by else None
    assert exit_code_of(report(state, halt=halt)) == code


@pytest.mark.parametrize("is_there", [True, False])
def test_a_runner_that_ended_before_it_recorded_itself_is_not_waited_for(
    desk: Desk, is_there: bool
) -> None:
    planned, up = answer(report("planned")), answer(report(last_beat=beat(1)))
    window = "nsa-r1|train|7|0|/pod/runs/r1\n" if is_there else ""
    desk.transport.answers |= {
        "probe": Sequence(*[planned] * 40, up),
        "list-panes": completed(f"{window}nsa-r1|watchdog|8|0|/pod/runs/r1\n"),
        "tail": completed("error: no such file\n"),
    }
    if is_there:
        assert _await(desk) > 30
        return
    with pytest.raises(VerificationError, match="ends with: error: no such file"):
        _await(desk)
    assert 9 <= sum(desk.clock.slept) <= 12
