"""Host side of the selected branch: masked-dense for short documents, KV-major for long ones.

Both paths compute the same sum for any ids. The masked-dense path costs what dense attention costs
and is bit-reproducible; the KV-major path costs the same at any length and adds in float32
atomics, unless `deterministic` asks for ordered copies.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from nsa_core.kernels.triton import attend_host
from nsa_core.kernels.triton.document_slots import Documents, num_slots, tile_documents
from nsa_core.kernels.triton.hopper.support import takes_items
from nsa_core.kernels.triton.index import (
    IndexSize,
    QueryIndex,
    block_bits,
    build_index,
    index_words,
    max_items,
    num_words,
)
from nsa_core.kernels.triton.items import (
    item_backward_kernel,
    item_forward_kernel,
    sum_items_kernel,
)
from nsa_core.kernels.triton.key_sums import new_sums
from nsa_core.kernels.triton.launch import launch_for, policy_for, row_tile
from nsa_core.kernels.triton.launcher import run
from nsa_core.kernels.triton.merge import (
    band_key_gradient_kernel,
    first_block_gradient_kernel,
    merge_forward_kernel,
    merge_query_gradient_kernel,
)
from nsa_core.kernels.triton.row_terms import RowTerms
from nsa_core.kernels.triton.sizes import cdiv
from nsa_core.kernels.triton.sources import LOG2E, GradientSource, chosen_mode

_MAX_ELEMENTS = (1 << 31) - 1  # partial outputs of a chunk are addressed in 32 bits
_FIRST_BLOCK_SEGMENT = 8  # query blocks per program of the first block's gradient


@dataclass(frozen=True)
class BlockChoice:
    """Chosen ids [N, G, S] with what a path needs of them: bits, or the inverted index."""

    ids: Tensor
    bits: Tensor | None
    index: QueryIndex | None


@dataclass(frozen=True)
class _Shape:
    """Sizes that every KV-major launch shares."""

    groups: int
    heads: int
    key_width: int
    value_width: int
    num_selected: int
    item_queries: int

    @property
    def qk_scale(self) -> float:
        return LOG2E * self.scale

    @property
    def scale(self) -> float:
        return 1.0 / math.sqrt(self.key_width)


def _index_size(ids: Tensor, q: Tensor, v: Tensor, num_slots: int, block: int) -> IndexSize:
    policy = policy_for(q.device, q.shape[2], v.shape[2])
    token_elements = q.shape[1] * ids.shape[2] * max(q.shape[2], v.shape[2])
    chunk_tokens = min(policy.chunk_tokens, _MAX_ELEMENTS // token_elements)
    return IndexSize.of(ids, num_slots, block, chunk_tokens, policy.item_queries)


def count_words(
    ids: Tensor, q: Tensor, v: Tensor, num_documents: int, max_seqlen: int, block: int,
    *, dense: bool,
) -> int:  # fmt: skip
    """Length of what `invert` returns."""
    slots = num_slots(ids.shape[0], num_documents, block)
    if dense:
        return ids.shape[1] * num_words(max_seqlen, block) * slots * block
    return index_words(_index_size(ids, q, v, slots, block))


def invert(
    ids: Tensor, q: Tensor, v: Tensor, docs: Documents, *, dense: bool, deterministic: bool
) -> Tensor:
    """Turn ids into the bits (dense) or the inverted index of a path: int32 words [W]."""
    if dense:
        return block_bits(ids, docs).view(-1)
    size = _index_size(ids, q, v, docs.num_slots, docs.block)
    return build_index(ids, docs, size, deterministic=deterministic)


def open_choice(
    ids: Tensor, words: Tensor, q: Tensor, v: Tensor, docs: Documents, *, dense: bool
) -> BlockChoice:
    """Ids with the words that `invert` made of them."""
    if dense:
        return BlockChoice(
            ids, words.view(ids.shape[1], num_words(docs.max_seqlen, docs.block), -1), None
        )
    return BlockChoice(
        ids, None, QueryIndex.over(words, _index_size(ids, q, v, docs.num_slots, docs.block))
    )


def selected_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    choice: BlockChoice,
    docs: Documents,
    into: tuple[Tensor, Tensor],
) -> None:
    """Write out [N, H, E] and natural lse [N, H] of causal attention to the chosen blocks."""
    if choice.bits is not None:
        attend_host.forward(q, k, v, docs, chosen_mode(choice.bits), into)
    else:
        _items_forward(q, k, v, choice, docs, into)


def chosen_source(
    k: Tensor, v: Tensor, terms: RowTerms, choice: BlockChoice
) -> GradientSource | None:
    """The branch as a source of the common gradient kernels; None on the KV-major path."""
    if choice.bits is None:
        return None
    return GradientSource(chosen_mode(choice.bits), k, v, terms)


def selected_backward(
    q: Tensor, k: Tensor, v: Tensor, grad: Tensor, terms: RowTerms,
    choice: BlockChoice, docs: Documents, into: tuple[Tensor, Tensor], *, deterministic: bool,
) -> Tensor:  # fmt: skip
    """Gradient of q; those of k and v go `into`."""
    source = chosen_source(k, v, terms, choice)
    if source is None:
        return items_backward(q, k, v, grad, terms, choice, docs, into, deterministic=deterministic)
    attend_host.key_gradient(q, grad, source, docs, into, deterministic=deterministic)
    return attend_host.query_gradient(q, grad, (source,), docs)


def gradient_dtype(q: Tensor, v: Tensor, *, deterministic: bool) -> torch.dtype:
    """Dtype in which `items_backward` takes the other branches' gradient of q to add to."""
    return torch.float32 if _is_atomic(q, v, deterministic=deterministic) else q.dtype


def _is_atomic(q: Tensor, v: Tensor, *, deterministic: bool) -> bool:
    """Whether the KV-major path adds dq by float32 atomics."""
    if deterministic:
        return False
    return not policy_for(q.device, q.shape[2], v.shape[2]).partial_dq


def _shape(q: Tensor, k: Tensor, v: Tensor, ids: Tensor) -> _Shape:
    policy = policy_for(q.device, q.shape[2], v.shape[2])
    return _Shape(
        k.shape[1], q.shape[1] // k.shape[1], q.shape[2], v.shape[2], ids.shape[2],
        policy.item_queries,
    )  # fmt: skip


def _partial_rows(docs: Documents, index: QueryIndex, shape: _Shape) -> int:
    tokens = min(docs.num_tokens, index.size.chunk_slots * docs.block)
    return tokens * shape.groups * shape.num_selected * shape.heads


def _item_programs(docs: Documents, index: QueryIndex, shape: _Shape, chunks: int) -> int:
    """Bound on the items of `chunks` chunks: a chunk's lists end at its own last KV block."""
    tokens = min(docs.num_tokens, chunks * index.size.chunk_slots * docs.block)
    reach = index.size.chunk_slots + cdiv(docs.max_seqlen, docs.block) + 1
    lists = chunks * shape.groups * min(reach, docs.num_slots)
    return max(1, max_items(tokens * shape.groups * shape.num_selected, lists, shape.item_queries))


def _items_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    choice: BlockChoice,
    docs: Documents,
    into: tuple[Tensor, Tensor],
) -> None:
    index, ids = choice.index, choice.ids
    assert index is not None  # noqa: S101 - narrows the type; the caller has looked at `bits`
    shape = _shape(q, k, v, ids)
    out, lse = into
    part_rows = _partial_rows(docs, index, shape)
    part_out = q.new_empty(part_rows, shape.value_width)
    part_lse = q.new_empty(part_rows, dtype=torch.float32)
    item = launch_for("item_forward", q.device, shape.key_width, shape.value_width)
    merge = launch_for("merge", q.device, shape.key_width, shape.value_width)
    rows = row_tile(merge, docs.block, shape.heads)
    programs = _item_programs(docs, index, shape, 1)
    lists = shape.groups * docs.num_slots
    sizes = (
        docs.block, shape.groups, shape.heads, shape.key_width, shape.value_width,
        shape.num_selected,
    )  # fmt: skip
    for chunk in range(index.size.num_chunks):
        first_slot = chunk * index.size.chunk_slots
        slots = min(index.size.chunk_slots, docs.num_slots - first_slot)
        run(
            item_forward_kernel, (programs,),
            q, k, v, index.offset, index.item_offset, index.item_list, index.entries,
            part_out, part_lse, docs.tile_document, docs.cu_seqlens,
            chunk * lists, (chunk + 1) * lists, first_slot, docs.num_slots,
            shape.item_queries, shape.qk_scale, *sizes, item.rows, item.stages, **item.options(),
        )  # fmt: skip
        run(
            merge_forward_kernel, (slots * (docs.block * shape.heads // rows), shape.groups),
            q, k, v, ids, index.flags, part_out, part_lse, out, lse,
            docs.tile_document, docs.cu_seqlens, first_slot, q.shape[0], shape.qk_scale,
            *sizes, rows, merge.stages, **merge.options(),
        )  # fmt: skip


@dataclass(frozen=True)
class _Backward:
    """What the backward launches share."""

    q: Tensor
    k: Tensor
    v: Tensor
    grad: Tensor
    terms: RowTerms
    ids: Tensor
    index: QueryIndex
    docs: Documents
    shape: _Shape

    def inputs(self) -> tuple[Tensor, ...]:
        """First six arguments of every backward kernel."""
        return self.q, self.k, self.v, self.grad, self.terms.offset, self.terms.delta


def items_backward(
    q: Tensor, k: Tensor, v: Tensor, grad: Tensor, terms: RowTerms,
    choice: BlockChoice, docs: Documents, into: tuple[Tensor, Tensor],
    *, deterministic: bool, add_to: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Gradient of q on the KV-major path; those of k and v go `into`.

    `add_to` is a gradient of q from other branches, in the dtype of `gradient_dtype`; it is used
    up, and its sum with this branch's is returned.
    """
    assert choice.index is not None  # noqa: S101 - narrows the type
    shape = _shape(q, k, v, choice.ids)
    work = _Backward(q, k, v, grad, terms, choice.ids, choice.index, docs, shape)
    item_dk, item_dv = (sums[0] for sums in new_sums(k, v))
    if _is_atomic(q, v, deterministic=deterministic):
        dq = torch.empty_like(q)
        sum_dq = torch.zeros_like(q, dtype=torch.float32) if add_to is None else add_to
        _atomic_items(work, sum_dq, dq, item_dk, item_dv)
    else:
        dq = torch.empty_like(q) if add_to is None else add_to
        add = add_to is not None
        _partial_items(work, dq, item_dk, item_dv, add=add, ordered=deterministic)
    _band_key_gradient(work, item_dk, item_dv, into, ordered=deterministic)
    return dq


def _launch_items(
    work: _Backward,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    chunk: int,
    chunks: int,
    *,
    atomic: tuple[bool, bool],
) -> None:
    docs, index, shape = work.docs, work.index, work.shape
    launch = launch_for("item_backward", work.q.device, shape.key_width, shape.value_width)
    lists = shape.groups * docs.num_slots
    run(
        item_backward_kernel, (_item_programs(docs, index, shape, chunks),),
        *work.inputs(), index.offset, index.item_offset, index.item_list, index.entries, dq, dk, dv,
        docs.tile_document, docs.cu_seqlens, chunk * lists, (chunk + chunks) * lists,
        chunk * index.size.chunk_slots, docs.num_slots, shape.item_queries,
        shape.qk_scale, shape.scale,
        docs.block, shape.groups, shape.heads, shape.key_width, shape.value_width,
        shape.num_selected, launch.rows, launch.stages, *atomic, **launch.options(),
    )  # fmt: skip


def _merge_query_gradient(
    work: _Backward,
    part_dq: Tensor,
    dq: Tensor,
    first_slot: int,
    slots: int,
    *,
    atomic: bool,
    add: bool,
) -> None:
    docs, shape = work.docs, work.shape
    launch = launch_for("merge", work.q.device, shape.key_width, shape.value_width)
    rows = row_tile(launch, docs.block, shape.heads)
    run(
        merge_query_gradient_kernel, (slots * (docs.block * shape.heads // rows), shape.groups),
        *work.inputs(), work.ids, work.index.flags, part_dq, dq,
        docs.tile_document, docs.cu_seqlens,
        first_slot, work.q.shape[0], shape.qk_scale, shape.scale,
        docs.block, shape.groups, shape.heads, shape.key_width, shape.value_width,
        shape.num_selected, rows, launch.stages, atomic, add, **launch.options(),
    )  # fmt: skip


def _atomic_items(
    work: _Backward, sum_dq: Tensor, dq: Tensor, item_dk: Tensor, item_dv: Tensor
) -> None:
    """All items in one launch; dq, dk, dv by float32 atomics."""
    docs, index = work.docs, work.index
    chunks = index.size.num_chunks
    if takes_items(work.q, work.v, docs.block):
        attend_host.hopper("item_backward").add_items(
            work.q, work.k, work.v, work.grad, work.terms, index, docs, (sum_dq, item_dk, item_dv),
            _item_programs(docs, index, work.shape, chunks),
        )  # fmt: skip
    else:
        _launch_items(work, sum_dq, item_dk, item_dv, 0, chunks, atomic=(True, True))
    _merge_query_gradient(work, sum_dq, dq, 0, work.docs.num_slots, atomic=True, add=False)


def _partial_items(
    work: _Backward, dq: Tensor, item_dk: Tensor, item_dv: Tensor, *, add: bool, ordered: bool
) -> None:
    """Chunk by chunk: a partial dq per chosen block; dk, dv by atomics, or by copies in order."""
    docs, index, shape = work.docs, work.index, work.shape
    lists = shape.groups * docs.num_slots
    part_dq = work.q.new_empty(_partial_rows(docs, index, shape), shape.key_width)
    part_dk, part_dv = item_dk, item_dv
    if ordered:
        copies = _item_programs(docs, index, shape, 1) * docs.block
        part_dk = item_dk.new_empty(copies, shape.key_width)
        part_dv = item_dv.new_empty(copies, shape.value_width)
    for chunk in range(index.size.num_chunks):
        _launch_items(work, part_dq, part_dk, part_dv, chunk, 1, atomic=(False, not ordered))
        if ordered:
            run(
                sum_items_kernel, (docs.num_slots, shape.groups),
                index.item_offset, part_dk, part_dv, item_dk, item_dv,
                docs.tile_document, docs.cu_seqlens, chunk * lists, docs.num_slots,
                docs.block, shape.groups, shape.key_width, shape.value_width,
            )  # fmt: skip
        first_slot = chunk * index.size.chunk_slots
        slots = min(index.size.chunk_slots, docs.num_slots - first_slot)
        _merge_query_gradient(work, part_dq, dq, first_slot, slots, atomic=False, add=add)


def _band_key_gradient(
    work: _Backward, item_dk: Tensor, item_dv: Tensor, into: tuple[Tensor, Tensor], *, ordered: bool
) -> None:
    """Bands and the items' sums; block 0 by atomics, or by a copy per segment of queries."""
    docs, shape = work.docs, work.shape
    launch = launch_for("band", work.q.device, shape.key_width, shape.value_width)
    segment = _FIRST_BLOCK_SEGMENT * docs.block
    segments = num_slots(docs.num_tokens, docs.num_documents, segment)
    first_dk, first_dv = item_dk, item_dv
    if ordered:
        first_dk = item_dk.new_empty(segments, shape.groups, docs.block, shape.key_width)
        first_dv = item_dv.new_empty(segments, shape.groups, docs.block, shape.value_width)
    sizes = (shape.groups, shape.heads, shape.key_width, shape.value_width, launch.rows)
    run(
        first_block_gradient_kernel, (segments, shape.groups),
        *work.inputs(), work.index.flags, first_dk, first_dv,
        tile_documents(docs.cu_seqlens, docs.num_tokens, segment), docs.cu_seqlens,
        docs.num_tokens, shape.qk_scale, docs.block, segment, *sizes, not ordered,
        **launch.options(),
    )  # fmt: skip
    run(
        band_key_gradient_kernel, (docs.num_slots, shape.groups),
        *work.inputs(), work.index.flags, item_dk, item_dv, first_dk, first_dv, *into,
        docs.tile_document, docs.cu_seqlens, docs.num_tokens, shape.qk_scale, shape.scale,
        docs.block, segment, *sizes, not ordered, **launch.options(),
    )  # fmt: skip
