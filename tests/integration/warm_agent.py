"""The pod's short agents (probe, act, verify) in processes forked from one that has imported them.

A stand-in interpreter of a test's pod hands its words, variables, folder and streams to this server
over a unix socket, waits, and ends with the agent's exit code; `write_client` makes it. An agent
whose client is gone is killed, as a command is whose connection was lost. What this leaves out, the
start of an interpreter on a pod, the demo, the bare machine and the hostile suite do for real.
"""

import array
import contextlib
import gc
import importlib
import marshal
import os
import select
import signal
import socket
import sys
from pathlib import Path
from types import ModuleType

AGENTS = ("nsa_ops.pod.probe", "nsa_ops.pod.act", "nsa_ops.pod.verify")
_MAX_BYTES = 2**20
#: Starts in a third of the time that `import socket` alone would take.
_CLIENT = """\
import _socket, array, marshal, os, sys
server = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)
server.connect(sys.argv[1])
asked = marshal.dumps((sys.argv[3:], dict(os.environ), os.getcwd()))
rights = (_socket.SOL_SOCKET, _socket.SCM_RIGHTS, array.array("i", [0, 1, 2]))
server.sendmsg([len(asked).to_bytes(4, "big")], [rights])
server.sendall(asked)
os._exit(server.recv(1)[0])
"""


def write_client(path: Path, server: str, python_path: Path) -> None:
    """An interpreter that asks the server for agents and is Python for everything else."""
    client = path.with_name(f"{path.name}-client.py")
    client.write_text(_CLIENT)
    agents = "|".join(f'"-m {name}"' for name in AGENTS)
    path.write_text(
        "#!/bin/sh\n"
        f'export PYTHONPATH="$PYTHONPATH:{python_path}"\n'
        f'case "$1 $2" in {agents}) exec {sys.executable} -I -S {client} {server} "$@" ;; esac\n'
        f'exec {sys.executable} "$@"\n'
    )
    path.chmod(0o755)


def serve(place: str) -> None:
    """Answer until the process that started this one has closed stdin."""
    agents = {name: importlib.import_module(name) for name in AGENTS}
    gc.freeze()  # an agent would copy every page that its collector walks
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"{place}.part")
        listener.listen(64)
        os.rename(f"{place}.part", place)  # noqa: PTH104 (a name that exists answers at once)
        while True:
            ready, _, _ = select.select([listener, 0], [], [])
            if 0 in ready:
                return
            client, _ = listener.accept()
            if os.fork() == 0:
                listener.close()
                _keep(client, agents)
            client.close()


def _keep(client: socket.socket, agents: dict[str, ModuleType]) -> None:
    """Run one agent, and end it where its client has gone; never returns."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    length, rights, _, _ = client.recvmsg(4, socket.CMSG_SPACE(12))
    streams = array.array("i")
    streams.frombytes(rights[0][2][:12])
    asked = b""
    while len(asked) < int.from_bytes(length, "big"):
        asked += client.recv(_MAX_BYTES)
    words, environment, folder = marshal.loads(asked)
    pid = os.fork()
    if pid == 0:
        client.close()
        os.setsid()
        os.chdir(folder)
        os.environ.clear()
        os.environ.update(environment)
        _run(agents[words[0]], words[1:], list(streams))
    for descriptor in streams:
        os.close(descriptor)
    process = os.pidfd_open(pid)
    ready, _, _ = select.select([process, client], [], [])
    if process not in ready:
        os.killpg(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    with contextlib.suppress(BrokenPipeError):
        client.send(bytes([os.waitstatus_to_exitcode(status) & 255]))
    os._exit(0)


def _run(agent: ModuleType, words: list[str], streams: list[int]) -> None:
    """Become the agent; never returns."""
    for number, descriptor in enumerate(streams):
        os.dup2(descriptor, number)
    sys.argv = [agent.__file__ or "", *words]
    sys.stdin = os.fdopen(0, closefd=False, encoding="utf-8")
    sys.stdout, sys.stderr = (
        os.fdopen(number, "w", encoding="utf-8", closefd=False) for number in (1, 2)
    )
    code = 1
    try:
        code = int(agent.main())
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 0
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    serve(sys.argv[1])
