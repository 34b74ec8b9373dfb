"""Every form in which a tool prints cards gives the same record."""

import pytest

from nsa_ops.gpu.card import GPU, Process, Slice, join_cards
from nsa_ops.gpu.smi_fields import parse_bus, parse_flag, parse_mib, parse_number
from nsa_ops.gpu.smi_records import parse_csv, parse_num_attached, parse_query_text, parse_xml
from nsa_ops.gpu.smi_table import parse_list, parse_table
from tests.ops.gpu import samples

UNKNOWN = [
    "N/A", "[N/A]", "[Not Supported]", "[Unknown Error]", "", "ERR!", "[Not Found]", "nan",
    "[Requested functionality has been deprecated]", "[Insufficient Permissions]", "GPU is lost",
]  # fmt: skip


@pytest.mark.parametrize("spelling", UNKNOWN)
def test_every_spelling_of_unknown_is_none_and_not_zero(spelling: str) -> None:
    assert parse_number(spelling) is None
    assert parse_mib(spelling) is None
    assert parse_flag(spelling) is None


def test_values_are_read_with_their_units() -> None:
    assert [parse_number(cell) for cell in ("16x", "0 %", "67.97 W", "640 bank(s)")] == [
        16, 0, 67.97, 640
    ]  # fmt: skip
    assert [parse_mib(cell) for cell in ("22377 MiB", "22377MiB", "80 GiB", "2004")] == [
        22377, 22377, 81920, 2004
    ]  # fmt: skip
    assert parse_number("0x146310DE") is None


@pytest.mark.parametrize("text", ["00000000:9B:00.0", "PCI:0000:9b:00", "GPU 0000:9B:00.0: lost"])
def test_one_bus_address_has_one_spelling(text: str) -> None:
    assert parse_bus(text) == "0000:9b:00"


def test_the_full_text_record_is_read() -> None:
    (card,) = parse_query_text(samples.QUERY)
    assert (card.index, card.bus, card.driver_version) == (0, "0000:3b:00", "550.54.15")
    assert (card.memory_mib, card.memory_used_mib) == (40960, 512)
    assert (card.pcie_width, card.pcie_width_max) == (8, 16)
    assert (card.ecc_corrected, card.ecc_uncorrected, card.ecc_uncorrected_life) == (12, 2, 3)
    assert (card.hw_slowdown, card.hw_thermal, card.sw_thermal) == (False, True, False)
    assert (card.banks_without_spares, card.remap_pending) == (1, False)
    assert card.processes == (
        Process(11, "/usr/bin/python3", 300, "C"), Process(12, "/usr/lib/xorg/Xorg", 4, "G")
    )  # fmt: skip


def test_a_record_of_some_cards_only_does_not_number_them() -> None:
    text = samples.QUERY.replace(
        "Attached GPUs                             : 1", "Attached GPUs : 8"
    )
    (card,) = parse_query_text(text)
    assert (parse_num_attached(text), card.index, card.label) == (8, None, "gpu@3b:00")
    assert parse_num_attached(samples.XML) == 2


def test_the_xml_record_is_read_card_by_card() -> None:
    first, second = parse_xml(samples.XML)
    assert (first.is_mig, first.is_mig_pending) == (False, True)
    assert first.processes == (Process(77, "a & b", 2, "C"),)
    assert (second.bus, second.retired_pages, second.retire_pending) == ("0000:86:00", 2, True)
    assert second.ecc_uncorrected is None


def test_csv_is_read_by_its_header() -> None:
    first, second = parse_csv(samples.CSV)
    assert (first.memory_used_mib, second.memory_used_mib) == (3, None)
    assert (first.unknown, second.unknown) == (("fan.speed",), ("memory.used", "fan.speed"))
    assert "memory_used_mib" in second.reported


def test_csv_without_a_header_is_read_by_the_command_above_it() -> None:
    text = (
        "$ nvidia-smi --query-gpu=memory.total,fan.speed --format=csv,noheader,nounits\n2004, "
        "[N/A]\n"
    )
    (card,) = parse_csv(text)
    assert (card.index, card.memory_mib, card.fan_percent) == (0, 2004, None)
    assert parse_csv("2004, [N/A]\n") == ()


def test_memory_errors_whose_total_is_unknown_are_not_added_up_from_parts() -> None:
    names = (
        "name, index, ecc.errors.uncorrected.volatile.dram, ecc.errors.uncorrected.volatile.total"
    )
    (card,) = parse_csv(f"{names}\nNVIDIA X, 0, 0, [N/A]\n")
    assert card.ecc_uncorrected is None


def test_the_drawn_table_is_read() -> None:
    first, second = parse_table(samples.TABLE)
    assert (first.name, first.bus, first.cuda_version) == (
        "NVIDIA A100-SXM4-40GB", "0000:3b:00", "12.2"
    )  # fmt: skip
    assert (first.utilization_percent, first.power_w, first.power_limit_w) == (100, 60, 400)
    assert first.processes == (Process(4242, "python3", 40, "C"),)
    assert (first.answers_badly, first.is_mig) == (False, False)
    assert (second.answers_badly, second.memory_used_mib, second.ecc_uncorrected) == (
        True, None, None
    )  # fmt: skip


def test_slices_are_listed_with_what_they_have() -> None:
    (card,) = parse_list(samples.LISTED)
    assert card.is_mig
    assert card.slices == (Slice("3g.20gb", 20480), Slice("1g.5gb", 5120))


def test_sources_about_one_card_become_one_record() -> None:
    cards = join_cards(
        [
            *parse_list(samples.LISTED),
            *parse_csv(samples.CSV),
            *parse_query_text(samples.QUERY),
        ]
    )
    assert [card.uuid for card in cards] == ["GPU-aaaa", "GPU-bbbb"]
    assert (cards[0].index, cards[0].bus, cards[0].memory_used_mib) == (0, "0000:3b:00", 3)
    assert cards[0].ecc_uncorrected == 2


def test_two_cards_with_one_number_are_told_apart_by_their_identity() -> None:
    first, second = GPU(index=0, uuid="GPU-a"), GPU(index=0, uuid="GPU-b")
    assert len(join_cards([first, second])) == 2


def test_memory_errors_of_older_cards_are_counted_by_their_totals() -> None:
    text = """GPU 0000:03:00.0
    Product Name                    : Tesla P100
    ECC Errors
        Volatile
            Single Bit
                Device Memory       : 4
                Total               : 4
            Double Bit
                Device Memory       : 3
                Total               : 3
    Retired Pages
        Double Bit ECC              : 1
        Pending                     : Yes
"""
    (card,) = parse_query_text(text)
    assert (card.ecc_corrected, card.ecc_uncorrected) == (4, 3)
    assert (card.retired_pages, card.retire_pending) == (1, True)


def test_a_desktop_driver_draws_the_table_in_its_own_words() -> None:
    text = """\
|   0  NVIDIA GeForce RTX 4090      WDDM  |   00000000:01:00.0  On |                  Off |
|  0%   43C    P8             16W /  450W |    1180MiB /  24564MiB |      2%      Default |
"""
    (card,) = parse_table(text)
    assert (card.name, card.memory_mib, card.ecc_uncorrected) == (
        "NVIDIA GeForce RTX 4090", 24564, None
    )  # fmt: skip
