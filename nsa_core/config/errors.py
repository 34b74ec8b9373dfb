"""A configuration that cannot be used, said in one line."""


class ConfigError(ValueError):
    """A recipe, profile, flag or variable that cannot be used; the message names it and the fix."""


class VariableError(ConfigError):
    """An NSA_* variable that is not known, or whose value cannot be read."""
