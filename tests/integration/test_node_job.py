"""Two nodes of an engine's job on this machine: they meet and stop, and one of them finishes."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from nsa_core.config.run import RunConfig
from nsa_core.rundir.bounded_json import read_last_records
from nsa_core.rundir.heartbeat import Heartbeat
from nsa_core.rundir.layout import RunDir
from nsa_core.rundir.manifest import RunManifest, read_manifest
from nsa_ops.pod.processes import read_processes
from nsa_ops.pod.trainer_group import group_of
from tests.integration.pod_runs import wait_for
from tests.integration.ssh_server import free_port

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(600)]
SCRIPT = [["agree_at_term", 75], ["beat", 3], ["wait_for", "finish"], ["agree", 0]]
BUSY_S = 90.0


def begin(root: Path, rank: int, num_nodes: int) -> "subprocess.Popen[bytes]":
    with (root / f"said{rank}").open("ab") as said:
        return subprocess.Popen(
            [sys.executable, "-m", "nsa_ops.pod.node_job", "--run-dir",
             str(run_of(root, rank).root), "--manifest", str(root / "manifest.json"),
             "--num-nodes", str(num_nodes), "--node-rank", str(rank),
             "--master-addr", "127.0.0.1", "--master-port", (root / "port").read_text(),
             "--stop-signal", "USR1", "--module", "tests.integration.rank_trainer"],
            stderr=said,
        )  # fmt: skip


def run_of(root: Path, rank: int) -> RunDir:
    return RunDir(root / f"node_{rank}" / "runs" / "run-1")


def attempt_of(run: RunDir) -> int:
    """The attempt whose third step its rank has done; 0 before."""
    rank = int(run.root.parent.parent.name[-1])
    beats = read_last_records(run.heartbeat(rank), Heartbeat).records
    return max((beat.attempt for beat in beats if beat.step == 3), default=0)


def test_two_nodes_train_stop_early_and_one_of_them_finishes(tmp_path: Path) -> None:
    values = {
        "batch": {"accumulation": 2}, "runtime": {"device": "cpu"}, "watchdog": {"interval_s": 0.2},
    }  # fmt: skip
    config = RunConfig.model_validate(values)
    (tmp_path / "manifest.json").write_text(
        RunManifest(
            run_id="run-1", config=config, config_sha256="0" * 64, created_unix_s=time.time()
        ).model_dump_json()
    )
    (tmp_path / "port").write_text(str(free_port()))
    runs = [run_of(tmp_path, rank) for rank in (0, 1)]
    for run in runs:
        run.root.parent.mkdir(parents=True)
        (run.root.parent / "script.json").write_text(json.dumps([SCRIPT, SCRIPT]))
    nodes: list[subprocess.Popen[bytes]] = []
    try:
        nodes += [begin(tmp_path, rank, 2) for rank in (1, 0)]  # node 1 has to wait for node 0
        wait_for(lambda: all(attempt_of(run) == 1 for run in runs), BUSY_S)
        for node in nodes:
            node.send_signal(signal.SIGUSR1)
        assert [node.wait(BUSY_S) for node in nodes] == [75, 75]
        first, second = (read_manifest(run) for run in runs)
        assert (second.attempt_id, second.node.rank) == (first.attempt_id, 1)

        (runs[0].root / "finish").touch()
        nodes.append(begin(tmp_path, 0, 1))
        assert nodes[-1].wait(BUSY_S) == 0
        assert (read_manifest(runs[0]).attempt, read_manifest(runs[0]).config.num_ranks) == (2, 1)
        nodes.append(begin(tmp_path, 1, 2))
        assert nodes[-1].wait(BUSY_S) == 0
        assert "run-1 has finished" in (tmp_path / "said1").read_text()
    finally:
        for node in nodes:
            node.kill()
            node.wait()
        for run in runs:
            group = group_of(run, read_processes(run))
            if group is not None:
                group.kill()
