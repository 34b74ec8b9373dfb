import json
import re
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import pytest

from nsa_core.rundir.checkpoint import NO_FOLDER, CheckpointState
from nsa_core.rundir.manifest import Parent
from nsa_core.rundir.report import CheckResult, ProbeBegun, Report
from nsa_ops.configure import RunChoice
from nsa_ops.context import Work
from nsa_ops.errors import (
    ConfigurationError,
    DeadlineError,
    LocalResourceError,
    NotFoundError,
    RefusedError,
    VerificationError,
)
from nsa_ops.machine.host import TOOLS
from nsa_ops.plan import Plan
from nsa_ops.pod.card_watch import PodMark
from nsa_ops.pod.messages import Reply, ReplyCode
from nsa_ops.pod.verify import HashedCheckpoints
from nsa_ops.preflight.preflight import Preflight, run_preflight
from nsa_ops.remote.snapshot import take_snapshot
from nsa_ops.remote.transport import Completed
from nsa_ops.runs.launch import LaunchRequest, execute_launch, plan_launch
from nsa_ops.runs.resume import execute_resume, plan_resume
from tests.ops.fakes import completed
from tests.ops.operators import POD, Desk
from tests.ops.runs.documents import RUN, Sequence, answer, beat, ended, report

HOST = json.dumps(
    {"python_version": "3.11.2", "unix_s": 1.0, "disk_free_bytes": 10**12, "disk_path": "/pod",
     "memory_free_bytes": 10**11, "shm_free_bytes": 10**10, "open_files_limit": 65536,
     "tools": {name: f"/usr/bin/{name}" for name in TOOLS}}
)  # fmt: skip
TORCH = json.dumps({"torch_version": "2.13.0"})


def probes(**statuses: str) -> str:
    checks = [
        CheckResult(name=name.replace("_", ".", 1), status=status, message="probed")  # type: ignore[arg-type]
        for name, status in statuses.items()
    ]
    return Report(at=1.0, checks=checks).model_dump_json()


@pytest.fixture
def pod(desk: Desk) -> Desk:
    """A pod that is well, has the code, and whose probes pass."""
    desk.transport.answers |= {
        "statvfs": completed(HOST),
        "importlib.util": completed(TORCH),
        "nvidia-smi": NotFoundError("gone"),
        "sys.exit(not": completed(),
        "nsa_core.checks": completed(probes(causality_perturbation="pass", parity_sliding="pass")),
        "test -e": completed(),
    }
    return desk


def preflight(desk: Desk) -> Preflight:
    return run_preflight(desk.operator, None, RunChoice(), {})


def test_a_good_pod_is_green_and_its_report_is_kept(pod: Desk) -> None:
    found = preflight(pod)
    assert (found.is_green, found.blocking) == (True, [])
    code_id = take_snapshot().code_id
    kept = pod.store.newest_report("pod-1", code_id, "cpu")
    assert kept is not None
    assert kept[0] == found.sha256
    assert (kept[1].model_extra or {})["facts"]["torch"] == "2.13.0"


def test_a_pod_without_find_is_not_green(pod: Desk) -> None:
    facts = json.loads(HOST)
    facts["tools"]["find"] = None
    pod.transport.answers["statvfs"] = completed(json.dumps(facts))
    found = preflight(pod)
    assert (found.is_green, found.blocking) == (False, ["host.tools"])


def test_the_time_that_torch_takes_to_import_is_no_difference_of_clocks(pod: Desk) -> None:
    pod.store.replace_pod(replace(POD, kind="ssh"))
    facts = json.loads(HOST) | {"unix_s": pod.clock.unix_s()}
    pod.transport.answers["statvfs"] = completed(json.dumps(facts))

    def import_torch(*_: object) -> Completed:
        pod.clock.sleep(60.0)
        return completed(TORCH)

    pod.transport.answers["importlib.util"] = import_torch
    checks = {check.name: check for check in preflight(pod).report.checks}
    assert (checks["host.clock"].status, checks["host.clock"].measured) == ("pass", "+0.0 s")


def test_the_probes_get_the_configuration_that_would_train(pod: Desk) -> None:
    preflight(pod)
    asked = [words for words in pod.transport.asked if "nsa_core.checks" in words]
    assert asked[0][-6:] == ("--tier", "standard", "--device", "cpu", "--config", "-")
    sent = json.loads(pod.transport.inputs[pod.transport.asked.index(asked[0])])
    assert sent["recipe"] == "tiny-cpu"


def test_the_probes_say_how_far_they_are_while_they_run(pod: Desk) -> None:
    report = probes(causality_perturbation="pass", parity_sliding="pass")
    lines = [
        "welcome to the pod",
        ProbeBegun(done=3, total=10, probe="layer").model_dump_json(),
        ProbeBegun(done=4, total=10, probe="gradients").model_dump_json(),
        report,
        "",
    ]
    pod.transport.answers["nsa_core.checks"] = completed("\n".join(lines))
    shown: list[Work] = []

    def show(work: Work) -> AbstractContextManager[None]:
        shown.append(work)
        return nullcontext()

    operator = replace(pod.operator, show_work=show)
    assert run_preflight(operator, None, RunChoice(), {}).is_green
    assert shown[-1] == Work("probing", "probe", 4, 10, "gradients")
    titles = [work.title for work in shown]
    assert titles[-3:] == ["shipping code", "using cards, disk and data", "probing"]


@pytest.mark.parametrize(
    "name", ["causality_perturbation", "causality_sentinel", "parity_selected"]
)
def test_a_leak_or_a_wrong_kernel_makes_it_red_and_forbids_the_launch(pod: Desk, name: str) -> None:
    statuses = {"causality_perturbation": "pass"} | {name: "fail"}
    pod.transport.answers["nsa_core.checks"] = completed(probes(**statuses), exit_code=9)
    found = preflight(pod)
    assert (found.is_green, found.blocking[0]) == (False, name.replace("_", ".", 1))
    with pytest.raises(RefusedError, match="is red: "):
        plan_launch(pod.operator, LaunchRequest(RunChoice()))


@pytest.mark.parametrize(
    "probe",
    [
        DeadlineError("did not end within 300 s"),
        completed("Killed", exit_code=137, stderr="Killed"),
    ],
)
def test_probes_that_give_no_report_are_not_a_pass(pod: Desk, probe: object) -> None:
    pod.transport.answers["nsa_core.checks"] = probe  # type: ignore[assignment]
    assert not preflight(pod).is_green


def test_an_interpreter_without_torch_is_not_probed(pod: Desk) -> None:
    pod.transport.answers["importlib.util"] = completed(json.dumps({"error": "No module"}))
    assert not preflight(pod).is_green
    assert not any("nsa_core.checks" in words for words in pod.transport.asked)


RESUMING = LaunchRequest(
    RunChoice(), run_id="r1", resume_from="step_000140", overrides={"preflight": "trial"}
)


@pytest.mark.parametrize("has_code", [True, False])
def test_a_checkpoint_that_does_not_exist_ends_the_plan(pod: Desk, has_code: bool) -> None:
    pod.transport.answers |= {
        "sys.exit(not": completed(exit_code=0 if has_code else 1),
        "nsa_ops.pod.verify": completed(verified(damage=NO_FOLDER)),
        "test -d /pod/step_000140": completed(exit_code=1),
    }
    with pytest.raises(NotFoundError, match="`/pod/step_000140` does not exist on pod `a100-1`"):
        plan_launch(pod.operator, RESUMING)


def test_a_damaged_checkpoint_ends_the_plan_where_the_pod_can_hash_it(pod: Desk) -> None:
    pod.transport.answers["nsa_ops.pod.verify"] = completed(verified(damage="a bit is wrong"))
    with pytest.raises(VerificationError, match="cannot be used: a bit is wrong"):
        plan_launch(pod.operator, RESUMING)


def test_a_whole_checkpoint_is_hashed_once_and_names_the_parent(pod: Desk) -> None:
    pod.transport.answers |= {
        "nsa_ops.pod.verify": completed(verified()),
        "nsa_ops.pod.act": completed(reply("already")),
        "nsa_ops.pod.probe": answer(report(last_beat=beat(1), watchdog_alive=True)),
    }
    planned = plan_launch(pod.operator, RESUMING)
    execute_launch(pod.operator, planned)
    assert planned.manifest.parent == Parent(run_id="r0", step=140)
    assert sum("nsa_ops.pod.verify" in words for words in pod.transport.asked) == 1


def test_a_run_that_begins_from_a_checkpoint_of_another_model_is_refused(pod: Desk) -> None:
    pod.transport.answers["nsa_ops.pod.verify"] = completed(verified())
    config = plan_launch(pod.operator, RESUMING).manifest.config
    model = config.model.model_copy(update={"num_layers": config.model.num_layers + 1})
    wrote = config.model_copy(update={"model": model}).model_dump_json().encode()
    pod.transport.files["/pod/step_000140/config.json"] = wrote
    with pytest.raises(ConfigurationError, match="step_000140` holds another model"):
        plan_launch(pod.operator, RESUMING)


def test_a_run_that_begins_at_its_last_step_is_refused(pod: Desk) -> None:
    pod.transport.answers["nsa_ops.pod.verify"] = completed(verified())
    short = replace(RESUMING, choice=RunChoice(sets=("schedule.steps=140",)))
    with pytest.raises(ConfigurationError, match=r"Nothing is left to train at step 140"):
        plan_launch(pod.operator, short)
    longer = replace(RESUMING, choice=RunChoice(sets=("schedule.steps=141",)))
    assert plan_launch(pod.operator, longer).manifest.parent == Parent(run_id="r0", step=140)


def test_a_pod_without_the_code_hashes_the_checkpoint_once_it_has_it(pod: Desk) -> None:
    pod.transport.answers |= {
        "sys.exit(not": completed(exit_code=1),
        "test -d": completed(),
        "tarfile": completed("shipped"),
        "nsa_ops.pod.verify": completed(verified(damage="a bit is wrong")),
    }
    planned = plan_launch(pod.operator, RESUMING)
    assert planned.manifest.parent is None
    with pytest.raises(VerificationError, match="a bit is wrong"):
        execute_launch(pod.operator, planned)


def verified(damage: str = "") -> str:
    """What the agent says of the one checkpoint that it was asked about."""
    checkpoint = CheckpointState(path="/pod/step_000140", run_id="r0", step=140, damage=damage)
    return HashedCheckpoints(checkpoints=[checkpoint]).model_dump_json()


@pytest.mark.parametrize("asked", ["launch", "resume"])
def test_a_pod_without_tmux_is_refused_before_anything_is_written(pod: Desk, asked: str) -> None:
    pod.transport.answers |= {
        "statvfs": completed(HOST.replace('"/usr/bin/tmux"', "null")),
        "nsa_ops.pod.probe": answer(report("halted")),
    }
    pod.store.save_run(RUN)
    request = LaunchRequest(RunChoice(), overrides={"preflight": "trial"})
    with pytest.raises(LocalResourceError, match="Pod `a100-1` has no tmux on its PATH"):
        if asked == "launch":
            plan_launch(pod.operator, request)
        else:
            plan_resume(pod.operator, "r1")


def test_launch_without_a_preflight_names_the_command(pod: Desk) -> None:
    with pytest.raises(RefusedError) as refused:
        plan_launch(pod.operator, LaunchRequest(RunChoice()))
    assert refused.value.hint == "Run `nsa-ops preflight a100-1 --profile cpu`"


def launch_plan(desk: Desk) -> Plan:
    return plan_launch(desk.operator, LaunchRequest(RunChoice(), run_id="r1")).plan


def test_a_plan_names_every_file_and_command_and_changes_nothing(pod: Desk) -> None:
    preflight(pod)
    pod.transport.asked.clear()
    plan = launch_plan(pod)
    assert [step.name for step in plan.steps] == [
        "ship code", "prepare run", "start training", "start watchdog"
    ]  # fmt: skip
    assert plan.steps[1].files == ("/pod/runs/r1/manifest.json",)
    assert "nsa_ops.pod.runner --run-dir /pod/runs/r1" in plan.steps[2].shell
    written = [words for words in pod.transport.asked if words[0] == "tmux" or "tarfile" in words]
    assert written == []
    assert pod.store.runs() == []


def test_a_pod_whose_cards_failed_a_run_is_refused_until_a_preflight_is_green(pod: Desk) -> None:
    preflight(pod)
    mark = PodMark(run_id="r0", rule="card_xid", sentence="Xid 79 on a card", at=1.0)
    pod.transport.files["/pod/suspect.json"] = mark.model_dump_json().encode()
    with pytest.raises(RefusedError, match="marked by the watchdog of `r0`: Xid 79") as refused:
        launch_plan(pod)
    assert "nsa-ops preflight a100-1" in refused.value.hint
    overridden = LaunchRequest(RunChoice(), run_id="r1", overrides={"preflight": "a test"})
    assert plan_launch(pod.operator, overridden).plan.changes
    pod.transport.answers["rm -f -- /pod/suspect.json"] = completed()
    preflight(pod)
    assert ("rm", "-f", "--", "/pod/suspect.json") in pod.transport.asked
    assert "the mark is removed" in pod.story[-1]


def test_a_plan_says_that_another_model_was_proven(pod: Desk) -> None:
    preflight(pod)
    assert not [note for note in launch_plan(pod).notes if "proved another model" in note]
    choice = RunChoice("tiny-cpu", "", ("model.num_layers=3",))
    planned = plan_launch(pod.operator, LaunchRequest(choice, run_id="r1"))
    assert [note for note in planned.plan.notes if "proved another model" in note]


def test_two_plans_of_one_launch_are_the_same_but_for_the_time(pod: Desk) -> None:
    preflight(pod)
    assert launch_plan(pod) == launch_plan(pod)


def test_a_new_run_id_can_be_sorted_and_read(pod: Desk) -> None:
    preflight(pod)
    manifest = plan_launch(pod.operator, LaunchRequest(RunChoice())).manifest
    assert re.fullmatch(r"\d{8}-\d{4}-tiny-cpu-[0-9a-f]{4}", manifest.run_id)
    assert manifest.preflight_sha256 != ""
    assert manifest.pod_facts["torch"] == "2.13.0"


def test_a_run_id_that_cannot_be_a_folder_is_refused(pod: Desk) -> None:
    preflight(pod)
    with pytest.raises(ConfigurationError, match=r"Run id `\.\./x` cannot be used"):
        plan_launch(pod.operator, LaunchRequest(RunChoice(), run_id="../x"))


def test_an_override_is_recorded_with_its_reason(pod: Desk) -> None:
    request = LaunchRequest(RunChoice(), overrides={"preflight": "trial"})
    manifest = plan_launch(pod.operator, request).manifest
    assert manifest.overrides == {"preflight": "trial"}
    assert manifest.preflight_sha256 == ""


def reply(outcome: str = "done") -> str:
    return Reply(
        action="x",
        code=ReplyCode.OK,
        outcome=outcome,
        message="done",
        attempt=1,  # type: ignore[arg-type]
    ).model_dump_json()


def test_a_launch_that_was_cut_before_the_start_is_started_by_the_next_one(pod: Desk) -> None:
    pod.transport.answers |= {
        "nsa_ops.pod.act": completed(reply("already")),
        "nsa_ops.pod.probe": Sequence(answer(report("planned")), answer(report(last_beat=beat(1)))),
        "list-panes": completed(exit_code=1, stderr="no server running on /tmp/x"),
        "new-session": completed(),
        "new-window": completed(),
    }
    request = LaunchRequest(RunChoice(), run_id="r1", overrides={"preflight": "trial"})
    launched = execute_launch(pod.operator, plan_launch(pod.operator, request))
    assert launched.is_new
    assert pod.store.open_intents() == []
    assert [run.run_id for run in pod.store.runs()] == ["r1"]


def test_a_resume_that_was_cut_before_the_start_only_starts(pod: Desk) -> None:
    request = LaunchRequest(RunChoice(), run_id="r1", overrides={"preflight": "trial"})
    manifest = plan_launch(pod.operator, request).manifest
    pod.transport.files["/pod/runs/r1/manifest.json"] = manifest.model_dump_json().encode()
    pod.transport.answers |= {
        "nsa_ops.pod.verify": completed('{"checkpoints": []}'),
        "nsa_ops.pod.probe": Sequence(answer(report("planned")), answer(report(last_beat=beat(1)))),
        "list-panes": completed("nsa-r1|watchdog|5|0|/pod/runs/r1\n"),
        "new-window": completed(),
    }
    pod.store.save_run(RUN)
    planned = plan_resume(pod.operator, None)
    assert planned.plan.steps[0].is_done
    execute_resume(pod.operator, planned)
    made = [words for words in pod.transport.asked if "new-window" in words]
    assert not any("nsa_ops.pod.act" in words for words in pod.transport.asked)
    assert [words[words.index("-n") + 1] for words in made] == ["train", "watchdog"]


@pytest.mark.parametrize("layers", [2, 3])
def test_a_resume_refuses_another_model_than_the_weights_are_of(pod: Desk, layers: int) -> None:
    """The checkpoint's own file says which: an earlier attempt may have had another model."""
    request = LaunchRequest(RunChoice(), run_id="r1", overrides={"preflight": "trial"})
    manifest = plan_launch(pod.operator, request).manifest.model_copy(update={"attempt": 2})
    assert manifest.config.model.num_layers == 2
    model = manifest.config.model.model_copy(update={"num_layers": layers})
    wrote = manifest.config.model_copy(update={"model": model})
    pod.transport.files |= {
        "/pod/runs/r1/manifest.json": manifest.model_dump_json().encode(),
        "/c/step_000140/config.json": wrote.model_dump_json().encode(),
    }
    pod.transport.answers |= {
        "nsa_ops.pod.verify": completed(
            '{"checkpoints": [{"path": "/c/step_000140", "step": 140}]}'
        ),
        "nsa_ops.pod.probe": answer(report("failed")),
        "list-panes": completed("nsa-r1|watchdog|5|0|/pod/runs/r1\n"),
    }
    pod.store.save_run(RUN)
    same, other = f"model.num_layers={layers}", f"model.num_layers={5 - layers}"
    with pytest.raises(
        ConfigurationError, match=rf"num_layers. is {layers} there, not {5 - layers}"
    ) as refused:
        plan_resume(pod.operator, None, sets=(other, "schedule.steps=500"))
    assert "--afresh" in refused.value.hint
    assert plan_resume(pod.operator, None, sets=(same, "schedule.steps=500")).checkpoint is not None
    assert plan_resume(pod.operator, None, sets=(other,), afresh=True).checkpoint is None
    pod.transport.files["/c/step_000140/config.json"] = b'{"model": '
    with pytest.raises(VerificationError, match=r"step_000140/config.json. cannot be used"):
        plan_resume(pod.operator, None)


def ended_at_140(pod: Desk, state: str) -> None:
    """A run of 140 steps with a whole checkpoint of the last one."""
    choice = RunChoice(sets=("schedule.steps=140",))
    request = LaunchRequest(choice, run_id="r1", overrides={"preflight": "trial"})
    manifest = plan_launch(pod.operator, request).manifest
    pod.transport.files["/pod/runs/r1/manifest.json"] = manifest.model_dump_json().encode()
    whole = '{"checkpoints": [{"path": "/c/step_000140", "step": 140}]}'
    pod.transport.answers |= {
        "nsa_ops.pod.verify": completed(whole),
        "nsa_ops.pod.probe": answer(report(state)),
        "list-panes": completed("nsa-r1|watchdog|5|0|/pod/runs/r1\n"),
    }
    pod.store.save_run(RUN)


@pytest.mark.parametrize(
    ("state", "sets"),
    [
        ("finished", ("data.prefetch=4",)),
        ("finished", ("schedule.steps=139",)),
        ("halted", ("schedule.steps=139",)),
    ],
)
def test_a_resume_that_would_train_nothing_is_refused(
    pod: Desk, state: str, sets: tuple[str, ...]
) -> None:
    ended_at_140(pod, state)
    with pytest.raises(ConfigurationError, match="Nothing is left to train at step 140"):
        plan_resume(pod.operator, None, sets=sets)


def test_a_run_that_was_cut_between_its_last_step_and_its_end_resumes(pod: Desk) -> None:
    ended_at_140(pod, "failed")
    assert plan_resume(pod.operator, None).checkpoint is not None


def test_a_finished_run_trains_again_from_its_first_step_or_an_older_checkpoint(pod: Desk) -> None:
    ended_at_140(pod, "finished")
    assert plan_resume(pod.operator, None, afresh=True).new.resume == "afresh"
    with pytest.raises(ConfigurationError, match="Nothing is left to train at step 140"):
        plan_resume(pod.operator, None, path="/c/step_000140")
    older = '{"checkpoints": [{"path": "/c/step_000100", "step": 100}]}'
    pod.transport.answers["nsa_ops.pod.verify"] = completed(older)
    assert plan_resume(pod.operator, None, path="/c/step_000100").new.resume == "/c/step_000100"


def test_a_resume_says_which_damaged_checkpoint_it_passed_over(pod: Desk) -> None:
    request = LaunchRequest(RunChoice(), run_id="r1", overrides={"preflight": "trial"})
    manifest = plan_launch(pod.operator, request).manifest
    pod.transport.files |= {
        "/pod/runs/r1/manifest.json": manifest.model_dump_json().encode(),
        "/c/step_000140/config.json": manifest.config.model_dump_json().encode(),
    }
    pod.transport.answers |= {
        "nsa_ops.pod.verify": completed(
            '{"checkpoints": [{"path": "/c/step_000141", "damage": "x is missing", "step": 141}, '
            '{"path": "/c/step_000140", "step": 140}]}'
        ),
        "nsa_ops.pod.act": completed(reply()),
        "nsa_ops.pod.probe": Sequence(answer(report("failed")), answer(report(last_beat=beat(1)))),
        "list-panes": completed("nsa-r1|watchdog|5|0|/pod/runs/r1\n"),
        "new-window": completed(),
    }
    pod.store.save_run(RUN)
    planned = plan_resume(pod.operator, None)
    assert planned.plan.notes == (
        "passed over a damaged checkpoint: step_000141: x is missing",
    )  # fmt: skip
    resumed = execute_resume(pod.operator, planned)
    assert (resumed.from_step, resumed.damaged) == (140, ["step_000141: x is missing"])


def test_a_run_whose_checkpoints_are_gone_begins_again_only_with_afresh(pod: Desk) -> None:
    request = LaunchRequest(RunChoice(), run_id="r1", overrides={"preflight": "trial"})
    manifest = plan_launch(pod.operator, request).manifest
    pod.transport.files["/pod/runs/r1/manifest.json"] = manifest.model_dump_json().encode()
    gone = ended(75, "stopped").model_copy(update={"checkpoint_step": 76})
    pod.transport.answers |= {
        "nsa_ops.pod.verify": completed('{"checkpoints": []}'),
        "nsa_ops.pod.probe": answer(report("halted", exit=gone)),
    }
    pod.store.save_run(RUN)
    with pytest.raises(NotFoundError, match="a checkpoint of step 76") as refused:
        plan_resume(pod.operator, "r1")
    assert "--afresh" in refused.value.hint
    planned = plan_resume(pod.operator, "r1", afresh=True)
    assert planned.new.resume == "afresh"
    assert "from the first step: its checkpoints are set aside" in planned.plan.title
