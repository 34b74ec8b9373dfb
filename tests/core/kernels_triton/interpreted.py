"""Run every Triton kernel under the interpreter and print its errors against the oracle as JSON."""

import copy
import json
import sys
from collections.abc import Callable
from typing import Self
from unittest import mock

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from nsa_core.kernels.geometry import BlockGeometry
from nsa_core.kernels.packing import Packing
from nsa_core.kernels.triton import one_tile, ops
from nsa_core.kernels.triton.document_slots import documents
from nsa_core.kernels.triton.triton_backend import TritonBackend
from tests import oracle

GEOMETRY = BlockGeometry(
    compress_block=8, compress_stride=4, select_block=16, num_selected=4, window=24
)
#: l = 4 d = l': a compressed block spills into the next selection block unless it begins with one.
QUARTERS = BlockGeometry(16, 4, 16, 4, 7)
#: l = d: compressed blocks do not overlap, and none spills.
STRIDES = BlockGeometry(8, 8, 32, 4, 31)
Errors = dict[str, float]


class Inputs:
    """Random tensors of packed documents in float32."""

    def __init__(
        self, lengths: list[int], heads: int, groups: int, width: int, value_width: int,
        geometry: BlockGeometry = GEOMETRY,
    ) -> None:  # fmt: skip
        generator = torch.Generator().manual_seed(sum(lengths) + heads)

        def randn(*size: int) -> Tensor:
            return torch.randn(*size, generator=generator)

        self.geometry = geometry
        tokens = sum(lengths)
        slots = tokens // geometry.compress_stride
        borders = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        self.packing = Packing.from_cu_seqlens(borders, max_seqlen=max(lengths), num_tokens=tokens)
        self.cu = borders
        self.q = randn(tokens, heads, width)
        self.k, self.v = randn(tokens, groups, width), randn(tokens, groups, value_width)
        self.k2, self.v2 = randn(tokens, groups, width), randn(tokens, groups, value_width)
        self.kc, self.vc = randn(slots, groups, width), randn(slots, groups, value_width)
        self.grad = randn(tokens, heads, value_width)
        self.gate = torch.rand(tokens, heads, 3, generator=generator)
        self.gate[::7] = 0.0  # such rows take no part in the backward
        self.slot_exists = self._slots(lengths, slots)
        self.kc[~self.slot_exists] = 1e4  # finite garbage that must not count
        self.vc[~self.slot_exists] = 1e4

    def to(self, dtype: torch.dtype) -> Self:
        """The same numbers in another dtype."""
        found = copy.copy(self)
        for name in ("q", "k", "v", "k2", "v2", "kc", "vc", "grad", "gate"):
            setattr(found, name, getattr(self, name).to(dtype))
        return found

    def _slots(self, lengths: list[int], slots: int) -> Tensor:
        exists = torch.zeros(slots, dtype=torch.bool)
        for start, stop in oracle.borders(self.cu):
            count = oracle.num_compressed(
                stop - start, self.geometry.compress_block, self.geometry.compress_stride
            )
            first = start // self.geometry.compress_stride
            exists[first : first + count] = True
        return exists


def compare(
    ours: Callable[..., Tensor], theirs: Callable[..., Tensor], inputs: list[Tensor], grad: Tensor
) -> Errors:
    """Relative errors of the output and of every input's gradient."""
    mine = [x.clone().requires_grad_() for x in inputs]
    out = ours(*mine)
    grads = torch.autograd.grad(out, mine, grad)
    wide = [x.double().requires_grad_() for x in inputs]
    reference = theirs(*wide)
    expected = torch.autograd.grad(reference, wide, grad.double())
    errors = {"out": oracle.relative_error(out.detach(), reference.detach())}
    for index, (got, want) in enumerate(zip(grads, expected, strict=True)):
        errors[f"grad{index}"] = oracle.relative_error(got, want)
    return errors


def compressed_case(x: Inputs) -> Errors:
    """Compressed branch, with its normaliser and untouched unused slots."""
    span, stride = x.geometry.compress_block, x.geometry.compress_stride
    backend = TritonBackend()
    errors = compare(
        lambda q, k, v: backend.compressed(q, k, v, x.geometry, x.packing)[0],
        lambda q, k, v: oracle.compressed(q, k, v, x.cu, span, stride)[0],
        [x.q, x.kc, x.vc], x.grad,
    )  # fmt: skip
    _, lse = backend.compressed(x.q, x.kc, x.vc, x.geometry, x.packing)
    _, expected = oracle.compressed(x.q.double(), x.kc.double(), x.vc.double(), x.cu, span, stride)
    same_nothing = bool((lse.isneginf() == expected.isneginf()).all())
    difference = (lse - expected).masked_fill(expected.isneginf(), 0.0).abs().max()
    errors["lse"] = float(difference) if same_nothing else float("inf")
    k = x.kc.clone().requires_grad_()
    out, _ = backend.compressed(x.q, k, x.vc, x.geometry, x.packing)
    (dk,) = torch.autograd.grad(out, k, x.grad)
    errors["unused"] = float(dk[~x.slot_exists].abs().sum())
    return errors


def select_case(x: Inputs) -> Errors:
    """Chosen ids: how many differ from the rule applied to brute-force scores."""
    span, stride, block = (
        x.geometry.compress_block, x.geometry.compress_stride, x.geometry.select_block,
    )  # fmt: skip
    backend = TritonBackend()
    _, lse = backend.compressed(x.q, x.kc, x.vc, x.geometry, x.packing)
    ids = backend.select(x.q, x.kc, lse, x.geometry, x.packing)
    return {"wrong": float((ids != expected_ids(x, span, stride, block)).sum())}


def one_tile_case(x: Inputs) -> Errors:
    """Compressed attention and the choice in one kernel: the same, and as good, as apart."""
    g = x.geometry
    docs = documents(x.cu, len(x.q), x.packing.max_seqlen, g.select_block)
    sizes = (g.compress_block, g.compress_stride, g.num_selected)
    out, lse = x.q.new_empty(*x.q.shape[:2], x.v.shape[2]), x.q.new_empty(x.q.shape[:2])
    ids = one_tile.attend_and_choose(x.q, x.kc, x.vc, docs, *sizes, (out, lse))
    expected, expected_lse = oracle.compressed(
        x.q.double(), x.kc.double(), x.vc.double(), x.cu, *sizes[:2]
    )
    nothing = expected_lse.isneginf()
    q = torch.zeros_like(x.q)
    tied_lse = torch.empty_like(lse)
    tied = one_tile.attend_and_choose(
        q, x.kc, x.vc, docs, *sizes, (torch.empty_like(out), tied_lse)
    )
    return {
        "out": oracle.relative_error(out, expected),
        "lse": float((lse - expected_lse).masked_fill(nothing, 0.0).abs().max()),
        "nothing": float((lse.isneginf() != nothing).sum()),
        "wrong": float((ids != expected_ids(x, *sizes[:2], g.select_block)).sum()),
        "ties": float((tied != TritonBackend().select(q, x.kc, tied_lse, g, x.packing)).sum()),
    }


def broken_value_case(x: Inputs) -> Errors:
    """A compressed value that is not finite: NaN for who sees it, no bit of it for all others."""
    g = x.geometry
    docs = documents(x.cu, len(x.q), x.packing.max_seqlen, g.select_block)
    start, stop = max(oracle.borders(x.cu), key=lambda border: border[1] - border[0])
    block = oracle.num_compressed(stop - start, g.compress_block, g.compress_stride) // 2
    sees = torch.zeros(len(x.q), dtype=torch.bool)
    sees[start + block * g.compress_stride + g.compress_block - 1 : stop] = True

    def attend(vc: Tensor) -> Tensor:
        out, lse = x.q.new_empty(*x.q.shape[:2], vc.shape[2]), torch.empty(x.q.shape[:2])
        one_tile.attend_and_choose(
            x.q, x.kc, vc, docs, g.compress_block, g.compress_stride, g.num_selected, (out, lse)
        )
        return out

    sound, moved, hidden = attend(x.vc), 0, 0
    for value in (float("nan"), float("inf"), float("-inf")):
        vc = x.vc.clone()
        vc[start // g.compress_stride + block] = value
        out = attend(vc)
        moved += int((out != sound)[~sees].sum())
        hidden += int((~out[sees].isnan()).sum())
    return {"moved": float(moved), "hidden": float(hidden)}


def expected_ids(x: Inputs, span: int, stride: int, block: int) -> Tensor:
    """Ids by the rule from float64 scores."""
    scores = oracle.block_scores(x.q.double(), x.kc.double(), x.cu, span, stride, block)
    return torch.cat([oracle.choose(score, x.geometry.num_selected, block) for score in scores])


def ties_case(x: Inputs) -> Errors:
    """Zero queries make every whole block equal: the lowest indices win."""
    backend = TritonBackend()
    q = torch.zeros_like(x.q)
    _, lse = backend.compressed(q, x.kc, x.vc, x.geometry, x.packing)
    ids = backend.select(q, x.kc, lse, x.geometry, x.packing)
    wrong = 0
    for start, stop in oracle.borders(x.cu):
        for t in range(stop - start):
            current = t // x.geometry.select_block
            forced = {0, max(current - 1, 0), current}
            rest = [j for j in range(current) if j not in forced]
            picked = sorted(forced | set(rest[: x.geometry.num_selected - len(forced)]))
            picked += [-1] * (x.geometry.num_selected - len(picked))
            wrong += int((ids[start + t] != torch.tensor(picked)).any())
    return {"wrong": float(wrong)}


def zeros_case(x: Inputs) -> Errors:
    """A key that outweighs all others: where it is seen, their blocks score 0 to the last bit.

    They are chosen all the same, the lowest indices first.
    """
    lone = copy.copy(x)
    lone.q, lone.kc = torch.ones_like(x.q), torch.zeros_like(x.kc)
    per_block = x.geometry.select_block // x.geometry.compress_stride
    for start, stop in oracle.borders(x.cu):
        if stop - start > 6 * x.geometry.select_block:
            lone.kc[start // x.geometry.compress_stride + 5 * per_block + 1] = 100.0
    return select_case(lone)


def arbitrary_ids(x: Inputs) -> Tensor:
    """Ids that no rule made: any blocks up to the token's own, any number of them, or none."""
    generator = torch.Generator().manual_seed(7)
    ids = torch.full((x.q.shape[0], x.k.shape[1], x.geometry.num_selected), -1, dtype=torch.int32)
    for start, stop in oracle.borders(x.cu):
        for t in range(stop - start):
            blocks = t // x.geometry.select_block + 1
            for g in range(ids.shape[1]):
                order = torch.randperm(blocks, generator=generator)
                count = int(torch.randint(0, x.geometry.num_selected + 1, (), generator=generator))
                picked = order[:count].sort().values
                ids[start + t, g, : len(picked)] = picked.int()
    return ids


def selected_case(x: Inputs, *, dense: bool, deterministic: bool, arbitrary: bool) -> Errors:
    """Selected branch on one path."""
    span, stride, block = (
        x.geometry.compress_block, x.geometry.compress_stride, x.geometry.select_block,
    )  # fmt: skip
    ids = arbitrary_ids(x) if arbitrary else expected_ids(x, span, stride, block)

    def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out, _ = ops.selected_attention(
            q, k, v, ids, x.cu, x.packing.max_seqlen, block, dense, deterministic
        )
        return out

    return compare(
        ours, lambda q, k, v: oracle.selected(q, k, v, ids, x.cu, block), [x.q, x.k, x.v], x.grad
    )


def sliding_case(x: Inputs) -> Errors:
    """Window branch."""
    backend = TritonBackend()
    return compare(
        lambda q, k, v: backend.sliding(q, k, v, x.geometry, x.packing),
        lambda q, k, v: oracle.sliding(q, k, v, x.cu, x.geometry.window),
        [x.q, x.k, x.v], x.grad,
    )  # fmt: skip


def attend_case(x: Inputs, *, dense: bool, deterministic: bool) -> Errors:
    """The fused operator against the gated sum of the three oracles."""
    span, stride, block = (
        x.geometry.compress_block, x.geometry.compress_stride, x.geometry.select_block,
    )  # fmt: skip
    ids = expected_ids(x, span, stride, block)
    sizes = [span, stride, block, x.geometry.num_selected, x.geometry.window]

    def ours(*tensors: Tensor) -> Tensor:
        return ops.attend(
            *tensors, x.cu, x.packing.max_seqlen, sizes, dense, deterministic
        )[0]  # fmt: skip

    def theirs(q, kc, vc, ks, vs, kw, vw, gate) -> Tensor:
        branches = (
            oracle.compressed(q, kc, vc, x.cu, span, stride)[0],
            oracle.selected(q, ks, vs, ids, x.cu, block),
            oracle.sliding(q, kw, vw, x.cu, x.geometry.window),
        )
        return sum(gate[..., i, None] * out for i, out in enumerate(branches))

    tensors = [x.q, x.kc, x.vc, x.k, x.v, x.k2, x.v2, x.gate]
    return compare(ours, theirs, tensors, x.grad)


def apart(case: Callable[[], Errors]) -> Errors:
    """A case with compressed attention, scores and choice in kernels of their own."""
    with mock.patch.object(one_tile, "takes_one_tile", lambda *_: False):
        return case()


def same_bits(
    ours: Callable[..., Tensor], theirs: Callable[..., Tensor], inputs: list[Tensor], grad: Tensor
) -> Errors:
    """Largest difference of the output and of each gradient: 0 where all bits agree."""
    results = []
    for call in (ours, theirs):
        leaves = [x.clone().requires_grad_() for x in inputs]
        out = call(*leaves)
        results.append([out, *torch.autograd.grad(out, leaves, grad)])
    return {
        f"difference{i}": float((a - b).detach().abs().max())
        for i, (a, b) in enumerate(zip(*results, strict=True))
    }


def recomputed_case(x: Inputs) -> Errors:
    """Activation checkpointing: a forward that runs again for the backward keeps every bit."""
    backend = TritonBackend()

    def attend(q, kc, vc, ks, vs, kw, vw, gate) -> Tensor:
        pairs = (kc, vc), (ks, vs), (kw, vw)
        out, _ = backend.attend(q, *pairs, gate, x.geometry, x.packing)
        return out

    def recomputed(*tensors: Tensor) -> Tensor:
        out: Tensor = checkpoint(attend, *tensors, use_reentrant=False, preserve_rng_state=False)
        return out

    inputs = [x.q, x.kc, x.vc, x.k, x.v, x.k2, x.v2, x.gate]
    return same_bits(attend, recomputed, inputs, x.grad)


def compile_case(x: Inputs) -> Errors:
    """torch.compile without a graph break: forward and gradients keep their bits."""
    backend = TritonBackend()

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out, lse = backend.compressed(q, x.kc, x.vc, x.geometry, x.packing)
        ids = backend.select(q, x.kc, lse, x.geometry, x.packing)
        chosen = backend.selected(q, k, v, ids, x.geometry, x.packing)
        window = backend.sliding(q, k, v, x.geometry, x.packing)
        fused, _ = backend.attend(q, (x.kc, x.vc), (k, v), (k, v), x.gate, x.geometry, x.packing)
        return out + chosen + window + fused

    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)
    return same_bits(attend, compiled, [x.q, x.k, x.v], x.grad)


def block_cases(name: str, x: Inputs) -> dict[str, Callable[[], Errors]]:
    """What depends on the block sizes, with others than l = 2 d."""
    return {
        f"{name}-compressed": lambda: compressed_case(x),
        f"{name}-select": lambda: select_case(x),
        f"{name}-one-tile": lambda: one_tile_case(x),
        f"{name}-dense": lambda: attend_case(x, dense=True, deterministic=False),
        f"{name}-ordered": lambda: attend_case(x, dense=False, deterministic=True),
    }


def all_cases() -> dict[str, Callable[[], Errors]]:
    """Every case by name: groups of 6, 5, 1 and 16 heads, odd lengths, empty documents."""
    six = Inputs([37, 5, 74], 12, 2, 16, 16)
    five = Inputs([70, 0, 3], 5, 1, 16, 32)
    single = Inputs([45, 1], 2, 2, 32, 16)
    sixteen = Inputs([83], 16, 1, 16, 16)
    tiny = Inputs([3], 2, 1, 16, 16)
    return {
        **block_cases("quarters", Inputs([5, 83], 2, 1, 16, 16, QUARTERS)),
        **block_cases("strides", Inputs([3, 150], 2, 1, 16, 16, STRIDES)),
        "compressed-6": lambda: compressed_case(six),
        "compressed-5": lambda: compressed_case(five),
        "compressed-1": lambda: compressed_case(single),
        "compressed-nothing": lambda: {
            "out": float(TritonBackend().compressed(
                tiny.q, tiny.kc, tiny.vc, tiny.geometry, tiny.packing)[0].abs().sum())
        },
        "select-6": lambda: select_case(six),
        "select-16": lambda: select_case(sixteen),
        "ties": lambda: ties_case(six),
        "one-tile-6": lambda: one_tile_case(six),
        "one-tile-5": lambda: one_tile_case(five),
        "one-tile-1": lambda: one_tile_case(single),
        "one-tile-16": lambda: one_tile_case(sixteen),
        "one-tile-broken-value": lambda: broken_value_case(six),
        "half-one-tile-broken-value": lambda: broken_value_case(six.to(torch.float16)),
        "sliding-6": lambda: sliding_case(six),
        "sliding-5": lambda: sliding_case(five),
        "sliding-1": lambda: sliding_case(single),
        "dense-6": lambda: selected_case(six, dense=True, deterministic=False, arbitrary=False),
        "dense-5": lambda: selected_case(five, dense=True, deterministic=False, arbitrary=True),
        "items-6": lambda: selected_case(six, dense=False, deterministic=False, arbitrary=False),
        "items-5": lambda: selected_case(five, dense=False, deterministic=False, arbitrary=True),
        "items-16": lambda: selected_case(
            sixteen, dense=False, deterministic=True, arbitrary=True
        ),
        "attend-dense": lambda: attend_case(five, dense=True, deterministic=False),
        "attend-items": lambda: attend_case(six, dense=False, deterministic=False),
        "attend-apart": lambda: apart(
            lambda: attend_case(six, dense=True, deterministic=False)
        ),
        "attend-ordered": lambda: attend_case(five, dense=False, deterministic=True),
        "half-dense": lambda: attend_case(
            single.to(torch.float16), dense=True, deterministic=False
        ),
        "half-ordered": lambda: attend_case(
            single.to(torch.float16), dense=False, deterministic=True
        ),
        "compile": lambda: compile_case(single),
        "recomputed": lambda: recomputed_case(single),
    }  # fmt: skip


if __name__ == "__main__":
    torch.set_num_threads(1)
    wanted = sys.argv[1:]
    results = {name: case() for name, case in all_cases().items() if not wanted or name in wanted}
    sys.stdout.write(json.dumps(results))
