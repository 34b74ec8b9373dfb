"""Answers that are errors of the driver, of CUDA or of torch: what each means and what to do."""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from nsa_core.rundir.report import CheckResult, Status, checked
from nsa_ops.gpu.card import GPU
from nsa_ops.gpu.kernel_log import KernelLog
from nsa_ops.gpu.smi_fields import parse_bus
from nsa_ops.quantities import count_of

#: An error is at the beginning of its line; what is longer is data.
_MAX_LINE = 1000
_HUNG_EXIT = re.compile(r"nvidia-smi[^\n]*\n(?:[^\n]*\n)?\s{0,8}124\s*$", re.MULTILINE)
_VERSION = r"(\d+\.\d+(?:\.\d+)*)"
_LIBRARY = re.compile(rf"(?:NVML|client) library version:?\s*{_VERSION}", re.IGNORECASE)
_MODULE = re.compile(
    rf"Kernel Module(?: for \S+)?\s+{_VERSION}|kernel module version:?\s*{_VERSION}", re.IGNORECASE
)
_REPLACE_CARD = "Reboot the machine, or give the pod back and take another one"


@dataclass(frozen=True)
class _KnownError:
    """An error: how it is recognised, its meaning (with `{text}` and `{bus}`) and what to do."""

    kind: str
    pattern: str
    message: str
    hint: str
    status: Status = "fail"


_KNOWN_ERRORS = (
    _KnownError("mismatch", r"Driver/library version mismatch", "", ""),  # see _mismatch
    _KnownError("unknown_error", r"Failed to initialize NVML:\s*Unknown Error", "", ""),  # _lost
    _KnownError(
        "not_loaded",
        r"Failed to initialize NVML:\s*(?:Driver Not Loaded|Uninitialized|Not Found)"
        r"|NVML Shared Library Not Found|couldn't find libnvidia-ml",
        "the driver is not loaded, or its library is missing ({text})",
        "Start the container with `--gpus all`; on the host, run `modprobe nvidia`",
    ),
    _KnownError(
        "permission",
        r"Failed to initialize NVML:\s*(?:Insufficient Permissions|GPU access blocked)",
        "this user may not use the card ({text})",
        "Check the permissions of /dev/nvidia*; join the `video` or `render` group",
    ),
    _KnownError(
        "not_talking",
        r"couldn't communicate with the NVIDIA driver",
        "nvidia-smi cannot talk to the driver: its kernel module is not loaded or does not fit the "
        "kernel",
        "Run `modprobe nvidia` on the host, or reboot; install the module for the running kernel",
    ),
    _KnownError(
        "no_devices",
        r"No devices were found|No NVIDIA GPU found",
        "No devices were found: the driver is loaded, but no card works with it",
        "See `dmesg | grep NVRM` for the card it cannot start; reboot, or take another pod",
    ),
    _KnownError(
        "handle",
        r"Unable to determine the device handle for (?:GPU|gpu)[ \d]*|GPU is lost\."
        r"|GPU requires reset",
        "GPU lost: the driver cannot reach the card at {bus} ({text})",
        _REPLACE_CARD,
    ),
    _KnownError(
        "forward_compat",
        r"(?:Error|error)\W+804\b|forward compatibility was attempted on non supported HW",
        "Error 804: the container's CUDA compatibility libraries (cuda-compat) do not work on this "
        "card (GeForce), or its driver is too old for the container's CUDA",
        "Update the host's driver, or take an image with an older CUDA and without cuda-compat on "
        "the library path",
    ),
    _KnownError(
        "cuda_mismatch",
        r"Error 803\b|unsupported display driver / cuda driver combination",
        "Error 803: libcuda and the kernel driver have different versions",
        "Take the cuda-compat folder off LD_LIBRARY_PATH, or update the host's driver",
    ),
    _KnownError(
        "fabric",
        r"Error 802\b|system not yet initialized",
        "Error 802: CUDA cannot start yet, because NVSwitch boards wait for the fabric manager",
        "Start `nvidia-fabricmanager` of the driver's exact version on the host",
    ),
    _KnownError(
        "driver_old",
        r"NVIDIA driver on your system is too old"
        r"|CUDA driver version is insufficient for CUDA runtime"
        r"|cuda>=[\d.]+, please update your driver",
        "the driver is too old for this CUDA ({text})",
        "Update the host's driver, or install the torch build for its CUDA",
    ),
    _KnownError(
        "no_kernel_image",
        r"no kernel image is available for execution"
        r"|with CUDA capability sm_\d+ is not compatible with the current PyTorch",
        "this torch build has no code for this card ({text})",
        "Install the torch build that the profile names: see `nsa-ops profile show`",
    ),
    _KnownError(
        "no_cuda_build",
        r"Torch not compiled with CUDA enabled",
        "torch is a CPU build",
        "Install the CUDA build of torch that the profile names",
    ),
    _KnownError(
        "no_capable_device",
        r"no CUDA-capable device is detected|Found no NVIDIA driver on your system",
        "CUDA finds no card ({text})",
        "Start the container with `--gpus all`; check CUDA_VISIBLE_DEVICES and `nvidia-smi`",
    ),
    _KnownError(
        "invalid_device",
        r"CUDA error:\s*invalid device ordinal|Error 101\b",
        "a program asked for a card number that does not exist here ({text})",
        "Compare CUDA_VISIBLE_DEVICES and the number of ranks with `nvidia-smi -L`",
    ),
    _KnownError(
        "cuda_unknown",
        r"Error 999\b|CUDA unknown error|CUDA error: unknown error",
        "CUDA cannot start ({text})",
        "Reload `nvidia_uvm` on the host, re-create the container, or reboot",
    ),
    _KnownError(
        "ecc",
        r"uncorrectable (?:ECC|NVLink) error (?:was )?(?:encountered|detected)",
        "uncorrectable memory error while computing ({text})",
        "Reset the card; take another pod if it comes back",
    ),
    _KnownError(
        "no_tool",
        r"nvidia-smi:? (?:command )?not found|nvidia-smi: No such file",
        "nvidia-smi is missing",
        "Take an image with the driver's tools; start the container with `--gpus all`",
    ),
    _KnownError(
        "hung",
        r"nvidia-smi\S*.*(?:timed out|did not (?:answer|end) within|Terminated|hangs?\b)"
        r"|timeout: sending signal.*nvidia-smi|^\S+\s+\d+\s.*\sD[sLlN<+]*\s.*nvidia-smi",
        "driver not answering: nvidia-smi did not end within its deadline ({text})",
        "See `dmesg | grep -i xid`; the card needs a reset or a reboot. Do not run it again: "
        "each call hangs too",
    ),
    _KnownError(
        "memory_full",
        r"CUDA error: out of memory|CUDA_ERROR_OUT_OF_MEMORY",
        "the card has no memory left, usually because another process holds it ({text})",
        "Find it with `nvidia-smi`, end it or take a free card; then check the batch size",
    ),
    _KnownError(
        "no_bf16",
        r"bfloat16 is only supported on GPUs with|does not support bfloat16",
        "the card has no bf16 ({text})",
        "Take an Ampere card or later, or a profile with fp16 (`v100`, `t4`)",
    ),
    _KnownError(
        "acs",
        r"(?-i:ACSCtl:.*ReqRedir\+)",
        "PCIe access control (ACS) sends traffic between cards through the processor",
        "Set NCCL_P2P_DISABLE=1 for training on several cards, or have ACS switched off",
        "warn",
    ),
    _KnownError(
        "peer_hang",
        r"(?:NCCL_P2P_DISABLE|collective operation timeout|Watchdog caught collective"
        r"|simpleP2P.*fail|P2P.*(?:hang|verification error)|peer access is not supported"
        r"|Verification error @ element|Out of bounds values : \d+ FAILED"
        r"|\b(?:nccl|all_?reduce)\b.*\b(?:hangs?|hung|stuck|deadlocks?)\b"
        r"|\b(?:hangs?|hung|stuck|deadlocks?)\b.*\b(?:nccl|all_?reduce|p2p)\b)",
        "cards cannot exchange data, or a collective operation hung ({text})",
        "Set NCCL_P2P_DISABLE=1 and try again; check ACS and the IOMMU (`lspci -vvv | grep "
        "ACSCtl`)",
    ),
)
_PATTERNS = {one.kind: re.compile(one.pattern, re.IGNORECASE) for one in _KNOWN_ERRORS}
_BY_KIND = {one.kind: one for one in _KNOWN_ERRORS}


@dataclass(frozen=True)
class ErrorText:
    """An answer that is an error: its kind, its words, and the PCI address that they name."""

    kind: str
    text: str
    bus: str = ""


@dataclass(frozen=True)
class DriverVersions:
    """The driver's library and its kernel module; empty where a text does not say."""

    library: str = ""
    module: str = ""


def parse_errors(text: str) -> tuple[ErrorText, ...]:
    """Errors in a text, each kind and card once; line by line, as a long line costs its square."""
    found: dict[tuple[str, str], ErrorText] = {}
    for line in text.splitlines():
        for kind, pattern in _PATTERNS.items():
            match = pattern.search(line, 0, _MAX_LINE)
            if match:
                words = line[match.start() :].strip()[:200]
                bus = parse_bus(re.sub(r"GPU(?=[0-9A-Fa-f]{4})", "", words))
                found.setdefault((kind, bus), ErrorText(kind, words, bus))
    if _HUNG_EXIT.search(text):
        late = ErrorText("hung", "`timeout` ended nvidia-smi (exit code 124)")
        found.setdefault(("hung", ""), late)
    return tuple(found.values())


def parse_versions(text: str) -> DriverVersions:
    """Versions of the driver's library and of its kernel module."""
    library, module = _LIBRARY.search(text), _MODULE.search(text)
    return DriverVersions(library[1] if library else "", (module[1] or module[2]) if module else "")


def judge_errors(
    errors: tuple[ErrorText, ...], versions: DriverVersions, kernel: KernelLog, num_host_cards: int
) -> Iterator[CheckResult]:
    """Every error in a text, with what the rest of the text adds.

    Args:
        errors: What was found.
        versions: The driver's two halves.
        kernel: The kernel log, which may name them too.
        num_host_cards: Cards that the host of a container sees; 0 where that is unknown.
    """
    found = list(errors)
    if kernel.client_version and not any(one.kind == "mismatch" for one in found):
        found.append(ErrorText("mismatch", "NVRM: API mismatch"))
    for one in found:
        if one.kind == "mismatch":
            yield _mismatch(versions, kernel)
        elif one.kind == "unknown_error":
            yield _lost(num_host_cards)
        else:
            known = _BY_KIND[one.kind]
            label = GPU(bus=one.bus).label if one.bus else "driver"
            message = known.message.format(text=one.text, bus=one.bus or "an unknown address")
            yield checked(
                f"{label}.{one.kind}", known.status, message, measured=one.text[:80],
                command="nvidia-smi", hint=known.hint,
            )  # fmt: skip


def _mismatch(versions: DriverVersions, kernel: KernelLog) -> CheckResult:
    library = versions.library or kernel.client_version or "unknown"
    module = versions.module or kernel.module_version or "unknown"
    message = (
        f"Driver/library version mismatch: user-space {library}, loaded kernel module {module}. "
        "Running programs continue; new ones cannot start"
    )
    hint = (
        "Reboot, or stop all programs and reload the module (`modprobe -r nvidia_uvm nvidia_drm "
        "nvidia_modeset nvidia && modprobe nvidia`); then hold the package (`apt-mark hold`)"
    )
    return checked(
        "driver.mismatch", "fail", message, measured=f"library {library}, module {module}",
        limit="one version", command="cat /proc/driver/nvidia/version", hint=hint,
    )  # fmt: skip


def _lost(num_host_cards: int) -> CheckResult:
    """The container's cards are lost; the host's are not."""
    host = f"; the host is fine and sees {count_of(num_host_cards, 'card')}"
    message = (
        "Failed to initialize NVML (Unknown Error): the container has lost its GPUs, as after a "
        f"cgroup reload (`systemctl daemon-reload`){host if num_host_cards else ''}. Running "
        "programs continue"
    )
    hint = (
        "Save a checkpoint of what runs (`nsa-ops checkpoint`), then re-create the container; a "
        "restart inside it would fail. Device nodes given with `--device` prevent it"
    )
    return checked("driver.container", "fail", message, command="nvidia-smi -L", hint=hint)
