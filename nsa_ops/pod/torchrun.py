"""How a trainer is started: as one process, or with torchrun as several ranks that meet."""

import sys

from nsa_core.config.run import RunConfig
from nsa_core.env import MEETING_ON_ONE_POD, ranks_environment
from nsa_core.rundir.layout import RunDir
from nsa_core.rundir.manifest import Node, RunManifest

#: How often torchrun looks after its ranks.
MONITOR_S = 0.2


def trainer_command(run: RunDir, manifest: RunManifest, module: str) -> list[str]:
    """The command line of the trainer of an attempt."""
    own = [module, "--run-dir", str(run.root)]
    if manifest.config.num_ranks == 1:
        return [sys.executable, "-m", *own]
    return [
        sys.executable, "-m", "torch.distributed.run",
        *_meeting(manifest.node, manifest.config),
        "--rdzv-id", f"{manifest.run_id}-{manifest.attempt}",
        "--nproc-per-node", str(len(manifest.pod_ranks)),
        "--max-restarts", "0", "--monitor-interval", str(MONITOR_S),
        "--log-dir", str(run.torchrun / f"node{manifest.node.rank}"),
        "--module", *own,
    ]  # fmt: skip


def _meeting(node: Node, config: RunConfig) -> list[str]:
    """Where the ranks meet."""
    num_pods = config.runtime.num_pods
    if num_pods == 1:
        return list(MEETING_ON_ONE_POD)
    return [
        "--nnodes", str(num_pods), "--node-rank", str(node.rank), "--rdzv-backend", "static",
        "--master-addr", node.address, "--master-port", str(node.port),
    ]  # fmt: skip


def find_missing_place(manifest: RunManifest) -> str:
    """What a manifest for several pods lacks to let their ranks meet; empty if nothing."""
    node, num_pods = manifest.node, manifest.config.runtime.num_pods
    if num_pods == 1:
        return ""
    if node.rank >= num_pods:
        return f"node.rank is {node.rank}, and the run has {num_pods} pods, counted from 0"
    if not node.address or not node.port:
        return (
            f"node.address is {node.address!r} and node.port {node.port}: without them the "
            f"ranks of {num_pods} pods do not meet"
        )
    return ""


def ranks_variables(run: RunDir, manifest: RunManifest) -> dict[str, str]:
    """Environment of the ranks besides that of any trainer; nothing where there is one."""
    runtime = manifest.config.runtime
    if manifest.config.num_ranks == 1:
        return {}
    return ranks_environment(
        num_local=len(manifest.pod_ranks),
        threads=runtime.threads,
        uses_cards=runtime.device != "cpu" and runtime.cpu_ranks == 1,
        interface=manifest.node.interface if runtime.num_pods > 1 else None,
        recorder_prefix=run.flight_record(),
    )
