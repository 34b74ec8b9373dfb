"""The state folder and what is in it belong to this user alone, whatever the umask."""

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from nsa_ops.errors import ConfigurationError, LocalResourceError
from nsa_ops.local_files import close_tree, expand_home, make_private_folder, read_named
from nsa_ops.store import Store
from tests.ops.cli_case import CommandLine
from tests.ops.operators import POD


@pytest.fixture(params=[0o000, 0o022, 0o002])
def umask(request: pytest.FixtureRequest) -> Iterator[None]:
    before = os.umask(request.param)
    yield
    os.umask(before)


def modes(folder: Path) -> dict[str, int]:
    paths = [folder, *folder.rglob("*")]
    found = {str(path): path.lstat() for path in paths if not path.is_symlink()}
    return {name: stat.S_IMODE(one.st_mode) for name, one in found.items()}


@pytest.mark.usefixtures("umask")
def test_what_the_commands_make_is_closed_to_others(cli: CommandLine, own_settings: Path) -> None:
    state = own_settings / "state"
    assert cli("pod", "add", "here", f"local:{own_settings / 'pod'}").exit_code == 0
    assert cli("run", "ls").exit_code == 0
    found = modes(state)
    assert found.pop(str(state)) == 0o700
    assert found
    assert {mode & 0o077 for mode in found.values()} == {0}


@pytest.mark.usefixtures("umask")
def test_journals_of_an_open_registry_are_closed_to_others(tmp_path: Path) -> None:
    store = Store(tmp_path / "state" / "registry.sqlite")
    with store.intent("launch", "r1"):
        store.add_pod(POD)
        found = modes(tmp_path / "state")
    names = {Path(name).name: mode for name, mode in found.items()}
    assert names["registry.sqlite"] == names["registry.sqlite-wal"] == 0o600
    assert names["registry.sqlite-shm"] == 0o600
    assert (names["state"], names["intents"], names["1.lock"]) == (0o700, 0o700, 0o600)
    store.close()


def test_a_state_folder_of_an_earlier_version_is_closed_at_the_next_start(
    cli: CommandLine, own_settings: Path
) -> None:
    state = own_settings / "state"
    step = state / "backups" / "r1" / "checkpoints" / "step_000010"
    step.mkdir(parents=True)
    Store(state / "registry.sqlite").close()
    outside = own_settings / "outside"
    outside.touch(mode=0o644)
    for name in ("audit.jsonl", "backups/r1/backup.json", "backups/r1/checkpoints/step_000010/m"):
        (state / name).touch()
    (state / "link").symlink_to(outside)
    for path in (state, *state.rglob("*")):
        if not path.is_symlink():
            path.chmod(0o755 if path.is_dir() else 0o644)
    assert cli("run", "ls").exit_code == 0
    found = modes(state)
    folders = {name for name in found if Path(name).is_dir()}
    assert {found[name] for name in folders} == {0o700}
    assert {mode for name, mode in found.items() if name not in folders} == {0o600}
    assert outside.stat().st_mode & 0o777 == 0o644


@pytest.mark.parametrize("words", [("audit",), ("config", "trust", "-y"), ("pod", "ls")])
def test_every_command_that_uses_the_state_closes_it(
    cli: CommandLine, own_settings: Path, words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(own_settings)
    (own_settings / "nsa-ops.toml").write_text("")
    (own_settings / "state").mkdir(mode=0o755)
    assert cli(*words).exit_code == 0
    assert (own_settings / "state").stat().st_mode & 0o777 == 0o700


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_a_state_folder_of_another_user_is_refused(cli: CommandLine, own_settings: Path) -> None:
    state = own_settings / "state"
    state.mkdir()
    os.chown(state, 12345, 12345)
    said = cli("run", "ls")
    assert (said.exit_code, "belongs to user 12345" in said.err) == (11, True)
    assert list(state.iterdir()) == []
    for make in (make_private_folder, close_tree):
        with pytest.raises(LocalResourceError, match="belongs to user 12345"):
            make(state)


def test_what_cannot_be_closed_is_told(
    cli: CommandLine, own_settings: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert cli("pod", "ls").exit_code == 0
    file = own_settings / "state" / "theirs"
    file.touch()
    file.chmod(0o644)
    monkeypatch.setattr(os, "chmod", refuse)
    said = cli("pod", "ls")
    assert said.exit_code == 0
    assert said.err.count(f"warning: other users can read `{file}`") == 1


def refuse(path: object, *_mode: object, **_flags: object) -> None:
    raise PermissionError(1, "Operation not permitted", str(path))


def test_a_named_file_is_read_to_its_limit_and_a_device_ends_there(tmp_path: Path) -> None:
    log = tmp_path / "train.log"
    log.write_bytes(b"12345")
    assert read_named(log, "Log", max_bytes=5) == b"12345"
    for path in (log, Path("/dev/zero")):
        with pytest.raises(ConfigurationError, match=f"Log `{path}` has more than 4 B"):
            read_named(path, "Log", max_bytes=4)


def test_a_home_of_nobody_is_refused_and_no_bug(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert expand_home("~/text") == tmp_path / "text"
    assert expand_home("text/~") == Path("text/~")
    with pytest.raises(ConfigurationError, match="`~no-such-user` in `~no-such-user/text`"):
        expand_home("~no-such-user/text")


@pytest.mark.parametrize(
    "words",
    [
        ("backup", "verify", "~no-such-user/x"),
        ("backup", "restore", "x", "--to", "~no-such-user/x"),
        ("report", "~no-such-user/x"),
        ("export", "--to", "slurm", "~no-such-user/x"),
        ("pod", "add", "here", "local", "--root", "~no-such-user/x"),
    ],
)
def test_commands_refuse_a_home_of_nobody(cli: CommandLine, words: tuple[str, ...]) -> None:
    said = cli(*words)
    assert said.exit_code in {2, 6}
    assert "bug" not in said.err


def test_settings_refuse_a_home_of_nobody(
    cli: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NSA_OPS_STATE_DIR", "~no-such-user/x")
    said = cli("run", "ls")
    assert said.exit_code == 2
    assert "`~no-such-user` in `~no-such-user/x` is the home of no user" in said.err
