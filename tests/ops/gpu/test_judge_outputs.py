"""What a preflight concludes from evidence: on real files, and rule by rule on single facts."""

import re
import time
from dataclasses import replace
from pathlib import Path

import pytest

from nsa_core.config.profile import HardwareProfile, list_profiles, load_profile
from nsa_core.rundir.report import verdict_of
from nsa_ops.gpu.card import GPU, Process, Slice
from nsa_ops.gpu.fitness import judge_card, nearest_profile
from nsa_ops.gpu.judge_outputs import judge_texts
from nsa_ops.gpu.kernel_log import judge_kernel_log, parse_kernel_log
from nsa_ops.gpu.topology import NVLinks, Topology, judge_nvlinks, judge_topology
from nsa_ops.preflight.judge_files import judge_files
from tests.ops.cli_case import CommandLine
from tests.ops.gpu import samples
from tests.ops.gpu.test_tool_output import WINDOWS, WSL

CASES = Path(__file__).parents[3].parent / "shared" / "cases" / "hw"
PROFILES = {name: load_profile(name) for name in list_profiles()}
A100, V100 = PROFILES["a100"], PROFILES["v100"]
#: File: profile it is held against, verdict, and words that some finding of the verdict must have.
EXPECTED = {
    "H01_a100_80g_smi_q_one_gpu.txt": ("a100", "warn", ("22377 MiB", "/opt/env/bin/python")),
    "H03_h100_mig_enabled.txt": ("h100", "fail", ("MIG", "3g.40gb (40448 MiB", "2 x 1g.10gb")),
    "H05_4080s_query_csv_na_fields.txt": ("4090", "fail", ("16376 MiB", "24 GB")),
    "H08_a100_mig_four_20g_slices.xml": ("a100", "fail", ("MIG", "4 slices", "19968 MiB")),
    "H10_gtx1070ti_no_ecc_na.xml": ("a100", "fail", ("no bf16", "4096 MiB")),
    "H12_dmesg_xid119_gsp_timeout.log": (
        "h100", "fail", ("0000:9b:00", "GPU4", "GSP not answering", "nvidia-smi may hang"),
    ),
    "H15_kmsg_nvswitch_open_noise.log": ("h100", "pass", ()),
    "H16_topo_m_a100_nv12.txt": ("a100", "pass", ()),
    "H19_a100_xid63_remap_pending.txt": ("a100", "fail", ("GPU reset needed before a long run",)),
    "H21_dcgmi_diag_r2_faulty_gpu.txt": ("a100", "fail", ("GPU 0", "cooling", "13.3 seconds")),
    "H22_device_handle_unknown_error.txt": ("a100", "fail", ("GPU lost", "0000:0b:00")),
    "H24_driver_library_mismatch.txt": ("a100", "fail", ("580.178", "580.173.02")),
    "H26_no_devices_gsp_rminit_failed.txt": (
        "a100", "fail", ("on the bus", "GSP firmware", "RmInitAdapter"),
    ),
    "H28_container_lost_gpu_host_fine.txt": ("a100", "fail", ("container", "host is fine")),
    "H30_error804_forward_compat_consumer_gpu.txt": ("4090", "fail", ("804", "cuda-compat")),
    "H32_csv_not_supported_vs_na.txt": ("a100", "fail", ("2004 MiB",)),
    "H34_v100_32g_util100_hung_job.txt": ("v100", "fail", ("likely hung", "44 W of 250 W")),
    "H36_h100nvl_mixed_nvlink_some_inactive.txt": ("h100", "warn", ("uneven", "3-GPU", "SYS")),
    "H38_h200_oom_other_process_holds_gpu.txt": (
        "h100", "fail", ("another process", "1117159", "127.15 GiB"),
    ),
    "H40_l40s_busy_small_process.txt": ("", "warn", ("803 MiB", "python (pid 5997")),
}  # fmt: skip
CARD = GPU(
    index=0, name="NVIDIA A100-SXM4-80GB", memory_mib=81920, memory_used_mib=3,
    reported=frozenset({"name", "memory_mib", "memory_used_mib", "ecc_uncorrected", "is_mig"}),
)  # fmt: skip

HUNG = {
    "utilization_percent": 100, "power_w": 44, "power_limit_w": 250, "memory_used_mib": 966,
}  # fmt: skip


@pytest.mark.skipif(not CASES.is_dir(), reason="the collected cases are not beside the checkout")
@pytest.mark.parametrize("name", EXPECTED)
def test_a_real_file_is_judged_as_an_expert_would(name: str) -> None:
    profile, verdict, words = EXPECTED[name]
    found = judge_texts(
        {name: (CASES / name).read_text()}, PROFILES.get(profile), list(PROFILES.values())
    )
    assert verdict_of(found) == verdict
    said = " ".join(one.message for one in found if one.status == verdict)
    assert [word for word in words if word not in said] == []
    assert all(one.hint for one in found if one.status in {"warn", "fail", "unknown"})


@pytest.mark.skipif(not CASES.is_dir(), reason="the collected cases are not beside the checkout")
def test_no_collected_file_is_left_out() -> None:
    assert {path.name for path in CASES.iterdir()} == set(EXPECTED)


@pytest.mark.skipif(not CASES.is_dir(), reason="the collected cases are not beside the checkout")
def test_both_spellings_of_unknown_in_a_real_file_are_reported_as_unknown() -> None:
    found = judge_texts([(CASES / "H32_csv_not_supported_vs_na.txt").read_text()])
    messages = [one.message for one in found if one.name.endswith(".untold")]
    assert len(messages) == 2
    assert all("fan.speed" in message and "not 0" in message for message in messages)


def statuses(card: GPU, profile: HardwareProfile | None = A100) -> dict[str, str]:
    return {one.name.partition(".")[2]: one.status for one in judge_card(card, profile)}


@pytest.mark.parametrize(
    ("check", "changes", "status"),
    [
        ("card", {"name": "NVIDIA GeForce RTX 4080 SUPER"}, "fail"),
        ("card", {"name": "NVIDIA Graphics..."}, "unknown"),
        ("memory", {"memory_mib": 16376}, "fail"),
        ("memory", {"memory_mib": None}, "unknown"),
        ("precision", {"name": "Tesla V100-PCIE..."}, "fail"),
        ("free", {"memory_used_mib": 22_937}, "warn"),
        ("free", {"memory_used_mib": 50_000}, "fail"),
        ("free", {"memory_used_mib": None}, "unknown"),
        ("free", {"processes": (Process(7, "a.out", 300, "C"),)}, "warn"),
        ("free", {"processes": (Process(7, "Xorg", 300, "G"),)}, "pass"),
        ("mig", {"is_mig": True}, "fail"),
        ("mig", {"is_mig_pending": True}, "warn"),
        ("ecc", {"ecc_uncorrected": 1}, "fail"),
        ("ecc", {"ecc_uncorrected": None}, "skipped"),
        ("ecc", {"ecc_uncorrected": None, "has_ecc": True}, "unknown"),
        ("ecc", {"ecc_uncorrected": 0, "ecc_uncorrected_life": 2}, "warn"),
        ("ecc", {"ecc_uncorrected": 0, "ecc_corrected": 177}, "pass"),
        ("activity", HUNG, "fail"),
        ("throttle", {"hw_slowdown": True}, "fail"),
        ("throttle", {"hw_slowdown": False}, "pass"),
        ("heat", {"temperature_c": 91, "slowdown_c": 89}, "fail"),
        ("pcie", {"pcie_width": 4, "pcie_width_max": 16}, "warn"),
        ("retired_pages", {"retired_pages": 61}, "fail"),
        ("recovery", {"recovery_action": "Drain and Reset"}, "fail"),
        ("fabric", {"fabric_state": "In Progress"}, "fail"),
        ("mode", {"compute_mode": "Prohibited"}, "fail"),
        ("answers", {"answers_badly": True}, "fail"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_card_is_named(
    check: str, changes: dict[str, object], status: str
) -> None:
    assert statuses(replace(CARD, **changes))[check] == status  # type: ignore[arg-type]


def test_a_value_that_a_source_has_no_place_for_gives_no_check() -> None:
    assert statuses(GPU(index=0, name=CARD.name, reported=frozenset({"name"}))) == {
        "card": "pass", "precision": "pass"
    }  # fmt: skip


def test_a_busy_card_at_work_is_not_called_hung() -> None:
    working = replace(CARD, utilization_percent=100, power_w=390.0, power_limit_w=400.0)
    assert "activity" not in statuses(working)


def test_a_card_without_bf16_passes_where_the_profile_asks_for_fp16() -> None:
    card = replace(CARD, name="Tesla V100-SXM2-32GB", memory_mib=32510)
    assert statuses(card, V100)["precision"] == "pass"
    assert statuses(card, None)["precision"] == "warn"


def test_slices_of_unknown_size_are_not_given_one() -> None:
    card = replace(CARD, is_mig=True, slices=(Slice(),))
    (found,) = [one for one in judge_card(card, A100) if one.name == "gpu0.mig"]
    assert "memory unknown" in found.message


def test_a_card_without_a_profile_is_refused_with_the_nearest() -> None:
    l40s = replace(CARD, name="NVIDIA L40S", memory_mib=46068)
    nearest = nearest_profile(l40s, list(PROFILES.values()))
    assert nearest is not None
    assert nearest.name == "4090"
    found = judge_card(l40s, A100, list(PROFILES.values()))
    assert "`4090`" in next(one.hint for one in found if one.name == "gpu0.card")


@pytest.mark.parametrize(
    ("pairs", "status"),
    [
        ({(0, 1): "NV12"}, "pass"),
        ({(0, 1): "PIX"}, "pass"),
        ({(0, 1): "SYS"}, "warn"),
        ({(0, 1): "NV12", (0, 2): "NV6", (1, 2): "NV12"}, "warn"),
        ({(0, 1): "PIX", (0, 2): "PHB", (1, 2): "PHB"}, "warn"),
        ({}, "unknown"),
    ],
)
def test_cards_should_be_connected_alike(pairs: dict[tuple[int, int], str], status: str) -> None:
    assert judge_topology(Topology((0, 1, 2), pairs)).status == status
    assert judge_topology(Topology((0,), {})).status == "pass"


def test_links_down_on_a_board_warn_and_idle_links_of_a_bridge_do_not() -> None:
    board = NVLinks(0, "NVIDIA A100-SXM4-80GB", tuple(range(10)), (10, 11))
    bridge = NVLinks(0, "NVIDIA H100 NVL", tuple(range(12)), (12, 13))
    assert [judge_nvlinks([card])[0].status for card in (board, bridge)] == ["warn", "pass"]


@pytest.mark.parametrize(
    ("line", "status"),
    [
        ("Xid (PCI:0000:3b:00): 13, Graphics Exception", "warn"),
        ("Xid (PCI:0000:3b:00): 48, DBE", "fail"),
        ("Xid (PCI:0000:3b:00): 64, Row Remapper failure", "fail"),
        ("Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus.", "fail"),
        ("Xid (PCI:0000:3b:00): 94, Contained ECC error", "warn"),
        ("Xid (PCI:0000:3b:00): 999, what", "warn"),
        ("GPU recovery action changed from 0x0 (None) to 0x2 (Node Reboot Required)", "pass"),
    ],
)  # fmt: skip
def test_the_status_of_an_xid_is_what_it_means_for_a_run(line: str, status: str) -> None:
    found = judge_kernel_log(parse_kernel_log(f"[1.0] NVRM: {line}"))
    assert [one.status for one in found] == [status]


SOUND = samples.QUERY.replace(
    "DRAM Uncorrectable            : 2", "DRAM Uncorrectable : 0"
).replace("DRAM Uncorrectable            : 3", "DRAM Uncorrectable : 0")


def test_corrected_errors_and_replaced_rows_of_a_working_card_are_shown() -> None:
    text = SOUND.replace(
        "        Correctable Error                 : 0", "        Correctable Error : 4"
    ).replace("    Ecc Mode", "    Utilization\n        Gpu : 100 %\n    Power Readings\n"
              "        Power Draw : 60 W\n        Power Limit : 400 W\n    Ecc Mode"
    ).replace("300 MiB", "3 MiB")  # fmt: skip
    by_name = {one.name: one for one in judge_texts([text], A100)}
    assert "12 corrected ones" in by_name["gpu0.ecc"].message
    assert "5 rows replaced (4 after corrected errors" in by_name["gpu0.remapped_rows"].message
    assert "gpu0.activity" not in by_name


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("GPU 0: NVIDIA A30 (UUID: GPU-a)\nGPU 2: NVIDIA A30 (UUID: GPU-b)\n", "missing: GPU 1"),
        (samples.TOPOLOGY + "GPU 0: NVIDIA A30\nGPU 1: NVIDIA A30\n", "missing: GPU 2"),
        (
            samples.XML.replace(">2</attached", ">3</attached"),
            "2 cards shown; missing: 1 that no source names",
        ),
        (
            samples.XML + "da:00.0 3D controller: NVIDIA Corporation GA100 (rev ff)\n",
            "the card at 0000:da:00",
        ),
    ],
)
def test_a_card_that_is_missing_among_others_is_named(text: str, named: str) -> None:
    (found,) = [one for one in judge_texts([text]) if one.name == "gpu.missing"]
    assert (found.status, named in found.message) == ("warn", True)


def test_a_number_that_no_card_has_is_not_counted_up_to() -> None:
    text = "GPU 0: NVIDIA A30 (UUID: GPU-a)\nGPU 99999999: NVIDIA A30 (UUID: GPU-b)\n"
    began_s = time.process_time()
    assert not [one for one in judge_texts([text]) if one.name == "gpu.missing"]
    assert time.process_time() - began_s < 0.5  # counting up to it takes seconds and gigabytes


@pytest.mark.parametrize("version", ["²", "9" * 5000, "[N/A]"])
def test_a_driver_whose_version_is_no_number_is_not_judged(version: str) -> None:
    text = re.sub(r"(Driver Version +: )\S+", rf"\g<1>{version}", samples.QUERY)
    assert version in text
    assert not [one for one in judge_texts([text]) if one.name == "driver.version"]


def test_a_record_that_was_asked_of_one_card_misses_none() -> None:
    text = samples.QUERY.replace(
        "Attached GPUs                             : 1", "Attached GPUs : 8"
    )
    assert not [one for one in judge_texts([text]) if one.name == "gpu.missing"]


def test_a_card_with_a_screen_and_a_windows_machine_are_reported() -> None:
    wsl = {one.name: one for one in judge_texts([WSL])}
    assert [wsl[name].status for name in ("host.system", "gpu0.display")] == ["warn", "warn"]
    assert "WSL" in wsl["host.system"].message
    assert "gpu0.activity" not in wsl  # Windows counts the desktop as load
    (windows,) = [one for one in judge_texts([WINDOWS]) if one.name == "host.system"]
    assert (windows.status, "not Linux" in windows.message) == ("fail", True)


def test_an_xid_names_the_number_of_its_card_where_that_is_known() -> None:
    card = GPU(index=5, bus="0000:3b:00")
    log = parse_kernel_log("[1.0] NVRM: Xid (PCI:0000:3b:00): 31, pid=1, name=python3, MMU Fault")
    (found,) = judge_kernel_log(log, [card])
    assert found.name == "gpu5.xid31"


def test_two_texts_of_one_mismatch_are_judged_together() -> None:
    said = "Failed to initialize NVML: Driver/library version mismatch\nNVML library version: 580.9"
    module = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.1.2  Tue"
    found = judge_texts({"nvidia-smi": said, "cat": module})
    assert "user-space 580.9, loaded kernel module 580.1.2" in found[0].message


def test_our_own_out_of_memory_is_not_blamed_on_others() -> None:
    text = (
        "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.15 GiB "
        "of which 1.00 GiB is free. Process 9 has 0.50 GiB memory in use. Including non-PyTorch "
        "memory, this process has 77.60 GiB memory in use."
    )
    (found,) = judge_texts([text])
    assert "our own 77.60 GiB" in found.message
    assert "micro_batch" in found.hint


def test_files_are_judged_on_the_command_line(cli: CommandLine, tmp_path: Path) -> None:
    good, bad = tmp_path / "topo.txt", tmp_path / "list.txt"
    good.write_text("\tGPU0\tGPU1\nGPU0\t X \tNV12\nGPU1\tNV12\t X \n")
    bad.write_bytes(samples.LISTED.encode("utf-16"))
    outcome = cli("preflight", "--evidence", str(good), "--json")
    assert outcome.exit_code == 0
    assert '"verdict": "pass"' in outcome.out
    both = cli("preflight", "--evidence", str(good), "--evidence", str(bad), "--profile", "a100")
    assert both.exit_code == 3
    assert "2 slices: 1 x 3g.20gb" in " ".join(both.out.split())
    assert "verdict: FAIL for profile a100" in both.out


def test_a_file_without_known_output_gives_no_verdict(cli: CommandLine, tmp_path: Path) -> None:
    (tmp_path / "note.txt").write_text("all is well, says the owner\n")
    (tmp_path / "topo.txt").write_text("\tGPU0\tGPU1\nGPU0\t X \tNV12\nGPU1\tNV12\t X \n")
    words = [word for path in tmp_path.glob("*.txt") for word in ("--evidence", str(path))]
    outcome = cli("preflight", *words)
    assert outcome.exit_code == 26
    assert "verdict: UNKNOWN" in outcome.out


def test_evidence_and_a_pod_are_not_judged_at_once(cli: CommandLine, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(samples.CSV)
    assert cli("preflight", "pod-1", "--evidence", str(tmp_path / "a.txt")).exit_code == 2
    assert cli("preflight", "--evidence", str(tmp_path / "none.txt")).exit_code == 6
    assert judge_files([tmp_path / "a.txt"], "").verdict == "warn"
