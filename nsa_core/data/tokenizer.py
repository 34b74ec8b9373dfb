"""Tokenizers: bytes, byte-level BPE trained on the run's own text, and the choice among them."""

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import tokenizers
from numpy.typing import NDArray
from tokenizers import decoders, models, pre_tokenizers, trainers

from nsa_core.config.base import FrozenModel
from nsa_core.config.training import DataConfig
from nsa_core.data.gpt2_tokenizer import load_gpt2
from nsa_core.data.ids import Ids
from nsa_core.data.reporting import DataError
from nsa_core.rundir.atomic import write_text
from nsa_core.rundir.bounded_json import JsonError, read_bounded
from nsa_core.rundir.checkpoint import hash_file

SAVED_NAME = "tokenizer.json"
#: Text beyond this adds little to the merges and takes memory and time.
MAX_TRAINING_BYTES = 64 * 2**20
#: 65,536 ids with their merges take about 4 MB.
MAX_SAVED_BYTES = 64 * 2**20


class TokenizerRecord(FrozenModel):
    """Which tokenizer made the ids."""

    name: str
    vocab_size: int
    end_id: int
    fingerprint: str


class Tokenizer(Protocol):
    """Turns text into ids; `end_id` follows every document and is never made from text.

    Attributes:
        vocab_size: Number of ids, `end_id` included.
        end_id: The end-of-document token.
        fingerprint: SHA-256 of everything that decides the ids of a text.
    """

    name: str
    vocab_size: int
    end_id: int
    fingerprint: str

    def encode(self, text: str) -> Ids:
        """The ids of a text, without an end token."""

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        """The ids of several texts; the same as `encode` of each."""

    def decode(self, ids: Sequence[int]) -> str:
        """The text of some ids; bytes that are not UTF-8 become U+FFFD, end tokens vanish."""

    def token_num_bytes(self) -> NDArray[np.int32]:
        """Bytes of text of each id [vocab_size]; 0 for the end token."""

    def save(self, folder: Path) -> None:
        """Write what `load_tokenizer` needs into a folder; nothing for `byte`."""


class ByteTokenizer:
    """Each byte of the UTF-8 text is an id; id 256 ends a document."""

    name = "byte"
    vocab_size = 257
    end_id = 256
    fingerprint = hashlib.sha256(b"byte/1: 256 bytes, end 256").hexdigest()

    def encode(self, text: str) -> Ids:
        """The UTF-8 bytes of a text; a lone surrogate is three bytes that decode to U+FFFD."""
        content = text.encode("utf-8", errors="surrogatepass")
        return np.frombuffer(content, dtype=np.uint8).astype(np.uint32)

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        """The bytes of each text."""
        return [self.encode(text) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of some bytes; ids from 256 on are no text."""
        return bytes(number for number in ids if number < self.end_id).decode(
            "utf-8", errors="replace"
        )

    def token_num_bytes(self) -> NDArray[np.int32]:
        """One byte each, none for the end token."""
        lengths = np.ones(self.vocab_size, dtype=np.int32)
        lengths[self.end_id] = 0
        return lengths

    def save(self, folder: Path) -> None:
        """There is nothing to save."""


class BpeTokenizer:
    """Byte-level BPE; the last id ends a document and is no token of the model, so never text."""

    name = "bpe"

    def __init__(self, content: str) -> None:
        self._content = content
        self._model = tokenizers.Tokenizer.from_str(content)
        self.end_id: int = self._model.get_vocab_size()
        self.vocab_size = self.end_id + 1
        self.fingerprint = hashlib.sha256(
            f"bpe/1 end {self.end_id}\n{content}".encode()
        ).hexdigest()

    def encode(self, text: str) -> Ids:
        """The ids of a text."""
        return np.asarray(self._model.encode(text).ids, dtype=np.uint32)

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        """The ids of each text."""
        found = self._model.encode_batch_fast(list(texts))
        return [np.asarray(encoding.ids, dtype=np.uint32) for encoding in found]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of some ids; ids from `end_id` on are no text."""
        text: str = self._model.decode([number for number in ids if number < self.end_id])
        return text

    def token_num_bytes(self) -> NDArray[np.int32]:
        """Length of each token: a byte-level token is spelled with one character a byte."""
        lengths = np.zeros(self.vocab_size, dtype=np.int32)
        for token, number in self._model.get_vocab().items():
            lengths[number] = len(token)
        return lengths

    def save(self, folder: Path) -> None:
        """Write the trained model as JSON."""
        write_text(folder / SAVED_NAME, self._content)


def train_bpe(texts: Iterable[str], vocab_size: int) -> BpeTokenizer:
    """Train on at most 64 MiB of text; the same texts give the same tokenizer.

    `vocab_size` includes the end token; there are fewer ids where the text holds no more pairs.
    """
    model = tokenizers.Tokenizer(models.BPE())
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - 1,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=[],
        show_progress=False,
    )
    model.train_from_iterator(_first_bytes(texts, MAX_TRAINING_BYTES), trainer)
    return BpeTokenizer(model.to_str())


def load_bpe(path: Path) -> BpeTokenizer:
    """The tokenizer that `save` wrote.

    Raises:
        DataError: If the file cannot be read or is no byte-level BPE without added tokens.
    """
    hint = "correct data.tokenizer_path, or leave it empty to train one on the run's text"
    try:
        content = read_bounded(path, MAX_SAVED_BYTES).decode("utf-8")
    except (OSError, UnicodeDecodeError, JsonError) as error:
        message = f"the bpe tokenizer {path} cannot be read: {error}"
        raise DataError(message, hint) from error
    try:
        _check_form(content)
        return BpeTokenizer(content)
    except Exception as error:  # tokenizers raises bare Exception on a bad model
        message = f"{path} is not a byte-level BPE of the `tokenizers` library: {error}"
        raise DataError(message, hint) from error


def _check_form(content: str) -> None:
    form = json.loads(content)
    found = (form["model"]["type"], form["decoder"]["type"], form["added_tokens"])
    if found != ("BPE", "ByteLevel", []):
        message = f"model, decoder and added tokens are {found}, not BPE, ByteLevel and none"
        raise ValueError(message)


def _first_bytes(texts: Iterable[str], limit_bytes: int) -> Iterator[str]:
    num_bytes = 0
    for text in texts:
        yield text
        num_bytes += len(text.encode())
        if num_bytes >= limit_bytes:
            return


def tokenizer_identity(config: DataConfig) -> str:
    """What decides the tokenizer, known before it is loaded or trained."""
    if config.tokenizer != "bpe":
        return config.tokenizer
    saved = Path(config.tokenizer_path)
    if config.tokenizer_path and saved.is_file():
        return f"bpe saved {hash_file(saved)}"
    return f"bpe trained {config.bpe_vocab_size} tokenizers {tokenizers.__version__}"


def make_tokenizer(config: DataConfig, texts: Iterable[str]) -> Tokenizer:
    """The tokenizer of a new staging.

    Raises:
        DataError: If a vocabulary is missing, damaged, or cannot be fetched.
    """
    if config.tokenizer == "byte":
        return ByteTokenizer()
    path = Path(config.tokenizer_path) if config.tokenizer_path else None
    if config.tokenizer == "gpt2":
        return load_gpt2(path)
    return load_bpe(path) if path else train_bpe(texts, config.bpe_vocab_size)


def load_tokenizer(name: str, folder: Path) -> Tokenizer:
    """The tokenizer that was saved into a folder of shards or a checkpoint.

    Raises:
        DataError: If the folder does not hold it.
    """
    if name == "byte":
        return ByteTokenizer()
    if name == "gpt2":
        return load_gpt2(folder)
    return load_bpe(folder / SAVED_NAME)


def describe_tokenizer(tokenizer: Tokenizer) -> TokenizerRecord:
    """The tokenizer as a manifest names it."""
    return TokenizerRecord(
        name=tokenizer.name,
        vocab_size=tokenizer.vocab_size,
        end_id=tokenizer.end_id,
        fingerprint=tokenizer.fingerprint,
    )
