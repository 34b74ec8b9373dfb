"""Refuse what no backend computes, from what the host knows: nothing here waits for a device.

Legend: N tokens, H query heads, G groups, D key width, E value width, K rows of keys.
"""

from torch import Tensor


def require_count(name: str, value: int, *, least: int = 1, most: int | None = None) -> None:
    """Refuse a count outside least .. most.

    Raises:
        ValueError: If it is; the message names it and the limits.
    """
    if value < least or (most is not None and value > most):
        upper = "" if most is None else f" and at most {most:,}"
        message = f"{name} must be at least {least}{upper}, got {value:,}"
        raise ValueError(message)


def check_attention_inputs(
    q_NHD: Tensor, k_KGD: Tensor, v_KGE: Tensor, *, num_tokens: int, num_keys: int
) -> None:
    """Refuse tensors that are not queries, keys and values of one call.

    Args:
        q_NHD: Queries.
        k_KGD: Keys.
        v_KGE: Values.
        num_tokens: N of the packing, at least 1.
        num_keys: K: tokens, or slots of compressed blocks.

    Raises:
        ValueError: If dtypes are mixed or none of floating point, or sizes do not fit together.
    """
    require_count("tokens of a call", num_tokens)
    dtypes = {q_NHD.dtype, k_KGD.dtype, v_KGE.dtype}
    if len(dtypes) > 1 or not q_NHD.is_floating_point():
        found = ", ".join(str(x.dtype).removeprefix("torch.") for x in (q_NHD, k_KGD, v_KGE))
        message = f"q, k and v must have one floating-point dtype, got {found}"
        raise ValueError(message)
    shapes = [tuple(x.shape) for x in (q_NHD, k_KGD, v_KGE)]
    if not all(len(shape) == 3 for shape in shapes):
        message = f"q, k and v must be [tokens, heads, width], got {shapes}"
        raise ValueError(message)
    q, k, v = shapes
    if q[0] != num_tokens or k[:2] != v[:2] or k[0] != num_keys or q[2] != k[2]:
        message = (
            f"q, k and v of {num_tokens} tokens and {num_keys} keys must be [N, H, D], [K, G, D] "
            f"and [K, G, E], got {q}, {k} and {v}"
        )
        raise ValueError(message)
    if not k[1] or not q[1] or q[1] % k[1]:
        message = f"{q[1]} query heads are no multiple of {k[1]} key/value groups"
        raise ValueError(message)
