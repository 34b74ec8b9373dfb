from pathlib import Path

import pytest

from nsa_ops.settings import SettingsError, read_settings


@pytest.fixture
def home(tmp_path: Path) -> Path:
    (tmp_path / ".config" / "nsa-ops").mkdir(parents=True)
    return tmp_path


def test_variables_win_over_the_project_over_the_user_over_defaults(home: Path) -> None:
    (home / ".config" / "nsa-ops" / "config.toml").write_text('pod = "u"\nrecipe = "u"\n')
    project = home / "work" / "deep"
    project.mkdir(parents=True)
    (home / "work" / "nsa-ops.toml").write_text('recipe = "p"\nprofile = "p"\n')
    found = read_settings({"HOME": str(home), "NSA_OPS_PROFILE": "v"}, folder=project)
    assert (found.values.pod, found.values.recipe, found.values.profile) == ("u", "p", "v")
    assert found.origins["profile"] == "NSA_OPS_PROFILE"
    assert found.origins["recipe"].endswith("work/nsa-ops.toml")
    assert found.origins["tmux_socket"] == "default"


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
        ("timeout_s = 'x'", r"`timeout_s` from .*nsa-ops.toml cannot be used: .* number, .*'x'"),
        ("timeout_s = -1", "greater than or equal to 0"),
        ("timeout_s = nan", "finite"),
        ("color = 'blue'", "'auto', 'always' or 'never'"),
    ],
)
def test_a_settings_file_that_cannot_be_used_says_why(
    home: Path, content: str, message: str
) -> None:
    (home / "nsa-ops.toml").write_text(content)
    with pytest.raises(SettingsError, match=message):
        read_settings({"HOME": str(home)}, folder=home)
