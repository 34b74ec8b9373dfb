"""The contract of a transport, written so that every implementation can be put through it."""

import os
import sys
import time
from pathlib import Path

import pytest

from nsa_ops.errors import DeadlineError, NotFoundError
from nsa_ops.remote.local import LocalTransport
from nsa_ops.remote.transport import Transport


@pytest.fixture(params=["local"])
def transport() -> Transport:
    return LocalTransport({"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/")})


def test_every_exit_code_comes_back(transport: Transport) -> None:
    for code in (0, 1, 127, 255):
        done = transport.run(["sh", "-c", f"exit {code}"], timeout_s=10)
        assert done.exit_code == code


def test_a_signal_is_128_and_its_number(transport: Transport) -> None:
    assert transport.run(["sh", "-c", "kill -9 $$"], timeout_s=10).exit_code == 137


def test_bytes_pass_unchanged_in_both_directions(transport: Transport) -> None:
    content = bytes(range(256)) * 4096
    done = transport.run(["cat"], stdin=content, timeout_s=10)
    assert done.stdout == content


def test_words_are_never_split_or_expanded(transport: Transport) -> None:
    words = ["a b", "$HOME", "*", "'", '"', ";", "", "é", "-n"]
    code = "import sys; sys.stdout.write('\\0'.join(sys.argv[1:]))"
    done = transport.run([sys.executable, "-c", code, *words], timeout_s=10)
    assert done.stdout.decode().split("\0") == words


def test_both_streams_are_drained_at_once(transport: Transport) -> None:
    script = "head -c 2000000 /dev/zero; head -c 2000000 /dev/zero >&2"
    done = transport.run(["sh", "-c", script], timeout_s=20)
    assert (len(done.stdout), len(done.stderr)) == (2_000_000, 2_000_000)


def test_a_program_that_does_not_read_its_input_is_no_error(transport: Transport) -> None:
    assert transport.run(["true"], stdin=b"x" * 1_000_000, timeout_s=10).exit_code == 0


def test_a_deadline_ends_the_whole_group(transport: Transport, tmp_path: Path) -> None:
    marker = tmp_path / "pid"
    script = f"sleep 300 & echo $! > {marker}; wait"
    with pytest.raises(DeadlineError, match=r"did not end within 0\.5 s"):
        transport.run(["sh", "-c", script], timeout_s=0.5)
    stat = Path(f"/proc/{int(marker.read_text())}/stat")
    deadline = time.monotonic() + 5
    while stat.exists() and ") Z" not in stat.read_text() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not stat.exists() or ") Z" in stat.read_text()


def test_a_missing_program_is_not_found(transport: Transport) -> None:
    with pytest.raises(NotFoundError, match="no-such-program"):
        transport.run(["no-such-program"], timeout_s=10)


def test_put_and_get_carry_a_file_whole(transport: Transport, tmp_path: Path) -> None:
    source, there, back = (tmp_path / name for name in ("source", "there", "back"))
    source.write_bytes(os.urandom(100_000))
    transport.put(source, str(there), timeout_s=10)
    transport.get(str(there), back, timeout_s=10)
    assert back.read_bytes() == source.read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["back", "source", "there"]


def test_a_failed_get_leaves_the_good_file(transport: Transport, tmp_path: Path) -> None:
    good = tmp_path / "good"
    good.write_text("good")
    with pytest.raises(NotFoundError):
        transport.get(str(tmp_path / "missing"), good, timeout_s=10)
    assert good.read_text() == "good"


def test_tail_reads_from_an_offset_and_no_further(transport: Transport, tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_bytes(b"0123456789")
    assert transport.tail(str(log), 3, max_bytes=4, timeout_s=10) == b"3456"
    assert transport.tail(str(log), 10, max_bytes=4, timeout_s=10) == b""
    with pytest.raises(NotFoundError):
        transport.tail(str(tmp_path / "missing"), 0, max_bytes=4, timeout_s=10)


def test_a_local_pod_sees_a_login_environment_only() -> None:
    local = LocalTransport({"PATH": os.environ["PATH"]})
    done = local.run(["env"], timeout_s=10)
    assert {line.split("=")[0] for line in done.text.splitlines()} <= {"PATH", "_", "PWD", "SHLVL"}
