"""What a run on several cards is held against before it is launched, on a pod with fake cards."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from nsa_core.config.profile import load_profile
from nsa_core.config.recipe import resolve
from nsa_core.rundir.report import AllReduceSpeed, CheckResult, MachineSpeed, Report
from nsa_ops.configure import RunChoice, explain_profile, list_values
from nsa_ops.errors import ConfigurationError, OpsError, RefusedError
from nsa_ops.estimate import estimate_choice, estimate_run
from nsa_ops.gpu.tool_output import parse_output
from nsa_ops.machine.host import TOOLS, PythonFacts
from nsa_ops.machine.judge_host import judge_python
from nsa_ops.machine.offer import PodCards, cards_of
from nsa_ops.preflight.guardrails import (
    Subject,
    check_guardrails,
    parse_overrides,
    require_several_cards,
)
from nsa_ops.preflight.judge_speed import GradientSum, judge_speed, plan_gradient_sum
from nsa_ops.preflight.preflight import run_preflight
from nsa_ops.runs.launch import LaunchPlan, LaunchRequest, plan_launch
from nsa_ops.runs.resume import ResumePlan, plan_resume
from nsa_ops.settings import read_settings
from tests.ops.fakes import completed
from tests.ops.gpu.smi import A100, smi_xml
from tests.ops.operators import POD, Desk
from tests.ops.runs.documents import RUN, answer, report

A100_PROFILE = load_profile("a100")
GIB = 2**30


def pod_cards(*used_mib: int, names: tuple[str, ...] = ()) -> PodCards:
    return cards_of(parse_output(smi_xml(*used_mib, names=names), "nvidia-smi -q -x").cards, None)


def subject(num_gpus: int, cards: PodCards | None, shm_bytes: int | None = GIB) -> Subject:
    config = resolve("m7c-125m", "a100", [f"runtime.num_gpus={num_gpus}"]).config
    return Subject(
        config=config,
        profile=A100_PROFILE,
        estimate=estimate_run(config, A100_PROFILE),
        disk_free_bytes=1000 * GIB,
        card_memory_mib=81920,
        cards=cards,
        shm_free_bytes=shm_bytes,
    )


PCIE = (A100, "NVIDIA A100-PCIE-40GB")


@pytest.mark.parametrize(
    ("looked_at", "refusals"),
    [
        (subject(2, pod_cards(0, 0)), {}),
        (subject(4, pod_cards(0, 0)), {"cards": "num_gpus is 4, and the pod has 2 cards"}),
        (subject(2, pod_cards(0, 9000)), {"busy-cards": "gpu1 has 9003 MiB in use by another"}),
        (subject(2, pod_cards(0, 0, 9000)), {}),  # the run does not take the third
        (subject(2, pod_cards(0, 0, names=PCIE)), {"card-kinds": "gpu1 is a NVIDIA A100-PCIE"}),
        (subject(2, pod_cards(0, 0), 64 * 2**20), {"shared-memory": "2 ranks need 128 MiB"}),
        (subject(1, pod_cards(9000), 0), {}),  # one card: as before
    ],
)
def test_a_pod_that_cannot_give_several_cards_is_refused_with_the_reason(
    looked_at: Subject, refusals: dict[str, str]
) -> None:
    found = {
        one.name.removeprefix("guardrail."): one.message
        for one in check_guardrails(looked_at)
        if one.status == "fail"
    }
    assert found.keys() == refusals.keys()
    assert all(words in found[name] for name, words in refusals.items())


def test_cards_that_nobody_could_read_are_unknown_and_not_fine() -> None:
    found = {one.name: one.status for one in check_guardrails(subject(2, None, None))}
    names = ("cards", "busy-cards", "card-kinds", "shared-memory")
    assert [found[f"guardrail.{name}"] for name in names] == ["unknown"] * 4


def test_no_reason_makes_a_pod_have_more_cards() -> None:
    with pytest.raises(ConfigurationError, match="There is no guardrail `cards`"):
        parse_overrides(["cards=they will come"])
    with pytest.raises(RefusedError) as refused:
        require_several_cards(subject(4, pod_cards(0, 0)), {})
    assert "--override" not in refused.value.hint
    busy = subject(2, pod_cards(0, 9000))
    overrides = parse_overrides(["busy-cards=its owner has gone home"])
    assert [one.status for one in require_several_cards(busy, overrides)].count("warn") == 1


@pytest.mark.parametrize(
    ("facts", "num_gpus", "status"),
    [
        ({"nccl_version": "2.27.3", "num_cards": 2}, 2, "pass"),
        ({"nccl_version": "2.27.3", "num_cards": 1}, 2, "fail"),
        ({"num_cards": 2}, 2, "fail"),
        ({}, 1, None),
    ],
)
def test_several_cards_need_a_torch_that_can_sum_over_them(
    facts: dict[str, object], num_gpus: int, status: str | None
) -> None:
    found = judge_python(PythonFacts.model_validate(facts), A100_PROFILE, num_gpus)
    by_name = {one.name: one.status for one in found}
    assert by_name.get("python.nccl") == status


def test_a_torch_for_cards_of_another_maker_is_refused() -> None:
    facts = PythonFacts(torch_version="2.11", hip_version="7.0", cuda_available=True)
    found = next(one for one in judge_python(facts, A100_PROFILE) if one.name == "python.cuda")
    assert (found.status, "ROCm 7.0" in found.message) == ("fail", True)


def summed(num_gpus: int, bus_gb_s: float) -> MachineSpeed:
    speed = AllReduceSpeed(num_gpus=num_gpus, size_mib=256, bus_gb_s=bus_gb_s)
    return MachineSpeed(all_reduce=speed)


@pytest.mark.parametrize(
    ("speed", "status"),
    [
        (summed(2, 200.0), "pass"),  # 480 MB in 2.4 ms of a step of 0.1 s
        (summed(2, 10.0), "warn"),
        (MachineSpeed(), "fail"),  # nothing was summed
        (summed(2, 200.0), "fail"),  # over two of four cards
        (MachineSpeed(problems={"all_reduce": "hung"}), None),  # `gpus.all_reduce` fails for it
    ],
)
def test_the_sum_over_the_cards_of_a_run_is_held_against_its_step(
    speed: MachineSpeed, status: str | None, request: pytest.FixtureRequest
) -> None:
    num_gpus = 4 if status == "fail" and speed.all_reduce else 2
    gradients = GradientSum(num_gpus, 480_000_000, 0.1)
    found = {one.name: one for one in judge_speed(speed, A100_PROFILE, 1.5e9, gradients)}
    check = found.get("gpus.gradient_sum")
    assert (check.status if check else None) == status
    if status == "warn":
        assert check
        assert (check.measured, check.limit) == ("0.048 s", "<= 25 % of a step of 0.100 s")


def test_a_run_on_one_card_sums_nothing() -> None:
    one, two = (subject(count, pod_cards(0, 0)) for count in (1, 2))
    assert plan_gradient_sum(one.config, one.estimate) is None
    planned = plan_gradient_sum(two.config, two.estimate)
    assert planned is not None
    assert planned.num_bytes == 4 * two.estimate.parameters.total
    assert "gpus.gradient_sum" not in {
        check.name for check in judge_speed(summed(2, 1.0), A100_PROFILE, 1.5e9)
    }


HOST = {
    "python_version": "3.11.2", "unix_s": 1.0, "disk_free_bytes": 10**12, "disk_path": "/pod",
    "memory_free_bytes": 10**11, "shm_free_bytes": GIB, "open_files_limit": 65536,
    "tools": {name: f"/usr/bin/{name}" for name in TOOLS},
}  # fmt: skip
TORCH = {
    "torch_version": "2.11.0", "cuda_version": "13.0", "cuda_available": True, "product": 64.0**3,
    "num_cards": 4, "nccl_version": "2.27.3",
}  # fmt: skip


@pytest.fixture
def pod(desk: Desk) -> Desk:
    """A pod with four A100s that are well, has the code, and whose probes pass."""
    desk.store.replace_pod(replace(POD, profile="a100"))
    passed = CheckResult(name="causality.perturbation", status="pass", message="probed")
    desk.transport.answers |= {
        "statvfs": completed(json.dumps(HOST)),
        "importlib.util": completed(json.dumps(TORCH)),
        "nvidia-smi -q -x": completed(smi_xml(0, 0, 0, 0)),
        "sys.exit(not": completed(),
        "nsa_core.checks.machine": completed(summed(4, 230.0).model_dump_json()),
        "nsa_core.checks": completed(Report(at=1.0, checks=[passed]).model_dump_json()),
        "test -e": completed(),
    }
    return desk


def plan(pod: Desk, *sets: str, **overrides: str) -> LaunchPlan:
    choice = RunChoice("m7c-125m", "", sets)
    return plan_launch(pod.operator, LaunchRequest(choice, run_id="r1", overrides=overrides))


def test_a_plan_says_which_number_auto_became_and_why(pod: Desk) -> None:
    answers = pod.transport.answers
    answers["nvidia-smi -q -x"] = completed(smi_xml(0, 0, 9000, 0))
    found = plan(pod, "runtime.num_gpus=auto", preflight="a test")
    assert found.manifest.config.runtime.num_gpus == 2
    assert "shared by 2 ranks" in found.plan.title
    assert any(
        note.startswith("runtime.num_gpus auto is 2: the pod has 4 cards, and gpu2 has 9003 MiB")
        for note in found.plan.notes
    )
    answers["statvfs"] = completed(json.dumps(HOST | {"visible_devices": "3"}))
    alone = plan(pod, "runtime.num_gpus=auto", preflight="a test").manifest.config
    assert alone.runtime.num_gpus == 1


def test_a_plan_says_how_the_ranks_keep_the_state_and_why(pod: Desk) -> None:
    found = plan(pod, "runtime.num_gpus=2", preflight="a test")
    assert found.manifest.config.runtime.sharding == "ddp"
    assert any(note.startswith("runtime.sharding auto is ddp: a step") for note in found.plan.notes)
    large = RunChoice("m7c-1b", "", ("runtime.num_gpus=4", "batch.micro_batch=64"))
    request = LaunchRequest(large, run_id="r2", overrides={"preflight": "a", "memory": "test"})
    assert plan_launch(pod.operator, request).manifest.config.runtime.sharding == "fsdp"
    assert plan(pod, preflight="a test").manifest.config.runtime.sharding == "auto"


def test_more_cards_than_the_pod_shows_are_refused_before_anything_is_written(pod: Desk) -> None:
    with pytest.raises(RefusedError, match="num_gpus is 8, and the pod has 4 cards") as refused:
        plan(pod, "runtime.num_gpus=8", preflight="a test")
    assert refused.value.hint.startswith("Set `runtime.num_gpus=auto`")
    hidden = HOST | {"visible_devices": "0,1"}
    pod.transport.answers["statvfs"] = completed(json.dumps(hidden))
    with pytest.raises(RefusedError, match="has 2 cards, CUDA_VISIBLE_DEVICES hides 2"):
        plan(pod, "runtime.num_gpus=4", preflight="a test")


def test_a_preflight_on_several_cards_covers_them_and_allows_the_launch(pod: Desk) -> None:
    choice = RunChoice("m7c-125m", "", ("runtime.num_gpus=4",))
    with pytest.raises(OpsError, match="has no preflight"):
        plan(pod, "runtime.num_gpus=4")
    found = run_preflight(pod.operator, None, choice, {})
    by_name = {check.name: check for check in found.report.checks}
    names = ("python.nccl", "gpus.gradient_sum", "guardrail.cards", "guardrail.shared-memory")
    assert [by_name[name].status for name in names] == ["pass"] * 4
    assert ("nvidia-smi", "topo", "-p2p", "r") in pod.transport.asked
    assert found.blocking == []
    assert plan(pod, "runtime.num_gpus=4").manifest.config.num_ranks == 4
    assert plan(pod).manifest.config.num_ranks == 1


@pytest.mark.parametrize(
    ("torch", "speed", "message"),
    [
        ({"num_cards": 2}, summed(2, 230.0), "takes 4 cards .*, and its preflight summed over 2"),
        ({"num_cards": 1}, MachineSpeed(), "its preflight summed over none"),
        ({"nccl_version": None}, summed(4, 230.0), "need NCCL, and no preflight of pod"),
    ],
)
def test_a_preflight_that_summed_over_fewer_cards_does_not_allow_them(
    pod: Desk, torch: dict[str, object], speed: MachineSpeed, message: str
) -> None:
    pod.transport.answers |= {
        "importlib.util": completed(json.dumps(TORCH | torch)),
        "nsa_core.checks.machine": completed(speed.model_dump_json()),
    }
    run_preflight(pod.operator, None, RunChoice("m7c-125m"), {})
    assert plan(pod).manifest.config.num_ranks == 1
    with pytest.raises(RefusedError, match=message) as refused:
        plan(pod, "runtime.num_gpus=4")
    assert refused.value.hint == (
        "Run `nsa-ops preflight a100-1 --profile a100 --recipe m7c-125m --set runtime.num_gpus=4`"
    )


@pytest.mark.parametrize(
    "said",
    [
        {"all_reduce": {"num_gpus": 4, "size_mib": 256, "bus_gb_s": 0}},
        {"disk": {"written_mib": 0, "seconds": 1.0}},
        {"disk": {"written_mib": 10**400, "seconds": 1.0}},
        {"disk": {"written_mib": 1, "seconds": math.inf}},
    ],
)
def test_a_speed_that_is_none_is_no_measurement(pod: Desk, said: dict[str, object]) -> None:
    pod.transport.answers["nsa_core.checks.machine"] = completed(json.dumps(said))
    choice = RunChoice("m7c-125m", "", ("runtime.num_gpus=4",))
    assert "machine.speed" in run_preflight(pod.operator, None, choice, {}).blocking


def resume(pod: Desk, launched: LaunchPlan, *sets: str) -> ResumePlan:
    """Plan to continue a halted run that was launched so."""
    manifest = launched.manifest.model_dump_json().encode()
    pod.transport.files["/pod/runs/r1/manifest.json"] = manifest
    whole = '{"checkpoints": [{"path": "/c/step_000140", "step": 140}]}'
    pod.transport.answers |= {
        "nsa_ops.pod.verify": completed(whole),
        "nsa_ops.pod.probe": answer(report("halted")),
    }
    pod.store.save_run(replace(RUN, profile="a100"))
    return plan_resume(pod.operator, "r1", sets=sets)


def test_a_resume_takes_another_number_of_cards_with_the_same_tokens_a_step(pod: Desk) -> None:
    launched = plan(pod, "runtime.num_gpus=2", "batch.seq_len=8192", preflight="a test")
    before = launched.manifest.config
    assert (before.batch.micro_batch, before.batch.accumulation) == (4, 8)
    for asked, cards in (("1", 1), ("4", 4), ("auto", 4)):
        planned = resume(pod, launched, f"runtime.num_gpus={asked}")
        now = planned.new.config
        assert now.num_ranks == cards
        assert now.batch.tokens_per_step == before.batch.tokens_per_step
        assert f"differs: runtime.num_gpus 2 -> {cards}" in planned.plan.notes
    assert any(note.startswith("runtime.num_gpus auto is 4") for note in planned.plan.notes)


def test_a_resume_on_several_cards_needs_them_to_be_there_and_summed_over(pod: Desk) -> None:
    launched = plan(pod, "runtime.num_gpus=4", preflight="a test")
    assert resume(pod, launched).differences == []
    one = plan(pod, preflight="a test")
    more = resume(pod, one, "runtime.num_gpus=2").plan.notes
    assert "differs: runtime.sharding auto -> ddp" in more
    pod.transport.answers["nvidia-smi -q -x"] = completed(smi_xml(0, 0, 0))
    with pytest.raises(RefusedError, match="num_gpus is 4, and the pod has 3 cards"):
        resume(pod, launched)
    assert resume(pod, launched, "runtime.num_gpus=2").new.config.num_ranks == 2
    one = plan(pod, preflight="a test")
    older = replace(
        one, manifest=one.manifest.model_copy(update={"code_id": "older", "overrides": {}})
    )
    with pytest.raises(RefusedError, match="need NCCL, and no preflight of pod") as refused:
        resume(pod, older, "runtime.num_gpus=2")
    assert "--recipe m7c-125m --set runtime.num_gpus=2" in refused.value.hint
    run_preflight(pod.operator, None, RunChoice("m7c-125m"), {})
    assert resume(pod, older, "runtime.num_gpus=2").new.config.num_ranks == 2


def test_a_resume_on_one_card_asks_no_card_anything(pod: Desk) -> None:
    launched = plan(pod, preflight="a test")
    pod.transport.asked.clear()
    resume(pod, launched, "schedule.steps=60000")
    assert not [words for words in pod.transport.asked if words[0] == "nvidia-smi"]


def test_without_a_pod_auto_is_shown_as_what_the_profile_allows(tmp_path: Path) -> None:
    settings = read_settings({"HOME": str(tmp_path)}, folder=tmp_path)
    choice = RunChoice("m7c-125m", "h100", ("runtime.num_gpus=auto",))
    shown = {value.key: value for value in list_values(settings, choice)}["runtime.num_gpus"]
    assert (shown.value, shown.reason[:7]) == ("auto", "up to 8")
    explained = {value.key: value for value in explain_profile(settings, RunChoice("", "h100"))}
    assert explained["runtime.num_gpus"].reason.startswith("one unless a run asks")
    one, all_of_them = (
        estimate_choice(settings, replace(choice, sets=sets)) for sets in ((), choice.sets)
    )
    assert (one.num_ranks, all_of_them.num_ranks) == (1, 8)
    assert one.best_tokens_per_s and one.shortest_hours and all_of_them.shortest_hours
    assert all_of_them.best_tokens_per_s == pytest.approx(8 * one.best_tokens_per_s)
    assert all_of_them.shortest_hours == pytest.approx(one.shortest_hours / 8)
