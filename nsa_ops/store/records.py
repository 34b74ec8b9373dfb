"""What the registry of a laptop remembers: pods, runs, receipts and intents."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True)
class PodRecord:
    """A pod this laptop knows.

    Attributes:
        pod_id: Its identity; a recycled address is a new pod.
        kind: Transport: `local`, `ssh` or `fabric`.
        root: Absolute folder on the pod that holds code/, runs/ and data/.
        python: Interpreter on the pod that trains.
        profile: Hardware profile to use there; empty if each command has to name one.
        address: `user@host:port` or an alias of the ssh configuration; empty if it is local.
    """

    name: str
    pod_id: str
    kind: str
    root: str
    python: str
    profile: str
    added_unix_s: float
    address: str = ""


@dataclass(frozen=True)
class MemberPod:
    """One pod of a run: its name, and the identity that it had when the attempt began."""

    pod: str
    pod_id: str


@dataclass(frozen=True)
class RunRecord:
    """A run that was launched from this laptop; its state is on the pod and never here.

    Attributes:
        pod: Name of the pod that has it; of several pods, of pod 0, which has its checkpoints.
        code_id: Version of the code that it runs.
        pod_id: Identity of that pod; empty in a record of an older version.
        attempt: Last attempt that was started from here; 0 in a record of an older version.
        attempt_id: Identity of that attempt; empty where it has none.
        other_pods: Pods 1, 2 … of a run of several, with their identities, as JSON; empty for one.
    """

    run_id: str
    pod: str
    recipe: str
    profile: str
    code_id: str
    config_sha256: str
    launched_unix_s: float
    pod_id: str = ""
    attempt: int = 0
    attempt_id: str = ""
    other_pods: str = ""

    @property
    def others(self) -> tuple[MemberPod, ...]:
        """Pods 1, 2 … of a run of several; none for a run of one."""
        pairs = json.loads(self.other_pods) if self.other_pods else []
        return tuple(MemberPod(str(pod), str(pod_id)) for pod, pod_id in pairs)

    @property
    def members(self) -> tuple[MemberPod, ...]:
        """All its pods, by node rank."""
        return (MemberPod(self.pod, self.pod_id), *self.others)

    def with_others(self, others: Sequence[MemberPod]) -> "RunRecord":
        """The same run with these pods beside pod 0."""
        pairs = [[one.pod, one.pod_id] for one in others]
        return replace(self, other_pods=json.dumps(pairs) if pairs else "")


@dataclass(frozen=True)
class Receipt:
    """A checkpoint that was pulled to `path`, and when every hash of it last agreed.

    Attributes:
        manifest_sha256: Hash of its checkpoint.json.
    """

    run_id: str
    step: int
    path: str
    total_bytes: int
    manifest_sha256: str
    pulled_unix_s: float
    verified_unix_s: float


@dataclass(frozen=True)
class Intent:
    """An act that was started; without an end it was cut off, and `reconcile` has to check it."""

    id: int
    at: float
    act: str
    subject: str
    detail: str
    ended_unix_s: float | None
    outcome: str | None

    @property
    def details(self) -> dict[str, Any]:
        """What was recorded beside act and subject."""
        return dict(json.loads(self.detail))
