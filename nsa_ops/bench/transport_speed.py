"""How much a pod's transport costs beside bare ssh over the very same shared link."""

import os
import secrets
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from nsa_ops.backup.disk import check_space, check_space_there, read_free_bytes
from nsa_ops.context import Operator, PodLink, open_transport
from nsa_ops.errors import ConfigurationError, LocalResourceError, PodUnreachableError
from nsa_ops.pods.known import choose_pod
from nsa_ops.remote.files import pull_file
from nsa_ops.remote.openssh import OpenSSHTransport
from nsa_ops.remote.transport import QUICK_S

COMMANDS = 20
_MIB = 2**20
_MAKE_S = 300.0
_HINT = "Free space there, or measure with `--mib 20`"

#: Writes a file of random bytes and prints its sha256, as a checkpoint's manifest would know it.
_MAKE = """
umask 077
head -c "$2" /dev/urandom > "$1" || exit
sum=$(sha256sum < "$1") && echo "${sum%% *}"
"""


@dataclass(frozen=True)
class Round:
    """One round: each figure beside what bare ssh took for the same a moment before or after.

    Attributes:
        command_ms: Median of a warm command through the transport, audit included.
        bare_command_ms: Median of the same command by bare `ssh` over the shared link.
        pull_s: A pull: resumable, hashed, fsynced, renamed.
        bare_pull_s: `ssh cat` of the same file into a file, neither hashed nor fsynced.
    """

    command_ms: float
    bare_command_ms: float
    pull_s: float
    bare_pull_s: float

    @property
    def command_ratio(self) -> float:
        """Time of a command; bare ssh is 1."""
        return self.command_ms / self.bare_command_ms

    @property
    def pull_share(self) -> float:
        """Speed of a pull; `ssh cat` is 1."""
        return self.bare_pull_s / self.pull_s


@dataclass(frozen=True)
class TransportBench:
    """What was measured.

    Attributes:
        pod: Pod.
        where: How it is reached.
        num_bytes: Size of the file that was pulled.
        rounds: Repetitions.
        command_ratio: Median over the rounds.
        pull_share: Median over the rounds.
        busy_per_cpu: Load average of this machine over its processors at the end; above 1 the
            processors were fought for.
    """

    pod: str
    where: str
    num_bytes: int
    rounds: list[Round]
    command_ratio: float
    pull_share: float
    busy_per_cpu: float


def bench_transport(
    operator: Operator, pod_name: str | None, *, num_rounds: int = 3, mib: int = 200
) -> TransportBench:
    """Measure a pod's transport; leaves nothing there and nothing here.

    Raises:
        ConfigurationError: If the pod is not reached by OpenSSH.
        LocalResourceError: If the disk of the pod or of this machine has no room for the file.
        PodUnreachableError: If bare ssh fails.
    """
    wanted = pod_name or operator.settings.values.pod or None
    link = operator.link(choose_pod(operator.store, wanted))
    bare = open_transport(link.record, operator.settings)
    if not isinstance(bare, OpenSSHTransport):
        message = f"Pod `{link.record.name}` is of kind `{link.record.kind}`: there is no bare ssh"
        raise ConfigurationError(message, hint="Name a pod that was added with `--transport ssh`")
    check_space_there(link.transport, link.root, mib * _MIB, "the bench", hint=_HINT)
    state_dir = operator.settings.state_dir
    check_space(state_dir, mib * _MIB, read_free_bytes(state_dir), "the bench", hint=_HINT)
    source = link.root / f".bench-{secrets.token_hex(6)}"
    try:
        sha256 = _make_file(link, source, mib * _MIB)
        with tempfile.TemporaryDirectory(prefix="bench-", dir=state_dir) as here:
            rounds = [
                _round(link, bare, source, Path(here), mib * _MIB, sha256)
                for _ in range(num_rounds)
            ]
    finally:
        link.transport.run(("rm", "-f", "--", str(source)), timeout_s=QUICK_S)
    return TransportBench(
        pod=link.record.name,
        where=link.transport.where,
        num_bytes=mib * _MIB,
        rounds=rounds,
        command_ratio=statistics.median(one.command_ratio for one in rounds),
        pull_share=statistics.median(one.pull_share for one in rounds),
        busy_per_cpu=os.getloadavg()[0] / (os.cpu_count() or 1),
    )


def _make_file(link: PodLink, source: PurePosixPath, num_bytes: int) -> str:
    argv = ("sh", "-c", _MAKE, "sh", str(source), str(num_bytes))
    done = link.transport.run(argv, timeout_s=_MAKE_S)
    if done.exit_code:
        message = f"A file for the bench could not be made on the pod: {done.last_error_line}"
        raise LocalResourceError(message, hint=_HINT)
    return done.text.strip()


def _round(
    link: PodLink,
    bare: OpenSSHTransport,
    source: PurePosixPath,
    here: Path,
    num_bytes: int,
    sha256: str,
) -> Round:
    ours, theirs = [], []
    for _ in range(COMMANDS):
        ours.append(_seconds(lambda: link.transport.run(("true",), timeout_s=QUICK_S)))
        theirs.append(_seconds(lambda: _ssh(bare, "true", here / "nothing")))
    pulled, copied = here / "pulled", here / "copied"
    bare_pull_s = _seconds(lambda: _ssh(bare, f"cat {source}", copied))
    copied.unlink()
    pull_s = _seconds(
        lambda: pull_file(link.transport, source, pulled, size=num_bytes, sha256=sha256)
    )
    pulled.unlink()
    return Round(
        command_ms=1000 * statistics.median(ours),
        bare_command_ms=1000 * statistics.median(theirs),
        pull_s=pull_s,
        bare_pull_s=bare_pull_s,
    )


def _seconds(act: Callable[[], object]) -> float:
    began_s = time.perf_counter()
    act()
    return time.perf_counter() - began_s


def _ssh(bare: OpenSSHTransport, command: str, target: Path) -> None:
    """What a person would type, over the same shared link."""
    with target.open("wb") as file:
        done = subprocess.run(
            bare.bare_argv(command), stdin=subprocess.DEVNULL, stdout=file,
            stderr=subprocess.PIPE, env=bare.environment, check=False,
        )  # fmt: skip
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip()
        message = f"Bare ssh to {bare.where} ended with code {done.returncode}: {said}"
        raise PodUnreachableError(message, hint="Try `nsa-ops pod ssh`")
