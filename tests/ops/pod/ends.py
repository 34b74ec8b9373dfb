"""How an attempt ended, and what process.json says, for tests that judge it."""

from nsa_core.rundir.exit import ExitRecord, write_exit
from nsa_core.rundir.layout import RunDir
from nsa_core.rundir.process import ProcessIdentity
from nsa_ops.pod.processes import RunProcesses, write_processes


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


def record_process(run: RunDir, identity: ProcessIdentity | None, **fields) -> None:
    """Leave the record of a runner and its trainer, which are one process here."""
    given = {"run_id": run.run_id, "attempt": 1, "started_unix_s": 1.0} | fields
    write_processes(run, RunProcesses(runner=identity, trainer=identity, **given))
