"""The command line and the environment of a trainer, alone and with other ranks."""

import os
import sys
from pathlib import Path

import pytest

from nsa_core.config.run import RunConfig
from nsa_core.env import ranks_environment
from nsa_core.rundir.layout import RunDir
from nsa_core.rundir.manifest import Node, RunManifest
from nsa_ops.pod.torchrun import find_missing_place, ranks_variables, trainer_command


def manifest(node: Node | None = None, **runtime) -> RunManifest:
    config = RunConfig.model_validate({"runtime": runtime, "batch": {"accumulation": 8}})
    return RunManifest(
        run_id="run-1", attempt=3, config=config, config_sha256="0" * 64, created_unix_s=1.0,
        node=node or Node(),
    )  # fmt: skip


RUN = RunDir(Path("/pod/runs/run-1"))


def test_one_rank_is_started_as_it_always_was() -> None:
    assert trainer_command(RUN, manifest(), "nsa_core.train") == [
        sys.executable, "-m", "nsa_core.train", "--run-dir", "/pod/runs/run-1",
    ]  # fmt: skip
    assert ranks_variables(RUN, manifest()) == {}


def test_ranks_of_one_pod_meet_on_the_loopback_address_at_a_port_that_is_free() -> None:
    words = " ".join(trainer_command(RUN, manifest(num_gpus=4), "nsa_core.train"))
    assert "-m torch.distributed.run --nnodes 1 " in words
    assert "--rdzv-endpoint 127.0.0.1:0 --local-addr 127.0.0.1" in words
    assert "--nproc-per-node 4 --max-restarts 0" in words
    assert words.endswith("--module nsa_core.train --run-dir /pod/runs/run-1")


def test_ranks_of_several_pods_meet_on_pod_0() -> None:
    second = manifest(Node(rank=1, address="10.0.0.1", port=29500), num_pods=2, num_gpus=2)
    words = " ".join(trainer_command(RUN, second, "nsa_core.train"))
    assert "--nnodes 2 --node-rank 1 --rdzv-backend static" in words
    assert "--master-addr 10.0.0.1 --master-port 29500" in words
    assert (second.pod_ranks, second.config.num_ranks) == (range(2, 4), 4)
    assert find_missing_place(second) == ""


@pytest.mark.parametrize(
    ("node", "said"),
    [(Node(rank=1), "node.address is ''"), (Node(rank=2, address="a", port=1), "has 2 pods")],
)
def test_a_manifest_without_a_place_to_meet_is_refused(node: Node, said: str) -> None:
    assert said in find_missing_place(manifest(node, num_pods=2))


def variables(**given) -> dict[str, str]:
    wanted = {
        "num_local": 1, "threads": 0, "uses_cards": False, "interface": None,
        "recorder_prefix": Path("/run/fr_rank"), "environment": {},
    }  # fmt: skip
    return ranks_environment(**(wanted | given))


def test_ranks_share_the_processors_unless_somebody_has_chosen() -> None:
    share = len(os.sched_getaffinity(0))
    assert variables()["OMP_NUM_THREADS"] == str(share)
    assert variables(num_local=share * 2)["OMP_NUM_THREADS"] == "1"
    assert "OMP_NUM_THREADS" not in variables(environment={"OMP_NUM_THREADS": "7"})
    assert variables(threads=3, environment={"OMP_NUM_THREADS": "7"})["OMP_NUM_THREADS"] == "3"


def test_the_interface_is_that_of_the_node_and_the_loopback_on_one_pod() -> None:
    assert variables()["GLOO_SOCKET_IFNAME"] == "lo"
    names = {"GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"}
    assert {variables(interface="eth1")[name] for name in names} == {"eth1"}
    assert not names & variables(interface="").keys()


def test_cards_get_a_flight_recorder_that_writes_beside_the_run() -> None:
    found = variables(uses_cards=True)
    assert found["TORCH_FR_DUMP_TEMP_FILE"] == "/run/fr_rank"
    assert (found["TORCH_NCCL_DUMP_ON_TIMEOUT"], found["TORCH_FR_BUFFER_SIZE"]) == ("1", "2000")
    kept = variables(uses_cards=True, environment={"TORCH_FR_BUFFER_SIZE": "9"})
    assert "TORCH_FR_BUFFER_SIZE" not in kept
    assert not any(name.startswith("TORCH") for name in variables())
    on_cpu = ranks_variables(RUN, manifest(cpu_ranks=2))
    assert "TORCH_FR_BUFFER_SIZE" not in on_cpu
    on_cards = ranks_variables(RUN, manifest(num_gpus=2))
    assert on_cards["TORCH_FR_DUMP_TEMP_FILE"] == "/pod/runs/run-1/flight_recorder_rank"
