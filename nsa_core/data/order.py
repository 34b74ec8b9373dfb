"""A seeded permutation of sample numbers, so that a place in the data is one integer."""

from dataclasses import dataclass

_MASK_64 = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15
NUM_ROUNDS = 6


def mix(value: int) -> int:
    """Scramble 64 bits (the finalizer of SplitMix64; Steele, Lea and Flood, OOPSLA 2014)."""
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK_64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK_64
    return value ^ (value >> 31)


@dataclass(frozen=True)
class Permutation:
    """A bijection of 0 … size-1 that needs no table: a Feistel network with cycle walking.

    Attributes:
        size: How many numbers it permutes.
        seed: Another seed gives another order.
        epoch: Every pass over the data has its own order.
    """

    size: int
    seed: int
    epoch: int

    def __call__(self, place: int) -> int:
        """The number at a place.

        Raises:
            IndexError: If the place is not below `size`.
        """
        if not 0 <= place < self.size:
            message = f"place {place} is outside the permutation of {self.size}"
            raise IndexError(message)
        half_bits = max(1, ((self.size - 1).bit_length() + 1) // 2)
        number = self._shuffle(place, half_bits)
        while number >= self.size:  # the network permutes a power of 4; walk until inside
            number = self._shuffle(number, half_bits)
        return number

    def _shuffle(self, number: int, half_bits: int) -> int:
        low_mask = (1 << half_bits) - 1
        left, right = number >> half_bits, number & low_mask
        key = mix((mix((self.seed + _GOLDEN) & _MASK_64) + self.epoch) & _MASK_64)
        for round_number in range(NUM_ROUNDS):
            scrambled = mix((key + _GOLDEN * (round_number + 1) ^ right) & _MASK_64)
            left, right = right, left ^ (scrambled & low_mask)
        return left << half_bits | right
