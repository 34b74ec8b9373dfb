"""Policy: how many checkpoints a backup or a pod keeps."""

from dataclasses import dataclass

from nsa_ops.errors import ConfigurationError


@dataclass(frozen=True)
class Policy:
    """What is kept.

    Attributes:
        keep_last: Newest checkpoints.
        keep_every: Every checkpoint at a multiple of this step, for good; 0 for none.
    """

    keep_last: int
    keep_every: int = 0

    @property
    def words(self) -> str:
        """The policy in words."""
        every = f" and every one at a multiple of step {self.keep_every}" if self.keep_every else ""
        return f"keep the last {self.keep_last}{every}"


def choose_policy(keep_last: int | None, keep_every: int) -> Policy | None:
    """The policy that was asked for; None keeps everything.

    Raises:
        ConfigurationError: If only the second half of one was said.
    """
    if keep_last is None and keep_every:
        message = f"`--keep-every {keep_every}` says what is kept beside the newest ones"
        raise ConfigurationError(message, hint="Say how many with `--keep K`, too")
    return None if keep_last is None else Policy(keep_last, keep_every)
