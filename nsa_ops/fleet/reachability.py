"""Probe who reaches whom: an agent listens on each pod of a run while all the others call it."""

import json
import secrets
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pydantic import Field

from nsa_core.config.base import TolerantModel, one_line
from nsa_core.rundir.bounded_json import parse_model
from nsa_ops.agents import ask_each
from nsa_ops.context import Operator, PodLink
from nsa_ops.errors import DeadlineError, VerificationError
from nsa_ops.fleet.meeting import (
    CalledAddress,
    Meeting,
    PodCalls,
    PodNetwork,
    addresses_of,
    choose_meeting,
)
from nsa_ops.pod import reach
from nsa_ops.remote.transport import MAX_ANSWER_BYTES, QUICK_S

#: How long a connection may take, and what is sent over each that comes about.
CALL_S = 4.0
NUM_BYTES = 4 * 2**20
#: A listener waits so long for its callers, whose interpreters have to start first.
LISTEN_S = 25.0
#: Reads the agent and what it is asked from stdin, so that neither is in a list of processes.
_BOOTSTRAP = (
    "import json, sys; source, asked = json.load(sys.stdin); scope = {'__name__': 'reach'}; "
    "exec(compile(source, 'reach.py', 'exec'), scope); scope['main'](asked)"
)
_Answer = TypeVar("_Answer", bound=TolerantModel)


class OpenedPorts(TolerantModel):
    """First line of a listener."""

    free_port: int = Field(ge=1, le=65_535)
    port_problem: str = Field("", max_length=400)


class CalledAddresses(TolerantModel):
    """Answer of a caller."""

    found: list[CalledAddress] = Field(max_length=4096)


def probe_meeting(
    operator: Operator, links: Sequence[PodLink], port: int, *, is_first_fixed: bool = False
) -> Meeting:
    """Have the pods call each other, and choose where their ranks meet, as `choose_meeting`.

    Raises:
        RefusedError, ConfigurationError: As `choose_meeting`.
        OpsError: If a pod cannot be asked.
    """
    operator.tell(f"probing who reaches whom: {', '.join(one.record.name for one in links)}")
    with operator.work("probing the network between the pods"):
        networks = ask_each(links, lambda link: _ask(link, {"do": "describe"}, PodNetwork))
        calls = _call_each_other(operator, links, networks, port)
    return choose_meeting(calls, port, is_first_fixed=is_first_fixed)


@dataclass
class _Listening:
    """A listener of one pod: its first line, as soon as that has arrived."""

    opened: OpenedPorts | None = None
    content: bytes = b""

    def __post_init__(self) -> None:
        self.has_answered = threading.Event()

    def __call__(self, piece: bytes) -> None:
        """Take the next bytes."""
        self.content += piece
        line, end, _ = self.content.partition(b"\n")
        if end and self.opened is None:
            with suppress(ValueError):  # what the pod's start-up files print is no answer
                self.opened = parse_model(OpenedPorts, line)
            self.has_answered.set()


def _call_each_other(
    operator: Operator, links: Sequence[PodLink], networks: Sequence[PodNetwork], port: int
) -> list[PodCalls]:
    token = secrets.token_hex(32)
    numbers = range(len(links))
    listening = [_Listening() for _ in links]
    with ThreadPoolExecutor(len(links)) as pool:
        listeners: list[Future[Any]] = [
            pool.submit(_listen, operator.link(links[i].record), listening[i], {
                "do": "listen", "token": token, "me": i, "port": port, "timeout_s": CALL_S,
                "seconds": LISTEN_S, "callers": [j for j in numbers if j != i],
            })
            for i in numbers
        ]  # fmt: skip
        opened = [_await_ports(links[i], one, listeners[i]) for i, one in enumerate(listening)]
        targets = [
            {"number": i, "addresses": addresses_of(networks, i), "port": port,
             "free_port": opened[i].free_port}
            for i in numbers
        ]  # fmt: skip
        base = {"do": "call", "token": token, "timeout_s": CALL_S, "num_bytes": NUM_BYTES}
        asked = [
            {**base, "me": i, "listeners": [one for one in targets if one["number"] != i]}
            for i in numbers
        ]
        found = ask_each(numbers, lambda i: _ask(links[i], asked[i], CalledAddresses))
    return [
        PodCalls(link.record.name, networks[i], opened[i].port_problem, tuple(found[i].found))
        for i, link in enumerate(links)
    ]


def _listen(link: PodLink, sink: _Listening, asked: dict[str, Any]) -> None:
    argv, stdin = _command(link, asked)
    timeout_s = LISTEN_S + QUICK_S
    done = link.transport.run_into(
        argv, sink, stdin=stdin, timeout_s=timeout_s, max_bytes=MAX_ANSWER_BYTES
    )
    if sink.opened is None:
        raise _no_answer(link, done.last_error_line or "nothing")


def _await_ports(link: PodLink, listening: _Listening, running: Future[Any]) -> OpenedPorts:
    """Wait until a listener has said its ports; its error, if it ended without."""
    running.add_done_callback(lambda _: listening.has_answered.set())
    if not listening.has_answered.wait(QUICK_S):
        message = f"Pod `{link.record.name}` did not open a port within {QUICK_S:g} s"
        raise DeadlineError(message, hint=f"Try `nsa-ops preflight {link.record.name}`")
    if listening.opened is None:
        running.result(QUICK_S)
        raise _no_answer(link, "nothing that can be read")
    return listening.opened


def _ask(link: PodLink, asked: dict[str, Any], kind: type[_Answer]) -> _Answer:
    argv, stdin = _command(link, asked)
    done = link.transport.run(
        argv, stdin=stdin, timeout_s=LISTEN_S + QUICK_S, max_bytes=MAX_ANSWER_BYTES
    )
    lines = done.stdout.strip().splitlines()
    try:
        return parse_model(kind, lines[-1] if lines else b"")
    except ValueError as error:
        raise _no_answer(link, done.last_error_line or one_line(error)) from error


def _command(link: PodLink, asked: dict[str, Any]) -> tuple[tuple[str, ...], bytes]:
    source = Path(reach.__file__).read_text(encoding="utf-8")
    return (link.record.python, "-I", "-c", _BOOTSTRAP), json.dumps([source, asked]).encode()


def _no_answer(link: PodLink, said: str) -> VerificationError:
    pod = link.record
    message = f"Pod `{pod.name}` gave no answer about its network: {said}"
    return VerificationError(message, hint=f"Check that `{pod.python} -I -V` works on the pod")
