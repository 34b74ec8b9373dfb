"""Arguments and options that several commands share, and what a shell completes in them.

Names of runs and pods come from this laptop's registry. A completion asks no pod, makes no file,
and prints nothing but names: an error would land in the line that somebody is typing.
"""

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from nsa_ops.configure import RunChoice


def complete_run(incomplete: str) -> list[str]:
    """Runs that this laptop knows, newest first."""
    return _beginning(incomplete, lambda: _column("SELECT run_id FROM runs ORDER BY 1 DESC"))


def complete_pod(incomplete: str) -> list[str]:
    """Pods that this laptop knows."""
    return _beginning(incomplete, lambda: _column("SELECT name FROM pods ORDER BY 1"))


def complete_pods(incomplete: str) -> list[str]:
    """Lists of pods: what is typed already, and each pod that is not in it yet."""
    before, comma, last = incomplete.rpartition(",")
    named = before.split(",")
    return [f"{before}{comma}{pod}" for pod in complete_pod(last) if pod not in named]


def complete_profile(incomplete: str) -> list[str]:
    """Hardware profiles."""
    from nsa_core.config.profile import list_profiles

    return _beginning(incomplete, list_profiles)


def complete_recipe(incomplete: str) -> list[str]:
    """Recipes that come with the project."""
    from nsa_core.config.recipe import list_recipes

    return _beginning(incomplete, list_recipes)


def _beginning(incomplete: str, names: Callable[[], Iterable[str]]) -> list[str]:
    return [name for name in names() if name.startswith(incomplete)]


def _column(query: str) -> list[str]:
    """One column of the registry; empty if there is no registry, or it cannot be read."""
    import sqlite3
    from contextlib import closing

    from nsa_ops.settings import SettingsError, read_settings
    from nsa_ops.store import REGISTRY_NAME
    from nsa_ops.store.database import load_registry

    try:
        settings = read_settings()
        path = settings.state_dir / REGISTRY_NAME
        if not path.is_file():
            return []
        with closing(load_registry(path, settings.scratch_dirs)) as registry:
            return [str(row[0]) for row in registry.execute(query)]
    except (SettingsError, sqlite3.Error, OSError):
        return []


def _argument(metavar: str, help_text: str, names: Callable[[str], list[str]]) -> Any:
    return typer.Argument(metavar=metavar, help=help_text, autocompletion=names)


def _option(
    flag: str, metavar: str, help_text: str, names: Callable[[str], list[str]] | None = None
) -> Any:
    return typer.Option(flag, metavar=metavar, help=help_text, autocompletion=names)


RunArgument = Annotated[
    str | None, _argument("RUN", "Run id; optional if only one run matches", complete_run)
]
BackupArgument = Annotated[
    str | None,
    _argument("RUN|PATH", "Run id or folder; optional if only one backup matches", complete_run),
]
_POD_HELP = "Pod name; optional if only one pod matches"
PodArgument = Annotated[str | None, _argument("POD", _POD_HELP, complete_pod)]
PodOption = Annotated[str | None, _option("--pod", "POD", _POD_HELP, complete_pod)]
OnPodOption = Annotated[
    str | None,
    _option(
        "--pod",
        "POD",
        "Pod to ask instead of the run's own, such as one that the run has left",
        complete_pod,
    ),
]
PodsOption = Annotated[
    str | None,
    _option("--pods", "A,B", "Pods that train as one run, each named once", complete_pods),
]
PortOption = Annotated[
    int | None,
    typer.Option(
        "--port",
        min=1024,
        max=65535,
        metavar="PORT",
        help="With `--pods`: where the ranks meet on pod 0, which the other pods must reach",
    ),
]
OverrideOption = Annotated[
    list[str] | None,
    _option(
        "--override",
        "NAME=REASON",
        "Override a guardrail; the reason is recorded and must hold no secrets",
    ),
]
ProfileOption = Annotated[
    str | None, _option("--profile", "NAME", "Hardware profile, such as `a100`", complete_profile)
]
RecipeOption = Annotated[
    str | None, _option("--recipe", "NAME", "Recipe, or path of a YAML file", complete_recipe)
]
SetOption = Annotated[
    list[str] | None, _option("--set", "KEY=VALUE", "Set one value; may be repeated")
]


def choice_of(recipe: str | None, profile: str | None, sets: list[str] | None) -> "RunChoice":
    """The configuration that `--recipe`, `--profile` and `--set` choose."""
    from nsa_ops.configure import RunChoice

    return RunChoice(recipe or "", profile or "", tuple(sets or ()))
