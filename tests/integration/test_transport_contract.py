"""The contract of `Transport`, which every implementation passes, against a real sshd."""

import errno
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from nsa_ops.errors import DeadlineError, NotFoundError, StateConflictError, VerificationError
from nsa_ops.remote.local import LocalTransport
from nsa_ops.remote.transport import Transport
from tests.integration.pod_runs import wait_for
from tests.integration.ssh_server import SshServer, openssh, over_fabric

pytestmark = pytest.mark.integration
HOSTILE = [
    "a b", "$HOME", "*", "'", '"', ";", "", "é", "Á", "-n", "two\nlines\n", "\n", "tab\there",
    "100%d\\n", "`id`", "$(id)", "!", "#", "~", "\x01\x7f", "日本", "a'\"b\\",
]  # fmt: skip
HOSTILE_NAMES = [
    "with space", "-rf", "quote'\"", "two\nlines", "日本 é", "$(id)", "*", ".hidden", "a\\b", "%d",
]  # fmt: skip


@pytest.fixture(scope="module", params=["local", "ssh", "fabric"])
def transport(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Transport]:
    if request.param == "local":
        yield LocalTransport({"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/")})
        return
    server: SshServer = request.getfixturevalue("server")
    state = tmp_path_factory.mktemp("s")
    open_link = openssh if request.param == "ssh" else over_fabric
    with open_link(server.target(state)) as opened:
        yield opened


def test_every_exit_code_comes_back(transport: Transport) -> None:
    for code in (0, 1, 124, 127, 255):
        done = transport.run(["sh", "-c", f"exit {code}"], timeout_s=20)
        assert done.exit_code == code


def test_a_signal_is_128_and_its_number(transport: Transport) -> None:
    assert transport.run(["sh", "-c", "kill -9 $$"], timeout_s=20).exit_code == 137


def test_bytes_pass_unchanged_in_both_directions(transport: Transport) -> None:
    content = bytes(range(256)) * 4096
    done = transport.run(["cat"], stdin=content, timeout_s=20)
    assert done.stdout == content


def test_both_streams_are_the_commands_own(transport: Transport) -> None:
    done = transport.run(["sh", "-c", "printf out; printf err >&2; exit 3"], timeout_s=20)
    assert (done.stdout, done.stderr, done.exit_code) == (b"out", b"err", 3)


def test_words_are_never_split_or_expanded(transport: Transport) -> None:
    code = "import sys; sys.stdout.write('\\0'.join(sys.argv[1:]))"
    done = transport.run([sys.executable, "-X", "utf8", "-c", code, *HOSTILE], timeout_s=20)
    assert done.stdout.decode().split("\0") == HOSTILE


def test_ten_mebibytes_on_both_streams_at_once_are_drained(transport: Transport) -> None:
    script = "head -c 10485760 /dev/zero & head -c 10485760 /dev/zero >&2; wait"
    done = transport.run(["sh", "-c", script], timeout_s=60)
    assert (len(done.stdout), len(done.stderr)) == (10_485_760, 10_485_760)


def test_a_program_that_does_not_read_its_input_is_no_error(transport: Transport) -> None:
    assert transport.run(["true"], stdin=b"x" * 4_000_000, timeout_s=20).exit_code == 0


def test_a_deadline_ends_the_whole_group(transport: Transport, tmp_path: Path) -> None:
    marker = tmp_path / "pid"
    script = f"sleep 300 & echo $! > {marker}; wait"
    with pytest.raises(DeadlineError, match=r"did not end within 1 s"):
        transport.run(["sh", "-c", script], timeout_s=1)
    stat = Path(f"/proc/{int(marker.read_text())}/stat")
    deadline = time.monotonic() + 6
    while stat.exists() and ") Z" not in stat.read_text() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not stat.exists() or ") Z" in stat.read_text()


def test_a_missing_program_is_not_found(transport: Transport) -> None:
    for name in ("no-such-program", "/no/such/program"):
        with pytest.raises(NotFoundError, match=name):
            transport.run([name], timeout_s=20)


def test_a_file_that_cannot_be_executed_is_a_conflict(transport: Transport, tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    plain.write_text("")
    with pytest.raises(StateConflictError, match="cannot be executed"):
        transport.run([str(plain)], timeout_s=20)


def test_a_command_cannot_ask_at_a_terminal(transport: Transport) -> None:
    done = transport.run(["sh", "-c", "read answer </dev/tty"], timeout_s=20)
    assert done.exit_code != 0


@pytest.mark.parametrize("size", [0, 1, 3_000_000])
def test_put_and_get_carry_a_file_whole(transport: Transport, tmp_path: Path, size: int) -> None:
    source, there, back = (tmp_path / name for name in ("source", "there", "back"))
    source.write_bytes(os.urandom(size))
    source.chmod(0o640)
    transport.put(source, str(there), timeout_s=20)
    transport.get(str(there), back, timeout_s=20)
    assert back.read_bytes() == source.read_bytes()
    assert [path.stat().st_mode & 0o777 for path in (there, back)] == [0o640, 0o640]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["back", "source", "there"]


@pytest.mark.parametrize("name", HOSTILE_NAMES)
def test_hostile_names_are_names(transport: Transport, tmp_path: Path, name: str) -> None:
    source, pod = tmp_path / "source", tmp_path / "pod"
    pod.mkdir()
    source.write_bytes(b"0123456789")
    transport.put(source, str(pod / name), timeout_s=20)
    assert [path.name for path in pod.iterdir()] == [name]
    assert transport.tail(str(pod / name), 3, max_bytes=4, timeout_s=20) == b"3456"
    transport.get(str(pod / name), tmp_path / name, timeout_s=20)
    assert (tmp_path / name).read_bytes() == b"0123456789"


def test_put_replaces_a_file_and_never_a_folder(transport: Transport, tmp_path: Path) -> None:
    source, there, folder = (tmp_path / name for name in ("source", "there", "folder"))
    source.write_text("new")
    there.write_text("old")
    folder.mkdir()
    transport.put(source, str(there), timeout_s=20)
    assert there.read_text() == "new"
    with pytest.raises(StateConflictError, match="is a folder"):
        transport.put(source, str(folder), timeout_s=20)
    assert list(folder.iterdir()) == []


def test_put_without_a_source_or_a_folder_is_not_found(
    transport: Transport, tmp_path: Path
) -> None:
    source = tmp_path / "source"
    with pytest.raises(NotFoundError):
        transport.put(source, str(tmp_path / "there"), timeout_s=20)
    source.write_text("x")
    with pytest.raises(NotFoundError):
        transport.put(source, str(tmp_path / "no" / "there"), timeout_s=20)


def test_a_failed_get_leaves_the_good_file(transport: Transport, tmp_path: Path) -> None:
    good = tmp_path / "good"
    good.write_text("good")
    with pytest.raises(NotFoundError):
        transport.get(str(tmp_path / "missing"), good, timeout_s=20)
    assert good.read_text() == "good"
    assert [path.name for path in tmp_path.iterdir()] == ["good"]


def test_tail_reads_from_an_offset_and_no_further(transport: Transport, tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_bytes(b"0123456789")
    assert transport.tail(str(log), 3, max_bytes=4, timeout_s=20) == b"3456"
    assert transport.tail(str(log), 10, max_bytes=4, timeout_s=20) == b""
    assert transport.tail(str(log), 99, max_bytes=4, timeout_s=20) == b""
    with pytest.raises(NotFoundError):
        transport.tail(str(tmp_path / "missing"), 0, max_bytes=4, timeout_s=20)


def test_a_stream_gives_pieces_in_order_from_an_offset(
    transport: Transport, tmp_path: Path
) -> None:
    content, pieces = os.urandom(5_000_000), []
    (tmp_path / "big").write_bytes(content)
    transport.stream(
        str(tmp_path / "big"), 7, pieces.append, max_bytes=4_000_000, timeout_s=20
    )  # fmt: skip
    assert b"".join(pieces) == content[7:4_000_007]
    assert len(pieces) > 1
    with pytest.raises(NotFoundError):
        transport.stream(str(tmp_path / "no"), 0, pieces.append, max_bytes=4, timeout_s=20)


def test_output_beyond_its_ceiling_ends_the_command_and_names_both_sizes(
    transport: Transport, tmp_path: Path
) -> None:
    marker, began_s = tmp_path / "pid", time.monotonic()
    script = f"echo $$ > {marker}; exec cat /dev/zero"
    with pytest.raises(VerificationError, match=r"sent \d+ bytes or more; the limit is 1000$"):
        transport.run(["sh", "-c", script], timeout_s=60, max_bytes=1000)
    with pytest.raises(VerificationError, match=r"the limit is 16777216$"):
        transport.run(["sh", "-c", f"{script} >&2"], timeout_s=60, max_bytes=1000)
    assert time.monotonic() - began_s < 30
    wait_for(lambda: not Path(f"/proc/{int(marker.read_text())}").exists())
    assert transport.run(["echo", "OK"], timeout_s=20).stdout == b"OK\n"


def test_output_goes_to_a_sink_up_to_its_ceiling(transport: Transport) -> None:
    got = bytearray()
    done = transport.run_into(
        ["sh", "-c", "cat; exit 3"], got.extend, stdin=b"12345", timeout_s=20, max_bytes=5
    )
    assert (bytes(got), done.exit_code, done.stdout) == (b"12345", 3, b"")
    with pytest.raises(VerificationError, match="limit is 4"):
        transport.run_into(["cat"], got.extend, stdin=b"67890", timeout_s=20, max_bytes=4)
    assert len(got) <= 9


def test_a_command_that_drips_still_meets_its_deadline(transport: Transport) -> None:
    began_s = time.monotonic()
    with pytest.raises(DeadlineError, match="did not end within 1 s"):
        transport.run(["sh", "-c", "while :; do echo x; sleep 0.05; done"], timeout_s=1)
    assert time.monotonic() - began_s < 10


def test_a_fifo_is_no_file_to_read(transport: Transport, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(StateConflictError, match="no regular file"):
        transport.tail(str(tmp_path / "fifo"), 0, max_bytes=4, timeout_s=20)


def test_what_a_sink_cannot_take_is_told_and_is_no_lost_link(
    transport: Transport, tmp_path: Path
) -> None:
    (tmp_path / "big").write_bytes(bytes(3_000_000))

    def full(_piece: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        transport.stream(str(tmp_path / "big"), 0, full, max_bytes=3_000_000, timeout_s=20)
    assert transport.run(["echo", "OK"], timeout_s=20).stdout == b"OK\n"


def test_a_log_that_grows_is_followed_without_loss_or_repetition(
    transport: Transport, tmp_path: Path
) -> None:
    log, seen = tmp_path / "log", b""
    with log.open("ab", buffering=0) as file:
        for number in range(5):
            file.write(f"line {number}\nhalf {number}".encode())
            seen += transport.tail(str(log), len(seen), max_bytes=1000, timeout_s=20)
    assert seen == log.read_bytes()


def test_a_local_pod_sees_a_login_environment_only() -> None:
    local = LocalTransport({"PATH": os.environ["PATH"]})
    done = local.run(["env"], timeout_s=10)
    assert {line.split("=")[0] for line in done.text.splitlines()} <= {"PATH", "_", "PWD", "SHLVL"}
