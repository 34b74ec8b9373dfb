"""Tie every operator of `ops.py` to its backward operator."""

from typing import Any

from torch import Tensor

from nsa_core.kernels.triton import ops

Context = Any  # torch hands its own context object to both halves
_NUM_ATTENDED = 8  # inputs of `attend` with a gradient: q, three pairs of keys and values, gates


def _save_mode(ctx: Context, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, cu_seqlens, *numbers = inputs
    out, lse = output
    ctx.set_materialize_grads(False)  # no zeros for outputs that have no gradient
    ctx.mark_non_differentiable(lse)
    ctx.save_for_backward(q, k, v, out, lse, cu_seqlens)
    ctx.numbers = numbers


def _compressed_backward(ctx: Context, grad: Tensor, _lse: Tensor | None) -> tuple[Any, ...]:
    q, k, v, out, lse, cu_seqlens = ctx.saved_tensors
    grads = ops.compressed_backward(q, k, v, out, lse, grad, cu_seqlens, *ctx.numbers)
    return (*grads, None, *[None] * len(ctx.numbers))


def _sliding_backward(ctx: Context, grad: Tensor, _lse: Tensor | None) -> tuple[Any, ...]:
    q, k, v, out, lse, cu_seqlens = ctx.saved_tensors
    grads = ops.sliding_backward(q, k, v, out, lse, grad, cu_seqlens, *ctx.numbers)
    return (*grads, None, *[None] * len(ctx.numbers))


def _save_selected(ctx: Context, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, ids, cu_seqlens, *numbers = inputs
    out, lse = output
    ctx.set_materialize_grads(False)  # no zeros for outputs that have no gradient
    ctx.mark_non_differentiable(lse)
    ctx.save_for_backward(q, k, v, ids, out, lse, cu_seqlens)
    ctx.numbers = numbers


def _selected_backward(ctx: Context, grad: Tensor, _lse: Tensor | None) -> tuple[Any, ...]:
    q, k, v, ids, out, lse, cu_seqlens = ctx.saved_tensors
    grads = ops.selected_attention_backward(q, k, v, ids, out, lse, grad, cu_seqlens, *ctx.numbers)
    return (*grads, None, None, *[None] * len(ctx.numbers))


def _save_attend(ctx: Context, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, cu_seqlens, max_seqlen, geometry, dense, deterministic = inputs
    ctx.set_materialize_grads(False)  # no zeros for outputs that have no gradient
    ctx.mark_non_differentiable(*output[1:])
    ctx.save_for_backward(*tensors, *output[1:], cu_seqlens)
    ctx.numbers = (max_seqlen, list(geometry), dense, deterministic)


def _attend_backward(ctx: Context, grad: Tensor, *_unused: Tensor | None) -> tuple[Any, ...]:
    kept = ctx.saved_tensors  # once: a checkpoint gives each tensor it made again a single time
    q, *keys_values, gate = kept[:_NUM_ATTENDED]
    *saved, cu_seqlens = kept[_NUM_ATTENDED:]
    grads = ops.attend_backward(grad, q, keys_values, gate, saved, cu_seqlens, *ctx.numbers)
    return (*grads, *[None] * 5)


def register() -> None:
    """Give every forward operator its backward; called once, when the backend is loaded."""
    ops.compressed.register_autograd(_compressed_backward, setup_context=_save_mode)
    ops.sliding.register_autograd(_sliding_backward, setup_context=_save_mode)
    ops.selected_attention.register_autograd(_selected_backward, setup_context=_save_selected)
    ops.attend.register_autograd(_attend_backward, setup_context=_save_attend)
