"""FSDP2: each rank keeps its rows of every parameter, and gathers a block while it computes it.

Weights stay float32 and are gathered as such, so that autocast computes what it does on one card
(Zhao et al., PyTorch FSDP, VLDB 2023). A rank's rows are plain tensors to the optimizer: AdamW
treats each number by itself, and only the norm of the gradient needs the other ranks.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor

from nsa_core.model.stored_tensors import StoredTensor
from nsa_core.model.transformer import LanguageModel, ParameterInfo
from nsa_core.rundir.checkpoint_shards import TensorRows
from nsa_core.train.checkpoint_files import ShardLayout
from nsa_core.train.group import RankGroup

#: Rows of a counter, which every rank has and rank 0 writes.
_COUNTER = TensorRows.whole(())


class ShardedModel:
    """A model of which this rank keeps its rows.

    Attributes:
        tensors: This rank's rows of every parameter, by name; what an update changes.
        rows: Which rows they are.
    """

    def __init__(self, model: LanguageModel, device: torch.device, group: RankGroup) -> None:
        """Replace the whole parameters of a model, which may be on the host, by shards.

        The weights have to be the same on every rank. Blocks are compiled before.
        """
        self._group = group
        self._modules: list[FSDPModule] = []
        mesh = init_device_mesh(device.type, (group.size,))
        for module in (*model.block_list, model):
            self._modules.append(fully_shard(module, mesh=mesh))
        model.to(device)  # buffers of no block
        register_fsdp_forward_method(model, "loss")
        if device.type == "cpu":  # gloo has no mean
            for sharded in self._modules:
                sharded.set_force_sum_reduction_for_comms(enable=True)
        self._parameters = {info.name: info.parameter for info in model.parameter_infos()}
        self.rows = {
            name: rows_of(tuple(parameter.shape), group.place.rank, group.size)
            for name, parameter in self._parameters.items()
        }
        self._local = {
            name: nn.Parameter(_local(parameter)) for name, parameter in self._parameters.items()
        }
        self.tensors: dict[str, Tensor] = {
            name: parameter.detach() for name, parameter in self._local.items()
        }
        self._check_rows()

    def _check_rows(self) -> None:
        for name, tensor in self.tensors.items():
            if tuple(tensor.shape) != self.rows[name].part_shape:
                message = (
                    f"this torch keeps {list(tensor.shape)} of `{name}` on rank "
                    f"{self._group.place.rank}, and rows {self.rows[name]} were expected"
                )
                raise RuntimeError(message)

    def parameter_infos(self, model: LanguageModel) -> list[ParameterInfo]:
        """The model's parameters as the optimizer gets them: this rank's rows."""
        return [replace(info, parameter=self._local[info.name]) for info in model.parameter_infos()]

    @contextmanager
    def hold(self) -> Iterator[None]:
        """While entered, a backward pass keeps its gradients, whole, from the other ranks."""
        self._set_sync(is_wanted=False)
        try:
            yield
        finally:
            self._set_sync(is_wanted=True)

    def _set_sync(self, *, is_wanted: bool) -> None:
        self._modules[-1].set_requires_gradient_sync(is_wanted)  # recurses into the blocks

    def clip(self, max_norm: float) -> Tensor:
        """Give this rank's rows of the gradients to the optimizer, clipped by the norm of all.

        Returns:
            The norm over all ranks, before clipping.
        """
        for name, parameter in self._parameters.items():
            self._local[name].grad = None if parameter.grad is None else _local(parameter.grad)
            parameter.grad = None
        gradients = [one.grad for one in self._local.values() if one.grad is not None]
        squared = nn.utils.get_total_norm(gradients).double().square()
        self._group.sum_in_place(squared)
        norm = squared.sqrt().float()
        nn.utils.clip_grads_with_norm_(self._local.values(), max_norm, norm)
        return norm

    def layout(self, optimizer: Mapping[str, Tensor]) -> ShardLayout:
        """Which rows of which tensor this rank writes into a checkpoint.

        `optimizer` holds its state by `parameter/key`, as `state_tensors` gives it.
        """
        place = self._group.place
        found = {
            name: self.rows_of_state(name) if tensor.ndim else _COUNTER
            for name, tensor in optimizer.items()
            if tensor.ndim or place.rank == 0
        }
        return ShardLayout(place.rank, place.world_size, dict(self.rows), found)

    def rows_of_state(self, name: str) -> TensorRows:
        """Rows of an optimizer's moment: those of its parameter."""
        return self.rows[_parameter_of(name)]

    def wanted_state(self, stored: Mapping[str, StoredTensor]) -> dict[str, TensorRows]:
        """Rows of stored optimizer state that this rank needs; counters are read whole."""
        return {
            name: self.rows_of_state(name)
            for name, one in stored.items()
            if one.shape and _parameter_of(name) in self.rows
        }


def rows_of(shape: tuple[int, ...], rank: int, num_ranks: int) -> TensorRows:
    """Rows of a tensor that FSDP2 gives a rank: equal ones, fewer or none on the last; pure."""
    size = -(-shape[0] // num_ranks)
    begin, end = (min(shape[0], size * place) for place in (rank, rank + 1))
    return TensorRows(begin=begin, end=end, shape=shape)


def _parameter_of(state: str) -> str:
    return state.rpartition("/")[0]


def _local(tensor: Tensor) -> Tensor:
    """This rank's rows of a distributed tensor, in the same memory."""
    if not isinstance(tensor, DTensor):
        message = f"a parameter of shape {list(tensor.shape)} was not sharded"
        raise TypeError(message)
    local: Tensor = tensor.to_local().detach()
    return local
