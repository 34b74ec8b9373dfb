"""`nsa-ops export`: what is taken, what is refused, and what is written."""

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from nsa_core.config.training import MAX_PODS
from nsa_core.rundir.layout import RunDir
from nsa_core.rundir.manifest import RunManifest, write_manifest
from nsa_ops.errors import PodUnreachableError
from nsa_ops.export.export import RENDERERS, find_manifest
from nsa_ops.remote.snapshot import RECEIVE, take_snapshot
from nsa_ops.runs.choose import record_of
from tests.ops.cli_case import CommandLine
from tests.ops.export.exports import HOSTILE, exported, hostile, rendered, script_of
from tests.ops.fakes import FakeTransport
from tests.ops.operators import POD, Desk

SECRET = "hf_" + "Ab3dEf9h" * 4
TINY = ("--recipe", "tiny-cpu", "--profile", "cpu")


@pytest.fixture
def ops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cli: CommandLine) -> CommandLine:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "folder").mkdir()
    monkeypatch.chdir(tmp_path / "folder")
    return cli


def manifest_in(text: str) -> RunManifest:
    """The manifest of a Slurm script."""
    inside = text.partition("<<'NSA_MANIFEST'\n")[2].partition("\nNSA_MANIFEST\n")[0]
    return RunManifest.model_validate_json(inside)


def test_a_recipe_becomes_a_file_and_the_code_beside_it(ops: CommandLine) -> None:
    said = ops("export", "--to", "slurm", *TINY, "--run-id", "r1", "--json", "--set", "seed=7")
    assert said.exit_code == 0, said.err
    data = json.loads(said.out)["data"]
    assert (data["run_id"], data["nodes"], data["file"]) == ("r1", 1, "r1.slurm.sh")
    assert data["start"] == "sbatch r1.slurm.sh"
    manifest = manifest_in(Path("r1.slurm.sh").read_text())
    assert (manifest.run_id, manifest.attempt, manifest.config.seed) == ("r1", 1, 7)
    assert manifest.config_sha256
    assert manifest.code_id == take_snapshot().code_id
    code = Path(data["code"])
    assert code.name == f"nsa-code-{manifest.code_id}.tar.bz2"
    done = subprocess.run(
        [sys.executable, "-I", "-c", RECEIVE, str(Path("code").absolute()), manifest.code_id],
        input=code.read_bytes(), capture_output=True, check=False,
    )  # fmt: skip
    assert done.stdout.strip() == b"shipped", done.stderr
    assert Path("code/nsa_core/train/__main__.py").is_file()


def test_the_same_run_goes_to_another_engine_and_an_edited_file_is_kept(ops: CommandLine) -> None:
    words = ("export", *TINY, "--run-id", "r1", "--output", "train")
    assert ops(*words, "--to", "kubernetes").exit_code == 0
    before = Path("train").read_text()
    again = ops(*words, "--to", "dstack")
    assert again.exit_code == 7
    assert "`train` exists already" in again.err
    assert Path("train").read_text() == before
    assert "nsa_ops.pod.node_job" in script_of("kubernetes", before)


def test_a_run_gives_its_configuration_to_a_new_run(ops: CommandLine) -> None:
    _, given = hostile()
    old = RunDir(Path("r0").absolute())
    old.root.mkdir()
    write_manifest(old, given.model_copy(update={"run_id": "r0"}))
    words = ("--to", "slurm", "--run-id", "r2", "--nodes", "1", "--output", "x.sh")
    said = ops("export", "r0", *words, "--override", "recipe=a test")
    assert said.exit_code == 0, said.err
    manifest = manifest_in(Path("x.sh").read_text())
    assert (manifest.run_id, manifest.attempt) == ("r2", 1)
    assert manifest.config.runtime.num_pods == 1
    assert manifest.config.evaluation.sample_prompt == HOSTILE
    assert manifest.overrides == {"recipe": "a test"}
    assert manifest.config_sha256 != given.config_sha256
    assert "the configuration of run r0" in said.out
    assert "--nodes=1" in Path("x.sh").read_text()


def test_a_run_is_read_from_its_pod_and_a_silent_pod_names_the_backup(desk: Desk) -> None:
    manifest = hostile()[1].model_copy(update={"run_id": "r0"})
    desk.store.save_run(record_of(desk.operator.link(POD), manifest))
    path = "/pod/runs/r0/manifest.json"
    desk.transport.files[path] = manifest.model_dump_json().encode()
    assert find_manifest(desk.operator, "r0") == manifest

    class Silent(FakeTransport):
        def tail(self, path: str, offset: int, **_: object) -> bytes:
            message = "Pod `a100-1` does not answer"
            raise PodUnreachableError(message)

    desk.transport = Silent()
    with pytest.raises(PodUnreachableError) as failed:
        find_manifest(desk.operator, "r0")
    assert "backup" in failed.value.hint


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (("--to", "lsf", *TINY), 2, "no engine `lsf`"),
        (TINY, 2, "Missing option `--to`"),
        (("--to", "slurm", "--recipe", "tiny-cpu"), 2, "No hardware profile was named"),
        (("--to", "slurm", *TINY, "--run-id", "a b"), 2, "Run id `a b`"),
        (("--to", "slurm", *TINY, "--image", "a b"), 2, "no name of a container image"),
        (("--to", "slurm", *TINY, "--nodes", "0"), 2, "`--nodes`"),
        (("--to", "slurm", *TINY, "--nodes", f"{MAX_PODS + 1}"), 2, "`--nodes`"),
        (("--to", "slurm", *TINY, "--nodes", "3"), 2, "does not divide"),
        (("--to", "slurm", *TINY, "--output", "no/where.sh"), 6, "folder `no`"),
        (("--to", "slurm", *TINY, "--output", "."), 7, "exists already"),
        (("nothing-here", "--to", "slurm"), 6, "nothing-here"),
        ((".", "--to", "slurm"), 6, "not a run directory"),
        ((".", "--to", "slurm", *TINY), 2, "has its recipe and profile already"),
        (("--to", "slurm", *TINY, "--set", "schedule.steps=9000"), 3, "guardrail"),
        (("--to", "slurm", *TINY, "--set", f"data.text_key={SECRET}"), 2, "looks like a secret"),
        (
            ("--to", "slurm", *TINY, "--set", "data.source=fineweb_edu_local", "--set",
             "data.path=text"), 2, "data.path `text` is relative",
        ),
        (("--to", "slurm", *TINY, "--override", "nothing=x"), 2, "no guardrail `nothing`"),
        (
            ("--to", "slurm", "--recipe", "m7c-125m", "--profile", "h100", "--set",
             "runtime.num_gpus=auto"), 2, "num_gpus is auto",
        ),
    ],
)  # fmt: skip
def test_bad_input_is_one_line_with_a_hint(
    ops: CommandLine, words: tuple[str, ...], code: int, message: str
) -> None:
    said = ops("export", *words)
    assert said.exit_code == code, said.err
    error, _, hint = said.err.splitlines()
    assert error.startswith("error: ")
    assert message in error
    assert hint.startswith("hint: ")
    assert not [path for path in Path().iterdir() if path.name != "no"]


@pytest.mark.parametrize("engine", RENDERERS)
def test_the_commands_that_are_shown_work_as_typed(ops: CommandLine, engine: str) -> None:
    Path("my runs").mkdir()
    said = ops("export", "--to", engine, *TINY, "--output", "my runs/a b;c.txt", "--json")
    data = json.loads(said.out)["data"]
    commands = [data["start"], *(n.partition("`")[2].rstrip("`") for n in data["notes"])]
    for command in commands[: 2 if engine == "kubernetes" else 1]:
        folder, _, start = command.partition(" && ")
        assert folder == "cd 'my runs'"
        named = [Path("my runs") / word.rpartition("=")[2] for word in shlex.split(start)]
        assert any(path.is_file() for path in named), command


def test_no_file_names_a_registry_host_or_makes_a_secret() -> None:
    for engine in RENDERERS:
        text = rendered(engine, exported())
        assert "://" not in text
        for document in yaml.safe_load_all(text) if engine != "slurm" else ():
            assert document.get("kind") != "Secret"


def test_the_help_names_every_engine(ops: CommandLine) -> None:
    assert "|".join(RENDERERS) in ops("export", "--help").out
