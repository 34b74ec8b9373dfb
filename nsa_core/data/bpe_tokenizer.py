"""A byte-level BPE tokenizer trained here on the run's own text."""

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import tokenizers
from numpy.typing import NDArray
from tokenizers import decoders, models, pre_tokenizers, trainers

from nsa_core.data.errors import DataError
from nsa_core.data.tokenizer import Ids
from nsa_core.rundir.atomic import write_text
from nsa_core.rundir.bounded_json import JsonError, read_bounded

SAVED_NAME = "tokenizer.json"
#: Text beyond this adds little to the merges and takes memory and time.
MAX_TRAINING_BYTES = 64 * 2**20
#: 65,536 ids with their merges take about 4 MB.
MAX_SAVED_BYTES = 64 * 2**20


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

    Args:
        texts: Documents of the training split, in a fixed order.
        vocab_size: Ids, the end token included; fewer where the text holds no more pairs.
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
