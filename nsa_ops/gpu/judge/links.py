"""Judge how cards are joined: even NVLink, PCIe only, links that are down, no peer access."""

from collections.abc import Sequence

from nsa_core.rundir.report import CheckResult, Status
from nsa_ops.gpu.judge.result import checked
from nsa_ops.gpu.read.known_cards import expected_nvlinks
from nsa_ops.gpu.read.topology import NVLinks, Topology
from nsa_ops.quantities import count_of

_FAR = frozenset({"SYS", "NODE"})
_SLOW = (
    "Train on cards that are joined alike (CUDA_VISIBLE_DEVICES), or expect the all-reduce to be as"
    " slow as the slowest pair; set NCCL_P2P_DISABLE=1 if the first collective hangs"
)


def judge_topology(topology: Topology) -> CheckResult:
    """Whether every pair of cards is joined alike."""
    name, command, count = "gpu.topology", "nvidia-smi topo -m", len(topology.cards)
    kinds = topology.by_kind()
    if count == 1:
        return checked(name, "pass", "one card: nothing to join", command=command)
    if not kinds:
        message = f"{count_of(count, 'card')}, but how they are joined is cut off"
        return checked(name, "unknown", message, command=command, hint=f"Run `{command}` again")
    words = "; ".join(f"{kind}: {_pairs(pairs)}" for kind, pairs in kinds.items())
    nvlink = [kind for kind in kinds if kind.startswith("NV")]
    status: Status = "warn"
    if len(kinds) == 1 and not _FAR & set(kinds):
        status = "pass"
        message = f"{count_of(count, 'card')}, every pair joined by {next(iter(kinds))}"
    elif nvlink:
        message = f"uneven topology for {count}-GPU training: {words}"
    else:
        message = f"no NVLink between {count_of(count, 'card')}, PCIe only: {words}"
    return checked(
        name, status, message, measured=", ".join(kinds), limit="every pair alike",
        command=command, hint=_SLOW,
    )  # fmt: skip


def _pairs(pairs: Sequence[tuple[int, int]]) -> str:
    some = ", ".join(f"GPU{one}-{two}" for one, two in pairs[:3])
    return some if len(pairs) <= 3 else f"{some} and {len(pairs) - 3} more"


def judge_peers(pairs: Sequence[tuple[int, int]]) -> list[CheckResult]:
    """Pairs that cannot reach each other's memory."""
    if not pairs:
        return []
    message = f"cards that cannot reach each other's memory: {_pairs(pairs)}"
    hint = "Set NCCL_P2P_DISABLE=1 for training on several cards; look at ACS and the IOMMU"
    return [checked("gpu.peers", "warn", message, command="nvidia-smi topo -p2p r", hint=hint)]


def judge_nvlinks(cards: Sequence[NVLinks]) -> list[CheckResult]:
    """Whether the links that should be up are, and all cards have alike many."""
    most = max((len(card.active) for card in cards), default=0)
    return [_nvlink(card, most, len(cards)) for card in cards]


def _nvlink(card: NVLinks, most: int, count: int) -> CheckResult:
    up, down = len(card.active), len(card.inactive)
    expected = expected_nvlinks(card.name) or (most if count > 1 else None)
    message = f"{up} of {count_of(up + down, 'link')} up"
    status: Status = "pass"
    if expected is not None and up < expected and (up or down):
        status, message = "warn", f"{message}, and {expected} should be"
    elif not up and down:
        status, message = "warn", f"{message}: NVLink is off"
    elif card.is_off:
        message = "no link is up: NVLink is off, or the card has no bridge"
        status = "warn" if expected else "pass"
    elif down:
        message = f"{message}; the others have no bridge"
    if card.num_errors:
        status, message = "warn", f"{message}; {count_of(card.num_errors, 'link error')}"
    return checked(
        f"gpu{card.index}.nvlink", status, message, measured=str(up),
        limit="" if expected is None else str(expected), command="nvidia-smi nvlink -s",
        hint="Look for Xid 74 in the kernel log; reset the cards, or take another pod",
    )  # fmt: skip
