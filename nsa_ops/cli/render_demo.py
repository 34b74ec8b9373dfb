"""Draw what the demo has shown."""

from shlex import quote

from rich.console import Console

from nsa_ops.cli.render import facts, line, table
from nsa_ops.demo import Demo
from nsa_ops.quantities import count_of

_SAMPLE_LINES = 8


def draw_demo(console: Console, demo: Demo) -> None:
    """Every part with its command, the figures, the generated text and where the page is."""
    rows = [(part.name, f"{part.seconds:.1f} s", part.found) for part in demo.parts]
    console.print(table(("part", "time", "found"), rows))
    line(console, "")
    before, after = demo.bits_per_byte or (float("nan"), float("nan"))
    replayed = count_of(demo.replay.num_compared if demo.replay else 0, "step")
    facts(
        console,
        [
            ("held-out text", f"{before:.3f} bits per byte before, {after:.3f} after training"),
            (
                "exact resume",
                f"{replayed} done twice, every loss the same to the last digit",
            ),
            ("report page", str(demo.page)),
            ("run", f"{demo.run_id} in {demo.folder}"),
            ("took", f"{demo.seconds:.0f} s"),
            ("look around", f"export NSA_OPS_STATE_DIR={quote(str(demo.folder / 'state'))}"),
        ],
    )
    line(console, "")
    line(console, "generated text:")
    for sample_line in demo.sample.splitlines()[:_SAMPLE_LINES]:
        line(console, f"  {sample_line}")
