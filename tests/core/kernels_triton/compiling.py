"""Record every launch that the host code makes, and compile it for a card that is not here."""

import io
import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource, GluonJITFunction
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.runtime.jit import JITFunction

from nsa_core.kernels.triton import launch as launch_table

_DTYPES = {
    torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32",
    torch.int32: "i32", torch.int64: "i64",
}  # fmt: skip
_OPTIONS = ("num_warps", "num_stages", "maxnreg", "launch_pdl")


@dataclass(frozen=True)
class Recorded:
    """One distinct launch: the kernel and everything that decides its machine code."""

    kernel: JITFunction
    signature: tuple[tuple[str, str], ...]
    constants: tuple[tuple[str, Any], ...]
    options: tuple[tuple[str, int], ...]

    @property
    def name(self) -> str:
        """Name of the kernel with its constants."""
        words = ",".join(f"{name}={value}" for name, value in self.constants)
        return f"{self.kernel.__name__}({words})"


@dataclass(frozen=True)
class Machine:
    """What ptxas says about a compiled launch.

    Attributes:
        shared_bytes: Shared memory of a program.
        registers: Of a thread.
        stack_bytes: Of a thread; registers that were spilled.
        ptx: What ptxas was given.
        cubin: What it made of it.
        serialised: Its messages C75xx: products that wait for one another.
    """

    shared_bytes: int
    registers: int
    stack_bytes: int
    ptx: str
    cubin: bytes
    serialised: tuple[str, ...]

    def opcodes(self) -> list[str]:
        """The instructions of the card in their order, as "LDG.E.128"."""
        listing = _cuobjdump("--dump-sass", self.cubin)
        return re.findall(r"/\*[0-9a-f]{4,}\*/ +(?:@!?U?P\w+ )?([A-Z][\w.]+)", listing)


@contextmanager
def recording(arch: int) -> Iterator[list[Recorded]]:
    """Within, launches are written down instead of run, with the launch table of `arch`."""
    seen: dict[Recorded, None] = {}
    launches: list[Recorded] = []

    def run(kernel: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        one = _describe(kernel, args, kwargs)
        if one not in seen:
            seen[one] = None
            launches.append(one)

    with (
        mock.patch.object(JITFunction, "run", run),
        mock.patch.object(launch_table, "device_architecture", lambda _device: arch),
        mock.patch("nsa_core.kernels.triton.select.device_architecture", lambda _device: arch),
    ):
        yield launches


def _describe(kernel: JITFunction, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Recorded:
    signature, constants = [], []
    for param, value in zip(kernel.params, args, strict=True):
        if param.is_constexpr:
            signature.append((param.name, "constexpr"))
            constants.append((param.name, value))
        elif isinstance(value, torch.Tensor):
            signature.append((param.name, "*" + _DTYPES[value.dtype]))
        elif isinstance(value, TensorDescriptor):
            box = f"{_DTYPES[value.base.dtype]}{value.block_shape}"
            signature.append((param.name, f"tensordesc<{box},{value.layout!r}>"))
        else:
            signature.append((param.name, "fp32" if isinstance(value, float) else "i32"))
    options = tuple((name, kwargs[name]) for name in _OPTIONS if name in kwargs)
    return Recorded(kernel, tuple(signature), tuple(constants), options)


def compile_launch(one: Recorded, arch: int) -> Machine:
    """Compile a recorded launch for sm_`arch`; pointers count as 16-byte aligned."""
    attributes = {
        (i,): [["tt.divisibility", 16]]
        for i, (_, kind) in enumerate(one.signature)
        if kind.startswith("*")
    }
    kind = GluonASTSource if isinstance(one.kernel, GluonJITFunction) else ASTSource
    source = kind(
        fn=one.kernel, signature=dict(one.signature), constexprs=dict(one.constants),
        attrs=attributes,
    )  # fmt: skip
    said = io.StringIO()
    with (
        triton.knobs.compilation.scope(),
        triton.knobs.nvidia.scope(),
        redirect_stdout(said),
    ):
        triton.knobs.compilation.always_compile = True  # a kept binary would have no messages
        triton.knobs.nvidia.dump_ptxas_log = True
        compiled = triton.compile(
            source, target=GPUTarget("cuda", arch, 32), options=dict(one.options)
        )
    registers, stack = _resources(compiled.asm["cubin"])
    return Machine(
        compiled.metadata.shared,
        registers,
        stack,
        compiled.asm["ptx"],
        compiled.asm["cubin"],
        find_serialised(said.getvalue()),
    )


def find_serialised(log: str) -> tuple[str, ...]:
    """The messages of a log of `ptxas -v` that say that products of Hopper wait for one another.

    Raises:
        ValueError: If this is no log of ptxas: silence would pass for a good kernel.
    """
    if "ptxas info" not in log:
        message = f"ptxas said nothing that can be judged: {log!r}"
        raise ValueError(message)
    return tuple(line for line in log.splitlines() if re.search(r"\bC75\d\d\b", line))


def _resources(cubin: bytes) -> tuple[int, int]:
    usage = _cuobjdump("--dump-resource-usage", cubin)
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    assert found is not None, usage
    return int(found[1]), int(found[2])


def _cuobjdump(option: str, cubin: bytes) -> str:
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run(
            [tool, option, file.name], capture_output=True, text=True, check=True
        ).stdout
