"""What holds the clocks back, from a mask or from words."""

import pytest

from nsa_ops.gpu.throttling import name_throttling


@pytest.mark.parametrize(
    ("value", "names"),
    [
        (None, ""),
        ("", ""),
        ("none", ""),
        ("None", ""),
        ("0", ""),
        ("0x0000000000000000", ""),
        ("0x0000000000000001", ""),  # idle
        ("0x0000000000000002", ""),  # clocks that were set
        ("0x0000000000000004", "sw_power_cap"),
        ("0x0000000000000028", "hw_slowdown, sw_thermal_slowdown"),
        ("0x00000000000000C0", "hw_thermal_slowdown, hw_power_brake_slowdown"),
        ("sw_thermal_slowdown", "sw_thermal_slowdown"),
        ("power cap", "power cap"),
        ("0x" + "f" * 300, "0x" + "f" * 300),  # no mask of a card
    ],
)
def test_a_mask_names_what_slows_the_card_and_words_stay(value: str | None, names: str) -> None:
    assert name_throttling(value) == names
