"""Safetensors files written by hand, so that tests of the operator's side need no torch."""

import json
import math


def safetensors_bytes(shapes: dict[str, list[int]], *, kind: str = "F32") -> bytes:
    """A whole file of float32 tensors with these shapes; the values do not matter."""
    header, offset = {}, 0
    for name, shape in shapes.items():
        size = 4 * math.prod(shape)
        header[name] = {"dtype": kind, "shape": shape, "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + bytes(index % 251 for index in range(offset))
