"""Hold every registered operator against torch's own checks under the interpreter, as JSON.

Its schema must not lie about what it changes, and its fake must say what the real one returns.
"""

import json
import sys

import torch
from torch import Tensor
from torch.library import opcheck

from nsa_core.kernels.triton import ops
from nsa_core.kernels.triton.triton_backend import TritonBackend
from nsa_core.model import loss
from tests.core.kernels_triton.interpreted import GEOMETRY, Inputs

SPAN, STRIDE, BLOCK = GEOMETRY.compress_block, GEOMETRY.compress_stride, GEOMETRY.select_block
SIZES = [SPAN, STRIDE, BLOCK, GEOMETRY.num_selected, GEOMETRY.window]
FAST = ("test_schema", "test_autograd_registration", "test_faketensor")
#: Traces forward and backward and compares them with eager: slow, so for the whole of NSA alone.
TRACED = (*FAST, "test_aot_dispatch_dynamic")
Call = tuple[str, tuple[object, ...], tuple[str, ...]]


def leaves(*tensors: Tensor) -> list[Tensor]:
    """Copies that ask for gradients."""
    return [tensor.clone().requires_grad_() for tensor in tensors]


def branch_calls(x: Inputs) -> dict[str, Call]:
    """The operators of single branches and their gradients."""
    docs = (x.cu, x.packing.max_seqlen, BLOCK)
    out, lse = ops.compressed(x.q, x.kc, x.vc, *docs, SPAN, STRIDE, False)
    window, window_lse = ops.sliding(x.q, x.k, x.v, *docs, GEOMETRY.window)
    choose = (x.q, x.kc, lse, *docs, SPAN, STRIDE, GEOMETRY.num_selected)
    ids = ops.select(*choose)
    chosen, chosen_lse = ops.selected_attention(x.q, x.k, x.v, ids, *docs, False, True)
    compressed, tokens = (x.q, x.kc, x.vc), (x.q, x.k, x.v)
    return {
        "compressed": ("compressed", (*leaves(*compressed), *docs, SPAN, STRIDE, True), FAST),
        "compressed_backward": (
            "compressed_backward",
            (*compressed, out, lse, x.grad, *docs, SPAN, STRIDE, True), FAST,
        ),
        "sliding": ("sliding", (*leaves(*tokens), *docs, GEOMETRY.window), FAST),
        "sliding_backward": (
            "sliding_backward",
            (*tokens, window, window_lse, x.grad, *docs, GEOMETRY.window), FAST,
        ),
        "select": ("select", choose, FAST),
        "selected-dense": ("selected", (*leaves(*tokens), ids, *docs, True, True), FAST),
        "selected-items": ("selected", (*leaves(*tokens), ids, *docs, False, True), FAST),
        "selected_backward": (
            "selected_backward",
            (*tokens, ids, chosen, chosen_lse, x.grad, *docs, False, True), FAST,
        ),
    }  # fmt: skip


def fused_calls(x: Inputs) -> dict[str, Call]:
    """The whole of NSA on both paths of the selected branch, and the loss."""
    tensors, docs = (x.q, x.kc, x.vc, x.k, x.v, x.k2, x.v2, x.gate), (x.cu, x.packing.max_seqlen)
    found: dict[str, Call] = {}
    for name, dense in (("dense", True), ("items", False)):
        _, *saved = ops.attend(*tensors, *docs, SIZES, dense, True)
        found[f"attend-{name}"] = (
            "attend", (*leaves(*tensors), *docs, SIZES, dense, True), FAST if dense else TRACED,
        )  # fmt: skip
        found[f"attend_backward-{name}"] = (
            "attend_backward",
            (x.grad, x.q, list(tensors[1:7]), x.gate, saved, *docs, SIZES, dense, True), FAST,
        )  # fmt: skip
    hidden, weight = torch.randn(7, 4), torch.randn(5, 4)
    target = torch.tensor([0, 4, -1, 2, 3, 1, -1])
    found["cross_entropy"] = ("cross_entropy", (hidden, weight, target, True, True), FAST)
    return found


def check(call: Call) -> dict[str, str]:
    """What torch says, by check; empty where it is content."""
    name, arguments, wanted = call
    operator = getattr(torch.ops.nsa, name).default
    said = opcheck(
        operator, arguments, test_utils=wanted, raise_exception=False, rtol=1e-5, atol=1e-5
    )
    return {test: "" if word == "SUCCESS" else str(word)[:500] for test, word in said.items()}


def unwritten_words(x: Inputs) -> int:
    """Words of a deterministic run's index that nobody wrote; torch fills those with the most."""
    torch.use_deterministic_algorithms(mode=True)
    *_, words, _ = ops.attend(
        x.q, x.kc, x.vc, x.k, x.v, x.k2, x.v2, x.gate,
        x.cu, x.packing.max_seqlen, SIZES, False, True,
    )  # fmt: skip
    torch.use_deterministic_algorithms(mode=False)
    return int((words == torch.iinfo(torch.int32).max).sum())


def registered() -> list[str]:
    """Operators of this project that torch knows."""
    names = torch._C._dispatch_get_all_op_names()
    return sorted({name.removeprefix("nsa::") for name in names if name.startswith("nsa::")})


if __name__ == "__main__":
    torch.set_num_threads(1)
    assert TritonBackend.name and loss.__name__  # both modules register operators
    x = Inputs([20, 3], 2, 1, 16, 16)
    calls = {**branch_calls(x), **fused_calls(x)}
    wanted = sys.argv[1:]
    report = {
        "checks": {name: check(calls[name]) for name in calls if not wanted or name in wanted},
        "left_out": sorted(set(registered()) - {name for name, *_ in calls.values()}),
        "unwritten_words": unwritten_words(x),
    }
    sys.stdout.write(json.dumps(report))
