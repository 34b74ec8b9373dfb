"""After a restore to a pod: the run is looked for there from now on, and its code is there too."""

from nsa_core.rundir.layout import RunDir
from nsa_core.rundir.manifest import RunManifest, read_manifest
from nsa_ops.remote.snapshot import has_code, ship, take_snapshot
from nsa_ops.runs.backup.restore import RestorePlan
from nsa_ops.runs.context import Operator, PodLink
from nsa_ops.runs.launch import remember_run


def adopt_run(operator: Operator, link: PodLink, planned: RestorePlan) -> None:
    """Let the registry name the pod that the run now is on, and bring its code if it is ours.

    Args:
        operator: Who asks.
        link: The pod that it was restored to.
        planned: What was restored.
    """
    manifest = read_manifest(RunDir(planned.source))
    before = operator.store.find_run(manifest.run_id)
    with operator.store.intent("backup adopt", manifest.run_id, pod=link.record.name):
        remember_run(operator, link, manifest)
        _bring_code(operator, link, manifest)
    if before is not None and before.pod != link.record.name:
        operator.tell(
            f"`{manifest.run_id}` is looked for on pod `{link.record.name}` from now on, "
            f"and not on `{before.pod}`"
        )


def _bring_code(operator: Operator, link: PodLink, manifest: RunManifest) -> None:
    target = link.code(manifest.code_id)
    if has_code(link.transport, link.record.python, target):
        return
    snapshot = take_snapshot()
    if snapshot.code_id == manifest.code_id:
        ship(snapshot, link.transport, link.record.python, target)
        return
    operator.tell(
        f"pod `{link.record.name}` does not have the code `{manifest.code_id}` of this run: check "
        f"out commit {manifest.code_commit} here and restore or launch from there to ship it"
    )
