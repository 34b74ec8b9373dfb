"""The `nsa-ops` command: arguments in, one use case called, a result rendered, an exit code."""

import re
import signal
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress
from difflib import get_close_matches
from itertools import pairwise
from typing import Annotated, NoReturn

import typer

from nsa_ops.cli import (
    backup,
    bench,
    configuration,
    export,
    inspection,
    pods,
    readiness,
    runs,
    this_laptop,
)
from nsa_ops.cli.console import close_stdout, complain, envelope, prepare_streams
from nsa_ops.errors import (
    ConfigurationError,
    LocalResourceError,
    OpsError,
    ReaderGoneError,
    Terminated,
)
from nsa_ops.printable import printable_lines

#: How alike two words must be (difflib's ratio) before one is offered for the other.
_NEAR = 0.7

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _add(*groups: typer.Typer) -> None:
    for group in groups:
        app.add_typer(group)


_add(
    readiness.commands,
    runs.commands,
    inspection.commands,
    this_laptop.commands,
    configuration.commands,
    export.commands,
    inspection.run_group,
    pods.pod_group,
    backup.backup_group,
    configuration.config_group,
    configuration.profile_group,
    bench.bench_group,
)


def _print_version(value: bool) -> None:
    if value:
        from nsa_core import __version__

        typer.echo(f"nsa-ops {__version__}")
        raise typer.Exit(0)


@app.callback()
def root(
    _version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version"),
    ] = False,
) -> None:
    """Operate Native Sparse Attention training runs on rented GPU pods.

    The everyday path: preflight, launch, watch, halt, resume.
    """


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Run the command line and exit; an `OpsError` becomes one line, a hint and its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    signal.signal(signal.SIGTERM, _terminate)
    prepare_streams()
    code = _run(words)
    close_stdout()
    raise SystemExit(code)


def _terminate(_signal: int, _frame: object) -> NoReturn:
    raise Terminated


def _run(words: Sequence[str]) -> int:
    """Run one command; its exit code. A reader that left (`| head`) ends it as SIGPIPE would."""
    try:
        _require_text(words)
        _require_filled(words)
        result = app(args=words or ["--help"], prog_name="nsa-ops", standalone_mode=False)
        sys.stdout.flush()
    except OpsError as error:
        return _fail(error, words)
    except typer.TyperException as error:
        return _fail(_usage_error(error), words)
    except typer.Abort:
        return _fail(ConfigurationError("No answer was given", hint="Repeat it with `-y`"), words)
    except SystemExit as ended:
        # typer and rich make a closed pipe exit code 1, which is our code of a bug.
        if not isinstance(ended.__context__, BrokenPipeError):
            raise
        return ReaderGoneError.exit_code
    except BrokenPipeError:
        return ReaderGoneError.exit_code
    except OSError as error:
        return _fail(_resource_error(error), words)
    except Exception as error:  # noqa: BLE001 (outermost edge: a bug still ends in one line)
        return _fail(_bug(error, words), words)
    return result if isinstance(result, int) else 0


def _require_text(words: Sequence[str]) -> None:
    """Refuse bytes that are no text in this shell's encoding: no name or path here could be kept.

    Raises:
        ConfigurationError: If there are any.
    """
    for word in words:
        if any("\ud800" <= sign <= "\udfff" for sign in word):
            shown = word.encode(errors="surrogateescape").decode(errors="replace")
            message = (
                f"`{shown}` is no text in this shell's encoding ({sys.getfilesystemencoding()})"
            )
            raise ConfigurationError(message, hint="Set `LC_ALL=C.UTF-8`, then repeat it")


def _require_filled(words: Sequence[str]) -> None:
    """Refuse empty words, such as those of a shell variable that is not set.

    Taken as they are, they would mean a default, every run or this folder, each somewhere else.

    Raises:
        ConfigurationError: If there are any.
    """
    for before, word in pairwise(["nsa-ops", *words]):
        flag = re.fullmatch(r"(--[a-z-]+)=", word)
        if not word or flag:
            message = f"The word after `{flag[1] if flag else before}` is empty"
            hint = "Set the shell variable that it comes from, or leave it out to get the default"
            raise ConfigurationError(message, hint=hint)


def _fail(error: OpsError, words: Sequence[str]) -> int:
    """Say what failed on stderr, and as an envelope on stdout if JSON was asked for."""
    complain(error)
    if "--json" in words:
        with suppress(OSError):  # stdout may be what failed; stderr and the exit code tell it
            typer.echo(envelope(_command_of(words) or "nsa-ops", None, error))
    return error.exit_code


def _command_of(words: Sequence[str]) -> str:
    """The words of the command, without the name of a pod or run that may follow them."""
    groups = {one.typer_instance.info.name for one in app.registered_groups if one.typer_instance}
    named = [word for word in words[:2] if re.fullmatch(r"[a-z][a-z-]*", word)]
    return " ".join(named[: 2 if named and named[0] in groups else 1])


def _usage_error(error: typer.TyperException) -> ConfigurationError:
    """A parser's complaint in our words: what is unknown, and the nearest thing that is known."""
    message = error.format_message().rstrip(".").replace("'", "`")
    option = getattr(error, "option_name", None)
    if option is not None:
        near = get_close_matches(option, getattr(error, "possibilities", None) or (), 1, _NEAR)
        meant = f"; did you mean `{near[0]}`?" if near else ""
        message = error.message.rstrip(".") + meant
    message = message.replace(". Did you mean", "; did you mean")
    context = getattr(error, "ctx", None)
    where = context.command_path if context is not None else "nsa-ops"
    return ConfigurationError(" ".join(message.split()), hint=f"See `{where} --help`")


def _resource_error(error: OSError) -> LocalResourceError:
    """What this machine refused: a full disk, a missing right, with the path it was about."""
    from nsa_core.config.base import disk_advice

    where = f"`{error.filename}`: " if error.filename else ""
    message = f"This machine refused: {where}{error.strerror or error}"
    return LocalResourceError(message, hint=f"{disk_advice(error)}, then repeat it")


def _bug(error: Exception, words: Sequence[str]) -> OpsError:
    if {"-v", "--verbose"} & set(words):
        typer.echo(printable_lines("".join(traceback.format_exception(error))), err=True)
    message = f"This is a bug in nsa-ops: {type(error).__name__}: {error}"
    return OpsError(
        " ".join(message.split()), hint="Repeat it with `-v` for the trace, and report it"
    )
