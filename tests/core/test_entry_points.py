"""`python -m nsa_core.…` with a path that cannot be used: one clear line, code 2, nothing else."""

import io
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from nsa_core import generate
from nsa_core.bench import __main__ as bench
from nsa_core.checks import __main__ as checks
from nsa_core.checks import machine
from nsa_core.config.recipe import resolve
from nsa_core.data import __main__ as data
from nsa_core.evaluate import __main__ as evaluate
from nsa_core.rundir import bounded_json
from nsa_core.rundir.layout import RunDir
from nsa_core.rundir.manifest import RunManifest, write_manifest
from nsa_core.train import __main__ as train

Main = Callable[[list[str]], int]

RUN_COMMANDS = [
    pytest.param(generate.main, ["--prompt", "x", "--device", "cpu", "--run"], id="generate"),
    pytest.param(evaluate.main, ["needle", "--device", "cpu", "--run"], id="needle"),
    pytest.param(train.main, ["--run-dir"], id="train"),
    pytest.param(data.main, ["--run-dir"], id="data"),
]
CONFIG_COMMANDS = [
    pytest.param(checks.main, ["--device", "cpu", "--config"], id="checks"),
    pytest.param(machine.main, ["--folder", ".", "--config"], id="machine"),
    pytest.param(bench.main, ["validate", "--config"], id="bench validate"),
]


def refused(main: Main, words: Sequence[str | Path], capfd: pytest.CaptureFixture[str]) -> str:
    """The one line, and perhaps its hint, on stderr."""
    capfd.readouterr()
    assert main([str(word) for word in words]) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert err.count("\n") == 1 or err.splitlines()[1].startswith("hint: ")
    return err


def places(tmp_path: Path) -> list[Path]:
    """Nothing, a file, below a file, an empty folder, and a folder whose manifest is a folder."""
    file = tmp_path / "file"
    file.touch()
    (tmp_path / "empty").mkdir()
    (tmp_path / "odd" / "manifest.json").mkdir(parents=True)
    return [tmp_path / "absent", file, file / "below", tmp_path / "empty", tmp_path / "odd"]


ABBREVIATED = [
    pytest.param(checks.main, ["--dev", "cpu"], id="checks"),
    pytest.param(machine.main, ["--fold", "."], id="machine"),
    pytest.param(data.main, ["--run", "."], id="data"),
    pytest.param(train.main, ["--run", "."], id="train"),
    pytest.param(generate.main, ["--run", ".", "--prom", "x"], id="generate"),
    pytest.param(bench.main, ["validate", "--conf", "-"], id="bench validate"),
]


@pytest.mark.parametrize(("main", "words"), ABBREVIATED)
def test_a_flag_is_written_out(
    main: Main, words: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    """A shorter one would mean something else as soon as another flag begins like it."""
    with pytest.raises(SystemExit) as ended:
        main(words)
    out, err = capfd.readouterr()
    assert (ended.value.code, out) == (2, "")
    assert err.startswith("usage: ")


@pytest.mark.parametrize(("main", "words"), RUN_COMMANDS)
def test_a_path_that_is_no_run_directory_is_refused_with_the_next_command(
    main: Main, words: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for place in places(tmp_path):
        said = refused(main, [*words, place], capfd)
        assert f"{place}/manifest.json" in said
        assert "this is not a run directory" in said
        assert "`nsa-ops " in said


@pytest.mark.parametrize(("main", "words"), RUN_COMMANDS)
def test_a_run_directory_that_may_not_be_read_is_refused(
    main: Main, words: list[str], tmp_path: Path,
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    found = resolve("tiny-cpu", "cpu")
    write_manifest(
        RunDir(tmp_path),
        RunManifest(
            run_id="r", config=found.config, config_sha256=found.sha256, created_unix_s=0.0
        ),
    )

    def refuse(path: Path, *_: object) -> bytes:
        raise PermissionError(13, "Permission denied", str(path))  # as root, chmod refuses nothing

    monkeypatch.setattr(bounded_json, "read_bounded", refuse)
    said = refused(main, [*words, tmp_path], capfd)
    assert f"error: {tmp_path}/manifest.json: Permission denied" in said


@pytest.mark.parametrize(("main", "words"), CONFIG_COMMANDS)
def test_a_path_that_is_no_configuration_is_refused_and_says_where_one_is(
    main: Main, words: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "broken.json").write_text('{"model": ')
    (tmp_path / "other.json").write_text('{"model": {"dm": 3}}')
    (tmp_path / "bytes.json").write_bytes(b"\xff\xfe")
    for place in (*places(tmp_path)[:4], *tmp_path.glob("*.json")):
        said = refused(main, [*words, place], capfd)
        assert f"--config {place}: not a configuration: " in said
        assert "holds one as config.json" in said
        assert "Errno" not in said
    assert "model.dm: Extra inputs" in refused(main, [*words, tmp_path / "other.json"], capfd)


@pytest.mark.parametrize(
    ("main", "words"),
    [
        pytest.param(bench.main, ["recall", "--device", "cpu", "--json"], id="bench"),
        pytest.param(evaluate.main, ["needle", "--run", "no-run", "--picture"], id="needle"),
    ],
)
def test_a_place_that_cannot_be_written_is_refused_before_anything_is_measured(
    main: Main, words: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "file"
    file.touch()
    for place in (tmp_path, file / "below"):
        said = refused(main, [*words, place], capfd)
        assert str(tmp_path) in said
        assert "no-run" not in said
        assert "Errno" not in said


def test_a_configuration_of_data_that_is_none_names_the_key_and_the_next_command(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b'{"sourc": "stdlib"}')))
    said = refused(data.main, [], capfd)
    assert "data.sourc: Extra inputs" in said
    assert "`nsa-ops config show`" in said


def test_a_disk_that_refuses_the_result_of_a_bench_is_a_lack_of_this_machine(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device", "/there/result.json")

    monkeypatch.setattr(bench, "_run", full)
    assert bench.main(["recall", "--device", "cpu"]) == 11
    assert capfd.readouterr().err == (
        "error: /there/result.json: No space left on device; Free space, then repeat it\n"
    )
