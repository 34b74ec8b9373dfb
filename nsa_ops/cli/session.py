"""Session: the options of a command, its messages on stderr and its result on stdout."""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, TypeVar

import typer

from nsa_ops.cli.console import complain, envelope, warn
from nsa_ops.cli.progress import Display
from nsa_ops.errors import ConfigurationError, OpsError
from nsa_ops.printable import printable_brief

if TYPE_CHECKING:
    from rich.console import Console

    from nsa_ops.context import Operator, ShowWork
    from nsa_ops.plan import Plan
    from nsa_ops.settings import Settings

ResultT = TypeVar("ResultT")
_QUIET = -1


@dataclass(frozen=True)
class Options:
    """Options that every command takes; `yes` and `plan` only where something changes."""

    json: bool = False
    timeout_s: float | None = None
    no_input: bool = False
    verbosity: int = 0
    color: str | None = None
    yes: bool = False
    plan: bool = False


def _print_line(line: str) -> None:
    typer.echo(printable_brief(line), err=True)


class Session:
    """One invocation of one command."""

    def __init__(
        self, command: str, options: Options, *, changes: bool = False, is_emergency: bool = False
    ) -> None:
        """Begin.

        Args:
            command: Its words, such as `pod ls`.
            options: What every command takes.
            changes: It changes something.
            is_emergency: It also works where nothing can be recorded, and says what is not.
        """
        self.command = command
        self.options = options
        self.interrupt_note = ""
        self._changes = changes
        self._unrecorded = self._tell_unrecorded if is_emergency else None
        self._told: set[str] = set()

    @cached_property
    def settings(self) -> "Settings":
        """Settings of this invocation.

        Raises:
            ConfigurationError: If a settings file or variable cannot be used.
        """
        from nsa_ops.settings import SettingsError, read_settings

        try:
            found = read_settings()
        except SettingsError as error:
            hint = "See docs/variables.md; `nsa-ops doctor` works without the settings"
            raise ConfigurationError(str(error), hint=hint) from error
        for notice in found.notices:
            self.tell(notice)
        return found

    def check_settings(self) -> None:
        """Refuse settings that cannot be used.

        Raises:
            ConfigurationError: As `settings`.
        """
        _ = self.settings

    def use_built_in_settings(self) -> "Settings":
        """Use defaults instead of invalid configured settings; the caller says why."""
        from nsa_ops.settings import built_in_settings

        self.__dict__["settings"] = built_in_settings()
        return self.settings

    @cached_property
    def operator(self) -> "Operator":
        """What use cases work with."""
        return self.operator_of(self.settings)

    def operator_of(self, settings: "Settings") -> "Operator":
        """What use cases work with under other settings; the caller closes its store."""
        from nsa_ops.clock import SystemClock
        from nsa_ops.context import Operator, connect_audited
        from nsa_ops.store import REGISTRY_NAME, Store

        self.close_state(settings)
        return Operator(
            settings=settings,
            store=Store(
                settings.state_dir / REGISTRY_NAME,
                unrecorded=self._unrecorded,
                scratch_dirs=settings.scratch_dirs,
            ),
            clock=SystemClock(),
            tell=self.tell,
            connect=partial(
                connect_audited,
                tell=self.tell if self.is_verbose else None,
                unrecorded=self._unrecorded,
                timeout_s=self.options.timeout_s,
                warn=self._warn_once,
            ),
            timeout_s=self.options.timeout_s,
            show_work=self._show_work(settings),
        )

    def close_state(self, settings: "Settings") -> None:
        """Take every right on the state folder and what is in it from others.

        Raises:
            LocalResourceError: If it belongs to another user.
        """
        from nsa_ops.local_files import close_tree

        if notice := close_tree(settings.state_dir).notice:
            self._warn_once(notice)

    def _tell_unrecorded(self, why: str) -> None:
        self._warn_once(f"not recorded: {why}")

    def _warn_once(self, line: str) -> None:
        if line not in self._told:
            self._told.add(line)
            warn(line)

    @property
    def is_verbose(self) -> bool:
        """`-v`: every command on the pod is shown."""
        return self.options.verbosity > 0

    def close(self) -> None:
        """Close the registry if it was opened, and to others what this command has made."""
        if "operator" in self.__dict__:
            self.operator.store.close()
            if self._changes:
                self.close_state(self.operator.settings)

    def tell(self, line: str) -> None:
        """One line about what is being done, on stderr; silent with `-q`."""
        if self.options.verbosity > _QUIET:
            self._display.line(line)

    @cached_property
    def _display(self) -> Display:
        return Display(_print_line)

    def _show_work(self, settings: "Settings") -> "ShowWork":
        """A bar on a terminal that can draw one, else lines; nothing with `-q`."""
        from nsa_ops.context import show_nothing

        if self.options.verbosity <= _QUIET:
            return show_nothing
        can_draw = settings.ssh_environment.get("TERM", "dumb") != "dumb"
        self._display.is_terminal = sys.stderr.isatty() and can_draw
        return self._display.working

    def show(
        self,
        result: ResultT,
        view: "Callable[[Console, ResultT], None]",
        *,
        failure: OpsError | None = None,
    ) -> None:
        """The result on stdout: one JSON envelope, or drawn.

        Args:
            result: What was found or done.
            view: Draws it.
            failure: What the result means where it is a failure; ends the command after it.

        Raises:
            typer.Exit: With the code of the failure.
        """
        if self.options.json:
            typer.echo(envelope(self.command, result, failure))
        else:
            view(self.console, result)
        if failure is not None:
            complain(failure)
            raise typer.Exit(failure.exit_code)

    def refuse_raw_terminal(self) -> None:
        """Keep unchanged bytes of a pod away from a terminal, which would obey them.

        Raises:
            ConfigurationError: If stdout is a terminal.
        """
        if sys.stdout.isatty():
            message = "`--raw` writes a pod's bytes unchanged, and a terminal would obey them"
            hint = "Leave `--raw` out, or send it to a file or pipe: `--raw > FILE`"
            raise ConfigurationError(message, hint=hint)

    def write_raw(self, content: bytes) -> None:
        """Unchanged bytes on stdout, for `--raw` alone."""
        sys.stdout.buffer.write(content)
        sys.stdout.buffer.flush()

    def write_lines(self, text: str) -> None:
        """Printable lines of a pod on stdout, as they come."""
        sys.stdout.write(text)
        sys.stdout.flush()

    @cached_property
    def console(self) -> "Console":
        """Where results are drawn."""
        from nsa_ops.cli.console import make_console

        color = self.options.color or self.settings.values.color
        return make_console(color, is_color_forbidden=self.settings.is_color_forbidden)

    def agree(self, plan: "Plan", *, is_reversible: bool = True) -> None:
        """Show a plan and return only if the operator agrees.

        `--plan` prints it and ends the command. A person at a terminal is asked. Off a terminal, or
        with `--no-input`, nobody can be asked: only a reversible plan is carried out without `-y`.

        Raises:
            typer.Exit: After `--plan`, or if the answer was no.
            ConfigurationError: If it needs `-y`.
        """
        from nsa_ops.cli.console import draw_plan, plan_lines

        if self.options.plan:
            self.show(plan, draw_plan)
            raise typer.Exit(0)
        if not plan.changes:
            return
        can_ask = not self.options.no_input and not self.options.json and sys.stdin.isatty()
        is_asked = can_ask and not self.options.yes
        for line in plan_lines(plan, brief=not (is_asked or self.is_verbose)):
            self.tell(line)
        if self.options.yes:
            return
        if can_ask:
            if not typer.confirm("Continue?", default=is_reversible, err=True):
                self.tell("nothing was changed")
                raise typer.Exit(0)
            return
        if not is_reversible:
            message = f"`{self.command}` cannot be undone, and nobody can be asked to confirm it"
            raise ConfigurationError(message, hint="Repeat it with `-y`")
