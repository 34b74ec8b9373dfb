"""Which attention backend each branch may use, in order of preference, and why; no torch."""

from dataclasses import dataclass
from typing import Literal, Self

from nsa_core.config.kernel_sizes import training_refusal
from nsa_core.config.profile import HardwareProfile
from nsa_core.config.run import RunConfig
from nsa_core.config.training import NOT_BY_FLASH, RuntimeConfig

#: The three branches of NSA, and the attention of the dense control.
Branch = Literal["compressed", "selected", "sliding", "dense"]
Backend = Literal["sdpa", "triton", "flash"]
NSA_BRANCHES: tuple[Branch, ...] = ("compressed", "selected", "sliding")
ALL_BRANCHES: tuple[Branch, ...] = (*NSA_BRANCHES, "dense")


@dataclass(frozen=True)
class Rows:
    """What a run feeds its attention.

    Attributes:
        seq_len: Tokens of a row.
        is_packed: Rows are cut at document borders.
    """

    seq_len: int
    is_packed: bool

    @classmethod
    def of(cls, config: RunConfig) -> Self:
        """The rows of a run."""
        return cls(config.batch.seq_len, config.data.pack_documents)


@dataclass(frozen=True)
class BranchPolicy:
    """What the configuration says about one branch.

    Attributes:
        branch: Which one.
        backends: What may run it, best first; one that is named must run or the run is refused.
        reason: Why others are not among them.
        is_named: The configuration names the one backend.
    """

    branch: Branch
    backends: tuple[Backend, ...]
    reason: str
    is_named: bool = False


def branches_of(attention: Literal["nsa", "dense"]) -> tuple[Branch, ...]:
    """The branches that a model has."""
    return NSA_BRANCHES if attention == "nsa" else ("dense",)


def branch_policy(runtime: RuntimeConfig, branch: Branch, rows: Rows | None) -> BranchPolicy:
    """Apply the configuration to a branch.

    A branch's own backend wins over the common one. `auto` is Triton before SDPA. The dense control
    takes torch's own attention, the baseline that is reported, unless documents are packed, whose
    borders it does not know. flash-attn comes first where `flash_min_len_*` allows it.

    Args:
        runtime: The configuration.
        branch: Which one.
        rows: What arrives; None where it is not known, and flash-attn is then off.
    """
    own = getattr(runtime, f"backend_{branch}")
    wanted = runtime.backend if own == "auto" else own
    if wanted != "auto":
        key = f"backend_{branch}" if own != "auto" else "backend"
        reason = f"named by the configuration (runtime.{key})"
        return BranchPolicy(branch, (wanted,), reason, is_named=True)
    if branch == "dense":
        if rows is not None and not rows.is_packed:
            return BranchPolicy(branch, ("sdpa",), "torch's own attention is the baseline")
        reason = "torch's own attention knows no document borders"
        return BranchPolicy(branch, ("triton", "sdpa"), reason)
    is_on, reason = _flash_word(runtime, branch, rows)
    known: tuple[Backend, ...] = ("triton", "sdpa")
    return BranchPolicy(branch, ("flash", *known) if is_on else known, reason)


def _flash_word(runtime: RuntimeConfig, branch: Branch, rows: Rows | None) -> tuple[bool, str]:
    """Whether flash-attn may serve a branch at this length, and why not."""
    if branch in NOT_BY_FLASH:
        return False, ""
    key = f"flash_min_len_{branch}"
    limit: int = getattr(runtime, key)
    if limit < 0:
        return False, f"flash is off (runtime.{key} -1)"
    if rows is None:
        return False, f"flash is off where the length of the rows is not known (runtime.{key})"
    if rows.seq_len < limit:
        return False, f"flash is off below {limit} tokens (runtime.{key})"
    return True, ""


def policy_text(config: RunConfig, branch: Branch) -> str:
    """What decides a branch's backend on a given machine, in one line: equal lines, equal choice.

    A preflight proves a choice; the line tells whether a later launch would make the same one.
    """
    policy = branch_policy(config.runtime, branch, Rows.of(config))
    how = "named" if policy.is_named else "auto"
    widths = f"{config.model.head_dim_k}/{config.model.head_dim_v}"
    text = f"{how}: {', '.join(policy.backends)}; {config.runtime.precision}, widths {widths}"
    unserved = _not_by_triton(config) if "triton" in policy.backends else None
    return text if unserved is None else f"{text}; {unserved}"


def expected_backend(config: RunConfig, profile: HardwareProfile, branch: Branch) -> str:
    """What the trainer is expected to choose on this hardware, in one line; the pod decides."""
    policy = branch_policy(config.runtime, branch, Rows.of(config))
    if policy.is_named:
        unable = _not_on_profile(policy.backends[0], config, profile)
        words = f"{policy.backends[0]}: {policy.reason}"
        return words if unable is None else f"{words}, and refused: {unable}"
    passed_over = [policy.reason] if policy.reason else []
    for name in policy.backends:
        why = _not_on_profile(name, config, profile)
        if why is None:
            where = f" on {profile.name}" if profile.needs_card else " without a card"
            if name == "flash":
                where += ", if the pod has flash-attn; else triton"
            return "; ".join([f"{name} expected{where}", *passed_over])
        passed_over.append(why)
    return "; ".join(["none", *passed_over])


def _not_on_profile(name: Backend, config: RunConfig, profile: HardwareProfile) -> str | None:
    """Why a backend will not run on a card of this profile; None if it should."""
    if name == "sdpa":
        return None
    if not profile.needs_card:
        return f"{name} needs a CUDA card"
    is_allowed = profile.triton if name == "triton" else profile.flash_attention
    if not is_allowed:
        return f"{name} does not run on sm_{_architecture(profile)}"
    if config.runtime.precision == "fp32":
        return f"{name} computes in bf16 or fp16, and the run in fp32"
    return _not_by_triton(config) if name == "triton" else None


def _not_by_triton(config: RunConfig) -> str | None:
    """Why the Triton kernels do not serve the sizes of a run, on any card."""
    model = config.model
    return training_refusal(
        (model.head_dim_k, model.head_dim_v),
        (model.nsa.select_block, model.nsa.compress_stride),
        (config.batch.seq_len, model.num_heads),
    )


def _architecture(profile: HardwareProfile) -> str:
    return "?" if profile.compute_capability is None else f"{profile.compute_capability * 10:.0f}"
