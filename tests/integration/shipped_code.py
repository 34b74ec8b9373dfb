"""The code of this checkout on a test's pod, as a launch ships it, with its compiled modules.

Every pod has a folder of its own, so that each would compile 70 modules again: over a second of a
processor. A test of the shipping takes it away first (`LocalPod.lose_code`).
"""

import functools
import importlib.util
import shutil
from pathlib import Path

from nsa_ops.remote.snapshot import Snapshot, take_snapshot

_snapshot = functools.cache(take_snapshot)


def put_code(pod_root: Path) -> None:
    """Make `code/ID` below the root of a pod, with the compiled modules that this checkout has."""
    code = _snapshot()
    folder = pod_root / "code" / code.code_id
    for name in code.files:
        _copy(code, folder, name)
        if name.endswith(".py"):
            compiled = Path(importlib.util.cache_from_source(name))
            if (code.root / compiled).is_file():
                _copy(code, folder, str(compiled))
    (folder / "CODE_ID").write_text(f"{code.code_id}\n")


def _copy(code: Snapshot, folder: Path, name: str) -> None:
    """With its time, by which Python tells that a compiled module fits."""
    target = folder / name
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy2(code.root / name, target)
