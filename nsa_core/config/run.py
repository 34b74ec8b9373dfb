"""RunConfig: the whole configuration of one training run."""

from typing import Self

from pydantic import Field, model_validator

from nsa_core.config.base import FrozenModel
from nsa_core.config.model import ModelConfig
from nsa_core.config.training import (
    NOT_BY_FLASH,
    BatchConfig,
    CheckpointConfig,
    DataConfig,
    EvaluationConfig,
    OptimizerConfig,
    RuntimeConfig,
    ScheduleConfig,
    TelemetryConfig,
    WatchdogLimits,
)

#: Ids of each tokenizer, the end-of-document token included; `bpe` is sized by the configuration.
TOKENIZER_VOCABULARY = {"byte": 257, "gpt2": 50_257}


class RunConfig(FrozenModel):
    """Model, data, batch, schedule and limits of a run, as the trainer receives them.

    Raises:
        pydantic.ValidationError: If two values cannot go together; the message names both.
    """

    recipe: str = "custom"
    seed: int = Field(1337, ge=0)
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    batch: BatchConfig = BatchConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    telemetry: TelemetryConfig = TelemetryConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    runtime: RuntimeConfig = RuntimeConfig()
    watchdog: WatchdogLimits = WatchdogLimits()

    @model_validator(mode="after")
    def _check_vocabulary(self) -> Self:
        needed = TOKENIZER_VOCABULARY.get(self.data.tokenizer, self.data.bpe_vocab_size)
        if self.model.vocab_size < needed:
            message = (
                f"model.vocab_size {self.model.vocab_size} is smaller than the {needed} ids of "
                f"data.tokenizer {self.data.tokenizer}"
            )
            raise ValueError(message)
        return self

    @model_validator(mode="after")
    def _check_smoke_only_data(self) -> Self:
        limit = 1000
        if self.data.synthetic_on_fail and self.schedule.steps > limit:
            message = (
                f"data.synthetic_on_fail is for smoke runs of at most {limit} steps, "
                f"and schedule.steps is {self.schedule.steps}"
            )
            raise ValueError(message)
        return self

    @model_validator(mode="after")
    def _check_cards(self) -> Self:
        if self.runtime.num_gpus > 1:
            message = (
                f"runtime.num_gpus is {self.runtime.num_gpus}, and the trainer uses one card; "
                "set it to 1"
            )
            raise ValueError(message)
        return self

    @model_validator(mode="after")
    def _check_selected_backend(self) -> Self:
        own = self.runtime.backend_selected
        key = "backend" if own == "auto" else "backend_selected"
        if self.model.attention == "nsa" and getattr(self.runtime, key) == "flash":
            message = (
                f"flash cannot run the selected branch (runtime.{key}): "
                f"{NOT_BY_FLASH['selected']}; set runtime.backend_selected to auto, triton or sdpa"
            )
            raise ValueError(message)
        return self
