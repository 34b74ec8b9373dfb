"""What every configuration object has in common: frozen, and an unknown key is an error."""

from pydantic import BaseModel, ConfigDict


class FrozenModel(BaseModel):
    """A frozen record that refuses keys it does not know."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())


class TolerantModel(BaseModel):
    """A frozen record from a file that a newer version may have written: unknown keys are kept."""

    model_config = ConfigDict(extra="allow", frozen=True, protected_namespaces=())
