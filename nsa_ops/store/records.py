"""What the registry of a laptop remembers: pods, runs, receipts and intents."""

import json
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class PodRecord:
    """A pod this laptop knows.

    Attributes:
        name: The operator's name for it.
        pod_id: Its identity; a recycled address is a new pod.
        kind: Transport: `local`, `ssh` or `fabric`.
        root: Absolute folder on the pod that holds code/, runs/ and data/.
        python: Interpreter on the pod that trains.
        profile: Hardware profile to use there; empty if the operator has to say.
        added_unix_s: When it was added.
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
class RunRecord:
    """A run that was launched from this laptop; its state is on the pod and never here.

    Attributes:
        run_id: Its id.
        pod: Name of the pod that has it.
        recipe: Recipe of its configuration.
        profile: Hardware profile.
        code_id: Version of the code that it runs.
        config_sha256: Hash of its configuration.
        launched_unix_s: When.
        pod_id: Identity of that pod; empty in a record of an older version.
        attempt: Attempt that was last begun from here; 0 in a record of an older version.
        attempt_id: Identity of that attempt; empty where it has none.
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


@dataclass(frozen=True)
class Receipt:
    """A checkpoint that was pulled, and when every hash of it last agreed.

    Attributes:
        run_id: Run.
        step: Step of the checkpoint.
        path: Folder on this machine.
        total_bytes: Size of its files.
        manifest_sha256: Hash of its checkpoint.json.
        pulled_unix_s: When it arrived.
        verified_unix_s: When all its hashes last agreed.
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
    """An act that was begun; without an end it was cut off and has to be looked at."""

    id: int
    at: float
    act: str
    subject: str
    detail: str
    ended_unix_s: float | None
    outcome: str | None

    @property
    def details(self) -> dict[str, Any]:
        """What was written down beside act and subject."""
        return dict(json.loads(self.detail))
