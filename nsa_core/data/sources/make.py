"""The source that a configuration asks for."""

from pathlib import Path

from nsa_core.config.training import DataConfig
from nsa_core.data.sources.base import Source
from nsa_core.data.sources.local import LocalSource
from nsa_core.data.sources.stdlib import StdlibSource
from nsa_core.data.sources.synthetic import SyntheticSource


def make_source(config: DataConfig, seed: int) -> Source:
    """A fresh source, read from its start.

    Raises:
        DataError: If there is nothing at `config.path`.
    """
    if config.source == "stdlib":
        return StdlibSource()
    if config.source == "synthetic":
        return SyntheticSource(seed, is_endless=config.max_tokens > 0)
    if config.source == "fineweb_edu_local":
        return LocalSource(Path(config.path), config.text_key)
    from nsa_core.data.sources.hub import HubSource  # only here: `datasets` is slow to import

    return HubSource(config.path or "HuggingFaceFW/fineweb-edu", config.subset, config.text_key)
