"""Links that fail and logins that misbehave: each is named for what it is, by its exit code."""

import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from pathlib import Path
from threading import Thread, Timer

import pytest

from nsa_ops.errors import (
    AuthenticationError,
    ConfigurationError,
    DeadlineError,
    LocalResourceError,
    OpsError,
    PodUnreachableError,
    RefusedError,
    StateConflictError,
)
from nsa_ops.remote.framed import AnswerLostError, FramedTransport
from nsa_ops.remote.openssh import OpenSSHTransport
from nsa_ops.remote.ssh.config import resolve
from nsa_ops.remote.ssh.host_keys import pin, read_pin, scan
from nsa_ops.remote.ssh.target import Address, SshTarget
from tests.integration.ssh_server import (
    SshServer,
    free_port,
    make_key,
    openssh,
    over_fabric,
    ssh_server,
)
from tests.integration.tcp_proxy import Proxy

Opener = Callable[[SshTarget], AbstractContextManager[FramedTransport]]
pytestmark = pytest.mark.integration
LOGO = r"""
 _____                             _
|  __ \                           | |
|_|  \_\                          |_| \e[33m only /work is kept \e[0m"""


@pytest.fixture(params=["ssh", "fabric"])
def opener(request: pytest.FixtureRequest) -> Opener:
    return openssh if request.param == "ssh" else over_fabric


@pytest.fixture
def through(
    server: SshServer, proxy: Proxy, tmp_path: Path, opener: Opener
) -> Iterator[FramedTransport]:
    """The pod behind the proxy."""
    with opener(server.target(tmp_path / "s", proxy.port)) as transport:
        yield transport


def test_a_stopped_master_is_found_replaced_and_told_within_seconds(
    server: SshServer, tmp_path: Path
) -> None:
    told: list[str] = []
    with openssh(server.target(tmp_path / "s")) as first:
        echo(first)
        argv = first.bare_argv("true")
        asked = [argv[0], "-O", "check", *argv[1:-1]]
        said = subprocess.run(asked, capture_output=True, text=True, check=True).stderr
        master = int(said.partition("pid=")[2].partition(")")[0])
        os.kill(master, signal.SIGSTOP)
        try:
            began_s = time.monotonic()
            echo(OpenSSHTransport(server.target(tmp_path / "s"), tell=told.append))
            assert time.monotonic() - began_s < 8  # 3 s to find it, and a new login
            echo(OpenSSHTransport(server.target(tmp_path / "s"), tell=told.append))
        finally:
            os.kill(master, signal.SIGKILL)
    assert ["did not answer within 3 s" in line for line in told] == [True]


class Login:
    """Makes servers whose login shell misbehaves."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self._folder, self._stack = folder, stack

    def with_rc(self, text: str) -> OpenSSHTransport:
        """A pod whose bash reads this start-up file for every command."""
        home = self._folder / "home"
        home.mkdir()
        (home / ".bashrc").write_text(text)
        return self._open(environment={"HOME": str(home)})

    def with_shell(self, text: str) -> OpenSSHTransport:
        """A pod that gives each command to this program instead of a login shell."""
        shell = self._folder / "shell"
        shell.write_text(text)
        shell.chmod(0o755)
        return self._open(options=f"ForceCommand {shell}\n")

    def _open(self, **options: object) -> OpenSSHTransport:
        server = self._stack.enter_context(ssh_server(self._folder / "sshd", **options))
        return self._stack.enter_context(openssh(server.target(self._folder / "s")))


@pytest.fixture
def login(tmp_path: Path) -> Iterator[Login]:
    with ExitStack() as stack:
        yield Login(tmp_path, stack)


def echo(transport: FramedTransport) -> bytes:
    return transport.run(["echo", "OK"], timeout_s=20).stdout


def test_a_delayed_link_is_slow_and_right(through: FramedTransport, proxy: Proxy) -> None:
    proxy.delay_s = 0.1
    assert echo(through) == b"OK\n"
    began_s = time.monotonic()
    assert through.run(["cat"], stdin=b"x" * 1000, timeout_s=20).stdout == b"x" * 1000
    assert time.monotonic() - began_s < 2.0
    assert proxy.connections == 1


@pytest.mark.parametrize("num_bytes", [1, 200_000])
def test_a_cut_in_the_answer_is_no_exit_code_and_the_next_call_connects_again(
    through: FramedTransport, proxy: Proxy, num_bytes: int
) -> None:
    assert through.run(["sh", "-c", "exit 255"], timeout_s=20).exit_code == 255
    proxy.cut_in(num_bytes)
    with pytest.raises(PodUnreachableError) as caught:
        through.run(["head", "-c", "5000000", "/dev/zero"], timeout_s=20)
    assert caught.value.exit_code == 5
    assert isinstance(caught.value, AnswerLostError) == (num_bytes > 1)
    proxy.cut_after = None
    assert echo(through) == b"OK\n"


def test_a_cut_link_says_that_the_command_may_have_run(
    through: FramedTransport, proxy: Proxy, tmp_path: Path
) -> None:
    marker = tmp_path / "done"
    Timer(1.0, proxy.cut).start()
    with pytest.raises(AnswerLostError, match="ended in the middle of the answer") as caught:
        through.run(["sh", "-c", f"sleep 2; touch {marker}"], timeout_s=20)
    assert "It may have run to its end" in caught.value.hint
    end = time.monotonic() + 5
    while not marker.exists() and time.monotonic() < end:
        time.sleep(0.05)
    assert marker.exists()


def test_a_cut_get_leaves_the_good_file_and_a_cut_put_leaves_no_trace(
    through: FramedTransport, proxy: Proxy, tmp_path: Path
) -> None:
    big, good, pod = tmp_path / "big", tmp_path / "good", tmp_path / "pod"
    pod.mkdir()
    big.write_bytes(b"0123456789" * 400_000)
    good.write_text("good")
    (pod / "there").write_text("good")
    echo(through)
    proxy.cut_in(1_000_000)
    with pytest.raises(AnswerLostError):
        through.get(str(big), good, timeout_s=20)
    assert good.read_text() == "good"
    proxy.cut_after = None
    echo(through)
    proxy.delay_s = 0.01
    Timer(0.4, proxy.cut).start()
    with pytest.raises(PodUnreachableError):
        through.put(big, str(pod / "there"), timeout_s=20)
    end = time.monotonic() + 5
    while len(list(pod.iterdir())) > 1 and time.monotonic() < end:
        time.sleep(0.05)
    assert [(path.name, path.read_text()) for path in pod.iterdir()] == [("there", "good")]
    assert {path.name for path in tmp_path.iterdir()} >= {"big", "good", "pod"}
    assert not list(tmp_path.glob(".good*"))


@pytest.mark.slow
def test_a_dead_link_is_named_within_20_seconds(
    server: SshServer, proxy: Proxy, tmp_path: Path
) -> None:
    """Before the command has begun and after it, over both transports at once."""
    found: dict[str, tuple[type[OpsError], float]] = {}

    def call(name: str, transport: FramedTransport) -> None:
        try:
            transport.run(["sleep", "60"], timeout_s=60)
        except OpsError as error:
            found[name] = type(error), time.monotonic() - stalled_s

    with ExitStack() as stack:
        target = server.target(tmp_path / "s", proxy.port)
        links = {
            "ssh": stack.enter_context(openssh(target)),
            "fabric": stack.enter_context(over_fabric(target)),
        }
        for transport in links.values():
            echo(transport)
        begun = [Thread(target=call, args=(f"{name} begun", links[name])) for name in links]
        for thread in begun:
            thread.start()
        time.sleep(1.5)
        proxy.is_stalled, stalled_s = True, time.monotonic()
        later = [Thread(target=call, args=(name, links[name])) for name in links]
        for thread in later:
            thread.start()
        for thread in begun + later:
            thread.join()
    limit_s = 20.5  # the scheduler's share
    assert {name for name, (_, after_s) in found.items() if after_s > limit_s} == set(), found
    assert found.keys() == {"ssh", "fabric", "ssh begun", "fabric begun"}
    for name, (kind, _) in found.items():
        assert issubclass(kind, PodUnreachableError)
        assert (kind is AnswerLostError) == name.endswith("begun"), found


def test_a_deadline_on_a_dead_link_does_not_wait_for_it(
    through: FramedTransport, proxy: Proxy
) -> None:
    echo(through)
    proxy.is_stalled = True
    began_s = time.monotonic()
    with pytest.raises(DeadlineError, match="did not end within 1 s"):
        through.run(["true"], timeout_s=1)
    assert time.monotonic() - began_s < 3.0


def test_nobody_at_the_port_is_unreachable(
    server: SshServer, tmp_path: Path, opener: Opener
) -> None:
    target = server.target(tmp_path / "s", free_port())
    with opener(target) as nobody, pytest.raises(PodUnreachableError, match="does not answer"):
        echo(nobody)


def test_another_host_key_is_refused_and_no_byte_of_ours_is_sent(
    tmp_path: Path, opener: Opener
) -> None:
    with ssh_server(tmp_path / "sshd") as swapped:
        target = swapped.target(tmp_path / "s")
        make_key(tmp_path / "other")
        kind, key, _ = (tmp_path / "other.pub").read_text().split()
        pin(target, type(read_pin(target))(kind, key))
        with opener(target) as transport, pytest.raises(AuthenticationError) as caught:
            transport.run(["touch", str(tmp_path / "reached")], timeout_s=20)
        log = swapped.log
    assert "not the pinned one" in caught.value.message
    assert "A recycled address is a new pod" in caught.value.hint
    assert not (tmp_path / "reached").exists()
    assert "Accepted" not in log
    assert "userauth" not in log
    assert "Failed" not in log


def test_a_pod_without_a_pinned_key_is_never_connected_to(
    server: SshServer, tmp_path: Path
) -> None:
    target = server.target(tmp_path / "s")
    target.known_hosts.unlink()
    with pytest.raises(AuthenticationError, match="has no pinned host key"):
        OpenSSHTransport(target).run(["true"], timeout_s=20)


def test_a_wrong_key_is_an_authentication_error(
    server: SshServer, tmp_path: Path, opener: Opener
) -> None:
    make_key(tmp_path / "stranger")
    config = tmp_path / "client.conf"
    config.write_text(f"IdentityFile {tmp_path}/stranger\nIdentitiesOnly yes\nIdentityAgent none\n")
    stranger = with_config(server, tmp_path, config)
    refused = pytest.raises(AuthenticationError, match="refuses our login")
    with opener(stranger) as transport, refused:
        echo(transport)


def with_config(server: SshServer, tmp_path: Path, config: Path) -> SshTarget:
    target = server.target(tmp_path / "s")
    return replace(target, settings=replace(target.settings, config=config))


def test_key_files_that_others_may_read_are_no_network_error(
    server: SshServer, tmp_path: Path
) -> None:
    loose = tmp_path / "loose"
    loose.write_bytes((server.folder / "user_key").read_bytes())
    loose.chmod(0o664)
    config = tmp_path / "client.conf"
    config.write_text(f"IdentityFile {loose}\nIdentitiesOnly yes\nIdentityAgent none\n")
    with pytest.raises(AuthenticationError, match="refuses the private key") as caught:
        echo(OpenSSHTransport(with_config(server, tmp_path, config)))
    assert str(loose) in caught.value.message
    assert "chmod 600" in caught.value.hint


def test_local_commands_and_forwardings_of_the_configuration_are_not_used(
    server: SshServer, tmp_path: Path
) -> None:
    config = tmp_path / "client.conf"
    config.write_text(
        f"IdentityFile {server.folder}/user_key\nIdentitiesOnly yes\nIdentityAgent none\n"
        f"PermitLocalCommand yes\nLocalCommand touch {tmp_path}/ran\nForwardAgent yes\n"
        f"RemoteCommand echo hijacked\nRequestTTY yes\nLocalForward {free_port()} localhost:1\n"
        f"ControlPath {tmp_path}/very/long/{'x' * 120}\nLogLevel QUIET\nBatchMode no\n"
        "StrictHostKeyChecking no\nSendEnv *\nServerAliveInterval 0\n"
    )
    target = with_config(server, tmp_path, config)
    with openssh(target) as transport:
        assert echo(transport) == b"OK\n"
    assert not (tmp_path / "ran").exists()


def test_an_alias_from_an_included_file_is_resolved_by_ssh_itself(
    server: SshServer, tmp_path: Path
) -> None:
    (tmp_path / "conf.d").mkdir()
    (tmp_path / "conf.d" / "pods.conf").write_text(
        f"Host gpu\n  HostName 127.0.0.1\n  Port {server.port}\n"
        f"  IdentityFile {server.folder}/user_key\n  IdentitiesOnly yes\n  IdentityAgent none\n"
        "Match all\n"
    )
    config = tmp_path / "client.conf"
    config.write_text(f"Include {tmp_path}/conf.d/*.conf\n")
    target = with_config(server, tmp_path, config)
    with openssh(replace(target, address=Address("gpu"))) as transport:
        assert echo(transport) == b"OK\n"


@pytest.mark.parametrize(
    "noise",
    [f"echo -e '{LOGO}'", f"echo -en '{LOGO}'; echo careful >&2", "sleep 1", "cd /; set -o vi"],
)
def test_start_up_files_may_print_and_dawdle(login: Login, noise: str) -> None:
    done = login.with_rc(noise).run(["sh", "-c", "echo OK; echo no >&2"], timeout_s=20)
    assert (done.stdout, done.stderr, done.exit_code) == (b"OK\n", b"no\n", 0)


def test_the_start_up_files_of_real_pods_change_no_answer(shared: Path, login: Login) -> None:
    """One prints a logo that ends without a newline, the other colours."""
    logo = (shared / "cases/ssh/S05_runpod_bashrc_prints_logo.txt").read_text()
    drawn = logo.partition("remote command:\n")[2].rpartition("OK")[0]
    assert "|__) |" in drawn
    coloured = (shared / "cases/ssh/S06_bashrc_ansi_echo_breaks_sftp.txt").read_text()
    pod = login.with_rc(f"{coloured.splitlines()[0]}\nprintf %s '{drawn.replace(chr(39), '')}'\n")
    assert pod.run(["echo", "OK"], timeout_s=20).stdout == b"OK\n"


def test_a_start_up_file_that_exits_is_named(login: Login) -> None:
    with pytest.raises(StateConflictError, match="ended with code 3 before our command: bye") as e:
        echo(login.with_rc("echo bye; exit 3"))
    assert ".bashrc" in e.value.hint


def test_a_login_shell_that_is_not_posix_is_never_asked_to_parse_a_script(login: Login) -> None:
    """Like fish: assignments, `${` and `$(` are syntax errors outside quotes."""
    fish = login.with_shell(
        "#!/bin/bash\n"
        'outside=$(printf %s "$SSH_ORIGINAL_COMMAND" | sed "s/\'[^\']*\'//g")\n'
        "case $outside in *=*|*'$'*|*'`'*|*';'*|*'&&'*) "
        "echo \"fish: Unsupported use of '='\" >&2; exit 127;; esac\n"
        'exec bash -c "$SSH_ORIGINAL_COMMAND"\n'
    )
    assert echo(fish) == b"OK\n"


def test_a_gateway_that_wants_a_terminal_is_refused_with_the_reason(login: Login) -> None:
    gateway = login.with_shell('#!/bin/sh\necho "Error: Your SSH client doesn\'t support PTY"\n')
    with pytest.raises(RefusedError, match="is a gateway that only offers a terminal") as caught:
        echo(gateway)
    assert "direct TCP address" in caught.value.hint


def test_sudo_that_wants_a_password_does_not_hang(login: Login, tmp_path: Path) -> None:
    sudo = tmp_path / "sudo"
    sudo.write_text(
        "#!/bin/sh\nread answer </dev/tty || {\n"
        "  echo 'sudo: sorry, you must have a tty to run sudo' >&2\n  exit 1\n}\n"
    )
    sudo.chmod(0o755)
    done = login.with_rc("").run([str(sudo), "true"], timeout_s=20)
    assert done.exit_code == 1
    assert done.last_error_line == "sudo: sorry, you must have a tty to run sudo"


def test_a_process_that_holds_the_streams_does_not_hold_the_answer(
    server: SshServer, tmp_path: Path
) -> None:
    with openssh(server.target(tmp_path / "s")) as transport:
        began_s = time.monotonic()
        done = transport.run(["sh", "-c", "sleep 15 & echo OK"], timeout_s=20)
        assert done.stdout == b"OK\n"
        assert time.monotonic() - began_s < 5


def test_more_calls_at_once_than_one_link_allows(tmp_path: Path) -> None:
    answers: list[bytes | OpsError] = []

    def call(transport: FramedTransport) -> None:
        try:
            answers.append(transport.run(["sh", "-c", "sleep 1; echo OK"], timeout_s=20).stdout)
        except OpsError as error:
            answers.append(error)

    with ExitStack() as stack:
        server = stack.enter_context(ssh_server(tmp_path / "sshd", options="MaxSessions 2\n"))
        transport = stack.enter_context(openssh(server.target(tmp_path / "s")))
        echo(transport)
        threads = [Thread(target=call, args=(transport,)) for _ in range(5)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert answers == [b"OK\n"] * 5


def test_a_stale_socket_is_replaced(server: SshServer, tmp_path: Path) -> None:
    with openssh(server.target(tmp_path / "s")) as transport:
        with socket.socket(socket.AF_UNIX) as stale:
            stale.bind(str(transport.control_path))
        assert echo(transport) == b"OK\n"
        assert echo(transport) == b"OK\n"
    assert not transport.control_path.exists()


def test_a_socket_folder_that_others_may_enter_is_refused(
    server: SshServer, short_path: Path
) -> None:
    target = server.target(short_path / "s")
    open_folder = short_path / "o"
    open_folder.mkdir(mode=0o755)
    target = replace(target, settings=replace(target.settings, socket_dirs=(open_folder,)))
    with pytest.raises(LocalResourceError, match="others may enter it"):
        echo(OpenSSHTransport(target))


def test_a_pod_behind_a_jump_is_looked_at_and_reached_through_it(
    server: SshServer, tmp_path: Path
) -> None:
    key = server.host_key
    (tmp_path / "jump_hosts").write_text(f"[127.0.0.1]:{server.port} {key.kind} {key.base64}\n")
    config = tmp_path / "client.conf"
    config.write_text(
        f"Host jump\n  HostName 127.0.0.1\n  Port {server.port}\n"
        f"  UserKnownHostsFile {tmp_path}/jump_hosts\n"
        f"Host gpu\n  HostName 127.0.0.1\n  Port {server.port}\n  ProxyJump jump\n"
        f"Host *\n  IdentityFile {server.folder}/user_key\n"
        "  IdentitiesOnly yes\n  IdentityAgent none\n"
    )
    target = replace(with_config(server, tmp_path, config), address=Address("gpu"))
    route = resolve(target.address, target.settings)
    assert (str(route), route.proxy_jump) == (
        f"{route.user}@127.0.0.1:{server.port} through jump",
        "jump",
    )
    assert scan(target.address, target.settings) == key
    with openssh(target) as transport:
        assert echo(transport) == b"OK\n"
    with over_fabric(target) as transport, pytest.raises(ConfigurationError, match="through jump"):
        echo(transport)
