"""The tmux session of a run: made once, whoever else makes it at the same moment."""

import pytest

from nsa_ops.context import RunHandle
from nsa_ops.errors import StateConflictError, VerificationError
from nsa_ops.runs.windows import start_session
from tests.ops.fakes import completed
from tests.ops.operators import POD, Desk

DUPLICATE = completed(exit_code=1, stderr="duplicate session: nsa-r1")


def windows(desk: Desk, *lists: str) -> None:
    """What tmux lists, one answer a look; the last one for ever."""
    answers = list(lists)
    desk.transport.answers["list-panes"] = lambda _words, _stdin: completed(
        answers.pop(0) if len(answers) > 1 else answers[0]
    )


def started(desk: Desk) -> list[str]:
    verbs = ("new-session", "new-window")
    return [verb for words in desk.transport.asked for verb in verbs if verb in words]


def test_a_session_that_somebody_made_meanwhile_is_listed_again_and_completed(desk: Desk) -> None:
    windows(desk, "", "nsa-r1|train|7|0|/pod/runs/r1\n")
    desk.transport.answers |= {"new-session": DUPLICATE, "new-window": completed()}
    start_session(RunHandle(desk.operator.link(POD), "code", "r1"))
    assert started(desk) == ["new-session", "new-window"]


def test_a_session_that_is_refused_and_never_listed_is_an_error(desk: Desk) -> None:
    windows(desk, "")
    desk.transport.answers["new-session"] = DUPLICATE
    with pytest.raises(StateConflictError, match="refuses a session of `r1` and lists none"):
        start_session(RunHandle(desk.operator.link(POD), "code", "r1"))


def test_a_session_of_another_directory_is_not_taken_for_this_run(desk: Desk) -> None:
    windows(desk, "nsa-r1|train|7|0|/other/runs/r1\nnsa-r1|watchdog|8|0|/other/runs/r1\n")
    with pytest.raises(StateConflictError, match="session `nsa-r1` of `/other/runs/r1`") as no:
        start_session(RunHandle(desk.operator.link(POD), "code", "r1"))
    assert "kill-session -t =nsa-r1" in no.value.hint
    assert started(desk) == []


def test_a_runner_that_ends_at_once_is_told_in_the_words_of_its_log(desk: Desk) -> None:
    """Its window was the only one of the session, which is gone before the watchdog gets one."""
    windows(desk, "")
    desk.transport.answers |= {
        "new-session": completed(),
        "new-window": completed(exit_code=1, stderr="can't find session: nsa-r1"),
        "tail": completed("Traceback\nImportError: libpython3.11.so.1.0: cannot open\n\n"),
    }
    with pytest.raises(VerificationError, match=r"ended as soon as .*libpython3.11.so") as ended:
        start_session(RunHandle(desk.operator.link(POD), "code", "r1"))
    assert POD.python in ended.value.hint
