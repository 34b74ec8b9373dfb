"""Read a safetensors file strictly, without torch: every byte must belong to one tensor.

The format: 8 bytes little-endian header length, that many bytes of JSON, then the tensors back to
back (https://github.com/huggingface/safetensors, "Format").
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nsa_core.rundir.bounded_json import JsonError, JsonLimits, parse_json

#: Bits of one element of each type.
BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "U16": 16, "I16": 16, "F16": 16, "BF16": 16, "U32": 32,
    "I32": 32, "F32": 32, "U64": 64, "I64": 64, "F64": 64, "C64": 64, "F8_E5M2": 8,
    "F8_E4M3": 8, "F8_E8M0": 8, "F8_E5M2FNUZ": 8, "F8_E4M3FNUZ": 8, "F4": 4,
}  # fmt: skip

#: The reference implementation refuses longer headers.
MAX_HEADER_BYTES = 100_000_000
#: Some hundred thousand tensors, each with its type, shape and offsets.
_LIMITS = JsonLimits(max_bytes=MAX_HEADER_BYTES, max_depth=8, max_values=2_000_000)
_LENGTH_BYTES = 8
#: What numpy takes at most.
_MAX_RANK = 64


class TensorFileError(ValueError):
    """The file is not a whole safetensors file; the message says where it departs from one."""


@dataclass(frozen=True)
class TensorEntry:
    """One tensor: name, element type, shape, and its bytes [begin, end) in the data section."""

    name: str
    kind: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def num_elements(self) -> int:
        """Elements; 1 for a scalar."""
        return math.prod(self.shape)


def read_tensor_entries(path: Path) -> list[TensorEntry]:
    """All tensors of a file in order of their bytes.

    Raises:
        TensorFileError: If the header is cut, is no JSON, or does not account for every byte.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        length = _parse_length(file.read(_LENGTH_BYTES), size)
        header = _parse_json(file.read(length))
    named = ((name, value) for name, value in header.items() if name != "__metadata__")
    entries = sorted(
        (_parse_entry(name, value) for name, value in named),
        key=lambda entry: (entry.begin, entry.end),
    )
    _check_contiguous(entries, size - _LENGTH_BYTES - length)
    return entries


def _parse_length(content: bytes, size: int) -> int:
    if len(content) < _LENGTH_BYTES:
        message = f"the file has {size} bytes, too few for a header length"
        raise TensorFileError(message)
    length = int.from_bytes(content, "little")
    if length > min(MAX_HEADER_BYTES, size - _LENGTH_BYTES):
        message = f"the header claims {length} bytes, and the file has {size}"
        raise TensorFileError(message)
    return length


def _parse_json(content: bytes) -> dict[str, Any]:
    if not content.startswith(b"{"):
        message = "the header does not begin with `{`"
        raise TensorFileError(message)
    try:
        header = parse_json(content, _LIMITS)
    except JsonError as error:
        message = f"the header is not JSON: {error}"
        raise TensorFileError(message) from error
    _check_metadata(header.get("__metadata__", {}))
    return dict(header)


def _check_metadata(metadata: object) -> None:
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        message = "`__metadata__` is not an object of strings"
        raise TensorFileError(message)


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63


def _parse_entry(name: str, value: object) -> TensorEntry:
    match value:
        case {"dtype": str(kind), "shape": list(shape), "data_offsets": [begin, end], **others} if (
            not others and len(shape) <= _MAX_RANK and all(map(_is_size, [*shape, begin, end]))
        ):
            entry = TensorEntry(name, kind, tuple(shape), begin, end)
        case _:
            message = f"tensor `{name}` has no proper dtype, shape and data_offsets"
            raise TensorFileError(message)
    if kind not in BITS:
        message = f"tensor `{name}` has the unknown type {kind}"
        raise TensorFileError(message)
    expected, remainder = divmod(entry.num_elements * BITS[kind], 8)
    if remainder or end - begin != expected:
        message = (
            f"tensor `{name}` of type {kind} and shape {list(shape)} needs {expected} bytes "
            f"and has {end - begin}"
        )
        raise TensorFileError(message)
    return entry


def _check_contiguous(entries: list[TensorEntry], data_bytes: int) -> None:
    """Every byte belongs to exactly one tensor: no gap, no overlap, nothing after the last."""
    at = 0
    for entry in entries:
        if entry.begin != at:
            message = f"tensor `{entry.name}` begins at byte {entry.begin} and not at {at}"
            raise TensorFileError(message)
        at = entry.end
    if at != data_bytes:
        message = f"the tensors need {at} bytes and the file holds {data_bytes}"
        raise TensorFileError(message)
