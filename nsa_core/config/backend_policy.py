"""Which attention backend each branch may use, in order of preference, and why; no torch."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, Self

from nsa_core.config.profile import HardwareProfile
from nsa_core.config.run import RunConfig
from nsa_core.config.training import NOT_BY_FLASH, RuntimeConfig

#: The three branches of NSA, and the attention of the dense control.
Branch = Literal["compressed", "selected", "sliding", "dense"]
Backend = Literal["sdpa", "triton", "flash"]
NSA_BRANCHES: tuple[Branch, ...] = ("compressed", "selected", "sliding")
ALL_BRANCHES: tuple[Branch, ...] = (*NSA_BRANCHES, "dense")
MIN_TILE = 16  # the fewest rows or columns of a product
#: Compiled for sm_90: with a width of 256 two kernels take 256 and 322 KiB of 227 of shared memory;
#: with a block of 128 `item_forward_kernel` does not fit its registers, with 256 others neither.
MAX_WIDTH = 128
MAX_SELECT_BLOCK = 64
MAX_DOCUMENT_ELEMENTS = 1 << 31  # of one document's queries: the kernels count those in 32 bits
MAX_DECODE_HEADS = 16  # of a group: decode puts them into one product


@dataclass(frozen=True)
class RowLayout:
    """What a run feeds its attention."""

    seq_len: int  # tokens of a row
    is_packed: bool  # rows are cut at document borders

    @classmethod
    def of(cls, config: RunConfig) -> Self:
        """The rows of a run."""
        return cls(config.batch.seq_len, config.data.pack_documents)


@dataclass(frozen=True)
class BranchPolicy:
    """What the configuration says about one branch."""

    branch: Branch
    #: What may run it, best first; one that is named must run or the run is refused.
    backends: tuple[Backend, ...]
    reason: str  # why others are not among them
    is_named: bool = False  # the configuration names the one backend


def branches_of(attention: Literal["nsa", "dense"]) -> tuple[Branch, ...]:
    """The branches that a model has."""
    return NSA_BRANCHES if attention == "nsa" else ("dense",)


def branch_policy(runtime: RuntimeConfig, branch: Branch, rows: RowLayout | None) -> BranchPolicy:
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


def _flash_word(runtime: RuntimeConfig, branch: Branch, rows: RowLayout | None) -> tuple[bool, str]:
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

    A preflight proves a choice; equal lines mean that a later launch makes the same one.
    """
    policy = branch_policy(config.runtime, branch, RowLayout.of(config))
    how = "named" if policy.is_named else "auto"
    widths = f"{config.model.head_dim_k}/{config.model.head_dim_v}"
    text = f"{how}: {', '.join(policy.backends)}; {config.runtime.precision}, widths {widths}"
    unserved = _not_by_triton(config) if "triton" in policy.backends else None
    return text if unserved is None else f"{text}; {unserved}"


def expected_backend(config: RunConfig, profile: HardwareProfile, branch: Branch) -> str:
    """What the trainer is expected to choose on this hardware, in one line; the pod decides."""
    policy = branch_policy(config.runtime, branch, RowLayout.of(config))
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


def training_refusal(
    widths: tuple[int, int] | None,
    blocks: tuple[int, int] | None,
    queries: tuple[int, int] | None,
) -> str | None:
    """Why the kernels of training do not serve these sizes, or None; None is not known, not judged.

    The rules hold for every branch and for the dense control: each cuts documents into query blocks
    of one selection block, and addresses the queries of a document in 32 bits.

    Args:
        widths: Of a key and of a value (d_k, d_v).
        blocks: Tokens of a selection block, and of a compression stride.
        queries: Tokens of the longest document, and query heads.
    """
    block = [] if blocks is None else [("select_block", blocks[0], MIN_TILE)]
    reason = _not_a_power("triton", [*_widths(widths), *block, *_ratio(blocks)])
    reason = reason or _too_large(widths, blocks)
    if reason is not None or widths is None or queries is None:
        return reason
    elements = queries[0] * queries[1] * max(widths)
    if elements < MAX_DOCUMENT_ELEMENTS:
        return None
    return (
        f"the queries of one document of {queries[0]} tokens have up to {elements} elements, and "
        f"the triton kernels address fewer than {MAX_DOCUMENT_ELEMENTS}"
    )


def decode_refusal(
    widths: tuple[int, int], blocks: tuple[int, int], group_heads: int
) -> str | None:
    """Why the kernels of decode do not serve these sizes, or None; arguments as above.

    They walk keys and not query blocks, so any selection block will do.
    """
    if group_heads > MAX_DECODE_HEADS:
        return f"triton decode serves up to {MAX_DECODE_HEADS} heads of a group, got {group_heads}"
    return _not_a_power("triton decode", [*_widths(widths), *_ratio(blocks)])


def _widths(widths: tuple[int, int] | None) -> list[tuple[str, int, int]]:
    if widths is None:
        return []
    return [("d_k", widths[0], MIN_TILE), ("d_v", widths[1], MIN_TILE)]


def _ratio(blocks: tuple[int, int] | None) -> list[tuple[str, int, int]]:
    if blocks is None:
        return []
    return [("select_block / compress_stride", blocks[0] // blocks[1], 1)]


def _too_large(widths: tuple[int, int] | None, blocks: tuple[int, int] | None) -> str | None:
    if widths is not None and max(widths) > MAX_WIDTH:
        return f"triton needs d_k and d_v of at most {MAX_WIDTH}, got {widths[0]} and {widths[1]}"
    if blocks is not None and blocks[0] > MAX_SELECT_BLOCK:
        return f"triton needs select_block to be at most {MAX_SELECT_BLOCK}, got {blocks[0]}"
    return None


def _not_a_power(who: str, sizes: Iterable[tuple[str, int, int]]) -> str | None:
    """Names the first (name, size, least) that is no power of two from `least` on."""
    for name, size, least in sizes:
        if size < least or size & (size - 1):
            return f"{who} needs {name} to be a power of two >= {least}, got {size}"
    return None
