"""`doctor`: is this laptop fit to operate."""

import typer

from nsa_ops.cli.command import command
from nsa_ops.cli.session import Session
from nsa_ops.errors import ConfigurationError


def register(app: typer.Typer) -> None:
    """Add the command to the root command."""
    command(app, "doctor", is_without_settings=True)(doctor)


def doctor(session: Session) -> None:
    """Examine this laptop: programs, state, registry, audit chain, links, host keys, clock."""
    from nsa_ops.cli.render_checks import draw_examined
    from nsa_ops.laptop.laptop_checks import examine, refusal_of

    problem = ""
    try:
        settings = session.settings
    except ConfigurationError as error:
        settings, problem = session.use_built_in_settings(), error.message
    found = examine(settings, problem)
    session.show(found, draw_examined, failure=refusal_of(found))
