"""AttemptId: what tells two attempts apart that have the same run id and the same number."""

import secrets
from typing import Annotated

from pydantic import Field

#: 128 random bits in hex; empty in files that were written before attempts had one.
AttemptId = Annotated[str, Field(pattern=r"^(?:[0-9a-f]{32})?$")]


def new_attempt_id() -> str:
    """An identity that no other attempt has and that nobody can guess."""
    return secrets.token_hex(16)
