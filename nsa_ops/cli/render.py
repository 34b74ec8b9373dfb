"""The only module that draws: results as plain tables and lines, in colour only on a terminal."""

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from nsa_core.config.profile import HardwareProfile
from nsa_ops.configure import Checked, Value
from nsa_ops.laptop.trust import TrustedFile
from nsa_ops.plan import Plan
from nsa_ops.pods.known import PodDetails
from nsa_ops.printable import printable
from nsa_ops.quantities import format_time
from nsa_ops.store import PodRecord, RunRecord

_PIPE_WIDTH = 200


def make_console(color: str, *, is_color_forbidden: bool) -> Console:
    """A console on stdout: colour as asked, wide and plain off a terminal."""
    probe = Console()
    wanted = color == "always" or (color == "auto" and probe.is_terminal and not is_color_forbidden)
    return Console(
        highlight=False,
        emoji=False,  # `:x:` in a pod's words is not a picture
        no_color=not wanted,
        force_terminal=True if color == "always" else None,
        width=None if probe.is_terminal else _PIPE_WIDTH,
    )


def table(headings: Sequence[str], rows: Sequence[Sequence[object]]) -> Table:
    """A plain table: no frame, two spaces between columns."""
    drawn = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for heading in headings:
        drawn.add_column(heading, overflow="fold")
    for row in rows:
        drawn.add_row(*map(cell, row))
    return drawn


def cell(value: object) -> str:
    """A value for a cell of a table: its text as it is, neither markup nor control characters."""
    return escape(printable(cell_text(value)))


def facts(console: Console, pairs: Sequence[tuple[str, object]]) -> None:
    """Names and values, one pair a line; empty values are left out."""
    kept = [pair for pair in pairs if pair[1] is not None and pair[1] != ""]
    width = max((len(name) for name, _ in kept), default=0)
    for name, value in kept:
        line(console, f"{name:<{width}}  {cell_text(value)}")


def line(console: Console, text: str) -> None:
    """One line of text, without markup; a control character is shown, never obeyed."""
    console.print(printable(text), markup=False, soft_wrap=True)


def cell_text(value: object) -> str:
    """A value as people read it."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, list | tuple):
        return ", ".join(cell_text(item) for item in value)
    if isinstance(value, dict):
        return ", ".join(f"{key} {cell_text(item)}" for key, item in value.items())
    return str(value)


def plan_lines(plan: Plan, *, brief: bool = False) -> list[str]:
    """A plan as lines: what, with which command, writing which files; its notes also in brief."""
    lines = [f"plan: {plan.title}"]
    for number, step in enumerate(() if brief else plan.steps, start=1):
        mark = " (done already)" if step.is_done else ""
        lines.append(f"  {number}. {step.name}: {step.detail}{mark}")
        if step.command:
            lines.append(f"     $ {step.shell}")
        lines += [f"     -> {file}" for file in step.files]
    return lines + [f"  note: {note}" for note in plan.notes]


def draw_plan(console: Console, plan: Plan) -> None:
    """A plan on stdout."""
    for text in plan_lines(plan):
        line(console, text)


def draw_pod(console: Console, pod: PodRecord, fingerprint: str = "") -> None:
    """One pod, and the fingerprint of its pinned host key if it is known."""
    host_key = [("host key", fingerprint)] if fingerprint else []
    facts(
        console,
        [
            ("pod", pod.name),
            ("is", "this machine" if pod.kind == "local" else f"{pod.kind} to {pod.address}"),
            ("root", pod.root),
            ("python", pod.python),
            ("profile", pod.profile or "not set"),
            ("added", format_time(pod.added_unix_s)),
            *host_key,
        ],
    )


def draw_pods(console: Console, pods: list[PodRecord]) -> None:
    """Pods in a table."""
    if not pods:
        line(console, "no pods; add this machine with `nsa-ops pod add here local`")
        return
    rows = [(pod.name, pod.kind, pod.address or "-", pod.profile or "-", pod.root) for pod in pods]
    console.print(table(["POD", "KIND", "ADDRESS", "PROFILE", "ROOT"], rows))


def draw_pod_details(console: Console, details: PodDetails) -> None:
    """A pod and its runs."""
    draw_pod(console, details.pod, details.fingerprint)
    draw_run_records(console, details.runs)


def draw_forgotten(console: Console, pod: PodRecord) -> None:
    """The pod that is forgotten now."""
    line(console, f"forgot pod {pod.name}; its files stay in {pod.root}")


def draw_run_records(console: Console, runs: list[RunRecord]) -> None:
    """Runs as the registry knows them."""
    if not runs:
        line(console, "no runs yet")
        return
    rows = [
        (run.run_id, run.pod, run.recipe, run.profile, format_time(run.launched_unix_s))
        for run in runs
    ]
    console.print(table(["RUN", "POD", "RECIPE", "PROFILE", "LAUNCHED"], rows))


def draw_checked(console: Console, checked: Checked) -> None:
    """A configuration that can be used."""
    line(console, f"recipe {checked.recipe} with profile {checked.profile} can be used")
    facts(console, [("sha256", checked.sha256), ("values set", checked.num_overridden)])
    for note in checked.notes:
        line(console, f"note: {note}")


def draw_values(console: Console, values: list[Value]) -> None:
    """Values by key."""
    console.print(table(["KEY", "VALUE"], [(value.key, value.value) for value in values]))


def draw_values_with_origin(console: Console, values: list[Value]) -> None:
    """Values by key with who set them, and why where that is known."""
    rows = [(value.key, value.value, value.origin, value.reason) for value in values]
    console.print(table(["KEY", "VALUE", "ORIGIN", "WHY"], rows))


def draw_reasons(console: Console, values: list[Value]) -> None:
    """Values that a profile decides, with the reason."""
    rows = [(value.key, value.value, value.reason or "-") for value in values]
    console.print(table(["KEY", "VALUE", "WHY"], rows))


def draw_trusted(console: Console, files: list[TrustedFile]) -> None:
    """Project files that are trusted."""
    if not files:
        line(console, "no project file is trusted")
        return
    rows = [(one.path, one.sha256[:12], one.state) for one in files]
    console.print(table(["FILE", "SHA256", "STATE"], rows))


def draw_profiles(console: Console, profiles: list[HardwareProfile]) -> None:
    """Hardware profiles in a table."""
    rows = [
        (profile.name, _capability(profile), profile.precisions, profile.description)
        for profile in profiles
    ]
    console.print(table(["PROFILE", "CAPABILITY", "PRECISIONS", "IS"], rows))


def _capability(profile: HardwareProfile) -> str:
    capability = profile.compute_capability
    return "-" if capability is None else f"{capability:.1f}"


def draw_profile(console: Console, profile: HardwareProfile) -> None:
    """One hardware profile, field by field."""
    pairs: list[tuple[str, Any]] = []
    for name, value in profile.model_dump(exclude={"config", "reasons", "batch_tiers"}).items():
        pairs += (
            [(f"{name}.{key}", item) for key, item in value.items()]
            if isinstance(value, dict)
            else [(name, value)]
        )
    pairs += [(f"config {key}", value) for key, value in profile.config.items()]
    for tier in profile.batch_tiers:
        batches = ", ".join(f"{count} x {length}" for length, count in tier.micro_batch.items())
        pairs.append((f"batch from {tier.min_memory_gib:g} GiB", batches))
    facts(console, pairs)


def gib(num_bytes: int | None) -> str:
    """Bytes in the unit that people read; unknown stays unknown."""
    if num_bytes is None:
        return "unknown"
    mib = num_bytes / 2**20
    return f"{mib / 1024:.1f} GiB" if mib >= 1024 else f"{mib:.1f} MiB"
