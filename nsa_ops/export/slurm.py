"""A run as a Slurm batch script."""

import shlex

from nsa_ops.export.exported import STOP_S, ExportedRun
from nsa_ops.export.node_script import TRAIN, prepare_script
from nsa_ops.fleet.meeting import DEFAULT_PORT

_SCRIPT = """\
#!/bin/bash
{about}#
#SBATCH --job-name={name}
#SBATCH --nodes={num_nodes}
#SBATCH --ntasks-per-node=1
{cards}#SBATCH --cpus-per-task={cpus}       # edit: the processors of a node
#SBATCH --mem=0                # edit: all the memory of a node
#SBATCH --time=24:00:00        # edit: at the limit the run saves, stops and is queued again
##SBATCH --partition=gpu       # edit: remove one #
##SBATCH --account=team        # edit: remove one #
#SBATCH --output=%x-%j.log
#SBATCH --open-mode=append
#SBATCH --requeue
# The job steps get TERM {stop_s} s before the limit, and the trainer saves. With `B:` it would go
# to this shell alone.
#SBATCH --signal=TERM@{stop_s}

root=$SLURM_SUBMIT_DIR/nsa     # edit: on a file system that all nodes share; checkpoints are in it
scratch=$root/shared           # edit: code, packages and caches, on the same or another shared one
archive=$SLURM_SUBMIT_DIR/{archive}
{data}# Two jobs on one node need two ports.
master_port=$(({port} + SLURM_JOB_ID % 1000))

{prepare}
# Node 0 is the first of the list; its number is SLURM_PROCID, because a node has one task.
master_addr=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
code_of_job=0
# shellcheck disable=SC2016 # the nodes expand it
srun --ntasks="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 --wait={wait_s} sh -c '
set -eu
root=$1 scratch=$2 code=$3 code_id=$4 python=$5 manifest=$6 run_id=$7 master_addr=$8 master_port=$9
num_nodes=$SLURM_JOB_NUM_NODES
node_rank=$SLURM_PROCID
{train}' nsa-node "$root" "$scratch" "$code" "$code_id" "$python" "$manifest" "$run_id" \\
  "$master_addr" "$master_port" || code_of_job=$?

# 75: the run asks to be started again, such as after a stop. Above 128 a whole task was killed,
# which is tried three times. Any other code is final: look into the log first.
if [ "$code_of_job" -eq 75 ] ||
  {{ [ "$code_of_job" -gt 128 ] && [ "${{SLURM_RESTART_COUNT:-0}}" -lt 3 ]; }}; then
  echo "queueing job $SLURM_JOB_ID again; it continues from the newest checkpoint" >&2
  scontrol requeue "$SLURM_JOB_ID" || echo "it could not be queued: sbatch it again" >&2
fi
exit "$code_of_job"
"""
_CPUS_PER_CARD = 8
#: After the first task has ended: the time of the others to see it and to end.
_WAIT_S = 900


def render_slurm(run: ExportedRun, file: str) -> str:
    """The batch script, named `file`."""
    about = run.comments(
        f"Start: sbatch {shlex.quote(file)}, in the folder that has it and {run.archive}.",
        "Needs a file system that all nodes share. Lines with `edit` depend on the cluster.",
        "Another number of nodes continues the same run: sbatch --nodes=N.",
    )
    gres = (
        f"#SBATCH --gres=gpu:{run.gpus_per_node}           # edit: some clusters want gpu:TYPE:N\n"
    )
    data = f"# The data must be on every node: {run.data_path}\n" if run.data_path else ""
    return _SCRIPT.format(
        about=about,
        name=run.name,
        num_nodes=run.num_nodes,
        cards=gres if run.gpus_per_node else "",
        cpus=max(1, run.gpus_per_node) * _CPUS_PER_CARD if run.gpus_per_node else 2,
        stop_s=STOP_S,
        archive=run.archive,
        data=data,
        port=DEFAULT_PORT,
        prepare=prepare_script(run),
        wait_s=_WAIT_S,
        train=TRAIN,
    )
