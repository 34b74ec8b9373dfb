"""`config trust`: a project's settings file is read once its content was shown and agreed to."""

import json
from pathlib import Path

import pytest

from tests.ops.cli_case import CommandLine


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "work" / "deep"
    folder.mkdir(parents=True)
    monkeypatch.chdir(folder)
    file = tmp_path / "work" / "nsa-ops.toml"
    file.write_text('profile = "cpu"\n')
    return file


def profile(cli: CommandLine) -> str:
    values = json.loads(cli("config", "show", "--operator", "--json").out)["data"]
    return str(next(value["value"] for value in values if value["key"] == "profile"))


def test_a_file_is_read_after_it_was_trusted_and_until_it_changes(
    cli: CommandLine, project: Path
) -> None:
    before = cli("config", "check", "--recipe", "tiny-cpu", "--profile", "cpu")
    assert before.exit_code == 0
    assert before.err == (
        f"`{project}` is not read: it is not trusted; see `nsa-ops config trust --help`\n"
    )
    refused = cli("config", "trust")
    assert (refused.exit_code, profile(cli)) == (2, "")
    planned = cli("config", "trust", "--plan")
    assert (planned.exit_code, "sets profile = 'cpu'" in planned.out) == (0, True)
    assert profile(cli) == ""
    assert cli("config", "trust", "-y").exit_code == 0
    assert profile(cli) == "cpu"
    assert json.loads(cli("config", "trusted", "--json").out)["data"][0]["state"] == "read"
    project.write_text('profile = "a100"\n')
    assert profile(cli) == ""
    assert "it has changed since it was trusted" in cli("config", "trusted").out
    assert cli("config", "trust", "-y").exit_code == 0
    assert profile(cli) == "a100"
    assert cli("config", "trust", "--forget", "-y").exit_code == 0
    assert (profile(cli), "no project file" in cli("config", "trusted").out) == ("", True)


def test_what_is_trusted_is_in_a_file_that_nobody_else_may_read(
    cli: CommandLine, project: Path, own_settings: Path
) -> None:
    assert cli("config", "trust", "-y").exit_code == 0
    assert (own_settings / "state" / "trusted.json").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    ("content", "mode", "code", "words"),
    [
        ('ssh_config = "evil"\n', 0o644, 2, "`ssh_config` may not come from"),
        ('state_dir = "/x"\n', 0o644, 2, "`state_dir` may not come from"),
        ("profile = [", 0o644, 2, "is not valid TOML"),
        ("timeout_s = nan\n", 0o644, 2, "Setting `timeout_s` from"),
        ('color = "pink"\n', 0o644, 2, "Setting `color` from"),
        ('profile = "cpu"\n', 0o666, 3, "lets others change it"),
    ],
)
def test_what_may_not_be_trusted_is_refused(
    cli: CommandLine, project: Path, content: str, mode: int, code: int, words: str
) -> None:
    project.write_text(content)
    project.chmod(mode)
    said = cli("config", "trust", "-y")
    assert (said.exit_code, words in said.err) == (code, True)
    assert "no project file is trusted" in cli("config", "trusted").out


def test_the_name_of_an_untrusted_file_moves_no_cursor(
    cli: CommandLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "a\x1b[2J\nb"
    folder.mkdir()
    (folder / "nsa-ops.toml").write_text("")
    monkeypatch.chdir(folder)
    said = cli("config", "trusted")
    assert said.exit_code == 0
    assert "a\\x1b[2J\\nb/nsa-ops.toml` is not read" in said.err
    assert len(said.err.splitlines()) == 1


def test_what_is_no_project_file_cannot_be_trusted(
    cli: CommandLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli("config", "trust", "-y").exit_code == 6
    assert cli("config", "trust", "other.toml", "-y").exit_code == 2
    assert cli("config", "trust", "x/nsa-ops.toml", "-y").exit_code == 3
    assert cli("config", "trust", "--forget", "nsa-ops.toml", "-y").exit_code == 6
