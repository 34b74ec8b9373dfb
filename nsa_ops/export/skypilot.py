"""A run as a SkyPilot task, for `sky jobs launch`."""

import json
import shlex

from nsa_ops.export.exported import ExportedRun, indented
from nsa_ops.export.node_script import node_script
from nsa_ops.fleet.meeting import DEFAULT_PORT

#: Recovery strategies of SkyPilot. Its client does not check the name.
STRATEGIES = ("EAGER_NEXT_REGION", "FAILOVER")

_TASK = """\
{about}name: {name}
num_nodes: {num_nodes}

resources:
{cards}  disk_size: {disk_gib}    # GB of a node's own disk
  use_spot: true     # edit: false for machines that nobody takes away
{image}  job_recovery:
    # {strategies}: where it looks for the next machine.
    strategy: {strategy}
    # 75: the run asks to be started again. It counts its crashes itself; any other code is final.
    max_restarts_on_errors: 0
    recover_on_exit_codes: [75]

file_mounts:
{several}  # The bucket outlives the machines: checkpoints and logs. A run appends to files and
  # renames them, which MOUNT_CACHED allows and MOUNT does not.
  /nsa:
    name: {name}    # edit: your bucket; it is made where it does not exist
    mode: MOUNT_CACHED
{data}  # The code, packed by `nsa-ops export`.
  /tmp/{archive}: ./{archive}

run: |
{script}"""
_SEVERAL = """\
  # edit: the nodes find each other through files here, and a bucket shows them late. Where the
  # cloud has a shared file system (Kubernetes: `volumes: {/nsa: NAME}`), put it in its place.
"""
_HEAD = """\
root=/nsa
scratch=$HOME/nsa-scratch
archive=/tmp/{archive}
num_nodes=$SKYPILOT_NUM_NODES
node_rank=$SKYPILOT_NODE_RANK
master_addr=$(printf '%s\\n' "$SKYPILOT_NODE_IPS" | head -n 1)
master_port={port}
"""


def render_skypilot(run: ExportedRun, file: str) -> str:
    """The task, in a file named `file`."""
    about = run.comments(
        f"Start: sky jobs launch {shlex.quote(file)}, in the folder that has it and {run.archive}.",
        "Lines with `edit` depend on your clouds. A gated data set needs a token: add",
        "`--secret HF_TOKEN` to the command; it does not belong into this file.",
        "A preempted machine is gone without a word: at most checkpoint.save_every steps are lost.",
        "`sky jobs cancel` leaves 30 s for a save; `--graceful` waits for the upload.",
    )
    names = run.card.skypilot if run.card else ()
    wanted = ", ".join(f"{name}: {run.gpus_per_node}" for name in names)
    any_of = "    # any of these" if len(names) > 1 else ""
    image = run.image and f"  image_id: {json.dumps('docker:' + run.image)}\n"
    unnamed = "  # image_id: docker:IMAGE    # edit: the image of our Dockerfile saves the set-up\n"
    mount = (
        f"  # edit: the data must be on every node, at {run.data_path}\n" if run.data_path else ""
    )
    return _TASK.format(
        about=about,
        name=run.name,
        num_nodes=run.num_nodes,
        cards=f"  accelerators: {{{wanted}}}{any_of}\n" if wanted else "  cpus: 4+\n",
        disk_gib=max(100, run.disk_gib),
        image=image or unnamed,
        strategies=" or ".join(STRATEGIES),
        strategy=STRATEGIES[0],
        data=mount,
        several=_SEVERAL if run.num_nodes > 1 else "",
        archive=run.archive,
        script=indented(node_script(run, _HEAD.format(archive=run.archive, port=DEFAULT_PORT)), 2),
    )
