"""The decode kernels: under the interpreter beside plain PyTorch, and compiled for every card."""

import pytest
import torch

pytest.importorskip("triton", reason="the Triton kernels need the train extra")

from nsa_core.kernels.backend import BranchBackends
from nsa_core.kernels.decode_attention import CachedPairs
from nsa_core.kernels.dispatch import choose_decode_attention
from nsa_core.kernels.gathered_backend import GatheredBackend
from nsa_core.kernels.geometry import BlockGeometry
from nsa_core.kernels.triton.decode_host import TritonDecode
from nsa_core.kernels.triton.decode_plan import plan_slices
from nsa_core.kernels.triton.launch import MAX_SHARED_BYTES
from nsa_core.kernels.triton.triton_backend import TritonBackend
from tests.core.kernels_triton.compiling import Recorded, compile_launch, recording

INTERPRETED = "interpreted_decode"
CASES = (
    "heads-6", "heads-5", "heads-1", "heads-16", "one-block", "quarters", "fine",
    "short-cache", "float16", "ties", "alone",
    "single", "single-fine", "single-ties", "lean",
)  # fmt: skip
# float32 against float64: rounding alone gives 2e-7 on these sizes; float16 rounds the output
# (half an ulp: 2.4e-4) and the probabilities before the second product (the same again).
TOLERANCES = {"float16": 5e-4}
TOLERANCE = 1e-6
GEOMETRY = BlockGeometry(32, 16, 64, 16, 512)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_kernels_agree_with_plain_pytorch(
    interpreted: dict[str, dict[str, float]], case: str
) -> None:
    for quantity, error in interpreted[case].items():
        limit = TOLERANCES.get(case, TOLERANCE) if quantity == "out" else 0.0
        assert error <= limit, f"{case}: {quantity} is off by {error}"


@pytest.mark.slow
def test_no_case_is_left_out(interpreted: dict[str, dict[str, float]]) -> None:
    assert set(interpreted) == set(CASES)


def inputs(batch, heads, groups, width, *, capacity=65_536, dtype=torch.bfloat16, value_width=None):
    """Arguments of `attend` whose buffers take no memory."""

    def pair(rows):
        return tuple(
            torch.zeros(1, dtype=dtype).expand(batch, rows, groups, size)
            for size in (width, value_width or width)
        )

    pairs = CachedPairs(pair(capacity // 16 - 1), pair(capacity), pair(512))
    q = torch.zeros(batch, heads, width, dtype=dtype)
    gate = torch.zeros(batch, heads, 3)
    return q, pairs, gate, torch.zeros(batch, dtype=torch.int64), GEOMETRY


def record(arch: int, *arguments) -> list[Recorded]:
    with recording(arch) as launches:
        TritonDecode().attend(*arguments)
    return launches


@pytest.mark.slow
@pytest.mark.parametrize("arch", [80, 89, 90])
@pytest.mark.parametrize(("heads", "groups", "width"), [(12, 2, 64), (64, 4, 128)])
def test_every_launch_fits_the_card(arch: int, heads: int, groups: int, width: int) -> None:
    launches = record(arch, *inputs(2, heads, groups, width))
    assert [one.kernel.__name__ for one in launches] == [
        "partial_cached_kernel", "rank_blocks_kernel", "partial_chosen_kernel", "merge_kernel",
    ]  # fmt: skip
    for one in launches:
        machine = compile_launch(one, arch)
        assert machine.shared_bytes <= MAX_SHARED_BYTES[arch], one.name
        assert machine.stack_bytes == 0, f"{one.name} spills {machine.stack_bytes} bytes"


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_other_types_and_widths_compile(dtype: torch.dtype) -> None:
    for one in record(89, *inputs(1, 16, 1, 128, dtype=dtype, value_width=64)):
        machine = compile_launch(one, 89)
        assert machine.shared_bytes <= MAX_SHARED_BYTES[89], one.name


def test_a_launch_is_the_same_for_every_position() -> None:
    first = inputs(4, 12, 2, 64)
    second = (*first[:3], torch.full((4,), 60_000), first[4])
    assert record(90, *first) == record(90, *second)


@pytest.mark.parametrize("pairs", [1, 2, 32, 2048])
@pytest.mark.parametrize("rows", [1, 63, 4095, 8191])
def test_slices_cover_all_keys_with_about_the_programs_asked_for(pairs: int, rows: int) -> None:
    slices = plan_slices(rows, GEOMETRY, pairs=pairs, programs=396, tile=64)
    assert slices.chosen * slices.chosen_keys >= 16 * 64
    assert max(slices.compressed, slices.window, slices.chosen) <= 64
    assert min(slices.compressed, slices.window, slices.chosen) >= 1
    assert (slices.compressed + slices.window) * pairs <= max(396 + 2 * pairs, 3 * pairs)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"heads": 34}, "16 heads of a group, got 17"),
        ({"width": 48}, "d_k.*power of two.*48"),
        ({"value_width": 8}, "d_v.*8"),
        ({"dtype": torch.float64}, "float64"),
    ],
)
def test_shapes_that_would_be_computed_wrongly_are_refused(changes, words) -> None:
    sizes = {"batch": 1, "heads": 12, "groups": 2, "width": 64, "capacity": 64} | changes
    with pytest.raises(ValueError, match=words):
        TritonDecode().attend(*inputs(**sizes))


def test_decode_follows_the_policy_of_the_branches() -> None:
    triton, sdpa = TritonBackend(), GatheredBackend()
    assert choose_decode_attention(BranchBackends.of(triton)).name == "triton"
    assert choose_decode_attention(BranchBackends.of(sdpa)).name == "gathered"
    mixed = BranchBackends(sdpa, triton, triton)
    assert choose_decode_attention(mixed).name == "gathered"
    assert choose_decode_attention(BranchBackends(triton, triton, sdpa)).name == "triton"
