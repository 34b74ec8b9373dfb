"""How a line of another trainer's log says that the run ended: in which machines say it, not prose.

People, data and samples of a model have words such as `out of memory` too, so each of them counts
only in the forms in which torch, other frameworks, drivers, kernels and schedulers write it.
"""

import re
from typing import Literal

#: `stopped` may be followed by a crash that it caused, and a crash by `maybe_stopped`.
LineEnding = Literal["", "crashed", "out_of_memory", "stopped", "maybe_stopped"]

_PART = (
    r"\b(?:gpu|tpu|card|device|host|node|machine|vm|pod|container|job|task|worker|process|rank|kernel)"
    r"(?: ?\d{1,6})?"
)
_OUT_OF_MEMORY = re.compile(
    # torch, Java and CUDA: names that nobody uses in a sentence
    r"(?-i:OutOfMemory)|(?-i:OUT_OF_MEMORY)\b|std::bad_alloc|(?-i:_ALLOC_FAILED)\b|"
    r"ErrorMemoryAllocation\b|"
    r"^(?:\[[^\]]{0,80}\]:?\s{0,9})?(?:\w{1,80}\.){0,9}\w{0,80}(?-i:MemoryError)\b|"
    # torch: `CUDA out of memory`, `error: out of memory`, `failure 2 'out of memory'`; our own
    r"\b(?:CUDA|HIP|XPU|NPU|MPS backend) out of memory\b|"
    r"(?:error|failure|fatal|failed|code)\b(?: ?\(\d{1,4}\))?[:\d' ]{1,12}out of memory\b|"
    r"^\W{0,9}out of memory\W{0,9}$|\bDefaultCPUAllocator: (?:can't|not enough)|"
    # a machine, a program or a part of one
    rf"{_PART} (?:ran |went |is |was |has run )?out of memory\b|"
    r"\btasks? \d[\d,-]{0,80}: out of memory\b|"
    # TensorFlow and JAX
    r"\bresource[_ ]exhausted: (?:out of memory|OOM)\b|\bOOM when allocating|"
    r"\bout of memory (?:while |when )?(?:trying to )?allocat(?:e|ing)\b|"
    r"\bran out of memory in memory space\b|"
    # Linux, Slurm, Kubernetes and Ray
    r"\bout of memory\b[^:]{0,40}: kill(?:ed)? process\b|\boom[-_]kill(?:er|ed)?\b|"
    r"(?-i:OOMKill)|\bexceeded (?:job|step) memory limit\b|\bcgroup out-of-memory handler\b|"
    r"\b(?:job|step) \d\S{0,40} exceeded memory limit\b|\bdue to memory pressure \(OOM\)|"
    r"[:\]] (?:can't|cannot) allocate memory\b",
    re.IGNORECASE,
)
#: Words that name who stopped it, and words that also follow a crash.
_STOPPED = re.compile(
    r"due to (?:time limit|preemption)|\bKeyboardInterrupt\b|\bwalltime \S+ exceeded|"
    r"\bjob killed (?:after reaching|by)|\binterruption notice\b|\b(?:pod|job|instance) evicted\b|"
    r"\bscancel\b",
    re.IGNORECASE,
)
_MAYBE_STOPPED = re.compile(
    r"\bcancelled at \d{4}-|\bjob step aborted\b|\b(?:received|got) (?:signal:? 15|SIGTERM)|"
    r"\breceived \S{1,20} death signal\b|"
    r"^Terminated$|^\W{0,9}preempted\b|"
    r"\b(?:job|task|step|node|pod|vm|tpu|instance|machine|worker|allocation|process|run) "
    r"(?:\S{1,40} )?(?:was |has been |is being |is |got )?preempted\b",
    re.IGNORECASE,
)
_ERROR = re.compile(
    r"^(?:\[[^\]]*\]:?\s*)*(?:Traceback \(most recent call last\)|(?:\w+\.)*\w+Error\b|"
    r"Segmentation fault|Killed$|Bus error)|error during training|"
    r"ChildFailedError|\bexit(?:ed with exit)? (?:code|status):? [1-9]|"
    r"collective operation timeout|"
    r"NCCL operations have failed|nccl(?:Remote|Internal|System)Error|watchdog got stuck|"
    r"terminate called after throwing|loss is probably exploding",
    re.IGNORECASE | re.MULTILINE,
)
#: Advice, which comes before what it is about.
_ADVICE = re.compile(
    r"\b(?:if|in case|avoids?|avoiding|prevents?|preventing|hints?|tips?)\b", re.IGNORECASE
)
#: What a log quotes is a text of the data or of the model, whatever it says.
_QUOTED = re.compile(
    r"\b(?:samples?|generated|generation|prompt|completion|text)\b[^:=]{0,20}[:=]\s{0,9}['\"].*",
    re.IGNORECASE,
)


def ending_of(line: str) -> LineEnding:
    """How a line says that the run ended; empty for one that does not; pure."""
    said = _QUOTED.sub("", line)
    found = _OUT_OF_MEMORY.search(said)
    if found is not None and not _ADVICE.search(said, 0, found.start()):
        return "out_of_memory"
    if _STOPPED.search(said):
        return "stopped"
    if _MAYBE_STOPPED.search(said):
        return "maybe_stopped"
    return "crashed" if _ERROR.search(said) else ""
