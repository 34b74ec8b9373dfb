"""The model on several ranks: each computes its share of a step, and the gradients are summed.

DistributedDataParallel keeps the whole state on every rank (Li et al., VLDB 2020). The loss of a
rank is divided by the valid targets of the whole step over the number of ranks, so that the mean
that it takes over the ranks is the gradient of the mean over all valid targets.
"""

import json
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from nsa_core.config.run import RunConfig
from nsa_core.kernels.packing import Packing
from nsa_core.model.loss import LossSum
from nsa_core.model.transformer import LanguageModel
from nsa_core.model.weights import model_tensors
from nsa_core.train.group import RankGroup
from nsa_core.train.optimizer import OptimizerSet
from nsa_core.train.step import Hold, LossFunction


class _Loss(nn.Module):
    """The loss as a module, which is what a wrapper takes."""

    def __init__(self, model: LanguageModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens_BT: Tensor, targets_BT: Tensor, packing: Packing) -> LossSum:
        return self.model.loss(tokens_BT, targets_BT, packing)


def share_loss(
    model: LanguageModel, config: RunConfig, device: torch.device, group: RankGroup
) -> tuple[LossFunction, Hold]:
    """The loss of a model that is the same on every rank, with the weights of rank 0.

    While the second is entered, forward and backward keep their gradients to themselves.

    Where repeats have to be equal bit for bit, gradients are summed in the order of the ranks. A
    ring sums each part of a bucket in an order of its own, and the buckets of the first step of an
    attempt are cut otherwise than later ones, so that a resumed run of three ranks or more would
    differ in the last bits.
    """
    if group.size == 1:
        return model.loss, nullcontext
    if accumulates_in_buckets(config, group):
        for parameter in model.parameters():  # DDP replaces them by views of its buckets
            parameter.grad = torch.zeros_like(parameter)
    # With this on, a compiled block is cut where DDP expects a bucket of gradients to be full, and
    # the residual stream is kept at each cut: 1.6 GiB more for m7c-1b on two H200, no faster.
    torch._dynamo.config.optimize_ddp = False
    wrapped = DistributedDataParallel(
        _Loss(model),
        device_ids=[device.index] if device.type == "cuda" else None,
        gradient_as_bucket_view=True,
    )
    # they are constants, and a forward pass that waits for rank 0 would hide how slow that is
    wrapped.broadcast_buffers = False
    if config.runtime.deterministic or device.type == "cpu":
        wrapped.register_comm_hook(group.size, _mean_in_order)
    return wrapped, wrapped.no_sync


def accumulates_in_buckets(config: RunConfig, group: RankGroup) -> bool:
    """Whether gradients have to stay views of DDP's buckets from step to step.

    Where they are dropped, those of all micro-batches but the last are new tensors, and so in
    memory twice. With one micro-batch a step each goes into its bucket as it comes: it may be
    dropped, which saves filling it with 0 and adding to it.
    """
    return group.size > 1 and config.batch.accumulation > group.size


def _mean_in_order(num_ranks: int, bucket: GradBucket) -> Future[Tensor]:
    own = bucket.buffer()
    parts = [torch.empty_like(own) for _ in range(num_ranks)]
    dist.all_gather(parts, own)
    total = parts[0]
    for part in parts[1:]:
        total += part
    done: Future[Tensor] = Future()
    done.set_result(total / num_ranks)
    return done


def share_state(
    model: LanguageModel, optimizers: OptimizerSet, device: torch.device, group: RankGroup
) -> None:
    """Give every rank the weights and the optimizer state of rank 0, which has loaded them."""
    if group.size == 1:
        return
    for tensor in model_tensors(model).values():
        group.copy_from_first(tensor)
    optimizers.load_state_tensors(_share(optimizers.state_tensors(), device, group))


def _share(own: dict[str, Tensor], device: torch.device, group: RankGroup) -> dict[str, Tensor]:
    """The state of rank 0: `own` there, and on another rank in new memory."""
    kinds = {
        name: (str(tensor.dtype).removeprefix("torch."), list(tensor.shape))
        for name, tensor in own.items()
    }
    given = group.from_first(json.dumps(kinds).encode())
    if not group.is_first:
        own = {
            name: torch.empty(shape, dtype=getattr(torch, dtype), device=device)
            for name, (dtype, shape) in json.loads(given).items()
        }
    for tensor in own.values():
        group.copy_from_first(tensor)
    return own
