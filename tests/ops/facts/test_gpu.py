from pathlib import Path

import pytest

from nsa_ops.errors import DeadlineError, NotFoundError
from nsa_ops.facts.gpu import COMMAND, parse_gpus, parse_number, read_gpus
from tests.ops.fakes import FakeTransport, completed

CASES = Path(__file__).parents[3].parent / "shared" / "cases" / "hw"
A100 = (
    "0, NVIDIA A100-SXM4-80GB, GPU-1, 550.54.15, 81920, 3, 0, 31, 62.31, Disabled, 0\n"
    "1, NVIDIA A100-SXM4-80GB, GPU-2, 550.54.15, 81920, 70000, 98, 66, 390.10, Enabled, 2\n"
)
NO_ECC = "0, GTX 1070 Ti, GPU-3, 550.1, 8192, [N/A], [N/A], 40, [Not Supported], [N/A], [N/A]\n"


def test_cards_are_read_field_by_field() -> None:
    first, second = parse_gpus(A100)
    assert (first.name, first.memory_mib, first.is_mig, first.ecc_uncorrected) == (
        "NVIDIA A100-SXM4-80GB", 81920, False, 0
    )  # fmt: skip
    assert (second.memory_used_mib, second.is_mig, second.ecc_uncorrected) == (70000, True, 2)


def test_what_a_card_cannot_tell_is_unknown_and_not_zero() -> None:
    (card,) = parse_gpus(NO_ECC)
    assert card.memory_mib == 8192
    assert card.memory_used_mib is card.power_w is card.is_mig is card.ecc_uncorrected is None


@pytest.mark.parametrize(
    "spelling",
    ["N/A", "[N/A]", "[Not Supported]", "[Unknown Error]", "", "ERR!",
     "[Requested functionality has been deprecated]"],
)  # fmt: skip
def test_every_spelling_of_unknown_is_unknown(spelling: str) -> None:
    assert parse_number(spelling) is None


@pytest.mark.skipif(not CASES.is_dir(), reason="the collected cases are not beside the checkout")
def test_both_spellings_of_a_real_machine_are_unknown() -> None:
    text = (CASES / "H32_csv_not_supported_vs_na.txt").read_text()
    rows = [line.split(", ") for line in text.splitlines() if line[:1].isdigit()]
    assert [parse_number(row[4]) for row in rows] == [None, None]
    assert [parse_number(row[0]) for row in rows] == [2004, 2004]


@pytest.mark.skipif(not CASES.is_dir(), reason="the collected cases are not beside the checkout")
@pytest.mark.parametrize(
    "name",
    ["H22_device_handle_unknown_error", "H24_driver_library_mismatch",
     "H26_no_devices_gsp_rminit_failed"],
)  # fmt: skip
def test_a_sick_driver_is_a_problem_in_its_own_words(name: str) -> None:
    said = (CASES / f"{name}.txt").read_text().splitlines()[1]
    facts = read_gpus(FakeTransport({"nvidia-smi": completed(said, exit_code=9)}))
    assert facts.gpus == ()
    assert facts.problem == f"nvidia-smi said: {said}"


def test_no_nvidia_smi_and_a_hanging_one_are_told_apart() -> None:
    missing = read_gpus(FakeTransport({"nvidia-smi": NotFoundError("gone")}))
    hanging = read_gpus(FakeTransport({"nvidia-smi": DeadlineError("late")}))
    assert missing.problem == "nvidia-smi is not there"
    assert "did not answer within 20 s" in hanging.problem


def test_one_query_asks_for_everything() -> None:
    transport = FakeTransport({"nvidia-smi": completed(A100)})
    assert len(read_gpus(transport).gpus) == 2
    assert transport.asked == [COMMAND]
