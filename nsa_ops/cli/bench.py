"""The `bench` commands: measure on a pod, keep the result, draw it."""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nsa_ops.cli.arguments import PodArgument, ProfileOption, RecipeOption, SetOption, choice_of
from nsa_ops.cli.command import command
from nsa_ops.cli.console import draw_table, facts, line
from nsa_ops.cli.session import Session
from nsa_ops.quantities import format_bytes

if TYPE_CHECKING:
    from rich.console import Console

    from nsa_ops.bench.run import Benched
    from nsa_ops.bench.transport_speed import TransportBench

bench_group = typer.Typer(
    name="bench", help="How fast NSA is on a pod's GPU, compared with dense attention."
)

FromOption = Annotated[
    Path | None,
    typer.Option("--from", metavar="FILE", help="Show a result file and measure nothing"),
]
OutOption = Annotated[
    Path | None, typer.Option("--out", metavar="FILE", help="Write the result as JSON")
]
PlotOption = Annotated[
    Path | None, typer.Option("--plot", metavar="FILE", help="Draw the result as an SVG file")
]


def _flag(kind: Any, name: str, metavar: str, help_text: str) -> Any:
    """A flag that a bench on the pod takes; a number must be at least 1."""
    least = 1 if kind is int else None
    return Annotated[
        kind | None, typer.Option(f"--{name}", min=least, metavar=metavar, help=help_text)
    ]


_FLAGS: Mapping[str, Any] = {
    "recipe": RecipeOption,
    "profile": ProfileOption,
    "set": SetOption,
    "shape": _flag(list[str], "shape", "A|B", "A is 12/2/64, B is 64/4/128; may be repeated"),
    "attention": _flag(list[str], "attention", "nsa|dense", "Default: both; may be repeated"),
    "length": _flag(list[int], "length", "T", "Tokens of a document; may be repeated"),
    "batch": _flag(list[int], "batch", "B", "Number of sequences; may be repeated"),
    "path": _flag(list[str], "path", "NAME", "Kernel path of the selected branch; may be repeated"),
    "vary": _flag(
        list[str],
        "vary",
        "KEY=VALUE",
        "Compare runs with this setting and without, not NSA and dense; may be repeated",
    ),
    "root": _flag(str, "root", "DIR", "Folder below the pod's root for text and runs"),
    "tokens": _flag(int, "tokens", "N", "Tokens in one call or one step"),
    "dtype": _flag(str, "dtype", "bfloat16|float16", "Data type of the inputs"),
    "ranks": _flag(int, "ranks", "N", "Number of ranks compared with one; default: all cards"),
    "sharding": _flag(list[str], "sharding", "ddp|fsdp", "Default: ddp; may be repeated"),
    "accumulation": _flag(int, "accumulation", "K", "Micro-batches of one rank and step"),
    "steps": _flag(int, "steps", "N", "Number of timed optimizer steps"),
    "runs": _flag(int, "runs", "N", "Timed runs for each median"),
}
_CONFIGURATION = ("recipe", "profile", "set")
#: Headings that are not the field's name in capitals.
_HEADINGS: Mapping[str, str] = {
    "fwd_bwd_ms": "FWD+BWD MS",
    "dense_cudnn_fwd_ms": "CUDNN FWD",
    "dense_cudnn_fwd_bwd_ms": "CUDNN FWD+BWD",
    "dense_flash_fwd_bwd_ms": "FLASH FWD+BWD",
    "floor_fwd_bwd_ms": "FLOOR FWD+BWD",
    "dense_cudnn_ms": "CUDNN MS",
    "dense_flash_ms": "FLASH MS",
    "ratio_to_cudnn": "RATIO",
    "tokens_per_s": "TOKENS/S",
    "tflops": "TFLOP/S",
    "num_parameters": "PARAMETERS",
    "bits_per_byte": "BITS/BYTE",
    "first_loss_gap": "GAP FIRST",
    "final_loss_gap": "GAP FINAL",
}


@dataclass(frozen=True)
class _Bench:
    """One bench that a pod measures.

    Attributes:
        help: What it does, in one sentence.
        flags: Names of its flags, separated by spaces.
        columns: Fields of a row that the table shows, separated by spaces.
    """

    help: str
    flags: str
    columns: str


_BENCHES: Mapping[str, _Bench] = {
    "kernels": _Bench(
        "Time a whole NSA layer and each of its branches, compared with dense attention.",
        "shape length tokens dtype runs",
        "shape T fwd_ms fwd_bwd_ms dense_cudnn_fwd_ms dense_cudnn_fwd_bwd_ms "
        "dense_flash_fwd_bwd_ms ratio_to_cudnn floor_fwd_bwd_ms peak_gib spread",
    ),
    "model": _Bench(
        "Time whole training steps of the main model, with NSA and with dense attention.",
        "attention length tokens steps runs set",
        "attention T tokens_per_s step_ms tflops mfu peak_gib spread first_step_s first_loss "
        "last_loss",
    ),
    "decode": _Bench(
        "Time the attention of one decoded token, compared with dense attention.",
        "shape length batch dtype runs",
        "shape T batch nsa_ms dense_cudnn_ms dense_flash_ms ratio_to_cudnn floor_ms spread",
    ),
    "scale": _Bench(
        "Time the trainer's step on one card and on several of a pod.",
        "recipe ranks sharding length tokens accumulation steps runs set",
        "recipe T ranks sharding tokens_per_s efficiency baseline step_ms mfu spread peak_gib "
        "estimated_gib first_loss last_loss outcome",
    ),
    "validate": _Bench(
        "Train a few steps with every kernel path of the selected branch and compare the losses.",
        "recipe profile set length path steps",
        "path T steps tokens_per_s spread peak_gib first_loss final_loss first_loss_gap "
        "final_loss_gap outcome",
    ),
    "compare": _Bench(
        "Train with NSA and with dense attention, or with settings and without, on the same text.",
        "recipe vary root set",
        "name attention steps tokens num_parameters tokens_per_s mfu peak_mib wall_s goodput "
        "bits_per_byte",
    ),
}


def _register(name: str, bench: _Bench) -> None:
    """Make a bench a command with its own flags."""

    def measure(
        session: Session,
        pod: PodArgument = None,
        read: FromOption = None,
        out: OutOption = None,
        plot: PlotOption = None,
        **values: Any,
    ) -> None:
        from nsa_ops.bench.run import check_only_shown, check_places, keep, read_benched

        session.interrupt_note = "the bench was ended too, and nothing was written"
        check_only_shown(read, pod, _words(values))
        check_places(read=read, out=out, plot=plot)
        found = _measure(session, name, pod, values) if read is None else read_benched(read, name)
        found = keep(found, out=out, plot=plot)
        for path in found.kept:
            session.tell(f"wrote {path}")
        session.show(found, draw_benched, failure=found.error)

    shared = list(inspect.signature(measure).parameters.values())[:-1]
    own = [
        inspect.Parameter(
            flag, inspect.Parameter.KEYWORD_ONLY, annotation=_FLAGS[flag], default=None
        )
        for flag in bench.flags.split()
    ]
    measure.__doc__ = bench.help
    measure.__signature__ = inspect.Signature([*shared, *own])  # type: ignore[attr-defined]
    command(bench_group, name)(measure)


for _name, _bench in _BENCHES.items():
    _register(_name, _bench)


def _words(values: Mapping[str, Any]) -> list[str]:
    """Flags as they were typed; a repeated one as often."""
    given = [
        (name, value if isinstance(value, list) else [value])
        for name, value in values.items()
        if value is not None
    ]
    return [word for name, items in given for item in items for word in (f"--{name}", str(item))]


def _measure(session: Session, name: str, pod: str | None, values: dict[str, Any]) -> "Benched":
    from nsa_ops.bench.run import BENCH_S, BenchRequest, run_bench, run_validation

    if name != "validate":
        root = (values.pop("root", None) or "compare") if name == "compare" else ""
        runs = max(2, 1 + len(values.get("vary") or ()))  # two take no longer than other benches
        words, limit_s = tuple(_words(values)), BENCH_S * runs / 2
        request = BenchRequest(name, words, root, timeout_s=limit_s)
        return run_bench(session.operator, pod, request)
    choice = choice_of(*(values.pop(flag) for flag in _CONFIGURATION))
    return run_validation(session.operator, pod, choice, _words(values))


def draw_benched(console: "Console", found: "Benched") -> None:
    """The machine, the rows and where they come from."""
    result = found.result
    facts(
        console,
        [
            ("card", result.card),
            ("driver", result.driver),
            ("clock", _with_unit(result.clock_mhz, "MHz")),
            ("highest clock", _with_unit(result.max_clock_mhz, "MHz")),
            ("bf16 product", _with_unit(result.matmul_tflops, "TFLOP/s")),
            ("torch", result.torch),
            ("triton", result.triton),
            ("commit", result.commit),
            ("command", result.command),
        ],
    )
    columns = _BENCHES[result.bench].columns.split()
    headings = [_HEADINGS.get(key, key.replace("_", " ").upper()) for key in columns]
    rows = [{"name": row.get("attention"), **row} for row in result.rows]  # once they had no name
    cells = [[_bench_cell(key, row.get(key)) for key in columns] for row in rows]
    draw_table(console, headings, cells)
    line(console, f"from {found.source}; {_spread_note(result.rows)}")


def _with_unit(value: float | None, unit: str) -> str | None:
    return None if value is None else f"{value:g} {unit}"


def _bench_cell(key: str, value: object) -> str:
    """A figure as people read it: shares in percent, losses in full, else three digits."""
    if value is None:
        return "n/a"
    if not isinstance(value, float):
        return str(value)
    if ("loss" in key and "gap" not in key) or key == "bits_per_byte":
        return f"{value:.4f}"
    if key in {"spread", "mfu", "goodput"}:
        return f"{100 * value:.1f} %"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _spread_note(rows: Sequence[Mapping[str, Any]]) -> str:
    spreads = [row["spread"] for row in rows if isinstance(row.get("spread"), float)]
    if not spreads:
        return "a difference means something only if it is larger than the spread"
    return f"differences below the spread (up to {100 * max(spreads):.1f} %) mean nothing"


@command(bench_group, "transport")
def transport(
    session: Session,
    pod: PodArgument = None,
    rounds: Annotated[
        int, typer.Option("--rounds", min=1, metavar="N", help="Number of repetitions")
    ] = 3,
    mib: Annotated[
        int, typer.Option("--mib", min=1, metavar="MIB", help="Size of the file that is pulled")
    ] = 200,
) -> None:
    """Time commands and a file transfer, compared with plain ssh over the same connection."""
    from nsa_ops.bench.transport_speed import bench_transport

    session.show(bench_transport(session.operator, pod, num_rounds=rounds, mib=mib), draw_transport)


def draw_transport(console: "Console", found: "TransportBench") -> None:
    """A row a round, then the medians."""
    size = format_bytes(found.num_bytes)
    cells = [
        [
            f"{one.command_ms:.1f}", f"{one.bare_command_ms:.1f}", f"{one.command_ratio:.2f}",
            f"{one.pull_s:.2f}", f"{one.bare_pull_s:.2f}", f"{100 * one.pull_share:.0f} %",
        ]
        for one in found.rounds
    ]  # fmt: skip
    headings = ["COMMAND MS", "BARE SSH MS", "RATIO", f"PULL {size} S", "SSH CAT S", "SHARE"]
    draw_table(console, headings, cells)
    line(
        console,
        f"{found.pod} at {found.where}: a command takes {found.command_ratio:.2f} times as long as "
        f"with plain ssh, a pull runs at {100 * found.pull_share:.0f} % of the speed of `ssh cat`; "
        f"load average of this machine: {found.busy_per_cpu:.1f} per processor",
    )
