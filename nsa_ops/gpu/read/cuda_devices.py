"""Cards as CUDA programs print them: torch's device properties and the `deviceQuery` sample."""

import re
from collections.abc import Iterator

from nsa_ops.gpu.card import GPU

_PROPERTIES = re.compile(
    r"_CudaDeviceProperties\(name='([^']*)', major=(\d+), minor=(\d+), total_memory=(\d+)MB"
)
_DEVICE = re.compile(r'^Device (\d+): "([^"]*)"', re.MULTILINE)
_CAPABILITY = re.compile(r"CUDA Capability Major/Minor version number:\s*(\d+)\.(\d+)")
_MEMORY = re.compile(r"Total amount of global memory:\s*(\d+) MBytes")
_KNOWN = frozenset({"name", "compute_capability", "memory_mib"})


def parse_devices(text: str) -> tuple[GPU, ...]:
    """Cards in a text; empty if it holds none in these forms."""
    return tuple(_properties(text)) or tuple(_queried(text))


def _properties(text: str) -> Iterator[GPU]:
    for index, (name, major, minor, total) in enumerate(_PROPERTIES.findall(text)):
        capability = float(f"{major}.{minor}")
        yield GPU(
            index=index, name=name, compute_capability=capability, memory_mib=int(total),
            reported=_KNOWN,
        )  # fmt: skip


def _queried(text: str) -> Iterator[GPU]:
    starts = list(_DEVICE.finditer(text))
    ends = [match.start() for match in starts[1:]] + [len(text)]
    for start, end in zip(starts, ends, strict=False):
        piece = text[start.start() : end]
        capability, memory = _CAPABILITY.search(piece), _MEMORY.search(piece)
        yield GPU(
            index=int(start[1]),
            name=start[2],
            compute_capability=float(f"{capability[1]}.{capability[2]}") if capability else None,
            memory_mib=int(memory[1]) if memory else None,
            reported=_KNOWN if memory else frozenset({"name"}),
        )
