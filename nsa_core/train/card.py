"""What the card reports: peak rate, memory, power; None wherever it is unknown."""

import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

_MIB = 1024 * 1024
#: Dense tensor-core TFLOP/s by (part of the card's name, precision), from NVIDIA's data sheets.
_PEAK_TFLOPS = {
    ("H200", "bf16"): 989.4,
    ("H100 PCIe", "bf16"): 756.0,
    ("H100 NVL", "bf16"): 835.0,
    ("H100", "bf16"): 989.4,
    ("A100", "bf16"): 312.0,
    ("RTX 4090", "bf16"): 165.2,
    ("V100", "fp16"): 125.0,
    ("T4", "fp16"): 65.0,
}
_QUERY = "utilization.gpu,power.draw,temperature.gpu,clocks_throttle_reasons.active"


def peak_flops_per_s(device: torch.device, precision: str) -> float | None:
    """Peak rate of the card in this precision; None for a card that the table does not know."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    for (part, known), tflops in _PEAK_TFLOPS.items():
        same_rate = {precision, known} <= {"bf16", "fp16"}
        if part in name and (precision == known or (same_rate and known == "bf16")):
            return tflops * 1e12
    return None


@dataclass(frozen=True)
class MemoryMib:
    """Memory in MiB (base 2), as nvidia-smi prints it; None without a card.

    Attributes:
        gpu_mem_total: What the card has, for whomever.
    """

    gpu_mem_alloc: int | None
    gpu_mem_reserved: int | None
    gpu_mem_peak: int | None
    gpu_mem_total: int | None
    host_rss_mib: int


def read_memory(device: torch.device) -> MemoryMib:
    """Memory of this process on the card and on the host."""
    resident_pages = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1])
    host = resident_pages * 4096 // _MIB
    if device.type != "cuda":
        return MemoryMib(None, None, None, None, host)
    return MemoryMib(
        torch.cuda.memory_allocated(device) // _MIB,
        torch.cuda.memory_reserved(device) // _MIB,
        torch.cuda.max_memory_allocated(device) // _MIB,
        torch.cuda.get_device_properties(device).total_memory // _MIB,
        host,
    )


@dataclass(frozen=True)
class CardState:
    """Load, power and temperature as nvidia-smi prints them; None where it prints N/A."""

    gpu_util: float | None = None
    power_w: float | None = None
    temp_c: float | None = None
    throttle: str | None = None


def card_uuid(device: torch.device) -> str:
    """Name of a CUDA card as nvidia-smi takes it."""
    return f"GPU-{torch.cuda.get_device_properties(device).uuid}"


def ask_nvidia_smi(words: Sequence[str], timeout_s: float) -> str:
    """What nvidia-smi prints; empty where it is missing, fails or does not answer in time."""
    argv = ["nvidia-smi", *words]
    try:
        done = subprocess.run(
            argv,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=timeout_s,
            check=True,
        )
    except (subprocess.SubprocessError, OSError):
        return ""
    return done.stdout


def query_card(uuid: str, fields: str, timeout_s: float) -> str:
    """One line of values for these fields, with commas between; empty if nothing is known."""
    words = (f"--query-gpu={fields}", "--format=csv,noheader,nounits", "-i", uuid)
    return ask_nvidia_smi(words, timeout_s).strip()


def number_of(cell: str) -> float | None:
    """A value; None for N/A in one of its spellings."""
    try:
        return float(cell)
    except ValueError:
        return None


def parse_card_state(line: str) -> CardState:
    """One line of `nvidia-smi --format=csv,noheader,nounits`; pure."""
    cells = [cell.strip() for cell in line.split(",")]
    if len(cells) != len(_QUERY.split(",")):
        return CardState()
    load, power, heat = (number_of(cell) for cell in cells[:3])
    throttle = cells[3] if cells[3].startswith("0x") else None
    return CardState(load, power, heat, throttle)


def read_card_state(device: torch.device, timeout_s: float = 5.0) -> CardState:
    """Ask nvidia-smi; slow, so never from the loop. Nothing is known without it or in time."""
    if device.type != "cuda":
        return CardState()
    return parse_card_state(query_card(card_uuid(device), _QUERY, timeout_s))


class CardSampler:
    """The last known state of the card, refreshed from the heartbeat's thread."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.state = CardState()

    def sample(self) -> None:
        """Ask the card again."""
        self.state = read_card_state(self._device)
