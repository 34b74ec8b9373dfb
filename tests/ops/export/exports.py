"""Runs to export, among them one whose every free text tries to leave its place."""

from pathlib import Path

import yaml

from nsa_core.config.profile import load_profile
from nsa_core.config.recipe import config_sha256, resolve
from nsa_core.config.run import RunConfig
from nsa_core.rundir.manifest import RunManifest
from nsa_ops.export.export import RENDERERS, describe
from nsa_ops.export.exported import ExportedRun
from nsa_ops.remote.snapshot import Snapshot
from tests.conftest import REPOSITORY

#: Ends quotes, here-documents, comments and YAML blocks; expands in shells and templates.
HOSTILE = (
    "'\"; touch canary; $(touch canary) `touch canary` ${HOME} $((1)) ${{ secrets.KEY }} {{ 1 }}\n"
    "NSA_MANIFEST\ntouch canary\n' \\' \\\" \\u0024 \\$(touch canary)\n#SBATCH --exclusive\n"
    "---\nkind: Secret\n\t\x1b[31m\x07\x7f é \U0001f600 & | ; < > ! * ? ~ % $(hostname) # end"
)
TWO_NODES = (
    "runtime.num_gpus=8",
    "runtime.num_pods=2",
    "batch.micro_batch=8",
    "batch.accumulation=16",
)
SNAPSHOT = Snapshot(
    root=REPOSITORY,
    files=("requirements/train.lock", "requirements/torch.txt", "tools/setup.sh"),
    code_id="0123456789abcdef",
    commit="f" * 40,
    dirty_sha256="",
    lock_sha256="",
    total_bytes=0,
)


def manifest_for(config: RunConfig, profile: str, **fields: object) -> RunManifest:
    return RunManifest(
        run_id="20261127-1403-m7c-125m-a1b2",
        config=config,
        config_sha256=config_sha256(config),
        profile=profile,
        code_id=SNAPSHOT.code_id,
        created_unix_s=0.0,
    ).model_copy(update=fields)


def exported(
    profile: str = "h100",
    recipe: str = "m7c-125m",
    sets: tuple[str, ...] = TWO_NODES,
    image: str = "",
) -> ExportedRun:
    """A run of a recipe."""
    config = resolve(recipe, profile, sets).config
    return describe(manifest_for(config, profile), load_profile(profile), SNAPSHOT, image)


def hostile() -> tuple[ExportedRun, RunManifest]:
    """A run whose recipe, paths, words and overrides are `HOSTILE`, and its manifest."""
    given = resolve("m7c-125m", "h100", TWO_NODES).config
    nested = given.model_dump(mode="python")
    nested["recipe"] = HOSTILE
    nested["data"] |= {"source": "fineweb_edu_local", "path": f"/{HOSTILE}", "text_key": HOSTILE}
    nested["evaluation"]["sample_prompt"] = HOSTILE
    manifest = manifest_for(
        RunConfig.model_validate(nested),
        "h100",
        overrides={HOSTILE: HOSTILE},
        command=["nsa-ops", HOSTILE],
        origins={"data.path": HOSTILE},
    )
    hardware = load_profile("h100").model_copy(update={"name": HOSTILE})
    return describe(manifest, hardware, SNAPSHOT, ""), manifest


def rendered(engine: str, run: ExportedRun) -> str:
    return RENDERERS[engine][0](run, f"train{RENDERERS[engine][1]}")


def script_of(engine: str, text: str) -> str:
    """The shell script that the engine runs on a node, as its YAML reader sees it."""
    match engine:
        case "slurm":
            return text
        case "skypilot":
            return str(yaml.safe_load(text)["run"])
        case "dstack":
            (script,) = yaml.safe_load(text)["commands"]
            return str(script)
        case _:
            return str(next(yaml.safe_load_all(text))["data"]["node.sh"])


def moved(script: str, folder: Path) -> str:
    """A script whose places are below a folder of the test, as an operator edits them."""
    for old, new in (
        ("root=/nsa\n", f"root={folder}/kept\n"),
        ("scratch=/tmp/nsa-scratch\n", f"scratch={folder}/scratch\n"),
        ("scratch=$HOME/nsa-scratch\n", f"scratch={folder}/scratch\n"),
        ("archive=/tmp/", f"archive={folder}/"),
        (
            "archive=/etc/nsa/code/code.tar.bz2",
            f"archive={folder}/nsa-code-{SNAPSHOT.code_id}.tar.bz2",
        ),
    ):
        script = script.replace(old, new)
    return script
