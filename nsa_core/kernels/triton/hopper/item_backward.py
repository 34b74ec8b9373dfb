"""Host side of `item_backward_kernel.py`."""

from torch import Tensor

from nsa_core.kernels.triton.document_slots import Documents
from nsa_core.kernels.triton.hopper.item_backward_kernel import LANES, hopper_item_backward_kernel
from nsa_core.kernels.triton.hopper.support import ITEM_BACKWARD, multiprocessors
from nsa_core.kernels.triton.index import QueryIndex
from nsa_core.kernels.triton.launcher import run
from nsa_core.kernels.triton.row_terms import RowTerms
from nsa_core.kernels.triton.sizes import cdiv
from nsa_core.kernels.triton.sources import LOG2E

_ROWS = 64  # of a tile


def add_items(
    q: Tensor, k: Tensor, v: Tensor, grad: Tensor, terms: RowTerms, index: QueryIndex,
    docs: Documents, into: tuple[Tensor, Tensor, Tensor], most_items: int,
) -> None:  # fmt: skip
    """Add dq [N, H, D], dk and dv [N, G, D] of all items to float32 sums; dk is not scaled yet.

    `most_items` bounds the items, whose number only the device knows.
    """
    _, num_heads, width = q.shape
    groups = k.shape[1]
    launch = ITEM_BACKWARD
    programs = min(multiprocessors(q.device), cdiv(most_items, LANES.value))
    run(
        hopper_item_backward_kernel, (programs,),
        q, k, v, grad, terms.offset, terms.delta,
        index.offset, index.item_offset, index.item_list, index.entries, *into,
        docs.tile_document, docs.cu_seqlens, index.size.num_lists, docs.num_slots,
        index.size.item_queries, width**-0.5 * LOG2E, width**-0.5,
        groups, num_heads // groups, width, index.size.num_selected, _ROWS,
        launch.stages, launch.key_stages, docs.max_seqlen > launch.near_until, launch.gather_warps,
        launch.worker_registers, launch.gather_registers,
        num_warps=4, maxnreg=launch.max_registers,
    )  # fmt: skip
