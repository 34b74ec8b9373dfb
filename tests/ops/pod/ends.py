"""How an attempt ended, for tests that judge it."""

from nsa_core.rundir.exit import ExitRecord


def exit_record(code: int) -> ExitRecord:
    return ExitRecord(
        run_id="r", attempt=1, code=code, reason="why", step=5, checkpoint_step=None, at=1.0,
        by="trainer",
    )  # fmt: skip
