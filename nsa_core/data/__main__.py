"""`python -m nsa_core.data`: stage the data of a run, or of a configuration on stdin."""

import argparse
import json
import sys
import time
from pathlib import Path

from pydantic import ValidationError

from nsa_core.config.base import one_line
from nsa_core.config.training import DataConfig
from nsa_core.data.reporting import DataError, StageProgress
from nsa_core.data.staging import StagedData, stage
from nsa_core.rundir.exit import TrainerExit
from nsa_core.rundir.layout import RunDir
from nsa_core.rundir.manifest import ManifestError, read_manifest
from nsa_core.terminal import run_to_exit_code, tell

PROGRESS_EVERY_S = 2.0


def main(arguments: list[str] | None = None) -> int:
    """Stage, print progress on stderr and a JSON summary on stdout; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m nsa_core.data", description=__doc__, allow_abbrev=False
    )
    parser.add_argument("--run-dir", type=Path, help="stage the data of this run's manifest")
    parser.add_argument("--root", type=Path, help="folder that a relative cache_dir lies below")
    parser.add_argument("--seed", type=int, default=0, help="seed of the synthetic source")
    parser.add_argument(
        "--verify", action="store_true", help="hash data and shards again, whatever is remembered"
    )
    parsed = parser.parse_args(arguments)
    try:
        config, seed = _read_config(parsed.run_dir, parsed.seed)
    except (ManifestError, OSError) as error:
        tell(f"error: {one_line(error)}; `nsa-ops run show` names the directory of a run")
        return TrainerExit.CONFIGURATION
    except ValidationError as error:
        where = "data." if error.errors()[0]["loc"] else "stdin holds no configuration of data: "
        tell(f"error: {where}{one_line(error)}; `nsa-ops config show` lists the keys of data")
        return TrainerExit.CONFIGURATION
    try:
        root = parsed.root or Path.cwd()
        staged = stage(config, root, seed, _Printer(), is_rehashed=parsed.verify)
    except DataError as error:
        tell(f"error: {error.message}; {error.hint}")
        return TrainerExit.DATA
    print(json.dumps(summary(staged)))  # noqa: T201 - the result
    return TrainerExit.FINISHED


def summary(staged: StagedData) -> dict[str, object]:
    """What was staged, as the JSON on stdout says it."""
    manifest = staged.manifest
    names = ("num_tokens", "num_documents", "num_text_bytes")
    return {
        "folder": str(staged.folder),
        "manifest_sha256": staged.manifest_sha256,
        "tokenizer": manifest.tokenizer.model_dump(),
        "train": dict(zip(names, manifest.total("train"), strict=True)),
        "validation": dict(zip(names, manifest.total("validation"), strict=True)),
        "rejected": {reason: n.model_dump() for reason, n in manifest.rejected.items()},
        "repaired": {reason: n.model_dump() for reason, n in manifest.repaired.items()},
        "account": staged.account.model_dump(),
        "substituted_synthetic": staged.substituted_synthetic,
        "substitution_reason": staged.substitution_reason,
    }


class _Printer:
    """Prints a progress line on stderr now and then, and whenever something else begins."""

    def __init__(self) -> None:
        self._doing = ""
        self._printed_s = 0.0

    def __call__(self, progress: StageProgress) -> None:
        now_s = time.monotonic()
        if progress.doing == self._doing and now_s - self._printed_s < PROGRESS_EVERY_S:
            return
        self._doing, self._printed_s = progress.doing, now_s
        tell(progress.line())


def _read_config(run_dir: Path | None, seed: int) -> tuple[DataConfig, int]:
    if run_dir is None:
        return DataConfig.model_validate_json(sys.stdin.buffer.read()), seed
    config = read_manifest(RunDir(run_dir)).config
    return config.data, config.seed


if __name__ == "__main__":
    sys.exit(run_to_exit_code(main))
