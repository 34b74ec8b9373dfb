"""The forms of decode that are not the four launches: what they launch, and their machine code."""

import re
from unittest import mock

import pytest
import torch

pytest.importorskip("triton", reason="the Triton kernels need the train extra")

from nsa_core.kernels.triton import launch as launch_table
from nsa_core.kernels.triton.decode_host import TritonDecode
from nsa_core.kernels.triton.decode_plan import decode_launch, plan_ranking
from nsa_core.kernels.triton.launch import MAX_SHARED_BYTES
from tests.core.kernels_triton import gate_record
from tests.core.kernels_triton.compiling import compile_launch, recording
from tests.core.kernels_triton.gate_launches import JOBS, SHAPES, record_decode
from tests.core.kernels_triton.test_decode_kernels import inputs

#: What a multiprocessor has beside the shared memory of its programs: 1 KB for each of them.
REGISTERS, PROGRAM_BYTES = 65_536, 1024


def test_the_four_launches_are_the_form_until_another_is_measured() -> None:
    with recording(90) as launches:
        TritonDecode().attend(*inputs(1, *SHAPES["A"]))
    assert [one.kernel.__name__ for one in launches] == [
        "partial_cached_kernel", "rank_blocks_kernel", "partial_chosen_kernel", "merge_kernel",
    ]  # fmt: skip
    for one in launches:
        constants = dict(one.constants)
        assert not constants.get("OVERLAPPED", False)
        assert not constants.get("COUNTED", False)
        assert not constants.get("LEAN", False)
        assert [name for name, _ in one.options] == ["num_warps"]


def test_every_launch_but_the_first_may_begin_early() -> None:
    launches = record_decode("A", 90, "overlapped", batch=1)
    assert [dict(one.options).get("launch_pdl", False) for one in launches] == [False] + [True] * 3
    assert all(dict(one.constants)["OVERLAPPED"] for one in launches)


def test_launches_that_overlap_are_refused_before_hopper() -> None:
    with pytest.raises(ValueError, match="sm_90, and this is sm_89"):
        record_decode("A", 89, "overlapped")


def test_counters_are_never_made_by_a_graph() -> None:
    """A capture runs nothing: the counters would hold whatever was in the memory."""
    with (
        mock.patch("torch.cuda.is_current_stream_capturing", lambda: True),
        pytest.raises(RuntimeError, match="make it, then capture"),
    ):
        TritonDecode("single")._counters_of(torch.device("cuda"), 2)


def test_counters_are_kept_for_graphs_that_hold_their_address() -> None:
    decode, device = TritonDecode("single"), torch.device("cpu")
    small = decode._counters_of(device, 2)
    large = decode._counters_of(device, 32)
    assert decode._counters_of(device, 2) is small
    assert decode._counters_of(device, 32) is large
    assert (small == 0).all()


@pytest.mark.slow
def test_nothing_that_an_earlier_launch_wrote_is_read_before_the_wait() -> None:
    """Position, queries and gates were there before the first launch; K and V are not read."""
    first, *later = [
        compile_launch(one, 90) for one in record_decode("A", 90, "overlapped", batch=1)
    ]
    assert "griddepcontrol.wait" not in first.ptx
    for machine, name, begins in zip(later, ("rank", "chosen", "merge"), (1, 1, 0), strict=True):
        assert machine.ptx.count("griddepcontrol.wait") == 1, name
        assert machine.ptx.count("griddepcontrol.launch_dependents") == begins, name
        before, after = machine.ptx.split("griddepcontrol.wait")
        assert "st.global" not in before, name
        assert "cp.async" not in before, name
        # One of position; four of queries as well; three gates.
        assert before.count("ld.global") <= {"rank": 1, "chosen": 5, "merge": 3}[name], name
        assert "st.global" in after, name
    assert "griddepcontrol.launch_dependents" in first.ptx


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "arch"), JOBS)
def test_the_programs_of_the_single_launch_fit_the_card_together(shape: str, arch: int) -> None:
    (launch,) = record_decode(shape, arch, "single")
    options = dict(launch.options)
    assert options["launch_cooperative_grid"]
    verdict = gate_record.read_record().get(gate_record.digest(launch, arch))
    if verdict is None:
        verdict = gate_record.compile_verdict(launch, arch)
    assert verdict.stack_bytes == 0, f"spills {verdict.stack_bytes} bytes"
    width = SHAPES[shape][2]
    with mock.patch.object(launch_table, "device_architecture", lambda _: arch):
        row = decode_launch(torch.device("cuda"), width, width, "single")
    assert options["num_warps"] == row.warps
    shared = (verdict.shared_bytes + PROGRAM_BYTES) * row.resident
    assert shared <= MAX_SHARED_BYTES[arch] + PROGRAM_BYTES
    assert -(-verdict.registers // 8) * 8 * 32 * row.warps * row.resident <= REGISTERS


@pytest.mark.slow
def test_every_report_is_a_release_and_every_wait_an_acquire() -> None:
    (launch,) = record_decode("A", 90, "single")
    check_order(compile_launch(launch, 90).ptx)


def check_order(ptx: str) -> None:
    """Each report is a release behind a barrier; each wait an acquire before one."""
    found = re.findall(r"(bar\.(?:warp\.)?sync|atom\S+|ld\.acquire\S+|[sl][td]\.global|trap)", ptx)
    words = ["bar" if word.startswith("bar") else word for word in found]
    reports = [i for i, word in enumerate(words) if word.startswith("atom")]
    add = "atom.global.gpu.{}.add.u32"
    assert [words[i] for i in reports] == [add.format("release")] * 3 + [add.format("acq_rel")]
    assert [words[i - 1] for i in reports] == ["bar"] * 4
    polls = [i for i, word in enumerate(words) if word == "ld.acquire.gpu.global.u32"]
    # One before the loop, one in it with the trap, then the barrier before anything is read.
    for first in polls[::2]:
        assert words[first : first + 4] == [words[first], words[first], "trap", "bar"]
    assert len(polls) == 6


@pytest.mark.parametrize(
    ("num_blocks", "tiles", "is_counted"),
    [(1, 1, True), (128, 2, True), (256, 4, True), (512, 8, False), (1024, 16, False)],
)
def test_few_candidates_are_chosen_by_counting(num_blocks, tiles, is_counted) -> None:
    ranking = plan_ranking(num_blocks, 16, 64)
    assert (ranking.tiles, ranking.is_counted) == (tiles, is_counted)
