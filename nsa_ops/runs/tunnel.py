"""Tunnel: TensorBoard of a run on its pod, bound to loopback there, on a loopback port here."""

import os
import re
import secrets
import select
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import IO

from nsa_ops.context import LOCAL, SSH, Operator, PodLink, open_transport
from nsa_ops.errors import (
    ConfigurationError,
    DeadlineError,
    LocalResourceError,
    PodUnreachableError,
)
from nsa_ops.plan import Plan, Step, plan_of
from nsa_ops.remote.frame import BOOTSTRAP, encode_call
from nsa_ops.remote.openssh import OpenSSHTransport
from nsa_ops.remote.pump import close_quietly
from nsa_ops.remote.transport import QUICK_S, last_line
from nsa_ops.runs.choose import choose_record, link_of

LOOPBACK = "127.0.0.1"
READY_S = 60.0
_END_S = 5.0
_READY = re.compile(rb"nsa-ready (?P<port>\d{1,5}) (?P<pid>\d+);")
#: Marks of a framed call, which are no words of the command.
_MARKS = re.compile(r"[0-9a-f]{32}[{}]\w*;")
#: Stands for the pod; the shared link knows where it is.
_HOST = "pod"
CHECK_S = 2.0
_PROBE = "import tensorboard.main"

# Lives as long as its stdin: a link that dies closes it, and nothing stays behind. A port that is
# taken in between ends TensorBoard with its own words.
_SERVE = """
port=$("$1" -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0))
print(s.getsockname()[1])') || exit 1
log=$(mktemp) || exit 1
"$1" -m tensorboard.main --logdir "$2" --host 127.0.0.1 --port "$port" </dev/null >"$log" 2>&1 &
pid=$!
trap 'kill "$pid" 2>/dev/null; rm -f -- "$log"' EXIT
trap 'exit 0' HUP INT TERM PIPE
while kill -0 "$pid" 2>/dev/null; do
  "$1" -c 'import socket, sys; socket.create_connection(("127.0.0.1", int(sys.argv[1])), 1)' \
    "$port" 2>/dev/null && break
  sleep 0.2
done
kill -0 "$pid" 2>/dev/null || { cat -- "$log" >&2; exit 1; }
printf 'nsa-ready %s %s;\\n' "$port" "$pid"
cat >/dev/null
"""


@dataclass(frozen=True)
class TunnelPlan:
    """A tunnel that may be opened.

    Attributes:
        run_id: Run.
        link: Its pod.
        argv: Command on the pod.
        local_port: Port here; on a pod that is this machine, TensorBoard's own is used.
        plan: The same for people.
    """

    run_id: str
    link: PodLink
    argv: tuple[str, ...]
    local_port: int
    plan: Plan


@dataclass(frozen=True)
class Tunnel:
    """A tunnel that is open.

    Attributes:
        run_id: Run.
        url: Where TensorBoard is on this machine.
        pod: Pod that serves it.
        pod_port: Its port there, on loopback.
        pod_pid: Its process there.
    """

    run_id: str
    url: str
    pod: str
    pod_port: int
    pod_pid: int


@dataclass(frozen=True)
class LiveTunnel:
    """A tunnel, and the process here that keeps it alive."""

    tunnel: Tunnel
    process: "subprocess.Popen[bytes]"


def plan_tunnel(operator: Operator, run_id: str | None, port: int = 0) -> TunnelPlan:
    """What a tunnel to a run does.

    Args:
        operator: Who asks.
        run_id: Run; None where only one fits.
        port: Port of this machine; 0 takes a free one.

    Raises:
        ConfigurationError: If the pod is reached by a transport that carries no port.
        LocalResourceError: If the pod has no TensorBoard.
    """
    record = choose_record(operator, run_id)
    link = link_of(operator, record)
    if link.record.kind not in {LOCAL, SSH}:
        message = f"Pod `{link.record.name}` is reached by {link.record.kind}, which has no tunnel"
        raise ConfigurationError(
            message, hint="Add it as an ssh pod, or pull the run and look here"
        )
    _require_tensorboard(link, record.run_id)
    folder = str(link.run_dir(record.run_id) / "tb")
    argv = ("sh", "-c", _SERVE, "sh", link.record.python, folder)
    local_port = port or free_port()
    steps = [
        Step(
            "serve",
            "start TensorBoard on the pod, on loopback; it ends with this command",
            command=(link.record.python, "-m", "tensorboard.main", "--logdir", folder),
        ),
        Step("forward", f"lead http://{LOOPBACK}:{local_port} there over the shared ssh link"),
    ]
    shown = steps if link.record.kind == SSH else steps[:1]
    plan = plan_of(f"Tunnel to TensorBoard of {record.run_id}", shown)
    return TunnelPlan(record.run_id, link, argv, local_port, plan)


def _require_tensorboard(link: PodLink, run_id: str) -> None:
    done = link.transport.run((link.record.python, "-c", _PROBE), timeout_s=QUICK_S)
    if done.exit_code:
        message = f"Pod `{link.record.name}` has no TensorBoard: {done.last_error_line}"
        hint = (
            f"Run `{link.record.python} -m pip install tensorboard` there, or look here after "
            f"`nsa-ops backup pull {run_id}`"
        )
        raise LocalResourceError(message, hint=hint)


def free_port() -> int:
    """A port of this machine's loopback that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        return int(probe.getsockname()[1])


@contextmanager
def open_tunnel(operator: Operator, planned: TunnelPlan) -> Iterator[LiveTunnel]:
    """Serve and forward for the length of a block; nothing of it stays behind.

    Raises:
        LocalResourceError: If TensorBoard does not start, or the port is taken.
        DeadlineError: If TensorBoard is not ready in time.
        PodUnreachableError: If the pod does not answer.
    """
    transport = open_transport(planned.link.record, operator.settings, tell=operator.tell)
    if not isinstance(transport, OpenSSHTransport):
        environment = operator.settings.login_environment
        with _serving(("sh", "-c", BOOTSTRAP), planned.argv, environment) as (process, port, pid):
            yield _live(planned, process, port, port, pid)
        return
    transport.run(("true",), timeout_s=QUICK_S)  # opens the shared link, or says why it cannot
    program = [*transport.shared_argv, _HOST, BOOTSTRAP]
    with _serving(program, planned.argv, transport.environment) as (process, port, pid):
        ends = f"{LOOPBACK}:{planned.local_port}:{LOOPBACK}:{port}"
        done = _control(transport, "forward", ends)
        if done.returncode:
            said = last_line(done.stderr.decode(errors="replace")) or f"exit {done.returncode}"
            message = f"Port {planned.local_port} of this machine cannot be opened: {said}"
            raise LocalResourceError(message, hint="Name another one with `--port`")
        try:
            yield _live(planned, process, planned.local_port, port, pid)
        finally:
            with suppress(DeadlineError):  # a link that is gone has closed the port already
                _control(transport, "cancel", ends)


def _live(
    planned: TunnelPlan, process: "subprocess.Popen[bytes]", port: int, pod_port: int, pid: int
) -> LiveTunnel:
    pod = planned.link.record.name
    return LiveTunnel(
        Tunnel(planned.run_id, f"http://{LOOPBACK}:{port}", pod, pod_port, pid), process
    )


def _control(
    transport: OpenSSHTransport, verb: str, ends: str
) -> "subprocess.CompletedProcess[bytes]":
    """Let the shared link open (`forward`) or close (`cancel`) a port of this machine."""
    argv = [*transport.shared_argv, "-O", verb, "-L", ends, _HOST]
    try:
        return subprocess.run(
            argv, stdin=subprocess.DEVNULL, capture_output=True, env=transport.environment,
            timeout=QUICK_S, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        message = f"The shared link to {transport.where} did not answer within {QUICK_S:g} s"
        raise DeadlineError(message, hint="Repeat it") from error


@contextmanager
def _serving(
    program: Sequence[str], argv: Sequence[str], environment: dict[str, str]
) -> Iterator[tuple["subprocess.Popen[bytes]", int, int]]:
    """Run a command that lives as long as its stdin; gives its process, its port and its pid.

    Args:
        program: Gives its stdin to `sh` as the bootstrap does, such as ssh with its options.
        argv: The command; it says `nsa-ready PORT PID;` once it can be used.
        environment: Environment of the program.
    """
    process = subprocess.Popen(
        list(program), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        env=environment, start_new_session=True,
    )  # fmt: skip
    try:
        with suppress(BrokenPipeError):  # what it said instead is read below
            _stream(process.stdin).write(encode_call(argv, secrets.token_hex(16)))
            _stream(process.stdin).flush()
        yield (process, *_await_ready(_stream(process.stdout)))
    finally:
        close_quietly(process.stdin)
        try:
            process.wait(_END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        close_quietly(process.stdout)


def _await_ready(out: IO[bytes]) -> tuple[int, int]:
    """The port and pid that the command prints once it can be used."""
    said, end_s = b"", time.monotonic() + READY_S
    while (left_s := end_s - time.monotonic()) > 0 and select.select([out], [], [], left_s)[0]:
        piece = os.read(out.fileno(), 4096)
        said += piece
        if found := _READY.search(said):
            return int(found["port"]), int(found["pid"])
        if not piece:
            words = last_line(_MARKS.sub("", said.decode(errors="replace")))
            message = f"TensorBoard ended before it could be used: {words or 'it said nothing'}"
            raise LocalResourceError(message)
    message = f"TensorBoard could not be used within {READY_S:g} s"
    raise DeadlineError(message, hint="See what the pod is busy with: `nsa-ops status`")


def _stream(stream: IO[bytes] | None) -> IO[bytes]:
    if stream is None:
        message = "a process was started without its streams"
        raise RuntimeError(message)
    return stream


def keep_open(operator: Operator, live: LiveTunnel, for_s: float | None = None) -> None:
    """Wait until the time is over, or the tunnel has ended by itself.

    Raises:
        PodUnreachableError: If the link, or TensorBoard, is gone.
    """
    began_s = operator.clock.monotonic_s()
    while for_s is None or operator.clock.monotonic_s() - began_s < for_s:
        if live.process.poll() is not None:
            tunnel = live.tunnel
            message = f"The tunnel to pod `{tunnel.pod}` ended: the link, or TensorBoard, is gone"
            raise PodUnreachableError(message, hint=f"Repeat `nsa-ops tunnel {tunnel.run_id}`")
        operator.clock.sleep(CHECK_S)
