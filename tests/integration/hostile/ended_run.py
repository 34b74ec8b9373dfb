"""The run that the pod tells lies about: checkpoints with tensors in them, and one plain file."""

import hashlib
import json
import random
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

HELD, STEPS = 10, (10, 20, 30)
#: A plain file of the run: its name, size and hash are what most lies replace.
MARKER = "marker-7f3a.txt"
TOKEN = b"token-51c2d9\n"
CONTENT = TOKEN + b"x" * (7919 - len(TOKEN))
SHA256 = hashlib.sha256(CONTENT).hexdigest()


def tensor_file(seed: int, num_floats: int = 16_384) -> bytes:
    """A safetensors file of one tensor."""
    header = {"w": {"dtype": "F32", "shape": [num_floats], "data_offsets": [0, 4 * num_floats]}}
    words = json.dumps(header).encode()
    words += b" " * (-len(words) % 8)
    return struct.pack("<Q", len(words)) + words + random.Random(seed).randbytes(4 * num_floats)


def sha256_of(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def read_manifest(checkpoint: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((checkpoint / "checkpoint.json").read_bytes())
    return found


def write_checkpoint(checkpoint: Path, files: Mapping[str, bytes], **changes: Any) -> None:
    """Give a checkpoint other files; its manifest keeps all else that the trainer wrote."""
    manifest = read_manifest(checkpoint)
    for one in manifest["files"]:
        (checkpoint / one["name"]).unlink(missing_ok=True)
    for name, content in files.items():
        (checkpoint / name).write_bytes(content)
    manifest["files"] = [
        {"name": name, "size": len(content), "sha256": sha256_of(content)}
        for name, content in files.items()
    ]
    change_manifest(checkpoint, manifest | changes)


def change_manifest(checkpoint: Path, manifest: Mapping[str, Any]) -> None:
    (checkpoint / "checkpoint.json").write_text(json.dumps(manifest, indent=2))


def proper_files(step: int) -> dict[str, bytes]:
    return {
        "model.safetensors": tensor_file(step),
        "config.json": b'{"hidden": 8}\n',
        "state.txt": f"{step}\n".encode(),
    }


def enrich(run_dir: Path) -> None:
    """Make an ended run of the stand-in trainer worth lying about."""
    launched = json.loads((run_dir / "manifest.json").read_bytes())
    identity = {key: launched[key] for key in ("attempt_id",) if launched.get(key)}
    for step in STEPS:
        folder = run_dir / "checkpoints" / f"step_{step:06d}"
        write_checkpoint(folder, proper_files(step), **identity)
