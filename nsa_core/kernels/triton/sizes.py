"""Whole numbers on the host. Triton's functions of these names serve kernels too, and take 5 us."""


def cdiv(count: int, size: int) -> int:
    """`count / size`, rounded up."""
    return -(-count // size)


def next_power_of_2(count: int) -> int:
    """The smallest power of two that is not below `count`, which is at least 1."""
    return 1 << (count - 1).bit_length()
