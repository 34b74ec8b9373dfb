"""The program behind the link answers by itself: broken frames, floods, and slow drips."""

from typing import Any

import pytest

from tests.integration.hostile.judged import told
from tests.integration.hostile.lying_pod import SLACK_BYTES, World

pytestmark = pytest.mark.integration
NEVER = (4, 5, 7, 8, 9, 10)

FRAMES: dict[str, dict[str, Any]] = {
    "pid-of-letters": {"out": "<N>{abc;hello<N>}0;", "err": "<N>{abc;<N>}0;"},
    "pid-without-end": {"out": "<N>{" + "9" * 5000, "err": ""},
    "ending-of-letters": {"out": "<N>{1;hello<N>}zzz;", "err": "<N>{1;<N>}zzz;"},
    "ending-too-large": {"out": "<N>{1;hello<N>}9999999999;", "err": "<N>{1;<N>}9999999999;"},
    "endings-differ": {"out": "<N>{1;{}<N>}0;", "err": "<N>{1;<N>}77;"},
    "no-ending": {"out": "<N>{1;hello", "err": "<N>{1;"},
    "ending-first": {"out": "<N>}0;<N>{1;hello", "err": "<N>}0;<N>{1;"},
    "one-stream": {"out": "<N>{1;hello<N>}0;", "err": ""},
    "no-frame": {"out": "Welcome\n", "err": "motd\n"},
    "other-mark": {"out": "0123456789abcdef{1;hello}0;", "err": ""},
    "last-words": {"out": "", "err": "\x1b[2J\x1b]0;owned\x07 Permission denied\n", "code": 255},
    "controls-in-an-answer": {"out": "<N>{1;\x1b[2J<N>}0;", "err": "<N>{1;\x1b[31m\x07<N>}1;"},
    "nul-bytes": {"out": "\0" * 4096 + "<N>{1;\0<N>}0;", "err": "<N>{1;\0<N>}0;"},
}


@pytest.mark.parametrize("frame", FRAMES)
def test_a_broken_frame_is_no_answer(world: World, frame: str) -> None:
    side = world.sides["far"]
    side.lie({"frame": FRAMES[frame]})
    heard, problems = told(world, side, "status", side.run_id, "--timeout", "5", codes=NEVER)
    assert side.num_lies, heard.said
    assert problems == [], heard.said


_LINE, _LINES = "x" * 2**16, ("y" * 255 + "\n") * 256
FLOODS: dict[str, dict[str, Any]] = {
    "before-the-frame-out": {"out": "", "again": _LINES, "repeat": -1},
    "before-the-frame-err": {"out": "", "again": _LINES, "repeat": -1, "stream": "err"},
    "half-a-mark": {"out": "<N>{", "again": "1" * 2**16, "repeat": -1},
    "one-line": {"out": "<N>{1;", "err": "<N>{1;", "again": _LINE, "repeat": -1},
    "lines": {"out": "<N>{1;", "err": "<N>{1;", "again": _LINES, "repeat": -1},
    "errors": {"out": "<N>{1;", "err": "<N>{1;", "again": _LINES, "repeat": -1, "stream": "err"},
    "after-the-end": {"out": "<N>{1;x<N>}0;", "err": "<N>{1;", "again": _LINE, "repeat": -1},
}


@pytest.mark.parametrize("flood", FLOODS)
def test_a_flood_is_cut_at_a_bound(world: World, flood: str) -> None:
    side = world.sides["far"]
    side.lie({"frame": FLOODS[flood]})
    heard, problems = told(world, side, "status", side.run_id, "--timeout", "10", codes=NEVER)
    assert side.num_lies, heard.said
    assert problems == [], heard.said
    assert side.flooded_bytes < 2 * SLACK_BYTES, f"{side.flooded_bytes} bytes were taken"


COMMANDS = {
    "logs": ("logs", "<RUN>"),
    "events": ("events", "<RUN>"),
    "watch": ("watch", "<RUN>", "--once"),
    "health": ("health", "<RUN>"),
    "adopt": ("run", "adopt", "<RUN>", "--pod", "far", "-y"),
    "pull": ("backup", "pull", "<RUN>", "-y"),
    "resume": ("resume", "<RUN>", "-y"),
    "checkpoint": ("checkpoint", "<RUN>"),
    "prune": ("backup", "prune", "<RUN>", "--on-pod", "--keep", "1", "-y"),
    "restore": ("backup", "restore", "near-run", "--pod", "far", "-y"),
    "push": ("backup", "push", "near-run", "far:/tmp/hostile-push", "-y"),
}


@pytest.mark.parametrize("command", COMMANDS)
def test_no_command_takes_more_than_its_answer_may_hold(world: World, command: str) -> None:
    side = world.sides["far"]
    side.lie({"again": _LINE, "repeat": -1})
    words = [word.replace("<RUN>", side.run_id) for word in COMMANDS[command]]
    heard, problems = told(world, side, *words, "--timeout", "10", codes=(*NEVER, 11))
    assert side.num_lies, heard.said
    assert problems == [], heard.said
    assert side.flooded_bytes < 2 * SLACK_BYTES, f"{side.flooded_bytes} bytes were taken"


def test_a_list_of_runs_shows_a_flooding_pod_as_unreachable(world: World) -> None:
    side = world.sides["far"]
    side.lie({"asked": "nsa_ops.pod.probe", "again": _LINE, "repeat": -1})
    heard, problems = told(world, side, "run", "ls", "--timeout", "10", codes=(0,))
    assert problems == [], heard.said
    assert b"unreachable" in heard.out
    assert b"finished" in heard.out
    assert side.flooded_bytes < 2 * SLACK_BYTES


def test_an_answer_of_a_byte_a_second_ends_by_the_deadline(world: World) -> None:
    side = world.sides["far"]
    side.lie({"again": "x", "repeat": -1, "pause_s": 1.0})
    before = world.before(side)
    commands = [
        ("status", side.run_id),
        ("logs", side.run_id),
        ("watch", side.run_id, "--once"),
        ("backup", "pull", side.run_id, "-y"),
    ]
    started = [world.start(*words, "--timeout", "3") for words in commands]
    for heard in [one.wait() for one in started]:
        assert heard.problems((8,)) == [], heard.said
        assert heard.seconds < 45, heard.said
    assert world.harm(before, side) == []


@pytest.mark.parametrize("where", ["listing", "data", "many"])
def test_a_pull_whose_link_is_cut_keeps_what_is_good_and_is_continued(
    world: World, where: str
) -> None:
    side = world.sides["far"]
    positions = {"listing": (1, 700, 3000), "data": (9000, 40_000, 90_000), "many": (150_000,) * 2}
    for num_bytes in positions[where]:
        world.proxy.cut_in(num_bytes)
        before = world.before(side)
        heard = world("backup", "pull", side.run_id, "--checkpoint", "all", "-y")
        world.proxy.cut_after = None
        assert heard.problems((0, 5, 9, 10)) == [], heard.said
        assert world.harm(before, side) == [], heard.said
    heard, before = world("backup", "pull", side.run_id, "--checkpoint", "all", "-y"), None
    assert heard.problems((0,)) == [], heard.said
    assert all(side.held(step).is_dir() for step in (10, 20, 30))
