"""The wheel is whole: an installed nsa-ops finds its data without a checkout."""

import importlib.util
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

FIND = """
from nsa_core.config.profile import list_profiles
from nsa_core.config.recipe import list_recipes, resolve
print(*list_profiles())
print(*list_recipes())
resolve("m7c-125m", "a100")
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that holds what the wheel would put on the path."""
    if importlib.util.find_spec("hatchling") is None:
        pytest.skip("hatchling is not installed here; `make test` installs it")
    folder = tmp_path_factory.mktemp("wheel")
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder],
        cwd=Path(__file__).parents[2],
        check=True,
        capture_output=True,
    )
    (wheel,) = folder.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(folder / "installed")
    return folder / "installed"


def test_profiles_and_recipes_are_found_without_a_checkout(
    installed: Path, repository: Path
) -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-c", FIND],
        env={"PYTHONPATH": str(installed)},
        capture_output=True,
        text=True,
        check=True,
    )
    profiles, recipes = done.stdout.splitlines()
    assert profiles.split() == sorted(p.stem for p in (repository / "profiles").glob("*.yaml"))
    assert "m7c-125m" in recipes.split()


def test_the_runbooks_and_the_licence_are_in_it(installed: Path, repository: Path) -> None:
    shipped = {page.name for page in (installed / "nsa_ops/_data/runbooks").glob("*.md")}
    assert shipped == {page.name for page in (repository / "runbooks").glob("*.md")}
    assert list(installed.glob("*.dist-info/licenses/LICENSE"))


def test_no_test_and_no_tool_is_in_it(installed: Path) -> None:
    folders = {path.name for path in installed.iterdir() if not path.name.endswith(".dist-info")}
    assert folders == {"nsa_core", "nsa_ops"}
