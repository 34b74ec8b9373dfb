import pytest
import torch

from nsa_core.train.card import (
    CardState,
    parse_card_state,
    peak_flops_per_s,
    query_card,
    read_memory,
)
from nsa_core.train.timing import Meter


def test_a_line_of_nvidia_smi_becomes_numbers():
    line = "97, 412.53, 61, 0x0000000000000004"
    assert parse_card_state(line) == CardState(97.0, 412.53, 61.0, "0x0000000000000004")


def test_unknown_values_of_the_card_are_none_and_never_zero():
    line = "[N/A], [Not Supported], [Unknown Error], [N/A]"
    assert parse_card_state(line) == CardState()


def test_an_empty_answer_gives_an_empty_state():
    assert parse_card_state("") == CardState()


def test_a_cpu_has_no_peak_and_no_card_memory():
    assert peak_flops_per_s(torch.device("cpu"), "bf16") is None
    memory = read_memory(torch.device("cpu"))
    assert memory.gpu_mem_alloc is None
    assert memory.host_rss_mib > 0


def test_the_first_step_is_not_in_the_rate():
    meter = Meter(2.0, 1000.0)
    meter.add(100, 60.0, 0.0)
    assert meter.take().tokens_per_s is None
    meter.add(100, 0.5, 0.5)
    meter.add(100, 1.0, 0.0)
    rate = meter.take()
    assert rate.tokens_per_s == 100
    assert rate.mfu == 100 * 2.0 / 1000.0


def test_utilisation_is_none_on_an_unknown_card():
    meter = Meter(2.0, None)
    meter.add(1, 1.0, 0.0)
    meter.add(100, 1.0, 0.0)
    assert meter.take().mfu is None


def test_steps_that_compile_are_not_in_the_rate():
    meter = Meter(2.0, None, num_warmup_steps=3)
    for _ in range(3):
        assert meter.is_warming_up
        meter.add(100, 60.0, 0.0)
    assert not meter.is_warming_up
    meter.add(100, 1.0, 0.0)
    assert meter.take().tokens_per_s == 100


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ('echo "550.1, $1"', "550.1, --query-gpu=driver_version,clocks.sm"),
        ("echo half; exit 9", ""),
        ("exec sleep 30", ""),
        (None, ""),
    ],
    ids=["answers", "fails", "hangs", "missing"],
)
def test_without_an_answer_of_nvidia_smi_the_text_is_empty(tmp_path, monkeypatch, script, said):
    if script is not None:
        tool = tmp_path / "nvidia-smi"
        tool.write_text(f"#!/bin/sh\n{script}\n")
        tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin" if script else str(tmp_path))
    assert query_card("GPU-1", "driver_version,clocks.sm", timeout_s=1.0) == said
