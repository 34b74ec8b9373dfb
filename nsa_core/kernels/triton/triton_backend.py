"""The Triton backend: the attention protocol on NVIDIA cards from sm_80 on.

Legend: N tokens of the call, H query heads, G groups, D key width, E value width,
C compressed slots, S = num_selected.
"""

import torch
from torch import Tensor

from nsa_core.config.backend_policy import Branch, training_refusal
from nsa_core.kernels.backend import DeviceFacts, check_compressed, check_tokens
from nsa_core.kernels.geometry import BlockGeometry
from nsa_core.kernels.packing import Packing
from nsa_core.kernels.triton import autograd, ops
from nsa_core.kernels.triton.hopper import support
from nsa_core.kernels.triton.launch import policy_for

SUPPORTED_DTYPES = (torch.bfloat16, torch.float16)
MIN_CAPABILITY = (8, 0)
_WHOLE_DOCUMENT = 1 << 30  # one window for every document that it covers: one compilation

autograd.register()


def refusal(branch: Branch, facts: DeviceFacts) -> str | None:
    """Why these kernels cannot run on a device with what is known of a model's sizes, or None."""
    del branch
    if facts.device_type != "cuda" or facts.capability is None:
        return f"triton needs a CUDA device, and the device is {facts.device_type}"
    if facts.capability < MIN_CAPABILITY:
        major, minor = facts.capability
        return f"triton needs sm_80 or newer, and the card is sm_{major}{minor}"
    if facts.dtype not in SUPPORTED_DTYPES:
        return f"triton computes in bfloat16 or float16, and the inputs are {facts.dtype}"
    return training_refusal(facts.widths, facts.blocks, facts.queries)


def note(facts: DeviceFacts) -> str:
    """Which kernels are Hopper's, and why not all of them."""
    block = None if facts.blocks is None else facts.blocks[0]
    reason = support.refusal(facts.capability, facts.dtype, facts.widths, block)
    if reason is not None:
        return f"all by the Triton kernels of any card: {reason}"
    sizes = facts.dtype, facts.widths, facts.heads
    reasons = {
        "key gradients": None,
        "query gradients": support.walk_refusal(support.QUERY_GRADIENT, *sizes),
        "forward": support.walk_refusal(support.FORWARD, *sizes),
        "backward of items": "repeats have to be equal to the bit"
        if _wants_determinism()
        else support.items_refusal(facts.widths),
    }
    served = ", ".join(what for what, why in reasons.items() if why is None)
    rest = ", ".join(f"{what} ({why})" for what, why in reasons.items() if why is not None)
    return f"Hopper's Gluon kernels: {served}" + (f"; Triton's: {rest}" if rest else "")


def create_backend() -> "TritonBackend":
    """Make the backend; called by the dispatcher."""
    return TritonBackend()


def check_shapes(
    q_NHD: Tensor, k: Tensor, v: Tensor, geometry: BlockGeometry, packing: Packing
) -> None:
    """Refuse what the kernels would compute wrongly.

    Raises:
        ValueError: As `training_refusal` says.
    """
    reason = training_refusal(
        (k.shape[2], v.shape[2]),
        (geometry.select_block, geometry.compress_stride),
        (packing.max_seqlen, q_NHD.shape[1]),
    )
    if reason is not None:
        message = f"{reason}; use the sdpa backend"
        raise ValueError(message)


class TritonBackend:
    """The `AttentionBackend` of these kernels.

    `torch.use_deterministic_algorithms(True)` makes every gradient bit-reproducible, at a price.

    Args:
        dense_until: Longest document whose selected branch is masked dense and not cut into items;
            by default the measured crossover of the launch tables.
    """

    name = "triton"

    def __init__(self, dense_until: int | None = None) -> None:
        self._dense_until = dense_until

    def compressed(
        self, q_NHD: Tensor, k_CGD: Tensor, v_CGE: Tensor, geometry: BlockGeometry, packing: Packing
    ) -> tuple[Tensor, Tensor]:
        """See `AttentionBackend.compressed`."""
        check_compressed(q_NHD, k_CGD, v_CGE, geometry, packing)
        check_shapes(q_NHD, k_CGD, v_CGE, geometry, packing)
        out_NHE, lse_NH = ops.compressed(
            *_contiguous(q_NHD, k_CGD, v_CGE), packing.cu_seqlens, packing.max_seqlen,
            geometry.select_block, geometry.compress_block, geometry.compress_stride,
            _wants_determinism(),
        )  # fmt: skip
        return out_NHE, lse_NH

    @torch.no_grad()
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
        check_shapes(q_NHD, k_CGD, k_CGD, geometry, packing)
        ids_NGS: Tensor = ops.select(
            *_contiguous(q_NHD, k_CGD, lse_NH), packing.cu_seqlens, packing.max_seqlen,
            geometry.select_block, geometry.compress_block, geometry.compress_stride,
            geometry.num_selected,
        )  # fmt: skip
        return ids_NGS

    def selected(
        self,
        q_NHD: Tensor,
        k_NGD: Tensor,
        v_NGE: Tensor,
        ids_NGS: Tensor,
        geometry: BlockGeometry,
        packing: Packing,
    ) -> Tensor:
        """See `AttentionBackend.selected`."""
        check_tokens(q_NHD, k_NGD, v_NGE, packing)
        check_shapes(q_NHD, k_NGD, v_NGE, geometry, packing)
        out_NHE: Tensor = ops.selected_attention(
            *_contiguous(q_NHD, k_NGD, v_NGE, ids_NGS), packing.cu_seqlens, packing.max_seqlen,
            geometry.select_block, self._is_dense(q_NHD, v_NGE, packing), _wants_determinism(),
        )[0]  # fmt: skip
        return out_NHE

    def sliding(
        self, q_NHD: Tensor, k_NGD: Tensor, v_NGE: Tensor, geometry: BlockGeometry, packing: Packing
    ) -> Tensor:
        """See `AttentionBackend.sliding`."""
        check_tokens(q_NHD, k_NGD, v_NGE, packing)
        check_shapes(q_NHD, k_NGD, v_NGE, geometry, packing)
        out_NHE: Tensor = ops.sliding(
            *_contiguous(q_NHD, k_NGD, v_NGE), packing.cu_seqlens, packing.max_seqlen,
            geometry.select_block, _span(geometry.window, packing),
        )[0]  # fmt: skip
        return out_NHE

    def attend(
        self,
        q_NHD: Tensor,
        compressed: tuple[Tensor, Tensor],
        selected: tuple[Tensor, Tensor],
        sliding: tuple[Tensor, Tensor],
        gate_NH3: Tensor,
        geometry: BlockGeometry,
        packing: Packing,
    ) -> tuple[Tensor, Tensor]:
        """All three branches, the choice between them and the gated sum as one operator.

        The same mathematics as the single branches; one pass prepares all three backwards, gates
        scale rows inside the kernels, and dq is summed in place.

        Args:
            q_NHD: Queries.
            compressed: Keys and values [C, G, .] of the compressed blocks.
            selected: Keys and values [N, G, .] of the selected branch.
            sliding: Keys and values [N, G, .] of the window.
            gate_NH3: Weights of (compressed, selected, sliding); must not be negative.
            geometry: Block sizes.
            packing: The documents.

        Returns:
            The gated sum [N, H, E] and the chosen ids [N, G, S].
        """
        check_compressed(q_NHD, *compressed, geometry, packing)
        for pair in (selected, sliding):
            check_tokens(q_NHD, *pair, packing)
        for pair in (compressed, selected, sliding):
            check_shapes(q_NHD, *pair, geometry, packing)
        sizes = [
            geometry.compress_block, geometry.compress_stride, geometry.select_block,
            geometry.num_selected, _span(geometry.window, packing),
        ]  # fmt: skip
        out_NHE, ids_NGS, *_saved = ops.attend(
            *_contiguous(q_NHD, *compressed, *selected, *sliding, gate_NH3),
            packing.cu_seqlens, packing.max_seqlen, sizes,
            self._is_dense(q_NHD, selected[1], packing), _wants_determinism(),
        )  # fmt: skip
        return out_NHE, ids_NGS

    def _is_dense(self, q_NHD: Tensor, v_NGE: Tensor, packing: Packing) -> bool:
        limit = self._dense_until
        if limit is None:
            limit = policy_for(q_NHD.device, q_NHD.shape[2], v_NGE.shape[2]).dense_until
        return packing.max_seqlen <= limit


def _contiguous(*tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(tensor.contiguous() for tensor in tensors)


def _wants_determinism() -> bool:
    return torch.are_deterministic_algorithms_enabled()


def _span(window: int, packing: Packing) -> int:
    return window if window < packing.max_seqlen else _WHOLE_DOCUMENT
