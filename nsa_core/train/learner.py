"""What learns: device, model, kernels and optimizer, as a configuration asks for them."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils import deterministic

from nsa_core.config.run import RunConfig
from nsa_core.env import RankEnvironment
from nsa_core.evaluate.device import COMPUTE_DTYPE
from nsa_core.kernels.backend import BackendChoice, BranchBackends
from nsa_core.kernels.dispatch import choose_backends, device_facts, refusal
from nsa_core.model.transformer import LanguageModel, LossKernel
from nsa_core.model.weights import model_tensors
from nsa_core.rundir.manifest import RunManifest
from nsa_core.train.failure import TrainerConfigurationError
from nsa_core.train.group import RankGroup
from nsa_core.train.optimizer import OptimizerSet
from nsa_core.train.parallel import accumulates_in_buckets, share_loss
from nsa_core.train.random_state import seed_everything
from nsa_core.train.sharded_model import ShardedModel
from nsa_core.train.step import StepRunner


@dataclass(frozen=True)
class Learner:
    """The model and what updates it.

    Attributes:
        shards: This rank's rows of its parameters; None where every rank keeps them whole.
    """

    model: LanguageModel
    steps: StepRunner
    shards: ShardedModel | None = None

    def weights(self) -> dict[str, Tensor]:
        """What this rank keeps of the weights, by name."""
        return model_tensors(self.model) if self.shards is None else self.shards.tensors


def choose_device(config: RunConfig, place: RankEnvironment | None = None) -> torch.device:
    """The device of this process; the card with its local rank where a pod has several ranks.

    Raises:
        TrainerConfigurationError: If there is no card where one is asked for, or fewer than ranks.
    """
    wanted, cards = config.runtime.device, config.runtime.num_gpus
    has_card = torch.cuda.is_available()
    if not has_card and (wanted == "cuda" or cards not in ("auto", 0, 1)):
        message = (
            f"runtime.device is {wanted} and runtime.num_gpus is {cards}, and torch sees no CUDA "
            "card here"
        )
        raise TrainerConfigurationError(
            message, hint="Look at `nvidia-smi`, or set runtime.device=cpu and runtime.num_gpus=1"
        )
    device = torch.device("cuda" if has_card and wanted != "cpu" else "cpu")
    if config.runtime.precision == "fp16" and device.type != "cuda":
        message = "runtime.precision fp16 needs a CUDA card, and the device is cpu"
        raise TrainerConfigurationError(message, hint="Set runtime.precision=fp32")
    if device.type == "cuda" and place is not None and place.world_size > 1:
        return _own_card(place)
    return device


def _own_card(place: RankEnvironment) -> torch.device:
    """The card of a local rank, made the current one, so that every kernel is launched there."""
    num_cards = torch.cuda.device_count()
    if place.local_rank >= num_cards:
        message = (
            f"rank {place.rank} needs card {place.local_rank}, and torch sees {num_cards} cards "
            "here, numbered from 0"
        )
        raise TrainerConfigurationError(
            message, hint="Set runtime.num_gpus, or CUDA_VISIBLE_DEVICES, and launch again"
        )
    torch.cuda.set_device(place.local_rank)
    return torch.device("cuda", place.local_rank)


def set_up_torch(config: RunConfig, device: torch.device, rank: int = 0) -> None:
    """Threads, determinism and seeds; on a CPU repeats are always equal bit for bit."""
    if config.runtime.threads:
        torch.set_num_threads(config.runtime.threads)
    if config.runtime.deterministic or device.type == "cpu":
        torch.use_deterministic_algorithms(mode=True)
        # B010: torch gives this module a class of its own, which a type checker cannot see
        setattr(deterministic, "fill_uninitialized_memory", False)  # noqa: B010
    torch.set_float32_matmul_precision("high" if config.runtime.precision != "fp32" else "highest")
    seed_everything(config.seed, rank)


def choose_kernels(config: RunConfig, device: torch.device) -> BranchBackends:
    """The backend of every branch that the policy asks for and the device allows.

    Raises:
        TrainerConfigurationError: If a kernel is named that cannot run here.
    """
    facts = device_facts(device, COMPUTE_DTYPE[config.runtime.precision], config)
    try:
        return choose_backends(config.runtime, facts, config.model.attention)
    except ValueError as error:
        raise TrainerConfigurationError(str(error), hint="Set runtime.backend=auto") from error


def make_learner(
    config: RunConfig,
    device: torch.device,
    backends: BranchBackends | None = None,
    group: RankGroup | None = None,
) -> Learner:
    """The model with its initial weights, and a fresh optimizer.

    `backends` of its branches are by default those of `choose_kernels`, whose errors are raised.
    The ranks of `group` share the steps.
    """
    group = group or RankGroup()
    precision = config.runtime.precision
    is_sharded = config.runtime.sharding == "fsdp" and group.size > 1
    model = LanguageModel(
        config.model, backends or choose_kernels(config, device), seed=config.seed
    )
    if config.runtime.compile:
        compile_blocks(model, with_hooks=not is_sharded)
    model.loss_kernel = choose_loss_kernel(config, device)
    model.activation_checkpointing = config.runtime.activation_checkpointing
    model.has_half_residual = config.runtime.half_residual
    shards = None
    if not is_sharded:
        loss, hold = share_loss(model.to(device), config, device, group)
        parameters = model.parameter_infos()
    else:  # block by block on its way to the card, which need not hold it whole
        shards = ShardedModel(model, device, group)
        loss, hold, parameters = model.loss, shards.hold, shards.parameter_infos(model)
    return Learner(
        model,
        StepRunner(
            loss=loss,
            hold=hold,
            group=group,
            clip=shards.clip if shards is not None else None,
            optimizers=OptimizerSet(
                parameters,
                config.optimizer,
                device,
                keeps_gradients=not is_sharded and accumulates_in_buckets(config, group),
            ),
            clip_norm=config.optimizer.clip_norm,
            precision=precision,
            device=device,
            scaler=torch.amp.GradScaler(device.type) if precision == "fp16" else None,
        ),
        shards,
    )


def choose_loss_kernel(config: RunConfig, device: torch.device) -> LossKernel:
    """Triton where its attention kernels may run and could, also for the dense control."""
    facts = device_facts(device, COMPUTE_DTYPE[config.runtime.precision])
    is_wanted = config.runtime.backend in ("auto", "triton")
    return "triton" if is_wanted and refusal("triton", "compressed", facts) is None else "torch"


def compile_blocks(model: LanguageModel, *, with_hooks: bool = True) -> None:
    """Compile each block in place, not the loss around them, and its hooks only `with_hooks`.

    What cannot be compiled is an error, never run as written in silence: neither a part of a
    block that the tracer cannot follow, nor a block that came in too many shapes.

    Compiled as a whole, the loss loses its gradient: its autograd function asks which inputs need
    one, and the tracer answers none. Blocks alone give eager losses to 5e-5 and 421k instead of
    341k tokens/s (52M parameters, bf16, T 2048; H200, torch 2.11, Triton 3.6; 2026-11-28).
    """
    torch._dynamo.config.fail_on_recompile_limit_hit = True
    for block in model.blocks:
        if with_hooks:
            block.compile(fullgraph=True)
        else:
            block.forward = torch.compile(block.forward, fullgraph=True)


def require_recorded(manifest: RunManifest, choices: Sequence[BackendChoice]) -> None:
    """Go on only with the backends of the manifest; a branch that it does not name is free.

    Raises:
        TrainerConfigurationError: If one differs: the machine has changed since it was proven.
    """
    for choice in choices:
        recorded = manifest.kernels.get(choice.branch)
        if recorded is not None and recorded.name != choice.name:
            message = (
                f"the preflight proved {recorded.name} for the {choice.branch} branch, and here it "
                f"would be {choice.name} ({choice.reason})"
            )
            raise TrainerConfigurationError(
                message, hint="The machine has changed: run `nsa-ops preflight`, then launch again"
            )
