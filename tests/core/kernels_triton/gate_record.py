"""What ptxas said of every launch of the gate, kept by what decides it, so that it is asked once.

Machine code is a function of the kernel's text, its constants, the launch options, the card and the
version of Triton. `machine_code.json` holds the answer for each, and a launch whose digest is not
in it has to be compiled: a kernel that changed, or a new version. To write it anew:

    python -m tests.core.kernels_triton.gate_record
"""

import ast
import hashlib
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import triton
import triton.language as tl
from triton.runtime.jit import JITFunction

from tests.core.kernels_triton.compiling import Machine, Recorded, compile_launch

FILE = Path(__file__).parent / "machine_code.json"
COMMAND = "python -m tests.core.kernels_triton.gate_record"
#: One launch of so many is compiled in every run and compared with the record.
SAMPLED = 16


@dataclass(frozen=True)
class Verdict:
    """What the gate judges of a compiled launch; see `Machine`."""

    shared_bytes: int
    registers: int
    stack_bytes: int
    serialised: int

    @classmethod
    def of(cls, machine: Machine) -> "Verdict":
        """Numbers of a compiled launch."""
        return cls(
            machine.shared_bytes, machine.registers, machine.stack_bytes, len(machine.serialised)
        )


def compile_verdict(launch: Recorded, arch: int) -> Verdict:
    """Ask ptxas."""
    return Verdict.of(compile_launch(launch, arch))


def look_up(launch: Recorded, arch: int) -> Verdict:
    """What the record says, or ptxas where the record lacks the launch."""
    return read_record().get(digest(launch, arch)) or compile_verdict(launch, arch)


def digest(launch: Recorded, arch: int) -> str:
    """Name everything that decides the machine code of a launch."""
    parts = (
        triton.__version__, arch, launch.signature, launch.constants, launch.options,
        kernel_text(launch.kernel),
    )  # fmt: skip
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]


def kernel_text(kernel: JITFunction) -> str:
    """The code of a kernel, of every function of ours that it calls, and the constants they name.

    Without comments and line numbers, which change no instruction.
    """
    texts: dict[str, str] = {}
    _add_text(kernel, texts)
    return "\n".join(texts[name] for name in sorted(texts))


def _add_text(function: JITFunction, texts: dict[str, str]) -> None:
    name = f"{function.fn.__module__}.{function.fn.__qualname__}"
    if name in texts:
        return
    tree = function.parse()
    texts[name] = ""  # a function that calls itself is met again
    values = function.fn.__globals__
    words = []
    for word in sorted({node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}):
        value = values.get(word)
        if isinstance(value, JITFunction) and _is_ours(value):
            _add_text(value, texts)
        elif isinstance(value, tl.constexpr):
            words.append(f"{word}={value.value!r}")
    texts[name] = f"{name} {words} {ast.dump(tree)}"


def _is_ours(function: JITFunction) -> bool:
    return not function.fn.__module__.startswith("triton.")


def is_sampled(name: str) -> bool:
    """Whether the launch with this digest is compiled whatever the record says."""
    return int(name, 16) % SAMPLED == 0


def read_record() -> dict[str, Verdict]:
    """Verdicts by digest."""
    return {
        key: Verdict(**{name: value for name, value in one.items() if name != "launch"})
        for key, one in _read()["launches"].items()
    }


def recorded_version() -> str:
    """The version of Triton that the record was made with."""
    version: str = _read()["triton"]
    return version


def write_record(launches: Iterable[tuple[Recorded, int]]) -> None:
    """Compile what the record lacks, and drop what is no longer launched."""
    held = read_record() if FILE.exists() else {}
    lines = {}
    for launch, arch in launches:
        key = digest(launch, arch)
        verdict = held.get(key) or compile_verdict(launch, arch)
        lines[key] = {"launch": f"sm_{arch} {launch.name}", **asdict(verdict)}
    ordered = sorted(lines.items(), key=lambda item: (item[1]["launch"], item[0]))
    content = {"triton": triton.__version__, "launches": dict(ordered)}
    FILE.write_text(json.dumps(content, indent=1) + "\n", "utf-8")


def _read() -> dict[str, Any]:
    content: dict[str, Any] = json.loads(FILE.read_text("utf-8"))
    return content


if __name__ == "__main__":
    from tests.core.kernels_triton.gate_launches import all_launches

    write_record(all_launches())
