"""Runbooks and screens together: each line that a runbook sends people to is on the screen."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from nsa_ops.backup.receipts import at_most_lost
from nsa_ops.cli.render_run import draw_frame, draw_health, draw_status
from nsa_ops.pod.messages import CheckpointFact, PhaseUse, PodShare, RunFigures
from nsa_ops.pod.rank_evidence import RankEvidence
from nsa_ops.pod.rules.verdict import Finding, conclude
from nsa_ops.runs.status import RunStatusLine
from nsa_ops.runs.watch import Frame
from tests.docs.markdown import FENCE, REPOSITORY
from tests.ops.runs.documents import RUN, beat, report

PAGES = sorted(page for page in (REPOSITORY / "runbooks").glob("*.md") if page.stem != "README")
#: ``the lines `fetch`, `speed` and `kernels` ``
_LINES = re.compile(r"\blines? ((?:`[a-z ]+`(?:, and |, | and )?)+)")
_SCREENS = ("watch", "status", "health")


RANKS = tuple(
    RankEvidence(
        rank=number, msg="beat", phase="train" if number else "data_wait", step=30, still_s=90.0,
        beat_age_s=90.0 if number == 1 else 3.0, own_s=0.4, gpu_mem_peak=20_480, gpu_util=97.4,
    )
    for number in range(3)
)  # fmt: skip


PODS = [PodShare(pod=name, node_rank=rank, state="running") for rank, name in enumerate("ab")]


def draw(command: str, ranks: tuple[RankEvidence, ...] = ()) -> str:
    """The screen of a run of which everything is known; one silent rank, and one awaited."""
    record = beat(
        30, loss=2.5, lr=3e-4, grad_norm=1.5, tokens_per_s=900.0, step_s=0.5, fetch_p50_ms=1.0,
        fetch_p95_ms=120.0, gpu_mem_peak=20_480, gpu_util=97.4, host_rss_mib=512,
        gate_entropy_mean=0.61, gate_collapse_frac=0.05, gate_max_gate=0.72, gate_worst_layer=3,
        gate_branch_shares=[0.2, 0.3, 0.5],
        kernel_paths={"compressed": "triton", "selected": "triton", "sliding": "sdpa"},
    )  # fmt: skip
    use = PhaseUse(phase="train", still_s=45.0, limit_s=180.0, warn_s=180.0)
    figures = RunFigures(
        record=record, gates=record, usual_tokens_per_s=1000.0, pace_s=2.0, phase=use
    )
    found = [
        Finding(rule="data_slow", level="warn", sentence="Batches take long"),
        Finding(rule="gates_collapsed", level="halt", sentence="The gates collapse"),
    ]
    saved = [CheckpointFact(name="step_000020", step=20, size_bytes=1, whole=True)]
    seen = report(
        verdict=conclude(found), figures=figures, last_beat=record, flags=["unwatched"],
        checkpoints=saved, ranks=ranks, pods=PODS if ranks else [],
    )  # fmt: skip
    at_risk = at_most_lost(last_step=30, saved=None)
    console = Console(width=300)
    with console.capture() as captured:
        if command == "watch":
            draw_frame(console, Frame(seen, [], [], [record, record], at_risk), [record])
        elif command == "status":
            draw_status(console, RunStatusLine(RUN, seen, "", at_risk))
        else:
            draw_health(console, RunStatusLine(RUN, seen, "", at_risk))
    return captured.get()


def labels(screen: str) -> set[str]:
    return {found[1].strip() for found in re.finditer(r"^([a-z ]{12}) \S", screen, re.MULTILINE)}


def named_lines(prose: str) -> set[str]:
    return {name for found in _LINES.findall(prose) for name in re.findall(r"`([a-z ]+)`", found)}


def sections(page: Path) -> Iterator[tuple[str, str, str]]:
    """Where a runbook looks: its heading, the first command in it, and the text around."""
    for part in re.split(r"^## ", page.read_text(), flags=re.MULTILINE)[1:]:
        heading = part.splitlines()[0]
        command = re.search(r"^\s*\$ nsa-ops (\S+)", part, re.MULTILINE)
        if heading != "Do" and command:
            yield heading, command[1], FENCE.sub("", part)


LOOKS = [
    (page.stem, heading, command, prose)
    for page in PAGES
    for heading, command, prose in sections(page)
    if command in _SCREENS
]


@pytest.mark.parametrize(("page", "heading", "command", "prose"), LOOKS)
def test_what_a_runbook_looks_at_is_on_that_screen(
    page: str, heading: str, command: str, prose: str
) -> None:
    named = named_lines(prose)
    assert named, f"{page}, {heading}: it runs `{command}` and names no line of it"
    assert named <= labels(draw(command)) | labels(draw(command, RANKS)), (page, heading)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_no_runbook_names_a_line_that_no_screen_has(page: Path) -> None:
    screens = [draw(command, ranks) for command in _SCREENS for ranks in ((), RANKS)]
    known = {label for screen in screens for label in labels(screen)}
    assert named_lines(FENCE.sub("", page.read_text())) <= known


def test_the_runbooks_look_at_screens_often_enough_for_this_test() -> None:
    assert len(LOOKS) > 12
    assert {command for _, _, command, _ in LOOKS} >= {"watch", "status"}


@pytest.mark.parametrize("command", _SCREENS)
def test_a_screen_has_the_verdict_first_and_every_figure_with_its_unit(command: str) -> None:
    screen = draw(command)
    assert screen.startswith("verdict      halt gates_collapsed: The gates collapse")
    for text in (
        "r1 is running [unwatched]", "step 30 of", "about ", " left", "2.5000 nats at step 30",
        "900 tokens/s (90 % of its usual), step time 0.5 s", "p50 1.0 ms, p95 120.0 ms",
        "compressed triton, selected triton, sliding sdpa",
        "worst layer 3: entropy 0.610 nats, collapsed 5.0 %, largest share 0.72",
        "worst layer 3: compressed 0.20, selected 0.30, sliding 0.50", "peak 20,480 MiB",
        "train, last moved 45 s ago: 25 % of the 3 min after which the watchdog halts",
    ):  # fmt: skip
        assert text in screen, text
    assert ("warn data_slow" in screen) == (command == "health")
    assert ("and 1 more finding: `nsa-ops health`" in screen) == (command != "health")


@pytest.mark.parametrize("command", _SCREENS)
def test_a_screen_of_several_ranks_has_their_lines_besides_those_of_one(command: str) -> None:
    alone, several = labels(draw(command)), labels(draw(command, RANKS))
    with_pods = {"pods"} if command != "health" else set()
    assert several - alone == {"ranks", "silent", "waiting"} | with_pods
    assert alone <= several
