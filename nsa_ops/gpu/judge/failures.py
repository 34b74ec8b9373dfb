"""Judge answers that are errors: what each means, what to do, and what not to blame."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from nsa_core.rundir.report import CheckResult, Status
from nsa_ops.gpu.judge.result import checked
from nsa_ops.gpu.read.dcgm import Diagnosis
from nsa_ops.gpu.read.evidence import Evidence, parse_evidence
from nsa_ops.gpu.read.failures import Failure, Found, OutOfMemory
from nsa_ops.quantities import count_of

_MIB_PER_GIB = 1024
#: Of a card's memory: what somebody else must hold before he is to blame.
_OTHERS_SHARE = 0.1
_CONTEXT_MIB = 1024
_MEND_CARD = "Reboot the machine, or give the pod back and take another one"


@dataclass(frozen=True)
class _Meaning:
    """What an error means; `{text}` is its words, `{bus}` the card's address."""

    message: str
    hint: str
    status: Status = "fail"


_MEANINGS: Mapping[Failure, _Meaning] = {
    "handle": _Meaning("GPU lost: the driver cannot reach the card at {bus} ({text})", _MEND_CARD),
    "no_devices": _Meaning(
        "No devices were found: the driver is loaded and serves no card",
        "See `dmesg | grep NVRM` for the card it cannot start; reboot, or take another pod",
    ),
    "not_talking": _Meaning(
        "nvidia-smi cannot talk to the driver: its kernel module is not loaded or does not fit "
        "the kernel",
        "Run `modprobe nvidia` on the host, or reboot; install the module for the running kernel",
    ),
    "not_loaded": _Meaning(
        "the driver is not loaded, or its library is missing ({text})",
        "Start the container with `--gpus all`; on the host, run `modprobe nvidia`",
    ),
    "permission": _Meaning(
        "this login may not use the card ({text})",
        "Look at the rights of /dev/nvidia*; join the `video` or `render` group",
    ),
    "forward_compat": _Meaning(
        "Error 804: the container's CUDA compatibility libraries (cuda-compat) do not work on "
        "this card (GeForce), or its driver is too old for the container's CUDA",
        "Update the host's driver, or take an image with an older CUDA and without cuda-compat "
        "on the library path",
    ),
    "cuda_mismatch": _Meaning(
        "Error 803: libcuda and the kernel driver are of different versions",
        "Take the cuda-compat folder off LD_LIBRARY_PATH, or update the host's driver",
    ),
    "fabric": _Meaning(
        "Error 802: CUDA is not initialised, as NVSwitch boards wait for the fabric manager",
        "Start `nvidia-fabricmanager` of the driver's exact version on the host",
    ),
    "driver_old": _Meaning(
        "the driver is too old for this CUDA ({text})",
        "Update the host's driver, or install the torch build for its CUDA",
    ),
    "no_kernel_image": _Meaning(
        "torch has no code for this card ({text})",
        "Install the torch build that the profile names: see `nsa-ops profile show`",
    ),
    "no_cuda_build": _Meaning(
        "torch is a CPU build", "Install the CUDA build of torch that the profile names"
    ),
    "no_capable_device": _Meaning(
        "CUDA sees no card ({text})",
        "Start the container with `--gpus all`; look at CUDA_VISIBLE_DEVICES and `nvidia-smi`",
    ),
    "invalid_device": _Meaning(
        "a card's number does not exist here ({text})",
        "Compare CUDA_VISIBLE_DEVICES and the number of ranks with `nvidia-smi -L`",
    ),
    "cuda_unknown": _Meaning(
        "CUDA cannot start ({text})",
        "Reload `nvidia_uvm` on the host, re-create the container, or reboot",
    ),
    "ecc": _Meaning(
        "uncorrectable memory error while computing ({text})",
        "Reset the card; take another pod if it comes back",
    ),
    "no_tool": _Meaning(
        "nvidia-smi is not there",
        "Take an image with the driver's tools; start the container with `--gpus all`",
    ),
    "hung": _Meaning(
        "driver not answering: nvidia-smi did not end within its deadline ({text})",
        "See `dmesg | grep -i xid`; the card needs a reset or a reboot. Do not start it again "
        "and again: each call hangs too",
    ),
    "memory_full": _Meaning(
        "the card has no memory left, mostly as another process holds it ({text})",
        "Find it with `nvidia-smi`, end it or take a free card; then look at the batch size",
    ),
    "no_bf16": _Meaning(
        "the card has no bf16 ({text})",
        "Take an Ampere card or later, or a profile with fp16 (`v100`, `t4`)",
    ),
    "acs": _Meaning(
        "PCIe access control (ACS) sends traffic between cards through the processor",
        "Set NCCL_P2P_DISABLE=1 for training on several cards, or have ACS switched off",
        "warn",
    ),
    "peer_hang": _Meaning(
        "cards cannot exchange data, or a collective hung ({text})",
        "Set NCCL_P2P_DISABLE=1 and try again; look at ACS and the IOMMU (`lspci -vvv | grep "
        "ACSCtl`)",
    ),
}


def judge_failures(evidence: Evidence) -> list[CheckResult]:
    """Every error in a text, with what the rest of the text adds."""
    return [*_starts(evidence), *map(_out_of_memory, evidence.out_of_memory)]


def explain_error(text: str) -> tuple[str, str] | None:
    """Meaning and advice for what CUDA or torch said; None if it is no error that we know."""
    results = judge_failures(parse_evidence(text))
    return (results[0].message, results[0].hint) if results else None


def _starts(evidence: Evidence) -> Iterator[CheckResult]:
    found = list(evidence.failures)
    if evidence.kernel.client_version and not any(one.kind == "mismatch" for one in found):
        found.append(Found("mismatch", "NVRM: API mismatch"))
    for one in found:
        if one.kind == "mismatch":
            yield _mismatch(evidence)
        elif one.kind == "unknown_error":
            yield _container(evidence)
        else:
            meaning = _MEANINGS[one.kind]
            address = f"gpu@{one.bus.partition(':')[2]}" if one.bus else "driver"
            message = meaning.message.format(text=one.text, bus=one.bus or "an address not told")
            yield checked(
                f"{address}.{one.kind}",
                meaning.status,
                message,
                measured=one.text[:80],
                command="nvidia-smi",
                hint=meaning.hint,
            )


def _mismatch(evidence: Evidence) -> CheckResult:
    library = evidence.versions.library or evidence.kernel.client_version or "not told"
    module = evidence.versions.module or evidence.kernel.module_version or "not told"
    return checked(
        "driver.mismatch",
        "fail",
        f"Driver/library version mismatch: user-space {library}, loaded kernel module {module}."
        " Programs that run already go on; new ones cannot start",
        measured=f"library {library}, module {module}",
        limit="one version",
        command="cat /proc/driver/nvidia/version",
        hint=(
            "Reboot, or stop all programs and reload the module (`modprobe -r nvidia_uvm "
            "nvidia_drm nvidia_modeset nvidia && modprobe nvidia`); then hold the package "
            "(`apt-mark hold`)"
        ),
    )


def _container(evidence: Evidence) -> CheckResult:
    count = evidence.num_host_cards
    host = f"; the host is fine and sees {count_of(count, 'card')}" if count else ""
    return checked(
        "driver.container",
        "fail",
        "Failed to initialize NVML (Unknown Error): the container has lost its GPUs, as after a"
        f" cgroup reload (`systemctl daemon-reload`){host}. Programs that run already go on",
        command="nvidia-smi -L",
        hint="Save a checkpoint of what runs (`nsa-ops checkpoint`), then re-create the container;"
        " a restart inside it would fail. Device nodes given with `--device` prevent it",
    )


def _out_of_memory(found: OutOfMemory) -> CheckResult:
    name, total, own = f"gpu{found.gpu}.out_of_memory", found.total_mib or 0.0, found.own_mib or 0.0
    command = "nvidia-smi --query-compute-apps=pid,process_name,used_memory --format=csv"
    of_total = f" of {_gib(total)}" if total else ""
    held = sum(amount for _, amount in found.others)
    if found.others and held > _OTHERS_SHARE * total:
        who = ", ".join(f"process {pid} ({_gib(amount)})" for pid, amount in found.others)
        pids = ",".join(str(pid) for pid, _ in found.others)
        message = (
            f"out of memory because another process holds the card: {who}{of_total}; ours holds "
            f"{_gib(own)}"
        )
        hint = f"End it or take a free card (`ps -fp {pids}`); our batch size is not the cause"
        return checked(name, "fail", message, measured=_gib(held), command=command, hint=hint)
    unseen = total - (found.free_mib or 0.0) - own - held
    if found.free_mib is not None and total and unseen > max(_CONTEXT_MIB, _OTHERS_SHARE * total):
        message = (
            f"out of memory, and {_gib(unseen)}{of_total} is held by another process that torch "
            f"does not name; ours holds {_gib(own)}"
        )
        hint = (
            "Find it with `nvidia-smi`, end it or take a free card; our batch size is not the cause"
        )
        return checked(name, "fail", message, measured=_gib(unseen), command=command, hint=hint)
    message = (
        f"out of memory by our own {_gib(own)}{of_total}, asking for "
        f"{_gib(found.tried_mib or 0.0)} more"
    )
    hint = "Use a smaller `--set batch.micro_batch=` with more accumulation; see `nsa-ops estimate`"
    return checked(name, "fail", message, measured=_gib(own), command=command, hint=hint)


def _gib(mib: float) -> str:
    return f"{mib / _MIB_PER_GIB:.2f} GiB"


_CAUSES = (
    (
        "thermal",
        "cooling",
        "Look at cooling (fans, thermal paste, room); give the pod back, and take another one",
    ),
    ("remap", "memory", "Reset the card and run the test again; give the pod back if it fails"),
    ("ecc", "memory", "Reset the card and run the test again; give the pod back if it fails"),
    (
        "double-bit",
        "memory",
        "Reset the card and run the test again; give the pod back if it fails",
    ),
    ("nvlink", "NVLink", "Run `nvidia-smi nvlink -s` and `-e`; reset all cards together"),
    ("pcie", "PCIe", "Look at `nvidia-smi -q -d PCI`; reseat the card, or take another pod"),
    ("power", "power", "Look at the power supply and the power cap (`nvidia-smi -q -d POWER`)"),
    ("persistence", "persistence mode", "Run `nvidia-smi -pm 1` as root"),
    ("in use", "another process", "End the program that uses the card, then run the test again"),
)
_STATUSES: Mapping[str, Status] = {"fail": "fail", "warn": "warn"}


def judge_diagnoses(diagnoses: Sequence[Diagnosis]) -> list[CheckResult]:
    """Tests of dcgmi that did not pass, by card; one line for all that did."""
    bad = [one for one in diagnoses if one.status in _STATUSES]
    named = {one.test for one in bad if one.gpus}
    bad = [one for one in bad if one.gpus or one.test not in named]
    good = {one.test for one in diagnoses if one.status == "pass"} - {one.test for one in bad}
    results = []
    if good:
        message = f"{count_of(len(good), 'test')} passed on every card"
        results.append(checked("dcgm", "pass", message, command="dcgmi diag -r 2"))
    return results + [result for one in bad for result in _diagnosis(one)]


def _diagnosis(one: Diagnosis) -> Iterator[CheckResult]:
    told = one.told.lower()
    cause = next((found for found in _CAUSES if found[0] in told), None)
    reason = f" ({cause[1]})" if cause else ""
    hint = cause[2] if cause else "Run `dcgmi diag -r 3` again; give the pod back if it fails again"
    words = "failed" if one.status == "fail" else "warned"
    for label in [f"gpu{number}" for number in one.gpus] or ["gpus"]:
        yield checked(
            f"{label}.dcgm",
            _STATUSES[one.status],
            f"dcgmi test `{one.test}` {words}{reason}: {one.told or 'it does not say why'}",
            measured=one.status,
            limit="pass",
            command="dcgmi diag -r 2",
            hint=hint,
        )
