import hashlib
import os
import pwd
from pathlib import Path

import pytest

from nsa_ops.project_file import PROJECT_SETTINGS, Trusted, write_trusted
from nsa_ops.settings import OperatorSettings, SettingsError, read_settings


@pytest.fixture
def home(tmp_path: Path) -> Path:
    (tmp_path / ".config" / "nsa-ops").mkdir(parents=True)
    return tmp_path


def trust(path: Path, state: Path, content: str | None = None) -> None:
    """Trust a project's file as it is, or as if it held something else."""
    state.mkdir(parents=True, exist_ok=True)
    found = (content or path.read_text()).encode()
    write_trusted(state, Trusted(files={str(path): hashlib.sha256(found).hexdigest()}))


def test_variables_win_over_a_trusted_project_over_the_user_over_defaults(home: Path) -> None:
    (home / ".config" / "nsa-ops" / "config.toml").write_text('pod = "u"\nrecipe = "u"\n')
    project = home / "work" / "deep"
    project.mkdir(parents=True)
    file = home / "work" / "nsa-ops.toml"
    file.write_text('recipe = "p"\nprofile = "p"\n')
    trust(file, home / ".local" / "state" / "nsa-ops")
    found = read_settings({"HOME": str(home), "NSA_OPS_PROFILE": "v"}, folder=project)
    assert (found.values.pod, found.values.recipe, found.values.profile) == ("u", "p", "v")
    assert found.origins["profile"] == "NSA_OPS_PROFILE"
    assert found.origins["recipe"].endswith("work/nsa-ops.toml")
    assert found.origins["tmux_socket"] == "default"
    assert found.notices == ()


def test_a_project_file_that_nobody_trusted_is_told_and_not_even_parsed(home: Path) -> None:
    (home / "nsa-ops.toml").write_text("this is = not [ TOML\x1b[2J")
    found = read_settings({"HOME": str(home)}, folder=home)
    assert set(found.origins.values()) == {"default"}
    (notice,) = found.notices
    assert notice.startswith(f"`{home / 'nsa-ops.toml'}` is not read: it is not trusted")


@pytest.mark.parametrize("kind", ["changed", "writable", "link", "huge", "foreign"])
def test_a_trusted_project_file_is_not_read_once_others_may_have_changed_it(
    home: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, state = home / "nsa-ops.toml", home / ".local" / "state" / "nsa-ops"
    file.write_text('pod = "p"\n' + ("#" * 70_000 if kind == "huge" else ""))
    trust(file, state, 'pod = "q"\n' if kind == "changed" else None)
    if kind == "writable":
        file.chmod(0o664)
    if kind == "link":
        file.rename(home / "other.toml")
        file.symlink_to(home / "other.toml")
    if kind == "foreign":
        file.touch()
        monkeypatch.setattr(os, "getuid", lambda: 12345)
        monkeypatch.setattr(
            os, "fstat", lambda _fd: os.stat_result((0o100644, 0, 0, 1, 999, *[0] * 5))
        )
    found = read_settings({"HOME": str(home)}, folder=home)
    assert found.values.pod == ""
    assert len(found.notices) == 1


@pytest.mark.parametrize("name", sorted(set(OperatorSettings.model_fields) - set(PROJECT_SETTINGS)))
def test_even_a_trusted_project_decides_nothing_that_runs_programs_or_places_state(
    home: Path, name: str
) -> None:
    file = home / "nsa-ops.toml"
    file.write_text(f'{name} = "x"\n')
    trust(file, home / ".local" / "state" / "nsa-ops")
    with pytest.raises(SettingsError, match=f"`{name}` may not come from"):
        read_settings({"HOME": str(home)}, folder=home)


def test_a_variable_names_another_settings_file(home: Path) -> None:
    (home / ".config" / "nsa-ops" / "config.toml").write_text('pod = "u"\n')
    (home / "mine.toml").write_text('recipe = "m"\n')
    environment = {"HOME": str(home), "NSA_OPS_CONFIG": str(home / "mine.toml")}
    found = read_settings(environment, folder=home)
    assert (found.values.pod, found.values.recipe) == ("", "m")
    (home / "mine.toml").unlink()
    with pytest.raises(SettingsError, match="No such file"):
        read_settings(environment, folder=home)


def test_a_users_file_that_others_can_write_is_refused(home: Path) -> None:
    file = home / ".config" / "nsa-ops" / "config.toml"
    file.write_text('ssh_config = "x"\n')
    file.chmod(0o666)
    with pytest.raises(SettingsError, match="lets others change it"):
        read_settings({"HOME": str(home)}, folder=home)


def test_a_relative_path_in_a_settings_file_is_never_one_of_the_folder_you_are_in(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = home / ".config" / "nsa-ops"
    (own / "config.toml").write_text('ssh_config = "ssh.conf"\nstate_dir = "state"\n')
    (home / "elsewhere").mkdir()
    monkeypatch.chdir(home / "elsewhere")
    found = read_settings({"HOME": str(home)})
    assert (found.values.ssh_config, found.state_dir) == (str(own / "ssh.conf"), own / "state")
    (own / "config.toml").write_text('ssh_config = "~/ssh.conf"\n')
    relative = dict.fromkeys(("XDG_CONFIG_HOME", "XDG_STATE_HOME", "XDG_RUNTIME_DIR"), ".")
    found = read_settings({"HOME": str(home), **relative, "TMPDIR": "."})
    assert found.values.ssh_config == str(Path("~/ssh.conf").expanduser())
    assert found.state_dir == home / ".local" / "state" / "nsa-ops"
    assert all(path.is_absolute() for path in (*found.socket_dirs, *found.scratch_dirs))


def test_a_folder_that_is_gone_holds_no_project(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = home / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert read_settings({"HOME": str(home)}).notices == ()


def test_state_is_kept_where_the_platform_keeps_state(home: Path) -> None:
    assert read_settings({"HOME": str(home)}, folder=home).state_dir == (
        home / ".local" / "state" / "nsa-ops"
    )
    found = read_settings({"HOME": str(home), "NSA_OPS_STATE_DIR": "/elsewhere"}, folder=home)
    assert found.state_dir == Path("/elsewhere")


def test_secrets_do_not_reach_a_local_pod(home: Path) -> None:
    environment = {
        "HOME": str(home), "PATH": "/bin", "HF_TOKEN": "canary", "AWS_SECRET_ACCESS_KEY": "canary",
        "CUDA_VISIBLE_DEVICES": "0", "NSA_BATCH_SIZE": "4", "NSA_OPS_POD": "p",
    }  # fmt: skip
    found = read_settings(environment, folder=home)
    assert found.login_environment == {
        "HOME": str(home), "PATH": "/bin", "CUDA_VISIBLE_DEVICES": "0"
    }  # fmt: skip
    assert found.training_environment == {"NSA_BATCH_SIZE": "4"}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("pod = ", "not valid TOML"),
        ("pdo = 1", "did you mean `pod`"),
        ("timeout_s = 'x'", r"`timeout_s` from .*config.toml cannot be used: .* number, .*'x'"),
        ("timeout_s = -1", "greater than or equal to 0"),
        ("timeout_s = nan", "finite"),
        ("color = 'blue'", "'auto', 'always' or 'never'"),
    ],
)
def test_a_settings_file_that_cannot_be_used_says_why(
    home: Path, content: str, message: str
) -> None:
    (home / ".config" / "nsa-ops" / "config.toml").write_text(content)
    with pytest.raises(SettingsError, match=message):
        read_settings({"HOME": str(home)}, folder=home)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot be used: it is no regular file"),
        ("pod = " + "[" * 20_000, "its values are nested too deep"),
        ("timeout_s = " + "9" * 5_000, "is not valid TOML"),
    ],
)
def test_a_named_settings_file_that_is_a_folder_or_nested_without_end_is_refused(
    home: Path, content: str | None, message: str
) -> None:
    file = home / "named.toml"
    if content is None:
        file.mkdir()
    else:
        file.write_text(content)
    with pytest.raises(SettingsError, match=message):
        read_settings({"HOME": str(home), "NSA_OPS_CONFIG": str(file)}, folder=home)


def test_a_home_that_is_empty_is_one_that_is_not_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "")
    own = read_settings({}, folder=Path("/"))
    assert own.state_dir.is_relative_to(pwd.getpwuid(os.getuid()).pw_dir)
    assert read_settings({"HOME": ""}, folder=Path("/")).state_dir == own.state_dir
    monkeypatch.setattr(os, "getuid", lambda: 4_000_000_000)
    with pytest.raises(SettingsError, match="HOME is not set, and user 4000000000 has no home"):
        read_settings({}, folder=Path("/"))
