"""Attention through the flash-attn package (2.4.1 or later), where a pod has it; loaded when used.

Never run with the real package on a card by us: docs/bench.md says what was tested instead.
The window and dense attention are what the package computes. The compressed branch becomes causal
attention when tokens are taken d apart: token a * d + r of a document sees the compressed blocks
0 .. a + c, with c = floor((r - l + 1) / d). So each (document, residue r) is a sequence of its own,
and the package's mask, aligned to the bottom right corner, is exactly the branch's. The selected
branch is not expressible.

Legend: N tokens, H query heads, G groups, D key width, E value width, C compressed slots,
M documents, S = M * d sequences.
"""

import importlib
import importlib.metadata
import importlib.util
import re
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from nsa_core.config.backend_policy import Branch
from nsa_core.config.training import NOT_BY_FLASH
from nsa_core.kernels.backend import (
    AttentionBackend,
    DeviceFacts,
    check_compressed,
    check_tokens,
    nothing_visible,
)
from nsa_core.kernels.geometry import BlockGeometry
from nsa_core.kernels.packing import Packing

PACKAGE = "flash_attn"
MIN_CAPABILITY = (8, 0)
SUPPORTED_DTYPES = (torch.bfloat16, torch.float16)
#: Deterministic gradients came with 2.4.1; from 2.7 on lse of packed rows is [H, N].
MIN_VERSION: dict[Branch, tuple[int, ...]] = {
    "sliding": (2, 4, 1),
    "dense": (2, 4, 1),
    "compressed": (2, 7),
}
MAX_WIDTH, WIDTH_STEP = 256, 8
#: Sequences are the second axis of the package's launch grid.
MAX_SEQUENCES = 65_535
_MAX_WORDS = 200


def refusal(branch: Branch, facts: DeviceFacts) -> str | None:
    """Why flash-attn cannot run a branch on a device, or None; imports it where all else fits."""
    if branch in NOT_BY_FLASH:
        return NOT_BY_FLASH[branch]
    if facts.device_type != "cuda" or facts.capability is None:
        return f"flash needs a CUDA device, and the device is {facts.device_type}"
    if facts.capability < MIN_CAPABILITY:
        major, minor = facts.capability
        return f"flash needs sm_80 or newer, and the card is sm_{major}{minor}"
    if facts.dtype not in SUPPORTED_DTYPES:
        return f"flash computes in bfloat16 or float16, and the inputs are {facts.dtype}"
    if facts.widths is not None and not _is_width(*facts.widths):
        return (
            f"flash needs d_k = d_v, a multiple of {WIDTH_STEP} up to {MAX_WIDTH}, and they are "
            f"{facts.widths[0]} and {facts.widths[1]}"
        )
    return _package_refusal(branch, read_version())


def _is_width(key_width: int, value_width: int) -> bool:
    return key_width == value_width <= MAX_WIDTH and key_width % WIDTH_STEP == 0


def _package_refusal(branch: Branch, version: str | None) -> str | None:
    if version is None:
        return "flash-attn is not installed"
    found, least = parse_version(version), MIN_VERSION[branch]
    if found < least:
        wanted = ".".join(map(str, least))
        return f"flash-attn {version} is installed, and the {branch} branch needs {wanted} or later"
    package = load_package()
    if isinstance(package, str):
        return f"flash-attn {version} is installed and not usable: {package}"
    return None


def load_package() -> "FlashPackage | str":
    """The package, or in one line why it cannot be used, such as a build for another torch."""
    try:
        package: Any = importlib.import_module(PACKAGE)
    except Exception as error:  # noqa: BLE001 - a foreign build fails in ways of its own
        first = str(error).strip().partition("\n")[0]
        return f"{type(error).__name__}: {first[:_MAX_WORDS]}"
    if not hasattr(package, "flash_attn_varlen_func"):
        return "it has no flash_attn_varlen_func"
    found: FlashPackage = package
    return found


def read_version() -> str | None:
    """Version of the installed package; None without it."""
    if importlib.util.find_spec(PACKAGE) is None:
        return None
    try:
        return importlib.metadata.version(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        return None


def parse_version(version: str) -> tuple[int, ...]:
    """Its leading numbers: `2.7.4.post1` is (2, 7, 4)."""
    numbers = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(int(part) for part in numbers[0].split(".")) if numbers else ()


class FlashPackage(Protocol):
    """The one function of the package that is used; see its documentation for the contract."""

    def flash_attn_varlen_func(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        **options: Any,
    ) -> Any:
        """Attend within packed sequences."""
        ...


def create_backend(chooser: AttentionBackend) -> "FlashBackend":
    """Import the package and make the backend; called by the dispatcher.

    Raises:
        ValueError: If the package cannot be used.
    """
    package = load_package()
    if isinstance(package, str):
        message = f"flash-attn is not usable: {package}"
        raise ValueError(message)
    return FlashBackend(package, chooser)


@dataclass(frozen=True, eq=False)
class ResidueSequences:
    """Tokens of every document regrouped by their position modulo the stride; no host sync.

    Attributes:
        place_N: Where each token goes.
        token_N: Which token stands at each place.
        cu_queries: int32 [S + 1], borders of the sequences among the places.
        cu_keys: int32 [S + 1], borders among the rows of keys.
        slot_N: Compressed slot of each row of keys; rows from `cu_keys[-1]` on are unused.
        is_used_N: Which rows of keys are used.
    """

    place_N: Tensor
    token_N: Tensor
    cu_queries: Tensor
    cu_keys: Tensor
    slot_N: Tensor
    is_used_N: Tensor


def residue_sequences(packing: Packing, geometry: BlockGeometry) -> ResidueSequences:
    """Regroup the tokens of a call for the compressed branch."""
    stride, cu_seqlens = geometry.compress_stride, packing.cu_seqlens
    start_N, length_N = packing.start_N, packing.length_N
    residue_N = packing.position_N % stride
    before_N = residue_N * (length_N // stride) + torch.minimum(residue_N, length_N % stride)
    place_N = (start_N + before_N + packing.position_N // stride).long()
    rows = torch.arange(packing.num_tokens, device=cu_seqlens.device)
    token_N = torch.empty_like(place_N).scatter_(0, place_N, rows)

    residue_r = torch.arange(stride, dtype=torch.int32, device=cu_seqlens.device)
    start_M1, length_M1 = cu_seqlens[:-1, None], cu_seqlens.diff()[:, None]
    first_Mr = start_M1 + residue_r * (length_M1 // stride)
    first_Mr = first_Mr + torch.minimum(residue_r, length_M1 % stride)
    cu_queries = torch.cat([first_Mr.flatten(), cu_seqlens[-1:]])
    shift_r = torch.div(residue_r - geometry.compress_block + 1, stride, rounding_mode="floor")
    num_keys_S = (cu_queries.diff().view(-1, stride) + shift_r).clamp(min=0).flatten()
    cu_keys = torch.cat([num_keys_S.new_zeros(1), num_keys_S.cumsum(0)]).int()

    sequence_N = torch.searchsorted(cu_keys, rows.int(), right=True) - 1
    is_used_N = rows < cu_keys[-1]
    sequence_N = torch.where(is_used_N, sequence_N, 0)
    slot_N = start_M1.flatten()[sequence_N // stride] // stride + rows - cu_keys[sequence_N]
    return ResidueSequences(
        place_N=place_N,
        token_N=token_N,
        cu_queries=cu_queries,
        cu_keys=cu_keys,
        slot_N=torch.where(is_used_N, slot_N, 0).long(),
        is_used_N=is_used_N,
    )


class FlashBackend:
    """The `AttentionBackend` of flash-attn; blocks are chosen by another backend."""

    name = "flash"

    def __init__(self, package: FlashPackage, chooser: AttentionBackend) -> None:
        """Take the package and what chooses the blocks of a token."""
        self._package, self._chooser = package, chooser

    def compressed(
        self, q_NHD: Tensor, k_CGD: Tensor, v_CGE: Tensor, geometry: BlockGeometry, packing: Packing
    ) -> tuple[Tensor, Tensor]:
        """See `AttentionBackend.compressed`."""
        check_compressed(q_NHD, k_CGD, v_CGE, geometry, packing)
        if k_CGD.shape[0] == 0:
            return nothing_visible(q_NHD, k_CGD, v_CGE)
        stride = geometry.compress_stride
        _require_sequences(stride * (packing.cu_seqlens.numel() - 1))
        groups = residue_sequences(packing, geometry)
        is_used_N11 = groups.is_used_N[:, None, None]
        # `where` keeps whatever the package leaves in unused rows out of the gradients.
        k, v = (torch.where(is_used_N11, x[groups.slot_N], 0) for x in (k_CGD, v_CGE))
        out, lse, *_ = self._package.flash_attn_varlen_func(
            q_NHD[groups.token_N], k, v, groups.cu_queries, groups.cu_keys,
            -(-packing.max_seqlen // stride), max(1, geometry.num_compressed(packing.max_seqlen)),
            causal=True, deterministic=torch.are_deterministic_algorithms_enabled(),
            return_attn_probs=True,
        )  # fmt: skip
        if lse.shape != (q_NHD.shape[1], q_NHD.shape[0]):
            message = f"flash-attn returned lse of shape {tuple(lse.shape)}, not [heads, tokens]"
            raise ValueError(message)
        sees_any_N1 = (packing.position_N >= geometry.compress_block - 1)[:, None]
        lse_NH = lse.detach().T[groups.place_N]
        return out[groups.place_N], torch.where(sees_any_N1, lse_NH, float("-inf"))

    def select(
        self,
        q_NHD: Tensor,
        k_CGD: Tensor,
        lse_NH: Tensor,
        geometry: BlockGeometry,
        packing: Packing,
    ) -> Tensor:
        """See `AttentionBackend.select`."""
        check_compressed(q_NHD, k_CGD, k_CGD, geometry, packing)
        return self._chooser.select(q_NHD, k_CGD, lse_NH, geometry, packing)

    def selected(
        self,
        q_NHD: Tensor,
        k_NGD: Tensor,
        v_NGE: Tensor,
        ids_NGS: Tensor,
        geometry: BlockGeometry,
        packing: Packing,
    ) -> Tensor:
        """Not expressible; the policy never comes here.

        Raises:
            ValueError: Always.
        """
        del q_NHD, k_NGD, v_NGE, ids_NGS, geometry, packing
        raise ValueError(NOT_BY_FLASH["selected"])

    def sliding(
        self, q_NHD: Tensor, k_NGD: Tensor, v_NGE: Tensor, geometry: BlockGeometry, packing: Packing
    ) -> Tensor:
        """See `AttentionBackend.sliding`."""
        check_tokens(q_NHD, k_NGD, v_NGE, packing)
        _require_sequences(packing.cu_seqlens.numel() - 1)
        left = geometry.window - 1 if geometry.window < packing.max_seqlen else -1
        out: Tensor = self._package.flash_attn_varlen_func(
            q_NHD, k_NGD, v_NGE, packing.cu_seqlens, packing.cu_seqlens,
            packing.max_seqlen, packing.max_seqlen,
            causal=True, window_size=(left, 0 if left >= 0 else -1),
            deterministic=torch.are_deterministic_algorithms_enabled(),
        )  # fmt: skip
        return out


def _require_sequences(count: int) -> None:
    if count > MAX_SEQUENCES:
        message = (
            f"flash-attn takes {MAX_SEQUENCES:,} sequences a call, and this one has {count:,}; "
            "use a smaller micro-batch or another backend for this branch"
        )
        raise ValueError(message)
