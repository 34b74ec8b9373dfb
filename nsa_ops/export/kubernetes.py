"""A run as a Kubernetes Indexed Job with a headless Service, where its nodes find each other."""

import json
import shlex

from nsa_core.rundir.exit import TrainerExit
from nsa_ops.export.exported import STOP_S, ExportedRun, indented
from nsa_ops.export.node_script import node_script
from nsa_ops.fleet.meeting import DEFAULT_PORT

#: The largest ConfigMap, which holds the code.
MAX_ARCHIVE_BYTES = 1_000_000
#: Image that the Dockerfile of this project makes.
_OUR_IMAGE = "nsa-pod"
#: Each failed attempt fails once on every node.
_RESTARTS = 3

_OBJECTS = """\
{about}apiVersion: v1
kind: ConfigMap
metadata:
  name: {name}
data:
  node.sh: |
{script}---
# The pods find node 0 by name, before it is ready.
apiVersion: v1
kind: Service
metadata:
  name: {name}
spec:
  clusterIP: None
  publishNotReadyAddresses: true
  selector:
    batch.kubernetes.io/job-name: {name}
  ports:
    - name: rendezvous
      port: {port}
---
# It outlives the pods: checkpoints and logs.
apiVersion: v1
kind: PersistentVolumeClaim
metadata:
  name: {name}
spec:
  accessModes: [{access}]
  # storageClassName: shared    # edit{several}
  resources:
    requests:
      storage: {disk_gib}Gi
---
apiVersion: batch/v1
kind: Job
metadata:
  name: {name}
spec:
  completionMode: Indexed
  completions: {num_nodes}
  parallelism: {num_nodes}
  backoffLimit: {backoff}    # killed containers: {restarts} of every node
  podReplacementPolicy: Failed    # never two pods of one node
  podFailurePolicy:
    rules:
      # A pod that was taken away, or asks to be started again, costs no restart of these; the run
      # counts its crashes itself and then ends with another code.
      - action: Ignore
        onPodConditions:
          - type: DisruptionTarget
            status: "True"
      - action: Ignore
        onExitCodes:
          containerName: trainer
          operator: In
          values: [{resumable}]
      # Any other end is final, unless the whole container was killed.
      - action: FailJob
        onExitCodes:
          containerName: trainer
          operator: NotIn
          values: [{resumable}, 137, 143]
  template:
    spec:
      subdomain: {name}
      restartPolicy: Never
      terminationGracePeriodSeconds: {stop_s}    # from TERM to KILL: the run saves
      automountServiceAccountToken: false
      enableServiceLinks: false
      # nodeSelector:                             # edit: which cards
      #   nvidia.com/gpu.product: PRODUCT
      containers:
        - name: trainer
          image: {image}    # edit: where your cluster pulls the image of our Dockerfile from
          command: [sh, /etc/nsa/script/node.sh]
          # env:                                  # edit: a gated data set needs a token
          #   - name: HF_TOKEN
          #     valueFrom: {{secretKeyRef: {{name: SECRET, key: token}}}}
          ports:
            - containerPort: {port}
{resources}          volumeMounts:
            - {{name: kept, mountPath: /nsa}}
            - {{name: script, mountPath: /etc/nsa/script, readOnly: true}}
            - {{name: code, mountPath: /etc/nsa/code, readOnly: true}}
            - {{name: shared-memory, mountPath: /dev/shm}}
{data}      volumes:
        - name: kept
          persistentVolumeClaim: {{claimName: {name}}}
        - name: script
          configMap: {{name: {name}}}
        - name: code
          configMap: {{name: {name}-code}}
        - name: shared-memory    # NCCL needs more than the default of 64 MiB
          emptyDir: {{medium: Memory, sizeLimit: 16Gi}}
"""
_HEAD = """\
root=/nsa
scratch=/tmp/nsa-scratch
archive=/etc/nsa/code/code.tar.bz2
num_nodes={num_nodes}
node_rank=$JOB_COMPLETION_INDEX
master_addr={name}-0.{name}
master_port={port}
"""


def code_command(run: ExportedRun) -> str:
    """What puts the code into the cluster, once for each version of it."""
    return f"kubectl create configmap {run.name}-code --from-file=code.tar.bz2={run.archive}"


def render_kubernetes(run: ExportedRun, file: str) -> str:
    """The objects, in a file named `file`."""
    about = run.comments(
        "Start:",
        f"  {code_command(run)}",
        f"  kubectl apply -f {shlex.quote(file)}",
        "Continue after the Job has ended: kubectl delete job, then apply again.",
        "Needs Kubernetes 1.31 or newer. Lines with `edit` depend on the cluster.",
    )
    head = _HEAD.format(num_nodes=run.num_nodes, name=run.name, port=DEFAULT_PORT)
    several = ": all nodes write to it (ReadWriteMany)" if run.num_nodes > 1 else ""
    data = f"            # edit: the data must be at {run.data_path}\n" if run.data_path else ""
    return _OBJECTS.format(
        about=about,
        name=run.name,
        num_nodes=run.num_nodes,
        script=indented(node_script(run, head), 4),
        port=DEFAULT_PORT,
        access="ReadWriteMany" if run.num_nodes > 1 else "ReadWriteOnce",
        several=several,
        disk_gib=max(10, run.disk_gib * run.num_nodes),
        backoff=_RESTARTS * run.num_nodes,
        restarts=_RESTARTS,
        resumable=int(TrainerExit.RESUMABLE),
        stop_s=STOP_S,
        image=json.dumps(run.image or _OUR_IMAGE),
        resources=_resources(run),
        data=data,
    )


def _resources(run: ExportedRun) -> str:
    if not run.gpus_per_node:
        return '          resources:\n            requests: {cpu: "2", memory: 4Gi}\n'
    limits = f"            limits: {{nvidia.com/gpu: {run.gpus_per_node}}}\n"
    requests = "            # requests: {cpu: 64, memory: 256Gi}    # edit\n"
    return f"          resources:\n{limits}{requests}"
