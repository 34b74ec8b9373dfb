"""Draw what a bench found: what it was measured on, then one table."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console

from nsa_ops.bench.run import Benched
from nsa_ops.bench.transport import TransportBench
from nsa_ops.cli.render import facts, line, table
from nsa_ops.quantities import format_bytes

#: Columns by bench, with what each is called; a bench that is not here shows all that fit a cell.
_COLUMNS: Mapping[str, Mapping[str, str]] = {
    "kernels": {
        "shape": "SHAPE", "T": "T", "fwd_ms": "FWD MS", "fwd_bwd_ms": "FWD+BWD MS",
        "dense_cudnn_fwd_ms": "CUDNN FWD", "dense_cudnn_fwd_bwd_ms": "CUDNN FWD+BWD",
        "dense_flash_fwd_bwd_ms": "FLASH FWD+BWD", "ratio_to_cudnn": "RATIO",
        "floor_fwd_bwd_ms": "FLOOR FWD+BWD", "peak_gib": "PEAK GIB", "spread": "SPREAD",
    },
    "model": {
        "attention": "ATTENTION", "T": "T", "tokens_per_s": "TOKENS/S", "step_ms": "STEP MS",
        "tflops": "TFLOP/S", "mfu": "MFU", "peak_gib": "PEAK GIB", "spread": "SPREAD",
        "first_step_s": "FIRST STEP S", "first_loss": "FIRST LOSS", "last_loss": "LAST LOSS",
    },
    "compare": {
        "attention": "ATTENTION", "steps": "STEPS", "tokens": "TOKENS",
        "num_parameters": "PARAMETERS", "tokens_per_s": "TOKENS/S", "mfu": "MFU",
        "peak_mib": "PEAK MIB", "wall_s": "WALL S", "goodput": "GOODPUT",
        "bits_per_byte": "BITS/BYTE",
    },
    "decode": {
        "shape": "SHAPE", "T": "T", "batch": "BATCH", "nsa_ms": "NSA MS",
        "dense_cudnn_ms": "CUDNN MS", "dense_flash_ms": "FLASH MS", "ratio_to_cudnn": "RATIO",
        "floor_ms": "FLOOR MS", "spread": "SPREAD",
    },
    "validate": {
        "path": "PATH", "T": "T", "steps": "STEPS", "tokens_per_s": "TOKENS/S",
        "spread": "SPREAD", "peak_gib": "PEAK GIB", "first_loss": "FIRST LOSS",
        "final_loss": "FINAL LOSS", "first_loss_gap": "GAP FIRST", "final_loss_gap": "GAP FINAL",
        "outcome": "OUTCOME",
    },
}  # fmt: skip


def draw_benched(console: Console, found: Benched) -> None:
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
    columns = _COLUMNS.get(result.bench) or _plain_columns(result.rows)
    cells = [[bench_cell(key, row.get(key)) for key in columns] for row in result.rows]
    console.print(table(list(columns.values()), cells))
    line(console, f"from {found.source}; {_warning(result.rows)}")


def _with_unit(value: float | None, unit: str) -> str | None:
    return None if value is None else f"{value:g} {unit}"


def _plain_columns(rows: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    names = dict.fromkeys(key for row in rows for key in row)
    nested = {key for row in rows for key, value in row.items() if isinstance(value, dict | list)}
    return {name: name.replace("_", " ").upper() for name in names if name not in nested}


def bench_cell(key: str, value: object) -> str:
    """A figure as people read it: shares in percent, losses in full, else three digits."""
    if value is None:
        return "n/a"
    if "loss" in key and "gap" not in key and isinstance(value, float):
        return f"{value:.4f}"
    if key == "bits_per_byte" and isinstance(value, float):
        return f"{value:.4f}"
    if key in {"spread", "mfu", "goodput"} and isinstance(value, float):
        return f"{value:.1%}"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return str(value)


def _warning(rows: Sequence[Mapping[str, Any]]) -> str:
    spreads = [row["spread"] for row in rows if isinstance(row.get("spread"), float)]
    if not spreads:
        return "a difference means something where it is larger than the spread"
    return f"differences below the spread (up to {max(spreads):.1%}) mean nothing"


def draw_transport(console: Console, found: TransportBench) -> None:
    """A row a round, then the medians."""
    size = format_bytes(found.num_bytes)
    cells = [
        [
            f"{one.command_ms:.1f}", f"{one.bare_command_ms:.1f}", f"{one.command_ratio:.2f}",
            f"{one.pull_s:.2f}", f"{one.bare_pull_s:.2f}", f"{one.pull_share:.0%}",
        ]
        for one in found.rounds
    ]  # fmt: skip
    headings = ["COMMAND MS", "BARE SSH MS", "RATIO", f"PULL {size} S", "SSH CAT S", "SHARE"]
    console.print(table(headings, cells))
    line(
        console,
        f"{found.pod} at {found.where}: a command takes {found.command_ratio:.2f} of bare ssh, "
        f"a pull runs at {found.pull_share:.0%} of `ssh cat`; {found.busy_per_cpu:.1f} processes "
        "waited for each processor of this machine",
    )
