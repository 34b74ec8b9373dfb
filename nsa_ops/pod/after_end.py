"""What the watchdog does about an ended attempt: asked by itself, by a probe and by halt."""

from nsa_core.rundir.events import find_events
from nsa_core.rundir.exit import ExitRecord, read_exit
from nsa_core.rundir.halt import read_halt
from nsa_core.rundir.layout import RunDir
from nsa_core.rundir.manifest import RunManifest
from nsa_ops.pod.ending import STOP_KINDS, UNKNOWN_CODE, asked_to_stop, last_step, missing_exit
from nsa_ops.pod.facts import list_checkpoint_facts, newest_whole
from nsa_ops.pod.journal import read_watchdog
from nsa_ops.pod.processes import is_running, is_this_boot, read_processes
from nsa_ops.pod.restart import RESTARTED, Decision, count_fruitless, decide_restart


def read_stop(run: RunDir, manifest: RunManifest) -> str:
    """Who asked the current attempt to stop and why; empty if nobody did."""
    event = asked_to_stop(find_events(run, *STOP_KINDS), manifest.attempt)
    if event is not None:
        return f"{event.by}: {event.message}"
    request = read_halt(run, run_id=manifest.run_id, attempt=manifest.attempt)
    return f"{request.by}: {request.reason}" if request else ""


def decide_after(run: RunDir, manifest: RunManifest, ended: ExitRecord) -> Decision:
    """Whether the watchdog begins another attempt after this end of the current one."""
    return decide_restart(
        ended,
        stop_asked=read_stop(run, manifest),
        steps_done=last_step(run, manifest.attempt),
        fruitless=count_fruitless(
            find_events(run, "resumed", RESTARTED), newest_whole(list_checkpoint_facts(run))
        ),
        budget=manifest.config.watchdog.restart_budget,
    )


def foresee_restart(run: RunDir, manifest: RunManifest) -> str:
    """Why the run comes back by itself, while no trainer of it runs; empty if it does not.

    That is so from the end of an attempt until the living watchdog has begun the next one, and
    from there until the runner has recorded itself.
    """
    watchdog = read_watchdog(run)
    if watchdog is None or not is_running(watchdog.identity):
        return ""
    if watchdog.doing == "done" and watchdog.attempt == manifest.attempt:
        return ""
    ended = _read_end(run, manifest)
    if ended is None:
        begun = any(
            event.by == "watchdog" and event.attempt == manifest.attempt
            for event in find_events(run, "resumed")
        )
        is_waiting = begun and read_processes(run, manifest.attempt) is None
        return "the watchdog has begun this attempt and starts its runner" if is_waiting else ""
    decision = decide_after(run, manifest, ended)
    return f"the watchdog is about to restart it: {decision.why}" if decision.restart else ""


def _read_end(run: RunDir, manifest: RunManifest) -> ExitRecord | None:
    """How the current attempt ended, or will be said to have ended; None if it has not."""
    ended = read_exit(run)
    if ended is not None and ended.attempt == manifest.attempt:
        return ended
    record = read_processes(run, manifest.attempt)
    if record is None or record.trainer is None or not is_this_boot(record):
        return None
    if is_running(record.trainer) or is_running(record.runner):
        return None
    return missing_exit(run, manifest, UNKNOWN_CODE, memory_kills=0, by="watchdog")
