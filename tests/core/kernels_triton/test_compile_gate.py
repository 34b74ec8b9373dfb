"""Every launch of the tables compiles for the cards we name, within their shared memory.

No card is needed: the host code is run with its launches recorded, and each is compiled by ptxas,
now, or when it was last changed (gate_record.py).
"""

import ast
from dataclasses import replace

import pytest

pytest.importorskip("triton", reason="the Triton kernels need the train extra")

import triton
import triton.language as tl

from nsa_core.kernels.triton.launch import MAX_SHARED_BYTES
from tests.core.kernels_triton import gate_record
from tests.core.kernels_triton.compiling import Recorded, compile_launch, find_serialised
from tests.core.kernels_triton.gate_launches import JOBS, all_launches, gated, record_all

SHIFT = tl.constexpr(1)
#: Kernels of the main shape on sm_90 that are promised to keep everything in registers.
NEVER_SPILL = (
    "attend_forward_kernel", "attend_query_gradient_kernel", "attend_key_gradient_kernel",
    "item_forward_kernel", "merge_forward_kernel", "merge_query_gradient_kernel", "score_kernel",
    "top_blocks_kernel", "top_few_blocks_kernel", "one_tile_kernel", "hopper_item_backward_kernel",
)  # fmt: skip
#: A cap on registers may cost this much stack where it was measured to be the faster choice.
MAX_CAPPED_STACK_BYTES = 64


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "arch"), JOBS)
def test_every_launch_fits_the_card(shape: str, arch: int) -> None:
    for launch in gated(shape, arch):
        verdict = gate_record.look_up(launch, arch)
        assert verdict.shared_bytes <= MAX_SHARED_BYTES[arch], launch.name
        assert verdict.serialised == 0, f"{launch.name}: products wait for one another"
        if (shape, arch) != ("A", 90):
            continue
        if launch.kernel.__name__ in NEVER_SPILL:
            limit = MAX_CAPPED_STACK_BYTES if "maxnreg" in dict(launch.options) else 0
            assert verdict.stack_bytes <= limit, f"{launch.name} spills {verdict.stack_bytes} bytes"


def test_the_record_holds_every_launch_and_no_other() -> None:
    if gate_record.recorded_version() != triton.__version__:
        pytest.skip("another Triton than the record's: the gate compiles everything")
    launched = {gate_record.digest(launch, arch) for launch, arch in all_launches()}
    assert launched == set(gate_record.read_record()), f"run `{gate_record.COMMAND}`"


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "arch"), JOBS)
def test_a_sample_of_the_record_is_what_ptxas_says_now(shape: str, arch: int) -> None:
    held = gate_record.read_record()
    launches = {gate_record.digest(launch, arch): launch for launch in gated(shape, arch)}
    sampled = [key for key in launches if key in held and gate_record.is_sampled(key)]
    for key in sampled:
        assert gate_record.compile_verdict(launches[key], arch) == held[key], launches[key].name
    assert sampled or gate_record.recorded_version() != triton.__version__


@triton.jit
def callee(x, FACTOR: tl.constexpr):
    return x * FACTOR + SHIFT


@triton.jit
def caller_kernel(X, FACTOR: tl.constexpr):
    tl.store(X, callee(tl.load(X), FACTOR))


def test_the_digest_follows_whatever_decides_machine_code(monkeypatch) -> None:
    launch = Recorded(caller_kernel, (("X", "*fp32"),), (("FACTOR", 2),), (("num_warps", 4),))
    digests = {gate_record.digest(launch, 90), gate_record.digest(launch, 89)}
    digests.add(gate_record.digest(replace(launch, constants=(("FACTOR", 3),)), 90))
    digests.add(gate_record.digest(replace(launch, options=(("num_warps", 8),)), 90))
    digests.add(gate_record.digest(replace(launch, signature=(("X", "*bf16"),)), 90))
    monkeypatch.setitem(globals(), "SHIFT", tl.constexpr(2))
    digests.add(gate_record.digest(launch, 90))
    monkeypatch.setattr(callee, "parse", lambda: ast.parse("def callee(x, FACTOR): return x"))
    digests.add(gate_record.digest(launch, 90))
    monkeypatch.setattr(triton, "__version__", "0")
    digests.add(gate_record.digest(launch, 90))
    assert len(digests) == 8


@pytest.mark.parametrize("cells", [2, 64, 512])
def test_top_blocks_compiles_for_long_documents(cells: int) -> None:
    (launch,) = [one for one in record_all("A", 90) if one.kernel.__name__ == "top_blocks_kernel"]
    constants = tuple({**dict(launch.constants), "CELLS": cells}.items())
    assert compile_launch(replace(launch, constants=constants), 90).stack_bytes == 0


@pytest.mark.parametrize("blocks", [32, 64])
def test_top_few_blocks_holds_its_scores_in_registers(blocks: int) -> None:
    few = [one for one in record_all("A", 90) if one.kernel.__name__ == "top_few_blocks_kernel"]
    constants = tuple({**dict(few[0].constants), "BLOCKS": blocks}.items())
    assert compile_launch(replace(few[0], constants=constants), 90).stack_bytes == 0


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
