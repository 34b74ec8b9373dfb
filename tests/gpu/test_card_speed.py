"""The card that is here, used as preflight uses it."""

import pytest
import torch

from nsa_core.checks.card_speed import allocate, measure_card

pytestmark = pytest.mark.gpu


def test_a_card_gives_rates_that_a_card_can_give() -> None:
    found = measure_card(0, torch.float16)
    assert found.name == torch.cuda.get_device_name(0)
    assert found.is_repeatable
    assert found.gemm_tflops is not None
    assert 1 < found.gemm_tflops < 3000
    for rate in (found.copy_gb_s, found.host_to_device_gb_s, found.device_to_host_gb_s):
        assert rate is not None
        assert 1 < rate < 20_000
    assert found.allocated_mib is not None
    assert found.free_mib is not None
    assert found.allocated_mib > 0.85 * found.free_mib
    assert "<nvidia_smi_log>" in found.smi_under_load


def test_more_memory_than_the_card_has_is_an_error_in_cudas_words() -> None:
    _, total = torch.cuda.mem_get_info(0)
    with pytest.raises(torch.OutOfMemoryError):
        allocate(2 * total, torch.device("cuda", 0))
