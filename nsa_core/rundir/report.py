"""What preflight found: a result per check, one verdict, and what the machine gave when used."""

from collections.abc import Sequence
from typing import Literal

from pydantic import Field

from nsa_core.config.base import TolerantModel
from nsa_core.rundir.data_account import DataAccount

Status = Literal["pass", "warn", "fail", "unknown", "skipped"]


class CheckResult(TolerantModel):
    """One check.

    Attributes:
        name: Stable id such as `causality.perturbation`.
        status: `unknown` is not `pass`; `skipped` says why in `message`.
        measured: The measured value with its unit.
        command: How to see it yourself.
    """

    name: str
    status: Status
    message: str
    measured: str = ""
    limit: str = ""
    command: str = ""
    hint: str = ""
    seconds: float = 0.0


def checked(
    name: str,
    status: Status,
    message: str,
    *,
    measured: str = "",
    limit: str = "",
    command: str = "",
    hint: str = "",
) -> CheckResult:
    """One check, whose hint is kept only where there is something to do."""
    return CheckResult(
        name=name, status=status, message=message, measured=measured, limit=limit, command=command,
        hint=hint if status in {"fail", "warn", "unknown"} else "",
    )  # fmt: skip


class ProbeBegun(TolerantModel):
    """Reported before each probe of a card: how many are done, how many there are, which begins."""

    done: int
    total: int
    probe: str


class Report(TolerantModel):
    """All checks of one preflight, bound to the pod, the code and the profile they hold for."""

    schema_version: int = 1
    at: float
    tier: str = "quick"
    pod_id: str = ""
    code_id: str = ""
    profile: str = ""
    checks: list[CheckResult]

    @property
    def verdict(self) -> Literal["pass", "warn", "fail"]:
        """`fail` if a check failed, `warn` if one warned or could not tell, else `pass`."""
        return verdict_of(self.checks)


def verdict_of(checks: Sequence[CheckResult]) -> Literal["pass", "warn", "fail"]:
    """The verdict over several checks; see `Report.verdict`."""
    found = {check.status for check in checks}
    if "fail" in found:
        return "fail"
    return "warn" if found & {"warn", "unknown"} else "pass"


class CardSpeed(TolerantModel):
    """One card under load; None where a part was not measured.

    Attributes:
        free_mib: Memory that was free before.
        allocated_mib: Memory that was allocated at once, written and read again.
        gemm_tflops: Rate of a large square product, median over about a second of work.
        is_repeatable: The same product twice gave the same bits.
        copy_gb_s: Device to device, bytes read and written, base 10.
        host_to_device_gb_s: From pinned memory, base 10.
        device_to_host_gb_s: Into pinned memory, base 10.
        smi_under_load: What `nvidia-smi -q -x` printed of it while it computed; empty if nothing.
    """

    index: int
    name: str = ""
    free_mib: float | None = None
    allocated_mib: float | None = None
    dtype: str = ""
    gemm_tflops: float | None = None
    is_repeatable: bool | None = None
    copy_gb_s: float | None = None
    host_to_device_gb_s: float | None = None
    device_to_host_gb_s: float | None = None
    smi_under_load: str = ""


class AllReduceSpeed(TolerantModel):
    """All cards summing one tensor: bus bandwidth is size x 2 (n - 1) / n / time, in GB/s."""

    num_gpus: int
    size_mib: int
    bus_gb_s: float = Field(gt=0)


class DiskSpeed(TolerantModel):
    """MiB written to the pod's root and forced to the disk, and the time that took."""

    written_mib: int = Field(gt=0, le=10**9)
    seconds: float = Field(ge=0, le=1e6)


class FirstBatch(TolerantModel):
    """The first documents of the configured data, and how long they took to come.

    Attributes:
        seconds: Until the first batch of documents was there.
        account: What was dropped of all that was looked at; None from an older version.
        is_everything: All of the data was looked at.
        excess: Why the staging would refuse what was looked at; empty if it would not.
        source_bytes: Bytes of a local source, packed files as they would be unpacked, roughly.
    """

    seconds: float
    num_documents: int
    num_characters: int
    account: DataAccount | None = None
    is_everything: bool = False
    excess: str = ""
    source_bytes: int | None = None


class MachineSpeed(TolerantModel):
    """Everything that was measured.

    Attributes:
        all_reduce: None with fewer than two cards.
        disk: Speed of the disk that holds the runs.
        can_debug: A process of this login may read another one's memory, as py-spy does.
        problems: Why a part was not measured, by its name.
        seconds: How long each part took, by its name.
    """

    schema_version: int = 1
    torch_version: str = ""
    cards: list[CardSpeed] = []
    all_reduce: AllReduceSpeed | None = None
    disk: DiskSpeed | None = None
    can_debug: bool | None = None
    first_batch: FirstBatch | None = None
    problems: dict[str, str] = {}
    seconds: dict[str, float] = {}
