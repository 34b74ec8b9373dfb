"""How an attempt ended, for tests that judge it."""

from nsa_core.rundir.exit import ExitRecord, write_exit
from nsa_core.rundir.layout import RunDir


def exit_record(code: int, **fields) -> ExitRecord:
    given = {
        "run_id": "r", "attempt": 1, "reason": "why", "step": 5, "checkpoint_step": None,
        "at": 1.0, "by": "trainer",
    }  # fmt: skip
    return ExitRecord(code=code, **(given | fields))


def write_end(run: RunDir, code: int = 10, **fields) -> ExitRecord:
    """Leave the record of an end that was saved."""
    record = exit_record(code, **({"run_id": run.run_id, "checkpoint_step": 5} | fields))
    write_exit(run, record)
    return record
