"""An operator whose pod is a fake."""

from dataclasses import dataclass, field
from pathlib import Path

from nsa_ops.context import Operator, ShowWork, show_nothing
from nsa_ops.settings import read_settings
from nsa_ops.store import PodRecord, Store
from tests.ops.fakes import FakeClock, FakeTransport

POD = PodRecord(
    name="a100-1",
    pod_id="pod-1",
    kind="local",
    root="/pod",
    python="/usr/bin/python3",
    profile="cpu",
    added_unix_s=0.0,
)


@dataclass
class Desk:
    """An operator, what is behind it, and what it said."""

    store: Store
    transport: FakeTransport = field(default_factory=FakeTransport)
    clock: FakeClock = field(default_factory=FakeClock)
    story: list[str] = field(default_factory=list)
    show_work: ShowWork = show_nothing

    @property
    def operator(self) -> Operator:
        return Operator(
            settings=read_settings({"HOME": "/nowhere"}, folder=Path("/")),
            store=self.store,
            clock=self.clock,
            tell=self.story.append,
            connect=lambda _pod, _settings: self.transport,
            show_work=self.show_work,
        )
