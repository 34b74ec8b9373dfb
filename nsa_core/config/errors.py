"""ConfigError: a configuration that cannot be used, said in one line."""


class ConfigError(ValueError):
    """A recipe, profile, flag or variable that cannot be used; the message names it and the fix."""
