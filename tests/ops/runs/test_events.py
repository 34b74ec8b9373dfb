"""Events of a long run: what a probe brings, and all of them on request."""

import pytest

from nsa_core.rundir.events import Event
from nsa_ops.errors import VerificationError
from nsa_ops.remote.transport import OversizeError
from nsa_ops.runs import status
from tests.ops.operators import Desk
from tests.ops.runs.documents import RUN, answer, report

PATH = "/pod/runs/r1/events.jsonl"


def events(count: int) -> list[Event]:
    return [Event(ts=n, iso="", attempt=1, kind="saved", by="trainer") for n in range(count)]


def lines(some: list[Event]) -> bytes:
    return b"".join(event.model_dump_json().encode() + b"\n" for event in some)


def show_newest(desk: Desk, num_of: int, num_shown: int) -> list[Event]:
    every = events(num_of)
    content = lines(every)
    desk.transport.files[PATH] = content
    desk.store.save_run(RUN)
    desk.transport.answers["probe"] = answer(
        report(
            events=every[-num_shown:],
            events_begin=len(lines(every[:-num_shown])),
            events_offset=len(content),
        )
    )
    return every


def test_the_newest_events_cost_one_round_trip_and_what_lies_before_is_said(desk: Desk) -> None:
    every = show_newest(desk, 50, 10)
    assert status.list_events(desk.operator, "r1") == every[-10:]
    assert len(desk.transport.asked) == 1
    assert desk.story == ["3.39 KiB of earlier events are left out; `--all` reads them too"]


def test_all_events_are_read_in_pieces_up_to_where_the_file_ended(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    every = show_newest(desk, 50, 10)
    desk.transport.files[PATH] += b'{"ts": 1'  # a line that is being written
    monkeypatch.setattr(status, "_EVENTS_AT_ONCE", 300)
    assert status.list_events(desk.operator, "r1", whole=True) == every


def test_events_that_cannot_be_read_are_no_empty_list(desk: Desk) -> None:
    show_newest(desk, 50, 10)
    flag = "events.jsonl cannot be read: Is a directory"
    desk.transport.answers["probe"] = answer(report(events=[], flags=["stale", flag]))
    with pytest.raises(VerificationError, match="Is a directory"):
        status.list_events(desk.operator, "r1")


def test_a_pod_that_names_an_endless_file_is_refused(desk: Desk) -> None:
    show_newest(desk, 50, 10)
    endless = report(events=[], events_begin=1, events_offset=2**50)
    desk.transport.answers["probe"] = answer(endless)
    with pytest.raises(OversizeError, match=r"events\.jsonl of `r1` has"):
        status.list_events(desk.operator, "r1", whole=True)
