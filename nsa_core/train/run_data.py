"""Open the data of a run, report what was dropped, and keep its description in the run directory.

A backup brings the run directory, so it holds the tokenizer and the list of the files, not tokens.
"""

import time
from collections.abc import Callable

from nsa_core.data.batch import LoaderState
from nsa_core.data.reporting import DataError, StageProgress
from nsa_core.data.shards import MANIFEST_NAME, StagedManifest, read_manifest, write_manifest
from nsa_core.data.staged_before import describe_changes
from nsa_core.data.staging import StagedData, stage
from nsa_core.rundir.atomic import write_text
from nsa_core.rundir.data_account import DataAccount, read_account
from nsa_core.rundir.heartbeat import BeatFigures
from nsa_core.rundir.layout import RunDir
from nsa_core.train.failure import TrainerConfigurationError
from nsa_core.train.group import RankGroup
from nsa_core.train.resume_point import ResumePoint, read_place
from nsa_core.train.stop import StopWatch
from nsa_core.train.telemetry import AttemptContext, Telemetry

#: Seconds between two lines of the log about the progress of staging.
_LOG_EVERY_S = 10.0
#: Ranks that stage still meet those that are ready so often: nobody waits long in one collective,
#: and a stop is noticed.
_MEET_EVERY_S = 30.0


def open_data(context: AttemptContext, stop: StopWatch, point: ResumePoint | None) -> StagedData:
    """The data of a run, staged first where that was not done; a stop is noticed meanwhile.

    From a checkpoint of its own, the run continues on the tokens that it was begun with.

    Raises:
        DataError: If the data cannot be used, or is not the data of the checkpoint.
        TrainerConfigurationError: If the model has fewer ids than the tokenizer.
        StopAskedError: If a stop is asked for.
    """
    config, telemetry = context.manifest.config, context.telemetry
    place = _own_place(point)
    expected = place.manifest_sha256 if place is not None else ""
    context.beats.enter("data")
    staged = stage(
        config.data, context.run.pod_root, config.seed, _progress(context, stop), expected=expected
    )
    _wait_for_others(context, stop)
    context.beats.enter("init")
    if staged.substituted_synthetic:
        telemetry.event(
            "data_substituted", f"random words instead of the data: {staged.substitution_reason}"
        )
    if place is not None and staged.manifest_sha256 != expected:
        raise _changed_data(context.run, staged)
    _require_room(staged, config.model.vocab_size)
    for note in staged.notes:
        telemetry.event("data_note", note)
    if context.group.place.is_leader:
        _keep(context.run, telemetry, staged)
    return staged


def require_same_data(group: RankGroup, manifest_sha256: str) -> None:
    """All ranks have the same tokens, also those of other pods.

    Raises:
        DataError: On every rank, if one of them has others than rank 0.
    """
    found = [one.decode() for one in group.gather(manifest_sha256.encode())]
    other = [rank for rank, sha256 in enumerate(found) if sha256 != found[0]]
    if other:
        group.has_agreed = True
        message = (
            f"rank {other[0]} has other tokens ({found[other[0]][:12]}) than rank 0 "
            f"({found[0][:12]})"
        )
        raise DataError(message, "give every pod the same text and settings of `data`")


def _own_place(point: ResumePoint | None) -> LoaderState | None:
    """Where a run stands in its own data; None where it begins, also from a parent's checkpoint."""
    if point is None or not point.is_own:
        return None
    return read_place(point)


def _wait_for_others(context: AttemptContext, stop: StopWatch) -> None:
    """Wait until every rank has staged: each pod stages its own, which may take hours."""
    context.beats.staging = BeatFigures(staging="waiting for the other ranks")
    while context.group.add_up([0]) != [0]:
        stop.check_staging()
        context.beats.advance()


def _progress(context: AttemptContext, stop: StopWatch) -> Callable[[StageProgress], None]:
    last_doing, logged_s, met_s = "", 0.0, time.monotonic()

    def progress(report: StageProgress) -> None:
        nonlocal last_doing, logged_s, met_s
        stop.check_staging()
        context.beats.advance()
        context.beats.staging = BeatFigures(staging=report.line(), staging_share=report.share)
        now_s = time.monotonic()
        if report.doing != last_doing or now_s - logged_s >= _LOG_EVERY_S:
            last_doing, logged_s = report.doing, now_s
            if context.group.place.is_leader:
                context.telemetry.log.report(f"data: {report.line()}")
            context.beats.write("beat")
        if now_s - met_s >= _MEET_EVERY_S:
            met_s = now_s
            context.group.add_up([1])

    return progress


def _require_room(staged: StagedData, vocab_size: int) -> None:
    if staged.tokenizer.vocab_size > vocab_size:
        message = (
            f"the tokenizer has {staged.tokenizer.vocab_size} ids and model.vocab_size is "
            f"{vocab_size}"
        )
        raise TrainerConfigurationError(message, hint="Raise model.vocab_size")


def _changed_data(run: RunDir, staged: StagedData) -> DataError:
    """The data is not what the checkpoint was trained on: which file differs, where that is known.

    What is kept in the run directory is what the newest attempt was trained on.
    """
    hint = "put it back as it was, or launch a new run; tokens of another order would be repeated"
    try:
        before = read_manifest(run.data)[0].plan
    except DataError as error:
        message = f"the data is not what the checkpoint was trained on ({error.message})"
        return DataError(message, hint)
    changes = describe_changes(before, staged.manifest.plan)
    why = changes or "the same files were read in another way by an earlier version"
    return DataError(f"the data has changed since the checkpoint: {why}", hint)


def _keep(run: RunDir, telemetry: Telemetry, staged: StagedData) -> None:
    """Put the account, the list of files and the tokenizer into the run directory, and say it once.

    A disk that refuses costs the run these files, no more.
    """
    if _kept_manifest(run) == staged.manifest and _kept_account(run) == staged.account:
        return
    telemetry.writes.attempt("what names the data", lambda: _write(run, staged))
    account = staged.account
    if account.has_findings:
        telemetry.event(
            "data_dropped" if account.needs_attention else "data_read",
            account.sentence(),
            num_documents=account.num_documents,
            num_lost=account.num_lost,
            num_whole_files=account.num_whole_files,
        )


def _write(run: RunDir, staged: StagedData) -> None:
    run.data.mkdir(exist_ok=True)
    staged.tokenizer.save(run.data)
    write_text(run.data_account, staged.account.model_dump_json(indent=1) + "\n")
    write_manifest(run.data, staged.manifest)


def _kept_manifest(run: RunDir) -> StagedManifest | None:
    """What is kept; None where nothing is that can be used, and it is written again."""
    if not (run.data / MANIFEST_NAME).exists():
        return None
    try:
        return read_manifest(run.data)[0]
    except DataError:
        return None


def _kept_account(run: RunDir) -> DataAccount | None:
    try:
        return read_account(run.data_account)
    except (OSError, ValueError):
        return None
