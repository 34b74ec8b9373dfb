from dataclasses import replace

import pytest

from nsa_core.config.profile import load_profile
from nsa_ops.errors import RefusedError
from nsa_ops.machine.bare import BasePython
from nsa_ops.provision.needs import (
    TOO_NEW_PYTHON,
    choose_build,
    choose_python,
    environment_name,
)
from tests.ops.provision.machines import BARE, DEBIAN


@pytest.mark.parametrize(
    ("profile", "driver", "build"),
    [
        ("cpu", "", "cpu"),
        ("cpu", "580.159.04", "cpu"),
        ("h100", "580.159.04", "cu130"),
        ("a100", "570.86.10", "cu126"),
        ("4090", "525.60.13", "cu126"),
        ("v100", "580.65.06", "cu126"),  # the last builds with code for sm_70
    ],
)
def test_the_build_is_what_the_profile_wants_and_the_driver_runs(
    profile: str, driver: str, build: str
) -> None:
    found = choose_build(load_profile(profile), replace(BARE, driver=driver), "gpu")
    assert (found.name, found.requirement) == (build, load_profile(profile).torch_requirement)


@pytest.mark.parametrize(
    ("driver", "said"),
    [
        ("", "shows none"),
        ("470.82.01", "need 525 or later"),
        ("[N/A]", "shows none"),
        ("²", "shows none"),
        ("9" * 5000, "shows none"),
    ],
)
def test_a_driver_that_runs_no_current_build_is_refused(driver: str, said: str) -> None:
    with pytest.raises(RefusedError, match=said):
        choose_build(load_profile("a100"), replace(BARE, driver=driver), "gpu")


def test_a_profile_that_names_a_build_of_cuda_13_is_refused_on_an_older_driver() -> None:
    profile = load_profile("a100").model_copy(update={"torch_backend": "cu130"})
    with pytest.raises(RefusedError, match="older than 580"):
        choose_build(profile, replace(BARE, driver="550.54"), "gpu")


OLD = BasePython("/usr/bin/python3.10", "3.10.12", has_venv=True, has_headers=True)
NEW = BasePython("/usr/bin/python3.15", "3.15.0", has_venv=True, has_headers=True)
NO_VENV = BasePython("/usr/bin/python3.12", "3.12.3", has_venv=False, has_headers=True)
NO_HEADERS = BasePython("/opt/python3.12", "3.12.3", has_venv=True, has_headers=False)


@pytest.mark.parametrize(
    ("pythons", "tools", "needs_headers", "chosen"),
    [
        ((OLD, NEW, DEBIAN), {}, False, DEBIAN),
        ((OLD, NEW), {}, False, None),
        ((NO_VENV,), {}, False, None),
        ((NO_VENV,), {"uv": "/usr/bin/uv"}, False, NO_VENV),
        ((NO_HEADERS, DEBIAN), {}, False, NO_HEADERS),
        ((NO_HEADERS, DEBIAN), {}, True, DEBIAN),
        ((NO_HEADERS,), {}, True, NO_HEADERS),
    ],
)
def test_the_first_interpreter_that_can_make_an_environment_is_taken(
    pythons: tuple[BasePython, ...],
    tools: dict[str, str],
    needs_headers: bool,
    chosen: BasePython | None,
) -> None:
    facts = replace(BARE, pythons=pythons, tools=tools)
    assert choose_python(facts, needs_headers=needs_headers) == chosen


def test_another_lock_build_or_python_is_another_environment() -> None:
    build = choose_build(load_profile("cpu"), BARE, "bare")
    names = {
        environment_name(DEBIAN, build, "lock"),
        environment_name(DEBIAN, build, "other"),
        environment_name(DEBIAN, replace(build, name="cu126"), "lock"),
        environment_name(DEBIAN, replace(build, requirement="torch>=3"), "lock"),
        environment_name(NO_VENV, build, "lock"),
    }
    assert len(names) == 5
    assert environment_name(DEBIAN, replace(build, why="else"), "lock") in names


def test_setup_and_provision_agree_on_the_first_python_that_is_too_new(repository: object) -> None:
    text = (repository / "tools/setup.sh").read_text()  # type: ignore[operator]
    assert f"newest='{TOO_NEW_PYTHON[0]}, {TOO_NEW_PYTHON[1]}'" in text
