"""The strict reader of tensor files: what the library writes passes, everything else is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nsa_ops.backup.safetensors import TensorFileError, read_tensor_entries
from tests.ops.report.tensors import safetensors_bytes


def _file(header: object, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def _read(tmp_path: Path, content: bytes) -> list[Any]:
    path = tmp_path / "x.safetensors"
    path.write_bytes(content)
    return read_tensor_entries(path)


def _tensor(begin: int, end: int, shape: object = (1,), kind: object = "F32") -> dict[str, object]:
    return {"dtype": kind, "shape": shape, "data_offsets": [begin, end]}


def test_tensors_are_listed_in_order_of_their_bytes(tmp_path: Path) -> None:
    entries = _read(tmp_path, safetensors_bytes({"b": [2, 3], "a": [], "empty": [0, 7]}))
    assert [(entry.name, entry.num_elements) for entry in entries] == [
        ("b", 6),
        ("a", 1),
        ("empty", 0),
    ]


def test_files_of_the_library_itself_are_accepted(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    library = pytest.importorskip("safetensors.torch")
    tensors = {
        "weights": torch.zeros(3, 5, dtype=torch.bfloat16),
        "steps": torch.tensor(7),
        "mask": torch.ones(4, dtype=torch.bool),
    }
    library.save_file(tensors, tmp_path / "real.safetensors", metadata={"format": "pt"})
    entries = read_tensor_entries(tmp_path / "real.safetensors")
    assert {entry.name: entry.shape for entry in entries} == {
        "weights": (3, 5),
        "steps": (),
        "mask": (4,),
    }


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"", "too few for a header length"),
        (b"\xff" * 8, "the header claims"),
        (_file(b"[]"), "does not begin with"),
        (_file(b"{torn"), "is not JSON"),
        (_file(b'{"a":' * 5000), "is not JSON"),
        (_file(b'{"a": {}, "a": {}}'), "the key 'a' twice"),
        (_file({"__metadata__": {"n": 1}}), "not an object of strings"),
        (_file({"a": _tensor(0, 4, kind="F99")}, bytes(4)), "unknown type"),
        (_file({"a": _tensor(0, 4, shape=[-1])}, bytes(4)), "no proper dtype"),
        (_file({"a": _tensor(0, 4, shape=[True])}, bytes(4)), "no proper dtype"),
        (_file({"a": {**_tensor(0, 4), "extra": 1}}, bytes(4)), "no proper dtype"),
        (_file({"a": [1, 2]}, bytes(4)), "no proper dtype"),
        (_file({"a": _tensor(0, 8)}, bytes(8)), "needs 4 bytes and has 8"),
        (_file({"a": _tensor(0, 4), "b": _tensor(8, 12)}, bytes(12)), "at byte 8 and not at 4"),
        (_file({"a": _tensor(0, 4), "b": _tensor(0, 4)}, bytes(4)), "at byte 0 and not at 4"),
        (_file({"a": _tensor(0, 4)}, bytes(3)), "need 4 bytes and the file holds 3"),
        (_file({"a": _tensor(0, 4)}, bytes(5)), "need 4 bytes and the file holds 5"),
        (_file({"a": _tensor(0, 1, shape=[3], kind="F4")}, bytes(1)), "needs 1 bytes"),
    ],
)  # fmt: skip
def test_everything_else_is_refused_in_words(
    tmp_path: Path, content: bytes, complaint: str
) -> None:
    with pytest.raises(TensorFileError, match=complaint):
        _read(tmp_path, content)


@given(st.data())
def test_a_cut_at_any_byte_is_noticed(tmp_path_factory: pytest.TempPathFactory, data: Any) -> None:
    whole = safetensors_bytes({"a": [3], "b": [2, 2]})
    cut = data.draw(st.integers(0, len(whole) - 1))
    with pytest.raises(TensorFileError):
        _read(tmp_path_factory.mktemp("cut"), whole[:cut])
