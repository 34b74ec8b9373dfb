"""Which cards of a pod its ranks would get: those CUDA shows there, in its order; pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from nsa_core.config.ranks import OfferedCards
from nsa_ops.gpu.card import GPU
from nsa_ops.gpu.fitness import describe_use
from nsa_ops.quantities import count_of, parse_count


@dataclass(frozen=True)
class PodCards:
    """Cards of a pod as a run sees them: rank r of the pod computes on the one at place r.

    Attributes:
        visible: Whole cards that CUDA shows, in its order.
        num_hidden: Cards that CUDA_VISIBLE_DEVICES hides there.
    """

    visible: tuple[GPU, ...]
    num_hidden: int = 0

    def describe(self) -> str:
        """What the pod has, in words."""
        hidden = f", CUDA_VISIBLE_DEVICES hides {self.num_hidden}" if self.num_hidden else ""
        return f"the pod has {count_of(len(self.visible), 'card')}{hidden}"

    def offer(self) -> OfferedCards:
        """What `auto` may take: the cards before the first one that is in use."""
        for place, card in enumerate(self.visible):
            use = describe_use(card)
            if use:
                return OfferedCards(place, f"{self.describe()}, and {card.label} has {use}")
        return OfferedCards(len(self.visible), self.describe())


def cards_of(gpus: Sequence[GPU], visible_devices: str | None) -> PodCards:
    """The cards that a process of this pod can use.

    Args:
        gpus: All that nvidia-smi shows.
        visible_devices: CUDA_VISIBLE_DEVICES of the pod; None where it is not set.
    """
    whole = [card for card in gpus if not card.is_mig and not card.slices]
    if visible_devices is None:
        return PodCards(tuple(whole))
    found: list[GPU] = []
    for word in visible_devices.split(","):
        card = _named(whole, word.strip())
        if card is None or card in found:  # CUDA shows none behind a word that it does not know
            break
        found.append(card)
    return PodCards(tuple(found), len(whole) - len(found))


def _named(cards: Sequence[GPU], word: str) -> GPU | None:
    number = parse_count(word)
    if number is not None:
        return next((card for card in cards if card.index == number), None)
    if not word.startswith("GPU-"):
        return None
    named = [card for card in cards if card.uuid.startswith(word)]
    return named[0] if len(named) == 1 else None
