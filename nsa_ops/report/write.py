"""Find the run directory that is meant, read it, write the page and its Markdown twin."""

import re
from dataclasses import dataclass
from pathlib import Path

from nsa_core.rundir.atomic import write_text
from nsa_core.rundir.layout import RunDir
from nsa_ops.backup.backups import backup_folder, find_backup
from nsa_ops.backup.pull import execute_pull, plan_pull
from nsa_ops.context import Operator
from nsa_ops.errors import LocalResourceError, NotFoundError, StateConflictError
from nsa_ops.local_files import expand_home
from nsa_ops.report.markdown import OPENING, render_markdown
from nsa_ops.report.page import DOCTYPE, render_page
from nsa_ops.report.rank_history import RankSummary
from nsa_ops.report.record import read_record
from nsa_ops.report.summary import describe_outcome
from nsa_ops.runs.choose import choose_record, link_of


@dataclass(frozen=True)
class WrittenReport:
    """What was written; `ranks` says what each rank did, where the run has several."""

    run_id: str
    page: Path
    markdown: Path
    outcome: str
    missing: list[str]
    ranks: tuple[RankSummary, ...] = ()


def write_report(folder: Path, *, out: Path, now_unix_s: float) -> WrittenReport:
    """Write the report of a run directory.

    `out`: HTML file, or a folder that receives `report-<run id>.html`.

    Raises:
        NotFoundError: If the folder is no run directory, or the folder of `out` is not there.
        StateConflictError: If `out` is a file that is no report.
        LocalResourceError: If it cannot be written.
    """
    run = RunDir(folder)
    check_run_directory(run)
    page = _page_path(out, run)
    twin = page.with_suffix(".md")
    _check_replaceable(page, DOCTYPE)
    _check_replaceable(twin, OPENING)
    record = read_record(run)
    try:
        write_text(page, render_page(record, written_unix_s=now_unix_s))
        write_text(twin, render_markdown(record))
    except OSError as error:
        message = f"The report cannot be written to `{page}`: {error.strerror}"
        raise LocalResourceError(message, hint="Name another file with `--out`") from error
    return WrittenReport(
        record.run_id,
        page,
        twin,
        describe_outcome(record).sentence,
        record.missing,
        record.ranks.ranks,
    )


def check_run_directory(run: RunDir) -> None:
    """Raise NotFoundError unless the folder holds something that a run writes."""
    known = (run.manifest, run.training_csv, run.heartbeat(), run.events, run.checkpoints)
    if not any(path.exists() for path in known):
        message = f"`{run.root}` is not a run directory: it holds no manifest, log or checkpoint"
        raise NotFoundError(message, hint="See `nsa-ops run ls` and `nsa-ops backup ls`")


def _page_path(out: Path, run: RunDir) -> Path:
    if out.is_dir():
        name = re.sub(r"[^A-Za-z0-9._-]+", "-", run.run_id).strip("-.") or "run"
        return out / f"report-{name}.html"
    if not out.parent.is_dir():
        message = f"The folder `{out.parent}` of `--out` does not exist"
        raise NotFoundError(message, hint=f"Create it with `mkdir -p {out.parent}`")
    return out if out.suffix in {".html", ".htm"} else out.with_name(out.name + ".html")


def _check_replaceable(path: Path, opening: str) -> None:
    """Raise StateConflictError if a file is there that does not begin as our reports do."""
    if not path.exists():
        return
    with path.open("rb") as file:
        if file.read(len(opening)) != opening.encode():
            message = f"`{path}` exists and is not a report"
            raise StateConflictError(message, hint="Name another file with `--out`")


def find_run_directory(operator: Operator, text: str | None) -> Path:
    """The directory that RUN or PATH means.

    A run on a pod that is this machine is read in place. Of any other the small files are pulled
    into its backup first, and the report shows the checkpoints that were pulled.

    Raises:
        NotFoundError: If it is no folder, no run of this laptop and no backup.
    """
    if text is not None and expand_home(text).is_dir():
        return expand_home(text).absolute()
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
