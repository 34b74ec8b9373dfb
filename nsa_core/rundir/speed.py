"""MachineSpeed: what a pod's cards, disk and data gave when they were really used."""

from nsa_core.config.base import TolerantModel
from nsa_core.rundir.data_account import DataAccount


class CardSpeed(TolerantModel):
    """One card under load; None where a part was not measured.

    Attributes:
        index: As torch counts.
        name: As torch prints it.
        free_mib: Memory that was free before.
        allocated_mib: Memory that was allocated at once, written and read again.
        dtype: Precision of the matrix product.
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
    bus_gb_s: float


class DiskSpeed(TolerantModel):
    """Bytes written to the pod's root and forced to the disk, and the time that took."""

    written_mib: int
    seconds: float


class FirstBatch(TolerantModel):
    """The first documents of the configured data, and how long they took to come.

    Attributes:
        seconds: Until the first batch of documents was there.
        num_documents: Documents of that batch.
        num_characters: Their length.
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
        torch_version: What measured it.
        cards: One each; none without a card.
        all_reduce: None with fewer than two cards.
        disk: Speed of the disk that holds the runs.
        can_debug: A process of this login may read another one's memory, as py-spy does.
        first_batch: Of the data of the configuration.
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
