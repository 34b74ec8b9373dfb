"""What leaves a command on stdout as JSON: one envelope with a versioned schema."""

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Any

from nsa_ops.errors import OpsError

SCHEMA_VERSION = 1


def envelope(command: str, data: object, error: OpsError | None = None) -> str:
    """`{schema, ok, data, errors}` of a command as one line of JSON, in ASCII for any terminal.

    Args:
        command: Words of the command, such as `pod ls`.
        data: Result; None if there is none.
        error: What ended it.
    """
    errors = []
    if error is not None:
        errors = [
            {"message": error.message, "hint": error.hint, "exit_code": error.exit_code},
        ]
    document = {
        "schema": f"nsa-ops/{command.replace(' ', '-')}/{SCHEMA_VERSION}",
        "ok": error is None,
        "data": jsonable(data),
        "errors": errors,
    }
    return json.dumps(document)


def jsonable(value: object) -> Any:
    """A result as JSON knows it: records become objects, sequences lists, paths strings."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value)]
        return {name: jsonable(getattr(value, name)) for name in names}
    dump = getattr(value, "model_dump", None)
    if dump is not None:
        return dump(mode="json")
    if isinstance(value, Mapping):
        return {str(key): jsonable(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [jsonable(item) for item in value]
    if isinstance(value, PurePath):
        return str(value)
    if isinstance(value, float) and not math.isfinite(value):  # JSON knows neither NaN nor infinity
        return None
    return value
