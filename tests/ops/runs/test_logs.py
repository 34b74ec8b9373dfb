"""A log is read at the pace of its reader, whatever a pod gives or says that it has."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice, pairwise

import pytest

from nsa_ops.remote.transport import Completed
from nsa_ops.runs.watch import CHUNK_BYTES, LOG_INTERVAL_S, Chunk, read_log
from tests.ops.fakes import FakeTransport
from tests.ops.operators import Desk
from tests.ops.runs.documents import RUN, answer, report

LOG = "/pod/runs/r1/training.log"


@dataclass
class EndlessLog(FakeTransport):
    """Has as many bytes at any offset."""

    part_bytes: int = CHUNK_BYTES
    offsets: list[int] = field(default_factory=list)

    def tail(self, path: str, offset: int, *, max_bytes: int, timeout_s: float) -> bytes:
        self.offsets.append(offset)
        return b"x" * min(self.part_bytes, max_bytes)


def _endless(desk: Desk, part_bytes: int, *, named_bytes: int) -> EndlessLog:
    desk.store.save_run(RUN)
    transport = EndlessLog(part_bytes=part_bytes)
    transport.answers["probe"] = answer(report(log_bytes=named_bytes))
    desk.transport = transport
    return transport


def _joined(chunks: Sequence[Chunk]) -> bytes:
    assert all(one.next_offset == other.offset for one, other in pairwise(chunks))
    return b"".join(one.content for one in chunks)


@pytest.mark.parametrize("follow", [False, True])
@pytest.mark.parametrize("num_bytes", [0, 9, CHUNK_BYTES, 3 * CHUNK_BYTES + 9])
def test_the_log_of_a_run_that_has_ended_comes_whole_without_a_pause(
    desk: Desk, num_bytes: int, *, follow: bool
) -> None:
    desk.store.save_run(RUN)
    log = bytes(number % 251 for number in range(num_bytes))
    desk.transport.files[LOG] = log
    desk.transport.answers["probe"] = answer(report("finished", log_bytes=num_bytes))
    assert _joined(list(read_log(desk.operator, None, follow=follow))) == log
    assert desk.clock.slept == []


def test_what_a_followed_run_wrote_before_its_end_is_read(desk: Desk) -> None:
    desk.store.save_run(RUN)
    desk.transport.files[LOG] = b"first\n"
    looks = [answer(report("finished", log_bytes=11)), answer(report(log_bytes=6))]

    def look(_words: tuple[str, ...], _stdin: bytes) -> Completed:
        if len(looks) == 1:
            desk.transport.files[LOG] += b"last\n"
        return looks.pop()

    desk.transport.answers["probe"] = look
    assert _joined(list(read_log(desk.operator, None, follow=True))) == b"first\nlast\n"
    assert desk.clock.slept == [LOG_INTERVAL_S]


def test_without_follow_a_log_ends_at_the_size_that_the_pod_named(desk: Desk) -> None:
    _endless(desk, CHUNK_BYTES, named_bytes=CHUNK_BYTES + 1)
    assert len(list(islice(read_log(desk.operator, None), 9))) == 2


@pytest.mark.parametrize(("part_bytes", "named_bytes"), [(1, 2**60), (CHUNK_BYTES, 0)])
def test_a_pod_that_always_has_a_little_more_is_asked_once_an_interval(
    desk: Desk, part_bytes: int, named_bytes: int
) -> None:
    _endless(desk, part_bytes, named_bytes=named_bytes)
    assert len(list(islice(read_log(desk.operator, None, follow=True), 50))) == 50
    assert desk.clock.slept == [LOG_INTERVAL_S] * 49


def test_a_part_is_asked_for_when_the_one_before_was_taken(desk: Desk) -> None:
    transport = _endless(desk, CHUNK_BYTES, named_bytes=2**60)
    for chunk in islice(read_log(desk.operator, None, follow=True), 5):
        assert chunk.offset == transport.offsets[-1]
    assert transport.offsets == [place * CHUNK_BYTES for place in range(5)]
