"""The engines' own parsers take what is exported, and none of the faults planted into it."""

import json
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import pytest
import yaml

from nsa_ops.export.export import RENDERERS
from nsa_ops.export.skypilot import STRATEGIES
from tests.conftest import REPOSITORY
from tests.ops.export.exports import exported, hostile, rendered

#: Made by tools/engines.sh; see docs/scale.md.
ENGINES_PYTHON = REPOSITORY / ".venv/engines/bin/python"
OTHER_STRATEGY = "FAILOVER"
PARSERS = Path(__file__).with_name("engine_parsers.py")

RUNS = {
    "two nodes": exported,
    "an image": lambda: exported("a100", image="registry.example:5000/team/nsa-pod:1"),
    "one card": lambda: exported("t4", sets=("runtime.num_gpus=1",)),
    "no card": lambda: exported("cpu", "tiny-cpu", sets=()),
    "hostile": lambda: hostile()[0],
}
#: By engine, text of the export and what stands there instead.
FAULTS = {
    "skypilot": {
        "unknown key": ("num_nodes: 2", "num_nodes: 2\nnum_pods: 2"),
        "unknown resource": ("use_spot: true", "use_spott: true"),
        "wrong type": ("num_nodes: 2", "num_nodes: two"),
        "wrong mode": ("mode: MOUNT_CACHED", "mode: MOUNTED"),
        "wrong strategy": ("strategy: EAGER_NEXT_REGION", "strategy: EAGER"),
        "wrong code": ("recover_on_exit_codes: [75]", "recover_on_exit_codes: [resumable]"),
    },
    "dstack": {
        "unknown key": ("nodes: 2", "nodes: 2\nnum_nodes: 2"),
        "wrong type": ("nodes: 2", "nodes: two"),
        "unknown event": ("on_events: [no-capacity", "on_events: [no-machines"),
        "wrong name": ("name: nsa-", "name: NSA-"),
        "a reference": ("run_id=", "other=${{ secrets.KEY }}\n      run_id="),
    },
    "kubernetes": {
        "unknown key": ("completions: 2", "completions: 2\n  replicas: 2"),
        "wrong type": ("parallelism: 2", 'parallelism: "2"'),
        "unknown rule": ("onPodConditions:", "onPodCondition:"),
        "wrong quantity": ("storage: ", "storage: [1] # "),
    },
    "slurm": {
        "unknown key": ("#SBATCH --requeue", "#SBATCH --queue-again"),
        "wrong type": ("#SBATCH --nodes=2", "#SBATCH --nodes=two"),
        "wrong signal": ("--signal=TERM@300", "--signal=TURM@300"),
        "wrong time": ("--time=24:00:00", "--time=a-day"),
    },
}  # fmt: skip


def documents(engine: str) -> dict[str, str]:
    """Every run as this engine gets it, and the first one with each fault."""
    found = {name: rendered(engine, make()) for name, make in RUNS.items()}
    for name, (old, new) in FAULTS[engine].items():
        assert old in found["two nodes"]
        found[name] = found["two nodes"].replace(old, new, 1)
    if engine == "skypilot":
        found[OTHER_STRATEGY] = found["two nodes"].replace(
            f"strategy: {STRATEGIES[0]}", f"strategy: {OTHER_STRATEGY}"
        )
    return found


@cache
def verdicts(engine: str) -> dict[str, str]:
    """What the engine says of each document; its slow import happens once."""
    if engine == "slurm":
        return {name: sbatch(text) for name, text in documents(engine).items()}
    if not ENGINES_PYTHON.exists():
        pytest.skip("the parsers of the engines are not installed: run tools/engines.sh")
    folder = ENGINES_PYTHON.parents[1]
    done = subprocess.run(
        [ENGINES_PYTHON, PARSERS, engine],
        input=json.dumps(documents(engine)),
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        # A home of its own, and no network: its proxies lead nowhere.
        env={
            "HOME": str(folder), "PATH": "/usr/bin:/bin", "SKYPILOT_DISABLE_USAGE_COLLECTION": "1",
            "http_proxy": "http://127.0.0.1:9", "https_proxy": "http://127.0.0.1:9",
        },
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout.splitlines()[-1]))


def test_no_two_packages_of_the_engines_write_the_same_module() -> None:
    if not ENGINES_PYTHON.exists():
        pytest.skip("the parsers of the engines are not installed: run tools/engines.sh")
    written: dict[str, str] = {}
    for record in ENGINES_PYTHON.parents[1].glob("lib/*/site-packages/*.dist-info/RECORD"):
        for line in record.read_text().splitlines():
            name = line.partition(",")[0]
            if name.endswith(".py"):
                package = record.parent.name
                assert written.setdefault(name, package) == package
    assert written


def sbatch(text: str) -> str:
    """What `sbatch --test-only` says of a script, but that nobody is there to take it."""
    if shutil.which("sbatch") is None:
        pytest.skip("sbatch is not installed: apt-get install slurm-client")
    with tempfile.NamedTemporaryFile("w", suffix=".conf") as configuration:
        configuration.write(SLURM_CONF)
        configuration.flush()
        done = subprocess.run(
            ["sbatch", "--test-only"],
            input=text,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
            env={"PATH": "/usr/bin:/bin", "SLURM_CONF": configuration.name},
        )
    assert done.returncode != 0  # nobody could have taken it
    return "" if "Unable to contact slurm controller" in done.stderr else done.stderr


#: Enough to parse a script; the controller's port is one that nobody listens on.
SLURM_CONF = """\
ClusterName=test
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort=1
AuthType=auth/none
GresTypes=gpu
MessageTimeout=2
NodeName=localhost CPUs=1
PartitionName=all Nodes=localhost Default=YES
"""


@pytest.mark.parametrize("engine", RENDERERS)
@pytest.mark.parametrize("name", RUNS)
def test_an_engine_takes_its_export(engine: str, name: str) -> None:
    assert verdicts(engine)[name] == ""


@pytest.mark.parametrize(
    ("engine", "fault"), [(engine, fault) for engine in FAULTS for fault in FAULTS[engine]]
)
def test_an_engine_refuses_a_planted_fault(engine: str, fault: str) -> None:
    said = verdicts(engine)[fault]
    assert said
    assert "Unable to contact" not in said


def test_skypilot_knows_the_other_strategy_that_the_file_names() -> None:
    assert set(STRATEGIES) == {"EAGER_NEXT_REGION", OTHER_STRATEGY}
    assert verdicts("skypilot")[OTHER_STRATEGY] == ""


def test_the_objects_of_kubernetes_refer_to_each_other_by_their_names() -> None:
    """What no schema knows: a Job whose Service or volume does not exist waits for ever."""
    script, service, claim, job = yaml.safe_load_all(rendered("kubernetes", exported()))
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    assert pod["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["selector"] == {"batch.kubernetes.io/job-name": job["metadata"]["name"]}
    assert (
        f"master_addr={job['metadata']['name']}-0.{pod['subdomain']}" in script["data"]["node.sh"]
    )
    assert {mount["name"] for mount in container["volumeMounts"]} == volumes.keys()
    assert volumes["kept"]["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
    assert volumes["script"]["configMap"]["name"] == script["metadata"]["name"]
    rules = job["spec"]["podFailurePolicy"]["rules"]
    named = {rule["onExitCodes"]["containerName"] for rule in rules if "onExitCodes" in rule}
    assert named == {container["name"]}
    assert [rule["action"] for rule in rules] == ["Ignore", "Ignore", "FailJob"]
    codes = [set(rule["onExitCodes"]["values"]) for rule in rules if "onExitCodes" in rule]
    assert codes == [{75}, {75, 137, 143}]
    assert [rule["onExitCodes"]["operator"] for rule in rules[1:]] == ["In", "NotIn"]
    assert job["spec"]["completions"] == job["spec"]["parallelism"] == 2
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 8}
