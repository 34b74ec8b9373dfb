"""After a restore to a pod: the run is looked for there from now on, and its code is there too."""

from collections.abc import Mapping

from nsa_core.rundir.manifest import ManifestError, RunManifest, read_manifest
from nsa_ops.backup.folder import BackupFolder
from nsa_ops.backup.restore import RestorePlan
from nsa_ops.context import Operator, PodLink
from nsa_ops.errors import VerificationError
from nsa_ops.remote.snapshot import has_code, ship, take_snapshot
from nsa_ops.runs.launch import remember_run
from nsa_ops.runs.lease import Takeover, lease_held, plan_takeover, record_takeover
from nsa_ops.runs.old_pod import OLD_POD
from nsa_ops.store import RunRecord


def plan_adoption(
    operator: Operator, link: PodLink, folder: BackupFolder, overrides: Mapping[str, str]
) -> Takeover:
    """Prove that the pod that a backup came from does not run the run.

    Args:
        operator: Who asks.
        link: The pod that it is to be restored to.
        folder: The backup.
        overrides: Reasons by name; `old-pod` counts where nobody can tell.

    Raises:
        StateConflictError: If it runs there, or nobody can tell and no reason is given.
        VerificationError: If the backup has no manifest that can be used.
    """
    manifest = _read_manifest(folder)
    known = operator.store.find_run(manifest.run_id) or _origin_of(operator, link, manifest)
    return plan_takeover(operator, known, link, overrides)


def _read_manifest(folder: BackupFolder) -> RunManifest:
    try:
        return read_manifest(folder.run)
    except ManifestError as error:
        message = f"The backup `{folder.root}` cannot be used: {error}"
        raise VerificationError(message, hint="Pull it again") from error


def _origin_of(operator: Operator, link: PodLink, manifest: RunManifest) -> RunRecord | None:
    """The run as it would be known here, had it been launched from here; None if on this pod."""
    if manifest.pod_id in {"", link.record.pod_id}:
        return None
    named = {pod.pod_id: pod.name for pod in operator.store.pods()}
    return RunRecord(
        run_id=manifest.run_id,
        pod=named.get(manifest.pod_id, manifest.pod_id),
        recipe=manifest.config.recipe,
        profile=manifest.profile,
        code_id=manifest.code_id,
        config_sha256=manifest.config_sha256,
        launched_unix_s=manifest.created_unix_s,
    )


def adopt_run(
    operator: Operator, link: PodLink, planned: RestorePlan, overrides: Mapping[str, str]
) -> None:
    """Let the registry name the pod that the run now is on, and bring its code if it is ours.

    Args:
        operator: Who asks.
        link: The pod that it was restored to.
        planned: What was restored.
        overrides: As `plan_adoption` takes them.

    Raises:
        StateConflictError: If the run was started on its old pod meanwhile, or another command is
            starting or moving it.
    """
    folder = BackupFolder(planned.source)
    manifest = read_manifest(folder.run)
    with lease_held(operator, manifest.run_id):
        taken = plan_adoption(operator, link, folder, overrides)
        before = operator.store.find_run(manifest.run_id)
        reason = overrides.get(OLD_POD, "")
        detail = {"pod": link.record.name, "moved_from": taken.left, "override": reason}
        with operator.store.intent("backup adopt", manifest.run_id, **detail):
            record_takeover(operator, taken, overrides)
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
