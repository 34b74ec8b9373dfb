"""AdamW, Muon for the matrices of the blocks, and the learning rate as a function of the step."""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from nsa_core.config.training import OptimizerConfig, ScheduleConfig
from nsa_core.model.transformer import ParameterInfo


def learning_rate_scale(step: int, schedule: ScheduleConfig) -> float:
    """Learning rate of an optimizer step as a share of the peak.

    Warm-up reaches 1 at the step `warmup_steps - 1`; the last step of the run, `steps - 1`, has
    exactly `min_ratio`, unless it belongs to the warm-up (`constant` excepted). A run of one step
    has the peak: its first step is its last one, and at a `min_ratio` of 0 it would learn nothing.

    Args:
        step: Optimizer steps done before this one; never micro-steps.
        schedule: Kind and lengths.
    """
    if step < schedule.warmup_steps:
        return (step + 1) / schedule.warmup_steps
    if schedule.kind == "constant":
        return 1.0
    last = schedule.steps - 1
    first = schedule.warmup_steps
    if schedule.kind == "wsd":
        first = max(first, schedule.steps - round(schedule.steps * schedule.decay_fraction) - 1)
    first = min(first, max(0, last - 1))  # where no step is left to decay over, the last one does
    progress = min(1.0, max(0.0, (step - first) / max(1, last - first)))
    falling = 1 - progress if schedule.kind == "wsd" else 0.5 * (1 + math.cos(math.pi * progress))
    return schedule.min_ratio + (1 - schedule.min_ratio) * falling


#: State of a parameter that AdamW has updated.
_ADAMW_KEYS = frozenset({"step", "exp_avg", "exp_avg_sq"})


class OptimizerSet:
    """One or two torch optimizers that step together and share one schedule.

    State is read and written by parameter name, so that a checkpoint does not depend on the order
    in which a model declares its layers.

    Attributes:
        parameters: What they update.
        torch_optimizers: AdamW, and Muon where it applies.
        keeps_gradients: `zero_grad` fills them with 0 where they are, and drops none.

    Raises:
        ValueError: If a parameter is narrower than float32.
    """

    def __init__(
        self,
        parameters: Sequence[ParameterInfo],
        config: OptimizerConfig,
        device: torch.device,
        *,
        keeps_gradients: bool = False,
    ) -> None:
        _require_master_weights(parameters)
        matrices = [p for p in parameters if config.kind == "muon" and p.is_block_matrix]
        taken = {info.name for info in matrices}
        rest = [info for info in parameters if info.name not in taken]
        ordered = sorted(rest, key=lambda info: not info.is_decayed)
        self.keeps_gradients = keeps_gradients
        self.parameters = [info.parameter for info in parameters]
        self.torch_optimizers: list[torch.optim.Optimizer] = [_adamw(ordered, config, device)]
        self._names = [[info.name for info in ordered]]
        if matrices:
            self.torch_optimizers.append(
                torch.optim.Muon(
                    [info.parameter for info in matrices],
                    lr=config.muon_learning_rate,
                    weight_decay=config.weight_decay,
                )
            )
            self._names.append([info.name for info in matrices])
        self._peaks: list[list[float]] = [
            [group["lr"] for group in o.param_groups] for o in self.torch_optimizers
        ]

    def set_scale(self, scale: float) -> float:
        """Set every learning rate to its peak times `scale`; returns the first group's rate."""
        for optimizer, peaks in zip(self.torch_optimizers, self._peaks, strict=True):
            for group, peak in zip(optimizer.param_groups, peaks, strict=True):
                group["lr"] = peak * scale
        return self._peaks[0][0] * scale

    @property
    def can_hold_back(self) -> bool:
        """Whether a number on the device can keep `step` from changing anything."""
        return all(group.get("fused") for o in self.torch_optimizers for group in o.param_groups)

    def step(self, hold_back: Tensor | None = None) -> None:
        """Update the weights.

        Args:
            hold_back: One number on the device; unless it is 0, weights and state keep every bit.
                torch's fused optimizers read it as the overflow flag of its gradient scaler. None
                always updates.
        """
        for optimizer in self.torch_optimizers:
            optimizer.found_inf = hold_back  # type: ignore[attr-defined]  # torch's own protocol
            optimizer.step()

    def zero_grad(self) -> None:
        """Drop all gradients, or fill them with 0 where they are kept."""
        for optimizer in self.torch_optimizers:
            optimizer.zero_grad(set_to_none=not self.keeps_gradients)

    def state_tensors(self) -> dict[str, Tensor]:
        """Every state tensor under `parameter/key`; empty before the first step."""
        tensors = {}
        for optimizer, names in zip(self.torch_optimizers, self._names, strict=True):
            for index, entries in optimizer.state_dict()["state"].items():
                for key, value in entries.items():
                    tensors[f"{names[index]}/{key}"] = torch.as_tensor(value)
        return tensors

    def expected_moments(self) -> list[Tensor]:
        """Tensors as large as those that the state holds after a step, apart from counters."""
        return [
            parameter
            for optimizer in self.torch_optimizers
            for group in optimizer.param_groups
            for parameter in group["params"]
            for _ in range(2 if isinstance(optimizer, torch.optim.AdamW) else 1)
        ]

    def load_state_tensors(self, tensors: dict[str, Tensor]) -> None:
        """Replace the state by what `state_tensors` gave.

        Raises:
            ValueError: If a name belongs to no parameter of this run, or a tensor does not fit it.
        """
        by_name: dict[str, dict[str, Tensor]] = {}
        for path, value in tensors.items():
            name, _, key = path.rpartition("/")
            by_name.setdefault(name, {})[key] = value
        unknown = by_name.keys() - {name for names in self._names for name in names}
        if unknown:
            message = f"optimizer state of `{min(unknown)}` belongs to no parameter of this run"
            raise ValueError(message)
        for optimizer, names in zip(self.torch_optimizers, self._names, strict=True):
            _require_fitting(optimizer, names, by_name)
            state = optimizer.state_dict()
            state["state"] = {i: by_name[name] for i, name in enumerate(names) if name in by_name}
            optimizer.load_state_dict(state)


def _require_master_weights(parameters: Sequence[ParameterInfo]) -> None:
    """Refuse half weights: most updates are smaller than their last bit, and would be lost."""
    for info in parameters:
        if info.parameter.dtype not in (torch.float32, torch.float64):
            message = (
                f"parameter `{info.name}` is {info.parameter.dtype}, and an optimizer needs at "
                "least float32; autocast makes the products half"
            )
            raise ValueError(message)


def _require_fitting(
    optimizer: torch.optim.Optimizer,
    names: Sequence[str],
    by_name: Mapping[str, Mapping[str, Tensor]],
) -> None:
    """Refuse state that would fail, or be cast, in the first step of an optimizer."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    needed = _ADAMW_KEYS if isinstance(optimizer, torch.optim.AdamW) else frozenset[str]()
    for name, parameter in zip(names, parameters, strict=True):
        found = by_name.get(name)
        if found is None:
            continue
        if not needed <= found.keys():
            message = f"optimizer state of `{name}` has no `{min(needed - found.keys())}`"
            raise ValueError(message)
        for key, value in found.items():
            if value.shape not in ((), parameter.shape) or not value.is_floating_point():
                message = (
                    f"optimizer state `{name}/{key}` is {value.dtype} of shape "
                    f"{list(value.shape)}, and its parameter has {list(parameter.shape)}"
                )
                raise ValueError(message)


def _adamw(
    ordered: Sequence[ParameterInfo], config: OptimizerConfig, device: torch.device
) -> torch.optim.AdamW:
    """AdamW with the decayed parameters in the first group, in the order given."""
    decayed = [info.parameter for info in ordered if info.is_decayed]
    plain = [info.parameter for info in ordered if not info.is_decayed]
    groups = [(decayed, config.weight_decay), (plain, 0.0)]
    return torch.optim.AdamW(
        [{"params": found, "weight_decay": decay} for found, decay in groups if found],
        lr=config.learning_rate,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        fused=device.type == "cuda",
    )
