"""What a shell completes: names of runs and pods from this laptop's registry, and from its files.

A completion asks no pod, makes no file, and prints nothing but names: where it cannot know any, it
gives none, because an error would stand in the line that somebody is typing.
"""

from collections.abc import Callable, Iterable


def complete_run(incomplete: str) -> list[str]:
    """Runs that this laptop knows, newest first."""
    return _beginning(incomplete, lambda: _column("SELECT run_id FROM runs ORDER BY 1 DESC"))


def complete_pod(incomplete: str) -> list[str]:
    """Pods that this laptop knows."""
    return _beginning(incomplete, lambda: _column("SELECT name FROM pods ORDER BY 1"))


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
    """One column of the registry; none where there is no registry, or it cannot be read."""
    import sqlite3
    from contextlib import closing

    from nsa_ops.settings import SettingsError, read_settings
    from nsa_ops.store import REGISTRY_NAME
    from nsa_ops.store.read_only import load_registry

    try:
        settings = read_settings()
        path = settings.state_dir / REGISTRY_NAME
        if not path.is_file():
            return []
        with closing(load_registry(path, settings.scratch_dirs)) as registry:
            return [str(row[0]) for row in registry.execute(query)]
    except (SettingsError, sqlite3.Error, OSError):
        return []
