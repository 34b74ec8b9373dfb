from pathlib import Path

import pytest

from nsa_core.config.profile import HardwareProfile, load_profile
from nsa_core.config.run import RunConfig
from nsa_core.rundir.data_account import Count, DataAccount
from nsa_core.rundir.report import (
    AllReduceSpeed,
    CardSpeed,
    CheckResult,
    DiskSpeed,
    FirstBatch,
    MachineSpeed,
)
from nsa_ops.preflight.judge_speed import judge_rate, judge_speed, judge_staging

H100 = load_profile("h100")
GOOD = CardSpeed(
    index=0, name="NVIDIA H100 80GB HBM3", free_mib=80_000, allocated_mib=72_000, dtype="bfloat16",
    gemm_tflops=744.0, is_repeatable=True, copy_gb_s=3030.0, host_to_device_gb_s=55.0,
    device_to_host_gb_s=55.0,
)  # fmt: skip
HOST = MachineSpeed(
    disk=DiskSpeed(written_mib=256, seconds=1.0),
    can_debug=True,
    first_batch=FirstBatch(seconds=0.5, num_documents=64, num_characters=10_000),
)
CHECKPOINT = 1.5e9


def judge(
    speed: MachineSpeed, profile: HardwareProfile = H100, size: float = CHECKPOINT
) -> dict[str, CheckResult]:
    return {check.name: check for check in judge_speed(speed, profile, size)}


def with_card(**fields: object) -> MachineSpeed:
    return HOST.model_copy(update={"cards": [GOOD.model_copy(update=fields)]})


def test_a_healthy_card_passes_everything_that_was_measured() -> None:
    found = judge(with_card())
    passed = {name for name, check in found.items() if check.status == "pass"}
    assert passed >= {
        "gpu0.allocation", "gpu0.repeatable", "gpu0.gemm", "gpu0.bandwidth", "gpu0.h2d", "gpu0.d2h",
        "host.disk_speed", "host.debugger", "data.first_batch",
    }  # fmt: skip
    assert found["gpu0.clock"].status == "unknown"  # nvidia-smi was not there: not a pass
    assert found["gpus.all_reduce"].status == "skipped"


@pytest.mark.parametrize(
    ("rate", "expected", "status"),
    [
        (744.0, 744.0, "pass"),
        (600.0, 744.0, "pass"),  # 0.8 x 744 = 595
        (590.0, 744.0, "warn"),
        (290.0, 744.0, "fail"),
        (None, 744.0, "unknown"),
        (290.0, None, "skipped"),
    ],
)
def test_a_rate_is_held_against_the_profile_with_its_tolerance(
    rate: float | None, expected: float | None, status: str
) -> None:
    found = judge_rate("x", rate, expected, 0.8, what="product", unit="TFLOP/s", hint="look")
    assert found.status == status
    assert (found.hint == "look") == (status in {"warn", "fail", "unknown"})
    if status == "warn":
        assert (found.measured, found.limit) == ("590 TFLOP/s", ">= 595 TFLOP/s")


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"gemm_tflops": 100.0}, "gpu0.gemm"),
        ({"copy_gb_s": 900.0}, "gpu0.bandwidth"),
        ({"host_to_device_gb_s": 3.0}, "gpu0.h2d"),
        ({"is_repeatable": False}, "gpu0.repeatable"),
        ({"allocated_mib": 40_000.0}, "gpu0.allocation"),
    ],
)
def test_a_card_that_does_not_give_what_it_should_is_red(
    fields: dict[str, object], name: str
) -> None:
    assert judge(with_card(**fields))[name].status == "fail"


def test_a_card_that_could_not_be_used_is_red_with_what_cuda_said() -> None:
    said = "CUDA error: uncorrectable ECC error encountered"
    found = judge(HOST.model_copy(update={"problems": {"gpu3": said}}))
    assert found["gpu3.speed"].status == "fail"
    assert said in found["gpu3.speed"].message
    assert judge(HOST.model_copy(update={"problems": {"cards": "torch finds no card"}}))[
        "gpu.speed"
    ].status == "fail"  # fmt: skip


def test_several_cards_are_held_against_the_profiles_sum() -> None:
    summed = AllReduceSpeed(num_gpus=2, size_mib=256, bus_gb_s=20.0)
    profile = H100.model_copy(
        update={"expected": H100.expected.model_copy(update={"all_reduce_gb_s": 300.0})}
    )
    assert judge(HOST.model_copy(update={"all_reduce": summed}), profile)[
        "gpus.all_reduce"
    ].status == "fail"  # fmt: skip
    hung = HOST.model_copy(update={"problems": {"all_reduce": "took longer than 60 s"}})
    assert judge(hung)["gpus.all_reduce"].status == "fail"


def test_a_processor_has_no_card_to_use_but_a_disk() -> None:
    found = judge(HOST, load_profile("cpu"))
    assert found["gpu.speed"].status == "skipped"
    assert "gpus.all_reduce" not in found
    assert found["host.disk_speed"].measured == "268 MB/s"


@pytest.mark.parametrize(
    ("seconds", "size", "status"), [(1.0, 1.5e9, "pass"), (1.0, 40e9, "warn"), (5.0, 1e6, "warn")]
)
def test_a_disk_is_slow_by_its_rate_or_by_the_checkpoint_it_must_take(
    seconds: float, size: float, status: str
) -> None:
    speed = HOST.model_copy(update={"disk": DiskSpeed(written_mib=256, seconds=seconds)})
    assert judge(speed, size=size)["host.disk_speed"].status == status


@pytest.mark.parametrize(
    ("part", "name", "status"),
    [
        ("disk", "host.disk_speed", "fail"),
        ("first_batch", "data.first_batch", "fail"),
        ("debugger", "host.debugger", "warn"),
    ],
)
def test_a_part_that_failed_says_why(part: str, name: str, status: str) -> None:
    field = {"debugger": "can_debug"}.get(part, part)
    value = False if part == "debugger" else None
    speed = HOST.model_copy(update={field: value, "problems": {part: "Operation not permitted"}})
    check = judge(speed)[name]
    assert check.status == status
    assert "Operation not permitted" in check.message


@pytest.mark.parametrize(
    ("account", "excess", "status"),
    [
        (DataAccount(num_documents=99), "", "pass"),
        (DataAccount(num_documents=9, passed_over={"hidden": Count(count=1)}), "", "pass"),
        (DataAccount(num_documents=999, num_lost=1, rejected={"bad": Count(count=1)}), "", "warn"),
        (DataAccount(num_documents=9, repaired={"mended": Count(count=1)}), "", "warn"),
        (DataAccount(num_lost=9, rejected={"bad": Count(count=9)}), "90 % are dropped", "fail"),
    ],
)
def test_dropped_documents_are_reported_and_too_many_are_red(
    account: DataAccount, excess: str, status: str
) -> None:
    batch = FirstBatch(seconds=1, num_documents=9, num_characters=9, account=account, excess=excess)
    check = judge(HOST.model_copy(update={"first_batch": batch}))["data.first_batch"]
    assert check.status == status
    assert status == "pass" or (excess or account.sentence()) in check.message


@pytest.mark.parametrize(
    ("free", "status"), [(10_000_000, "pass"), (2_500_000, "fail"), (None, "unknown")]
)
def test_the_shards_of_a_local_data_set_need_room(free: int | None, status: str) -> None:
    data = {"source": "fineweb_edu_local", "path": "/text", "tokenizer": "byte"}
    config = RunConfig.model_validate({"data": data})
    batch = FirstBatch(seconds=1, num_documents=9, num_characters=9, source_bytes=1_000_000)
    (check,) = judge_staging(batch, config, 1_000_000, free)
    assert check.status == status
    assert "up to 1M tokens are staged" in check.message
    assert judge_staging(None, config, 0, 0) == []


def test_what_was_never_tried_is_unknown_and_not_a_pass() -> None:
    found = judge(MachineSpeed(cards=[CardSpeed(index=0)]))
    assert {check.status for check in found.values()} <= {"unknown", "skipped"}


def test_the_clock_and_the_reasons_under_load_come_from_nvidia_smi(shared: Path) -> None:
    text = (shared / "cases/hw/H08_a100_mig_four_20g_slices.xml").read_text()
    found = judge(with_card(smi_under_load=text))
    assert found["gpu0.clock"].status == "pass"
    assert found["gpu0.clock"].measured == "1275 MHz"
    assert "of 1410 MHz" in found["gpu0.clock"].message
    slow = judge(with_card(smi_under_load=text.replace("1275 MHz", "345 MHz")))
    assert slow["gpu0.clock"].status == "warn"
