"""Every launch of the tables compiles for the cards we name, within their shared memory.

No card is needed: the host code is run with its launches recorded, and each is compiled by ptxas.
"""

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton", reason="the Triton kernels need the train extra")

from nsa_core.kernels.triton import attend_host, pool, row_terms, select, selected, sources
from nsa_core.kernels.triton.document_slots import Documents, documents
from nsa_core.kernels.triton.launch import MAX_SHARED_BYTES
from tests.core.kernels_triton.compiling import (
    Recorded,
    compile_launch,
    find_serialised,
    recording,
)

SHAPES = {"A": (12, 2, 64), "B": (64, 4, 128)}
TOKENS, LONGEST, BLOCK = 256, 65536, 64
#: Kernels of the main shape on sm_90 that are promised to keep everything in registers.
NEVER_SPILL = (
    "attend_forward_kernel", "attend_query_gradient_kernel", "attend_key_gradient_kernel",
    "item_forward_kernel", "merge_forward_kernel", "merge_query_gradient_kernel", "score_kernel",
    "top_blocks_kernel",
)  # fmt: skip
#: A cap on registers may cost this much stack where it was measured to be the faster choice.
MAX_CAPPED_STACK_BYTES = 64


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
        attend_host.query_gradient(q, q, branches, docs, dtype=torch.float32)
        for dense, deterministic in ((True, False), (False, False), (False, True)):
            words = selected.invert(ids, q, k, docs, dense=dense, deterministic=deterministic)
            choice = selected.open_choice(ids, words, q, k, docs, dense=dense)
            selected.selected_forward(q, k, k, choice, docs, (q, rows))
            selected.selected_backward(
                q, k, k, q, terms, choice, docs, (k, k), deterministic=deterministic
            )
            chosen = selected.chosen_source(k, k, terms, choice)
            if chosen is not None:
                attend_host.query_gradient(q, q, (*branches, chosen), docs)
                branches.append(chosen)
        pool.pool(k, borders, 32, 16)
        pool.pool_gradient(k_short, borders, TOKENS, 32, 16)
        row_terms.mix((q, q, q), gate)
        for is_planes in (False, True) if arch == 90 else (False,):
            row_terms.prepare(q, q, rows, docs, planes=is_planes)
            lse = torch.zeros(3, TOKENS, heads)
            row_terms.mix_prepare(q, (q, q, q), lse, gate, docs, planes=is_planes)
        if arch == 90:
            record_hopper(q, branches, row_terms.RowTerms(rows, rows, planes), docs)
    return launches


def record_hopper(
    q: torch.Tensor,
    branches: list[sources.GradientSource],
    terms: row_terms.RowTerms,
    docs: Documents,
) -> None:
    """Key gradients by the Gluon kernels; a deterministic one only stores where this one adds."""
    for branch in branches:
        into = torch.zeros_like(branch.k), torch.zeros_like(branch.v)
        source = replace(branch, terms=terms)
        attend_host.key_gradient(q, q, source, docs, into, deterministic=False)


#: sm_80 shares its tables with sm_89, which has less shared memory: the wide shape is tried there.
JOBS = (("A", 80), ("B", 89), ("A", 90), ("B", 90))


def without_parts(launches: list[Recorded]) -> list[Recorded]:
    """All but query gradients of one or two branches, which hold less than that of three."""

    def num_branches(launch: Recorded) -> int:
        return sum(value is True for name, value in launch.constants if name.startswith("HAS_"))

    name = "attend_query_gradient_kernel"
    return [one for one in launches if one.kernel.__name__ != name or num_branches(one) == 3]


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "arch"), JOBS)
def test_every_launch_fits_the_card(shape: str, arch: int) -> None:
    launches = record_all(shape, arch)
    for launch in launches if arch == 90 else without_parts(launches):
        machine = compile_launch(launch, arch)
        assert machine.shared_bytes <= MAX_SHARED_BYTES[arch], launch.name
        assert not machine.serialised, f"{launch.name}: {machine.serialised}"
        if (shape, arch) != ("A", 90):
            continue
        if launch.kernel.__name__ in NEVER_SPILL:
            limit = MAX_CAPPED_STACK_BYTES if "maxnreg" in dict(launch.options) else 0
            assert machine.stack_bytes <= limit, f"{launch.name} spills {machine.stack_bytes} bytes"


@pytest.mark.parametrize("cells", [2, 64, 256])
def test_top_blocks_compiles_for_long_documents(cells: int) -> None:
    (launch,) = [one for one in record_all("A", 90) if one.kernel.__name__ == "top_blocks_kernel"]
    constants = tuple({**dict(launch.constants), "CELLS": cells}.items())
    assert compile_launch(replace(launch, constants=constants), 90).stack_bytes == 0


def test_a_kernel_whose_products_wait_for_one_another_is_found() -> None:
    """With too few registers ptxas makes every product wait; the gate reads that."""
    launch = next(
        one for one in record_all("A", 90) if one.kernel.__name__ == "attend_forward_kernel"
    )
    starved = replace(launch, options=(("num_warps", 4), ("maxnreg", 64)))
    assert any("C7511" in message for message in compile_launch(starved, 90).serialised)
    assert compile_launch(launch, 90).serialised == ()


@pytest.mark.parametrize("code", ["C7500", "C7510", "C7512", "C7515", "C7599"])
def test_every_message_about_products_that_wait_counts(code: str) -> None:
    line = f"ptxas info    : ({code}) Potential Performance Loss: wgmma.mma_async instructions are"
    log = f"ptxas info    : 0 bytes gmem\n{line}\nptxas info    : Used 168 registers\n"
    assert find_serialised(log) == (line,)
    assert find_serialised(log.replace(code, "C7602")) == ()


def test_a_compilation_without_a_log_is_no_proof() -> None:
    with pytest.raises(ValueError, match="ptxas said nothing"):
        find_serialised("")


def test_products_of_bfloat16_use_the_tensor_cores_of_hopper() -> None:
    (launch,) = [one for one in record_all("A", 90) if one.kernel.__name__ == "item_forward_kernel"]
    assert "wgmma.mma_async" in compile_launch(launch, 90).ptx
