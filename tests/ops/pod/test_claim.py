"""A runner takes a run only where nothing of it lives, and names what does."""

import os

import pytest

from nsa_core.rundir.layout import RunDir
from nsa_core.rundir.process import ProcessIdentity, identify
from nsa_core.rundir.ranks import RankProcess, write_rank_process
from nsa_ops.pod.messages import ReplyCode
from nsa_ops.pod.processes import hold_lock
from nsa_ops.pod.runner import StartRefusedError, claim
from tests.ops.pod.conftest import begin_ranks
from tests.ops.pod.ends import record_process


def refusal(run: RunDir) -> str:
    with pytest.raises(StartRefusedError) as refused:
        claim(run)
    assert refused.value.code == ReplyCode.CONFLICT
    return str(refused.value)


@pytest.fixture
def here() -> ProcessIdentity:
    found = identify(os.getpid())
    assert found is not None
    return found


def test_a_lock_without_a_record_and_a_living_trainer_are_named(run, here) -> None:
    begin_ranks(run, 2)
    with hold_lock(run.runner_lock):
        assert refusal(run).startswith("run run-1 is alive: a runner or trainer; halt it first")
    record_process(run, here, num_ranks=2)
    assert f"trainer pid {here.pid} (attempt 1); halt it first" in refusal(run)


def test_ranks_that_outlived_torchrun_are_named_and_it_is_not(run, here) -> None:
    begin_ranks(run, 2)
    gone = here.model_copy(update={"pid": 2**22 - 1, "start_ticks": 1})
    record_process(run, gone, num_ranks=2)
    for rank, process in enumerate((gone, here)):
        left = RankProcess(
            run_id=run.run_id, attempt=1, rank=rank, local_rank=rank, num_ranks=2,
            process=process, started_unix_s=1.0,
        )  # fmt: skip
        write_rank_process(run, left)
    assert f"is alive: rank 1 pid {here.pid} (attempt 1); halt it first" in refusal(run)
