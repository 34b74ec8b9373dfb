"""The transport's benchmarks on this machine: `python -m tests.integration.bench_transport FILE`.

A real sshd on loopback and proxies in front of it: what `nsa-ops bench transport` measures, a dead
link, 20 pods behind 300 ms of delay, and the time of `--help`. Three rounds each, ratios within a
round. It asserts nothing: the numbers go into a file.
"""

import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

from nsa_ops.bench.transport_speed import bench_transport
from nsa_ops.context import open_transport
from nsa_ops.errors import PodUnreachableError
from nsa_ops.pod.messages import ProbeDocument
from nsa_ops.remote.openssh import OpenSSHTransport
from nsa_ops.remote.snapshot import take_snapshot
from nsa_ops.remote.transport import MAX_OUTPUT_BYTES, Transport
from nsa_ops.runs.choose import look_at_pods
from nsa_ops.settings import Settings
from nsa_ops.store import PodRecord, RunRecord
from tests.integration.ssh_pod import SshPod
from tests.integration.ssh_server import openssh, ssh_server
from tests.integration.tcp_proxy import tcp_proxy

ROUNDS = 3
NUM_PODS = 20
DELAY_S = 0.3
_ANSWER = ProbeDocument(pod_unix_s=0.0, boot_id="b", runs=[]).model_dump_json()


def seconds(act: Callable[[], object]) -> float:
    began_s = time.perf_counter()
    act()
    return time.perf_counter() - began_s


def measure_help(pod: SshPod) -> list[float]:
    """CPU seconds of `nsa-ops --help`."""
    found = []
    for _ in range(ROUNDS):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(
            [*pod.command, "--help"], env=pod.environment, capture_output=True, check=True
        )
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        found.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return found


def measure_dead_link(pod: SshPod) -> list[float]:
    """Seconds until a link on which nothing passes is named."""
    found = []
    for number in range(ROUNDS):
        target = pod.server.target(pod.folder / f"dead-{number}", pod.proxy.port)
        with openssh(target) as transport:
            transport.run(("true",), timeout_s=20)
            pod.proxy.is_stalled = True
            began_s = time.perf_counter()
            try:
                transport.run(("sleep", "60"), timeout_s=60)
            except PodUnreachableError:
                found.append(time.perf_counter() - began_s)
            pod.proxy.is_stalled = False
            pod.proxy.cut()
    return found


class LightAgent:
    """A door whose agent answers with a constant: the machine that measures is all the pods too,
    and starting 20 interpreters at once on it would measure its processors and not the links."""

    def __init__(self, inner: Transport) -> None:
        self._inner = inner
        self.where = inner.where

    def run(
        self, _argv: Any, *, stdin: bytes = b"", timeout_s: float, max_bytes: int = MAX_OUTPUT_BYTES
    ) -> Any:
        return self._inner.run(
            ("printf", "%s", _ANSWER), stdin=stdin, timeout_s=timeout_s, max_bytes=max_bytes
        )


def measure_fleet(pod: SshPod) -> list[dict[str, float]]:
    """20 pods behind 300 ms of delay in each direction: all at once, and each alone."""
    with ExitStack() as stack:
        doors: dict[str, OpenSSHTransport] = {}

        def connect(record: PodRecord, _settings: Settings) -> Any:
            return LightAgent(doors[record.name])

        operator = pod.operator(connect)
        stack.callback(operator.store.close)
        runs = []
        for number in range(NUM_PODS):
            proxy = stack.enter_context(tcp_proxy(pod.server.port))
            target = pod.server.target(pod.folder / "fleet", proxy.port, f"pod-{number}")
            name = f"pod{number}"
            doors[name] = stack.enter_context(openssh(target))
            operator.store.add_pod(
                PodRecord(
                    name, f"pod-{number}", "ssh", "/p", "python3", "", 0.0, str(target.address)
                )
            )
            runs.append(RunRecord(f"r{number}", name, "tiny-cpu", "cpu", "0" * 16, "", 0.0))
            doors[name].run(("true",), timeout_s=20)
            proxy.delay_s = DELAY_S
        found = []
        for _ in range(ROUNDS):
            alone = [seconds(lambda run=run: look_at_pods(operator, [run])) for run in runs[::5]]
            together = seconds(lambda: look_at_pods(operator, runs))
            problems = [one.problem for one in look_at_pods(operator, runs) if one.problem]
            found.append({
                "together_s": together, "slowest_alone_s": max(alone),
                "ratio": together / max(alone), "problems": len(problems),
            })  # fmt: skip
        return found


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="nsa-bench-") as name, ExitStack() as stack:
        folder = Path(name)
        server = stack.enter_context(ssh_server(folder / "sshd"))
        proxy = stack.enter_context(tcp_proxy(server.port))
        behind = SshPod(folder, server=server, proxy=proxy)
        direct = SshPod(folder, server=server, proxy=proxy, state="direct")
        proxy.port, through = server.port, proxy.port  # no proxy in the way of the bytes
        direct.add()
        operator = direct.operator()
        measured = bench_transport(operator, "here", num_rounds=ROUNDS)
        record = operator.store.find_pod("here")
        assert record is not None
        door = open_transport(record, operator.settings)
        assert isinstance(door, OpenSSHTransport)
        door.close()
        operator.store.close()
        proxy.port = through
        help_s, dead_s, fleet = (
            measure_help(behind),
            measure_dead_link(behind),
            measure_fleet(behind),
        )
    ssh = subprocess.run(["ssh", "-V"], capture_output=True, text=True, check=True).stderr.strip()
    result = {
        "bench": "transport-loopback",
        "machine": f"{os.cpu_count()} processors, {platform.system()} {platform.machine()}",
        "ssh": ssh,
        "python": platform.python_version(),
        "commit": take_snapshot().commit,
        "command": "python -m tests.integration.bench_transport",
        "rounds": [
            asdict(one) | {"command_ratio": one.command_ratio, "pull_share": one.pull_share}
            for one in measured.rounds
        ],
        "command_ratio": measured.command_ratio,
        "pull_share": measured.pull_share,
        "busy_per_cpu": measured.busy_per_cpu,
        "help_cpu_s": help_s,
        "dead_link_named_s": dead_s,
        "fleet_of_20": fleet,
        "fleet_ratio": statistics.median(one["ratio"] for one in fleet),
    }
    text = json.dumps(result, indent=1) + "\n"
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(text)
    sys.stdout.write(text)


if __name__ == "__main__":
    main()
