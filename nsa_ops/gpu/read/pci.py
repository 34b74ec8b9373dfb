"""NVIDIA's cards on the PCI bus, as `lspci` lists them, whether or not the driver serves them."""

import re

from nsa_ops.gpu.read.readings import parse_bus

#: 0300 and 0302 are the classes of cards; audio devices and switches of NVIDIA are none.
_CARD = re.compile(
    r"^((?:[0-9a-f]{4}:)?[0-9a-f]{2}:[0-9a-f]{2}\.0) "
    r"(?:VGA compatible controller|3D controller)(?: \[030[02]\])?: NVIDIA",
    re.IGNORECASE,
)
_MAX_LINE = 1000


def parse_pci_cards(text: str) -> tuple[str, ...]:
    """PCI addresses of the cards that `lspci` lists, as the kernel writes them."""
    found = (_CARD.match(line[:_MAX_LINE]) for line in text.splitlines())
    addresses = (match[1] for match in found if match)
    whole = (one if one.count(":") > 1 else f"0000:{one}" for one in addresses)
    return tuple(dict.fromkeys(parse_bus(one) for one in whole))
