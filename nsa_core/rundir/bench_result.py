"""BenchResult: what a bench measured, on which card, with which versions and command."""

from typing import Any

from pydantic import ValidationError

from nsa_core.config.base import TolerantModel
from nsa_core.rundir.bounded_json import JsonError, parse_model

SCHEMA_VERSION = 1


class Machine(TolerantModel):
    """What a speed was measured on; None where the machine cannot tell.

    Attributes:
        card: Name of the card, as torch prints it; `cpu` without one.
        multiprocessors: Streaming multiprocessors of the card.
        memory_gib: Memory of the card in GiB (base 2).
        clock_mhz: Clock of the multiprocessors right after work, as nvidia-smi says.
        max_clock_mhz: Highest clock that the card allows.
        cuda: CUDA version that torch was built for.
        matmul_tflops: bf16 matrix product of 8,192 in the same process, in TFLOP/s: the floor of
            every row is its arithmetic at this rate.
    """

    card: str
    multiprocessors: int | None = None
    memory_gib: float | None = None
    driver: str | None = None
    clock_mhz: float | None = None
    max_clock_mhz: float | None = None
    memory_clock_mhz: float | None = None
    power_limit_w: float | None = None
    torch: str
    triton: str | None = None
    cuda: str | None = None
    matmul_tflops: float | None = None


class BenchResult(Machine):
    """One file of bench/results.

    Attributes:
        bench: `kernels`, `model`, `decode`, `scale`, `validate` or `recall`.
        at_unix_s: When it began.
        rows: What was measured; which fields a row has depends on the bench.
    """

    schema_version: int = SCHEMA_VERSION
    bench: str = "kernels"
    commit: str
    command: str
    at_unix_s: float | None = None
    rows: list[dict[str, Any]]


class BenchResultError(ValueError):
    """A file or an answer that is no bench result; the message says what is wrong."""


def parse_bench_result(content: bytes | str, where: str) -> BenchResult:
    """Read a result; `where` is what an error message calls it.

    Raises:
        BenchResultError: If it is no bench result.
    """
    try:
        result = parse_model(BenchResult, content.encode() if isinstance(content, str) else content)
    except JsonError as error:
        message = f"{where} is no bench result: {error}"
        raise BenchResultError(message) from error
    except ValidationError as error:
        first = error.errors()[0]
        at = ".".join(str(part) for part in first["loc"])
        message = f"{where} is no bench result: {at + ': ' if at else ''}{first['msg']}"
        raise BenchResultError(message) from error
    if result.schema_version > SCHEMA_VERSION:
        message = (
            f"{where} was written by a newer version "
            f"(schema {result.schema_version}, this one reads {SCHEMA_VERSION})"
        )
        raise BenchResultError(message)
    return result
