"""Two or three pods whose answers are scripted: what they are, whom they reach, what runs there."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from pydantic import BaseModel

from nsa_core.rundir.manifest import RunManifest, new_attempt_id
from nsa_ops.context import Operator
from nsa_ops.errors import NotFoundError
from nsa_ops.pod.messages import (
    ACTION,
    AnyAction,
    JoinAttemptAction,
    NextAttemptAction,
    PrepareRunAction,
    Reply,
    ReplyCode,
    RunReport,
    SetAsideAction,
)
from nsa_ops.remote.transport import Completed
from nsa_ops.store import PodRecord
from tests.ops.fakes import FakeTransport, completed
from tests.ops.operators import POD, Desk
from tests.ops.runs.documents import answer, report
from tests.ops.runs.test_preflight_and_launch import HOST, TORCH

ActionT = TypeVar("ActionT", bound=BaseModel)
Script = Callable[[int], RunReport | Exception]


@dataclass
class ScriptedPod:
    """One pod: the agent of the network, the agent of runs, and what was asked of it."""

    number: int
    name: str
    #: Pods that it cannot reach at all, by number, and those that it cannot on the chosen port.
    blocked: set[int] = field(default_factory=set)
    port_closed: set[int] = field(default_factory=set)
    #: What the n-th look at its run shows.
    script: Script = lambda _look: report("planned")
    actions: list[AnyAction] = field(default_factory=list)
    num_looks: int = 0
    transport: FakeTransport = field(default_factory=FakeTransport)

    def __post_init__(self) -> None:
        self.transport.answers |= {
            "exec(compile(source": self.network,
            "statvfs": completed(HOST),
            "importlib.util": completed(TORCH),
            "nvidia-smi": NotFoundError("gone"),
            "sys.exit(not": completed(),
            "nsa_ops.pod.probe": self.probe,
            "nsa_ops.pod.act": self.act,
            "list-panes": completed(exit_code=1, stderr="no server running"),
            "tmux": completed(),
            "tail -c": completed("the last words\n"),
            "test -": completed(exit_code=1),
            "sha256": completed(),
        }

    @property
    def record(self) -> PodRecord:
        return replace(POD, name=self.name, pod_id=f"id-{self.name}", root=f"/{self.name}")

    @property
    def was_started(self) -> bool:
        return any("new-session" in words for words in self.transport.asked)

    def network(self, _words: tuple[str, ...], stdin: bytes) -> Completed:
        _source, asked = json.loads(stdin)
        found: dict[str, Any]
        if asked["do"] == "describe":
            addresses = [{"interface": "eth0", "address": f"10.0.0.{self.number}"}]
            found = {"addresses": addresses, "torch": "2.9.0", "boot_id": self.name,
                     "network_id": 1, "first_port": 32768, "last_port": 60999}  # fmt: skip
        elif asked["do"] == "listen":
            found = {"free_port": 40000, "port_problem": ""}
        else:
            found = {"found": [self._call(one) for one in asked["listeners"]]}
        return completed(json.dumps(found) + "\n")

    def _call(self, listener: dict[str, Any]) -> dict[str, Any]:
        number = listener["number"]
        return {"target": number, "address": listener["addresses"][0],
                "from_address": f"10.0.0.{self.number}", "mb_per_s": 100.0,
                "port_problem": "timed out" * (number in self.blocked | self.port_closed),
                "free_port_problem": "timed out" * (number in self.blocked)}  # fmt: skip

    def probe(self, _words: tuple[str, ...], _stdin: bytes) -> Completed:
        found = self.script(self.num_looks)
        self.num_looks += 1
        if isinstance(found, Exception):
            raise found
        return answer(found)

    @property
    def manifest_path(self) -> str:
        return f"/{self.name}/runs/r1/manifest.json"

    @property
    def manifest(self) -> RunManifest:
        return RunManifest.model_validate_json(self.transport.files[self.manifest_path])

    def write(self, manifest: RunManifest) -> None:
        self.transport.files[self.manifest_path] = manifest.model_dump_json().encode()

    def act(self, _words: tuple[str, ...], stdin: bytes) -> Completed:
        """As the agent does: the manifest is written, replaced, or set aside."""
        asked = ACTION.validate_json(stdin)
        self.actions.append(asked)
        manifest = None
        match asked:
            case PrepareRunAction() | JoinAttemptAction():
                manifest = asked.manifest
            case NextAttemptAction():
                old = self.manifest
                changed = RunManifest.model_validate({**old.model_dump(), **asked.changes})
                manifest = changed.model_copy(
                    update={
                        "attempt": old.attempt + 1, "attempt_id": new_attempt_id(),
                        "earlier_attempts": {**old.earlier_attempts, old.attempt: old.attempt_id},
                    }
                )  # fmt: skip
            case SetAsideAction():
                del self.transport.files[self.manifest_path]
        if manifest is not None:
            self.write(manifest)
        reply = Reply(
            action=asked.action, code=ReplyCode.OK, outcome="done", message="done",
            manifest=manifest,
        )  # fmt: skip
        return completed(reply.model_dump_json())

    def asked_for(self, kind: type[ActionT]) -> list[ActionT]:
        """Actions of one kind that were asked of it, in order."""
        return [one for one in self.actions if isinstance(one, kind)]


def make_pods(desk: Desk, *names: str) -> list[ScriptedPod]:
    """Pods that the registry knows, in this order."""
    pods = [ScriptedPod(number, name) for number, name in enumerate(names)]
    for pod in pods:
        desk.store.add_pod(pod.record)
    return pods


def operator_of(desk: Desk, pods: list[ScriptedPod]) -> Operator:
    """An operator who reaches each pod by its own transport."""
    by_name = {pod.name: pod.transport for pod in pods}
    return replace(desk.operator, connect=lambda pod, _settings: by_name[pod.name])
