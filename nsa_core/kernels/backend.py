"""What every attention backend has to offer, and how one says that it cannot run.

Legend: N tokens of the call (documents end to end), H query heads, G key/value groups, D key width,
E value width, C compressed slots, S = num_selected.
"""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from nsa_core.config.backend_policy import NSA_BRANCHES, Branch, RowLayout
from nsa_core.kernels.geometry import BlockGeometry
from nsa_core.kernels.inputs import check_attention_inputs
from nsa_core.kernels.packing import Packing

BRANCHES = NSA_BRANCHES


class AttentionBackend(Protocol):
    """The three branches and the block choice on packed rows; scores are scaled by 1 / sqrt(D).

    Outputs have the dtype of q; softmax and lse are float32 (float64 for float64 inputs). All but
    `select` are differentiable in q, k and v. Query head a belongs to group a // (H / G).
    The compressed block i of a document that starts in row s lies in slot s // d + i. Slots that
    no block owns hold anything, and like every key and value that a token does not see, they must
    never influence anything: not by NaN times a probability of 0 either.
    """

    @property
    def name(self) -> str:
        """The name by which the configuration asks for it."""
        ...

    def compressed(
        self, q_NHD: Tensor, k_CGD: Tensor, v_CGE: Tensor, geometry: BlockGeometry, packing: Packing
    ) -> tuple[Tensor, Tensor]:
        """Attend to the compressed blocks that end at or before each token.

        Returns:
            out_NHE, and lse_NH: the natural log-sum-exp of the scaled scores. Where no block is
            visible the output is 0 and lse is -inf. No gradient flows through lse.
        """
        ...

    def select(
        self,
        q_NHD: Tensor,
        k_CGD: Tensor,
        lse_NH: Tensor,
        geometry: BlockGeometry,
        packing: Packing,
    ) -> Tensor:
        """Choose the selection blocks of each token and group (Eq. 8-12); carries no gradient.

        Returns:
            ids_NGS int32: document-local block indices, ascending, -1 as padding at the end.
        """
        ...

    def selected(
        self,
        q_NHD: Tensor,
        k_NGD: Tensor,
        v_NGE: Tensor,
        ids_NGS: Tensor,
        geometry: BlockGeometry,
        packing: Packing,
    ) -> Tensor:
        """Attend to the keys of the chosen blocks up to the token itself; returns out_NHE."""
        ...

    def sliding(
        self, q_NHD: Tensor, k_NGD: Tensor, v_NGE: Tensor, geometry: BlockGeometry, packing: Packing
    ) -> Tensor:
        """Attend to the last `window` keys of the document, the token included; returns out_NHE."""
        ...


def check_compressed(
    q_NHD: Tensor, k_CGD: Tensor, v_CGE: Tensor, geometry: BlockGeometry, packing: Packing
) -> None:
    """`check_attention_inputs` of the compressed branch.

    Raises:
        ValueError: As that.
    """
    check_attention_inputs(
        q_NHD, k_CGD, v_CGE,
        num_tokens=packing.num_tokens, num_keys=geometry.num_slots(packing.num_tokens),
    )  # fmt: skip


def check_tokens(q_NHD: Tensor, k_NGD: Tensor, v_NGE: Tensor, packing: Packing) -> None:
    """`check_attention_inputs` of the branches whose keys are those of the tokens.

    Raises:
        ValueError: As that.
    """
    check_attention_inputs(
        q_NHD, k_NGD, v_NGE, num_tokens=packing.num_tokens, num_keys=packing.num_tokens
    )


def nothing_visible(q_NHD: Tensor, k_CGD: Tensor, v_CGE: Tensor) -> tuple[Tensor, Tensor]:
    """Output and lse of the compressed branch for a call without a slot (N < d).

    The output is a function of the empty keys and values, so that what made them has gradients of
    zero and not none.
    """
    wide = torch.promote_types(q_NHD.dtype, torch.float32)
    lse_NH = torch.full(q_NHD.shape[:2], float("-inf"), dtype=wide, device=q_NHD.device)
    out_NHE = q_NHD.new_zeros(*q_NHD.shape[:2], v_CGE.shape[-1])
    return out_NHE + (k_CGD.sum() + v_CGE.sum()), lse_NH


@runtime_checkable
class FusedBackend(AttentionBackend, Protocol):
    """A backend that makes the three branches, the choice and the gated sum in one operator."""

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
        """Return the sum of the branches weighted by the gates [N, H, E], and ids_NGS.

        Each branch is a pair of keys and values; gates are in the order of `BRANCHES` and must not
        be negative.
        """
        ...


@dataclass(frozen=True)
class DeviceFacts:
    """What a backend needs to know to say whether it can run.

    Attributes:
        device_type: `cpu` or `cuda`.
        capability: Compute capability (major, minor) of the card; None on a CPU.
        dtype: The dtype in which q, k and v will arrive.
        widths: Width of keys and of values; None where it is not known.
        rows: Length and packing of the rows; None where it is not known.
        heads: Query heads, and heads of keys and values; None where it is not known.
        blocks: Tokens of a selection block and of a compression stride; None as above.
    """

    device_type: str
    capability: tuple[int, int] | None
    dtype: torch.dtype
    widths: tuple[int, int] | None = None
    rows: RowLayout | None = None
    heads: tuple[int, int] | None = None
    blocks: tuple[int, int] | None = None

    @property
    def queries(self) -> tuple[int, int] | None:
        """Tokens of the longest document that may come, and query heads."""
        if self.rows is None or self.heads is None:
            return None
        return self.rows.seq_len, self.heads[0]


@dataclass(frozen=True)
class BackendChoice:
    """Which backend a branch uses and why: a line of the manifest and of every heartbeat."""

    branch: Branch
    name: str
    reason: str


@dataclass(frozen=True)
class BranchBackends:
    """The backend of each branch; `compressed` also chooses the blocks.

    Attributes:
        compressed: Of the compressed branch.
        selected: Of the selected branch.
        sliding: Of the window.
        choices: What was chosen and why: a line for every branch that the model has.
        dense: Of the dense control; None takes torch's own attention for equally long documents,
            and `sliding` with a window over the whole document for others.
        not_in_decode: Why the Triton kernels of decode do not serve this model; None if they do.
    """

    compressed: AttentionBackend
    selected: AttentionBackend
    sliding: AttentionBackend
    choices: tuple[BackendChoice, ...] = ()
    dense: AttentionBackend | None = None
    not_in_decode: str | None = None

    @property
    def fused(self) -> FusedBackend | None:
        """The one backend of all branches, if it has them all in one operator."""
        backend = self.compressed
        is_one = backend is self.selected and backend is self.sliding
        return backend if is_one and isinstance(backend, FusedBackend) else None

    @classmethod
    def of(cls, backend: AttentionBackend, reason: str = "named by the caller") -> "BranchBackends":
        """Use one backend for all three branches."""
        choices = tuple(BackendChoice(branch, backend.name, reason) for branch in BRANCHES)
        return cls(backend, backend, backend, choices)
