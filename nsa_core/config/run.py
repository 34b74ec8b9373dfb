"""RunConfig: the whole configuration of one training run."""

from typing import Self

from pydantic import Field, model_validator

from nsa_core.config.base import ConfigSection
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


class RunConfig(ConfigSection):
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
        runtime = self.runtime
        cards = 1 if runtime.num_gpus == "auto" else runtime.num_gpus
        if cards > 1 and runtime.device == "cpu":
            message = (
                f"runtime.num_gpus is {cards}, and runtime.device is cpu: cards talk through NCCL, "
                "which needs CUDA; set runtime.cpu_ranks to try out several ranks"
            )
            raise ValueError(message)
        if runtime.cpu_ranks > 1 and (runtime.device == "cuda" or cards > 1):
            message = (
                f"runtime.cpu_ranks is {runtime.cpu_ranks}, and the run has cards; set "
                "runtime.num_gpus instead"
            )
            raise ValueError(message)
        return self

    @model_validator(mode="after")
    def _check_residual(self) -> Self:
        if self.runtime.half_residual and self.runtime.precision != "bf16":
            message = (
                "runtime.half_residual is for bf16, whose exponents are those of float32, and "
                f"runtime.precision is {self.runtime.precision}; set runtime.half_residual=false"
            )
            raise ValueError(message)
        return self

    @model_validator(mode="after")
    def _check_ranks(self) -> Self:
        rows, ranks = self.batch.accumulation, self.num_ranks
        if rows % ranks:
            message = (
                f"batch.accumulation {rows} does not divide among {ranks} ranks; set it to a "
                f"multiple of {ranks}, and batch.micro_batch so that the tokens of a step stay"
            )
            raise ValueError(message)
        obstacle = find_sharding_obstacle(self)
        if self.runtime.sharding == "fsdp" and obstacle is not None:
            message = f"runtime.sharding fsdp is impossible: {obstacle}"
            raise ValueError(message)
        return self

    @property
    def ranks_per_pod(self) -> int:
        """Processes that train on one pod; `auto` counts as one until a plan knows the pod."""
        cards = self.runtime.num_gpus
        return max(1, 1 if cards == "auto" else cards) * self.runtime.cpu_ranks

    @property
    def num_ranks(self) -> int:
        """Processes that train together."""
        return self.ranks_per_pod * self.runtime.num_pods

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


def find_sharding_obstacle(config: RunConfig) -> str | None:
    """Why the ranks of a run cannot each keep a part of its state; None if they can."""
    if config.runtime.precision == "fp16":
        return (
            "each rank alone would settle the loss scale of fp16; set runtime.precision to bf16 "
            "or fp32"
        )
    if config.optimizer.kind == "muon":
        return "Muon needs whole matrices, and a rank has some rows; set optimizer.kind=adamw"
    if config.runtime.num_pods > 1:
        return (
            f"parts of a checkpoint on the disks of {config.runtime.num_pods} pods would never be "
            "whole; set runtime.sharding=ddp"
        )
    return None
