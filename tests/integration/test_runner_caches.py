"""The runner hands its trainer caches of the compilers that the next attempt finds again."""

import json
import os
import time
from pathlib import Path

import pytest

from nsa_core.config.run import RunConfig
from nsa_core.env import COMPILER_CACHES
from nsa_core.rundir.layout import RunDir
from nsa_core.rundir.manifest import RunManifest, write_manifest
from nsa_ops.pod.runner import run_attempt

pytestmark = pytest.mark.integration
TRAINER = """
import json, os, sys
from pathlib import Path
Path(sys.argv[2], "seen.json").write_text(json.dumps(dict(os.environ)))
"""


def test_a_trainer_compiles_into_folders_of_its_code_below_the_pods_root(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "environment_writer.py").write_text(TRAINER)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(Path.cwd())]))
    for name in COMPILER_CACHES:
        monkeypatch.delenv(name, raising=False)
    run = RunDir(tmp_path / "pod" / "runs" / "run-1")
    run.root.mkdir(parents=True)
    write_manifest(
        run,
        RunManifest(
            run_id="run-1", config=RunConfig(), config_sha256="0" * 64, code_id="c0de",
            created_unix_s=time.time(),
        ),
    )  # fmt: skip
    run_attempt(run, "environment_writer")
    seen = json.loads((run.root / "seen.json").read_text())
    for name, folder in COMPILER_CACHES.items():
        assert seen[name] == str(tmp_path / "pod" / "caches" / folder / "c0de")
