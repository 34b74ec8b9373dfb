"""RunManifest: the frozen record of one launch, and how the next attempt replaces it."""

import secrets
from typing import Annotated, Any

from pydantic import Field

from nsa_core.config.base import FrozenModel, TolerantModel, one_line
from nsa_core.config.run import RunConfig
from nsa_core.config.training import MAX_PODS
from nsa_core.rundir.atomic import fsync_dir, write_text
from nsa_core.rundir.bounded_json import read_model
from nsa_core.rundir.exit import keep_exit
from nsa_core.rundir.layout import RunDir
from nsa_core.rundir.redaction import FreeText

#: 128 random bits in hex; empty in files that were written before attempts had one.
AttemptId = Annotated[str, Field(pattern=r"^(?:[0-9a-f]{32})?$")]
#: `resume` beside a path: from the newest whole checkpoint, or from the first step in any case.
AUTO, AFRESH = "auto", "afresh"


def new_attempt_id() -> str:
    """An identity that no other attempt has and that nobody can guess."""
    return secrets.token_hex(16)


class Parent(FrozenModel):
    """The run and step whose checkpoint another run began from; `attempt_id` wrote it."""

    run_id: str
    step: int
    attempt_id: AttemptId = ""


class Node(FrozenModel):
    """Which of the pods of a run this one is, and where their ranks meet.

    Attributes:
        rank: Number of this pod among them; checkpoints are on pod 0.
        address: Of pod 0, as the others reach it; empty where the run has one pod.
        interface: Network interface of this pod that leads there; empty lets the libraries choose.
    """

    rank: int = Field(0, ge=0, lt=MAX_PODS)
    address: str = ""
    port: int = Field(0, ge=0, le=65_535)
    interface: str = ""


class KernelChoice(FrozenModel):
    """The attention backend of one branch, and why it is that one."""

    name: str
    reason: str


class RunManifest(TolerantModel):
    """Content of manifest.json.

    Attributes:
        attempt: 1 at launch; every resume or restart adds one.
        attempt_id: Random identity of this attempt; empty in a manifest of an older version.
        earlier_attempts: Identities of the attempts before, by number; see lineage.py.
        parent: Run and step it began from, if it is not a fresh model.
        origins: Where each value of it comes from, by dotted key; absent keys are defaults.
        code_id: Hash of the code that runs.
        code_commit: Git commit, `unknown` outside a checkout.
        dirty_sha256: Hash of the uncommitted difference; empty if there is none.
        lock_sha256: Hash of the lock file the environment was made from.
        pod_id: Pod it was launched on.
        node: Which of the run's pods that is.
        pod_facts: Cards, driver, torch, CUDA as preflight saw them.
        preflight_sha256: Report that allowed the launch; empty if it was overridden.
        kernels: By branch, the backend that the preflight proved on this pod. The trainer refuses
            to use another one. A branch that was not proven under this configuration is absent.
        overrides: Guardrails that were overridden, with the reason given, redacted.
        resume: `auto`, `afresh`, or the path of the checkpoint to begin from.
        command: Command that launched it, word for word but redacted.
    """

    schema_version: int = 1
    run_id: str
    attempt: int = 1
    attempt_id: AttemptId = ""
    earlier_attempts: dict[int, AttemptId] = {}
    parent: Parent | None = None
    config: RunConfig
    origins: dict[str, str] = {}
    config_sha256: str
    profile: str = "none"
    code_id: str = "unknown"
    code_commit: str = "unknown"
    dirty_sha256: str = ""
    lock_sha256: str = ""
    pod_id: str = ""
    node: Node = Node()
    pod_facts: dict[str, Any] = {}
    preflight_sha256: str = ""
    kernels: dict[str, KernelChoice] = {}
    overrides: dict[str, FreeText] = {}
    resume: str = AUTO
    command: list[FreeText] = []
    created_unix_s: float

    @property
    def pod_ranks(self) -> range:
        """Ranks of the run on this pod; the first one leads them."""
        per_pod = self.config.ranks_per_pod
        return range(self.node.rank * per_pod, (self.node.rank + 1) * per_pod)


class ManifestError(ValueError):
    """manifest.json is missing or cannot be used."""


def read_manifest(run: RunDir) -> RunManifest:
    """The manifest of the current attempt.

    Raises:
        ManifestError: If it is missing or damaged; the message says which.
        OSError: If it may not or cannot be read.
    """
    try:
        return read_model(RunManifest, run.manifest)
    except (FileNotFoundError, NotADirectoryError) as error:
        message = f"{run.manifest} does not exist: this is not a run directory"
        raise ManifestError(message) from error
    except IsADirectoryError as error:
        message = f"{run.manifest} is a folder: this is not a run directory"
        raise ManifestError(message) from error
    except ValueError as error:
        message = f"{run.manifest} cannot be used: {one_line(error)}"
        raise ManifestError(message) from error


def write_manifest(run: RunDir, manifest: RunManifest) -> None:
    """Write manifest.json whole."""
    write_text(run.manifest, manifest.model_dump_json(indent=2) + "\n")


def begin_next_attempt(
    run: RunDir, *, at_unix_s: float, wanted: RunManifest | None = None
) -> RunManifest:
    """Keep the ended attempt's manifest and exit record, and write the next manifest.

    In this order: both are copied to attempts/k/, the manifest is replaced, exit.json is removed,
    and a stop request, which meant the ended attempt, goes to attempts/k/ as well.
    The replacement is the moment of change. A kill before it leaves the ended attempt with its
    exit record, and a second call does all of it again. A kill after it leaves the next attempt,
    and `read_exit` ignores the record of the last one until it is removed or replaced.
    The new attempt gets an identity of its own, and that of the old one joins its lineage.

    Args:
        run: Run directory of an attempt that has ended.
        at_unix_s: Creation time of the new attempt.
        wanted: What the new attempt shall run; its number, identity, lineage and creation time are
            set here. By default the same as the ended one.
    """
    old = read_manifest(run)
    new = (wanted or old).model_copy(
        update={
            "attempt": old.attempt + 1,
            "attempt_id": new_attempt_id(),
            "earlier_attempts": _with_ended(old),
            "created_unix_s": at_unix_s,
        }
    )
    replace_attempt(run, old, new)
    return new


def replace_attempt(run: RunDir, old: RunManifest, new: RunManifest) -> None:
    """Keep an ended attempt and write the manifest of another one, as `begin_next_attempt` does."""
    kept = run.attempt(old.attempt)
    kept.mkdir(parents=True, exist_ok=True)
    write_text(kept / run.manifest.name, old.model_dump_json(indent=2) + "\n")
    keep_exit(run, RunDir(kept))
    write_manifest(run, new)
    run.exit.unlink(missing_ok=True)
    if run.halt.exists():
        run.halt.replace(RunDir(kept).halt)
    fsync_dir(run.root)


def _with_ended(old: RunManifest) -> dict[int, str]:
    """The lineage of the attempt after `old`; an attempt without an identity is left out."""
    ended = {old.attempt: old.attempt_id} if old.attempt_id else {}
    return old.earlier_attempts | ended
