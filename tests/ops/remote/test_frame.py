"""A call as one line, and an answer between marks, cut into pieces of any size."""

import os
import subprocess

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from nsa_ops.errors import ConfigurationError, VerificationError
from nsa_ops.remote.frame import (
    BOOTSTRAP,
    MAX_NOISE_BYTES,
    MISSING,
    NOT_EXECUTABLE,
    Framed,
    encode_call,
)
from nsa_ops.remote.transport import OversizeError

NONCE = "0123456789abcdef0123456789abcdef"


def framed(payload: bytes, ending: str = "0", before: bytes = b"", after: bytes = b"") -> bytes:
    mark = NONCE.encode()
    return before + mark + b"{77;" + payload + mark + b"}" + ending.encode() + b";" + after


@settings(max_examples=60, deadline=None)
@given(
    payload=st.binary(max_size=200),
    noise=st.binary(max_size=50),
    size=st.integers(min_value=1, max_value=40),
)
def test_any_payload_comes_out_of_any_pieces(payload: bytes, noise: bytes, size: int) -> None:
    stream, got = framed(payload, "255", before=noise, after=noise), []
    reader = Framed(NONCE, got.append)
    for start in range(0, len(stream), size):
        reader.feed(stream[start : start + size])
    assert (b"".join(got), reader.pid, reader.ending) == (payload, 77, "255")
    assert reader.noise == (noise + noise).decode(errors="replace")


def test_an_answer_that_is_cut_has_no_ending() -> None:
    stream = framed(b"x" * 100)
    for length in range(len(stream)):
        reader = Framed(NONCE, lambda _piece: None)
        reader.feed(stream[:length])
        assert reader.ending is None


@pytest.mark.parametrize(
    "answer",
    [
        b"{" + b"1" * 1000, b"{missing;", b"{x" + b" " * 20, b"{77;}" + b"9" * 1000, b"{77;}abc;",
        b"{77;}-1;xxxxxxxxxx", b"{77;}99999;xxxxxx",
    ],
)  # fmt: skip
def test_a_mark_that_cannot_be_understood_is_refused_before_it_fills_the_memory(
    answer: bytes,
) -> None:
    mark = NONCE.encode()
    reader = Framed(NONCE, lambda _piece: None)
    stream = answer.replace(b"{", mark + b"{", 1).replace(b"}", mark + b"}", 1) + b"-" * 20
    with pytest.raises(VerificationError, match="cannot be understood"):
        for byte in stream:
            reader.feed(bytes([byte]))


def test_what_is_printed_before_a_command_that_never_began_is_told() -> None:
    reader = Framed(NONCE, lambda _piece: None)
    reader.feed(b"Error: no terminal\n")
    assert (reader.pid, reader.noise) == (None, "Error: no terminal\n")


@pytest.mark.parametrize("shell", ["sh", "bash"])
@settings(max_examples=25, deadline=None)
@example(words=[b"\x01\xe0\\\xa0\x80", b"\xff\n\n"])  # bash 5.2 reorders it in a pattern removal
@given(words=st.lists(st.binary(max_size=30).filter(lambda one: b"\0" not in one), max_size=4))
def test_any_word_reaches_the_command_in_any_shell(shell: str, words: list[bytes]) -> None:
    argv = ["printf", "%s\\0", *(word.decode(errors="surrogateescape") for word in words)]
    got: list[bytes] = []
    reader = Framed(NONCE, got.append)
    done = subprocess.run(
        [shell, "-c", BOOTSTRAP.replace("exec sh", f"exec {shell}")],
        input=encode_call(argv, NONCE), capture_output=True, check=True,
        env={"PATH": os.environ["PATH"], "LC_ALL": "C.UTF-8"},
    )  # fmt: skip
    reader.feed(done.stdout)
    assert b"".join(got).split(b"\0")[:-1] == (words or [b""])


@pytest.mark.parametrize(
    ("name", "ending"),
    [("no-such-program", MISSING), ("/no/such", MISSING), ("/etc", NOT_EXECUTABLE)],
)
def test_a_program_that_cannot_be_started_is_no_exit_code(name: str, ending: str) -> None:
    call = encode_call([name], NONCE)
    done = subprocess.run(["sh", "-c", BOOTSTRAP], input=call, capture_output=True, check=True)
    reader = Framed(NONCE, lambda _piece: None)
    reader.feed(done.stdout)
    assert reader.ending == ending


def test_the_login_shell_is_given_nothing_of_the_call() -> None:
    """So nothing of it stands in the pod's process table before the command itself does."""
    call = encode_call(["cat", "secret"], NONCE)
    assert call.endswith(b"\n")
    assert call.count(b"\n") == 1
    assert "secret" not in BOOTSTRAP


def test_a_nul_byte_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="NUL byte"):
        encode_call(["echo", "a\0b"], NONCE)


@pytest.mark.parametrize("where", ["before", "after"])
def test_noise_around_an_answer_is_cut_at_its_ceiling(where: str) -> None:
    reader = Framed(NONCE, lambda _piece: None)
    reader.feed(b"" if where == "before" else framed(b"x"))
    piece = b"y" * 2**16
    with pytest.raises(OversizeError, match="around an answer"):
        for _ in range(MAX_NOISE_BYTES // len(piece) + 2):
            reader.feed(piece)
    assert len(reader.noise) <= 2**17
