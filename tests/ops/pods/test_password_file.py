"""`--password-from FILE`: a file that cannot be used is one sentence with its own exit code."""

import io
from pathlib import Path

import pytest

from nsa_ops.errors import ConfigurationError, LocalResourceError, NotFoundError, OpsError
from nsa_ops.pods.first_login import read_password


def read(path: Path) -> str:
    return read_password(str(path), io.StringIO())


def test_the_password_is_the_first_line_whatever_ends_it(tmp_path: Path) -> None:
    path = tmp_path / "password"
    path.touch(mode=0o600)
    path.write_bytes("päss word\r\nnot this\r\n".encode())
    assert read(path) == "päss word"


@pytest.mark.parametrize(
    ("name", "kind", "says"),
    [
        ("absent", NotFoundError, "does not exist"),
        ("folder", ConfigurationError, "is a folder"),
        ("open", LocalResourceError, "has mode 644"),
        ("bytes", ConfigurationError, "is no UTF-8 text"),
        ("empty", ConfigurationError, "gave no password"),
    ],
)
def test_a_file_that_cannot_be_used_says_why(
    tmp_path: Path, name: str, kind: type[OpsError], says: str
) -> None:
    (tmp_path / "folder").mkdir()
    for file, mode, content in (
        ("open", 0o644, b"x"), ("bytes", 0o600, b"\xff\xfe"), ("empty", 0o600, b"")
    ):  # fmt: skip
        (tmp_path / file).write_bytes(content)
        (tmp_path / file).chmod(mode)
    with pytest.raises(kind, match=says):
        read(tmp_path / name)
