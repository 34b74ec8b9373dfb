"""Run the decode kernels under the interpreter beside plain PyTorch in float64; errors as JSON."""

import json
import sys
from collections.abc import Callable
from unittest import mock

import torch
from torch import Tensor

from nsa_core.kernels.decode_attention import CachedPairs, GatheredDecode, Pair
from nsa_core.kernels.geometry import BlockGeometry
from nsa_core.kernels.triton.decode_host import TritonDecode
from nsa_core.kernels.triton.decode_launch import ShortLaunch
from tests import oracle

GEOMETRY = BlockGeometry(
    compress_block=8, compress_stride=4, select_block=16, num_selected=5, window=24
)
POISON = 1e4  # finite garbage that must not count
Errors = dict[str, float]


class Inputs:
    """Buffers of some sequences at different positions."""

    def __init__(
        self, positions: list[int], heads: int, groups: int, widths: tuple[int, int],
        *, capacity: int = 200, ring: int = 31, geometry: BlockGeometry = GEOMETRY,
    ) -> None:  # fmt: skip
        generator = torch.Generator().manual_seed(sum(positions) + heads)
        batch = len(positions)
        self.geometry, self.position = geometry, torch.tensor(positions)

        def randn(*size: int) -> Tensor:
            return torch.randn(*size, generator=generator)

        def pair(rows: int) -> Pair:
            k, v = (randn(batch, rows, groups, width) for width in widths)
            return k, v

        self.q = randn(batch, heads, widths[0])
        self.gate = torch.rand(batch, heads, 3, generator=generator)
        self.pairs = CachedPairs(pair(geometry.num_cached(capacity)), pair(capacity), pair(ring))
        for b, position in enumerate(positions):
            for x in self.pairs.compressed:
                x[b, geometry.num_compressed(position + 1) :] = POISON
            for x in self.pairs.selected:
                x[b, position + 1 :] = POISON
            live = torch.arange(max(0, position - geometry.window + 1), position + 1) % ring
            dead = torch.ones(ring, dtype=torch.bool).index_fill_(0, live, value=False)
            for x in self.pairs.sliding:
                x[b, dead] = POISON

    def cast(self, dtype: torch.dtype) -> tuple[Tensor, CachedPairs, Tensor, Tensor, BlockGeometry]:
        """Arguments of `attend` in another dtype."""
        pairs = CachedPairs(
            *(
                (k.to(dtype), v.to(dtype))
                for k, v in (self.pairs.compressed, self.pairs.selected, self.pairs.sliding)
            )
        )
        return self.q.to(dtype), pairs, self.gate.to(dtype), self.position, self.geometry


def compare(inputs: Inputs, dtype: torch.dtype = torch.float32) -> Errors:
    """Errors of the output; ids and counted reads that differ."""
    q, pairs, gate, position, geometry = inputs.cast(dtype)
    found = TritonDecode().attend(q, pairs, gate, position, geometry)
    rounded = [x.double() for x in (q, gate)]
    wide = CachedPairs(
        *((k.double(), v.double()) for k, v in (pairs.compressed, pairs.selected, pairs.sliding))
    )
    wanted = GatheredDecode().attend(rounded[0], wide, rounded[1], position, geometry)
    wrong_reads = sum(
        int((a != b).sum())
        for a, b in zip(found.counted.totals(), wanted.counted.totals(), strict=True)
    )
    formula = [oracle.num_reads(geometry, t) for t in position.tolist()]
    return {
        "out": oracle.relative_error(found.out_BHE, wanted.out_BHE),
        "ids": float((found.ids_BGS != wanted.ids_BGS).sum()),
        "reads": float(wrong_reads),
        "formula": float(sum(found.counted.totals()).ne(torch.tensor(formula)).sum()),
    }


def tied(inputs: Inputs) -> Errors:
    """Zero queries make every block inside equal: the lowest indices win."""
    inputs.q.zero_()
    found = TritonDecode().attend(*inputs.cast(torch.float32))
    wrong = 0
    for b, position in enumerate(inputs.position.tolist()):
        current, chosen = position // GEOMETRY.select_block, GEOMETRY.num_selected
        forced = {0, max(current - 1, 0), current}
        rest = [j for j in range(current) if j not in forced]
        picked = sorted(forced | set(rest[: chosen - len(forced)]))
        picked += [-1] * (chosen - len(picked))
        wrong += int((found.ids_BGS[b] != torch.tensor(picked)).any(dim=-1).sum())
    return {"ids": float(wrong)}


def alone(inputs: Inputs) -> Errors:
    """A sequence's result keeps its bits whatever stands beside it."""
    q, pairs, gate, position, geometry = inputs.cast(torch.float32)
    first = TritonDecode().attend(q, pairs, gate, position, geometry).out_BHE[0]
    q[1:] += 1.0
    second = TritonDecode().attend(q, pairs, gate, position.clone(), geometry).out_BHE[0]
    return {"bits": float((first != second).sum())}


BORDERS = [0, 6, 7, 11, 15, 16, 23, 24, 79, 80, 81, 127, 199]


def in_form(case: Callable[[], Errors], *, short: bool) -> Callable[[], Errors]:
    """A case in one of the two forms, whatever its buffers would get."""

    def run() -> Errors:
        with mock.patch.object(ShortLaunch, "serves", lambda *_: short):
            return case()

    return run


def all_cases() -> dict[str, Callable[[], Errors]]:
    """Groups of 1 to 16 heads, d_k unlike d_v, every border of a position, other block sizes."""
    wide = BlockGeometry(16, 16, 16, 3, 40)
    fine = BlockGeometry(4, 2, 32, 4, 5)
    quarters = BlockGeometry(16, 4, 16, 6, 24)
    return {
        "quarters": lambda: compare(
            Inputs([190, 178, 160, 143, 15], 4, 2, (16, 16), geometry=quarters)
        ),
        "heads-6": lambda: compare(Inputs(BORDERS, 12, 2, (16, 16))),
        "heads-5": lambda: compare(Inputs([530, 90], 5, 1, (16, 32), capacity=540)),
        "heads-1": lambda: compare(Inputs([150, 3], 3, 3, (32, 16))),
        "heads-16": lambda: compare(Inputs([177], 32, 2, (16, 16))),
        "one-block": lambda: compare(Inputs([199, 47, 16], 4, 2, (16, 16), ring=40, geometry=wide)),
        "fine": lambda: compare(Inputs([190, 128, 4], 4, 2, (16, 16), ring=5, geometry=fine)),
        "power-of-two": lambda: compare(Inputs([255, 191, 7], 12, 2, (16, 16), capacity=256)),
        "few-tokens": lambda: compare(Inputs([4, 0], 4, 2, (16, 16), capacity=5)),
        "float16": lambda: compare(Inputs([199, 90], 12, 2, (16, 16)), torch.float16),
        "ties": lambda: tied(Inputs(BORDERS, 6, 1, (16, 16))),
        "ties-of-many": lambda: tied(Inputs([530, 24], 3, 1, (16, 16), capacity=540)),
        "alone": lambda: alone(Inputs([120, 60], 4, 2, (16, 16))),
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(mode=True)  # fills whatever is allocated with NaN
    wanted = sys.argv[1:]
    cases = {}
    for name, case in all_cases().items():
        cases[name] = in_form(case, short=False)
        cases[f"short-{name}"] = in_form(case, short=True)
    results = {name: case() for name, case in cases.items() if not wanted or name in wanted}
    sys.stdout.write(json.dumps(results))
