"""The tokenizer that a configuration asks for: made, loaded, or trained on the run's text."""

from collections.abc import Iterable
from pathlib import Path

import tokenizers

from nsa_core.config.training import DataConfig
from nsa_core.data.manifest import TokenizerRecord
from nsa_core.data.sources.base import hash_file
from nsa_core.data.tokenizer import ByteTokenizer, Tokenizer


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

    Args:
        config: Says which, and where its vocabulary is.
        texts: Training documents; read only where a `bpe` is trained.

    Raises:
        DataError: If a vocabulary is missing, damaged, or cannot be fetched.
    """
    if config.tokenizer == "byte":
        return ByteTokenizer()
    path = Path(config.tokenizer_path) if config.tokenizer_path else None
    if config.tokenizer == "gpt2":
        from nsa_core.data.gpt2_tokenizer import load_gpt2

        return load_gpt2(path)
    from nsa_core.data.bpe_tokenizer import load_bpe, train_bpe

    return load_bpe(path) if path else train_bpe(texts, config.bpe_vocab_size)


def load_tokenizer(name: str, folder: Path) -> Tokenizer:
    """The tokenizer that was saved into a folder of shards or a checkpoint.

    Raises:
        DataError: If the folder does not hold it.
    """
    if name == "byte":
        return ByteTokenizer()
    if name == "gpt2":
        from nsa_core.data.gpt2_tokenizer import load_gpt2

        return load_gpt2(folder)
    from nsa_core.data.bpe_tokenizer import SAVED_NAME, load_bpe

    return load_bpe(folder / SAVED_NAME)


def describe_tokenizer(tokenizer: Tokenizer) -> TokenizerRecord:
    """The tokenizer as a manifest names it."""
    return TokenizerRecord(
        name=tokenizer.name,
        vocab_size=tokenizer.vocab_size,
        end_id=tokenizer.end_id,
        fingerprint=tokenizer.fingerprint,
    )
