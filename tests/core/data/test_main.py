"""`python -m nsa_core.data` stages, prints one JSON object, and fails in one clear line."""

import io
import json
from pathlib import Path

import pytest

from nsa_core.config.run import RunConfig
from nsa_core.data.__main__ import main
from nsa_core.rundir.layout import RunDir
from nsa_core.rundir.manifest import RunManifest, write_manifest
from tests.core.data.conftest import local


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path):
    def call(content, *arguments):
        stdin = io.TextIOWrapper(io.BytesIO(content.encode()))
        monkeypatch.setattr("sys.stdin", stdin)
        code = main([*arguments, "--root", str(tmp_path)])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


def test_a_configuration_on_stdin_is_staged_and_summed_up(run, corpus: Path) -> None:
    code, out, err = run(local(corpus).model_dump_json())
    summary = json.loads(out)
    assert code == 0
    assert summary["train"]["num_documents"] + summary["validation"]["num_documents"] == 40
    assert summary["tokenizer"]["name"] == "byte"
    assert "tokenise: 40 documents" in err


def test_the_data_of_a_run_directory_is_staged(run, corpus: Path, tmp_path: Path) -> None:
    directory = RunDir(tmp_path / "runs" / "a-run")
    directory.root.mkdir(parents=True)
    config = RunConfig(data=local(corpus))
    manifest = RunManifest(run_id="a-run", config=config, config_sha256="0", created_unix_s=0)
    write_manifest(directory, manifest)
    code, out, _ = run("", "--run-dir", str(directory.root))
    assert code == 0
    assert json.loads(out)["train"]["num_tokens"] > 0


def test_bad_data_is_exit_14_and_one_line(run, tmp_path: Path) -> None:
    code, out, err = run(local(tmp_path / "nowhere").model_dump_json())
    assert (code, out) == (14, "")
    (line,) = [line for line in err.splitlines() if line.startswith("error:")]
    assert "does not exist" in line
    assert "correct data.path" in line


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "stdin holds no configuration of data: Invalid JSON"),
        ("{}x", "stdin holds no configuration of data: Invalid JSON"),
        ('{"sourc": "stdlib"}', "data.sourc: Extra inputs"),
    ],
)
def test_a_bad_configuration_is_exit_2(run, content: str, said: str) -> None:
    code, out, err = run(content)
    assert (code, out) == (2, "")
    assert err.startswith(f"error: {said}")


def test_a_folder_that_is_no_run_directory_is_exit_2(run, tmp_path: Path) -> None:
    code, _, err = run("", "--run-dir", str(tmp_path))
    assert code == 2
    assert "not a run directory" in err
