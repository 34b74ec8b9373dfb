"""Export a run: choose what is trained, judge it, render it for an engine, write file and code."""

import bz2
import math
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path

from nsa_core.config.profile import HardwareProfile
from nsa_core.config.recipe import ResolvedConfig, config_sha256, leaves
from nsa_core.config.run import RunConfig
from nsa_core.config.training import MAX_PODS
from nsa_core.rundir.atomic import write_bytes, write_text
from nsa_core.rundir.layout import RunDir
from nsa_core.rundir.manifest import (
    ManifestError,
    RunManifest,
    read_manifest,
)
from nsa_core.rundir.redaction import redact
from nsa_ops.agents import read_run_manifest
from nsa_ops.configure import RunChoice, load_hardware, overlay, require_profile, resolve_choice
from nsa_ops.context import Operator
from nsa_ops.errors import (
    ConfigurationError,
    LocalResourceError,
    NotFoundError,
    PodUnreachableError,
    StateConflictError,
)
from nsa_ops.estimate import estimate_run
from nsa_ops.export.dstack import render_dstack
from nsa_ops.export.exported import (
    ExportedRun,
    card_of,
    check_image,
    engine_name,
    safe_json,
)
from nsa_ops.export.kubernetes import MAX_ARCHIVE_BYTES, code_command, render_kubernetes
from nsa_ops.export.skypilot import render_skypilot
from nsa_ops.export.slurm import render_slurm
from nsa_ops.local_files import expand_home
from nsa_ops.preflight.guardrails import Subject, require_guardrails
from nsa_ops.printable import printable
from nsa_ops.provision.want import lock_sha256
from nsa_ops.quantities import count_of
from nsa_ops.remote.snapshot import Snapshot, pack, take_snapshot
from nsa_ops.runs.choose import choose_record, link_of
from nsa_ops.runs.launch import new_manifest, require_absolute_data, require_run_id

Render = Callable[[ExportedRun, str], str]
#: By engine: what renders a run for it, how the file is named, and what starts it.
RENDERERS: Mapping[str, tuple[Render, str, str]] = {
    "skypilot": (render_skypilot, ".sky.yaml", "sky jobs launch"),
    "dstack": (render_dstack, ".dstack.yml", "dstack apply -f"),
    "slurm": (render_slurm, ".slurm.sh", "sbatch"),
    "kubernetes": (render_kubernetes, ".k8s.yaml", "kubectl apply -f"),
}
#: What a profile may say of torch: it stands in a script.
_TORCH = re.compile(r"[A-Za-z0-9 .,<>=!~_+-]{1,80}")
_GIB = 2**30
#: Room for logs, and for a second look at the data.
_DISK_FACTOR = 1.5


@dataclass(frozen=True)
class ExportRequest:
    """What the operator asked for.

    Attributes:
        run: Run id, run directory or backup to take the configuration of; empty for a recipe.
        run_id: Name of the new run; empty makes one.
        num_nodes: Nodes; None leaves `runtime.num_pods`.
        output: File to write; None names it after the run, in the current folder.
    """

    engine: str
    choice: RunChoice
    run: str = ""
    run_id: str = ""
    num_nodes: int | None = None
    image: str = ""
    output: Path | None = None
    overrides: Mapping[str, str] = field(default_factory=dict)
    command: Sequence[str] = ()


@dataclass(frozen=True)
class Exported:
    """What was written."""

    run_id: str
    engine: str
    nodes: int
    gpus_per_node: int
    file: Path
    code: Path
    start: str
    notes: list[str]


def export_run(operator: Operator, request: ExportRequest) -> Exported:
    """Write what an engine runs, and the packed code beside it.

    Raises:
        ConfigurationError: If the request or the configuration cannot be used.
        RefusedError: If a guardrail forbids the run.
        NotFoundError: If the run or the folder of the output is not there.
        StateConflictError: If another file is in the place of the output.
        LocalResourceError: If it cannot be written.
    """
    engine = request.engine
    render, ending, start = renderer_of(engine)
    check_image(request.image)
    resolved = resolve_request(operator, request)
    hardware = load_hardware(resolved.profile)
    check_exportable(resolved.config, hardware)
    notes = [*resolved.notes, *judge(resolved.config, hardware, request.overrides)]
    snapshot = take_snapshot()
    manifest = new_manifest(  # which pod and node it is on, each node adds itself
        operator, resolved, snapshot,
        run_id=request.run_id, overrides=request.overrides, command=request.command,
    )  # fmt: skip
    require_run_id(manifest.run_id)
    run = describe(manifest, hardware, snapshot, request.image)
    file = request.output or Path(f"{run.run_id}{ending}")
    check_place(file)
    code = bz2.compress(pack(snapshot))
    if engine == "kubernetes" and len(code) > MAX_ARCHIVE_BYTES:
        message = (
            f"The packed code has {len(code)} bytes, and a ConfigMap takes {MAX_ARCHIVE_BYTES}"
        )
        raise ConfigurationError(message, hint="Remove what is no code from nsa_core and nsa_ops")
    there = go_there(file.parent)
    if engine == "kubernetes":
        command = f"{there}{code_command(run)}"
        notes.insert(0, f"put the code into the cluster first: `{command}`")
    written = _write(file, render(run, file.name), run.archive, code)
    return Exported(
        run_id=run.run_id,
        engine=engine,
        nodes=run.num_nodes,
        gpus_per_node=run.gpus_per_node,
        file=file,
        code=written,
        start=f"{there}{start} {shlex.quote(file.name)}",
        notes=notes,
    )


def renderer_of(engine: str) -> tuple[Render, str, str]:
    """What `RENDERERS` has of an engine; raises ConfigurationError if it is not known."""
    if engine not in RENDERERS:
        message = f"There is no engine `{printable(engine)}`"
        raise ConfigurationError(message, hint=f"Known: {', '.join(RENDERERS)}")
    return RENDERERS[engine]


def resolve_request(operator: Operator, request: ExportRequest) -> ResolvedConfig:
    """The configuration of the run that was named, or of the choice, for this many nodes.

    Raises:
        ConfigurationError: If both were named, or a value cannot be used.
        NotFoundError: If there is no such run.
    """
    nodes = request.num_nodes
    if nodes is not None and nodes > MAX_PODS:
        message = f"`--nodes` is {nodes:,}, and a run takes {MAX_PODS:,} at most"
        raise ConfigurationError(message, hint="Name fewer nodes")
    more = () if nodes is None else (f"runtime.num_pods={nodes}",)
    choice = RunChoice(request.choice.recipe, request.choice.profile, (*request.choice.sets, *more))
    if not request.run:
        profile = require_profile(operator, choice, "")
        return resolve_choice(operator.settings, choice, pod_profile=profile)
    if choice.recipe or choice.profile:
        message = "A run has its recipe and profile already"
        raise ConfigurationError(message, hint="Leave out `--recipe` and `--profile`, or the run")
    manifest = find_manifest(operator, request.run)
    changed = overlay(manifest.config, choice.sets, _profile_of(manifest))
    named = {flag.partition("=")[0].strip(): "--set" for flag in choice.sets}
    note = f"the configuration of run {manifest.run_id}; the new run begins with its first step"
    return ResolvedConfig(
        config=changed.config,
        origins=manifest.origins | named,
        sha256=config_sha256(changed.config),
        profile=manifest.profile,
        notes=[note, *changed.notes],
    )


def _profile_of(manifest: RunManifest) -> HardwareProfile:
    """The profile that a run was launched with.

    Raises:
        ConfigurationError: If it had none, or this version does not know it.
    """
    if manifest.profile == "none":
        message = f"Run `{manifest.run_id}` has no hardware profile, so its nodes are unknown"
        raise ConfigurationError(message, hint="Export its recipe: `--recipe NAME --profile NAME`")
    return load_hardware(manifest.profile)


def find_manifest(operator: Operator, text: str) -> RunManifest:
    """The manifest of a run: from a folder, or from the pod that has it.

    Raises:
        NotFoundError: If it is no folder with a manifest, and no run of this laptop.
        PodUnreachableError: If its pod does not answer.
    """
    folder = expand_home(text)
    if folder.is_dir():
        try:
            return read_manifest(RunDir(folder.absolute()))
        except ManifestError as error:
            raise NotFoundError(str(error), hint="See `nsa-ops backup ls`") from error
    record = choose_record(operator, text)
    try:
        return read_run_manifest(link_of(operator, record), record.run_id)
    except PodUnreachableError as error:
        hint = "Name the folder of its backup instead; see `nsa-ops backup ls`"
        raise PodUnreachableError(error.message, hint=hint) from error


def check_exportable(config: RunConfig, hardware: HardwareProfile) -> None:
    """Refuse what no engine could run as it stands, and secrets: the file is passed around.

    Raises:
        ConfigurationError: With the key, the value and what to set.
    """
    if config.runtime.num_gpus == "auto":
        message = "runtime.num_gpus is auto, and a node is only known once the engine has given it"
        raise ConfigurationError(message, hint="Say how many: `--set runtime.num_gpus=8`")
    for word in (hardware.torch_backend, hardware.torch_requirement):
        if not _TORCH.fullmatch(word):
            message = f"Profile `{printable(hardware.name)}` says `{printable(word)}` of torch"
            raise ConfigurationError(message, hint="Name a version, such as `torch>=2.10`")
    for key, value in leaves(config).items():
        if isinstance(value, str | Path) and redact(str(value)) != str(value):
            message = (
                f"{key} holds what looks like a secret, and an exported file is no place for it"
            )
            raise ConfigurationError(message, hint="Give it to the engine; see docs/scale.md")
    require_absolute_data(config.data, "node")


def judge(config: RunConfig, hardware: HardwareProfile, overrides: Mapping[str, str]) -> list[str]:
    """What the guardrails warn of; disks are unknown, cards are the smallest of the profile.

    Raises:
        RefusedError: If one forbids the run.
    """
    smallest = min(hardware.memory_gib, default=None)
    subject = Subject(
        config=config,
        profile=hardware,
        estimate=estimate_run(config, hardware),
        disk_free_bytes=None,
        card_memory_mib=None if smallest is None else smallest * 1024,
    )
    found = require_guardrails(subject, overrides)
    return [f"{one.name}: {one.message}" for one in found if one.status == "warn"]


def describe(
    manifest: RunManifest, hardware: HardwareProfile, snapshot: Snapshot, image: str
) -> ExportedRun:
    """What the engines are told of it; pure but for the locks, which are read."""
    config = manifest.config
    cards = config.runtime.num_gpus
    gpus = cards if isinstance(cards, int) and hardware.needs_card else 0
    torch = f"{hardware.torch_backend} {hardware.torch_requirement}"
    packages = sha256(f"{lock_sha256(snapshot)} {torch}".encode()).hexdigest()[:12]
    disk = estimate_run(config, hardware).disk_bytes * _DISK_FACTOR
    is_local = config.data.source == "fineweb_edu_local"
    dirty = " and uncommitted changes" if snapshot.dirty_sha256 else ""
    return ExportedRun(
        name=engine_name(manifest.run_id),
        run_id=manifest.run_id,
        manifest=safe_json(manifest.model_dump(mode="json")),
        code_id=snapshot.code_id,
        archive=f"nsa-code-{snapshot.code_id}.tar.bz2",
        environment=f"export-{packages}",
        torch_backend=hardware.torch_backend,
        torch_requirement=hardware.torch_requirement,
        num_nodes=config.runtime.num_pods,
        gpus_per_node=gpus,
        card=card_of(hardware.name) if gpus else None,
        image=image,
        disk_gib=max(1, math.ceil(disk / _GIB)),
        data_path=printable(config.data.path) if is_local else "",
        about=(
            f"Run {manifest.run_id}: recipe {config.recipe}, profile {hardware.name}, "
            f"{count_of(config.schedule.steps, 'step')}.",
            f"Written by `nsa-ops export` from commit {snapshot.commit[:12]}{dirty}, "
            f"configuration sha256 {manifest.config_sha256[:12]}.",
        ),
    )


def check_place(file: Path) -> None:
    """Refuse an output whose folder is missing, or in whose place something is: it may be edited.

    Raises:
        NotFoundError: If there is no such folder.
        StateConflictError: If something is there.
    """
    folder = file.parent
    if not folder.is_dir():
        message = f"The folder `{folder}` of `--output` does not exist"
        raise NotFoundError(message, hint=f"Create it with `mkdir -p {shlex.quote(str(folder))}`")
    if file.exists():
        message = f"`{file}` exists already"
        raise StateConflictError(message, hint="Name another file with `--output`, or remove it")


def go_there(folder: Path) -> str:
    """How a command begins that works in this folder; empty for the current one."""
    return "" if folder == Path() else f"cd {shlex.quote(str(folder))} && "


def _write(file: Path, text: str, archive: str, code: bytes) -> Path:
    """Write the file and, beside it, the code; the archive's path."""
    place = file.parent / archive
    try:
        write_bytes(place, code)
        write_text(file, text)
    except OSError as error:
        message = f"The export cannot be written to `{file}`: {error.strerror}"
        raise LocalResourceError(message, hint="Name another file with `--output`") from error
    return place
