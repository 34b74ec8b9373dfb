"""events.jsonl of a run with very many of them is looked through, and not parsed line by line."""

from pathlib import Path

import pytest

from nsa_core.rundir import events, jsonl
from nsa_core.rundir.layout import RunDir


def test_only_lines_that_may_be_of_the_kind_are_parsed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunDir(tmp_path)
    for step in range(40):
        events.record(run, kind="saved", by="trainer", attempt=1, message=f"step {step}")
        if step % 20 == 0:
            events.record(run, kind="signal", by="runner", attempt=1, message=f"at {step}")
    events.record(run, kind="note", by="trainer", attempt=1, facts={"word": "signal"})
    with run.events.open("a") as file:
        file.write('{"ts": 1.0, "iso": "", "attempt": 1, "kind": "signal", "by": "tor')
    parsed = []
    parse = jsonl.parse_model
    monkeypatch.setattr(jsonl, "parse_model", lambda *given: parsed.append(given) or parse(*given))
    found = events.find_events(run, "signal", "halt_asked")
    assert [event.message for event in found] == ["at 0", "at 20"]
    assert len(parsed) == 3
    assert events.find_events(RunDir(tmp_path / "none"), "signal") == []
