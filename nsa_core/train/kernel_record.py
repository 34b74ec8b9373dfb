"""Hold the trainer to the backends that were proven on this card before the launch."""

from collections.abc import Sequence

from nsa_core.kernels.backend import BackendChoice
from nsa_core.rundir.manifest import RunManifest
from nsa_core.train.failure import ConfigurationError


def require_recorded(manifest: RunManifest, choices: Sequence[BackendChoice]) -> None:
    """Go on only with the backends of the manifest; a branch that it does not name is free.

    Raises:
        ConfigurationError: If one differs: the machine has changed since it was proven.
    """
    for choice in choices:
        recorded = manifest.kernels.get(choice.branch)
        if recorded is not None and recorded.name != choice.name:
            message = (
                f"the preflight proved {recorded.name} for the {choice.branch} branch, and here it "
                f"would be {choice.name} ({choice.reason})"
            )
            raise ConfigurationError(
                message, hint="The machine has changed: run `nsa-ops preflight`, then launch again"
            )
