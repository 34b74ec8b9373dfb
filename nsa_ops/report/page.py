"""Lay a RecordedRun out as one self-contained HTML page: no script and no request."""

from collections.abc import Iterable, Sequence
from importlib.resources import files

from nsa_ops.quantities import count_of, format_duration, format_time
from nsa_ops.report import summary
from nsa_ops.report.axes import escape, escape_lines
from nsa_ops.report.charts import figures
from nsa_ops.report.rank_history import COLUMNS, describe_spread, rank_cells
from nsa_ops.report.record import RecordedRun
from nsa_ops.report.svg import Chart, draw_chart
from nsa_ops.report.timeline import (
    draw_goodput,
    draw_shape,
    draw_timeline,
    look_of,
)

#: First words of every page; a file that begins otherwise is not ours and is not replaced.
DOCTYPE = "<!doctype html>"

#: Even if text got through unescaped, the browser would run nothing and ask no one.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"


def render_page(record: RecordedRun, *, written_unix_s: float) -> str:
    """The whole page as text."""
    style = files(__package__).joinpath("page.css").read_text(encoding="utf-8")
    body = [
        _header(record),
        _charts(figures(record)),
        _ranks(record),
        _time(record),
        _checkpoints(record),
        _samples(record),
        _run(record),
        _reproduce(record),
        _configuration(record),
        _missing(record),
        f"<footer>Written {format_time(written_unix_s)} by <code>nsa-ops report</code> "
        "from the run directory alone.</footer>",
    ]
    return (
        f'{DOCTYPE}\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>{escape(record.run_id)}</title><style>{style}</style></head>\n"
        f"<body><main>{''.join(body)}</main></body></html>\n"
    )


def _header(record: RecordedRun) -> str:
    outcome = summary.describe_outcome(record)
    tiles = "".join(
        f"<div><dt>{escape(fact.name)}</dt><dd>{escape(fact.value)}"
        f"<small>{escape(fact.remark)}</small></dd></div>"
        for fact in summary.headline(record)
    )
    return (
        f'<header><p class="kind">training run <span class="badge {outcome.tone}">'
        f"{escape(outcome.word)}</span></p><h1>{escape(record.run_id)}</h1>"
        f'<p class="outcome">{escape(outcome.sentence)}</p><dl class="tiles">{tiles}</dl></header>'
    )


def _section(title: str, content: str, remark: str = "") -> str:
    note = f'<p class="remark">{escape(remark)}</p>' if remark else ""
    return f"<section><h2>{escape(title)}</h2>{note}{content}</section>" if content else ""


def _charts(charts: Sequence[Chart]) -> str:
    drawn = "".join(_figure(chart) for chart in charts)
    moments = next((chart.moments for chart in charts if chart.moments), ())
    remark = "Dashed lines mark where an attempt resumed." if moments else ""
    return _section("Training", f'<div class="charts">{drawn}</div>', remark)


def _figure(chart: Chart) -> str:
    title = f"<h3>{escape(chart.title)}</h3>"
    if not chart.has_data:
        return f'<figure class="empty">{title}<p>Not recorded</p></figure>'
    legend = "".join(
        f'<li><i class="{line.css}"></i>{escape(line.label)}</li>' for line in chart.series
    )
    return (
        f'<figure><figcaption>{title}<ul class="legend">{legend}</ul></figcaption>'
        f'<div class="scroll">{draw_chart(chart)}</div></figure>'
    )


def _ranks(record: RecordedRun) -> str:
    """A row for each rank; nothing for a run with one."""
    rows = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>"
        for cells in rank_cells(record.ranks)
    )
    head = "".join(f"<th>{name}</th>" for name in COLUMNS)
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"
    shown = f'<div class="scroll">{table}</div>' if rows else ""
    return _section("Ranks", shown, describe_spread(record.ranks))


def _time(record: RecordedRun) -> str:
    parts = []
    if record.goodput_s:
        parts.append(f'<div class="card">{_goodput(record.goodput_s)}</div>')
    timeline = draw_timeline(record)
    if timeline:
        parts.append(
            f'<div class="card"><h3>Attempts, checkpoints, events</h3>'
            f'<div class="scroll">{timeline}</div></div>'
        )
    if record.events:
        parts.append(_events(record))
    return _section("Time", "".join(parts), summary.replay_remark(record))


def _goodput(goodput_s: dict[str, float]) -> str:
    legend = "".join(
        f'<li><i class="b-{name}"></i>{name.replace("_", " ")} '
        f"<b>{time}</b> <small>{share}</small></li>"
        for name, time, share in summary.goodput_rows(goodput_s)
    )
    return (
        f"<h3>Where {format_duration(sum(goodput_s.values()))} of wall time went</h3>"
        f'<div class="scroll">{draw_goodput(goodput_s)}</div><ul class="legend wide">{legend}</ul>'
    )


def _events(record: RecordedRun) -> str:
    rows = []
    for event, cells in summary.event_rows(record):
        tone, shape = look_of(event.kind)
        outline = f'<path d="{draw_shape(shape, 8, 8)}"/>'
        mark = f'<svg class="mini mark {tone}" viewBox="0 0 16 16">{outline}</svg>'
        rows.append(
            f"<tr><td>{mark}</td>" + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>"
        )
    head = "".join(f"<th>{name}</th>" for name in ("", "after", "attempt", "what", "by", "message"))
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"
    few = " open" if len(rows) <= 12 else ""
    heading = f"<summary>{count_of(len(rows), 'event')}</summary>"
    return f'<details{few}>{heading}<div class="scroll">{table}</div></details>'


def _checkpoints(record: RecordedRun) -> str:
    rows = "".join(
        f'<tr><td>{escape(fact.name)}</td><td><span class="badge {tone}">'
        f"{'verified' if tone == 'good' else 'damaged'}</span></td>"
        f"<td>{escape(fact.value)}</td><td>{escape(fact.remark)}</td></tr>"
        for tone, fact in summary.describe_checkpoints(record)
    )
    if not rows:
        return _section(
            "Checkpoints", '<p class="none">This directory holds no whole checkpoint.</p>'
        )
    remark = "Every file was hashed again for this report and compared with checkpoint.json."
    return _section(
        "Checkpoints", f'<div class="scroll"><table><tbody>{rows}</tbody></table></div>', remark
    )


def _samples(record: RecordedRun) -> str:
    texts = "".join(
        f"<blockquote><small>{escape(sample.drawn)}</small>"
        f"<pre><b>{escape_lines(sample.prompt)}</b>{escape_lines(sample.text)}</pre></blockquote>"
        for sample in record.samples
    )
    return _section(
        "Generated text", texts, "The prompt is bold; the rest was written by the model."
    )


def _facts_table(facts: Iterable[summary.Fact]) -> str:
    rows = "".join(
        f"<tr><th>{escape(fact.name)}</th><td>{escape(fact.value)}</td>"
        f"<td>{escape(fact.remark)}</td></tr>"
        for fact in facts
    )
    return f'<div class="scroll"><table class="facts"><tbody>{rows}</tbody></table></div>'


def _run(record: RecordedRun) -> str:
    machine = [summary.Fact(name, value) for name, value in summary.machine_facts(record).items()]
    num_facts = count_of(len(machine), "fact")
    more = (
        f"<details><summary>{num_facts} of the machine and its software</summary>"
        f"{_facts_table(machine)}</details>"
        if machine
        else ""
    )
    return _section("What was run", _facts_table(summary.describe_run(record)) + more)


def _reproduce(record: RecordedRun) -> str:
    commands = summary.reproduce_commands(record)
    if not commands:
        return _section("Reproduce", '<p class="none">The manifest holds no launch command.</p>')
    lines = "\n".join(escape_lines(command) for command in commands)
    return _section("Reproduce", f'<pre class="command">{lines}</pre>')


def _configuration(record: RecordedRun) -> str:
    if record.manifest is None:
        return ""
    facts = summary.describe_configuration(record.manifest)
    chosen = [fact for fact in facts if fact.remark != "default"]
    defaults = [fact for fact in facts if fact.remark == "default"]
    heading = f"<summary>{count_of(len(defaults), 'default')}</summary>"
    rest = f"<details>{heading}{_facts_table(defaults)}</details>"
    remark = f"sha256 {record.manifest.config_sha256}; each value with its origin."
    return _section("Configuration", (_facts_table(chosen) if chosen else "") + rest, remark)


def _missing(record: RecordedRun) -> str:
    lines = "".join(f"<li>{escape(line)}</li>" for line in record.missing)
    return _section("Missing pieces", f"<ul>{lines}</ul>" if lines else "")
