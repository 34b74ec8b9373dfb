"""Long work is a bar on a terminal and a line every ten seconds elsewhere."""

import os
import pty
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from nsa_ops.cli.progress import LINE_S, Display, work_line
from nsa_ops.cli.session import Options, Session
from nsa_ops.context import Work


@pytest.mark.parametrize(
    ("work", "said"),
    [
        (Work("pulling", "bytes", 2**20, 2**22, "step 5"),
         "pulling: ######------------------ 25 %, 1 MiB of 4 MiB, about 30 s left, step 5, "
         "10 s so far"),
        (Work("probing", "probe", 0, 10, "layer"),
         "probing: ------------------------ 0 %, 0 of 10 probes, layer, 10 s so far"),
        (Work("probing", "probe", 9, 10, "sentinel"),
         "probing: ######################-- 90 %, 9 of 10 probes, sentinel, 10 s so far"),
        (Work("probing", "probe", 1), "probing: 1 probe, 10 s so far"),
        (Work("probing", "probe", 0), "probing: 10 s so far"),
        (Work("waiting for the start", "", 0.5, 1.0, "staging, tokenise"),
         "waiting for the start: ############------------ 50 %, staging, tokenise, 10 s so far"),
        (Work("restoring"), "restoring: 10 s so far"),
    ],
)  # fmt: skip
def test_a_line_tells_share_amount_and_time(work: Work, said: str) -> None:
    assert work_line(work, 10.0, "ascii") == said


@pytest.mark.parametrize(("done", "total"), [(10**400, 1), (-1, 10**400), (float("nan"), 1.0)])
def test_numbers_of_a_pod_that_make_no_sense_end_no_display(done: float, total: float) -> None:
    assert work_line(Work("probing", "", done, total), 1.0, "ascii").startswith("probing: ")


def test_a_bar_has_the_signs_of_the_terminal() -> None:
    assert f"{6 * '█'}{18 * '░'} 25 %" in work_line(Work("x", "step", 1, 4), 1.0, "utf-8")


def test_lines_come_every_ten_seconds_by_default_and_stop_with_the_work() -> None:
    said: list[str] = []
    two = threading.Event()

    def say(text: str) -> None:
        said.append(text)
        if len(said) == 2:
            two.set()

    display = Display(say, line_s=0.01)
    with pytest.raises(ZeroDivisionError), display.working(Work("provisioning", "step", 1, 4)):
        assert two.wait(20)
        raise ZeroDivisionError
    count = len(said)
    assert said[0].startswith("provisioning: ")
    assert threading.Event().wait(0.05) is False
    assert len(said) == count
    assert LINE_S == 10.0


@contextmanager
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """A terminal as stderr; its other end."""
    leader, follower = pty.openpty()
    with os.fdopen(follower, "w", encoding="utf-8") as stream:
        monkeypatch.setattr("sys.stderr", stream)
        yield leader
    os.close(leader)


def test_on_a_terminal_a_bar_is_drawn_in_place_and_lines_go_above_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shown = b""
    with terminal(monkeypatch) as leader:
        monkeypatch.setenv("TERM", "xterm")
        session = Session("backup pull", Options())
        with session.operator.work("pulling", "step", 4) as work:
            work.done = 2
            while b"50 %" not in shown:
                shown += os.read(leader, 4096)
            session.tell("checkpoint of step 5")
        session.tell("done")
        session.close()
        while b"done" not in shown:
            shown += os.read(leader, 4096)
    clear = b"\r\x1b[2K"
    assert clear + b"pulling: " in shown
    assert clear + b"checkpoint of step 5\r\n" in shown
    assert shown.endswith(b"done\r\n")
    assert b"\n" not in shown[: shown.index(b"checkpoint")]


def test_quiet_work_says_nothing() -> None:
    session = Session("backup pull", Options(verbosity=-1))
    before = threading.active_count()
    with session.operator.work("pulling"):
        assert threading.active_count() == before
    session.close()
