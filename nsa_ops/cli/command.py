"""Make a function a command: the options all commands share, a session, and clean endings."""

import functools
import inspect
from collections.abc import Callable
from typing import Annotated, Any

import typer

from nsa_ops.cli.session import Options, Session
from nsa_ops.errors import InterruptedByOperatorError

_COMMON: dict[str, tuple[Any, Any]] = {
    "json": (
        Annotated[bool, typer.Option("--json", help="Result as JSON `{schema, ok, data, errors}`")],
        False,
    ),
    "timeout_s": (
        Annotated[
            float | None,
            typer.Option("--timeout", min=0.1, metavar="SECONDS", help="Deadline of the command"),
        ],
        None,
    ),
    "no_input": (Annotated[bool, typer.Option("--no-input", help="Never ask")], False),
    "verbose": (
        Annotated[int, typer.Option("--verbose", "-v", count=True, help="Tell more of the story")],
        0,
    ),
    "quiet": (Annotated[bool, typer.Option("--quiet", "-q", help="Tell no story")], False),
    "color": (
        Annotated[str | None, typer.Option("--color", metavar="auto|always|never")],
        None,
    ),
}
_CHANGING: dict[str, tuple[Any, Any]] = {
    "yes": (Annotated[bool, typer.Option("--yes", "-y", help="Do not ask")], False),
    "plan": (
        Annotated[bool, typer.Option("--plan", help="Show what would be done, change nothing")],
        False,
    ),
}

CommandFunction = Callable[..., None]


def command(
    group: typer.Typer,
    name: str,
    *,
    path: str = "",
    changes: bool = False,
    is_without_settings: bool = False,
    is_emergency: bool = False,
) -> Callable[[CommandFunction], CommandFunction]:
    """Register a function as a command; its first parameter receives the `Session`.

    Args:
        group: Where it belongs.
        name: Its word.
        path: Words before it, such as `pod`; they name the JSON schema.
        changes: It changes something: it takes `--yes` and `--plan` too.
        is_without_settings: It goes on where the settings cannot be used; every other command is
            refused then, before it does or shows anything.
        is_emergency: It goes on where the state folder takes no write, and says what is not
            recorded; every other command is refused then.
    """
    words = f"{path} {name}".strip()

    def register(function: CommandFunction) -> CommandFunction:
        group.command(name, help=inspect.getdoc(function))(
            _in_session(
                function,
                words,
                changes=changes,
                is_without_settings=is_without_settings,
                is_emergency=is_emergency,
            )
        )
        return function

    return register


def _in_session(
    function: CommandFunction,
    words: str,
    *,
    changes: bool,
    is_without_settings: bool,
    is_emergency: bool,
) -> CommandFunction:
    own = list(inspect.signature(function, eval_str=True).parameters.values())[1:]
    shared = _COMMON | (_CHANGING if changes else {})

    @functools.wraps(function)
    def run(**values: Any) -> None:
        options = _options({name: values.pop(name) for name in shared})
        session = Session(words, options, changes=changes, is_emergency=is_emergency)
        try:
            if not is_without_settings:
                session.check_settings()
            function(session, **values)
        except KeyboardInterrupt as error:
            raise InterruptedByOperatorError(_interrupted(session, error)) from error
        finally:
            session.close()

    parameters = [
        *own,
        *(
            inspect.Parameter(
                name, inspect.Parameter.KEYWORD_ONLY, annotation=annotation, default=default
            )
            for name, (annotation, default) in shared.items()
        ),
    ]
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


def _interrupted(session: Session, error: KeyboardInterrupt) -> str:
    """What was stopped and what goes on: the command's own words, and what the link did."""
    noted = list(getattr(error, "__notes__", ()))
    told = [one for one in (session.interrupt_note, *noted) if one]
    return f"Stopped by Ctrl-C: {'; '.join(told) or 'no command on a pod was under way'}"


def _options(values: dict[str, Any]) -> Options:
    color = values["color"]
    if color not in {None, "auto", "always", "never"}:
        message = f"`--color {color}` must be auto, always or never"
        raise typer.BadParameter(message)
    return Options(
        json=values["json"],
        timeout_s=values["timeout_s"],
        no_input=values["no_input"],
        verbosity=-1 if values["quiet"] else values["verbose"],
        color=color,
        yes=values.get("yes", False),
        plan=values.get("plan", False),
    )
