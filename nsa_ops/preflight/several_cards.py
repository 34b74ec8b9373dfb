"""What a run on several cards of a pod needs of them: number, use, kind, shared memory; pure."""

from nsa_core.config.run import RunConfig
from nsa_ops.gpu.fitness import describe_use
from nsa_ops.machine.offer import PodCards
from nsa_ops.quantities import count_of, format_bytes

#: NCCL keeps buffers of every rank there; a container has 64 MiB unless it asks for more.
SHM_BYTES_PER_RANK = 64 * 2**20

#: Whether it forbids the run (None: unknown), and the message.
Finding = tuple[bool | None, str]


def num_cards(config: RunConfig) -> int:
    """Cards of a pod that the run takes; `auto` is not settled yet and counts as one."""
    cards = config.runtime.num_gpus
    return 1 if cards == "auto" else cards


def takes_several(config: RunConfig) -> bool:
    """Whether the run takes several cards of a pod, or as many as there are."""
    return config.runtime.num_gpus == "auto" or config.runtime.num_gpus > 1


def judge_number(config: RunConfig, cards: PodCards | None) -> Finding:
    """Whether the pod has as many cards as the run takes."""
    wanted = f"runtime.num_gpus is {num_cards(config)}"
    if cards is None:
        return None, f"{wanted}, and the pod's cards are unknown"
    is_short = num_cards(config) > len(cards.visible)
    return is_short, f"{wanted}, and {cards.describe()}"


def judge_use(config: RunConfig, cards: PodCards | None) -> Finding:
    """Whether others use a card that the run would take."""
    if cards is None:
        return None, "whether others use the cards is unknown"
    taken = cards.visible[: num_cards(config)]
    used = [f"{card.label} has {use}" for card in taken if (use := describe_use(card))]
    if used:
        return True, "; ".join(used)
    return False, f"{count_of(len(taken), 'card')} that no other process uses"


def judge_kinds(config: RunConfig, cards: PodCards | None) -> Finding:
    """Whether the cards are alike: a step waits for the slowest, and must fit the smallest."""
    if cards is None:
        return None, "the pod's cards are unknown"
    taken = cards.visible[: num_cards(config)]
    kinds = {(card.name, card.memory_mib): card.label for card in reversed(taken)}
    if len(kinds) < 2:
        return False, f"{count_of(len(taken), 'card')} of one kind"
    named = (
        f"{label} is a {name or 'card without a name'} with {memory or '?'} MiB"
        for (name, memory), label in sorted(kinds.items(), key=lambda item: item[1])
    )
    return True, f"cards of different kinds: {', '.join(named)}"


def judge_shared_memory(config: RunConfig, free_bytes: int | None) -> Finding:
    """Whether NCCL finds room in /dev/shm."""
    need = SHM_BYTES_PER_RANK * num_cards(config)
    ours = f"{num_cards(config)} ranks need {format_bytes(need)} in /dev/shm"
    if free_bytes is None:
        return None, f"{ours}; how much is free is unknown"
    return free_bytes < need, f"{ours}; {format_bytes(free_bytes)} are free"
