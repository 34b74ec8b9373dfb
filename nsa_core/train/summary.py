"""metrics.json and goodput.json: the run in a few numbers, at every checkpoint and at the end."""

import json
import time
from dataclasses import asdict
from typing import Any

from nsa_core.rundir.atomic import write_text
from nsa_core.rundir.goodput import write_goodput
from nsa_core.rundir.layout import RunDir
from nsa_core.train.csv_log import VALIDATION_COLUMNS
from nsa_core.train.session import Session


def write_summary(session: Session, *, is_final: bool = False) -> None:
    """Replace both files; a full disk costs them, not the run."""
    run, writes = session.context.run, session.telemetry.writes
    goodput = session.clock.read(attempt=session.context.manifest.attempt, step=session.step)
    writes.attempt("goodput.json", lambda: write_goodput(run, goodput))
    metrics = _metrics(session) | {"goodput": goodput.goodput, "is_final": is_final}
    text = json.dumps(metrics, indent=2) + "\n"
    writes.attempt("metrics.json", lambda: write_text(run.metrics, text))


def _metrics(session: Session) -> dict[str, Any]:
    validations = _read_validations(session.context.run)
    rate = session.telemetry.median_tokens_per_s
    return {
        "schema_version": 1,
        "run_id": session.context.manifest.run_id,
        "attempt": session.context.manifest.attempt,
        "updated_unix_s": time.time(),
        "step": session.step,
        "steps": session.config.schedule.steps,
        "tokens_seen": session.position.tokens_seen,
        "num_parameters": session.model.num_parameters(),
        "tokens_per_s": rate,
        "mfu": session.meter.mfu(rate),
        "skipped_steps": session.num_skipped,
        "validation_first": validations[0] if validations else None,
        "validation_last": validations[-1] if validations else None,
        "bits_per_byte_best": min((row["bits_per_byte"] for row in validations), default=None),
        "checkpoints": {
            **{k: round(v, 4) for k, v in asdict(session.keeper.statistics).items()},
            "last_step": session.keeper.whole_step,
            "known_good_step": session.keeper.known_good,
        },
        "recall": asdict(session.recall) if session.recall is not None else None,
        "telemetry_lines_lost": session.telemetry.writes.num_lost,
        "kernel_paths": session.kernel_paths,
    }


def _read_validations(run: RunDir) -> list[dict[str, float]]:
    """Rows of val.csv, oldest first, of all attempts; a row that is damaged meanwhile is none."""
    try:
        with run.validation_csv.open(encoding="utf-8", errors="replace", newline="") as file:
            found = [_parse_validation(line) for line in file]
    except OSError:
        return []
    return [row for row in found if row is not None]


def _parse_validation(line: str) -> dict[str, float] | None:
    cells = dict(zip(VALIDATION_COLUMNS, line.strip().split(","), strict=False))
    try:
        return {
            "step": int(cells["step"]),
            "val_loss": float(cells["val_loss"]),
            "bits_per_byte": float(cells["bits_per_byte"]),
        }
    except (KeyError, ValueError):  # the header, or no row
        return None
