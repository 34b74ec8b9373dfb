"""HardwareProfile: what a card can do, and which kernels and precisions we allow on it."""

import re
from pathlib import Path
from typing import Any

from pydantic import Field, PositiveFloat, ValidationError

from nsa_core.config.base import ConfigError, FrozenModel, first_error, load_mapping, names_in
from nsa_core.config.training import Precision


class BatchTier(FrozenModel):
    """Batch of one optimizer step for cards with at least this much memory.

    Attributes:
        min_memory_gib: Smallest card of the tier, as nvidia-smi counts (base 2).
        micro_batch: Sequences a micro-step, by sequence length: the longest that is not shorter
            than the run's decides.
        tokens_per_step: What accumulation fills up to.
    """

    min_memory_gib: float = Field(ge=0)
    micro_batch: dict[int, int]
    tokens_per_step: int = Field(ge=1)


class Expected(FrozenModel):
    """What a healthy card reaches, from the vendor's datasheet unless `source` says measured.

    Attributes:
        gemm_tflops: Dense matrix product in the profile's precision; None where unknown.
        bandwidth_gb_s: Memory bandwidth in GB/s (base 10).
        host_to_device_gb_s: From pinned memory to the card in GB/s, one direction.
        all_reduce_gb_s: Bus bandwidth of a sum over the cards of one machine, if they are joined
            by NVLink; None where nothing is known.
        min_fraction: Share of these below which preflight warns.
        tokens_per_s: Of a launched run of each recipe as this profile resolves it, changed in
            nothing but its data; a recipe that was not measured is absent.
        source: Where the figures are from.
    """

    gemm_tflops: float | None = None
    bandwidth_gb_s: float | None = None
    host_to_device_gb_s: float | None = None
    all_reduce_gb_s: float | None = None
    min_fraction: float = Field(0.6, gt=0, le=1)
    tokens_per_s: dict[str, PositiveFloat] = {}
    source: str


class HardwareProfile(FrozenModel):
    """One file of profiles/.

    Attributes:
        name: Name of the file.
        description: One line.
        card_pattern: Regular expression that the card's name must match; empty for no card at all.
        compute_capability: Such as 8.0; None for no card.
        memory_gib: Memory sizes the card is sold with.
        shared_memory_kib: Shared memory a block may use; decides which kernels fit.
        precisions: Allowed precisions, best first.
        triton: Triton kernels may be used.
        flash_attention: flash-attn 2 can run; whether it does is the configuration's word.
        torch_requirement: Which torch to install.
        torch_backend: CUDA build of it, or `cpu`.
        expected: What a healthy card reaches.
        batch_tiers: Batches by memory.
        config: Values of the run's configuration that this hardware decides.
        reasons: Why, by dotted key; shown by `nsa-ops profile explain`.
    """

    name: str
    description: str
    card_pattern: str = ""
    compute_capability: float | None = None
    memory_gib: list[float] = []
    shared_memory_kib: int | None = None
    precisions: list[Precision]
    triton: bool = False
    flash_attention: bool = False
    torch_requirement: str
    torch_backend: str
    expected: Expected
    batch_tiers: list[BatchTier] = []
    config: dict[str, Any] = {}
    reasons: dict[str, str] = {}

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
