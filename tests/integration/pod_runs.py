"""Make run directories whose trainer is `fake_trainer`, and wait for what happens in them."""

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from nsa_core.config.run import RunConfig
from nsa_core.rundir.layout import RunDir
from nsa_core.rundir.manifest import RunManifest, write_manifest

FAKE = "tests.integration.fake_trainer"


def make_run(root: Path, *scripts: list[list[Any]], limits: dict[str, Any] | None = None) -> RunDir:
    """A run directory with one script an attempt; the last one is used for all later attempts."""
    run = RunDir(root / "run-1")
    run.root.mkdir(parents=True)
    config = RunConfig.model_validate({"watchdog": limits or {}})
    write_manifest(
        run,
        RunManifest(
            run_id=run.run_id, config=config, config_sha256="0" * 64, created_unix_s=time.time()
        ),
    )
    (run.root / "script.json").write_text(json.dumps(scripts))
    return run


def start(part: str, run: RunDir, *more: str) -> subprocess.Popen[bytes]:
    """Start `nsa_ops.pod.<part>` on a run with the fake trainer, its errors kept in a file."""
    with (run.root / f"{part}.err").open("ab") as errors:
        return subprocess.Popen(
            [sys.executable, "-m", f"nsa_ops.pod.{part}", "--run-dir", str(run.root),
             "--module", FAKE, *more],
            stdin=subprocess.DEVNULL, stdout=errors, stderr=errors, start_new_session=True,
        )  # fmt: skip


def wait_for(what: Callable[[], Any], timeout_s: float = 15.0) -> Any:
    """The first true answer of a question that is asked every 20 ms."""
    end = time.monotonic() + timeout_s
    while time.monotonic() < end:
        answer = what()
        if answer:
            return answer
        time.sleep(0.02)
    message = f"did not happen within {timeout_s} s"
    raise AssertionError(message)
