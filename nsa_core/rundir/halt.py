"""The stop request: a file in the run directory, bound to the run and the attempt it means."""

from datetime import UTC, datetime
from pathlib import Path

from nsa_core.config.base import TolerantModel, one_line
from nsa_core.rundir.atomic import move_aside, write_text
from nsa_core.rundir.bounded_json import LINE, JsonError, open_regular, parse_model
from nsa_core.rundir.layout import RunDir
from nsa_core.rundir.redaction import FreeText, redact

_MAX_BYTES = 65_536


class HaltRequest(TolerantModel):
    """Content of `.HALT`.

    Attributes:
        reason: Why, in one line, redacted; a watchdog's rule id comes first.
        rule: Rule of the watchdog that asks; empty where a person does.
        by: Who asks: `operator`, `watchdog` or `file` (a plain line written by hand).
        grace_s: Seconds the trainer has before it gets a signal.
    """

    run_id: str
    attempt: int
    reason: FreeText
    by: str
    at: float
    grace_s: float = 60.0
    save_checkpoint: bool = True
    rule: str = ""


def write_halt(run: RunDir, request: HaltRequest) -> None:
    """Put a stop request into the run directory, whole; a folder in its place is moved aside."""
    if run.halt.exists() and not run.halt.is_file():
        move_aside(run.halt)
    write_text(run.halt, request.model_dump_json() + "\n")


def _read_text(run: RunDir) -> str:
    """The beginning of the file: whatever its length, its existence asks for a stop."""
    with open_regular(run.halt) as file:
        return file.read(_MAX_BYTES).decode(errors="replace")


def _parse_request(text: str) -> HaltRequest:
    return parse_model(HaltRequest, text.encode(), LINE)


def _from_plain_line(text: str, path: Path, run_id: str, attempt: int) -> HaltRequest:
    reason = text.strip().removeprefix("halt:").strip() or "a plain .HALT file"
    return HaltRequest(
        run_id=run_id, attempt=attempt, reason=reason, by="file", at=path.stat().st_mtime
    )


def read_halt(
    run: RunDir, *, run_id: str, attempt: int, has_appeared: bool = False
) -> HaltRequest | None:
    """The stop request that means this attempt, or None; one that cannot be read means none.

    A JSON request counts when run id and attempt agree. Any other content is a line written by hand
    (`echo "halt: reason" > .HALT`); it counts when it came after the manifest of the attempt. Both
    times are of the file system that holds the two: no other clock has a say.

    Args:
        run: Run directory.
        run_id: Run that asks.
        attempt: Its attempt.
        has_appeared: The caller saw it come during this attempt, whatever the times of files say.
    """
    try:
        text = _read_text(run)
    except (OSError, JsonError):
        return None
    try:
        request = _parse_request(text)
    except ValueError:
        request = _from_plain_line(text, run.halt, run_id, attempt)
        return request if has_appeared or request.at >= _begun_at(run) else None
    return request if (request.run_id, request.attempt) == (run_id, attempt) else None


def _begun_at(run: RunDir) -> float:
    """When the manifest of the attempt was written, by the clock of its file system."""
    try:
        return run.manifest.stat().st_mtime
    except FileNotFoundError:
        return 0.0


def describe_halt_file(run: RunDir) -> str | None:
    """The content of a `.HALT` that is ignored, in one line."""
    try:
        text = _read_text(run)
        written = datetime.fromtimestamp(run.halt.stat().st_mtime, UTC)
    except FileNotFoundError:
        return None
    except (OSError, JsonError) as error:
        return f"it cannot be read: {one_line(error)}"
    try:
        request = _parse_request(text)
    except ValueError:
        meant = redact(text.strip())[:120]
    else:
        meant = f"{request.by} asked {request.run_id} attempt {request.attempt}: {request.reason}"
    return f"{meant} (written {written:%Y-%m-%d %H:%M:%S} UTC)"
