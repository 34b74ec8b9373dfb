"""What a card's name says of it, for sources that do not tell: capability and NVLink count."""

import re
from collections.abc import Sequence

#: First capability whose cards multiply bf16.
BF16_CAPABILITY = 8.0
#: NVIDIA's compute capability table; the first pattern that is found in the name counts.
_CAPABILITIES: Sequence[tuple[str, float]] = (
    (r"B300", 10.3),
    (r"\bG?B[12]00\b", 10.0),
    (r"RTX 50[5-9]0|Blackwell", 12.0),
    (r"\bG?H(100|200|800|20)\b", 9.0),
    (r"\bL(40S?|4|20|2)\b|RTX 40[5-9]0|Ada\b", 8.9),
    (r"\bA(100|800|30)X?\b|CMP 170HX", 8.0),
    (r"\bA(10G?|40|16|2)\b|RTX 30[5-9]0|RTX A\d{3,4}", 8.6),
    (r"\bT4G?\b|RTX 20[6-8]0|TITAN RTX|GTX 16\d0|Quadro RTX|\bT\d{3,4}\b", 7.5),
    (r"V100|TITAN V|GV100", 7.0),
    (r"P100|GP100", 6.0),
    (r"GTX 10[1-8]0|TITAN Xp?\b|\bP(4|40|[1-6]000)\b|GT 1030|\bMX\d{3}", 6.1),
    (r"GTX 9[5-8]0|\bM(4|6|10|40|60)\b", 5.2),
    (r"GTX 7[4-5]0", 5.0),
    (r"\bK(80)\b", 3.7),
    (r"\bK(20|40)\w?\b", 3.5),
)
_ARCHITECTURES = {
    "kepler": 3.5, "maxwell": 5.2, "pascal": 6.0, "volta": 7.0, "turing": 7.5, "ampere": 8.0,
    "ada lovelace": 8.9, "hopper": 9.0, "blackwell": 10.0,
}  # fmt: skip
#: Links of boards on which every one should be up; a bridged card has some idle by design.
_LINKS: Sequence[tuple[str, int]] = (
    (r"H100 80GB HBM3|\bH200(?! NVL)|\bH800(?!.*PCIe)|\bH20\b", 18),
    (r"A(100|800)-SXM", 12),
    (r"V100-SXM", 6),
    (r"P100-SXM", 4),
)


def known_capability(name: str, architecture: str = "") -> float | None:
    """Compute capability by a card's name, else by its architecture; None if we know neither."""
    for pattern, capability in _CAPABILITIES:
        if re.search(pattern, name):
            return capability
    return _ARCHITECTURES.get(architecture.strip().lower())


def expected_nvlinks(name: str) -> int | None:
    """Links that should be up on a board of this name; None if that depends on its bridges."""
    return next((count for pattern, count in _LINKS if re.search(pattern, name)), None)
