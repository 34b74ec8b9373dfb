from dataclasses import replace
from pathlib import Path

import pytest

from nsa_core.config.profile import load_profile
from nsa_ops.errors import LocalResourceError, RefusedError
from nsa_ops.machine.bare import BareFacts, BasePython
from nsa_ops.plan import Step
from nsa_ops.provision.receipt import Installed
from nsa_ops.provision.steps import expected_receipt, plan_steps
from nsa_ops.provision.want import FlashWheel, Wanted, read_wheel
from tests.ops.provision.machines import BARE, DEBIAN, SNAPSHOT, set_up, wanted, wheel, without


def undone(steps: tuple[Step, ...]) -> list[str]:
    return [step.name for step in steps if not step.is_done]


def test_a_bare_machine_needs_everything_in_an_order_that_works() -> None:
    assert undone(plan_steps(wanted(), BARE, "")) == [
        "folders", "ship code", "pin source", "environment", "launcher", "receipt", "register",
    ]  # fmt: skip


def finished(want: Wanted, facts: BareFacts) -> tuple[BareFacts, str]:
    """The machine once all is done, and the receipt that the laptop keeps."""
    name = environment(want, facts)
    made = set_up(want, facts, name)
    receipt = expected_receipt(want, made, DEBIAN, []).model_copy(
        update={"at": 5.0, "installed": Installed(python_version="3.11.2", torch_version="2.13.0")}
    )
    text = receipt.model_dump_json()
    return replace(made, receipt=text), text


def environment(want: Wanted, facts: BareFacts) -> str:
    (step,) = [step for step in plan_steps(want, facts, "") if step.name == "environment"]
    return step.files[0].rpartition("/")[2]


def test_a_provisioned_machine_needs_nothing() -> None:
    facts, receipt = finished(wanted(), BARE)
    assert undone(plan_steps(wanted(), facts, receipt)) == []


def test_another_laptop_only_registers_what_is_there() -> None:
    facts, _ = finished(wanted(), BARE)
    assert undone(plan_steps(wanted(), facts, "")) == ["register"]


def test_new_code_keeps_the_environment() -> None:
    facts, receipt = finished(wanted(), BARE)
    newer = wanted(snapshot=replace(SNAPSHOT, code_id="c0df"))
    lacking = replace(facts, has_code=False, diff_sha256="")
    assert undone(plan_steps(newer, lacking, receipt)) == [
        "ship code", "pin source", "receipt", "register",
    ]  # fmt: skip


def test_another_build_of_torch_is_made_beside_the_one_that_runs_use() -> None:
    facts, receipt = finished(wanted(), BARE)
    gpu = replace(facts, driver="580.1", card="NVIDIA A100")
    steps = plan_steps(wanted("a100"), gpu, receipt)
    assert undone(steps) == ["environment", "launcher", "receipt", "register"]
    assert "cu130" in steps[4].shell


@pytest.mark.parametrize("rights", ["root", "sudo"])
def test_a_login_that_can_install_installs_everything_at_once(rights: str) -> None:
    facts = replace(without(BARE, "tmux", "rsync", "git"), rights=rights)  # type: ignore[arg-type]
    step = plan_steps(wanted(), facts, "")[0]
    assert (step.name, step.is_done) == ("tools", False)
    assert step.command[-4:] == (rights, "tmux", "rsync", "git")


def test_a_login_that_cannot_install_gets_one_list_of_what_to_ask_for() -> None:
    facts = replace(without(BARE, "tmux", "git"), pythons=())
    with pytest.raises(RefusedError) as refused:
        plan_steps(wanted(), facts, "")
    assert refused.value.exit_code == 3
    assert "lacks tmux, Python 3.11 to 3.14, git, and" in refused.value.message
    assert refused.value.hint.endswith("apt-get install tmux python3 python3-venv git")


def test_what_a_run_can_do_without_is_recorded_and_stops_nothing() -> None:
    facts = without(BARE, "git")
    steps = plan_steps(wanted(), facts, "")
    assert steps[0].is_done
    assert "works without git" in steps[0].detail


def test_the_laptop_itself_can_do_without_rsync() -> None:
    facts = without(BARE, "rsync")
    assert plan_steps(wanted(is_local=True), facts, "")[0].is_done
    with pytest.raises(RefusedError):
        plan_steps(wanted(), facts, "")


def test_uv_brings_an_interpreter_where_nobody_can_install_one() -> None:
    facts = replace(BARE, pythons=(), tools=BARE.tools | {"uv": "/pods/me/uv"})
    steps = plan_steps(wanted(), facts, "")
    assert undone(steps)[0] == "python"
    assert steps[0].command[2:] == ("uv", "python", "install", "3.12")
    assert undone(steps)[-1] == "register"


def test_a_card_needs_what_triton_compiles_its_launchers_with() -> None:
    gpu = replace(without(BARE, "cc"), driver="580.1", rights="root")
    bare_python = replace(DEBIAN, has_headers=False)
    step = plan_steps(wanted("a100"), replace(gpu, pythons=(bare_python,)), "")[0]
    assert step.command[-4:] == ("root", "gcc", "libc6-dev", "python3-dev")
    assert plan_steps(wanted("t4"), replace(gpu, pythons=(bare_python,)), "")[0].is_done


def test_a_python_without_venv_asks_for_its_own_package() -> None:
    twelve = BasePython("/usr/bin/python3.12", "3.12.3", has_venv=False, has_headers=True)
    with pytest.raises(RefusedError) as refused:
        plan_steps(wanted(), replace(BARE, pythons=(twelve,)), "")
    assert refused.value.hint.endswith("apt-get install python3.12-venv")


def test_flash_attention_comes_only_from_a_wheel_and_its_absence_is_recorded(
    tmp_path: Path,
) -> None:
    want = wanted()
    facts, receipt = finished(want, BARE)
    assert "none: no wheel was given" in receipt
    given = read_wheel(wheel(tmp_path))
    assert given is not None
    with_wheel = wanted(flash=given)
    assert undone(plan_steps(with_wheel, facts, receipt)) == ["flash-attn"]
    made = replace(facts.environments[0], flash_attention=given.mark)
    installed = replace(facts, environments=(made,))
    assert undone(plan_steps(with_wheel, installed, receipt)) == ["receipt", "register"]
    assert undone(plan_steps(want, installed, receipt)) == ["receipt", "register"]
    other = wanted(flash=FlashWheel(given.path, "another"))
    assert "flash-attn" in undone(plan_steps(other, installed, receipt))


def test_an_nsa_ops_without_its_locks_says_so() -> None:
    installed = wanted(snapshot=replace(SNAPSHOT, files=("nsa_ops/store.py",)))
    with pytest.raises(LocalResourceError, match=r"has no `requirements/train\.lock`"):
        plan_steps(installed, BARE, "")


def test_outside_a_checkout_there_is_no_source_to_pin() -> None:
    want = wanted(source=replace(wanted().source, commit="", diff=b""))
    assert "pin source" not in undone(plan_steps(want, BARE, ""))


def test_every_profile_gets_a_plan_on_its_own_card() -> None:
    for name in ("a100", "4090", "v100", "t4", "h100"):
        gpu = replace(BARE, driver="580.1")
        steps = plan_steps(wanted(load_profile(name)), gpu, "")
        assert undone(steps)[0] == "folders"
