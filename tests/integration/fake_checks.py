"""A stand-in for `nsa_core.checks` that finds a broken causality."""

import sys
import time

from nsa_core.config.run import RunConfig
from nsa_core.rundir.report import CheckResult, Report

if __name__ == "__main__":
    RunConfig.model_validate_json(sys.stdin.read())
    check = CheckResult(name="causality.perturbation", status="fail", message="an output moved")
    sys.stdout.write(Report(at=time.time(), checks=[check]).model_dump_json())
    raise SystemExit(9)
