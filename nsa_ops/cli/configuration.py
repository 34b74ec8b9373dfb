"""Commands about configuration: `config`, `profile` and `estimate`."""

from pathlib import Path
from typing import Annotated

import typer

from nsa_ops.cli.arguments import ProfileOption, RecipeOption, SetOption
from nsa_ops.cli.command import command
from nsa_ops.cli.complete import complete_profile
from nsa_ops.cli.session import Session

config_group = typer.Typer(help="What a run would be configured by, and where each value is from.")
profile_group = typer.Typer(help="What each kind of card can do and what we allow on it.")


def register(app: typer.Typer) -> None:
    """Add these commands to the root."""
    command(app, "estimate")(estimate)
    command(config_group, "trust", path="config", changes=True)(config_trust)
    app.add_typer(config_group, name="config")
    app.add_typer(profile_group, name="profile")


@command(config_group, "check", path="config")
def config_check(
    session: Session,
    recipe: RecipeOption = None,
    profile: ProfileOption = None,
    sets: SetOption = None,
) -> None:
    """Resolve a configuration and say whether it can be used."""
    from nsa_ops.cli.render import draw_checked
    from nsa_ops.configure import RunChoice, check_config

    choice = RunChoice(recipe or "", profile or "", tuple(sets or ()))
    session.show(check_config(session.settings, choice), draw_checked)


@command(config_group, "show", path="config")
def config_show(
    session: Session,
    recipe: RecipeOption = None,
    profile: ProfileOption = None,
    sets: SetOption = None,
    origin: Annotated[bool, typer.Option("--origin", help="Show who set each value")] = False,
    operator: Annotated[bool, typer.Option("--operator", help="The operator's settings")] = False,
) -> None:
    """Show every value of a configuration, or of the operator's own settings."""
    from nsa_ops.cli.render import draw_values, draw_values_with_origin
    from nsa_ops.configure import RunChoice, list_settings, list_values

    choice = RunChoice(recipe or "", profile or "", tuple(sets or ()))
    settings = session.settings
    values = list_settings(settings) if operator else list_values(settings, choice)
    session.show(values, draw_values_with_origin if origin else draw_values)


def config_trust(
    session: Session,
    file: Annotated[
        Path | None, typer.Argument(metavar="FILE", help="Default: the nearest `nsa-ops.toml`")
    ] = None,
    forget: Annotated[bool, typer.Option("--forget", help="Trust it no longer")] = False,
) -> None:
    """Trust the content of a project's `nsa-ops.toml` as it is now, or forget that."""
    from nsa_ops.cli.render import draw_trusted
    from nsa_ops.laptop.trust import execute_trust_file, plan_trust_file

    planned = plan_trust_file(session.settings, file, is_forgotten=forget)
    session.agree(planned.plan, is_reversible=False)
    session.show(execute_trust_file(session.settings, planned), draw_trusted)


@command(config_group, "trusted", path="config")
def config_trusted(session: Session) -> None:
    """List the project files that are trusted, and whether each is still what was trusted."""
    from nsa_ops.cli.render import draw_trusted
    from nsa_ops.laptop.trust import list_trusted

    session.show(list_trusted(session.settings), draw_trusted)


@command(profile_group, "ls", path="profile")
def profile_ls(session: Session) -> None:
    """List the hardware profiles."""
    from nsa_ops.cli.render import draw_profiles
    from nsa_ops.configure import all_hardware

    session.show(all_hardware(), draw_profiles)


@command(profile_group, "show", path="profile")
def profile_show(
    session: Session,
    name: Annotated[str, typer.Argument(metavar="PROFILE", autocompletion=complete_profile)],
) -> None:
    """Show one hardware profile."""
    from nsa_ops.cli.render import draw_profile
    from nsa_ops.configure import load_hardware

    session.show(load_hardware(name), draw_profile)


@command(profile_group, "explain", path="profile")
def profile_explain(
    session: Session,
    name: Annotated[str, typer.Argument(metavar="PROFILE", autocompletion=complete_profile)],
    recipe: RecipeOption = None,
    sets: SetOption = None,
) -> None:
    """Show the values that a profile decides, and why."""
    from nsa_ops.cli.render import draw_reasons
    from nsa_ops.configure import RunChoice, explain_profile

    choice = RunChoice(recipe or "", name, tuple(sets or ()))
    session.show(explain_profile(session.settings, choice), draw_reasons)


def estimate(
    session: Session,
    recipe: RecipeOption = None,
    profile: ProfileOption = None,
    sets: SetOption = None,
) -> None:
    """Estimate parameters, memory, FLOPs and disk of a run before launching it."""
    from nsa_ops.cli.render_runs import draw_estimate
    from nsa_ops.configure import RunChoice
    from nsa_ops.estimate import estimate_choice

    choice = RunChoice(recipe or "", profile or "", tuple(sets or ()))
    session.show(estimate_choice(session.settings, choice), draw_estimate)
