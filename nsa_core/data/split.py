"""Which documents are held out: decided by the hash of their text alone."""

import hashlib

from nsa_core.data.errors import DataError

HASH_BYTES = 32


def content_hash(text: str) -> tuple[bytes, int]:
    """SHA-256 of a text in UTF-8, and its length in bytes."""
    content = text.encode()
    return hashlib.sha256(content).digest(), len(content)


def first_threshold(validation_fraction: float) -> bytes:
    """The bound below which this share of all hashes lies."""
    return int(validation_fraction * 2**64).to_bytes(8, "big") + bytes(HASH_BYTES - 8)


def is_validation(document_hash: bytes, threshold: bytes) -> bool:
    """Equal texts have equal hashes, so they never stand on both sides."""
    return document_hash < threshold


def moved_threshold(lowest: bytes, highest: bytes, *, has_validation: bool) -> bytes:
    """A bound with documents on both sides, where a small corpus fell wholly to one.

    Args:
        lowest: Lowest hash of the corpus.
        highest: Highest hash of the corpus.
        has_validation: Whether all documents fell to validation, and not to training.

    Raises:
        DataError: If all documents are equal, so that none can be held out.
    """
    if lowest == highest:
        message = "the data holds 1 distinct document, and validation needs one of its own"
        raise DataError(message, "add documents, or cut the text into several")
    if has_validation:
        return highest
    return (int.from_bytes(lowest, "big") + 1).to_bytes(HASH_BYTES, "big")
