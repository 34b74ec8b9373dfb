"""`python -m nsa_ops.pod.act`: one action on a run, JSON on stdin, JSON on stdout, idempotent."""

import sys

from pydantic import ValidationError

from nsa_core.rundir.manifest import ManifestError
from nsa_ops.pod.attempts import next_attempt, prepare_run
from nsa_ops.pod.messages import (
    ACTION,
    HaltAction,
    NextAttemptAction,
    PrepareRunAction,
    Reply,
    ReplyCode,
    SignalAction,
)
from nsa_ops.pod.stops import halt, send_signal


def act(content: bytes) -> Reply:
    """Carry out the action that a JSON document asks for."""
    try:
        asked = ACTION.validate_json(content)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        return Reply(
            action="unknown", code=ReplyCode.USAGE, outcome="refused",
            message=f"the request cannot be read: {where}: {first['msg']}",
        )  # fmt: skip
    try:
        match asked:
            case HaltAction():
                return halt(asked)
            case SignalAction():
                return send_signal(asked)
            case PrepareRunAction():
                return prepare_run(asked)
            case NextAttemptAction():
                return next_attempt(asked)
    except ManifestError as error:
        return Reply(
            action=asked.action, code=ReplyCode.NOT_FOUND, outcome="not_found", message=str(error)
        )
    except ValidationError as error:
        return Reply(
            action=asked.action, code=ReplyCode.USAGE, outcome="refused",
            message=f"the changed manifest is not valid: {error.errors()[0]['msg']}",
        )  # fmt: skip
    except OSError as error:
        return Reply(
            action=asked.action, code=ReplyCode.LOCAL_RESOURCE, outcome="refused",
            message=f"{asked.run_dir}: {error.strerror or error}",
        )  # fmt: skip


def main() -> int:
    """Read the action from stdin, write the reply to stdout; the exit code is the reply's."""
    reply = act(sys.stdin.buffer.read())
    sys.stdout.write(reply.model_dump_json() + "\n")
    return int(reply.code)


if __name__ == "__main__":
    sys.exit(main())
