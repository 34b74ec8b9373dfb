"""The branches as torch custom operators, which torch.compile sees through.

Legend: N tokens (documents end to end), H query heads, G groups, D key width, E value width, C
compressed slots, S chosen blocks. `cu_seqlens` [M + 1] int32 stays on the device; `max_seqlen` is
a bound known on the host. Every operator takes contiguous tensors; `backend.py` sees to that.
"""

import torch
from torch import Tensor
from torch.library import custom_op

from nsa_core.kernels.triton import attention, gates, pool, selected
from nsa_core.kernels.triton.attention import Documents, Mode, compressed_mode, sliding_mode
from nsa_core.kernels.triton.select import select_blocks
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
    offset, delta = gates.prepare(grad, out, lse)
    dq = attention.query_gradient(q, k, v, grad, offset, delta, docs, mode)
    dk, dv = torch.empty_like(k), torch.empty_like(v)
    attention.key_gradient(
        q, k, v, grad, offset, delta, docs, mode, (dk, dv), deterministic=deterministic
    )
    return dq, dk, dv


@custom_op("nsa::compressed", mutates_args=())
def compressed(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int,
    select_block: int, compress_block: int, compress_stride: int, deterministic: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Out [N, H, E] and natural lse [N, H] of attention to the visible compressed blocks."""
    del deterministic  # of the backward
    docs = attention.documents(cu_seqlens, q.shape[0], max_seqlen, select_block)
    return attention.forward(q, k, v, docs, compressed_mode(compress_block, compress_stride))


@custom_op("nsa::compressed_backward", mutates_args=())
def compressed_backward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, grad: Tensor, cu_seqlens: Tensor,
    max_seqlen: int, select_block: int, compress_block: int, compress_stride: int,
    deterministic: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of q, k, v of `compressed`."""
    docs = attention.documents(cu_seqlens, q.shape[0], max_seqlen, select_block)
    mode = compressed_mode(compress_block, compress_stride)
    return _mode_backward(q, k, v, out, lse, grad, docs, mode, deterministic=deterministic)


@custom_op("nsa::sliding", mutates_args=())
def sliding(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int,
    select_block: int, window: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Out [N, H, E] and natural lse [N, H] of attention to the last `window` tokens."""
    docs = attention.documents(cu_seqlens, q.shape[0], max_seqlen, select_block)
    return attention.forward(q, k, v, docs, sliding_mode(window))


@custom_op("nsa::sliding_backward", mutates_args=())
def sliding_backward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, grad: Tensor, cu_seqlens: Tensor,
    max_seqlen: int, select_block: int, window: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of q, k, v of `sliding`; bit-reproducible."""
    docs = attention.documents(cu_seqlens, q.shape[0], max_seqlen, select_block)
    return _mode_backward(q, k, v, out, lse, grad, docs, sliding_mode(window), deterministic=True)


@custom_op("nsa::select", mutates_args=())
def select(
    q: Tensor, k: Tensor, lse: Tensor, cu_seqlens: Tensor, max_seqlen: int,
    select_block: int, compress_block: int, compress_stride: int, num_selected: int,
) -> Tensor:  # fmt: skip
    """Ids [N, G, S] int32 of the chosen blocks; see `select.select_blocks`."""
    docs = attention.documents(cu_seqlens, q.shape[0], max_seqlen, select_block)
    return select_blocks(q, k, lse, docs, compress_block, compress_stride, num_selected)


@custom_op("nsa::selected", mutates_args=())
def selected_attention(
    q: Tensor, k: Tensor, v: Tensor, ids: Tensor, cu_seqlens: Tensor, max_seqlen: int,
    select_block: int, dense: bool, deterministic: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Out [N, H, E] and natural lse [N, H] of causal attention to the chosen blocks."""
    docs = attention.documents(cu_seqlens, q.shape[0], max_seqlen, select_block)
    choice = selected.choose_path(ids, q, v, docs, dense=dense, deterministic=deterministic)
    return selected.selected_forward(q, k, v, choice, docs)


@custom_op("nsa::selected_backward", mutates_args=())
def selected_attention_backward(
    q: Tensor, k: Tensor, v: Tensor, ids: Tensor, out: Tensor, lse: Tensor, grad: Tensor,
    cu_seqlens: Tensor, max_seqlen: int, select_block: int, dense: bool, deterministic: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of q, k, v of `selected`; the index is built again rather than kept."""
    docs = attention.documents(cu_seqlens, q.shape[0], max_seqlen, select_block)
    choice = selected.choose_path(ids, q, v, docs, dense=dense, deterministic=deterministic)
    grad = grad.contiguous()
    offset, delta = gates.prepare(grad, out, lse)
    return selected.selected_backward(
        q, k, v, grad, offset, delta, choice, docs, deterministic=deterministic
    )


@custom_op("nsa::attend", mutates_args=())
def attend(
    q: Tensor, k_compressed: Tensor, v_compressed: Tensor, k_selected: Tensor, v_selected: Tensor,
    k_sliding: Tensor, v_sliding: Tensor, gate: Tensor, cu_seqlens: Tensor, max_seqlen: int,
    geometry: list[int], dense: bool, deterministic: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """All of NSA: the three branches, the choice between them and the gated sum.

    `gate` [N, H, 3] weighs (compressed, selected, sliding) and is not negative; `geometry` is
    l, d, l', n, w; `dense` takes the masked-dense selected path instead of the KV-major one.

    Returns:
        out [N, H, E]; the three branch outputs, lse [3, N, H] and ids [N, G, S] for the backward.
    """
    span, stride, block, num_selected, window = geometry
    docs = attention.documents(cu_seqlens, q.shape[0], max_seqlen, block)
    compression = compressed_mode(span, stride)

    into = attention.empty_outputs(q, v_sliding)

    def choose_and_read() -> tuple[Tensor, ...]:
        out_c, lse_c = attention.forward(q, k_compressed, v_compressed, docs, compression)
        ids = select_blocks(q, k_compressed, lse_c, docs, span, stride, num_selected)
        choice = selected.choose_path(
            ids, q, v_selected, docs, dense=dense, deterministic=deterministic
        )
        out_s, lse_s = selected.selected_forward(q, k_selected, v_selected, choice, docs)
        return out_c, lse_c, ids, out_s, lse_s

    out_c, lse_c, ids, out_s, lse_s = run_beside(
        q.device,
        lambda: attention.forward(q, k_sliding, v_sliding, docs, sliding_mode(window), into=into),
        choose_and_read,
    )
    out_w, lse_w = into
    out = gates.mix((out_c, out_s, out_w), gate)
    return out, out_c, out_s, out_w, torch.stack((lse_c, lse_s, lse_w)), ids


@custom_op("nsa::attend_backward", mutates_args=())
def attend_backward(
    grad: Tensor, q: Tensor, keys_values: list[Tensor], gate: Tensor, branches: list[Tensor],
    lse: Tensor, ids: Tensor, cu_seqlens: Tensor, max_seqlen: int,
    geometry: list[int], dense: bool, deterministic: bool,
) -> list[Tensor]:  # fmt: skip
    """Gradients of (q, the three pairs k, v, gate) of `attend`; dq is summed branch by branch."""
    span, stride, block, _, window = geometry
    docs = attention.documents(cu_seqlens, q.shape[0], max_seqlen, block)
    grad = grad.contiguous()
    out_c, out_s, out_w = branches
    offset, delta, dgate = gates.mix_prepare(grad, (out_c, out_s, out_w), lse, gate)
    k_c, v_c, k_s, v_s, k_w, v_w = keys_values
    compression, window_mode = compressed_mode(span, stride), sliding_mode(window)
    rows_c, rows_s, rows_w = ((offset[i], delta[i]) for i in range(3))
    dtype = selected.gradient_dtype(q, v_s, dense=dense, deterministic=deterministic)
    into_c = torch.empty_like(k_c), torch.empty_like(v_c)
    into_w = torch.empty_like(k_w), torch.empty_like(v_w)

    def key_gradients() -> None:
        attention.key_gradient(
            q, k_c, v_c, grad, *rows_c, docs, compression, into_c, deterministic=deterministic
        )
        attention.key_gradient(
            q, k_w, v_w, grad, *rows_w, docs, window_mode, into_w, deterministic=deterministic
        )

    def other_gradients() -> tuple[Tensor, Tensor, Tensor]:
        choice = selected.choose_path(ids, q, v_s, docs, dense=dense, deterministic=deterministic)
        dq = attention.query_gradient(q, k_c, v_c, grad, *rows_c, docs, compression, dtype=dtype)
        dq, dk_s, dv_s = selected.selected_backward(
            q, k_s, v_s, grad, *rows_s, choice, docs, deterministic=deterministic, add_to=dq
        )
        dq = attention.query_gradient(q, k_w, v_w, grad, *rows_w, docs, window_mode, add_to=dq)
        return dq, dk_s, dv_s

    dq, dk_s, dv_s = run_beside(q.device, key_gradients, other_gradients)
    return [dq, *into_c, dk_s, dv_s, *into_w, dgate]


@custom_op("nsa::mean_pool", mutates_args=())
def mean_pool(x: Tensor, cu_seqlens: Tensor, compress_block: int, compress_stride: int) -> Tensor:
    """Means [N // d, G, D] of the compression blocks of x [N, G, D]; unused slots are zero."""
    return pool.pool(x, cu_seqlens, compress_block, compress_stride)


@custom_op("nsa::mean_pool_backward", mutates_args=())
def mean_pool_backward(
    grad: Tensor, cu_seqlens: Tensor, num_tokens: int, compress_block: int, compress_stride: int
) -> Tensor:
    """Gradient of x of `mean_pool`."""
    return pool.pool_gradient(
        grad.contiguous(), cu_seqlens, num_tokens, compress_block, compress_stride
    )


@mean_pool.register_fake
def _fake_mean_pool(
    x: Tensor, cu_seqlens: Tensor, compress_block: int, compress_stride: int
) -> Tensor:
    del cu_seqlens, compress_block
    return x.new_empty(x.shape[0] // compress_stride, *x.shape[1:])


@mean_pool_backward.register_fake
def _fake_mean_pool_backward(
    grad: Tensor, cu_seqlens: Tensor, num_tokens: int, compress_block: int, compress_stride: int
) -> Tensor:
    del cu_seqlens, compress_block, compress_stride
    return grad.new_empty(num_tokens, *grad.shape[1:])


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
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    del k_compressed, v_compressed, v_selected, k_sliding, gate, cu_seqlens, max_seqlen
    del dense, deterministic
    out, out_c, out_s, out_w = (_new_out(q, v_sliding) for _ in range(4))
    lse = q.new_empty(3, q.shape[0], q.shape[1], dtype=torch.float32)
    ids = q.new_empty(q.shape[0], k_selected.shape[1], geometry[3], dtype=torch.int32)
    return out, out_c, out_s, out_w, lse, ids


@attend_backward.register_fake
def _fake_attend_backward(
    grad: Tensor, q: Tensor, keys_values: list[Tensor], gate: Tensor, *_: object
) -> list[Tensor]:
    del grad
    return [torch.empty_like(each) for each in (q, *keys_values, gate)]
