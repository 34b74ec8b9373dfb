"""Draw one run: what `watch`, `status` and `health` have in common, the verdict first."""

from collections.abc import Sequence
from math import isfinite

from rich.console import Console
from rich.text import Text

from nsa_core.rundir.data_account import DataAccount
from nsa_core.rundir.heartbeat import Heartbeat
from nsa_ops.cli.console import bar, can_show, line, share_of
from nsa_ops.cli.render_ranks import rank_rows, rank_table
from nsa_ops.cli.screen import ScreenLine, draw_rows, styled
from nsa_ops.gpu.throttling import name_throttling
from nsa_ops.pod.messages import PhaseUse, RunFigures, RunReport
from nsa_ops.pod.rules.verdict import Verdict
from nsa_ops.quantities import count_of, format_duration
from nsa_ops.runs.choose import LIVE
from nsa_ops.runs.status import RunStatusLine, current_step
from nsa_ops.runs.watch import Frame

_STYLES = {"healthy": "green", "warn": "yellow", "halt": "bold red"}
_BRANCHES = ("compressed", "selected", "sliding")
#: More steps than any run has; a pod may say a number that no float holds.
_MOST_STEPS = 10**15
#: A phase that has used so much of its patience is shown in the colour of a warning.
_USED_WARN = 0.5
_BARS = "▁▂▃▄▅▆▇█"
#: The same eight heights where the encoding of the terminal has no blocks.
_ASCII_BARS = "_.-:=+*#"


def verdict_row(verdict: Verdict, *, is_alone: bool = True) -> ScreenLine:
    """The verdict of the rules, which comes first on every screen.

    `is_alone`: the other findings are not shown below it, so they are counted.
    """
    others = len(verdict.findings) - 1
    more = f" (and {count_of(others, 'more finding')}: `nsa-ops health`)" if others > 0 else ""
    rule = f" {verdict.rule}" if verdict.rule else ""
    value = f"{verdict.level}{rule}: {verdict.sentence}{more if is_alone else ''}"
    return ScreenLine("verdict", value, _STYLES[verdict.level])


def verdict_rows(verdict: Verdict) -> list[ScreenLine]:
    """The verdict of the rules, and every other finding below it."""
    others = [
        ScreenLine("also", f"{one.level} {one.rule}: {one.sentence}", _STYLES[one.level])
        for one in verdict.findings[1:]
    ]
    return [verdict_row(verdict, is_alone=False), *others]


def state_row(report: RunReport) -> ScreenLine:
    """The state of a run, its flags, and the evidence."""
    flags = f" [{', '.join(report.flags)}]" if report.flags else ""
    value = f"{report.run_id} is {report.state}{flags}: {report.why}"
    return ScreenLine("run", value, "yellow" if report.flags else "")


def pod_rows(report: RunReport) -> list[ScreenLine]:
    """What each pod of a run of several does, where one is not as the run is."""
    pods = [one for one in report.pods if one.state != report.state]
    if not pods:
        return [ScreenLine("pods", ", ".join(one.pod for one in report.pods))] * bool(report.pods)
    return [
        ScreenLine(f"pod {one.node_rank}", f"{one.pod} is {one.state or 'unknown'}: {one.why}")
        for one in report.pods
    ]


def figure_rows(report: RunReport, encoding: str) -> list[ScreenLine]:
    """Progress, loss, speed, kernels, gates, memory and phase; what is unknown is left out."""
    figures = report.figures
    record = _with_loss(figures.record) or _with_loss(report.last_beat)
    rows = [progress_row(report, encoding)]
    if report.state == "staging" and report.last_beat is not None:
        rows += _staging_rows(report.last_beat, encoding)
    if record is not None:
        rows += [ScreenLine("loss", _loss_text(record)), *_speed_rows(record, figures)]
        rows += _gate_rows(figures.gates or record)
    ranks = rank_rows(report)
    if record is not None and not ranks:
        rows += _memory_rows(record)
    rows += ranks
    if figures.phase is not None:
        rows.append(_phase_row(figures.phase))
    return rows


def _with_loss(beat: Heartbeat | None) -> Heartbeat | None:
    return beat if beat is not None and beat.loss is not None else None


def progress_row(report: RunReport, encoding: str) -> ScreenLine:
    """A bar, the share of the steps, and the time that is left at the pace of the last records."""
    done, steps = current_step(report), max(1, report.manifest.steps)
    share = share_of(done, steps)
    value = f"{bar(share, encoding)} {100 * share:.1f} %, step {done:,} of {steps:,}"
    pace_s = report.figures.pace_s
    if report.state == "running" and pace_s is not None and done < steps:
        left = min(steps - done, _MOST_STEPS)
        value += f", about {format_duration(left * pace_s)} left"
    return ScreenLine("progress", value, "cyan")


def _staging_rows(beat: Heartbeat, encoding: str) -> list[ScreenLine]:
    """What the data phase is doing; with a bar where its end is known."""
    if beat.staging is None:
        return []
    share = beat.staging_share
    shown = f"{bar(share, encoding)} {100 * share:.1f} %, " if share is not None else ""
    return [ScreenLine("staging", f"{shown}{beat.staging}", "cyan")]


def _loss_text(record: Heartbeat) -> str:
    parts = [f"{record.loss:.4f} nats at step {record.step:,}"]
    if record.grad_norm is not None:
        parts.append(f"gradient norm {record.grad_norm:.3g}")
    if record.lr is not None:
        parts.append(f"learning rate {record.lr:.2e}")
    if record.skipped:
        parts.append(f"{count_of(record.skipped, 'step')} skipped")
    return ", ".join(parts)


def _speed_rows(record: Heartbeat, figures: RunFigures) -> list[ScreenLine]:
    """How fast it is and who is waiting: the step, the fetch, the kernel of each branch."""
    speed = []
    if record.tokens_per_s is not None:
        usual = figures.usual_tokens_per_s
        share = f" ({100 * record.tokens_per_s / usual:.0f} % of its usual)" if usual else ""
        speed.append(f"{record.tokens_per_s:,.0f} tokens/s{share}")
    if record.step_s is not None:
        speed.append(f"step time {format_duration(record.step_s)}")
    if record.mfu is not None:
        speed.append(f"MFU {100 * record.mfu:.1f} %")
    fetch = [
        f"{name} {value:.1f} ms"
        for name, value in (("p50", record.fetch_p50_ms), ("p95", record.fetch_p95_ms))
        if value is not None
    ]
    kernels = [f"{name} {kernel}" for name, kernel in (record.kernel_paths or {}).items()]
    rows = (("speed", speed), ("fetch", fetch), ("kernels", kernels))
    return [ScreenLine(label, ", ".join(parts)) for label, parts in rows if parts]


def _gate_rows(record: Heartbeat) -> list[ScreenLine]:
    """The gates of the worst layer, which is named, and its shares of the branches."""
    gates = []
    if record.gate_entropy_mean is not None:
        gates.append(f"entropy {record.gate_entropy_mean:.3f} nats")
    if record.gate_collapse_frac is not None:
        gates.append(f"collapsed {100 * record.gate_collapse_frac:.1f} %")
    if record.gate_max_gate is not None:
        gates.append(f"largest share {record.gate_max_gate:.2f}")
    layer = record.gate_worst_layer
    where = f"worst layer {layer}: " if layer is not None else ""
    rows = [ScreenLine("gates", where + ", ".join(gates))] if gates else []
    shares = zip(_BRANCHES, record.gate_branch_shares or [], strict=False)
    branches = ", ".join(f"{name} {share:.2f}" for name, share in shares)
    return [*rows, *([ScreenLine("branches", where + branches)] if branches else [])]


def _memory_rows(record: Heartbeat) -> list[ScreenLine]:
    """Memory in use, and what the card does, as far as the machine shows it."""
    memory = (
        ("peak {:,} MiB", record.gpu_mem_peak),
        ("reserved {:,} MiB", record.gpu_mem_reserved),
        ("host {:,} MiB", record.host_rss_mib),
    )
    card = (
        ("busy {:.0f} %", record.gpu_util),
        ("{:.0f} W", record.power_w),
        ("{:.0f} degrees C", record.temp_c),
        ("throttled: {}", name_throttling(record.throttle) or None),
    )
    rows = (("memory", memory), ("card", card))
    known_rows = [
        (label, [text.format(value) for text, value in known if value is not None])
        for label, known in rows
    ]
    return [ScreenLine(label, ", ".join(parts)) for label, parts in known_rows if parts]


def _phase_row(use: PhaseUse) -> ScreenLine:
    """The phase, and how much of the time that it may take without progress it has used."""
    limit_s = use.limit_s if use.limit_s is not None else use.warn_s
    share = use.still_s / limit_s if limit_s > 0 else 1.0
    ends = "halts" if use.limit_s is not None else "warns"
    where = f"{use.phase} of rank {use.rank}" if use.rank is not None else use.phase
    value = (
        f"{where}, last moved {format_duration(use.still_s)} ago: {100 * share:.0f} % of the "
        f"{format_duration(limit_s)} after which the watchdog {ends}"
    )
    return ScreenLine("phase", value, "yellow" if share >= _USED_WARN else "")


def crash_text(report: RunReport) -> str:
    """The newest checkpoint that nothing is known against, and what a crash would lose now."""
    newest = next((fact.step for fact in report.checkpoints if fact.whole), None)
    kept = "none yet" if newest is None else f"step {newest:,}"
    behind = current_step(report) - (newest or 0)
    if report.state not in LIVE or behind <= 0:
        return kept
    return f"{kept}, a crash loses at most {count_of(behind, 'step')}"


def checkpoint_row(report: RunReport) -> ScreenLine:
    """The newest one that nothing is known against, and what is wrong with newer ones."""
    facts = report.checkpoints
    newest = next((fact for fact in facts if fact.whole), None)
    newer = facts[: facts.index(newest)] if newest else facts
    sound = "none that is whole" if newer and newest is None else crash_text(report)
    damaged = [f"step {fact.step:,} is damaged: {fact.damage}" for fact in newer]
    return ScreenLine("checkpoint", "; ".join([sound, *damaged]))


def bars_of(encoding: str) -> str:
    """Eight heights, lowest first, that an encoding can carry."""
    return _BARS if can_show(_BARS, encoding) else _ASCII_BARS


def progress_line(beat: Heartbeat) -> str:
    """One record in one line."""
    parts = [f"step {beat.step:>6}", f"loss {beat.loss:.4f}" if beat.loss is not None else ""]
    if beat.tokens_per_s is not None:
        parts.append(f"{beat.tokens_per_s:,.0f} tokens/s")
    if beat.lr is not None:
        parts.append(f"lr {beat.lr:.2e}")
    if beat.grad_norm is not None:
        parts.append(f"grad {beat.grad_norm:.2f}")
    if beat.gpu_mem_peak is not None:
        parts.append(f"{beat.gpu_mem_peak} MiB")
    return "  ".join(part for part in parts if part)


def sparkline(values: Sequence[float], width: int = 60, bars: str = _BARS) -> str:
    """Values as bars of eight heights, the newest on the right; thinned out to the width."""
    kept = [value for value in values if isfinite(value)]
    if not kept:
        return ""
    # Halves: the distance of two numbers that a pod may say is more than a float holds.
    shown = [value / 2 for value in kept[:: max(1, -(-len(kept) // width))]]
    low, span = min(shown), (max(shown) - min(shown)) or 1.0
    return "".join(bars[int((value - low) / span * (len(bars) - 1))] for value in shown)


def run_rows(report: RunReport, encoding: str, at_risk: str = "") -> list[ScreenLine]:
    """A run in a few lines, the verdict first."""
    dropped = data_text(report.data)
    return [
        verdict_row(report.verdict),
        state_row(report),
        *pod_rows(report),
        ScreenLine("attempt", str(report.manifest.attempt)),
        *figure_rows(report, encoding),
        *([ScreenLine("data", dropped)] if dropped else []),
        checkpoint_row(report),
        *([ScreenLine("backup", at_risk)] if at_risk else []),
    ]


def data_text(account: DataAccount | None) -> str:
    """What was dropped of a run's data, and why; empty if nothing was."""
    return account.sentence() if account is not None and account.needs_attention else ""


def frame_rows(frame: Frame, encoding: str = "utf-8") -> list[ScreenLine]:
    """A watched run in a few lines: what `status` shows, and the curves of the newest records."""
    at_risk = frame.at_risk.sentence if frame.at_risk is not None else ""
    report = frame.report
    if report.figures.record is None and frame.progress:  # an agent of an older version
        report = report.model_copy(update={"figures": _figures(frame.progress)})
    rows = [*run_rows(report, encoding, at_risk), *_curves(frame.progress, bars_of(encoding))]
    return rows + rank_table(report)


def _figures(progress: Sequence[Heartbeat]) -> RunFigures:
    gates = (beat for beat in reversed(progress) if beat.gate_branch_shares is not None)
    return RunFigures(record=progress[-1], gates=next(gates, None), pace_s=progress[-1].step_s)


def _curves(progress: Sequence[Heartbeat], bars: str) -> list[ScreenLine]:
    on_card = any(beat.gpu_mem_peak is not None for beat in progress)
    memory = [beat.gpu_mem_peak if on_card else beat.host_rss_mib for beat in progress]
    curves: dict[str, Sequence[float | None]] = {
        "loss curve": [beat.loss for beat in progress],
        "speed curve": [beat.tokens_per_s for beat in progress],
        "memory curve": memory,
    }
    found = {
        name: sparkline([value for value in values if value is not None], bars=bars)
        for name, values in curves.items()
    }
    return [ScreenLine(name, curve, "cyan") for name, curve in found.items() if curve]


def frame_view(frame: Frame, encoding: str) -> Text:
    """A watched run for the live view, in signs that the encoding has."""
    return Text("\n").join(styled(row) for row in frame_rows(frame, encoding))


def draw_frame(console: Console, frame: Frame, records: Sequence[Heartbeat] = ()) -> None:
    """A watched run once, and some of its records below."""
    draw_rows(console, frame_rows(frame, console.encoding))
    if records:
        line(console, "")
    for record in records:
        line(console, progress_line(record))


def draw_status(console: Console, run: RunStatusLine) -> None:
    """One run in a few lines, the verdict first."""
    report = run.report
    if report is None:
        line(console, f"{run.record.run_id}: {run.problem}")
        return
    at_risk = run.at_risk.sentence if run.at_risk else ""
    draw_rows(console, run_rows(report, console.encoding, at_risk) + rank_table(report))


def draw_health(console: Console, run: RunStatusLine) -> None:
    """What the rules find on a run: the verdict, every finding, the figures, and who watches."""
    report = run.report
    if report is None:
        line(console, f"{run.record.run_id}: {run.problem}")
        return
    figures = figure_rows(report, console.encoding)
    rows = [*verdict_rows(report.verdict), state_row(report), *figures, _watchdog_row(report)]
    draw_rows(console, rows + rank_table(report))


def _watchdog_row(report: RunReport) -> ScreenLine:
    watchdog = report.watchdog
    if watchdog is None:
        return ScreenLine("watchdog", "none was started", "yellow")
    alive = "alive" if report.watchdog_alive else "not running"
    why = f": {watchdog.why}" if watchdog.why else ""
    return ScreenLine("watchdog", f"{alive}, {watchdog.doing}{why}")
