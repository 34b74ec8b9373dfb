"""Turn the times of steps into tokens per second and model FLOPs utilisation."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Rate:
    """Speed since the last log line; None if only a first, compiling step lies in between."""

    tokens_per_s: float | None
    mfu: float | None
    step_s: float
    data_s: float


class Meter:
    """Adds up the steps between two log lines; the first steps of an attempt are not counted.

    Args:
        train_flops_per_token: NSA's own FLOPs, forward and backward.
        peak_flops_per_s: Of all cards together; None on an unknown card.
        num_warmup_steps: Steps that compile or fill caches.
    """

    def __init__(
        self,
        train_flops_per_token: float,
        peak_flops_per_s: float | None,
        num_warmup_steps: int = 1,
    ) -> None:
        self._flops_per_token = train_flops_per_token
        self._peak = peak_flops_per_s
        self._num_left = num_warmup_steps
        self._num_tokens = 0
        self._step_s = self._data_s = 0.0
        self._last_step_s = self._last_data_s = 0.0

    @property
    def is_warming_up(self) -> bool:
        """Whether the next step is one of those that are not counted."""
        return self._num_left > 0

    @property
    def is_last_warmup(self) -> bool:
        """Whether the next step is the last of those that are not counted."""
        return self._num_left == 1

    def add(self, num_tokens: int, step_s: float, data_s: float) -> None:
        """One step: its tokens, the seconds of computing and of waiting for data."""
        self._last_step_s, self._last_data_s = step_s, data_s
        if self._num_left:
            self._num_left -= 1
            return
        self._num_tokens += num_tokens
        self._step_s += step_s
        self._data_s += data_s

    def take(self) -> Rate:
        """The rate since the last call."""
        elapsed_s = self._step_s + self._data_s
        rate = self._num_tokens / elapsed_s if elapsed_s > 0 else None
        self._num_tokens, self._step_s, self._data_s = 0, 0.0, 0.0
        return Rate(rate, self.mfu(rate), self._last_step_s, self._last_data_s)

    def mfu(self, tokens_per_s: float | None) -> float | None:
        """Share of the cards' peak that this rate uses; None where either is unknown."""
        if tokens_per_s is None or self._peak is None:
            return None
        return tokens_per_s * self._flops_per_token / self._peak
