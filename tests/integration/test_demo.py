"""`nsa-ops demo` as a newcomer runs it: the real trainer, tmux, watchdog, backup and page."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(900)]


def run_demo(folder, *words):
    return subprocess.run(
        [sys.executable, "-m", "nsa_ops", "demo", "--json", "--dir", folder, *words],
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
        # Variables of the shell must not change what the demo trains.
        env=os.environ | {"NSA_BATCH_SIZE": "1", "NSA_OPS_STATE_DIR": f"{folder}-unused"},
    )


def test_the_demo_walks_the_whole_path_and_its_claims_hold(tmp_path: Path) -> None:
    done = run_demo(tmp_path / "demo")
    assert done.returncode == 0, done.stderr
    assert "\n\npreflight: nsa-ops preflight" in done.stderr
    assert "\\n" not in done.stderr
    answer = json.loads(done.stdout)
    assert answer["ok"]
    demo = answer["data"]
    names = [part["name"] for part in demo["parts"]]
    assert names == [
        "pod", "preflight", "launch", "watch", "halt", "resume", "watch", "backup", "verify",
        "report",
    ]  # fmt: skip
    before, after = demo["bits_per_byte"]
    assert 7 < before < 9
    assert after < 3.5
    assert demo["replay"]["num_compared"] > 10
    assert demo["replay"]["num_different"] == 0
    assert demo["sample"].startswith("def ")
    page = Path(demo["page"]).read_text()
    assert demo["run_id"] in page
    assert f"{after:.3f}" in page
    run = tmp_path / "demo" / "pod" / "runs" / demo["run_id"]
    exits = [run / "exit.json", run / "attempts" / "1" / "exit.json"]
    assert [json.loads(path.read_text())["code"] for path in exits] == [0, 10]
    assert not (tmp_path / "demo-unused").exists()


def test_the_demo_replaces_nothing_that_no_demo_made(tmp_path: Path) -> None:
    precious = tmp_path / "thesis.tex"
    precious.write_text("years of work")
    done = run_demo(tmp_path)
    assert done.returncode == 7
    assert json.loads(done.stdout)["ok"] is False
    assert done.stderr.startswith("error: ")
    assert precious.read_text() == "years of work"
