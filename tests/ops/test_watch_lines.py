"""What `watch` prints off a terminal: of a long past its newest records, then what is new."""

import pytest

from nsa_core.rundir.events import Event
from nsa_ops.cli.runs import show_frames
from nsa_ops.cli.session import Options, Session
from nsa_ops.runs.watch import Frame
from tests.ops.runs.documents import beat, report

PAST = [beat(number, loss=5.0) for number in range(1, 3001)]
EVENTS = [
    Event(ts=1.0, iso="x", attempt=1, kind="saved", by="trainer", message=str(number))
    for number in range(500)
]


def shown(capture: pytest.CaptureFixture[str], **how: bool) -> tuple[list[str], list[int], int]:
    """Lines on stdout, the steps of the records among them, and how many lines stderr has."""
    frame = Frame(report("finished"), PAST, EVENTS, PAST[-512:])
    show_frames(Session("watch", Options()), iter([frame]), **how)
    out, err = capture.readouterr()
    steps = [int(line.split()[1]) for line in out.splitlines() if line.startswith("step ")]
    return out.splitlines(), steps, len(err.splitlines())


def test_one_look_is_the_summary_and_below_it_the_last_ten_records(
    capsys: pytest.CaptureFixture[str],
) -> None:
    lines, steps, num_told = shown(capsys, once=True)
    assert lines[0].startswith("verdict ")
    assert (steps, num_told) == (list(range(2991, 3001)), 0)
    assert len(lines) < 30


def test_following_begins_with_the_last_ten_records_and_events(
    capsys: pytest.CaptureFixture[str],
) -> None:
    _, steps, num_told = shown(capsys)
    assert (steps, num_told) == (list(range(2991, 3001)), 10)


@pytest.mark.parametrize("once", [False, True])
def test_all_records_come_where_the_first_one_is_asked_for(
    capsys: pytest.CaptureFixture[str], once: bool
) -> None:
    assert shown(capsys, once=once, whole=True)[1] == list(range(1, 3001))
