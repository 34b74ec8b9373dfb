"""Halt: a trainer that does not answer gets TERM, then KILL, each after its wait."""

import json

import pytest

from nsa_ops.errors import DeadlineError
from nsa_ops.pod.messages import Reply, ReplyCode
from nsa_ops.pod.verify import HashedCheckpoints
from nsa_ops.remote.transport import Completed
from nsa_ops.runs.halt import execute_halt, plan_halt
from tests.ops.fakes import completed
from tests.ops.operators import Desk
from tests.ops.runs.documents import RUN, answer, ended, report


class Pod:
    """A pod whose run ends only after a certain request or signal."""

    def __init__(self, ends_after: str) -> None:
        self.ends_after = ends_after
        self.told: list[str] = []

    def act(self, _words: tuple[str, ...], stdin: bytes) -> Completed:
        action = json.loads(stdin)
        self.told.append(action.get("signal") or action["action"])
        return completed(
            Reply(
                action=action["action"], code=ReplyCode.OK, outcome="done", message="done"
            ).model_dump_json()
        )

    def probe(self, _words: tuple[str, ...], _stdin: bytes) -> Completed:
        if self.ends_after in self.told:
            return answer(report("halted", exit=ended(10, "halted")))
        return answer(report("running"))


@pytest.fixture
def halted(desk: Desk):
    def halt(ends_after: str):
        pod = Pod(ends_after)
        desk.store.save_run(RUN)
        desk.transport.answers = {
            "pod.act": pod.act,
            "pod.probe": pod.probe,
            "pod.verify": completed(HashedCheckpoints().model_dump_json()),
        }
        found, _ = plan_halt(desk.operator, "r1", "enough")
        return execute_halt(desk.operator, found, "enough"), pod

    return halt


@pytest.mark.parametrize(
    ("ends_after", "signals", "seconds"),
    [("halt", [], (0, 2)), ("TERM", ["TERM"], (60, 63)), ("KILL", ["TERM", "KILL"], (105, 110))],
)
def test_each_step_of_the_ladder_has_its_time(
    halted, ends_after: str, signals, seconds: tuple[int, int]
) -> None:
    outcome, pod = halted(ends_after)
    assert outcome.signals == signals
    assert pod.told == ["halt", *signals]
    assert seconds[0] <= outcome.seconds <= seconds[1]


def test_a_run_that_even_kill_does_not_end_is_reported_as_running(halted) -> None:
    with pytest.raises(DeadlineError, match="it is running"):
        halted("nothing")
