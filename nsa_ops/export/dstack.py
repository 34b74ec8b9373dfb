"""A run as a dstack task."""

import json
import shlex

from nsa_ops.export.exported import STOP_S, ExportedRun, indented
from nsa_ops.export.node_script import node_script
from nsa_ops.fleet.meeting import DEFAULT_PORT

_TASK = """\
{about}type: task
name: {name}
nodes: {num_nodes}

{image}
# The code, packed by `nsa-ops export`.
files:
  - local_path: ./{archive}
    path: /tmp/{archive}

# It outlives the machines: checkpoints and logs.
volumes:
{volume}{data}
resources:
{cards}  shm_size: 16GB    # NCCL needs it
  disk: {disk_gib}GB..

spot_policy: auto    # edit: on-demand for machines that nobody takes away
max_duration: off
stop_duration: {stop_s}
retry:
  # Without `error`: dstack does not tell exit codes apart, and some of them must not be repeated.
  on_events: [no-capacity, interruption]
  duration: 7d    # edit

commands:
  - |
{script}"""
_HEAD = """\
root=/nsa
scratch=/tmp/nsa-scratch
archive=/tmp/{archive}
num_nodes=$DSTACK_NODES_NUM
node_rank=$DSTACK_NODE_RANK
master_addr=$DSTACK_MASTER_NODE_IP
master_port={port}
stop_signal=INT
"""
#: A network volume belongs to one machine at a time.
_VOLUME = """\
  - name: {name}    # edit: make it first (type: volume, size: {disk_gib}GB), or name another one
    path: /nsa
"""
_SHARED_FOLDER = """\
  - instance_path: /mnt/shared    # edit: a folder that all hosts of the fleet share
    path: /nsa
"""


def render_dstack(run: ExportedRun, file: str) -> str:
    """The task, in a file named `file`."""
    about = run.comments(
        f"Start: dstack apply -f {shlex.quote(file)}; {run.archive} must be beside it.",
        "Lines with `edit` depend on your fleets. A gated data set needs a token: add",
        "`env: [HF_TOKEN]`, without a value; it does not belong into this file.",
        "`dstack stop` sends INT and kills after 10 s; what was not saved by then is repeated.",
        "After any end but `done`, the same `dstack apply` continues from the newest checkpoint.",
    )
    unnamed = (
        'python: "3.12"    # dstack\'s own image; the packages are installed at the start\n'
        "# image: IMAGE       # edit: instead of python, the image of our Dockerfile saves that\n"
    )
    card = run.card.dstack if run.card else ""
    cards = f"  gpu:\n    name: [{card}]\n    count: {run.gpus_per_node}\n" if card else ""
    data = f"  # edit: the data must be at {run.data_path}\n" if run.data_path else ""
    disk = max(100, run.disk_gib)
    volume = _SHARED_FOLDER if run.num_nodes > 1 else _VOLUME.format(name=run.name, disk_gib=disk)
    return _TASK.format(
        about=about,
        name=run.name,
        num_nodes=run.num_nodes,
        image=f"image: {json.dumps(run.image)}\n" if run.image else unnamed,
        archive=run.archive,
        volume=volume,
        data=data,
        cards=cards,
        disk_gib=disk,
        stop_s=STOP_S,
        script=indented(node_script(run, _HEAD.format(archive=run.archive, port=DEFAULT_PORT)), 4),
    )
