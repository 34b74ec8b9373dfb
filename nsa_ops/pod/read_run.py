"""What the run directory and the pod show now: read here, judged elsewhere."""

import os
from pathlib import Path

from nsa_core.rundir.checkpoint import (
    MANIFEST_NAME,
    CheckpointState,
    inspect_checkpoint,
    list_checkpoint_folders,
    read_known_good_name,
)
from nsa_core.rundir.events import Event, find_events
from nsa_core.rundir.exit import read_exit
from nsa_core.rundir.layout import RunDir
from nsa_core.rundir.lineage import find_not_own
from nsa_core.rundir.manifest import ManifestError, RunManifest, read_manifest
from nsa_core.rundir.process import age_s
from nsa_ops.pod.card_watch import CardEvidence
from nsa_ops.pod.leak import Causality
from nsa_ops.pod.messages import CheckpointFact
from nsa_ops.pod.processes import RunProcesses
from nsa_ops.pod.tracker import MachineEvidence, ProcessEvidence
from nsa_ops.pod.trainer_group import is_trainer_running

_CGROUP = Path("/sys/fs/cgroup")
_MEMORY_INFO = Path("/proc/meminfo")


def list_checkpoint_facts(run: RunDir) -> list[CheckpointFact]:
    """Every folder under checkpoints/ with its size, newest step first; nothing is hashed."""
    folders = list_checkpoint_folders(run)
    rejected = _read_rejected(run) if folders else {}
    manifest = _read_manifest(run) if folders else None
    facts = [_checkpoint_fact(folder, rejected.get(folder), manifest) for folder in folders]
    return [
        fact for fact in facts if run.checkpoint(fact.step).is_dir()
    ]  # retention may remove one while we look


def _read_rejected(run: RunDir) -> dict[Path, Event]:
    """The newest event by which a trainer rejected each checkpoint."""
    return {
        Path(str(event.facts.get("path"))): event
        for event in find_events(run, "checkpoint_rejected")
    }


def _read_manifest(run: RunDir) -> RunManifest | None:
    """The run's manifest; None where it cannot be used, which is said elsewhere."""
    try:
        return read_manifest(run)
    except (ManifestError, OSError):
        return None


def _checkpoint_fact(
    folder: Path, rejected: Event | None, manifest: RunManifest | None
) -> CheckpointFact:
    found = inspect_checkpoint(folder, with_hashes=False)
    size_bytes, problem = _measure(folder)
    damage = problem or _known_damage(found, rejected, manifest)
    return CheckpointFact(
        name=folder.name,
        step=int(folder.name.rpartition("_")[2]),
        size_bytes=size_bytes,
        whole=not damage,
        created_unix_s=found.created_unix_s if found.manifest else None,
        damage=damage,
    )


def _measure(folder: Path) -> tuple[int, str]:
    """Bytes of the files in a folder, and why it cannot be read; empty if it can."""
    size_bytes = 0
    try:
        for path in folder.iterdir():
            size_bytes += _size(path)
    except OSError as error:
        return size_bytes, f"cannot be read: {error.strerror}"
    return size_bytes, ""


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:  # retention removes old checkpoints while we look
        return 0


def _known_damage(
    found: CheckpointState, rejected: Event | None, manifest: RunManifest | None
) -> str:
    if found.manifest is None:
        return found.damage
    foreign = find_not_own(found, manifest) if manifest else None
    if foreign is not None:
        return foreign
    if rejected is not None and rejected.ts >= _placed_at(Path(found.path)):
        return rejected.message.partition(": ")[2] or rejected.message
    return found.damage


def _placed_at(folder: Path) -> float:
    """When it came to this machine, by the clock of this machine; it may be written elsewhere."""
    try:
        return (folder / MANIFEST_NAME).stat().st_ctime
    except OSError:  # retention removes it while we look
        return 0.0


def newest_whole(checkpoints: list[CheckpointFact]) -> int | None:
    """Step of the newest checkpoint that nothing is known against."""
    return next((fact.step for fact in checkpoints if fact.whole), None)


def read_process_evidence(
    run: RunDir,
    manifest: RunManifest,
    record: RunProcesses | None,
    checkpoints: list[CheckpointFact],
) -> ProcessEvidence:
    """Whether the recorded trainer lives, how old it is, and how the attempt ended."""
    trainer = record.trainer if record else None
    alive = is_trainer_running(run, record)
    return ProcessEvidence(
        trainer_alive=alive,
        age_s=age_s(trainer) if trainer and alive else 0.0,
        exit=read_exit(run, manifest.attempt),
        checkpoint_step=newest_whole(checkpoints),
        known_good_step=_read_known_good(run, checkpoints),
    )


def _read_known_good(run: RunDir, checkpoints: list[CheckpointFact]) -> int | None:
    try:
        name = read_known_good_name(run)
    except (OSError, ValueError):
        return None
    return next((fact.step for fact in checkpoints if fact.whole and fact.name == name), None)


def read_machine_evidence(
    run: RunDir,
    checkpoints: list[CheckpointFact],
    cards: CardEvidence | None,
    causality: Causality,
) -> MachineEvidence:
    """Free disk, size of the largest whole checkpoint, memory in use; cards and causality."""
    sizes = [fact.size_bytes for fact in checkpoints if fact.whole]
    return MachineEvidence(
        disk_free_bytes=read_disk_free(run.root),
        checkpoint_bytes=max(sizes, default=None),
        host_memory_fraction=read_memory_fraction(),
        cards=cards,
        causality=causality,
    )


def read_disk_free(path: Path) -> int | None:
    """Bytes that an ordinary user may still write."""
    try:
        found = os.statvfs(path)
    except OSError:
        return None
    return found.f_bavail * found.f_frsize


def read_memory_fraction(info: Path = _MEMORY_INFO, cgroup: Path = _CGROUP) -> float | None:
    """Share of the memory in use: of the container if it has a limit, else of the machine.

    Page cache does not count: the kernel gives it back.
    """
    limited = _container_memory(cgroup)
    if limited is not None:
        return limited
    try:
        text = info.read_text(encoding="utf-8")
    except OSError:
        return None
    values = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
    if not {"MemTotal", "MemAvailable"} <= values.keys():
        return None
    total, available = (int(values[n].split()[0]) for n in ("MemTotal", "MemAvailable"))
    return 1 - available / total if total else None


def _container_memory(cgroup: Path) -> float | None:
    try:
        limit = (cgroup / "memory.max").read_text(encoding="utf-8").strip()
        used = int((cgroup / "memory.current").read_text(encoding="utf-8"))
        details = (cgroup / "memory.stat").read_text(encoding="utf-8").split()
    except (OSError, ValueError):
        return None
    if limit == "max":
        return None
    values = dict(zip(details[::2], details[1::2], strict=False))
    cache = int(values.get("inactive_file", 0)) + int(values.get("active_file", 0))
    return max(0, used - cache) / int(limit)
