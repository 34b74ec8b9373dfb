"""The runbooks answer what they promise to answer, and every name that people know is known."""

import re
from pathlib import Path

import pytest

from nsa_core.config.environment import VARIABLES
from nsa_core.rundir.exit import TrainerExit
from nsa_ops import errors
from tests.docs.markdown import LINK, PAGES, REPOSITORY, fenced_commands

RUNBOOKS = REPOSITORY / "runbooks"
NAMES = [
    "first-run", "preflight-red", "production-launch", "monitor", "halt-and-resume", "hang",
    "lost-rank", "out-of-memory", "gate-collapse", "loss-spike", "slow-run", "pod-lost",
    "pod-of-several-lost",
    "backup-and-restore", "performance-validation", "after-run",
]  # fmt: skip
HEADINGS = ["Symptom", "Look at", "Do", "How you know it worked"]


def test_every_runbook_is_there_and_in_the_index() -> None:
    assert sorted(page.stem for page in RUNBOOKS.glob("*.md")) == sorted([*NAMES, "README"])
    index = (RUNBOOKS / "README.md").read_text()
    assert [name for name in NAMES if f"({name}.md)" not in index] == []


@pytest.mark.parametrize("name", NAMES)
def test_a_runbook_answers_the_four_questions(name: str) -> None:
    text = (RUNBOOKS / f"{name}.md").read_text()
    assert re.findall(r"^## (.+)$", text, re.MULTILINE) == HEADINGS


@pytest.mark.parametrize("name", NAMES)
def test_a_runbook_has_exactly_one_thing_to_look_at_first(name: str) -> None:
    text = (RUNBOOKS / f"{name}.md").read_text()
    look = text.split("## Look at", 1)[1].split("\n## ", 1)[0]
    assert look.count("$ nsa-ops") == 1


def test_no_runbook_looks_for_a_process_by_name_or_types_into_a_terminal() -> None:
    forbidden = re.compile(r"\b(pgrep|pkill|killall|send-keys)\b|\| *tee\b|\|\| *true\b")
    assert [page.name for page in RUNBOOKS.glob("*.md") if forbidden.search(page.read_text())] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(REPOSITORY).as_posix())
def test_every_link_to_a_file_leads_somewhere(page: Path) -> None:
    targets = [link for link in LINK.findall(page.read_text()) if "://" not in link]
    assert [link for link in targets if not (page.parent / link).exists()] == []


def test_the_readme_sets_up_with_exactly_two_commands() -> None:
    section = (
        (REPOSITORY / "README.md").read_text().split("## Two commands", 1)[1].split("\n## ")[0]
    )
    commands = [line.split("#")[0].strip() for line in section.splitlines() if line[:2] == "$ "]
    assert commands == ["$ make demo", "$ make test"]
    assert list(fenced_commands(REPOSITORY / "README.md")) != []


def test_every_variable_of_the_earlier_runbooks_is_known(shared: Path) -> None:
    """A name that ends in `_` stands for a family, such as NSA_FA2_MIN_LEN_*."""
    texts = [page.read_text() for page in (shared / "seeds").glob("*.md")]
    assert texts
    names = set(re.findall(r"\b(?:NSA_[A-Z0-9_]+|DDP_SAFE)\b", "\n".join(texts)))
    assert len(names) > 20
    unknown = [
        name
        for name in names
        if name not in VARIABLES
        and not (name.endswith("_") and any(known.startswith(name) for known in VARIABLES))
    ]
    assert unknown == []


def test_every_exit_code_of_the_commands_is_explained() -> None:
    found = {
        kind.exit_code
        for kind in vars(errors).values()
        if isinstance(kind, type) and issubclass(kind, errors.OpsError)
    }
    section = (
        (REPOSITORY / "docs/exit-codes.md").read_text().split("`nsa-ops status --exit-code`")[0]
    )
    assert found | {0} == {int(code) for code in re.findall(r"^\| (\d+) \|", section, re.MULTILINE)}


def test_every_exit_code_of_the_trainer_is_explained() -> None:
    page = (REPOSITORY / "docs/exit-codes.md").read_text()
    section = page.split("## Trainer")[1].split("\n## ")[0]
    rows = [line.split("|")[1:4] for line in section.splitlines() if re.match(r"\| \d", line)]
    explained = {int(code): "budget" in restarts for code, _, restarts in rows}
    assert explained == {int(code): code.watchdog_may_restart for code in TrainerExit}
