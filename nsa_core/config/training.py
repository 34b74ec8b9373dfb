"""Everything else a training run is configured by: data, schedule, optimizer, stops, limits."""

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from nsa_core.config.base import ConfigSection
from nsa_core.config.model import MAX_POSITIONS

Precision = Literal["bf16", "fp16", "fp32"]
BackendName = Literal["auto", "sdpa", "triton", "flash"]

#: What flash-attn cannot compute, whatever the card.
NOT_BY_FLASH = {
    "selected": "flash-attn masks by position, and here every token chooses its own blocks",
}
#: Libraries count a time limit in an integer: beyond this one it is none.
_MOST_WAIT_S = 30 * 86_400.0
#: The library of threads ends a process that asks for more than the machine gives.
_MOST_THREADS = 4096
#: Beyond float32 torch takes no rate.
_MOST_RATE = 1e30
#: Of one machine, which has fewer cards; of a pod that claims more, the first ones are followed.
MAX_RANKS = 256
#: No cluster of one run has more machines.
MAX_PODS = 4096


class DataConfig(ConfigSection):
    """Where the text comes from and how it becomes batches."""

    #: `stdlib` is the text of the machine's Python library; `synthetic` is for smoke runs.
    source: Literal["stdlib", "fineweb_edu_local", "fineweb_edu", "synthetic"] = "fineweb_edu"
    path: str = ""  # file or folder of `fineweb_edu_local`; a dataset name for `fineweb_edu`
    subset: str = "sample-10BT"  # subset of `fineweb_edu` on the hub
    text_key: str = "text"  # field of a JSON or Parquet record that holds the text
    #: Folder of the token shards; relative paths are below the pod's root.
    cache_dir: Path = Path("data")
    #: `byte`, `gpt2`, or `bpe` (trained on the run's own text).
    tokenizer: Literal["byte", "gpt2", "bpe"] = "gpt2"
    tokenizer_path: str = ""  # local vocabulary folder for `gpt2`; saved tokenizer for `bpe`
    #: Vocabulary of a `bpe` trained here, special tokens included.
    bpe_vocab_size: int = Field(8192, ge=300, le=65536)
    max_tokens: int = Field(0, ge=0)  # stop staging after this many tokens; 0 means all
    #: Share of documents, chosen by content hash, kept out of training.
    validation_fraction: float = Field(0.01, gt=0, lt=1)
    #: Deadline of the first batch and of every later one.
    loader_timeout_s: float = Field(120.0, gt=0, le=_MOST_WAIT_S)
    #: Batches kept ready by the loader's thread, and never fewer than a step takes; 0 fetches in
    #: the loop.
    prefetch: int = Field(4, ge=0)
    warmup_batches: int = Field(0, ge=0)  # batches fetched before the first step is timed
    document_batch: int = Field(64, ge=1)  # documents tokenised at a time while staging
    pack_documents: bool = True  # cut attention at document borders
    #: Largest share of the documents that may be dropped; more refuses the staging.
    max_dropped: float = Field(0.01, ge=0, le=1)
    #: Most files of which nothing can be used; more refuses the staging.
    max_dropped_files: int = Field(0, ge=0)
    synthetic_on_fail: bool = False  # smoke runs only: random tokens when the data cannot be opened

    @model_validator(mode="after")
    def _check_path(self) -> Self:
        if self.source == "fineweb_edu_local" and not self.path:
            message = (
                "source fineweb_edu_local needs data.path: a text, JSONL or Parquet file or folder"
            )
            raise ValueError(message)
        return self


class BatchConfig(ConfigSection):
    """Tokens of one optimizer step on all ranks together: micro_batch x accumulation x seq_len."""

    seq_len: int = Field(2048, ge=2, le=MAX_POSITIONS)
    micro_batch: int = Field(8, ge=1)  # rows that a rank computes at once
    #: Micro-batches of a step; the ranks share them, so it is a multiple of their number.
    accumulation: int = Field(1, ge=1)

    @property
    def tokens_per_step(self) -> int:
        """Tokens that one optimizer step consumes, the same for any number of ranks."""
        return self.seq_len * self.micro_batch * self.accumulation


class ScheduleConfig(ConfigSection):
    """Learning rate as a pure function of the optimizer step."""

    steps: int = Field(50_000, ge=1)  # optimizer steps of the whole run; the schedule ends there
    #: `cosine` to `min_ratio`, `wsd` (warm-up, stable, linear decay) or `constant`.
    kind: Literal["cosine", "wsd", "constant"] = "cosine"
    warmup_steps: int = Field(1000, ge=0)  # steps of linear warm-up
    decay_fraction: float = Field(0.2, gt=0, le=1)  # share of the steps that `wsd` decays over
    min_ratio: float = Field(0.1, ge=0, le=1)  # final learning rate over the peak


class OptimizerConfig(ConfigSection):
    """AdamW, optionally with Muon for the matrices of the blocks."""

    kind: Literal["adamw", "muon"] = "adamw"
    learning_rate: float = Field(6e-4, gt=0, le=_MOST_RATE)
    beta1: float = Field(0.9, ge=0, lt=1)
    beta2: float = Field(0.95, ge=0, lt=1)
    eps: float = Field(1e-8, gt=0)
    weight_decay: float = Field(0.1, ge=0)
    clip_norm: float = Field(1.0, gt=0)
    muon_learning_rate: float = Field(0.02, gt=0, le=_MOST_RATE)


class CheckpointConfig(ConfigSection):
    """When a checkpoint is saved and which ones are kept."""

    #: Optimizer steps between checkpoints; 0 saves only at the end or at a stop.
    save_every: int = Field(1000, ge=0)
    keep_last: int = Field(3, ge=1)  # newest checkpoints that are kept
    #: Every checkpoint at a multiple of this step is kept for good; 0 for none.
    keep_every: int = Field(0, ge=0)
    background: bool = True  # write from a snapshot in a thread instead of stalling the loop


class TelemetryConfig(ConfigSection):
    """How often the run says something, and to whom."""

    log_every: int = Field(10, ge=1)
    beat_interval_s: float = Field(10.0, gt=0, le=_MOST_WAIT_S)
    tensorboard: bool = True
    gate_every: int = Field(10, ge=1)


class EvaluationConfig(ConfigSection):
    """Validation on held-out documents, and what is tried at the end of a run."""

    eval_every: int = Field(1000, ge=0)
    eval_batches: int = Field(16, ge=1)
    sample_prompt: str = "The "
    sample_tokens: int = Field(64, ge=0)


def _check_num_gpus(value: object) -> object:
    """A number of cards that one machine can have, or `auto`: one message for what is neither."""
    is_whole = isinstance(value, int) and not isinstance(value, bool)
    if value != "auto" and not (is_whole and value in range(MAX_RANKS + 1)):
        message = f"it must be a number of cards from 0 to {MAX_RANKS}, or auto"
        raise ValueError(message)
    return value


class RuntimeConfig(ConfigSection):
    """Which device, precision and kernels the run uses; speed only, never the mathematics.

    `precision` and `half_residual` change how results are rounded.
    """

    device: Literal["auto", "cpu", "cuda"] = "auto"  # `auto` is CUDA where there is a card
    precision: Precision = "bf16"
    #: Keep the sum that blocks add to in bf16: less memory to pass over, and each sum is rounded.
    half_residual: bool = False
    backend: BackendName = "auto"  # default attention backend; `auto` asks the profile and the card
    #: Overrides `backend` for one branch; likewise the next two.
    backend_compressed: BackendName = "auto"
    backend_selected: BackendName = "auto"
    backend_sliding: BackendName = "auto"
    #: Overrides `backend` for the attention of the dense control.
    backend_dense: BackendName = "auto"
    #: Tokens from which flash-attn may serve this branch, where it is installed; -1 is off.
    #: Likewise for the sliding branch.
    flash_min_len_compressed: int = Field(-1, ge=-1)
    flash_min_len_sliding: int = Field(-1, ge=-1)
    compile: bool = False
    #: Recompute none, all or the attention of the blocks in backward.
    activation_checkpointing: Literal["none", "full", "selective"] = "none"
    deterministic: bool = False  # bit-equal repeats on a GPU at the price of speed
    allocator: str = "expandable_segments:True"  # value of PYTORCH_CUDA_ALLOC_CONF
    threads: int = Field(0, ge=0, le=_MOST_THREADS)  # CPU threads of torch; 0: its own choice
    #: Cards of a pod that train together; `auto` is all that the profile allows and the pod has.
    num_gpus: Annotated[int | Literal["auto"], BeforeValidator(_check_num_gpus)] = 1
    #: Pods that train together, each with `num_gpus` cards.
    num_pods: int = Field(1, ge=1, le=MAX_PODS)
    #: Processes of a run without cards, to try out several ranks.
    cpu_ranks: int = Field(1, ge=1, le=MAX_RANKS)
    #: `ddp` keeps the whole state on every card, `fsdp` a part of it on each; `auto` is `fsdp`
    #: where one card cannot hold the state.
    sharding: Literal["auto", "ddp", "fsdp"] = "auto"
    #: Longest time of a collective after the first steps, which may compile.
    collective_timeout_s: float = Field(120.0, gt=0, le=_MOST_WAIT_S)


class WatchdogLimits(ConfigSection):
    """When the watchdog warns and halts; a profile may override each (spec: rules and defaults).

    Losses are in nats per token, shares and fractions are 0 to 1. A record is one progress line of
    the heartbeat.
    """

    interval_s: float = Field(5.0, gt=0, le=_MOST_WAIT_S)  # seconds between two looks at the run
    cards_every_s: float = Field(30.0, gt=0)  # seconds between two looks at the cards
    stale_warn_s: float = Field(60.0, gt=0)  # `alive_seq` has not moved for so long
    stale_halt_s: float = Field(180.0, gt=0)  # the same, and the run is halted
    #: Longest time from the start of the process to its first heartbeat.
    first_beat_limit_s: float = Field(900.0, gt=0)
    stall_min_s: float = Field(180.0, gt=0)  # shortest time before a step counts as stalled
    #: A step counts as stalled after so many medians of the run's own step time.
    stall_step_factor: float = Field(10.0, ge=1)
    #: Longest time in the phases init and compile.
    compile_limit_s: float = Field(1800.0, gt=0, le=_MOST_WAIT_S)
    #: Shortest limit for evaluation, checkpoint and shutdown.
    phase_limit_s: float = Field(300.0, gt=0)
    #: Limit for evaluation and checkpoint in durations of the last one.
    phase_factor: float = Field(5.0, ge=1)
    data_wait_warn_s: float = Field(30.0, gt=0)  # the loop has waited so long for a batch
    data_wait_halt_s: float = Field(600.0, gt=0)  # the same, and the run is halted
    nonfinite_in_row: int = Field(2, ge=1)  # bad losses or gradients in a row that halt
    nonfinite_in_100: int = Field(3, ge=1)  # bad ones among 100 records that halt
    jump_nats: float = Field(0.5, gt=0)  # least rise over the median that counts as a jump
    #: A jump is also so many times the run's own noise (median deviation).
    jump_noise_factor: float = Field(5.0, ge=1)
    #: Jumped records in a row that halt if gradients or the loss scale agree.
    jump_in_row: int = Field(3, ge=1)
    jump_patience: int = Field(30, ge=1)  # jumped records in a row that halt without any other sign
    grad_spike_factor: float = Field(10.0, gt=1)  # a gradient norm of so many medians is a spike
    #: A loss below this early in training means that the model sees the answers.
    leak_bits_per_byte: float = Field(0.6, ge=0)
    leak_steps: int = Field(1000, ge=0)  # steps that count as early
    #: Fall of the 20-record median that is suspicious after `leak_steps`.
    leak_fall_nats: float = Field(0.5, gt=0)
    leak_fall_steps: int = Field(100, ge=1)  # steps in which it may fall by that much
    #: A loss that was flat and then fell to this share of its level is suspicious at any step.
    leak_fall_share: float = Field(0.8, gt=0, lt=1)
    #: A validation so far above the best one warns at once.
    validation_nats: float = Field(0.5, gt=0)
    #: Validations in a row above the best by more than their noise that warn.
    validation_in_row: int = Field(3, ge=1)
    #: The same, and the run is halted; 0 never halts for it.
    validation_halt_in_row: int = Field(0, ge=0)
    #: New records in a row that must agree before the gates are judged.
    gate_records: int = Field(3, ge=1)
    gate_entropy_warn: float = 0.5
    gate_entropy_halt: float = 0.2
    gate_collapse_warn: float = 0.1
    gate_collapse_halt: float = 0.5
    gate_max_warn: float = 0.85
    gate_max_halt: float = 0.9
    #: Share of the run's own median that is too slow.
    throughput_fraction: float = Field(0.5, gt=0, lt=1)
    #: Time after which a slow run is reported; half of it at half the share.
    throughput_window_s: float = Field(600.0, gt=0)
    #: What the profile expects of this recipe; 0 where it was not measured.
    expected_tokens_per_s: float = Field(0.0, ge=0)
    #: Share of it below which the run's own median is too slow.
    expected_fraction: float = Field(0.8, gt=0, le=1)
    #: A rank that takes so many times as long as the median of the others is a straggler.
    straggler_factor: float = Field(1.2, gt=1)
    straggler_records: int = Field(5, ge=1, le=20)  # new records in a row that must agree on it
    fetch_warn_s: float = Field(2.0, gt=0)  # fetching a batch takes longer, record after record
    fetch_p95_warn_ms: float = Field(100.0, gt=0)  # 95th percentile of the fetch that is too long
    #: Records in a row with a learning rate or gradient norm of exactly 0.
    zero_in_row: int = Field(3, ge=1)
    #: Steps in a row that were skipped for a falling loss scale.
    skipped_in_row: int = Field(5, ge=1)
    #: Growth of the memory in use after the first records.
    memory_creep_fraction: float = Field(0.1, gt=0)
    #: Share of a card's memory that tensors had at their peak; above it the next step may not fit.
    card_memory_fraction: float = Field(0.98, gt=0, le=1)
    #: Free disk in checkpoints of the size of the largest.
    disk_checkpoints: float = Field(2.0, ge=0)
    host_memory_fraction: float = Field(0.9, gt=0, le=1)  # share of the pod's memory in use
    #: Least number of steps without a better 20-record median of the loss.
    plateau_steps: int = Field(1000, ge=1)
    plateau_share: float = Field(0.2, ge=0, le=1)  # the same as a share of the steps done
    ack_grace_s: float = Field(60.0, gt=0)  # time for the trainer to acknowledge `.HALT`
    term_grace_s: float = Field(30.0, gt=0)  # time from TERM to KILL
    restart_budget: int = Field(3, ge=0)  # restarts without progress after which the watchdog stops
