"""Every command with real arguments on a real local run: in a pipe, as JSON and on a terminal.

It looks for what no other test would see: a trace, "This is a bug", an escaped newline, nothing.
"""

import contextlib
import json
import os
import pty
import shlex
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import typer

from nsa_ops.cli.app import app
from tests.docs.markdown import REPOSITORY
from tests.integration.local_pod import LocalPod
from tests.integration.warm import run_warm
from tests.ops.bench.results import document

pytestmark = [pytest.mark.integration, pytest.mark.slow]

RESULTS = REPOSITORY / "bench" / "results"
#: Command lines that look or plan only, and their exit codes; `{…}` is a place of the fixture.
LINES: dict[str, int] = {
    "preflight --evidence {folder}/smi.txt --profile h100": 0,
    "launch --pod here --recipe tiny-cpu --override 'preflight=a test' --plan": 0,
    "watch r1 --once": 0,
    "halt r1": 0,
    "resume r1 --trainer tests.integration.steady_trainer --plan": 0,
    "report r1 --out {folder}/report.html": 0,
    "status r1": 0,
    "logs r1": 0,
    "health r1": 0,
    "events r1": 0,
    "stack r1": 7,
    "checkpoint r1": 7,
    "tunnel r1 --plan": 0,
    "audit --last 5": 0,
    "reconcile": 0,
    "provision here --plan": 0,
    "doctor": 0,
    "estimate --recipe m7c-125m --profile a100": 0,
    "export --to slurm --recipe tiny-cpu --profile cpu --output {folder}/smi.txt": 7,
    "demo --dir {folder}": 7,
    "backup pull r1 --plan": 0,
    "backup verify r1 --load": 0,
    "backup ls": 0,
    "backup restore r1 --to {folder}/elsewhere --plan": 0,
    "backup push r1 {folder}/second --plan": 0,
    "backup prune r1 --keep 1 --plan": 0,
    "run ls": 0,
    "run show r1": 0,
    "run adopt r1 --pod here": 0,
    "pod add spare local:{folder}/spare --profile cpu --plan": 0,
    "pod trust here --plan": 2,
    "pod ssh here": 2,
    "pod ls": 0,
    "pod show here": 0,
    "pod rm here --plan": 0,
    "config check --recipe tiny-cpu --profile cpu": 0,
    "config show --recipe tiny-cpu --profile cpu --origin": 0,
    "config show --operator": 0,
    "config trust {folder}/project/nsa-ops.toml --plan": 0,
    "config trusted": 0,
    "profile ls": 0,
    **{f"profile show {path.stem}": 0 for path in sorted((REPOSITORY / "profiles").glob("*.yaml"))},
    "profile explain a100": 0,
    "bench kernels --from {results}/kernels-h100.json": 0,
    "bench model --from {results}/model-h100.json": 0,
    "bench decode --from {results}/decode-h100.json": 0,
    "bench scale --from {folder}/scale.json": 0,
    "bench validate --from {results}/validate-h200.json": 0,
    "bench compare --from {results}/trainer-h100.json": 0,
    "bench transport here --rounds 1 --mib 1": 2,
}

#: What `nvidia-smi -L` prints; a preflight that runs the probes takes too long to be drawn thrice.
SMI = "GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-84b23b43-6a0a-a1c8-5e1c-3a3a6a1d8c1f)\n"
#: Rows of several ranks, of which the last did not fit its cards.
SCALE = [
    {"recipe": "m7c-125m", "T": 2048, "ranks": ranks, "sharding": sharding, "tokens_per_s": rate,
     "efficiency": efficiency, "baseline": "", "step_ms": 170.6, "mfu": 0.33, "spread": 0.01,
     "peak_gib": 26.0, "estimated_gib": 25.1, "first_loss": 10.9, "last_loss": 9.1,
     "outcome": outcome}
    for ranks, sharding, rate, efficiency, outcome in (
        (1, "none", 384e3, None, "ok"), (2, "ddp", 750e3, 0.977, "ok"),
        (2, "fsdp", None, None, "out of memory"),
    )
]  # fmt: skip


@pytest.fixture(scope="module")
def pod(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalPod]:
    """A pod with one run that was halted and backed up."""
    local = LocalPod(tmp_path_factory.mktemp("every"))
    local.add()
    assert local.launch("r1", "schedule.steps=4000").exit_code == 0
    local.must("halt", "r1")
    local.must("backup", "pull", "r1")
    (local.folder / "smi.txt").write_text(SMI)
    (local.folder / "scale.json").write_text(document(SCALE, bench="scale"))
    (local.folder / "project").mkdir()
    (local.folder / "project" / "nsa-ops.toml").write_text('recipe = "tiny-cpu"\n')
    yield local
    local.stop()


def words_of(line: str, pod: LocalPod) -> list[str]:
    return shlex.split(line.format(folder=pod.folder, results=RESULTS))


def read_terminal(pod: LocalPod, words: list[str]) -> tuple[int, str]:
    """Run a command on a terminal of its own; its exit code and all that it showed."""
    leader, follower = pty.openpty()
    environment = pod.environment | {"TERM": "xterm-256color", "COLUMNS": "100"}
    shown: list[bytes] = []
    reader = threading.Thread(target=_read_all, args=(leader, shown))
    reader.start()
    said = run_warm(
        [*words, "--no-input"], folder=pod.folder, environment=environment, limit_s=60,
        terminal=os.ttyname(follower),
    )  # fmt: skip
    os.close(follower)
    reader.join(timeout=60)
    os.close(leader)
    return said.exit_code, b"".join(shown).decode()


def _read_all(leader: int, shown: list[bytes]) -> None:
    """What a terminal shows until the last writer has left, which Linux says by EIO."""
    with contextlib.suppress(OSError):
        while piece := os.read(leader, 65536):
            shown.append(piece)


def check_screen(text: str) -> None:
    assert text.strip(), "it says nothing"
    for sign in ("Traceback", "This is a bug", "\\n", "\\x1b", "<nsa_", "<bound method"):
        assert sign not in text, f"{sign!r} in {text}"


@pytest.mark.parametrize(("line", "code"), LINES.items())
def test_a_command_reads_well_in_a_pipe(pod: LocalPod, line: str, code: int) -> None:
    said = pod(*words_of(line, pod))
    text = said.out.decode() + said.err
    assert said.exit_code == code, text
    check_screen(text)
    if code == 0:
        assert said.out.strip(), "it puts its result on stdout"


@pytest.mark.parametrize(("line", "code"), LINES.items())
def test_a_command_reads_well_as_json(pod: LocalPod, line: str, code: int) -> None:
    said = pod(*words_of(line, pod), "--json")
    answers: list[dict[str, Any]] = [json.loads(one) for one in said.out.splitlines()]
    assert said.exit_code == code, (said.out, said.err)
    check_screen(said.out.decode().replace("\\n", " ") + said.err)
    assert all(one["ok"] == (code == 0) for one in answers if "ok" in one)


@pytest.mark.parametrize(("line", "code"), LINES.items())
def test_a_command_reads_well_on_a_terminal(pod: LocalPod, line: str, code: int) -> None:
    found, shown = read_terminal(pod, words_of(line, pod))
    assert found == code, shown
    check_screen(shown)


def leaves(command: Any, path: tuple[str, ...] = ()) -> Iterator[str]:
    if not hasattr(command, "commands"):
        yield " ".join(path)
        return
    for name, child in command.commands.items():
        yield from leaves(child, (*path, name))


def test_no_command_of_the_tree_is_left_out() -> None:
    known = set(leaves(typer.main.get_command(app)))
    tried = {name for line in LINES for name in known if f"{line} ".startswith(f"{name} ")}
    assert known == tried
