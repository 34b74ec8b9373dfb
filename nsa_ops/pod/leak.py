"""The causality probe of a running attempt: started beside it when a loss is too good."""

import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Literal

from nsa_core.rundir.bounded_json import read_model
from nsa_core.rundir.layout import RunDir
from nsa_core.rundir.manifest import RunManifest
from nsa_core.rundir.report import Report

CHECKS_MODULE = "nsa_core.checks"
#: The quick probes take seconds on a card and minutes on a busy processor.
PROBE_S = 900.0
#: Rules that raise a suspicion which this probe can settle.
SUSPICIONS = frozenset({"loss_too_good", "loss_fall"})

#: `broken`: an output moved though only the future was changed; `unknown`: there is no result.
Causality = Literal["not probed", "probing", "holds", "broken", "unknown"]


class CausalityProbe:
    """Probes the code, kernels and sizes of one attempt once; the report stays in the run."""

    def __init__(self, run: RunDir, manifest: RunManifest, module: str = CHECKS_MODULE) -> None:
        self._file = report_file(run, manifest.attempt)
        self._config = manifest.config
        self._module = module
        self._process: subprocess.Popen[bytes] | None = None
        self._began_s = 0.0

    def start(self) -> bool:
        """Start it, unless this attempt was probed before; whether it was started now."""
        if self._process is not None or self._file.exists():
            return False
        words = ("--json", "--tier", "quick", "--device", self._config.runtime.device)
        with self._file.open("wb") as out:
            self._process = subprocess.Popen(
                ["nice", sys.executable, "-m", self._module, *words, "--config", "-"],
                stdin=subprocess.PIPE, stdout=out, stderr=subprocess.DEVNULL,
                start_new_session=True,
            )  # fmt: skip
        self._began_s = time.monotonic()
        given = self._process.stdin
        if given is not None:
            with suppress(BrokenPipeError), given:  # it ended at once; its report will lack
                given.write(self._config.model_dump_json().encode())
        return True

    def read(self) -> Causality:
        """What is known now; one that takes too long is ended."""
        if self._process is not None and self._process.poll() is None:
            if time.monotonic() - self._began_s < PROBE_S:
                return "probing"
            self._process.kill()
        return read_causality(self._file, is_probing=False)


def report_file(run: RunDir, attempt: int) -> Path:
    """Where the report of an attempt is."""
    return run.root / f"causality_attempt{attempt}.json"


def read_causality(file: Path, *, is_probing: bool | None = None) -> Causality:
    """What a report shows; an incomplete one is still being written, or was left so by a kill.

    `is_probing`: whether the probe still runs; None judges by the age of the file.
    """
    try:
        report = read_model(Report, file)
    except FileNotFoundError:
        return "not probed"
    except OSError:
        return "unknown"
    except ValueError:
        young = time.time() - file.stat().st_mtime < PROBE_S
        return "probing" if (young if is_probing is None else is_probing) else "unknown"
    statuses = {check.status for check in report.checks if check.name.startswith("causality.")}
    if "fail" in statuses:
        return "broken"
    return "holds" if "pass" in statuses else "unknown"
