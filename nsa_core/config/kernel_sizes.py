"""Which sizes of a model the Triton kernels serve; no torch.

One place for the rules: the choice of a backend asks them before a run, the kernels' host code
before a launch, and the laptop for a card that is not there.
"""

from collections.abc import Iterable

MIN_TILE = 16  # the fewest rows or columns of a product
#: Compiled for sm_90: with a width of 256 two kernels take 256 and 322 KiB of 227 of shared memory;
#: with a block of 128 `item_forward_kernel` does not fit its registers, with 256 others neither.
MAX_WIDTH = 128
MAX_SELECT_BLOCK = 64
MAX_DOCUMENT_ELEMENTS = 1 << 31  # of one document's queries: the kernels count those in 32 bits
MAX_DECODE_HEADS = 16  # of a group: decode puts them into one product


def training_refusal(
    widths: tuple[int, int] | None,
    blocks: tuple[int, int] | None,
    queries: tuple[int, int] | None,
) -> str | None:
    """Why the kernels of training do not serve these sizes, or None; None is not known, not judged.

    The rules hold for every branch and for the dense control: each cuts documents into query blocks
    of one selection block, and addresses the queries of a document in 32 bits.

    Args:
        widths: Of a key and of a value (d_k, d_v).
        blocks: Tokens of a selection block, and of a compression stride.
        queries: Tokens of the longest document, and query heads.
    """
    block = [] if blocks is None else [("select_block", blocks[0], MIN_TILE)]
    reason = _not_a_power("triton", [*_widths(widths), *block, *_ratio(blocks)])
    reason = reason or _too_large(widths, blocks)
    if reason is not None or widths is None or queries is None:
        return reason
    elements = queries[0] * queries[1] * max(widths)
    if elements < MAX_DOCUMENT_ELEMENTS:
        return None
    return (
        f"the queries of one document of {queries[0]} tokens have up to {elements} elements, and "
        f"the triton kernels address fewer than {MAX_DOCUMENT_ELEMENTS}"
    )


def decode_refusal(
    widths: tuple[int, int], blocks: tuple[int, int], group_heads: int
) -> str | None:
    """Why the kernels of decode do not serve these sizes, or None; arguments as above.

    They walk keys and not query blocks, so any selection block will do.
    """
    if group_heads > MAX_DECODE_HEADS:
        return f"triton decode serves up to {MAX_DECODE_HEADS} heads of a group, got {group_heads}"
    return _not_a_power("triton decode", [*_widths(widths), *_ratio(blocks)])


def _widths(widths: tuple[int, int] | None) -> list[tuple[str, int, int]]:
    if widths is None:
        return []
    return [("d_k", widths[0], MIN_TILE), ("d_v", widths[1], MIN_TILE)]


def _ratio(blocks: tuple[int, int] | None) -> list[tuple[str, int, int]]:
    if blocks is None:
        return []
    return [("select_block / compress_stride", blocks[0] // blocks[1], 1)]


def _too_large(widths: tuple[int, int] | None, blocks: tuple[int, int] | None) -> str | None:
    if widths is not None and max(widths) > MAX_WIDTH:
        return f"triton needs d_k and d_v of at most {MAX_WIDTH}, got {widths[0]} and {widths[1]}"
    if blocks is not None and blocks[0] > MAX_SELECT_BLOCK:
        return f"triton needs select_block to be at most {MAX_SELECT_BLOCK}, got {blocks[0]}"
    return None


def _not_a_power(who: str, sizes: Iterable[tuple[str, int, int]]) -> str | None:
    """Names the first (name, size, least) that is no power of two from `least` on."""
    for name, size, least in sizes:
        if size < least or size & (size - 1):
            return f"{who} needs {name} to be a power of two >= {least}, got {size}"
    return None
