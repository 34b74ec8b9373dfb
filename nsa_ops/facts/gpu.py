"""Which cards a pod has and what they are doing, as nvidia-smi tells it."""

import csv
from dataclasses import dataclass

from nsa_ops.errors import DeadlineError, NotFoundError
from nsa_ops.remote.transport import Transport

#: nvidia-smi hangs on a sick driver; it answers within two seconds on a healthy one.
DEADLINE_S = 20.0
_FIELDS = (
    "index", "name", "uuid", "driver_version", "memory.total", "memory.used", "utilization.gpu",
    "temperature.gpu", "power.draw", "mig.mode.current", "ecc.errors.uncorrected.volatile.total",
)  # fmt: skip
COMMAND = (
    "nvidia-smi", f"--query-gpu={','.join(_FIELDS)}", "--format=csv,noheader,nounits",
)  # fmt: skip


@dataclass(frozen=True)
class GPU:
    """One card; None where the driver cannot tell, which is not zero.

    Attributes:
        index: As nvidia-smi counts.
        name: As nvidia-smi prints it.
        uuid: Its identity.
        driver_version: Kernel driver.
        memory_mib: Total memory.
        memory_used_mib: In use by anybody.
        utilization_percent: Share of time with a kernel running.
        temperature_c: Degrees Celsius.
        power_w: Draw.
        is_mig: Cut into slices.
        ecc_uncorrected: Uncorrected memory errors since the driver was loaded.
    """

    index: int
    name: str
    uuid: str
    driver_version: str
    memory_mib: int | None
    memory_used_mib: int | None
    utilization_percent: int | None
    temperature_c: int | None
    power_w: float | None
    is_mig: bool | None
    ecc_uncorrected: int | None


@dataclass(frozen=True)
class GPUFacts:
    """What nvidia-smi said.

    Attributes:
        gpus: Cards that could be read.
        problem: Why there is no whole answer; empty if there is one.
    """

    gpus: tuple[GPU, ...] = ()
    problem: str = ""


def parse_number(cell: str) -> float | None:
    """A number, or None for every spelling of unknown, such as N/A or [Not Supported]."""
    try:
        return float(cell.strip().split(" ")[0])
    except ValueError:
        return None


def parse_gpus(stdout: str) -> tuple[GPU, ...]:
    """Cards from the output of `COMMAND`; lines of another form are passed over."""
    rows = csv.reader(stdout.splitlines(), skipinitialspace=True)
    return tuple(
        _parse_row(row) for row in rows if len(row) == len(_FIELDS) and row[0].strip().isdigit()
    )


def _parse_row(row: list[str]) -> GPU:
    index, name, uuid, driver, *rest = (cell.strip() for cell in row)
    total, used, utilization, temperature, power, mig, ecc = rest
    return GPU(
        index=int(index),
        name=name,
        uuid=uuid,
        driver_version=driver,
        memory_mib=_whole(total),
        memory_used_mib=_whole(used),
        utilization_percent=_whole(utilization),
        temperature_c=_whole(temperature),
        power_w=parse_number(power),
        is_mig={"Enabled": True, "Disabled": False}.get(mig),
        ecc_uncorrected=_whole(ecc),
    )


def _whole(cell: str) -> int | None:
    number = parse_number(cell)
    return None if number is None else int(number)


def read_gpus(transport: Transport) -> GPUFacts:
    """Ask nvidia-smi; a machine without it has no cards, one that hangs has a problem."""
    try:
        done = transport.run(COMMAND, timeout_s=DEADLINE_S)
    except NotFoundError:
        return GPUFacts(problem="nvidia-smi is not there")
    except DeadlineError:
        return GPUFacts(problem=f"nvidia-smi did not answer within {DEADLINE_S:g} s")
    gpus = parse_gpus(done.text)
    if done.exit_code != 0 or not gpus:
        said = (done.text.strip() or done.last_error_line or "nothing").splitlines()[0]
        return GPUFacts(gpus, f"nvidia-smi said: {said}")
    return GPUFacts(gpus)
