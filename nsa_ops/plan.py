"""Plan: what a command will do, step by step, before it does anything."""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field

from nsa_ops.quantities import count_of


@dataclass(frozen=True)
class Step:
    """One step of a plan.

    Attributes:
        name: Short name, such as `ship code`.
        detail: What it does, in one line.
        command: The exact command on the pod; empty for a step on this machine.
        files: Files it writes, with their hashes where they are known.
        is_done: Already true, nothing to do.
    """

    name: str
    detail: str
    command: tuple[str, ...] = ()
    files: tuple[str, ...] = ()
    is_done: bool = False

    @property
    def shell(self) -> str:
        """The command as a shell would take it, on one line; a script of several is counted."""
        return shlex.join(map(_on_one_line, self.command))


def _on_one_line(word: str) -> str:
    if "\n" not in word:
        return word
    return f"(script of {count_of(len(word.strip().splitlines()), 'line')})"


@dataclass(frozen=True)
class Plan:
    """What a command will do, in order.

    Attributes:
        notes: What the operator should know before saying yes.
    """

    title: str
    steps: tuple[Step, ...]
    notes: tuple[str, ...] = field(default=())

    @property
    def changes(self) -> bool:
        """Whether any step is still to be done."""
        return any(not step.is_done for step in self.steps)


def plan_of(title: str, steps: Sequence[Step], notes: Sequence[str] = ()) -> Plan:
    """A plan from any sequences."""
    return Plan(title, tuple(steps), tuple(notes))
