"""The `bench` commands: measure on a pod, keep the result, draw it."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from nsa_ops.cli.arguments import PodArgument, ProfileOption, RecipeOption, SetOption
from nsa_ops.cli.command import command
from nsa_ops.cli.session import Session

if TYPE_CHECKING:
    from nsa_ops.bench.run import Benched

bench_group = typer.Typer(help="How fast NSA is on a pod's card, beside dense attention.")

FromOption = Annotated[
    Path | None,
    typer.Option("--from", metavar="FILE", help="Show a result file; nothing is measured"),
]
OutOption = Annotated[
    Path | None, typer.Option("--out", metavar="FILE", help="Write the result as JSON")
]
PlotOption = Annotated[
    Path | None, typer.Option("--plot", metavar="FILE", help="Draw it as one SVG file")
]
ShapeOption = Annotated[
    list[str] | None,
    typer.Option("--shape", metavar="A|B", help="12/2/64 or 64/4/128; may be repeated"),
]
LengthOption = Annotated[
    list[int] | None,
    typer.Option("--length", metavar="T", help="Tokens of a document; may be repeated"),
]
TokensOption = Annotated[
    int | None, typer.Option("--tokens", min=1, metavar="N", help="Tokens of a call or step")
]
DtypeOption = Annotated[
    str | None, typer.Option("--dtype", metavar="bfloat16|float16", help="Of the inputs")
]
StepsOption = Annotated[
    int | None, typer.Option("--steps", min=1, metavar="N", help="Optimizer steps that are timed")
]
RunsOption = Annotated[
    int | None, typer.Option("--runs", min=1, metavar="N", help="Runs behind each median")
]


def register(app: typer.Typer) -> None:
    """Add these commands to the root."""
    app.add_typer(bench_group, name="bench")


@command(bench_group, "kernels", path="bench")
def kernels(
    session: Session,
    pod: PodArgument = None,
    shape: ShapeOption = None,
    length: LengthOption = None,
    tokens: TokensOption = None,
    dtype: DtypeOption = None,
    runs: RunsOption = None,
    read: FromOption = None,
    out: OutOption = None,
    plot: PlotOption = None,
) -> None:
    """Time whole NSA and each of its branches beside dense attention."""
    words = [
        *_repeat("--shape", shape),
        *_repeat("--length", length),
        *_once("--tokens", tokens),
        *_once("--dtype", dtype),
        *_once("--runs", runs),
    ]
    _bench(session, "kernels", pod, words, read=read, out=out, plot=plot)


@command(bench_group, "model", path="bench")
def model(
    session: Session,
    pod: PodArgument = None,
    attention: Annotated[
        list[str] | None,
        typer.Option("--attention", metavar="nsa|dense", help="May be repeated; both if left out"),
    ] = None,
    length: LengthOption = None,
    tokens: TokensOption = None,
    steps: StepsOption = None,
    runs: RunsOption = None,
    sets: SetOption = None,
    read: FromOption = None,
    out: OutOption = None,
    plot: PlotOption = None,
) -> None:
    """Time whole training steps of the main model, NSA beside its dense control."""
    words = [
        *_repeat("--attention", attention),
        *_repeat("--length", length),
        *_once("--tokens", tokens),
        *_once("--steps", steps),
        *_once("--runs", runs),
        *_repeat("--set", sets),
    ]
    _bench(session, "model", pod, words, read=read, out=out, plot=plot)


@command(bench_group, "decode", path="bench")
def decode(
    session: Session,
    pod: PodArgument = None,
    shape: ShapeOption = None,
    length: LengthOption = None,
    batch: Annotated[
        list[int] | None,
        typer.Option("--batch", metavar="B", help="Sequences at a time; may be repeated"),
    ] = None,
    dtype: DtypeOption = None,
    runs: RunsOption = None,
    read: FromOption = None,
    out: OutOption = None,
    plot: PlotOption = None,
) -> None:
    """Time the attention of one decoded token beside dense attention."""
    words = [
        *_repeat("--shape", shape),
        *_repeat("--length", length),
        *_repeat("--batch", batch),
        *_once("--dtype", dtype),
        *_once("--runs", runs),
    ]
    _bench(session, "decode", pod, words, read=read, out=out, plot=plot)


@command(bench_group, "validate", path="bench")
def validate(
    session: Session,
    pod: PodArgument = None,
    profile: ProfileOption = None,
    recipe: RecipeOption = None,
    sets: SetOption = None,
    length: LengthOption = None,
    path: Annotated[
        list[str] | None,
        typer.Option("--path", metavar="NAME", help="Path of the selected branch; may be repeated"),
    ] = None,
    steps: StepsOption = None,
    read: FromOption = None,
    out: OutOption = None,
    plot: PlotOption = None,
) -> None:
    """Train a few steps at several lengths on every path of the selected branch, and compare."""
    from nsa_ops.bench.run import (
        check_only_shown,
        check_places,
        read_benched,
        run_validation,
    )
    from nsa_ops.configure import RunChoice

    words = [*_repeat("--length", length), *_repeat("--path", path), *_once("--steps", steps)]
    chosen = [*_once("--recipe", recipe), *_once("--profile", profile), *_repeat("--set", sets)]
    choice = RunChoice(recipe or "", profile or "", tuple(sets or ()))
    session.interrupt_note = _INTERRUPTED
    check_only_shown(read, pod, [*chosen, *words])
    check_places(read=read, out=out, plot=plot)
    if read is not None:
        found = read_benched(read, "validate")
    else:
        found = run_validation(session.operator, pod, choice, words)
    _show(session, found, out=out, plot=plot)


@command(bench_group, "compare", path="bench")
def compare(
    session: Session,
    pod: PodArgument = None,
    recipe: RecipeOption = None,
    sets: SetOption = None,
    root: Annotated[
        str | None,
        typer.Option("--root", metavar="DIR", help="Folder on the pod for the text and both runs"),
    ] = None,
    read: FromOption = None,
    out: OutOption = None,
    plot: PlotOption = None,
) -> None:
    """Train NSA and the dense control on the same text, and set them side by side."""
    words = [*_once("--recipe", recipe), *_once("--root", root), *_repeat("--set", sets)]
    _bench(session, "compare", pod, words, read=read, out=out, plot=plot)


_INTERRUPTED = "the bench was ended with it, and nothing was written"


def _repeat(flag: str, values: list[str] | list[int] | None) -> list[str]:
    return [word for value in values or () for word in (flag, str(value))]


def _once(flag: str, value: object) -> list[str]:
    return [] if value is None else [flag, str(value)]


@command(bench_group, "transport", path="bench")
def transport(
    session: Session,
    pod: PodArgument = None,
    rounds: Annotated[int, typer.Option("--rounds", min=1, metavar="N", help="Repetitions")] = 3,
    mib: Annotated[int, typer.Option("--mib", min=1, metavar="MIB", help="Size of the pull")] = 200,
) -> None:
    """Time commands and a pull beside bare ssh over the same link."""
    from nsa_ops.bench.transport import bench_transport
    from nsa_ops.cli.render_bench import draw_transport

    session.show(bench_transport(session.operator, pod, num_rounds=rounds, mib=mib), draw_transport)


def _bench(
    session: Session,
    bench: str,
    pod: str | None,
    words: list[str],
    *,
    read: Path | None,
    out: Path | None,
    plot: Path | None,
) -> None:
    """Measure or read, then show it."""
    from nsa_ops.bench.run import (
        BenchRequest,
        check_only_shown,
        check_places,
        read_benched,
        run_bench,
    )

    session.interrupt_note = _INTERRUPTED
    check_only_shown(read, pod, words)
    check_places(read=read, out=out, plot=plot)
    if read is not None:
        found = read_benched(read, bench)
    else:
        found = run_bench(session.operator, pod, BenchRequest(bench, tuple(words)))
    _show(session, found, out=out, plot=plot)


def _show(session: Session, found: "Benched", *, out: Path | None, plot: Path | None) -> None:
    """Keep what is asked for, then the result on stdout."""
    from nsa_ops.bench.run import keep
    from nsa_ops.cli.render_bench import draw_benched

    found = keep(found, out=out, plot=plot)
    for path in found.kept:
        session.tell(f"wrote {path}")
    session.show(found, draw_benched, failure=found.error)
