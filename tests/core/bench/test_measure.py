"""What a speed is told with: clocks that are known, and a floor that is the paper's arithmetic."""

import pytest
import torch

from nsa_core.bench.cases import SHAPES
from nsa_core.bench.kernels import KernelRequest, attention_floor, floor_of
from nsa_core.bench.measure import describe_machine, parse_clocks
from nsa_core.config.model import ModelConfig, NSAConfig


def test_clocks_are_read_from_one_line_of_nvidia_smi() -> None:
    assert parse_clocks("570.86.15, 1755, 1980, 2619, 700.00") == {
        "driver": "570.86.15",
        "clock_mhz": 1755.0,
        "max_clock_mhz": 1980.0,
        "memory_clock_mhz": 2619.0,
        "power_limit_w": 700.0,
    }


@pytest.mark.parametrize("cell", ["N/A", "[N/A]", "[Not Supported]", "[Unknown Error]"])
def test_a_clock_that_the_card_does_not_tell_is_unknown_and_not_zero(cell: str) -> None:
    found = parse_clocks(f"570.86.15, {cell}, 1980, {cell}, 700.00")
    assert (found["clock_mhz"], found["memory_clock_mhz"]) == (None, None)
    assert found["max_clock_mhz"] == 1980.0


@pytest.mark.parametrize("line", ["", "No devices were found", "1, 2"])
def test_an_answer_of_another_shape_tells_nothing(line: str) -> None:
    assert set(parse_clocks(line).values()) == {None}


@pytest.mark.skipif(torch.cuda.is_available(), reason="about a machine without a card")
def test_a_machine_without_a_card_says_so() -> None:
    machine = describe_machine()
    assert (machine.card, machine.matmul_tflops, machine.driver) == ("cpu", None, None)
    assert machine.torch == torch.__version__


def test_the_floor_counts_every_visible_key_of_every_branch_once() -> None:
    """Counted token by token from the specification, and not by the closed form of the code."""
    nsa = NSAConfig(compress_block=8, compress_stride=4, select_block=8, num_selected=3, window=10)
    model = ModelConfig(num_heads=6, num_kv_groups=2, head_dim_k=16, head_dim_v=32, nsa=nsa)
    length, tokens = 50, 100
    compressed = selected = sliding = 0
    for t in range(length):
        compressed += sum(1 for i in range(length) if i * 4 + 8 - 1 <= t)
        blocks = min(3, t // 8 + 1)
        selected += (blocks - 1) * 8 + t % 8 + 1
        sliding += sum(1 for s in range(length) if t - 10 < s <= t)
    products = 2 * 6 * (16 + 32) * (compressed + selected + sliding) * tokens / length
    scoring = 2 * 6 * 16 * compressed * tokens / length
    floor = attention_floor(model, length, tokens, tflops=2.0)
    assert floor.fwd_ms == pytest.approx((products + scoring) / 2e12 * 1e3)
    assert floor.fwd_bwd_ms == pytest.approx((3.5 * products + scoring) / 2e12 * 1e3)


@pytest.mark.parametrize(
    ("shape", "length", "fwd_ms", "fwd_bwd_ms"),
    [("A", 2048, 0.35, 1.20), ("A", 8192, 0.49, 1.63), ("A", 65536, 1.24, 3.63)],
)
def test_the_floor_is_that_of_the_published_table(
    shape: str, length: int, fwd_ms: float, fwd_bwd_ms: float
) -> None:
    """Figures of the performance page at 744 TFLOP/s, which are rounded and counted block-wise."""
    floor = floor_of(SHAPES[shape], length, 65536, 744.0)
    assert floor.fwd_ms == pytest.approx(fwd_ms, rel=0.04)
    assert floor.fwd_bwd_ms == pytest.approx(fwd_bwd_ms, rel=0.04)


def test_a_call_that_holds_no_whole_documents_is_refused() -> None:
    with pytest.raises(ValueError, match=r"--length 3000: .*65536 tokens"):
        KernelRequest(("A",), (3000,), 65536, torch.bfloat16, 3)
    with pytest.raises(ValueError, match="--runs must be at least 1"):
        KernelRequest(("A",), (2048,), 65536, torch.bfloat16, 0)
