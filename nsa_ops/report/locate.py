"""Find a run directory that can be read here: a path, a local pod's, or a backup's."""

from pathlib import Path

from nsa_ops.backup.locate import backup_folder, find_backup
from nsa_ops.backup.pull import execute_pull, plan_pull
from nsa_ops.context import Operator
from nsa_ops.runs.choose import choose_record, link_of


def find_run_directory(operator: Operator, text: str | None) -> Path:
    """The directory that RUN or PATH means.

    A run on a pod that is this machine is read in place. Of any other the small files are pulled
    into its backup first, and the report tells of the checkpoints that were pulled.

    Raises:
        NotFoundError: If it is no folder, no run of this laptop and no backup.
    """
    if text is not None and Path(text).expanduser().is_dir():
        return Path(text).expanduser().absolute()
    if text is not None and not _is_run(operator, text):
        return find_backup(operator, text).root
    run = choose_record(operator, text)
    link = link_of(operator, run)
    here = Path(link.run_dir(run.run_id))
    if link.record.kind == "local" and here.is_dir():
        return here
    folder = backup_folder(operator, run.run_id)
    execute_pull(operator, link, plan_pull(link, run.run_id, folder, "none"))
    return folder.root


def _is_run(operator: Operator, text: str) -> bool:
    return any(run.run_id.startswith(text) for run in operator.store.runs())
