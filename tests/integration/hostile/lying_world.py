"""Make the lying world: one sshd, two pods whose tools are liars, and a run on each that ended."""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from nsa_ops.remote.snapshot import code_root
from tests.integration.hostile.ended_run import CONTENT, HELD, MARKER, enrich
from tests.integration.hostile.lying_pod import LIMIT_S, Side, Started, World
from tests.integration.local_pod import STEADY, LocalPod
from tests.integration.ssh_server import ssh_server
from tests.integration.tcp_proxy import tcp_proxy

_TOOLS = ("sh", "find", "stat", "sha256sum", "head", "tail", "cat", "dd", "df", "tar", "ls")
_LIAR = Path(__file__).with_name("liar.py")


@contextmanager
def _warm_commands() -> Iterator[subprocess.Popen[bytes]]:
    words = (sys.executable, "-m", "tests.integration.warm_command")
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    with subprocess.Popen(
        words, cwd=code_root(), env=environment, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL
    ) as commands:
        yield commands


def _write_liar(side: Side) -> Path:
    """Stand in front of the pod's tools; its interpreter as the registry knows it."""
    (side.lies / "bin").mkdir(parents=True)
    honest = f"[ -e {side.lies}/lie.json ] || exec"
    # Whoever reads its script from stdin is lied to in frames only; half of all calls are such.
    framed = f"case $2 in *read*eval*) [ -e {side.lies}/frames ] || exec"
    liar = f"exec {sys.executable} -I -S {_LIAR} {side.lies}"
    tools = [*_TOOLS, *(("tmux", "rsync") if side.name == "far" else ())]
    for tool in tools:
        real = shutil.which(tool)
        if real is not None:
            _write_program(
                side.lies / "bin" / tool,
                f'{honest} {real} "$@"\n{framed} {real} "$@";; esac\n{liar} {real} "$@"',
            )
    real_python, python = side.folder / "real-python", side.folder / "python"
    path = f'PYTHONPATH="$PYTHONPATH:{code_root()}"'
    _write_program(real_python, f'{path} exec {sys.executable} "$@"')
    _write_program(python, f'{liar} {real_python} "$@"')
    return python


def _write_program(path: Path, line: str) -> None:
    path.write_text(f"#!/bin/sh\n{line}\n")
    path.chmod(0o755)


def _furnish(world: World) -> None:
    """What a laptop holds that no pod may touch."""
    for folder in (world.home / ".ssh", world.home / ".config" / "nsa-ops", world.work):
        folder.mkdir(parents=True)
    (world.home / ".ssh" / "authorized_keys").write_text("ssh-ed25519 AAAA the-owner\n")
    (world.home / ".bashrc").write_text("alias ll='ls -l'\n")
    (world.work / "notes.txt").write_text("thesis\n")
    (world.laptop / "elsewhere").mkdir()
    (world.laptop / "elsewhere" / "precious.txt").write_text("the only copy\n")


def _add_and_run(world: World, side: Side, python: Path) -> Started:
    key = ("--fingerprint", world.server.host_key.fingerprint)
    address = f"{world.server.user}@127.0.0.1:{world.proxy.port}"
    where = (address, "--root", str(side.root), *key) if side.name == "far" else (
        f"local:{side.root}",
    )  # fmt: skip
    world.must("pod", "add", side.name, *where, "--python", str(python), "--profile", "cpu")
    return world.start(
        "launch", "--pod", side.name, "--run-id", side.run_id, "--trainer", STEADY, "--override",
        "preflight=a test", "--set", "schedule.steps=30", "--set", "checkpoint.save_every=10",
        "-y",
    )  # fmt: skip


@contextmanager
def lying_world(base: Path) -> Iterator[World]:
    """One sshd, two pods with an ended run each, and a laptop that holds step 10 of both."""
    sides = {name: Side(name, base / name, base / "laptop" / "state" / "backups")
             for name in ("far", "near")}  # fmt: skip
    bins = f"{sides['far'].lies / 'bin'}:{os.environ['PATH']}"
    more = "MaxStartups 200\nMaxSessions 200\n"
    with (
        ssh_server(base / "sshd", environment={"PATH": bins}, options=more) as server,
        tcp_proxy(server.port) as proxy,
        _warm_commands() as commands,
    ):
        socket = f"nsa-test-{os.getpid()}-{base.name}"
        world = World(base, server, proxy, socket, sides, commands)
        _furnish(world)
        pods = [LocalPod(side.folder, world.socket) for side in sides.values()]
        try:
            launches = [_add_and_run(world, side, _write_liar(side)) for side in sides.values()]
            for heard in [one.wait() for one in launches]:
                assert heard.code == 0, heard.said
            for side in sides.values():
                _await(lambda side=side: (side.run_dir / "exit.json").exists())
                enrich(side.run_dir)
                world.must("backup", "pull", side.run_id, "--checkpoint", str(HELD), "-y")
                (side.run_dir / MARKER).write_bytes(CONTENT)
        finally:
            for pod in pods:
                pod.stop()
        world.keep_template()
        yield world
        world.must("pod", "rm", "far", "-y")


def _await(what: Callable[[], bool]) -> None:
    end = time.monotonic() + LIMIT_S
    while not what():
        assert time.monotonic() < end
        time.sleep(0.02)
