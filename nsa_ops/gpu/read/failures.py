"""Answers that are errors: NVML or CUDA cannot start, a card is lost, memory ran out."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from nsa_ops.gpu.read.readings import parse_bus

Failure = Literal[
    "mismatch",
    "unknown_error",
    "no_devices",
    "handle",
    "not_talking",
    "not_loaded",
    "permission",
    "forward_compat",
    "cuda_mismatch",
    "fabric",
    "driver_old",
    "no_kernel_image",
    "no_cuda_build",
    "no_capable_device",
    "cuda_unknown",
    "ecc",
    "no_tool",
    "hung",
    "peer_hang",
    "memory_full",
    "no_bf16",
    "acs",
    "invalid_device",
]
_I = re.IGNORECASE
_PATTERNS: Mapping[Failure, re.Pattern[str]] = {
    "mismatch": re.compile(r"Driver/library version mismatch", _I),
    "unknown_error": re.compile(r"Failed to initialize NVML:\s*Unknown Error", _I),
    "not_loaded": re.compile(
        r"Failed to initialize NVML:\s*(?:Driver Not Loaded|Uninitialized|Not Found)"
        r"|NVML Shared Library Not Found|couldn't find libnvidia-ml",
        _I,
    ),
    "permission": re.compile(
        r"Failed to initialize NVML:\s*(?:Insufficient Permissions|GPU access blocked)", _I
    ),
    "not_talking": re.compile(r"couldn't communicate with the NVIDIA driver", _I),
    "no_devices": re.compile(r"No devices were found|No NVIDIA GPU found", _I),
    "handle": re.compile(
        r"Unable to determine the device handle for (?:GPU|gpu)[ \d]*|GPU is lost\."
        r"|GPU requires reset",
        _I,
    ),
    "forward_compat": re.compile(
        r"(?:Error|error)\W+804\b|forward compatibility was attempted on non supported HW", _I
    ),
    "cuda_mismatch": re.compile(
        r"Error 803\b|unsupported display driver / cuda driver combination", _I
    ),
    "fabric": re.compile(r"Error 802\b|system not yet initialized", _I),
    "driver_old": re.compile(
        r"NVIDIA driver on your system is too old"
        r"|CUDA driver version is insufficient for CUDA runtime"
        r"|cuda>=[\d.]+, please update your driver",
        _I,
    ),
    "no_kernel_image": re.compile(
        r"no kernel image is available for execution"
        r"|with CUDA capability sm_\d+ is not compatible with the current PyTorch",
        _I,
    ),
    "no_cuda_build": re.compile(r"Torch not compiled with CUDA enabled", _I),
    "no_capable_device": re.compile(
        r"no CUDA-capable device is detected|Found no NVIDIA driver on your system", _I
    ),
    "invalid_device": re.compile(r"CUDA error:\s*invalid device ordinal|Error 101\b", _I),
    "cuda_unknown": re.compile(r"Error 999\b|CUDA unknown error|CUDA error: unknown error", _I),
    "ecc": re.compile(r"uncorrectable (?:ECC|NVLink) error (?:was )?(?:encountered|detected)", _I),
    "no_tool": re.compile(r"nvidia-smi:? (?:command )?not found|nvidia-smi: No such file", _I),
    "hung": re.compile(
        r"nvidia-smi\S*.*(?:timed out|did not (?:answer|end) within|Terminated|hangs?\b)"
        r"|timeout: sending signal.*nvidia-smi|^\S+\s+\d+\s.*\sD[sLlN<+]*\s.*nvidia-smi",
        _I,
    ),
    "memory_full": re.compile(r"CUDA error: out of memory|CUDA_ERROR_OUT_OF_MEMORY", _I),
    "no_bf16": re.compile(r"bfloat16 is only supported on GPUs with|does not support bfloat16", _I),
    "acs": re.compile(r"ACSCtl:.*ReqRedir\+"),
    "peer_hang": re.compile(
        r"(?:NCCL_P2P_DISABLE|collective operation timeout|Watchdog caught collective"
        r"|simpleP2P.*fail|P2P.*(?:hang|verification error)|peer access is not supported"
        r"|Verification error @ element|Out of bounds values : \d+ FAILED"
        r"|\b(?:nccl|all_?reduce)\b.*\b(?:hangs?|hung|stuck|deadlocks?)\b"
        r"|\b(?:hangs?|hung|stuck|deadlocks?)\b.*\b(?:nccl|all_?reduce|p2p)\b)",
        _I,
    ),
}
#: An error stands at the beginning of its line; what is longer is data.
_MAX_LINE = 1000
_HUNG_EXIT = re.compile(r"nvidia-smi[^\n]*\n(?:[^\n]*\n)?\s{0,8}124\s*$", re.MULTILINE)
_VERSION = r"(\d+\.\d+(?:\.\d+)*)"
_LIBRARY = re.compile(rf"(?:NVML|client) library version:?\s*{_VERSION}", _I)
_MODULE = re.compile(
    rf"Kernel Module(?: for \S+)?\s+{_VERSION}|kernel module version:?\s*{_VERSION}", _I
)
_GIB = {"GiB": 1024.0, "MiB": 1.0, "KiB": 1 / 1024, "bytes": 1 / 2**20}
_SIZE = r"([\d.]+) (GiB|MiB|KiB|bytes)"
_OOM = re.compile(r"CUDA out of memory|OutOfMemoryError", _I)
_OTHER = re.compile(rf"Process (\d+) has {_SIZE} memory in use")
_OWN = re.compile(rf"this process has {_SIZE} memory in use")
_FREE = re.compile(rf"of which {_SIZE} is free|{_SIZE} free\b")
_TOTAL = re.compile(rf"total capacity of {_SIZE}|{_SIZE} total capacity")
_RESERVED = re.compile(rf"{_SIZE} reserved in total by PyTorch")
_TRIED = re.compile(rf"Tried to allocate {_SIZE}")
_CARD = re.compile(r"GPU (\d+)")


@dataclass(frozen=True)
class Found:
    """An answer that is an error.

    Attributes:
        kind: Which.
        text: The words.
        bus: PCI address they name; empty if none.
    """

    kind: Failure
    text: str
    bus: str = ""


@dataclass(frozen=True)
class Versions:
    """The driver's two halves; empty where a text does not tell."""

    library: str = ""
    module: str = ""


@dataclass(frozen=True)
class OutOfMemory:
    """What torch said when a card's memory ran out, in MiB; None where it did not tell.

    Attributes:
        gpu: Number of the card.
        tried_mib: What was asked for.
        total_mib: What the card has.
        free_mib: What was left.
        own_mib: What the program that failed holds.
        others: Other programs and what they hold.
    """

    gpu: int = 0
    tried_mib: float | None = None
    total_mib: float | None = None
    free_mib: float | None = None
    own_mib: float | None = None
    others: tuple[tuple[int, float], ...] = ()


def parse_failures(text: str) -> tuple[Found, ...]:
    """Errors in a text, each kind and card once; line by line, as a long line costs its square."""
    found: dict[tuple[str, str], Found] = {}
    for line in text.splitlines():
        for kind, pattern in _PATTERNS.items():
            match = pattern.search(line, 0, _MAX_LINE)
            if match:
                words = line[match.start() :].strip()[:200]
                bus = parse_bus(re.sub(r"GPU(?=[0-9A-Fa-f]{4})", "", words))
                found.setdefault((kind, bus), Found(kind, words, bus))
    if _HUNG_EXIT.search(text):
        found.setdefault(("hung", ""), Found("hung", "`timeout` ended nvidia-smi (exit code 124)"))
    return tuple(found.values())


def parse_versions(text: str) -> Versions:
    """Versions of the driver's library and of its kernel module."""
    library, module = _LIBRARY.search(text), _MODULE.search(text)
    return Versions(library[1] if library else "", (module[1] or module[2]) if module else "")


def parse_out_of_memory(text: str) -> tuple[OutOfMemory, ...]:
    """Each message of torch that memory ran out."""
    starts = [match.start() for match in _OOM.finditer(text)]
    ends = [*starts, len(text)][1:]
    pieces = [text[start:end] for start, end in zip(starts, ends, strict=True)]
    return tuple(_out_of_memory(piece) for piece in pieces if _TRIED.search(piece))


def _out_of_memory(piece: str) -> OutOfMemory:
    card = _CARD.search(piece)
    total, free, own = _mib(_TOTAL, piece), _mib(_FREE, piece), _mib(_OWN, piece)
    return OutOfMemory(
        gpu=int(card[1]) if card else 0,
        tried_mib=_mib(_TRIED, piece),
        total_mib=total,
        free_mib=free,
        own_mib=own if own is not None else _mib(_RESERVED, piece),
        others=tuple(
            (int(pid), _scaled(amount, unit)) for pid, amount, unit in _OTHER.findall(piece)
        ),
    )


def _mib(pattern: re.Pattern[str], text: str) -> float | None:
    found = pattern.search(text)
    if found is None:
        return None
    amount, unit = [group for group in found.groups() if group is not None][:2]
    return _scaled(amount, unit)


def _scaled(amount: str, unit: str) -> float:
    try:
        return float(amount) * _GIB[unit]
    except ValueError:
        return 0.0
