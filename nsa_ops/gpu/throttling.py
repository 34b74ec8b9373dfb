"""What holds the clocks of a card back, as heartbeats and logs say it; pure."""

import re

#: Bits of nvidia-smi's `clocks_throttle_reasons.active` (NVML, nvmlClocksThrottleReasons). Idle
#: clocks, clocks that were set, and cards that wait for one another are no slowdown of this card.
_REASONS = {
    0x04: "sw_power_cap",
    0x08: "hw_slowdown",
    0x20: "sw_thermal_slowdown",
    0x40: "hw_thermal_slowdown",
    0x80: "hw_power_brake_slowdown",
}
_MASK = re.compile(r"0x[0-9a-f]{1,16}")
_NOTHING = {"", "none", "0"}


def name_throttling(value: str | None) -> str:
    """What holds the clocks back: the names in a mask, or the words themselves; empty if nothing.

    The trainer writes the mask as nvidia-smi prints it, such as `0x0000000000000004`; other
    trainers write words.
    """
    words = (value or "").strip()
    if words.lower() in _NOTHING:
        return ""
    if not _MASK.fullmatch(words.lower()):
        return words
    mask = int(words, 16)
    return ", ".join(name for bit, name in _REASONS.items() if mask & bit)
