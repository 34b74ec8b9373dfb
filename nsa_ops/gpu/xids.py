"""What NVIDIA's Xid codes mean for a training run, and what to do (NVIDIA's Xid catalogue)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

_RESET = "Reset the card (`nvidia-smi --gpu-reset`) or reboot; on a rented pod, take another one"
_REPLACE = "Give the pod back and take another one; this card needs service"
_APPLICATION = "Look at the program that ran then; if nothing faulty ran, run `dcgmi diag -r 3`"
_SOFTWARE = "Update the driver; if it comes back, take another pod"


@dataclass(frozen=True)
class Xid:
    """What a code means and what to do; `fail` if no long run may start on the card."""

    meaning: str
    advice: str
    status: Literal["warn", "fail"] = "fail"
    needs_text: bool = False  # the driver's own words say more


XIDS: Mapping[int, Xid] = {
    8: Xid("a kernel ran longer than the driver allows", _APPLICATION, "warn"),
    13: Xid("a program's kernel raised an exception", _APPLICATION, "warn"),
    31: Xid("a program touched memory it does not have", _APPLICATION, "warn"),
    32: Xid("a broken command reached the card (driver, or a bad PCIe link)", _RESET),
    38: Xid("driver firmware error", _SOFTWARE),
    43: Xid("a program's fault stopped its work on the card", _APPLICATION, "warn"),
    44: Xid("a fault in the card's graphics engine on a context switch", _RESET),
    45: Xid(
        "a program's work was cleared away, mostly after another error or a kill",
        _APPLICATION,
        "warn",
    ),
    46: Xid("the card stopped processing", _RESET),
    48: Xid("uncorrectable double-bit memory error", _RESET),
    54: Xid("auxiliary power is not connected", _REPLACE),
    56: Xid("display engine error", _SOFTWARE, "warn"),
    61: Xid("the card's internal controller stopped at a breakpoint", _RESET),
    62: Xid("the card's internal controller halted", _RESET),
    63: Xid(
        "a memory row or page was marked for replacement; a GPU reset is needed before a long run",
        _RESET,
        "warn",
    ),
    64: Xid("a memory row or page could not be replaced", _REPLACE),
    66: Xid("an illegal access by the driver", _SOFTWARE),
    68: Xid("a video processor exception", _APPLICATION, "warn"),
    69: Xid("a program's kernel raised a graphics engine class error", _APPLICATION, "warn"),
    74: Xid(
        "NVLink error",
        "Run `nvidia-smi nvlink -e`; reset the cards, and take another pod if it comes back",
    ),
    78: Xid("the virtual GPU could not start", _RESET),
    79: Xid("the card has fallen off the bus (PCIe link, power or heat)", _REPLACE),
    81: Xid("VGA subsystem error", _SOFTWARE, "warn"),
    92: Xid(
        "many corrected memory errors", "Run `dcgmi diag -r 3`, and watch the ECC counts", "warn"
    ),
    94: Xid(
        "contained memory error: one program died, the others are safe",
        "Restart that program, and reset the card before a long run",
        "warn",
    ),
    95: Xid("uncontained memory error: every program on the card is suspect", _RESET),
    109: Xid("a context switch timed out", _RESET),
    110: Xid("the card raised a security fault", _RESET),
    116: Xid("the card's memory protection failed", _RESET),
    119: Xid(
        "GSP not answering: the card's own processor timed out and needs a reset or reboot; "
        "nvidia-smi may hang",
        _RESET,
    ),
    120: Xid(
        "GSP error: the card's own processor failed and needs a reset or reboot; nvidia-smi may "
        "hang",
        _RESET,
    ),
    121: Xid("corrected error on the link to the CPU (C2C)", "Watch whether it comes back", "warn"),
    122: Xid("the card's controller cannot read its flash memory", _SOFTWARE, "warn"),
    123: Xid("the card's power controller halted", _RESET),
    124: Xid("error on the link to the CPU (C2C)", _RESET),
    125: Xid(
        "the card's inforom cannot be read",
        "Run `nvidia-smi -q`, and take another pod if it says corrupt",
        "warn",
    ),
    136: Xid("NVLink training failed", _RESET),
    137: Xid(
        "NVLink fault: a peer's memory could not be reached",
        "Look at the other cards' Xids; reset all of them",
    ),
    140: Xid("uncorrected memory error", _RESET),
    143: Xid("the card could not start", _RESET),
    **dict.fromkeys(range(144, 151), Xid("NVLink error", _RESET)),
    151: Xid("a key rotation failed", _RESET),
    154: Xid("the driver asks for a recovery action", _RESET, needs_text=True),
    155: Xid("an NVLink went down by software", _RESET, "warn"),
    156: Xid("a part of the card was marked for retirement", _RESET, "warn"),
    157: Xid("a part of the card could not be retired", _REPLACE),
    158: Xid("a fatal timeout inside the card", _RESET),
    160: Xid("memory channel was retired", _RESET, "warn"),
    161: Xid("memory channel could not be retired", _REPLACE),
}
_UNKNOWN = Xid(
    "unknown code",
    "Look it up in NVIDIA's Xid catalogue before a long run",
    "warn",
    needs_text=True,
)


def explain_xid(code: int) -> Xid:
    """Meaning and advice; an unknown code is worth a look, not a halt."""
    return XIDS.get(code, _UNKNOWN)
