"""Topology, kernel log, dcgmi, failures; and that no cut or garbled text is an error."""

import re
import textwrap
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nsa_ops.gpu.dcgm import Diagnosis, parse_diagnoses
from nsa_ops.gpu.driver_errors import parse_errors, parse_versions
from nsa_ops.gpu.judge_outputs import judge_texts
from nsa_ops.gpu.kernel_log import parse_kernel_log
from nsa_ops.gpu.out_of_memory import parse_out_of_memory
from nsa_ops.gpu.tool_output import parse_output
from nsa_ops.gpu.topology import parse_nvlinks, parse_peers, parse_topology
from tests.ops.gpu import samples

WINDOWS = """\
| NVIDIA-SMI 551.76                 Driver Version: 551.76         CUDA Version: 12.4     |
| GPU  Name                     TCC/WDDM  | Bus-Id          Disp.A | Volatile Uncorr. ECC |
|   0  NVIDIA GeForce RTX 4090      WDDM  |   00000000:01:00.0 Off |                  Off |
|  0%   43C    P8             16W /  450W |       0MiB /  24564MiB |      0%      Default |
"""
WSL = """\
| NVIDIA-SMI 555.42.03              Driver Version: 555.85         CUDA Version: 12.5     |
|   0  NVIDIA GeForce RTX 4090        On  |   00000000:01:00.0  On |                  Off |
| 53%   46C    P0             89W /  450W |    2710MiB /  24564MiB |    100%      Default |
"""


def query_of(model: str, *, persistence: str) -> str:
    """A full record of a card whose driver has this model."""
    return samples.QUERY.replace(
        "    MIG Mode\n",
        f"    Persistence Mode : {persistence}\n    Driver Model\n        Current : {model}\n"
        "    MIG Mode\n",
    )


CASES = Path(__file__).parents[3].parent / "shared" / "cases" / "hw"
FILES = sorted(CASES.iterdir()) if CASES.is_dir() else []
_CUTS = 12


def test_a_topology_is_read_in_spite_of_underlining_and_other_columns() -> None:
    output = parse_output(samples.TOPOLOGY)
    assert output.topology is not None
    assert output.topology.cards == (0, 1, 2)
    assert output.topology.pairs == {(0, 1): "NV4", (0, 2): "SYS", (1, 2): "SYS"}
    assert parse_topology("GPU memory is full") is None


def test_links_are_counted_card_by_card() -> None:
    first, second = parse_nvlinks(samples.NVLINK)
    assert (first.active, first.inactive, second.active) == ((0,), (1,), (0, 1))


def test_pairs_without_peer_access_are_named() -> None:
    matrix = " \tGPU0\tGPU1\nGPU0\tX\tCNS\nGPU1\tCNS\tX\n"
    assert parse_peers(matrix) == ((0, 1),)
    assert parse_peers("Device=2 CANNOT Access Peer Device=0\n") == ((0, 2),)


def test_xids_are_grouped_by_card_and_code() -> None:
    log = parse_kernel_log(samples.KERNEL)
    found = [(event.kind, event.bus, event.code, event.count) for event in log.events]
    assert found == [
        ("xid", "0000:3b:00", 31, 2), ("xid", "0000:3b:00", 79, 1),
        ("switch", "0000:c1:00", 20034, 1), ("hung", "", None, 1),
    ]  # fmt: skip
    assert log.events[0].programs == ("python3", "eval")
    assert (log.num_lines, log.module_version) == (7, "535.54.03")


@pytest.mark.parametrize(
    "line",
    ["Xid (PCI:0000:05:00): 48, DBE", "NVRM: Xid (0000:05:00): 48, DBE",
     "[12.5] NVRM: Xid (PCI:0000:05:00 GPU-I:03): 48, pid=1",
     "Nov 28 01:02:03 pod kernel: NVRM: Xid (PCI:0000:05:00): 48, DBE",
     "3,100,200,-;NVRM: Xid (PCI:0000:05:00): 48, DBE"],
)  # fmt: skip
def test_an_xid_is_found_in_every_log_format(line: str) -> None:
    events = parse_kernel_log(line if "NVRM" in line else f"NVRM: {line}").events
    assert [(event.bus, event.code) for event in events] == [("0000:05:00", 48)]


def test_an_api_mismatch_names_both_versions() -> None:
    log = parse_kernel_log(
        "[1.0] NVRM: API mismatch: the client has the version 550.90.07, but\n"
        "[1.0] NVRM: this kernel module has the version 550.54.15.  Please\n"
    )
    assert (log.client_version, log.module_version) == ("550.90.07", "550.54.15")


def test_a_diagnosis_is_read_from_the_newer_table() -> None:
    found = parse_diagnoses(samples.DCGM_TABLE)
    assert Diagnosis("memory", "pass", (0,)) in found
    reason = "Double-bit ECC errors were found; please reset the GPU."
    assert Diagnosis("memory", "fail", (3,), reason) in found
    assert found[-1] == Diagnosis("pcie", "pass")


def test_a_diagnosis_is_read_from_json() -> None:
    assert parse_diagnoses(samples.DCGM_JSON) == (
        Diagnosis("memory", "pass", (0,)),
        Diagnosis("memory", "fail", (1,), "row remap failed"),
        Diagnosis("pcie", "pass", (0, 1)),
    )


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("Failed to initialize NVML: Driver/library version mismatch", "mismatch"),
        ("Failed to initialize NVML: Unknown Error", "unknown_error"),
        ("NVIDIA-SMI couldn't communicate with the NVIDIA driver.", "not_talking"),
        ("Unable to determine the device handle for GPU0000:8A:00.0: GPU is lost.", "handle"),
        ("RuntimeError: Unexpected error. Error 802: system not yet initialized", "fabric"),
        ("Error 803: system has unsupported display driver", "cuda_mismatch"),
        ("CUDA error: no kernel image is available for execution on the device", "no_kernel_image"),
        ("The NVIDIA driver on your system is too old (found version 11040).", "driver_old"),
        ("bash: nvidia-smi: command not found", "no_tool"),
        ("$ timeout 20 nvidia-smi; echo $?\n124\n", "hung"),
        ("[rank3]: Watchdog caught collective operation timeout: WorkNCCL", "peer_hang"),
    ],
)  # fmt: skip
def test_an_error_is_recognised_by_its_words(text: str, kind: str) -> None:
    assert kind in [found.kind for found in parse_errors(text)]


def test_a_lost_card_is_named_even_without_a_blank_before_its_address() -> None:
    text = "Unable to determine the device handle for GPU0000:8A:00.0: Unknown Error"
    assert parse_errors(text)[0].bus == "0000:8a:00"


def test_both_halves_of_the_driver_are_read() -> None:
    text = "NVML library version: 550.90\nNVIDIA UNIX Open Kernel Module for x86_64  550.54.15  Rel"
    versions = parse_versions(text)
    assert (versions.library, versions.module) == ("550.90", "550.54.15")


def test_out_of_memory_is_read_in_the_older_wording() -> None:
    text = (
        "CUDA out of memory. Tried to allocate 20.00 MiB (GPU 1; 24.00 GiB total capacity; "
        "1.00 GiB already allocated; 16.00 MiB free; 2.00 GiB reserved in total by PyTorch)"
    )
    (found,) = parse_out_of_memory(text)
    assert (found.gpu, found.total_mib, found.free_mib, found.own_mib) == (1, 24576, 16, 2048)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("query", "nvidia-smi -q"), ("xml", "nvidia-smi -q -x"), ("csv", "nvidia-smi --query"),
        ("table", "nvidia-smi"), ("listed", "nvidia-smi -L"), ("topology", "nvidia-smi topo"),
        ("kernel", "kernel log"), ("dcgm_table", "dcgmi diag"), ("dcgm_json", "dcgmi diag"),
    ],
)  # fmt: skip
def test_the_kind_of_a_text_is_recognised(name: str, kind: str) -> None:
    assert parse_output(samples.ALL[name]).kinds[0] == kind


@pytest.mark.parametrize("text", ["", "hello\n", "a, b, c\n1, 2, 3\n", "| a | b |\n", "{}"])
def test_a_text_of_no_known_kind_is_unknown_and_does_not_pass(text: str) -> None:
    assert parse_output(text).kinds == ()
    assert [result.status for result in judge_texts([text])] == ["unknown"]


def _cuts(text: str) -> list[str]:
    """A text cut at many places, and with a piece of it taken out."""
    places = [len(text) * n // _CUTS for n in range(_CUTS)]
    return [part for at in places for part in (text[:at], text[at:], text[:at] + text[at + 37 :])]


@pytest.mark.parametrize("name", samples.ALL)
def test_no_cut_of_a_sample_is_an_error(name: str) -> None:
    for text in _cuts(samples.ALL[name]):
        judge_texts([text])


@pytest.mark.skipif(not FILES, reason="the collected cases are not beside the checkout")
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_no_cut_of_a_real_file_is_an_error(path: Path) -> None:
    for text in _cuts(path.read_text(errors="replace")):
        judge_texts([text])


@pytest.mark.parametrize("name", samples.ALL)
def test_no_number_of_thousands_of_digits_is_an_error(name: str) -> None:
    text = samples.ALL[name]
    for number in re.finditer(r"\d+", text):
        judge_texts([text[: number.start()] + "9" * 5000 + text[number.end() :]])


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(sorted(samples.ALL)), st.data())
def test_no_garbled_sample_is_an_error(name: str, data: st.DataObject) -> None:
    text = samples.ALL[name]
    at = data.draw(st.integers(0, len(text)))
    junk = data.draw(st.text(alphabet="0 9|<>/,:\n\tN%x{}[]\"'\x00\x1b", max_size=12))
    judge_texts([text[:at] + junk + text[at + len(junk) :]])


def test_a_matrix_of_peer_access_is_not_taken_for_a_topology() -> None:
    matrix = " \tGPU0\tGPU1\t\n GPU0\tX\tGNS\t\n GPU1\tGNS\tX\t\n"
    assert parse_topology(matrix) is None
    both = "\tGPU0\tGPU1\tCPU Affinity\nGPU0\t X \tPHB\t0-7\nGPU1\tPHB\t X \t0-7\n" + matrix
    output = parse_output(both)
    assert output.topology is not None
    assert (output.topology.pairs, output.no_peers) == ({(0, 1): "PHB"}, ((0, 1),))


@pytest.mark.parametrize(
    "line",
    ["kern  :info  : 2024-11-20T07:29:49,736990+00:00 usb 1-1: new device",
     "kern  :info  : [Mon Nov  4 10:00:00 2024] usb 1-1: new device",
     "2024-12-03T10:00:00.12+00:00 pod kernel: usb 1-1: new device",
     "Nov 28 01:02:03 pod kernel: usb 1-1: new device",
     "[   12.500000] pcieport 0000:00:01.0: AER: Corrected error received: 0000:01:00.0",
     "6,3964,206764307,-;nvidia-nvswitch2: open (major=510)"],
)  # fmt: skip
def test_a_quiet_kernel_log_is_known_as_one_in_every_format(line: str) -> None:
    (found,) = judge_texts([f"{line}\n"])
    assert (found.name, found.status) == ("kernel.log", "pass")


def test_an_error_of_a_switch_is_read_from_the_fabric_managers_own_log() -> None:
    line = (
        "[Feb 27 2025 15:10:02] [ERROR] [tid 7] detected NVSwitch fatal error 20034 on fid 0 on "
        "NVSwitch pci bus id 00000000:86:00.0 physical id 3 port 61"
    )
    (event,) = parse_kernel_log(line).events
    assert (event.kind, event.bus, event.code) == ("switch", "0000:86:00", 20034)


def test_cards_are_read_from_the_output_of_cuda_programs() -> None:
    text = "_CudaDeviceProperties(name='Tesla T4', major=7, minor=5, total_memory=15102MB, x=1)"
    (card,) = parse_output(text).cards
    assert (card.name, card.compute_capability, card.memory_mib) == ("Tesla T4", 7.5, 15102)
    sample = (
        'Device 0: "NVIDIA A30"\n  CUDA Capability Major/Minor version number:    8.0\n'
        "  Total amount of global memory:                 24062 MBytes (25230508032 bytes)\n"
    )
    (card,) = parse_output(sample).cards
    assert (card.name, card.compute_capability, card.memory_mib) == ("NVIDIA A30", 8.0, 24062)


def test_instances_of_mig_are_slices_and_profiles_are_not() -> None:
    listed = "|   0  MIG 3g.20gb          9        1          4:4     |\n"
    (card,) = parse_output(listed * 2).cards
    assert [one.name for one in card.slices] == ["3g.20gb", "3g.20gb"]
    could = "|   0  MIG 1g.5gb       19     7/7        4.75       No     14     0     0   |\n"
    (card,) = parse_output(could).cards
    assert (card.is_mig, card.slices) == (True, ())


ECC = samples.QUERY[samples.QUERY.index("    ECC Errors") : samples.QUERY.index("    Processes")]
PIECES = [
    ECC,
    textwrap.dedent(ECC),
    ECC.partition("\n")[2],
    "\n".join(line.strip() for line in ECC.splitlines()),
    "ecc.errors.corrected.volatile.total, ecc.errors.uncorrected.volatile.total\n12, 2\n",
    "<ecc_errors><volatile><dram_correctable>12</dram_correctable>"
    "<dram_uncorrectable>2</dram_uncorrectable></volatile></ecc_errors>",
]


@pytest.mark.parametrize("text", PIECES)
def test_memory_errors_are_read_without_the_head_of_their_record(text: str) -> None:
    (card,) = parse_output(text).cards
    assert (card.ecc_corrected, card.ecc_uncorrected) == (12, 2)
    assert parse_output(f"{text}\n$ ls\n").kinds


def test_cards_on_the_bus_are_read_from_lspci() -> None:
    text = (
        "3b:00.0 3D controller: NVIDIA Corporation GA100 [A100 SXM4 40GB] (rev a1)\n"
        "0001:86:00.0 3D controller [0302]: NVIDIA Corporation GA100 [10de:20b0] (rev ff)\n"
        "3b:00.1 Audio device: NVIDIA Corporation AD102 High Definition Audio Controller\n"
        "00:02.0 VGA compatible controller: Matrox Electronics Systems Ltd. G200\n"
    )
    assert parse_output(text).pci_cards == ("0000:3b:00", "0001:86:00")


@pytest.mark.parametrize(
    ("text", "system"),
    [
        (WINDOWS, "windows"),
        (WSL, "wsl"),
        (samples.TABLE, ""),
        (query_of("WDDM", persistence="N/A"), "windows"),
        (query_of("WDDM", persistence="Enabled"), "wsl"),
        (query_of("N/A", persistence="Enabled"), ""),
        ("[    0.000000] Linux version 5.15.90.1-microsoft-standard-WSL2 (oe@oe)", "wsl"),
        ("C:\\Users\\me>nvidia-smi -L\nAccess is denied.\n", "windows"),
    ],
)  # fmt: skip
def test_windows_and_wsl_are_distinguished_from_linux(text: str, system: str) -> None:
    assert parse_output(text).system == system


def test_documents_on_one_long_line_are_read_whole() -> None:
    padding = " " * 40_000
    assert parse_output(samples.DCGM_JSON.replace("\n", padding)).kinds == ("dcgmi diag",)
    assert len(parse_output(samples.XML.replace("\n", padding)).cards) == 2


@pytest.mark.timeout(20)
@pytest.mark.parametrize("piece", ["nccl ", " ", "nvidia-smi ", "| ", "a,", "GPU 0: ", "<gpu "])
def test_a_very_long_line_is_read_quickly(piece: str) -> None:
    judge_texts([piece * 50_000 + "x"])
