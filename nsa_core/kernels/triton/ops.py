"""The branches as torch custom operators, which torch.compile sees through.

Legend: N tokens (documents end to end), H query heads, G groups, D key width, E value width, C
compressed slots, S chosen blocks. `cu_seqlens` [M + 1] int32 stays on the device; `max_seqlen` is
a bound known on the host. Every operator takes contiguous tensors, which `triton_backend.py` makes.
"""

import torch
from torch import Tensor
from torch.library import custom_op

from nsa_core.kernels.triton import attend_host, one_tile, row_terms, selected
from nsa_core.kernels.triton.document_slots import Documents, documents, num_slots
from nsa_core.kernels.triton.hopper.support import takes_planes
from nsa_core.kernels.triton.select import select_blocks
from nsa_core.kernels.triton.sources import GradientSource, Mode, compressed_mode, sliding_mode
from nsa_core.kernels.triton.streams import run_beside


def _new_out(q: Tensor, v: Tensor) -> Tensor:
    return q.new_empty(q.shape[0], q.shape[1], v.shape[2])


def _new_lse(q: Tensor) -> Tensor:
    return q.new_empty(q.shape[0], q.shape[1], dtype=torch.float32)


def _mode_backward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, grad: Tensor,
    docs: Documents, mode: Mode, *, deterministic: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    grad = grad.contiguous()
    planes = takes_planes(q, v, docs.block)
    source = GradientSource(mode, k, v, row_terms.prepare(grad, out, lse, docs, planes=planes))
    dk, dv = torch.empty_like(k), torch.empty_like(v)
    attend_host.key_gradient(q, grad, source, docs, (dk, dv), deterministic=deterministic)
    return attend_host.query_gradient(q, grad, (source,), docs), dk, dv


@custom_op("nsa::compressed", mutates_args=())
def compressed(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int,
    select_block: int, compress_block: int, compress_stride: int, deterministic: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Out [N, H, E] and natural lse [N, H] of attention to the visible compressed blocks."""
    del deterministic  # of the backward
    docs = documents(cu_seqlens, q.shape[0], max_seqlen, select_block)
    into = _new_out(q, v), _new_lse(q)
    attend_host.forward(q, k, v, docs, compressed_mode(compress_block, compress_stride), into)
    return into


@custom_op("nsa::compressed_backward", mutates_args=())
def compressed_backward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, grad: Tensor, cu_seqlens: Tensor,
    max_seqlen: int, select_block: int, compress_block: int, compress_stride: int,
    deterministic: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of q, k, v of `compressed`."""
    docs = documents(cu_seqlens, q.shape[0], max_seqlen, select_block)
    mode = compressed_mode(compress_block, compress_stride)
    return _mode_backward(q, k, v, out, lse, grad, docs, mode, deterministic=deterministic)


@custom_op("nsa::sliding", mutates_args=())
def sliding(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int,
    select_block: int, window: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Out [N, H, E] and natural lse [N, H] of attention to the last `window` tokens."""
    docs = documents(cu_seqlens, q.shape[0], max_seqlen, select_block)
    into = _new_out(q, v), _new_lse(q)
    attend_host.forward(q, k, v, docs, sliding_mode(window), into)
    return into


@custom_op("nsa::sliding_backward", mutates_args=())
def sliding_backward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, grad: Tensor, cu_seqlens: Tensor,
    max_seqlen: int, select_block: int, window: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of q, k, v of `sliding`; bit-reproducible."""
    docs = documents(cu_seqlens, q.shape[0], max_seqlen, select_block)
    return _mode_backward(q, k, v, out, lse, grad, docs, sliding_mode(window), deterministic=True)


@custom_op("nsa::select", mutates_args=())
def select(
    q: Tensor, k: Tensor, lse: Tensor, cu_seqlens: Tensor, max_seqlen: int,
    select_block: int, compress_block: int, compress_stride: int, num_selected: int,
) -> Tensor:  # fmt: skip
    """Ids [N, G, S] int32 of the chosen blocks; see `select.select_blocks`."""
    docs = documents(cu_seqlens, q.shape[0], max_seqlen, select_block)
    return select_blocks(q, k, lse, docs, compress_block, compress_stride, num_selected)


@custom_op("nsa::selected", mutates_args=())
def selected_attention(
    q: Tensor, k: Tensor, v: Tensor, ids: Tensor, cu_seqlens: Tensor, max_seqlen: int,
    select_block: int, dense: bool, deterministic: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Out [N, H, E] and natural lse [N, H] of causal attention to the chosen blocks."""
    docs = documents(cu_seqlens, q.shape[0], max_seqlen, select_block)
    words = selected.invert(ids, q, v, docs, dense=dense, deterministic=deterministic)
    choice = selected.open_choice(ids, words, q, v, docs, dense=dense)
    into = _new_out(q, v), _new_lse(q)
    selected.selected_forward(q, k, v, choice, docs, into)
    return into


@custom_op("nsa::selected_backward", mutates_args=())
def selected_attention_backward(
    q: Tensor, k: Tensor, v: Tensor, ids: Tensor, out: Tensor, lse: Tensor, grad: Tensor,
    cu_seqlens: Tensor, max_seqlen: int, select_block: int, dense: bool, deterministic: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of q, k, v of `selected`; the index is built again rather than kept."""
    docs = documents(cu_seqlens, q.shape[0], max_seqlen, select_block)
    words = selected.invert(ids, q, v, docs, dense=dense, deterministic=deterministic)
    choice = selected.open_choice(ids, words, q, v, docs, dense=dense)
    grad = grad.contiguous()
    planes = dense and takes_planes(q, v, docs.block)
    terms = row_terms.prepare(grad, out, lse, docs, planes=planes)
    into = torch.empty_like(k), torch.empty_like(v)
    dq = selected.selected_backward(
        q, k, v, grad, terms, choice, docs, into, deterministic=deterministic
    )
    return dq, *into


@custom_op("nsa::attend", mutates_args=())
def attend(
    q: Tensor, k_compressed: Tensor, v_compressed: Tensor, k_selected: Tensor, v_selected: Tensor,
    k_sliding: Tensor, v_sliding: Tensor, gate: Tensor, cu_seqlens: Tensor, max_seqlen: int,
    geometry: list[int], dense: bool, deterministic: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """All of NSA: the three branches, the choice between them and the gated sum.

    `gate` [N, H, 3] weighs (compressed, selected, sliding) and is not negative; `geometry` is
    l, d, l', n, w; `dense` takes the masked-dense selected path instead of the KV-major one.

    Returns:
        out [N, H, E] and ids [N, G, S]; for the backward the three branch outputs, lse [3, N, H],
        the words of the inverted ids and the document of every query block.
    """
    span, stride, block, num_selected, window = geometry
    docs = documents(cu_seqlens, q.shape[0], max_seqlen, block)
    compression = compressed_mode(span, stride)
    lse = q.new_empty(3, q.shape[0], q.shape[1], dtype=torch.float32)
    out_c, out_w = _new_out(q, v_compressed), _new_out(q, v_sliding)

    def choose_and_read() -> tuple[Tensor, Tensor, Tensor]:
        into, sizes = (out_c, lse[0]), (span, stride, num_selected)
        if one_tile.takes_one_tile(q, v_compressed, docs, stride):
            ids = one_tile.attend_and_choose(q, k_compressed, v_compressed, docs, *sizes, into)
        else:
            attend_host.forward(q, k_compressed, v_compressed, docs, compression, into)
            ids = select_blocks(q, k_compressed, lse[0], docs, *sizes)
        words = selected.invert(ids, q, v_selected, docs, dense=dense, deterministic=deterministic)
        choice = selected.open_choice(ids, words, q, v_selected, docs, dense=dense)
        out_s = _new_out(q, v_selected)
        selected.selected_forward(q, k_selected, v_selected, choice, docs, (out_s, lse[1]))
        return ids, words, out_s

    ids, words, out_s = run_beside(
        q.device,
        lambda: attend_host.forward(
            q, k_sliding, v_sliding, docs, sliding_mode(window), (out_w, lse[2])
        ),
        choose_and_read,
    )
    out = row_terms.mix((out_c, out_s, out_w), gate)
    return out, ids, out_c, out_s, out_w, lse, words, docs.tile_document


@custom_op("nsa::attend_backward", mutates_args=())
def attend_backward(
    grad: Tensor, q: Tensor, keys_values: list[Tensor], gate: Tensor, saved: list[Tensor],
    cu_seqlens: Tensor, max_seqlen: int, geometry: list[int], dense: bool, deterministic: bool,
) -> list[Tensor]:  # fmt: skip
    """Gradients of (q, the three pairs k, v, gate) of `attend`; the key gradients run beside.

    `saved` is all that `attend` returned but the gated sum.
    """
    span, stride, block, _, window = geometry
    ids, out_c, out_s, out_w, lse, words, tile_document = saved
    docs = Documents(cu_seqlens, q.shape[0], max_seqlen, block, tile_document)
    grad = grad.contiguous()
    (terms_c, terms_s, terms_w), dgate = row_terms.mix_prepare(
        grad, (out_c, out_s, out_w), lse, gate, docs, planes=takes_planes(q, out_c, docs.block)
    )
    k_c, v_c, k_s, v_s, k_w, v_w = keys_values
    compressed_source = GradientSource(compressed_mode(span, stride), k_c, v_c, terms_c)
    sliding_source = GradientSource(sliding_mode(window), k_w, v_w, terms_w)
    choice = selected.open_choice(ids, words, q, v_s, docs, dense=dense)
    chosen = selected.chosen_source(k_s, v_s, terms_s, choice)
    into_c, into_s, into_w = (
        (torch.empty_like(k), torch.empty_like(v)) for k, v in ((k_c, v_c), (k_s, v_s), (k_w, v_w))
    )

    def key_gradients() -> None:
        for source, into in ((compressed_source, into_c), (sliding_source, into_w)):
            attend_host.key_gradient(q, grad, source, docs, into, deterministic=deterministic)

    def other_gradients() -> Tensor:
        if chosen is not None:
            attend_host.key_gradient(q, grad, chosen, docs, into_s, deterministic=deterministic)
            sources = (compressed_source, sliding_source, chosen)
            return attend_host.query_gradient(q, grad, sources, docs)
        dtype = selected.gradient_dtype(q, v_s, deterministic=deterministic)
        dq = attend_host.query_gradient(
            q, grad, (compressed_source, sliding_source), docs, dtype=dtype
        )
        return selected.items_backward(
            q, k_s, v_s, grad, terms_s, choice, docs, into_s,
            deterministic=deterministic, add_to=dq,
        )  # fmt: skip

    dq = run_beside(q.device, key_gradients, other_gradients)
    return [dq, *into_c, *into_s, *into_w, dgate]


@compressed.register_fake
@sliding.register_fake
def _fake_forward(q: Tensor, k: Tensor, v: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    del k
    return _new_out(q, v), _new_lse(q)


@compressed_backward.register_fake
@sliding_backward.register_fake
def _fake_backward(q: Tensor, k: Tensor, v: Tensor, *_: object) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


@select.register_fake
def _fake_select(
    q: Tensor, k: Tensor, lse: Tensor, cu_seqlens: Tensor, max_seqlen: int,
    select_block: int, compress_block: int, compress_stride: int, num_selected: int,
) -> Tensor:  # fmt: skip
    del lse, cu_seqlens, max_seqlen, select_block, compress_block, compress_stride
    return q.new_empty(q.shape[0], k.shape[1], num_selected, dtype=torch.int32)


@selected_attention.register_fake
def _fake_selected(
    q: Tensor, k: Tensor, v: Tensor, ids: Tensor, *_: object
) -> tuple[Tensor, Tensor]:
    del k, ids
    return _new_out(q, v), _new_lse(q)


@selected_attention_backward.register_fake
def _fake_selected_backward(
    q: Tensor, k: Tensor, v: Tensor, *_: object
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


@attend.register_fake
def _fake_attend(
    q: Tensor, k_compressed: Tensor, v_compressed: Tensor, k_selected: Tensor, v_selected: Tensor,
    k_sliding: Tensor, v_sliding: Tensor, gate: Tensor, cu_seqlens: Tensor, max_seqlen: int,
    geometry: list[int], dense: bool, deterministic: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    del k_compressed, v_compressed, k_sliding, gate, deterministic
    out, out_c, out_s, out_w = (_new_out(q, v_sliding) for _ in range(4))
    lse = q.new_empty(3, q.shape[0], q.shape[1], dtype=torch.float32)
    ids = q.new_empty(q.shape[0], k_selected.shape[1], geometry[3], dtype=torch.int32)
    num_documents, block = cu_seqlens.shape[0] - 1, geometry[2]
    words = ids.new_empty(
        selected.count_words(ids, q, v_selected, num_documents, max_seqlen, block, dense=dense)
    )
    tile_document = ids.new_empty(num_slots(q.shape[0], num_documents, block))
    return out, ids, out_c, out_s, out_w, lse, words, tile_document


@attend_backward.register_fake
def _fake_attend_backward(
    grad: Tensor, q: Tensor, keys_values: list[Tensor], gate: Tensor, *_: object
) -> list[Tensor]:
    del grad
    return [torch.empty_like(each) for each in (q, *keys_values, gate)]
