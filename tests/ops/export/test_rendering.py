"""What is written for an engine: nothing in it leaves its place, and each node gets its rank."""

import io
import json
import re
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
import yaml

from nsa_core.config.profile import load_profile
from nsa_ops.errors import ConfigurationError
from nsa_ops.export.export import RENDERERS, check_exportable
from nsa_ops.export.exported import (
    check_image,
    engine_name,
    safe_json,
)
from tests.ops.export.exports import HOSTILE, exported, hostile, moved, rendered, script_of

#: An interpreter that has every package, unpacks nothing and writes down how the training begins.
PYTHON = """#!/bin/sh
case "$*" in
*node_job*)
  for word; do
    printf '%s\\n' "$word"
    case $before in --manifest) cp "$word" "$RECORD.manifest.$$" ;; esac
    before=$word
  done >"$RECORD.words.$$" ;;
*receive*) mkdir -p "$3" && : >"$3/CODE_ID" ;;
esac
"""
SRUN = """#!/bin/sh
while case $1 in --*) true ;; *) false ;; esac; do shift; done
for SLURM_PROCID in 0 1; do
  export SLURM_PROCID
  "$@" || exit $?
done
"""
#: By engine, the variables of node 1 of two; `srun` above sets those of both nodes.
VARIABLES = {
    "skypilot": {
        "SKYPILOT_NODE_RANK": "1", "SKYPILOT_NUM_NODES": "2",
        "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2",
    },
    "dstack": {
        "DSTACK_NODE_RANK": "1", "DSTACK_NODES_NUM": "2", "DSTACK_MASTER_NODE_IP": "10.0.0.1",
    },
    "kubernetes": {"JOB_COMPLETION_INDEX": "1"},
    "slurm": {
        "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_JOB_ID": "4711", "SLURM_JOB_NUM_NODES": "2",
    },
}  # fmt: skip
MASTER = {
    "skypilot": ("10.0.0.1", "29500"),
    "dstack": ("10.0.0.1", "29500"),
    "kubernetes": ("{name}-0.{name}", "29500"),
    "slurm": ("first-node", "30211"),
}


def run_script(engine: str, script: str, folder: Path) -> list[tuple[list[str], str]]:
    """Run a node's script with stand-ins; the words and the manifest of each training."""
    programs = folder / "bin"
    for name, text in (
        ("python3", PYTHON), ("srun", SRUN), ("scontrol", "#!/bin/sh\necho first-node\n"),
    ):  # fmt: skip
        programs.mkdir(exist_ok=True)
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    (folder / "work").mkdir()
    script = moved(script, folder)
    archive = re.search(r"nsa-code-[0-9a-f]{16}\.tar\.bz2", script)
    assert archive is not None
    (folder / archive[0]).touch()
    done = subprocess.run(
        ["bash" if engine == "slurm" else "sh", "-c", script],
        cwd=folder / "work",
        env={
            "PATH": f"{programs}:/usr/bin:/bin",
            "HOME": str(folder),
            "RECORD": str(folder / "record"),
            "SLURM_SUBMIT_DIR": str(folder),
            **VARIABLES[engine],
        },
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert not list((folder / "work").iterdir()), "something wrote into the working folder"
    assert not list(folder.rglob("canary"))
    words = [path.read_text().splitlines() for path in folder.glob("record.words.*")]
    manifests = [path.read_text() for path in folder.glob("record.manifest.*")]
    return sorted(zip(words, manifests, strict=True))


def packed(files: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:bz2") as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return buffer.getvalue()


@pytest.mark.parametrize("engine", RENDERERS)
def test_a_hostile_value_stays_in_the_manifest_and_comes_out_of_it_unchanged(
    engine: str, tmp_path: Path
) -> None:
    run, manifest = hostile()
    script = script_of(engine, rendered(engine, run))
    trained = run_script(engine, script, tmp_path)
    assert trained
    for _, text in trained:
        assert json.loads(text) == manifest.model_dump(mode="json")


@pytest.mark.parametrize("engine", RENDERERS)
def test_a_node_trains_with_the_rank_that_the_engine_gave_it(engine: str, tmp_path: Path) -> None:
    run = exported()
    trained = run_script(engine, script_of(engine, rendered(engine, run)), tmp_path)
    assert len(trained) == (2 if engine == "slurm" else 1)
    address, port = MASTER[engine]
    root = tmp_path / ("nsa" if engine == "slurm" else "kept")
    for rank, (words, _) in enumerate(trained, start=2 - len(trained)):
        given = dict(zip(words[2::2], words[3::2], strict=True))
        assert words[:2] == ["-m", "nsa_ops.pod.node_job"]
        assert given.pop("--manifest").endswith(f"{run.run_id}.manifest.json")
        assert given == {
            "--run-dir": f"{root}/node_{rank}/runs/{run.run_id}",
            "--num-nodes": "2",
            "--node-rank": str(rank),
            "--master-addr": address.format(name=run.name),
            "--master-port": port,
            "--stop-signal": "INT" if engine == "dstack" else "TERM",
        }


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "error: the code is missing"),
        (b"cut off", "ReadError"),
        (packed({"nsa_ops/x.py": b"other code"}), "instead of 0123456789abcdef"),
        (packed({"../canary": b"outside"}), "unexpected member ../canary"),
    ],
)
def test_code_that_is_not_as_exported_is_never_run(
    content: bytes | None, said: str, tmp_path: Path
) -> None:
    script = moved(script_of("kubernetes", rendered("kubernetes", exported())), tmp_path)
    if content is not None:
        (tmp_path / "nsa-code-0123456789abcdef.tar.bz2").write_bytes(content)
    done = subprocess.run(
        ["sh", "-c", script], capture_output=True, text=True, check=False, timeout=60,
        env={
            "PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin", "JOB_COMPLETION_INDEX": "0",
        },
    )  # fmt: skip
    assert done.returncode in {1, 2}, "final for every engine"
    assert said in done.stderr
    assert not list(tmp_path.rglob("CODE_ID"))
    assert not list(tmp_path.rglob("canary"))
    assert not (tmp_path / "kept/node_0").exists()


@pytest.mark.parametrize("engine", RENDERERS)
def test_a_comment_is_one_line_whatever_stands_in_it(engine: str) -> None:
    """Until the first line that is none, where `#SBATCH` and YAML begin."""
    run, _ = hostile()
    lines = rendered(engine, run).splitlines()
    head = lines[: next(n for n, line in enumerate(lines) if n and not line.startswith("# "))]
    assert any("touch canary" in line for line in head)
    assert all(line.isascii() or line.isprintable() for line in lines)
    asked = [line for line in lines if line.startswith("#SBATCH")]
    assert not [line for line in asked if "exclusive" in line]
    if engine == "kubernetes":
        kinds = [one["kind"] for one in yaml.safe_load_all(rendered(engine, run))]
        assert kinds == ["ConfigMap", "Service", "PersistentVolumeClaim", "Job"]


def test_no_sign_that_a_shell_or_template_expands_is_left_in_a_string() -> None:
    text = safe_json({"key": HOSTILE, HOSTILE: [HOSTILE, 1.5, None, True]})
    assert json.loads(text) == {"key": HOSTILE, HOSTILE: [HOSTILE, 1.5, None, True]}
    assert not set("$`'") & set(text)
    assert "{{" not in text
    assert all(line[:1] in {"{", "}", " "} for line in text.splitlines())


@pytest.mark.parametrize("engine", RENDERERS)
def test_the_linter_of_shells_has_nothing_to_say(engine: str, tmp_path: Path) -> None:
    script = script_of(engine, rendered(engine, exported("a100")))
    path = tmp_path / "node.sh"
    path.write_text(script if engine == "slurm" else f"#!/bin/sh\n{script}")
    linter = Path(sys.executable).with_name("shellcheck")
    done = subprocess.run([linter, path], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("run_id", "name"),
    [
        ("20261127-1403-m7c-125m-a1b2", "nsa-20261127-1403-m7c-125m-a1b2"),
        ("Run_1", "nsa-run-1-"),
        ("run-1", "nsa-run-1"),
        ("x" * 80, "nsa-xxxx"),
        ("a..b--", "nsa-a-b-"),
    ],
)
def test_a_name_is_one_that_every_engine_takes(run_id: str, name: str) -> None:
    given = engine_name(run_id)
    assert given.startswith(name)
    assert re.fullmatch(r"[a-z][a-z0-9-]{1,38}[a-z0-9]", given)


def test_two_run_ids_never_share_a_name() -> None:
    assert len({engine_name(run_id) for run_id in ("run-1", "Run-1", "run_1", "run.1")}) == 4


@pytest.mark.parametrize("image", ["a b", "x\ny", "-x", "${x}", "x" * 300, '"', "#x"])
def test_a_name_that_is_no_image_is_refused(image: str) -> None:
    with pytest.raises(ConfigurationError, match="no name of a container image"):
        check_image(image)


def test_what_a_profile_says_of_torch_is_a_version_and_no_command() -> None:
    hardware = load_profile("h100").model_copy(update={"torch_requirement": "torch\n; touch x"})
    with pytest.raises(ConfigurationError, match="says"):
        check_exportable(hostile()[1].config, hardware)
