"""The launches that the compile gate judges, recorded from the host code that makes them."""

from collections.abc import Iterator
from dataclasses import replace
from unittest import mock

import torch

from nsa_core.kernels.decode_attention import CachedPairs
from nsa_core.kernels.geometry import BlockGeometry
from nsa_core.kernels.triton import (
    attend_host,
    decode_host,
    one_tile,
    row_terms,
    select,
    selected,
    sources,
)
from nsa_core.kernels.triton.document_slots import Documents, documents
from nsa_core.kernels.triton.hopper import support
from tests.core.kernels_triton.compiling import Recorded, recording

SHAPES = {"A": (12, 2, 64), "B": (64, 4, 128)}
TOKENS, LONGEST, BLOCK = 256, 65536, 64
CORES = 132  # of a Hopper card: into how many slices decode cuts the keys
BATCHES = (1, 16)  # sequences of decode: few and many for the launch table
# Tokens: as many selection blocks as a token may choose, no power of two of them, and the most.
SHORT_CACHES = (1024, 5000, 8192)


def record_all(shape: str, arch: int) -> list[Recorded]:
    """Record every launch that forward and backward of one shape make."""
    heads, groups, width = SHAPES[shape]
    q = torch.zeros(TOKENS, heads, width, dtype=torch.bfloat16)
    k = torch.zeros(TOKENS, groups, width, dtype=torch.bfloat16)
    k_short = torch.zeros(TOKENS // 16, groups, width, dtype=torch.bfloat16)
    rows = torch.zeros(TOKENS, heads)
    packed = torch.zeros(heads, TOKENS + BLOCK, dtype=torch.int64)
    planes = torch.zeros(2, heads, TOKENS + BLOCK)
    gate = torch.zeros(TOKENS, heads, 3, dtype=torch.bfloat16)
    ids = torch.zeros(TOKENS, groups, 16, dtype=torch.int32)
    borders = torch.tensor([0, TOKENS], dtype=torch.int32)
    with recording(arch) as launches:
        docs = documents(borders, TOKENS, LONGEST, BLOCK)
        for few_blocks in (64, 0):
            with mock.patch.object(select, "_FEW_BLOCKS", few_blocks):
                select.select_blocks(q, k_short, rows, docs, 32, 16, 16)
        branches, terms = [], row_terms.RowTerms(rows, rows, packed)
        pairs = ((sources.compressed_mode(32, 16), k_short), (sources.sliding_mode(512), k))
        for mode, keys in pairs:
            branches.append(sources.GradientSource(mode, keys, keys, terms))
            attend_host.forward(q, keys, keys, docs, mode, (q, rows))
            attend_host.query_gradient(q, q, branches[-1:], docs)
            for deterministic in (False, True):
                attend_host.key_gradient(
                    q, q, branches[-1], docs, (keys, keys), deterministic=deterministic
                )
        short = documents(borders, TOKENS, TOKENS, BLOCK)
        attend_host.forward(q, k_short, k_short, short, pairs[0][0], (q, rows))
        attend_host.query_gradient(q, q, branches, docs, dtype=torch.float32)
        for dense, deterministic in ((True, False), (False, False), (False, True)):
            words = selected.invert(ids, q, k, docs, dense=dense, deterministic=deterministic)
            choice = selected.open_choice(ids, words, q, k, docs, dense=dense)
            selected.selected_forward(q, k, k, choice, docs, (q, rows))
            selected.selected_backward(
                q, k, k, q, terms, choice, docs, (k, k), deterministic=deterministic
            )
            if arch == 90 and width == support.ITEM_WIDTH and not (dense or deterministic):
                for one in (docs, short):
                    record_items(q, k, terms, choice, one)
            chosen = selected.chosen_source(k, k, terms, choice)
            if chosen is not None:
                attend_host.query_gradient(q, q, (*branches, chosen), docs)
                branches.append(chosen)
        row_terms.mix((q, q, q), gate)
        for is_planes in (False, True) if arch == 90 else (False,):
            row_terms.prepare(q, q, rows, docs, planes=is_planes)
            lse = torch.zeros(3, TOKENS, heads)
            row_terms.mix_prepare(q, (q, q, q), lse, gate, docs, planes=is_planes)
        if arch == 90:
            record_one_tile(q, k_short, rows, borders)
            record_hopper(q, branches, row_terms.RowTerms(rows, rows, planes), docs)
    return launches


def record_decode(shape: str, arch: int, batch: int, tokens: int = LONGEST) -> list[Recorded]:
    """Record what one token launches with caches of so many; the buffers take no memory."""
    heads, groups, width = SHAPES[shape]

    def pair(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        one = torch.zeros(1, dtype=torch.bfloat16).expand(batch, rows, groups, width)
        return one, one

    geometry = BlockGeometry(32, 16, 64, 16, 512)
    pairs = CachedPairs(pair(geometry.num_cached(tokens)), pair(tokens), pair(512))
    q = torch.zeros(batch, heads, width, dtype=torch.bfloat16)
    gate, position = torch.zeros(batch, heads, 3), torch.zeros(batch, dtype=torch.int64)
    with recording(arch) as launches, mock.patch.object(decode_host, "num_cores", lambda _: CORES):
        decode_host.TritonDecode().attend(q, pairs, gate, position, geometry)
    return launches


def record_one_tile(
    q: torch.Tensor, k: torch.Tensor, lse: torch.Tensor, borders: torch.Tensor
) -> None:
    """Record compressed attention with the choice, for short documents and the longest of them."""
    for longest in (1024, 2048):
        docs = documents(borders, TOKENS, longest, BLOCK)
        one_tile.attend_and_choose(q, k, k, docs, 32, 16, 16, (q, lse))


def record_items(
    q: torch.Tensor,
    k: torch.Tensor,
    terms: row_terms.RowTerms,
    choice: selected.BlockChoice,
    docs: Documents,
) -> None:
    """Record the Gluon backward of items."""
    assert choice.index is not None
    sums = torch.zeros(q.shape), torch.zeros(k.shape), torch.zeros(k.shape)
    attend_host.hopper("item_backward").add_items(
        q, k, k, q, terms, choice.index, docs, sums, 2 * CORES
    )


def record_hopper(
    q: torch.Tensor,
    branches: list[sources.GradientSource],
    terms: row_terms.RowTerms,
    docs: Documents,
) -> None:
    """Record the Gluon kernels that walk over keys: gradients, and the forward of wide heads.

    A deterministic key gradient only stores where this one adds.
    """
    given = [replace(branch, terms=terms) for branch in branches]
    for branch in given:
        into = torch.zeros_like(branch.k), torch.zeros_like(branch.v)
        attend_host.key_gradient(q, q, branch, docs, into, deterministic=False)
    for branch in given if q.shape[2] in support.FORWARD else ():
        into = torch.zeros_like(q), torch.zeros(q.shape[:2])
        attend_host.hopper("forward").forward(q, branch.k, branch.v, docs, branch.mode, into)
    for part in (given[:2], given):
        for dtype in (q.dtype, torch.float32):
            attend_host.hopper("query_gradient").query_gradient(q, q, part, docs, dtype=dtype)


#: sm_80 shares its tables with sm_89, which has less shared memory: the wide shape is tried there.
JOBS = (("A", 80), ("B", 89), ("A", 90), ("B", 90))


def without_parts(launches: list[Recorded]) -> list[Recorded]:
    """All but query gradients of one or two branches, which hold less than that of three."""

    def num_branches(launch: Recorded) -> int:
        return sum(value is True for name, value in launch.constants if name.startswith("HAS_"))

    name = "attend_query_gradient_kernel"
    return [one for one in launches if one.kernel.__name__ != name or num_branches(one) == 3]


def gated(shape: str, arch: int) -> list[Recorded]:
    """The launches of one job."""
    launches = record_all(shape, arch)
    decode = [one for batch in BATCHES for one in record_decode(shape, arch, batch)]
    if (shape, arch) == ("A", 90):
        decode += [one for tokens in SHORT_CACHES for one in record_decode(shape, arch, 1, tokens)]
    return (launches if arch == 90 else without_parts(launches)) + decode


def all_launches() -> Iterator[tuple[Recorded, int]]:
    """Every launch of every job, with its card."""
    for shape, arch in JOBS:
        for launch in gated(shape, arch):
            yield launch, arch
