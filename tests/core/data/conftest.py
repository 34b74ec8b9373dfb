"""Text of known content, and the cases that others made."""

import json
from pathlib import Path

import pytest

from nsa_core.config.training import DataConfig

CASES = Path(__file__).parents[4] / "shared" / "cases" / "text"


@pytest.fixture(scope="session")
def cases() -> Path:
    if not CASES.is_dir():
        pytest.skip("the shared cases are not beside this checkout")
    return CASES


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """40 documents of different lengths, about 13 KB; every fifth one is long."""
    path = tmp_path / "corpus.jsonl"
    texts = [
        f"Document {n}. " + "words and more words " * (40 if n % 5 == 0 else 8) for n in range(40)
    ]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def local(path: Path, **settings) -> DataConfig:
    """Configuration of a local byte-level corpus."""
    defaults = {"tokenizer": "byte", "validation_fraction": 0.2}
    return DataConfig(source="fineweb_edu_local", path=str(path), **{**defaults, **settings})
