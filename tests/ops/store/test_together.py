"""The registry under several commands at once: no call fails, and nothing of it is lost."""

import subprocess
import sys
from pathlib import Path

import pytest

from nsa_ops.remote.audit import AuditLog
from nsa_ops.remote.snapshot import code_root
from nsa_ops.store import REGISTRY_NAME, Store
from nsa_ops.store.audit_head import AuditHead

PROCESSES, CALLS = 8, 30
#: What each command does with its state folder, again and again: open, record, log, close.
COMMAND = """
import sys
from pathlib import Path
from nsa_ops.remote.audit import AuditLog
from nsa_ops.store import Store
from nsa_ops.store.audit_head import AuditHead

registry = Path(sys.argv[1])
log = AuditLog(registry.parent / "audit.jsonl", AuditHead(registry))
for number in range(int(sys.argv[3])):
    store = Store(registry)
    with store.intent("test", f"{sys.argv[2]}-{number}"):
        log.append({"call": "begin"})
        store.pods()
        log.append({"call": "end"})
    store.close()
"""


@pytest.mark.integration
def test_commands_at_once_share_the_registry_and_the_head_of_the_log(tmp_path: Path) -> None:
    registry = tmp_path / REGISTRY_NAME
    commands = [
        subprocess.Popen(
            [sys.executable, "-c", COMMAND, str(registry), str(number), str(CALLS)],
            cwd=code_root(), stderr=subprocess.PIPE,
        )
        for number in range(PROCESSES)
    ]  # fmt: skip
    said = [command.communicate(timeout=300)[1].decode() for command in commands]
    assert [command.returncode for command in commands] == [0] * PROCESSES, said
    head = AuditHead(registry).read()
    assert head is not None
    assert head.lines == 2 * PROCESSES * CALLS
    assert AuditLog(tmp_path / "audit.jsonl").path.read_bytes().count(b"\n") == head.lines
    store = Store(registry)
    assert store.open_intents() == []
    store.close()
