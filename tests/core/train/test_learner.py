"""The trainer uses the kernels that were proven, and compiles whole blocks, or does not train."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from nsa_core.config.run import RunConfig
from nsa_core.env import RankEnvironment
from nsa_core.kernels.backend import BackendChoice
from nsa_core.rundir.exit import TrainerExit
from nsa_core.rundir.manifest import KernelChoice, read_manifest
from nsa_core.train import learner, parallel
from nsa_core.train.attempt import COMPILER_MODULES
from nsa_core.train.failure import TrainerConfigurationError
from nsa_core.train.group import RankGroup
from nsa_core.train.learner import (
    choose_device,
    compile_blocks,
    make_learner,
    require_recorded,
)
from nsa_core.train.parallel import share_loss, share_state
from tests.core.train.models import CPU, make_batches, make_model, make_steps, no_poll
from tests.core.train.sessions import SMALL
from tests.integration.trainer_runs import merge

CHOSEN = (
    BackendChoice("compressed", "triton", "the fastest of the known backends"),
    BackendChoice("selected", "sdpa", "triton needs sm_80 or newer, and the card is sm_75"),
)


def test_a_backend_that_is_not_the_proven_one_ends_the_run_with_both_names(manifest):
    proven = {"selected": KernelChoice(name="triton", reason="the fastest")}
    with pytest.raises(
        TrainerConfigurationError, match=r"proved triton .*selected.* sdpa .*sm_75"
    ) as ended:
        require_recorded(manifest.model_copy(update={"kernels": proven}), CHOSEN)
    assert ended.value.code == TrainerExit.CONFIGURATION


def test_proven_backends_and_branches_without_a_record_are_accepted(manifest):
    proven = {"compressed": KernelChoice(name="triton", reason="another reason")}
    require_recorded(manifest.model_copy(update={"kernels": proven}), CHOSEN)
    require_recorded(manifest, CHOSEN)


def test_a_manifest_of_an_earlier_version_has_no_record(run, manifest):
    del manifest
    text = run.manifest.read_text().replace('"kernels"', '"something_else"')
    run.manifest.write_text(text)
    assert read_manifest(run).kernels == {}


def test_several_cards_that_are_gone_are_not_replaced_by_the_processor(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    config = RunConfig.model_validate({"runtime": {"num_gpus": 2}, "batch": {"accumulation": 2}})
    with pytest.raises(TrainerConfigurationError, match=r"num_gpus is 2, and torch sees no CUDA"):
        choose_device(config, RankEnvironment(world_size=2))


class BrokenBlock(nn.Module):
    """The tracer cannot follow it to its end."""

    def forward(self, x: Tensor) -> Tensor:
        """Leave the graph in the middle."""
        doubled = 2 * x
        torch._dynamo.graph_break()
        return doubled + 1


class ShapedBlock(nn.Module):
    """Every shape is a graph of its own."""

    def forward(self, x: Tensor) -> Tensor:
        """Scale by the number of rows."""
        return x * x.shape[0]


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=False):
        yield
    torch._dynamo.reset()


def test_a_block_that_would_run_in_pieces_is_refused():
    block = BrokenBlock()
    compile_blocks(SimpleNamespace(blocks=[block]))
    with pytest.raises(Exception, match="graph_break") as refusal:
        block(torch.ones(2))
    assert type(refusal.value).__module__.startswith(COMPILER_MODULES)


def test_a_block_of_too_many_shapes_is_refused():
    block = ShapedBlock()
    compile_blocks(SimpleNamespace(blocks=[]))
    block.compile(backend="eager", dynamic=False)
    with pytest.raises(Exception, match="limit") as refusal:
        for rows in range(2, 40):
            block(torch.ones(rows))
    assert type(refusal.value).__module__.startswith(COMPILER_MODULES)


class Wrapped(nn.Module):
    """Stands for DistributedDataParallel."""

    def __init__(self, module, **settings):
        super().__init__()
        self.hooks = []

    def no_sync(self):
        """As in the original."""

    def register_comm_hook(self, state, hook):
        self.hooks.append(state)


class Whole:
    """Stands for ShardedModel; one rank keeps it all."""

    def __init__(self, model, device, group):
        self.hold = self.clip = None

    def parameter_infos(self, model):
        return model.parameter_infos()


@pytest.mark.parametrize("is_half", [False, True])
def test_the_residual_stream_is_as_configured(is_half):
    runtime = {"half_residual": is_half, "precision": "bf16"}
    config = RunConfig.model_validate(
        merge(SMALL, {"data": {"path": "text.jsonl"}, "runtime": runtime})
    )
    assert make_learner(config, torch.device("cpu")).model.has_half_residual is is_half


def test_the_steps_of_several_ranks_hold_their_gradients_and_add_them_in_order(monkeypatch):
    monkeypatch.setattr(parallel, "DistributedDataParallel", Wrapped)
    changes = {"data": {"path": "text.jsonl"}, "runtime": {"cpu_ranks": 2}}
    config = RunConfig.model_validate(merge(SMALL, changes))
    group = RankGroup(RankEnvironment(world_size=2))
    steps = make_learner(config, torch.device("cpu"), group=group).steps
    assert isinstance(steps.loss, Wrapped)
    assert steps.hold == steps.loss.no_sync
    assert steps.loss.hooks == [2]
    assert steps.group is group


@pytest.fixture
def alone():
    """The process group of one rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_the_forward_pass_waits_for_no_other_rank(alone):
    """The work of a rank is timed up to its first wait: who waits for rank 0 looks as slow."""
    group = RankGroup(RankEnvironment(world_size=2))
    loss, _ = share_loss(make_model(), RunConfig(), CPU, group)
    assert list(loss.buffers())
    assert not loss.will_sync_module_buffers()


@pytest.mark.parametrize(
    ("ranks", "accumulation", "sharding", "keeps"),
    [
        (1, 4, "ddp", False),  # alone there are no buckets
        (2, 2, "ddp", False),  # one micro-batch a rank
        (2, 4, "ddp", True),
        (4, 8, "ddp", True),
        (2, 4, "fsdp", False),
    ],
)
def test_gradients_of_several_micro_batches_stay_in_the_buckets_of_ddp(
    monkeypatch, ranks, accumulation, sharding, keeps
):
    monkeypatch.setattr(parallel, "DistributedDataParallel", Wrapped)
    monkeypatch.setattr(learner, "ShardedModel", Whole)
    changes = {
        "data": {"path": "text.jsonl"},
        "batch": {"accumulation": accumulation},
        "runtime": {"cpu_ranks": ranks, "sharding": sharding},
    }
    config = RunConfig.model_validate(merge(SMALL, changes))
    group = RankGroup(RankEnvironment(world_size=ranks))
    optimizers = make_learner(config, CPU, group=group).steps.optimizers
    grads = [parameter.grad for parameter in optimizers.parameters]
    assert optimizers.keeps_gradients is keeps
    assert [grad is not None for grad in grads] == [keeps] * len(grads)


def test_blocks_are_compiled_whole_beside_buckets_of_gradients(alone, monkeypatch):
    monkeypatch.setattr(torch._dynamo.config, "optimize_ddp", True)
    share_loss(make_model(), RunConfig(), CPU, RankGroup(RankEnvironment(world_size=2)))
    assert torch._dynamo.config.optimize_ddp is False


class Giving(RankGroup):
    """Rank 0 of two, which notes what it gives."""

    def __init__(self):
        super().__init__(RankEnvironment(world_size=2))
        self.given = []

    def copy_from_first(self, tensor):
        self.given.append(tensor.data_ptr())


def test_rank_0_gives_the_state_that_it_keeps_and_no_copy():
    model = make_model()
    steps, group = make_steps(model), Giving()
    steps.run(make_batches(1), no_poll)
    kept = {tensor.data_ptr() for tensor in steps.optimizers.state_tensors().values()}
    share_state(model, steps.optimizers, CPU, group)
    assert kept <= set(group.given)
    assert kept == {tensor.data_ptr() for tensor in steps.optimizers.state_tensors().values()}
