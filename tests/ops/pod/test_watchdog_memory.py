"""What a watchdog knows of a run survives its own end and the next attempt."""

from nsa_core.config.run import RunConfig
from nsa_core.rundir.atomic import append_line
from nsa_core.rundir.layout import RunDir
from nsa_core.rundir.manifest import RunManifest, write_manifest
from nsa_ops.pod.journal import read_watchdog
from nsa_ops.pod.watchdog import Watchdog
from tests.ops.pod.health import beat


def begin(run, attempt):
    write_manifest(
        run,
        RunManifest(
            run_id="r", attempt=attempt, config=RunConfig(), config_sha256="0" * 64,
            created_unix_s=1.0,
        ),
    )  # fmt: skip


def test_the_rate_of_a_run_survives_its_watchdog_and_a_resume(tmp_path):
    run = RunDir(tmp_path / "r")
    run.root.mkdir()
    begin(run, attempt=1)
    for step in range(1, 30):
        append_line(run.heartbeat(), beat(step, tokens_per_s=1000.0).model_dump_json())
    first = Watchdog(run)
    first._look()
    assert read_watchdog(run).best_tokens_per_s == 1000.0

    run.heartbeat().unlink()  # as if it were longer than what is read of the past
    begin(run, attempt=2)
    first._look()
    second = Watchdog(run)
    assert (first._tracker.best_rate, second._tracker.best_rate) == (1000.0, 1000.0)
