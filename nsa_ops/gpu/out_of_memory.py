"""What torch says when a card's memory ran out, and who is to blame: our run or somebody else."""

import re
from dataclasses import dataclass

from nsa_core.rundir.report import CheckResult, checked

_GIB = {"GiB": 1024.0, "MiB": 1.0, "KiB": 1 / 1024, "bytes": 1 / 2**20}
_SIZE = r"([\d.]+) (GiB|MiB|KiB|bytes)"
_OOM = re.compile(r"CUDA out of memory|OutOfMemoryError", re.IGNORECASE)
_OTHER = re.compile(rf"Process (\d+) has {_SIZE} memory in use")
_OWN = re.compile(rf"this process has {_SIZE} memory in use")
_FREE = re.compile(rf"of which {_SIZE} is free|{_SIZE} free\b")
_TOTAL = re.compile(rf"total capacity of {_SIZE}|{_SIZE} total capacity")
_RESERVED = re.compile(rf"{_SIZE} reserved in total by PyTorch")
_TRIED = re.compile(rf"Tried to allocate {_SIZE}")
_CARD = re.compile(r"GPU (\d+)")
#: Of a card's memory: what somebody else must hold to be the cause.
_OTHERS_SHARE = 0.1
_CONTEXT_MIB = 1024
_COMMAND = "nvidia-smi --query-compute-apps=pid,process_name,used_memory --format=csv"


@dataclass(frozen=True)
class OutOfMemory:
    """A failed allocation, in MiB; None where the message does not say."""

    gpu: int = 0
    tried_mib: float | None = None
    total_mib: float | None = None  # of the card
    free_mib: float | None = None
    own_mib: float | None = None  # held by the program that failed
    others: tuple[tuple[int, float], ...] = ()  # other programs and what they hold


def parse_out_of_memory(text: str) -> tuple[OutOfMemory, ...]:
    """Each message of torch that memory ran out."""
    starts = [match.start() for match in _OOM.finditer(text)]
    ends = [*starts, len(text)][1:]
    pieces = [text[start:end] for start, end in zip(starts, ends, strict=True)]
    return tuple(_parse(piece) for piece in pieces if _TRIED.search(piece))


def _parse(piece: str) -> OutOfMemory:
    card, own = _CARD.search(piece), _mib(_OWN, piece)
    return OutOfMemory(
        gpu=int(card[1]) if card else 0,
        tried_mib=_mib(_TRIED, piece),
        total_mib=_mib(_TOTAL, piece),
        free_mib=_mib(_FREE, piece),
        own_mib=own if own is not None else _mib(_RESERVED, piece),
        others=tuple(
            (int(pid), _scaled(amount, unit)) for pid, amount, unit in _OTHER.findall(piece)
        ),
    )


def _mib(pattern: re.Pattern[str], text: str) -> float | None:
    found = pattern.search(text)
    if found is None:
        return None
    amount, unit = [group for group in found.groups() if group is not None][:2]
    return _scaled(amount, unit)


def _scaled(amount: str, unit: str) -> float:
    try:
        return float(amount) * _GIB[unit]
    except ValueError:
        return 0.0


def judge_out_of_memory(found: OutOfMemory) -> CheckResult:
    """Who held the memory: another process, an unknown one, or our own run."""
    total, own = found.total_mib or 0.0, found.own_mib or 0.0
    of_total = f" of {_gib(total)}" if total else ""
    held = sum(amount for _, amount in found.others)
    unseen = total - (found.free_mib or 0.0) - own - held
    not_ours = "our batch size is not the cause"
    if found.others and held > _OTHERS_SHARE * total:
        who = ", ".join(f"process {pid} ({_gib(amount)})" for pid, amount in found.others)
        pids = ",".join(str(pid) for pid, _ in found.others)
        measured = _gib(held)
        message = (
            f"out of memory because another process holds the card: {who}{of_total}; ours holds "
            f"{_gib(own)}"
        )
        hint = f"End it or take a free card (`ps -fp {pids}`); {not_ours}"
    elif found.free_mib is not None and total and unseen > max(_CONTEXT_MIB, _OTHERS_SHARE * total):
        measured = _gib(unseen)
        message = (
            f"out of memory, and {measured}{of_total} is held by another process that torch does "
            f"not name; ours holds {_gib(own)}"
        )
        hint = f"Find it with `nvidia-smi`, end it or take a free card; {not_ours}"
    else:
        measured = _gib(own)
        message = (
            f"out of memory by our own {measured}{of_total}, asking for "
            f"{_gib(found.tried_mib or 0.0)} more"
        )
        hint = (
            "Use a smaller `--set batch.micro_batch=` and more accumulation; see `nsa-ops estimate`"
        )
    return checked(
        f"gpu{found.gpu}.out_of_memory", "fail", message, measured=measured, command=_COMMAND,
        hint=hint,
    )  # fmt: skip


def _gib(mib: float) -> str:
    return f"{mib / 1024:.2f} GiB"
