"""`python -m nsa_ops.pod.probe --runs-root R`: everything about the runs of a pod in one document.

Offsets of the last probe come as JSON on stdin; what is new since then goes out, bounded.
"""

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from pydantic import ValidationError

from nsa_core.config.training import MAX_RANKS, WatchdogLimits
from nsa_core.rundir.bounded_json import (
    JsonError,
    JsonLines,
    RecordT,
    open_regular,
    read_bounded,
    read_last_records,
    read_records,
)
from nsa_core.rundir.data_account import Count, DataAccount, read_account
from nsa_core.rundir.events import Event, find_events, read_beginnings
from nsa_core.rundir.exit import ExitRecord, TrainerExit
from nsa_core.rundir.halt import read_halt
from nsa_core.rundir.heartbeat import Heartbeat
from nsa_core.rundir.layout import RunDir
from nsa_core.rundir.manifest import ManifestError, RunManifest, read_manifest
from nsa_core.rundir.process import boot_id
from nsa_core.rundir.status import RunEvidence, State, derive_status
from nsa_ops.pod.card_watch import read_card_evidence
from nsa_ops.pod.ending import foresee_restart
from nsa_ops.pod.journal import WATCHDOG_ENDED, read_watchdog
from nsa_ops.pod.leak import read_causality, report_file
from nsa_ops.pod.messages import (
    OFFSETS,
    ManifestSummary,
    Offsets,
    PhaseUse,
    ProbeDocument,
    RunFigures,
    RunNews,
    RunProblem,
    RunReport,
)
from nsa_ops.pod.processes import is_running, is_this_boot, read_processes
from nsa_ops.pod.rank_files import RankFiles
from nsa_ops.pod.read_run import (
    list_checkpoint_facts,
    read_machine_evidence,
    read_process_evidence,
)
from nsa_ops.pod.rules.learning_rules import has_gates
from nsa_ops.pod.rules.process_rules import patience_s
from nsa_ops.pod.rules.rank_rules import judge_movement
from nsa_ops.pod.rules.rulebook import judge
from nsa_ops.pod.tracker import HealthEvidence, Tracker, tracker_of

#: The most that one probe reads of the new lines of one file, and of the past for its verdict.
MAX_BYTES = 256 * 1024
HISTORY_BYTES = 512 * 1024
MAX_CHECKPOINTS = 200
_MAX_ANOMALY_BYTES = 64 * 1024
_LAST_WORDS_BYTES = 4096
#: A trainer may take 25 s to save after TERM; what got it at the same moment was ended with it.
_TOGETHER_S = 60.0
_ALL_ENDED = (
    "; its watchdog got TERM as well, so all processes of this login were ended: the machine went "
    "down, or ends them at logout (`host.logout` of the preflight)"
)
USAGE = 2


def summarize(manifest: RunManifest) -> ManifestSummary:
    """What a list of runs shows of a manifest."""
    config = manifest.config
    return ManifestSummary(
        run_id=manifest.run_id,
        attempt=manifest.attempt,
        attempt_id=manifest.attempt_id,
        recipe=config.recipe,
        profile=manifest.profile,
        config_sha256=manifest.config_sha256,
        code_id=manifest.code_id,
        code_commit=manifest.code_commit,
        steps=config.schedule.steps,
        tokens_per_step=config.batch.tokens_per_step,
        save_every=config.checkpoint.save_every,
        created_unix_s=manifest.created_unix_s,
        parent=manifest.parent,
        pod_id=manifest.pod_id,
        node_rank=manifest.node.rank,
        num_pods=config.runtime.num_pods,
        ranks_per_pod=min(config.ranks_per_pod, MAX_RANKS),
        straggler_factor=config.watchdog.straggler_factor,
        straggler_records=config.watchdog.straggler_records,
    )


def figures_of(evidence: HealthEvidence, limits: WatchdogLimits) -> RunFigures:
    """The figures behind a verdict; pure."""
    records = [record for record in evidence.records if record.loss is not None]
    with_gates = (record for record in reversed(evidence.records) if has_gates(record))
    return RunFigures(
        record=records[-1] if records else None,
        gates=next(with_gates, None),
        usual_tokens_per_s=evidence.reference.tokens_per_s,
        pace_s=_pace_s(records),
        phase=_phase_use(evidence, limits),
    )


def _pace_s(records: list[Heartbeat]) -> float | None:
    """None where a clock was set back, or too few records say anything."""
    if not records:
        return None
    first, last = records[0], records[-1]
    steps, seconds = last.step - first.step, last.ts - first.ts
    return seconds / steps if steps > 0 and seconds > 0 else last.step_s


def _phase_use(evidence: HealthEvidence, limits: WatchdogLimits) -> PhaseUse | None:
    has_ended = evidence.process.exit is not None or evidence.process.trainer_alive is False
    if evidence.last is None or has_ended:
        return None
    judged = judge_movement(evidence, limits)
    if judged is not None:
        is_awaited = judged.odd is not None and judged.still_s > limits.data_wait_warn_s
        return PhaseUse(
            phase=judged.worst.phase or "init", still_s=judged.still_s, limit_s=judged.limit_s,
            warn_s=judged.warn_s, rank=judged.worst.rank if is_awaited else None,
        )  # fmt: skip
    warn_s, limit_s = patience_s(evidence, limits)
    still_s = max(0.0, evidence.still_s)  # the pod's clock may have been set back
    return PhaseUse(phase=evidence.last.phase, still_s=still_s, limit_s=limit_s, warn_s=warn_s)


def _new_records(path: Path, kind: type[RecordT], offset: int) -> tuple[JsonLines[RecordT], bool]:
    """What is new since the offset, and whether there is more."""
    if offset < 0:
        return read_last_records(path, kind, MAX_BYTES), False
    read = read_records(path, kind, offset, MAX_BYTES)
    return read, not read.problem and _size(path) - offset > MAX_BYTES


def _read_news(run: RunDir, lead: Path, offsets: Offsets | None) -> tuple[RunNews, str]:
    """New lines since the offsets, and why the events cannot be read; empty if they can.

    `lead`: heartbeats of the first rank of this pod.
    """
    if offsets is None:
        return RunNews(beats_offset=-1, events_offset=-1), ""
    beats, beats_more = _new_records(lead, Heartbeat, offsets.heartbeats)
    events, events_more = _new_records(run.events, Event, offsets.events)
    news = RunNews(
        beats=beats.records,
        beats_offset=beats.offset,
        beats_more=beats_more,
        beats_torn=beats.torn,
        events=events.records,
        events_begin=events.begin,
        events_offset=events.offset,
        events_more=events_more,
    )
    return news, events.problem


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _read_anomaly(run: RunDir) -> str:
    try:
        return read_bounded(run.anomaly, _MAX_ANOMALY_BYTES).decode(errors="replace").strip()[:200]
    except (OSError, JsonError):
        return ""


def _read_data(run: RunDir) -> DataAccount | None:
    """What was dropped of the data; one that cannot be used is replaced by one that says why."""
    try:
        account = read_account(run.data_account)
    except (OSError, ValueError) as error:
        why = f"{run.data_account.name} cannot be read: {str(error).splitlines()[0]}"
        return DataAccount(passed_over={why: Count(count=1)})
    return account.brief() if account is not None else None


def report_run(run: RunDir, offsets: Offsets | None, now_unix_s: float) -> RunReport:
    """Everything about one run.

    `offsets`: where to continue in heartbeats and events; None leaves both out.

    Raises:
        ManifestError: If it has no usable manifest.
    """
    manifest, watchdog = read_manifest(run), read_watchdog(run)
    processes = read_processes(run, manifest.attempt)
    checkpoints = list_checkpoint_facts(run)
    process = read_process_evidence(run, manifest, processes, checkpoints)
    lead = run.heartbeat(manifest.pod_ranks[0])
    past = read_last_records(lead, Heartbeat, HISTORY_BYTES)
    beats = [beat for beat in past.records if beat.attempt == manifest.attempt]
    last = beats[-1] if beats else None
    evidence = RunEvidence(
        trainer_alive=process.trainer_alive,
        runner_alive=is_running(processes.runner) if processes else None,
        watchdog_alive=is_running(watchdog.identity) if watchdog else None,
        same_boot=is_this_boot(processes),
        last_beat=last,
        beat_age_s=now_unix_s - last.ts if last else None,
        exit=process.exit,
        halt=read_halt(run, run_id=manifest.run_id, attempt=manifest.attempt),
    )
    status = derive_status(evidence, manifest.attempt, foresee_restart(run, manifest))
    news, unread_events = _read_news(run, lead, offsets)
    cards = read_card_evidence(run, manifest.attempt)
    causality = read_causality(report_file(run, manifest.attempt))
    machine = read_machine_evidence(run, checkpoints, cards, causality)
    tracker = tracker_of(manifest, watchdog.best_tokens_per_s if watchdog else None)
    tracker.feed(beats)  # by the time stamps of the pod, against the pod's clock
    unusable = _feed_ranks(tracker, RankFiles(run, manifest))
    health, limits = tracker.evidence(now_unix_s, process, machine), manifest.config.watchdog
    return RunReport(
        **dict(evidence),
        **dict(news),
        run_id=run.run_id,
        run_dir=str(run.root),
        manifest=summarize(manifest),
        state=status.state,
        why=status.why + _explain(run, status.state, process.exit),
        flags=[*status.flags, *filter(None, (past.problem, *unusable, unread_events))],
        processes=processes,
        verdict=judge(health, limits),
        watchdog=watchdog,
        log_bytes=_size(run.log),
        checkpoints=checkpoints[:MAX_CHECKPOINTS],
        disk_free_bytes=machine.disk_free_bytes,
        anomaly=_read_anomaly(run),
        figures=figures_of(health, limits),
        ranks=health.ranks,
        data=_read_data(run),
        beginnings=read_beginnings(run),
    )


def _feed_ranks(tracker: Tracker, files: RankFiles) -> list[str]:
    """Give the tracker what the other ranks of the pod wrote; what of it cannot be used."""
    problems = []
    for lines in files.read():
        tracker.feed_rank(lines.rank, lines.beats, lines.problem)
        problems.append(lines.problem)
    return problems


def _explain(run: RunDir, state: State, ended: ExitRecord | None) -> str:
    """What else is known of a state, to be joined to its evidence; empty if nothing is."""
    if state == "planned":
        return _read_last_words(run)
    if ended is None or ended.code != TrainerExit.RESUMABLE:
        return ""
    for event in find_events(run, WATCHDOG_ENDED):
        if event.attempt == ended.attempt and abs(event.ts - ended.at) < _TOGETHER_S:
            return _ALL_ENDED
    return ""


def _read_last_words(run: RunDir) -> str:
    """How the log of this attempt ends, where its runner ended before it recorded itself."""
    try:
        with open_regular(run.log) as log:
            facts = os.fstat(log.fileno())
            if facts.st_mtime < run.manifest.stat().st_mtime:  # of the attempt before
                return ""
            log.seek(max(0, facts.st_size - _LAST_WORDS_BYTES))
            text = log.read(_LAST_WORDS_BYTES).decode(errors="replace")
    except (OSError, JsonError):
        return ""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return f"; training.log ends with: {lines[-1][:200]}" if lines else ""


def _find_runs(root: Path, wanted: Sequence[str]) -> list[RunDir]:
    if wanted:
        return [RunDir(root / run_id) for run_id in wanted]
    if not root.is_dir():
        return []
    return [
        RunDir(path)
        for path in sorted(root.iterdir(), reverse=True)
        if not path.name.startswith(".") and (path / "manifest.json").exists()
    ]


def probe(root: Path, wanted: Sequence[str], offsets: dict[str, Offsets]) -> ProbeDocument:
    """Report the runs that are asked for, or all runs under a folder.

    New heartbeats and events come along for runs that are asked for or have an offset.
    """
    asked = dict.fromkeys(wanted, Offsets()) | offsets
    now_unix_s = time.time()
    runs: list[RunReport] = []
    problems: list[RunProblem] = []
    for run in _find_runs(root, wanted):
        try:
            runs.append(report_run(run, asked.get(run.run_id), now_unix_s))
        except (ManifestError, OSError) as error:
            problems.append(RunProblem(run_id=run.run_id, message=str(error)))
    return ProbeDocument(pod_unix_s=now_unix_s, boot_id=boot_id(), runs=runs, problems=problems)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m nsa_ops.pod.probe", description=__doc__)
    parser.add_argument("--runs-root", type=Path, required=True)
    parser.add_argument("--run-id", action="append", default=[])
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Read offsets from stdin (nothing, or JSON), write one document to stdout."""
    given = _parse(arguments)
    content = b"" if sys.stdin.isatty() else sys.stdin.buffer.read()
    try:
        offsets = OFFSETS.validate_json(content) if content.strip() else {}
    except ValidationError as error:
        sys.stderr.write(
            f"error: the offsets on stdin cannot be read: {error.errors()[0]['msg']}\n"
        )
        return USAGE
    document = probe(given.runs_root.resolve(), given.run_id, offsets)
    sys.stdout.write(document.model_dump_json() + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
