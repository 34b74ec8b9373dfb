"""HardwareProfile: what a card can do, and which kernels and precisions we allow on it."""

import re
from pathlib import Path
from typing import Any

from pydantic import Field, PositiveFloat, PositiveInt, ValidationError, field_validator

from nsa_core.config.base import ConfigError, ConfigSection, first_error, load_mapping, names_in
from nsa_core.config.training import Precision


class BatchTier(ConfigSection):
    """Batch of one optimizer step for cards with at least this much memory."""

    min_memory_gib: float = Field(ge=0)  # smallest card of the tier, as nvidia-smi counts (base 2)
    #: Sequences a micro-step by sequence length: the shortest one that the run fits into counts.
    micro_batch: dict[PositiveInt, PositiveInt]
    tokens_per_step: int = Field(ge=1)  # what accumulation fills up to


class Expected(ConfigSection):
    """What a healthy card reaches, from the vendor's datasheet unless `source` says measured."""

    #: Dense matrix product in the profile's precision; None where unknown.
    gemm_tflops: float | None = None
    bandwidth_gb_s: float | None = None  # memory bandwidth in GB/s (base 10)
    #: From pinned memory to the card in GB/s, one direction.
    host_to_device_gb_s: float | None = None
    #: Bus bandwidth of a sum over the cards of one machine, if they are joined by NVLink; None
    #: where nothing is known.
    all_reduce_gb_s: float | None = None
    min_fraction: float = Field(0.6, gt=0, le=1)  # share of these below which preflight warns
    #: Of a launched run of each recipe as this profile resolves it, changed in nothing but its
    #: data; a recipe that was not measured is absent.
    tokens_per_s: dict[str, PositiveFloat] = {}
    source: str  # where the figures are from


class HardwareProfile(ConfigSection):
    """One file of profiles/."""

    name: str
    description: str
    #: Regular expression that the card's name must match; empty for no card at all.
    card_pattern: str = ""
    compute_capability: float | None = None  # such as 8.0; None for no card
    memory_gib: list[float] = []  # memory sizes the card is sold with
    #: Cards of one pod that a run may take, and what `runtime.num_gpus=auto` takes at most; None
    #: for any number.
    max_gpus: int | None = Field(None, ge=0)
    shared_memory_kib: int | None = None  # shared memory a block may use; decides which kernels fit
    precisions: list[Precision]
    triton: bool = False
    #: flash-attn 2 can run; the configuration decides whether it does.
    flash_attention: bool = False
    torch_requirement: str  # which torch to install
    torch_backend: str  # CUDA build of it, or `cpu`
    expected: Expected  # what a healthy card reaches
    batch_tiers: list[BatchTier] = []  # batches by memory
    config: dict[str, Any] = {}  # values of the run's configuration that this hardware decides
    reasons: dict[str, str] = {}  # why, by dotted key; shown by `nsa-ops profile explain`

    @field_validator("card_pattern")
    @classmethod
    def _check_pattern(cls, value: str) -> str:
        try:
            re.compile(value)
        except re.error as error:
            message = f"it is no regular expression: {error}"
            raise ValueError(message) from error
        return value

    @property
    def needs_card(self) -> bool:
        """Whether the profile is for a GPU at all."""
        return bool(self.card_pattern)

    def matches(self, card_name: str) -> bool:
        """Whether a card of this name, as nvidia-smi prints it, belongs to the profile."""
        return self.needs_card and re.search(self.card_pattern, card_name) is not None

    def batch_for(self, seq_len: int, memory_gib: float | None = None) -> tuple[int, int] | None:
        """Micro-batch and accumulation for a sequence length; None if the profile has no say.

        Args:
            seq_len: Tokens of a sequence.
            memory_gib: Memory of the card; the smallest card of the profile if unknown.
        """
        if not self.batch_tiers:
            return None
        have = memory_gib if memory_gib is not None else min(self.memory_gib, default=0.0)
        fitting = [tier for tier in self.batch_tiers if tier.min_memory_gib <= have]
        tier = max(fitting or self.batch_tiers[:1], key=lambda candidate: candidate.min_memory_gib)
        lengths = sorted(length for length in tier.micro_batch if length >= seq_len)
        micro_batch = tier.micro_batch[lengths[0]] if lengths else 1
        return micro_batch, max(1, round(tier.tokens_per_step / (micro_batch * seq_len)))


def profiles_folder() -> Path:
    """The folder with the profiles: in the checkout, or inside the installed package."""
    checkout = Path(__file__).parents[2] / "profiles"
    if checkout.is_dir():
        return checkout
    return Path(__file__).parents[2] / "nsa_ops" / "_data" / "profiles"


def list_profiles() -> list[str]:
    """Names of all profiles, sorted."""
    return names_in(profiles_folder())


def load_profile(name: str) -> HardwareProfile:
    """Read a profile by name, or from a file if the name ends in .yaml.

    Raises:
        ConfigError: If there is none of that name, or it cannot be used.
    """
    values, path = load_mapping(name, profiles_folder(), "profile")
    try:
        return HardwareProfile.model_validate({"name": path.stem} | values)
    except ValidationError as error:
        message = f"profile {path.name}: {first_error(error)}"
        raise ConfigError(message) from error
