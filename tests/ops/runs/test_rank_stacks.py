"""`stack`: the stacks of every rank, alike ones once, and the rank that wrote none is named."""

import io
import json
from collections.abc import Callable
from dataclasses import replace

import pytest
from rich.console import Console

from nsa_ops.cli.inspection import draw_stacks
from nsa_ops.errors import DeadlineError, PodUnreachableError, VerificationError
from nsa_ops.pod.messages import Reply, ReplyCode
from nsa_ops.pod.rank_evidence import RankEvidence
from nsa_ops.runs.rank_stacks import Stacks, dump_stacks
from nsa_ops.store import MemberPod
from tests.ops.fakes import completed
from tests.ops.operators import POD, Desk
from tests.ops.runs.documents import RUN, answer, report

OLD = "Thread 0x1 (old)\n"


class Ranks:
    """A pod whose ranks write stacks when they get USR1."""

    def __init__(self, desk: Desk, stacks: dict[int, str], *, num_ranks: int) -> None:
        self.desk, self.stacks = desk, stacks
        self.signals: list[tuple[str, str]] = []
        ranks = tuple(RankEvidence(rank=rank) for rank in range(num_ranks if num_ranks > 1 else 0))
        desk.store.save_run(RUN)
        desk.transport.answers = {
            "pod.act": self.act, "pod.probe": answer(report("running", ranks=ranks)),
        }  # fmt: skip
        for rank in range(num_ranks):
            desk.transport.files[self.path(rank)] = OLD.encode()

    def path(self, rank: int) -> str:
        return f"/pod/runs/r1/stackdump_rank{rank}.txt"

    def act(self, _words: tuple[str, ...], stdin: bytes):
        asked = json.loads(stdin)
        self.signals.append((asked["signal"], asked["run_dir"]))
        own = {n: t for n, t in self.stacks.items() if self.path(n).startswith(asked["run_dir"])}
        for rank, text in own.items():
            self.desk.transport.files[self.path(rank)] += text.encode()
        reply = Reply(action="signal", code=ReplyCode.OK, outcome="done", message="sent USR1")
        return completed(reply.model_dump_json())


def drawn(stacks: Stacks) -> list[str]:
    console = Console(file=io.StringIO(), width=100)
    draw_stacks(console, stacks)
    return console.file.getvalue().splitlines()  # type: ignore[attr-defined]


def test_the_stacks_of_one_rank_are_shown_as_it_wrote_them(desk: Desk) -> None:
    Ranks(desk, {0: "Thread 0x7f (most recent call first)\n  File a\n"}, num_ranks=1)
    stacks = dump_stacks(desk.operator, "r1")
    assert stacks == Stacks("r1", "Thread 0x7f (most recent call first)\n  File a\n")


def test_ranks_at_the_same_place_are_shown_once_and_the_odd_one_first(desk: Desk) -> None:
    waiting = "Thread {} (main)\n  File all_reduce\n"
    texts = {rank: waiting.format(hex(rank + 64)) for rank in (0, 1, 3)}
    pod = Ranks(desk, texts | {2: "Thread 0x9 (main)\n  File next_batch\n"}, num_ranks=4)
    stacks = dump_stacks(desk.operator, "r1")
    assert [group.ranks for group in stacks.groups] == [[2], [0, 1, 3]]
    lines = drawn(stacks)
    assert [line for line in lines if line.startswith("===")] == [
        "=== rank 2",
        "=== ranks 0, 1 and 3",
    ]
    assert lines.index("  File next_batch") < lines.index("  File all_reduce")
    assert "old" not in stacks.text
    assert pod.signals == [("USR1", "/pod/runs/r1")]


def test_a_rank_that_writes_no_stacks_is_named_after_those_that_do(desk: Desk) -> None:
    Ranks(desk, {0: "a\n", 2: "a\n"}, num_ranks=3)
    stacks = dump_stacks(desk.operator, "r1")
    assert stacks.silent == (1,)
    assert drawn(stacks)[-1].startswith("=== rank 1 wrote no stacks within 10 s: stopped, or in")


def test_where_no_rank_writes_stacks_the_deadline_ends_it(desk: Desk) -> None:
    Ranks(desk, {}, num_ranks=2)
    with pytest.raises(DeadlineError, match="wrote no stacks within 10 s"):
        dump_stacks(desk.operator, "r1")


def test_a_file_longer_than_one_read_is_passed_over(desk: Desk) -> None:
    pod = Ranks(desk, {0: "new\n", 1: "new\n"}, num_ranks=2)
    desk.transport.files[pod.path(1)] = b"old\n" * 600_000
    assert dump_stacks(desk.operator, "r1").groups[0].text == "new\n"


def several_pods(desk: Desk, *, is_answering: bool) -> Ranks:
    other = replace(POD, name="b", pod_id="pod-2", root="/other")
    desk.store.add_pod(other)
    pod = Ranks(desk, {0: "a\n", 1: "a\n"}, num_ranks=1)
    pod.path = lambda rank: f"{('/pod', '/other')[rank]}/runs/r1/stackdump_rank{rank}.txt"
    desk.transport.files[pod.path(1)] = OLD.encode()
    desk.store.save_run(RUN.with_others([MemberPod("b", "pod-2")]))
    first = report("running", ranks=(RankEvidence(rank=0),))
    manifest = first.manifest.model_copy(update={"node_rank": 1, "num_pods": 2})
    second = report("running", ranks=(RankEvidence(rank=1),), manifest=manifest)
    desk.transport.answers["pod.probe"] = lambda words, _: answer(
        second if any("/other" in word for word in words) else first
    )
    act = pod.act

    def answer_or_not(words: tuple[str, ...], stdin: bytes):
        if "/other" in stdin.decode() and not is_answering:
            message = "pod `b` does not answer"
            raise PodUnreachableError(message)
        return act(words, stdin)

    desk.transport.answers["pod.act"] = answer_or_not
    return pod


def give(desk: Desk, content: Callable[[str, int, int], bytes]) -> list[int]:
    """Let the pod give other bytes for its files of stacks; how many it has given each time."""
    given: list[int] = []

    def tail(path: str, offset: int, *, max_bytes: int, timeout_s: float) -> bytes:
        piece = content(path, offset, max_bytes)
        given.append(len(piece))
        return piece

    desk.transport.tail = tail  # type: ignore[method-assign]
    return given


def test_a_file_of_stacks_without_end_is_refused_and_not_read_for_ever(desk: Desk) -> None:
    Ranks(desk, {}, num_ranks=4)
    given = give(desk, lambda _path, _offset, max_bytes: b"x" * max_bytes)
    with pytest.raises(VerificationError, match="is too long to look for new stacks"):
        dump_stacks(desk.operator, "r1")
    assert sum(given) <= 257 * 2**20


def test_a_pod_that_gives_a_little_at_a_time_is_not_waited_for_rank_by_rank(desk: Desk) -> None:
    Ranks(desk, {}, num_ranks=64)
    began_s = desk.clock.now_s

    def drip(_path: str, _offset: int, _max_bytes: int) -> bytes:
        desk.clock.now_s += 29.0
        return b""

    give(desk, drip)
    with pytest.raises(DeadlineError, match="within 60 s") as caught:
        dump_stacks(desk.operator, "r1")
    assert "status r1" in caught.value.hint
    assert desk.clock.now_s - began_s < 120


def test_the_new_stacks_of_all_ranks_together_are_bounded(desk: Desk) -> None:
    Ranks(desk, {}, num_ranks=64)
    num_asked = dict.fromkeys(range(64), 0)

    def fill(path: str, _offset: int, max_bytes: int) -> bytes:
        rank = int(path.removesuffix(".txt").rpartition("rank")[2])
        num_asked[rank] += 1
        return b"" if num_asked[rank] == 1 else b"x" * max_bytes

    give(desk, fill)
    assert len(dump_stacks(desk.operator, "r1").text) < 17 * 2**20


def test_a_second_pod_that_is_lost_while_its_stacks_are_awaited_costs_its_ranks_alone(
    desk: Desk,
) -> None:
    pod = several_pods(desk, is_answering=True)
    files = desk.transport.files

    def lose(path: str, offset: int, max_bytes: int) -> bytes:
        if path.startswith("/other") and pod.signals:
            message = "pod `b` does not answer"
            raise PodUnreachableError(message)
        return files[path][offset : offset + max_bytes]

    give(desk, lose)
    stacks = dump_stacks(desk.operator, "r1")
    assert (stacks.groups[0].ranks, stacks.silent) == ([0], (1,))
    assert sum("does not answer" in line for line in desk.story) == 1


def test_each_pod_of_a_run_is_asked_for_the_stacks_of_its_ranks(desk: Desk) -> None:
    pod = several_pods(desk, is_answering=True)
    stacks = dump_stacks(desk.operator, "r1")
    assert [group.ranks for group in stacks.groups] == [[0, 1]]
    assert [run_dir for _, run_dir in pod.signals] == ["/pod/runs/r1", "/other/runs/r1"]


def test_a_second_pod_that_does_not_answer_costs_its_ranks_alone(desk: Desk) -> None:
    several_pods(desk, is_answering=False)
    stacks = dump_stacks(desk.operator, "r1")
    assert (stacks.groups[0].ranks, stacks.silent) == ([0], (1,))
    assert any("does not answer" in line for line in desk.story)
