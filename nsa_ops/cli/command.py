"""Make a function a command: the options that all commands share, a session, and clean endings."""

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Annotated, Any

import typer

from nsa_ops.cli.session import Options, Session
from nsa_ops.errors import InterruptedByOperatorError, Terminated, TerminatedError

_COMMON: dict[str, tuple[Any, Any]] = {
    "json": (
        Annotated[
            bool,
            typer.Option("--json", help="Print the result as JSON: `{schema, ok, data, errors}`"),
        ],
        False,
    ),
    "timeout_s": (
        Annotated[
            float | None,
            typer.Option("--timeout", min=0.1, metavar="SECONDS", help="Deadline of the command"),
        ],
        None,
    ),
    "no_input": (
        Annotated[bool, typer.Option("--no-input", help="Never ask a question")],
        False,
    ),
    "verbose": (
        Annotated[int, typer.Option("--verbose", "-v", count=True, help="Show more detail")],
        0,
    ),
    "quiet": (
        Annotated[bool, typer.Option("--quiet", "-q", help="Suppress progress messages")],
        False,
    ),
    "color": (
        Annotated[
            str | None,
            typer.Option("--color", metavar="auto|always|never", help="When to use colour"),
        ],
        None,
    ),
}
_CHANGING: dict[str, tuple[Any, Any]] = {
    "yes": (
        Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation")],
        False,
    ),
    "plan": (
        Annotated[bool, typer.Option("--plan", help="Show the plan, and change nothing")],
        False,
    ),
}

CommandFunction = Callable[..., None]


def command(
    group: typer.Typer,
    name: str,
    *,
    changes: bool = False,
    is_without_settings: bool = False,
    is_emergency: bool = False,
) -> Callable[[CommandFunction], CommandFunction]:
    """Register a function as a command; its first parameter receives the `Session`.

    Args:
        group: Where it belongs; the name of the group becomes part of the JSON schema's name.
        name: Its word.
        changes: It changes something: it takes `--yes` and `--plan` too.
        is_without_settings: It also works where the settings cannot be used; every other command
            is refused then, before it does or shows anything.
        is_emergency: It also works where the state folder cannot be written, and says what is not
            recorded; every other command is refused then.
    """
    parent = group.info.name
    words = f"{parent} {name}" if isinstance(parent, str) else name
    shared = _COMMON | (_CHANGING if changes else {})

    def register(function: CommandFunction) -> CommandFunction:
        @functools.wraps(function)
        def run(**values: Any) -> None:
            options = _options({option: values.pop(option) for option in shared})
            session = Session(words, options, changes=changes, is_emergency=is_emergency)
            try:
                if not is_without_settings:
                    session.check_settings()
                function(session, **values)
            except Terminated as error:
                raise TerminatedError(_interrupted(session, error, "TERM")) from error
            except KeyboardInterrupt as error:
                raise InterruptedByOperatorError(_interrupted(session, error, "Ctrl-C")) from error
            finally:
                session.close()

        signature = _signature(function, shared)
        run.__signature__ = signature  # type: ignore[attr-defined]
        run.__annotations__ = {one.name: one.annotation for one in signature.parameters.values()}
        group.command(name, help=inspect.getdoc(function))(run)
        return function

    return register


def _signature(
    function: CommandFunction, shared: Mapping[str, tuple[Any, Any]]
) -> inspect.Signature:
    """The parameters of a command without its session, and the shared options."""
    own = list(inspect.signature(function, eval_str=True).parameters.values())[1:]
    keyword = inspect.Parameter.KEYWORD_ONLY
    options = [
        inspect.Parameter(name, keyword, annotation=annotation, default=default)
        for name, (annotation, default) in shared.items()
    ]
    return inspect.Signature([*own, *options])


def _interrupted(session: Session, error: KeyboardInterrupt, by: str) -> str:
    """What was stopped and what continues: the command's note, and what the transport did."""
    notes = [session.interrupt_note, *getattr(error, "__notes__", ())]
    said = "; ".join(note for note in notes if note)
    return f"Stopped by {by}: {said or 'no command was running on a pod'}"


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
