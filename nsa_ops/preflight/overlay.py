"""Lay `--set` values over a configuration that exists already."""

from collections.abc import Sequence

from pydantic import ValidationError

from nsa_core.config.base import ConfigError
from nsa_core.config.recipe import parse_set
from nsa_core.config.run import RunConfig
from nsa_ops.errors import ConfigurationError


def overlay(config: RunConfig, sets: Sequence[str]) -> RunConfig:
    """The configuration with these values changed; the same object without any.

    Raises:
        ConfigurationError: If a key is unknown or the values cannot go together.
    """
    if not sets:
        return config
    nested = config.model_dump(mode="python")
    try:
        for flag in sets:
            key, value = parse_set(flag)
            *sections, name = key.split(".")
            target = nested
            for section in sections:
                target = target[section]
            target[name] = value
        return RunConfig.model_validate(nested)
    except ConfigError as error:
        raise ConfigurationError(str(error), hint="See `nsa-ops config show`") from error
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        message = f"--set: {where}: {first['msg']}".replace(": : ", ": ")
        raise ConfigurationError(message, hint="See `nsa-ops config show`") from error
