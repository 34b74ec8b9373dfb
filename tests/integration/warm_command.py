"""`nsa-ops` in a process forked from one that has imported it: the command line without its start.

Reads one JSON line for each command on stdin. A keeper waits for the command within its limits and
writes what became of it, whole, to the result file that the line names. What this leaves out,
the start of an interpreter, `tests/ops/test_cli_conventions.py` and every Ctrl-C test do for real.
"""

import contextlib
import gc
import importlib
import json
import os
import pkgutil
import resource
import signal
import sys
import time
from pathlib import Path
from typing import Any

import typer

import nsa_ops.cli
import nsa_ops.runs
from nsa_ops.cli.app import app, main

#: Far above what is allowed, so that a fault ends before the machine does.
ADDRESS_BYTES, FILE_BYTES = 3 * 2**29, 400 * 2**20


def _import_all() -> None:
    for package in (nsa_ops.cli, nsa_ops.runs):
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            importlib.import_module(module.name)
    typer.main.get_command(app)  # fills what Typer keeps of annotations


def _command(asked: dict[str, Any]) -> None:
    """Become the command; never returns."""
    os.setsid()
    terminal = asked.get("terminal")
    for number, name in ((0, "in"), (1, "out"), (2, "err")):
        path = terminal or asked.get(name, os.devnull)
        os.dup2(os.open(path, os.O_RDWR | os.O_CREAT, 0o600), number)
    if asked.get("is_bounded"):
        resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_BYTES, ADDRESS_BYTES))
        resource.setrlimit(resource.RLIMIT_FSIZE, (FILE_BYTES, FILE_BYTES))
    signal.signal(signal.SIGINT, signal.default_int_handler)  # the server of a job ignores it
    sys.stdin = os.fdopen(0, closefd=False, encoding="utf-8")
    sys.stdout, sys.stderr = (
        os.fdopen(number, "w", encoding="utf-8", errors=errors, closefd=False)
        for number, errors in ((1, "surrogateescape"), (2, "backslashreplace"))
    )
    os.umask(0o022)
    os.chdir(asked["folder"])
    os.environ.clear()
    os.environ.update(asked["environment"])
    sys.argv = ["nsa-ops", *asked["words"]]
    code = 1
    try:
        main(asked["words"])
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 0
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _keep(asked: dict[str, Any]) -> None:
    """Run one command, end it where it is late, and write down what it took."""
    began_s = time.monotonic()
    pid = os.fork()
    if pid == 0:
        _command(asked)
    is_late = False
    while True:
        ended, status, usage = os.wait4(pid, os.WNOHANG)
        if ended:
            break
        if not is_late and time.monotonic() > began_s + asked["limit_s"]:
            is_late = True
            os.killpg(pid, signal.SIGKILL)
        time.sleep(0.005)
    found = {
        "code": os.waitstatus_to_exitcode(status),
        "seconds": time.monotonic() - began_s,
        "peak_mib": usage.ru_maxrss / 1024,
        "is_late": is_late,
    }
    result = Path(asked["result"])
    part = result.with_name(f"{result.name}.part")  # its suffix is its number
    part.write_text(json.dumps(found))
    part.replace(result)
    os._exit(0)


def serve() -> None:
    _import_all()
    gc.freeze()  # a command would copy every page that its collector walks
    for line in iter(sys.stdin.readline, ""):
        if os.fork() == 0:
            _keep(json.loads(line))
        _collect(os.WNOHANG)
    _collect(0)


def _collect(options: int) -> None:
    """Collect keepers that have ended, so that their time counts as that of this process."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, options)[0]:
            continue


if __name__ == "__main__":
    serve()
