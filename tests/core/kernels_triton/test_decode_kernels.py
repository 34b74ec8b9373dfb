"""The decode kernels: under the interpreter beside plain PyTorch, and compiled for every card."""

import re
from dataclasses import replace
from unittest import mock

import pytest
import torch

pytest.importorskip("triton", reason="the Triton kernels need the train extra")

from nsa_core.kernels.backend import BranchBackends
from nsa_core.kernels.decode_attention import CachedPairs
from nsa_core.kernels.dispatch import choose_decode_attention
from nsa_core.kernels.gathered_backend import GatheredBackend
from nsa_core.kernels.geometry import BlockGeometry
from nsa_core.kernels.triton.decode_host import TritonDecode
from nsa_core.kernels.triton.decode_launch import (
    ShortLaunch,
    decode_launch,
    plan_ranking,
    plan_slices,
)
from nsa_core.kernels.triton.launch import MAX_SHARED_BYTES
from nsa_core.kernels.triton.triton_backend import TritonBackend
from tests.core.kernels_triton import gate_record
from tests.core.kernels_triton.compiling import Recorded, compile_launch, recording
from tests.core.kernels_triton.gate_launches import BATCHES, JOBS, SHORT_CACHES, record_decode

INTERPRETED = "interpreted_decode"
INPUTS = (
    "heads-6", "heads-5", "heads-1", "heads-16", "one-block", "quarters", "fine",
    "power-of-two", "few-tokens", "float16", "ties", "ties-of-many", "alone",
)  # fmt: skip
CASES = tuple(form + case for case in INPUTS for form in ("", "short-"))
# float32 against float64: rounding alone gives 2e-7 on these sizes; float16 rounds the output
# (half an ulp: 2.4e-4) and the probabilities before the second product (the same again).
TOLERANCES = {"float16": 5e-4, "short-float16": 5e-4}
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

    pairs = CachedPairs(pair(GEOMETRY.num_cached(capacity)), pair(capacity), pair(512))
    q = torch.zeros(batch, heads, width, dtype=dtype)
    gate = torch.zeros(batch, heads, 3)
    return q, pairs, gate, torch.zeros(batch, dtype=torch.int64), GEOMETRY


def record(arch: int, *arguments) -> list[Recorded]:
    with recording(arch) as launches:
        TritonDecode().attend(*arguments)
    return launches


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize(("shape", "arch"), JOBS)
def test_no_launch_spills(shape: str, arch: int, batch: int) -> None:
    launches = record_decode(shape, arch, batch)
    assert [one.kernel.__name__ for one in launches] == [
        "partial_cached_kernel", "rank_blocks_kernel", "partial_chosen_kernel", "merge_kernel",
    ]  # fmt: skip
    for one in launches:
        stack_bytes = gate_record.look_up(one, arch).stack_bytes
        assert stack_bytes == 0, f"{one.name} spills {stack_bytes} bytes"


@pytest.mark.parametrize("tokens", SHORT_CACHES)
def test_the_short_form_spills_nothing(tokens: int) -> None:
    launches = record_decode("A", 90, batch=1, tokens=tokens)
    assert [one.kernel.__name__ for one in launches] == ["partial_short_kernel", "merge_kernel"]
    for one in launches:
        verdict = gate_record.look_up(one, 90)
        assert (verdict.stack_bytes, verdict.serialised) == (0, 0), one.name


@pytest.mark.parametrize(("arch", "overlaps"), [(80, False), (89, False), (90, True)])
def test_launches_overlap_from_hopper_on(arch: int, overlaps: bool) -> None:
    first, *later = record_decode("A", arch, batch=1)
    assert "launch_pdl" not in dict(first.options)
    assert [dict(one.options).get("launch_pdl", False) for one in later] == [overlaps] * 3
    assert {dict(one.constants)["OVERLAPPED"] for one in (first, *later)} == {overlaps}


@pytest.mark.slow
def test_nothing_that_an_earlier_launch_wrote_is_read_before_the_wait() -> None:
    """Position, queries and gates were there before the first launch; K and V are not read."""
    first, *later = [compile_launch(one, 90).ptx for one in record_decode("A", 90, batch=1)]
    assert "griddepcontrol.launch_dependents" in first
    assert "griddepcontrol.wait" not in first
    for ptx, name, begins in zip(later, ("rank", "chosen", "merge"), (1, 1, 0), strict=True):
        assert ptx.count("griddepcontrol.wait") == 1, name
        assert ptx.count("griddepcontrol.launch_dependents") == begins, name
        before, after = ptx.split("griddepcontrol.wait")
        assert "st.global" not in before, name
        assert "cp.async" not in before, name
        # One of position; four of queries as well; three gates.
        assert before.count("ld.global") <= {"rank": 1, "chosen": 5, "merge": 3}[name], name
        assert "st.global" in after, name


@pytest.mark.slow
@pytest.mark.parametrize("tokens", SHORT_CACHES)
def test_no_load_of_the_short_form_waits_for_another(tokens: int) -> None:
    """A store into shared memory between two loads makes the second wait for the first one."""
    launch, merge = record_decode("A", 90, 1, tokens)
    machine, constants = compile_launch(launch, 90), dict(launch.constants)
    bytes_at_once = 16 * 32 * dict(launch.options)["num_warps"]
    ranked = constants["BLOCKS"] * 64 // 16 * 64 * 2 // bytes_at_once
    chosen = 2 * 64 * 64 * 2 // bytes_at_once  # keys and values of a block
    order = [code for code in machine.opcodes() if code.startswith(("LDG", "STS"))]
    runs = [
        [code for code in run.split() if code.startswith("LDG")]
        for run in re.split(r"(?:STS\S* ?)+", " ".join(order))
    ]
    # Before the keys that are ranked only the position is read, behind them the queries, twice.
    assert runs[0][1 : 1 + ranked] == ["LDG.E.128"] * ranked
    assert len(runs[0]) == 1 + ranked + 2
    assert runs[1:].count(["LDG.E.128"] * chosen) == 1, runs
    assert machine.ptx.count("griddepcontrol.launch_dependents") == 1
    assert "griddepcontrol.wait" not in machine.ptx
    before, after = compile_launch(merge, 90).ptx.split("griddepcontrol.wait")
    assert before.count("ld.global") <= 3
    assert "st.global" in after


@pytest.mark.slow
def test_the_short_form_compares_each_pair_of_blocks_on_one_thread() -> None:
    """In the layout of the product four threads would make every comparison (docs/decode.md)."""
    launch, _ = record_decode("A", 90, 1, 8192)
    threads = 32 * dict(launch.options)["num_warps"]
    compared = compile_launch(launch, 90).ptx.count("setp.gt.s64")
    assert 0 < compared <= 128 * 128 // threads


def test_the_merge_reads_gates_that_nothing_copied_behind_the_first_launch() -> None:
    """A copy between two launches would end after the next one has read what it wrote."""
    arguments = list(inputs(1, 12, 2, 64))
    arguments[2] = torch.zeros(1, 3, 12).transpose(1, 2)
    copied_after = []

    def watch(gate: torch.Tensor) -> torch.Tensor:
        copied_after.append(len(launches))
        return plain(gate)

    plain = torch.Tensor.contiguous
    with recording(90) as launches, mock.patch.object(torch.Tensor, "contiguous", watch):
        TritonDecode().attend(*arguments)
    assert set(copied_after) == {0}
    assert len(launches) == 4


def test_few_sequences_on_hopper_have_a_launch_of_their_own() -> None:
    device = torch.device("cuda")
    with recording(90):
        narrow = [decode_launch(device, 64, 64, pairs) for pairs in (2, 16, 17, 2048)]
        wide = {decode_launch(device, 64, 128, pairs) for pairs in (2, 2048)}
    assert [row.programs_per_core for row in narrow] == [8, 8, 6, 6]
    assert [row.ranked_blocks for row in narrow] == [64, 64, 32, 32]
    assert len(wide) == 1


SHORT = ShortLaunch(4, keys=64, warps=8, stages=2)


@pytest.mark.parametrize(
    ("changes", "num_blocks", "pairs", "dtype", "is_short"),
    [
        ({}, 128, 2, torch.bfloat16, True),
        ({}, 1, 1, torch.float16, True),
        ({}, 128, 4, torch.bfloat16, True),
        ({}, 128, 5, torch.bfloat16, False),  # 81,920 comparisons
        ({}, 65, 5, torch.bfloat16, False),  # the same: a tile of 128
        ({}, 64, 16, torch.bfloat16, True),
        ({}, 16, 16, torch.bfloat16, True),
        ({}, 16, 17, torch.bfloat16, False),
        ({}, 129, 2, torch.bfloat16, False),
        ({}, 128, 2, torch.float32, False),
        ({"compress_stride": 8}, 128, 2, torch.bfloat16, False),  # 1,024 compressed keys
        ({"compress_stride": 8}, 64, 2, torch.bfloat16, True),
        ({"select_block": 48, "compress_stride": 16}, 64, 2, torch.bfloat16, False),
        ({"num_selected": 65}, 128, 2, torch.bfloat16, False),  # 65 slices of chosen blocks
        ({"compress_stride": 2}, 16, 1, torch.bfloat16, True),
        # A tile holds 16 blocks at least, and those have 1,024 compressed keys.
        ({"compress_stride": 1}, 8, 1, torch.bfloat16, False),
        ({}, 128, 0, torch.bfloat16, True),
    ],
)
def test_a_cache_is_short_that_a_program_ranks_at_once(
    changes, num_blocks, pairs, dtype, is_short
) -> None:
    assert SHORT.serves(replace(GEOMETRY, **changes), num_blocks, pairs, dtype) is is_short


@pytest.mark.parametrize(
    ("batch", "arch", "capacity", "count"),
    [(2, 90, 8192, 2), (3, 90, 8192, 4), (8, 90, 4096, 2), (9, 90, 2048, 4), (1, 90, 8193, 4),
     (1, 89, 8192, 4)],
)  # fmt: skip
def test_few_short_caches_take_two_launches_on_hopper(batch, arch, capacity, count) -> None:
    assert len(record(arch, *inputs(batch, 12, 2, 64, capacity=capacity))) == count


@pytest.mark.parametrize(
    ("capacity", "rows", "is_full"),
    [(8192, 512, True), (8192, 511, False), (8192, 513, False), (8191, None, True),
     (8000, None, False), (2048, None, True), (1985, None, True), (1984, None, False),
     (64, None, False)],
)  # fmt: skip
def test_keys_are_ranked_without_a_mask_only_where_the_buffer_has_them(
    capacity: int, rows: int | None, *, is_full: bool
) -> None:
    """None: as many rows as the cache reserves, those of whole selection blocks."""
    q, pairs, *others = inputs(1, 12, 2, 64, capacity=capacity)
    if rows is not None:
        k, v = (x[:, :1].expand(-1, rows, -1, -1) for x in pairs.compressed)
        pairs = replace(pairs, compressed=(k, v))
    assert dict(record(90, q, pairs, *others)[0].constants)["IS_FULL"] is is_full


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_other_types_and_widths_compile(dtype: torch.dtype) -> None:
    for one in record(89, *inputs(1, 16, 1, 128, dtype=dtype, value_width=64)):
        machine = compile_launch(one, 89)
        assert machine.shared_bytes <= MAX_SHARED_BYTES[89], one.name


@pytest.mark.parametrize("capacity", [8192, 65_536])
def test_no_sequence_at_all_is_decoded_to_nothing(capacity: int) -> None:
    with recording(90):
        found = TritonDecode().attend(*inputs(0, 12, 2, 64, capacity=capacity))
    assert found.out_BHE.shape == (0, 12, 64)
    assert found.ids_BGS.shape == (0, 2, 16)


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
    ("num_blocks", "ranked", "tiles", "is_counted"),
    [(1, 64, 1, True), (128, 64, 2, True), (128, 32, 4, True), (256, 32, 8, False),
     (1024, 32, 16, False)],
)  # fmt: skip
def test_few_candidates_are_chosen_by_counting(num_blocks, ranked, tiles, is_counted) -> None:
    ranking = plan_ranking(num_blocks, 16, ranked)
    assert (ranking.tiles, ranking.is_counted) == (tiles, is_counted)
    assert ranking.tiles * ranking.blocks >= num_blocks


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
