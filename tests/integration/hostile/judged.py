"""One command against a lying pod, and everything that is wrong afterwards."""

from collections.abc import Sequence

from tests.integration.hostile.ended_run import MARKER
from tests.integration.hostile.lying_pod import Heard, Side, World


def told(
    world: World,
    side: Side,
    *words: str,
    codes: Sequence[int],
    may_change: Sequence[str] = (),
    other: Sequence[str] = (),
) -> tuple[Heard, list[str]]:
    """Run a command; what is wrong with its end, its output, its cost and what it changed."""
    before = world.before(side)
    heard = world(*words)
    found = heard.problems(codes) + world.harm(before, side, may_change=may_change, other=other)
    return heard, found


def pull(
    world: World, side: Side, codes: Sequence[int], *, which: str = "all"
) -> tuple[Heard, list[str]]:
    return told(
        world, side, "backup", "pull", side.run_id, "--checkpoint", which, "-y", codes=codes
    )


def lacks(
    side: Side, *steps: int, files: Sequence[str] = ("manifest.json", "exit.json")
) -> list[str]:
    """Good things of the pod that were not brought."""
    missing = [f"step {step} was not brought" for step in steps if not side.held(step).is_dir()]
    return missing + [f"{name} was not brought" for name in files if not same(side, name)]


def same(side: Side, name: str) -> bool:
    here = side.backup / name
    return here.is_file() and here.read_bytes() == (side.run_dir / name).read_bytes()


def rename(side: Side, lie: bytes) -> dict[str, object]:
    """The rule by which the pod gives its plain file another name, and serves it by that name."""
    shown = lie.decode("latin-1")
    pairs = [[f"./{MARKER}", shown], [MARKER, shown]]
    return {"answer": MARKER, "swap": pairs, "serve": str(side.run_dir / MARKER)}
