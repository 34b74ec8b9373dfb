"""Tunnel: TensorBoard of a run on its pod, bound to loopback there, on a loopback port here."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from nsa_ops.context import LOCAL, SSH, Operator, PodLink, open_transport
from nsa_ops.errors import (
    ConfigurationError,
    LocalResourceError,
    PodUnreachableError,
)
from nsa_ops.plan import Plan, Step, plan_of
from nsa_ops.remote.forward import LOOPBACK, Forward, Held, await_ready, free_port, hold
from nsa_ops.remote.frame import BOOTSTRAP
from nsa_ops.remote.openssh import OpenSSHTransport
from nsa_ops.remote.transport import QUICK_S
from nsa_ops.runs.choose import choose_record, link_of

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
class Opened:
    """A tunnel, and what keeps it alive."""

    tunnel: Tunnel
    held: Held


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


@contextmanager
def open_tunnel(operator: Operator, planned: TunnelPlan) -> Iterator[Opened]:
    """Serve and forward for the length of a block; nothing of it stays behind.

    Raises:
        LocalResourceError: If TensorBoard does not start, or the port is taken.
        PodUnreachableError: If the pod does not answer.
    """
    link = planned.link
    door = open_transport(link.record, operator.settings, tell=operator.tell)
    with ExitStack() as ends:
        if not isinstance(door, OpenSSHTransport):
            environment = operator.settings.login_environment
            held = await_ready(("sh", "-c", BOOTSTRAP), planned.argv, environment)
            ends.callback(held.close)
            yield _opened(planned, held, held.port)
            return
        held = hold(door, planned.argv)
        ends.callback(held.close)
        forward = Forward(door, planned.local_port, held.port)
        forward.open()
        ends.callback(forward.close)
        yield _opened(planned, held, planned.local_port)


def _opened(planned: TunnelPlan, held: Held, port: int) -> Opened:
    tunnel = Tunnel(
        run_id=planned.run_id,
        url=f"http://{LOOPBACK}:{port}",
        pod=planned.link.record.name,
        pod_port=held.port,
        pod_pid=held.pid,
    )
    return Opened(tunnel, held)


def keep_open(operator: Operator, opened: Opened, for_s: float | None = None) -> None:
    """Wait until the time is over, or the tunnel has ended by itself.

    Raises:
        PodUnreachableError: If the link, or TensorBoard, is gone.
    """
    began_s = operator.clock.monotonic_s()
    while for_s is None or operator.clock.monotonic_s() - began_s < for_s:
        if opened.held.exit_code is not None:
            tunnel = opened.tunnel
            message = f"The tunnel to pod `{tunnel.pod}` ended: the link, or TensorBoard, is gone"
            raise PodUnreachableError(message, hint=f"Repeat `nsa-ops tunnel {tunnel.run_id}`")
        operator.clock.sleep(CHECK_S)
