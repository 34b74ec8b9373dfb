"""The real tmux: a session belongs to one run, and a test's server leaves nothing."""

import secrets
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from nsa_ops.remote.tmux import (
    Tmux,
    Window,
    is_session_changed,
    parse_windows,
    session_name,
)
from tests.tmux_server import end_server, socket_path

pytestmark = pytest.mark.integration


@pytest.fixture
def tmux() -> Iterator[Tmux]:
    one = Tmux(f"nsa-test-{secrets.token_hex(4)}")
    yield one
    end_server(one.socket)
    assert not socket_path(one.socket).exists()


def _run(argv: Sequence[str]) -> str:
    return subprocess.run(argv, capture_output=True, text=True, check=True, timeout=20).stdout


def _windows(tmux: Tmux) -> list[Window]:
    return parse_windows(_run(tmux.list_windows()))


def test_run_ids_that_differ_in_a_dot_have_sessions_of_their_own(tmux: Tmux) -> None:
    dotted, plain = session_name("x.1"), session_name("x_1")
    sleep = ("sleep", "60")
    for session in (dotted, plain):
        _run(tmux.new_session(session, "train", "/", sleep))
    _run(tmux.new_window(dotted, "watchdog", "/", sleep))
    found = {(window.session, window.name) for window in _windows(tmux)}
    assert found == {(dotted, "train"), (dotted, "watchdog"), (plain, "train")}
    _run(tmux.kill_session(dotted))
    assert [window.session for window in _windows(tmux)] == [plain]


@pytest.mark.parametrize("locale", ["C", "C.UTF-8"])
def test_windows_are_found_in_every_locale(
    tmux: Tmux, monkeypatch: pytest.MonkeyPatch, locale: str
) -> None:
    monkeypatch.setenv("LC_ALL", locale)
    monkeypatch.delenv("LANG", raising=False)
    _run(tmux.new_session("nsa-r1", "train", "/", ("sleep", "60")))
    assert [(window.session, window.name) for window in _windows(tmux)] == [("nsa-r1", "train")]


@pytest.mark.parametrize("locale", ["C", "C.UTF-8"])
def test_a_session_knows_the_folder_that_it_was_started_in(
    tmux: Tmux, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, locale: str
) -> None:
    monkeypatch.setenv("LC_ALL", locale)
    monkeypatch.delenv("LANG", raising=False)
    folder, other = tmp_path / "run_\u00fc|1", tmp_path / "run_2"
    for each in (folder, other):
        each.mkdir()
    _run(tmux.new_session("nsa-r1", "train", str(folder), ("sleep", "60")))
    _run(tmux.new_window("nsa-r1", "watchdog", str(other), ("sleep", "60")))
    assert [window.is_of(str(folder)) for window in _windows(tmux)] == [True, True]
    assert not any(window.is_of(str(other)) for window in _windows(tmux))


def test_a_server_that_was_ended_leaves_no_socket(tmux: Tmux) -> None:
    _run(tmux.new_session("a", "train", "/", ("sleep", "60")))
    assert socket_path(tmux.socket).exists()
    end_server(tmux.socket)
    assert not socket_path(tmux.socket).exists()


def test_a_session_that_ends_as_it_is_asked_about_counts_as_gone(tmux: Tmux) -> None:
    """Whatever tmux says then, and it has many words for it, is one of those that are known."""
    brief, more = ("sleep", "0.02"), tmux.new_window("a", "more", "/", ("true",))
    for number in range(60):
        for argv in (tmux.new_session("a", "train", "/", brief), more, tmux.list_windows()):
            done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=20)
            assert done.returncode == 0 or is_session_changed(done.stderr), done.stderr
            time.sleep(0.005 + number % 20 / 1000)
