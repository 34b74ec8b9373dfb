"""The GPT-2 tokenizer through tiktoken, from a local vocabulary folder or fetched once."""

import base64
import binascii
import hashlib
import itertools
import re
import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import tiktoken
from numpy.typing import NDArray

from nsa_core.data.ids import Ids
from nsa_core.data.reporting import DataError
from nsa_core.rundir.atomic import write_bytes

SAVED_NAME = "gpt2.tiktoken"
MERGES_NAME = "vocab.bpe"
END_ID = 50_256
FETCH_DEADLINE_S = 120.0
#: Splits a text into words before merging (the pattern published with GPT-2's encoder.py).
PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
#: SHA-256 of the saved form; tiktoken publishes the same one for its `r50k_base.tiktoken`.
SAVED_SHA256 = "306cd27f03c1a714eca7108e03d66b7dc042abe8c258b44c199a7ed9838dd930"
HINT = (
    f"set data.tokenizer_path to a folder with GPT-2's `{MERGES_NAME}` (or a saved "
    f"`{SAVED_NAME}`), or use data.tokenizer byte or bpe"
)
MAX_WHITE_SPACE = 4096
_LONG_RUN = re.compile(rf"\s{{{MAX_WHITE_SPACE}}}")
Ranks = dict[bytes, int]


class Gpt2Tokenizer:
    """GPT-2's 50,257 ids; 50,256 ends a document and is never made from text."""

    name = "gpt2"
    vocab_size = END_ID + 1
    end_id = END_ID
    fingerprint = hashlib.sha256(f"gpt2/1 {PATTERN} {SAVED_SHA256}".encode()).hexdigest()

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._encoding = tiktoken.Encoding(
            "nsa-gpt2", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens={}
        )

    def encode(self, text: str) -> Ids:
        """The ids of a text; `<|endoftext|>` in it is plain text."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        """The ids of each text, made in several threads."""
        parts = [split_long_runs(text) for text in texts]
        flat = [part for each in parts for part in each]
        found = iter(self._encoding.encode_ordinary_batch(flat))
        joined = ([number for _ in each for number in next(found)] for each in parts)
        return [np.asarray(ids, dtype=np.uint32) for ids in joined]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of some ids; ids from 50,256 on are no text."""
        return self._encoding.decode([n for n in ids if n < self.end_id], errors="replace")

    def token_num_bytes(self) -> NDArray[np.int32]:
        """Length of each token's bytes, 0 for the end token."""
        lengths = np.zeros(self.vocab_size, dtype=np.int32)
        for token, rank in self._ranks.items():
            lengths[rank] = len(token)
        return lengths

    def save(self, folder: Path) -> None:
        """Write the vocabulary as tiktoken does: a base64 token and its rank a line."""
        write_bytes(folder / SAVED_NAME, format_saved(self._ranks))


def split_long_runs(text: str) -> list[str]:
    """Cut a text inside every run of `MAX_WHITE_SPACE` white-space characters.

    tiktoken 0.14 panics with a stack overflow on runs of about a million; text is not like that,
    so that the ids of ordinary text are the published ones.
    """
    cuts = [0, *(run.end() for run in _LONG_RUN.finditer(text)), len(text)]
    return [text[start:stop] for start, stop in itertools.pairwise(cuts) if start < stop]


def load_gpt2(folder: Path | None) -> Gpt2Tokenizer:
    """The tokenizer from a vocabulary folder, or from tiktoken's cache or site without one.

    Raises:
        DataError: If the folder holds no GPT-2 vocabulary, or it cannot be fetched.
    """
    ranks = _fetch_ranks() if folder is None else _read_folder(folder)
    if hashlib.sha256(format_saved(ranks)).hexdigest() != SAVED_SHA256:
        message = f"the vocabulary in {folder} is not GPT-2's: {len(ranks)} tokens, other content"
        raise DataError(message, HINT)
    return Gpt2Tokenizer(ranks)


def parse_merges(text: str) -> Ranks:
    """Ranks from the merge rules of a `vocab.bpe`: 256 bytes first, then one token a rule.

    GPT-2 writes a byte that does not print as a character from U+0100 on, in order.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    order = printable + others
    spelled = {chr(byte): byte for byte in printable}
    spelled |= {chr(256 + place): byte for place, byte in enumerate(others)}
    ranks = {bytes([byte]): rank for rank, byte in enumerate(order)}
    for rule in text.splitlines():
        if rule.startswith("#version") or not rule.strip():
            continue
        left, right = rule.split(" ")
        ranks[bytes(spelled[character] for character in left + right)] = len(ranks)
    return ranks


def format_saved(ranks: Ranks) -> bytes:
    """Ranks as tiktoken's files have them: a token in base64 and its rank a line."""
    ordered = sorted(ranks.items(), key=lambda item: item[1])
    return b"".join(base64.b64encode(token) + b" %d\n" % rank for token, rank in ordered)


def parse_saved(content: bytes) -> Ranks:
    """Ranks from a saved `gpt2.tiktoken`."""
    pairs = (line.split() for line in content.splitlines() if line)
    return {base64.b64decode(token, validate=True): int(rank) for token, rank in pairs}


def _read_folder(folder: Path) -> Ranks:
    try:
        if (folder / SAVED_NAME).is_file():
            return parse_saved((folder / SAVED_NAME).read_bytes())
        return parse_merges((folder / MERGES_NAME).read_text(encoding="utf-8"))
    except OSError as error:
        message = f"no GPT-2 vocabulary in {folder}: {error.strerror or error}"
        raise DataError(message, HINT) from error
    except (ValueError, KeyError, binascii.Error) as error:
        message = f"the GPT-2 vocabulary in {folder} is damaged: {error}"
        raise DataError(message, HINT) from error


def _fetch_ranks() -> Ranks:
    """Ask tiktoken in a thread, because its download has no deadline of its own."""
    found: list[Ranks] = []
    failures: list[Exception] = []

    def fetch() -> None:
        try:
            found.append(dict(tiktoken.get_encoding("gpt2")._mergeable_ranks))
        except (OSError, ValueError) as error:
            failures.append(error)

    thread = threading.Thread(target=fetch, name="fetch-gpt2", daemon=True)
    thread.start()
    thread.join(FETCH_DEADLINE_S)
    if found:
        return found[0]
    why = failures[0] if failures else f"no answer in {FETCH_DEADLINE_S:.0f} s"
    message = f"GPT-2's vocabulary is not in tiktoken's cache and cannot be fetched ({why})"
    raise DataError(message, HINT)
