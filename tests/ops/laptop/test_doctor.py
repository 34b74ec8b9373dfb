"""Each fault is planted on a real state folder, and named with its fix."""

import json
import os
import socket
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from nsa_core.rundir.report import CheckResult
from nsa_ops.laptop.laptop_checks import judge_laptop
from nsa_ops.laptop.laptop_facts import LaptopFacts, read_laptop
from nsa_ops.remote.audit import AuditLog
from nsa_ops.settings import Settings, read_settings
from nsa_ops.store import PodRecord, Store
from nsa_ops.store.audit_head import AuditHead
from tests.ops.cli_case import CommandLine
from tests.ops.remote.control_masters import MASTER, listener

GPU = PodRecord(
    "gpu", "pod-7", "ssh", "/pod", "python3", "a100", 1.0, address="root@192.0.2.7:2222"
)  # fmt: skip
KEY = "AAAAC3NzaC1lZDI1NTE5AAAAIOMqqnkVzrm0SdG6UOoqKLsabgH5C9okWi0dh2l9GKJl"


@pytest.fixture
def settings(tmp_path: Path, short_path: Path) -> Iterator[Settings]:
    """A laptop with a pod, an audit log of three lines, and a short folder for sockets."""
    environment = {"HOME": str(tmp_path), "PATH": os.environ["PATH"], "TMPDIR": str(tmp_path)}
    found = read_settings(
        environment | {"NSA_OPS_STATE_DIR": str(tmp_path / "state")}, folder=tmp_path
    )
    store = Store(found.state_dir / "registry.sqlite")
    store.add_pod(GPU)
    store.close()
    log = AuditLog(found.state_dir / "audit.jsonl")
    for number in range(3):
        log.append({"call": "run", "number": number})
    pin(found, GPU.pod_id)
    yield replace(found, socket_dirs=(short_path / "s",))


def pin(settings: Settings, pod_id: str) -> None:
    folder = settings.state_dir / "known_hosts"
    folder.mkdir(mode=0o700, exist_ok=True)
    (folder / pod_id).write_text(f"nsa-{pod_id} ssh-ed25519 {KEY}\n")


def checks(settings: Settings) -> dict[str, CheckResult]:
    return {check.name: check for check in judge_laptop(read_laptop(settings))}


def test_a_healthy_laptop_is_fit(settings: Settings) -> None:
    found = checks(settings)
    assert {name for name, check in found.items() if check.status == "fail"} == set()
    assert found["state.registry"].message == "undamaged, with 1 pod"
    assert found["state.audit"].message == "3 lines, none changed or lost"
    assert found["pods.host_keys"].status == "pass"


def damage_registry(settings: Settings) -> None:
    path = settings.state_dir / "registry.sqlite"
    content = bytearray(path.read_bytes())
    content[4096:] = b"\xff" * (len(content) - 4096)
    path.write_bytes(content)


def update_registry(settings: Settings) -> None:
    """What a later version of nsa-ops would leave."""
    with closing(sqlite3.connect(settings.state_dir / "registry.sqlite")) as registry:
        registry.execute("PRAGMA user_version=99")


def empty_registry(settings: Settings) -> None:
    (settings.state_dir / "registry.sqlite").write_bytes(b"not a database, but as long as one" * 9)


def edit_audit(settings: Settings) -> None:
    path = settings.state_dir / "audit.jsonl"
    path.write_text(path.read_text().replace('"number": 1', '"number": 7'))


def cut_audit(settings: Settings) -> None:
    head = AuditHead(settings.state_dir / "registry.sqlite")
    log = AuditLog(settings.state_dir / "audit.jsonl", head)
    log.append({"number": 4})
    log.path.write_bytes(b"".join(log.path.read_bytes().splitlines(keepends=True)[:2]))


def open_state(settings: Settings) -> None:
    (settings.state_dir / "audit.jsonl").chmod(0o640)


def tear_audit(settings: Settings) -> None:
    path = settings.state_dir / "audit.jsonl"
    path.write_bytes(path.read_bytes()[:-10])


def leave_socket(settings: Settings) -> None:
    folder = settings.socket_dirs[0]
    folder.mkdir(mode=0o700)
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(folder / "0123456789abcdef"))


def open_folder(settings: Settings) -> None:
    settings.socket_dirs[0].mkdir()
    settings.socket_dirs[0].chmod(0o755)


def lose_pin(settings: Settings) -> None:
    (settings.state_dir / "known_hosts" / GPU.pod_id).unlink()


def cut_an_act(settings: Settings) -> None:
    store = Store(settings.state_dir / "registry.sqlite")
    store._execute(
        "INSERT INTO intents (at, act, subject, detail) VALUES (1.0, 'launch', 'r1', '{}')"
    )
    store.close()


def set_clock_back(settings: Settings) -> None:
    store = Store(settings.state_dir / "registry.sqlite")
    store._execute("INSERT INTO intents VALUES (9, 9e9, 'halt', 'r1', '{}', 9e9, 'done')")
    store.close()


@pytest.mark.parametrize(
    ("plant", "name", "status", "said", "fix"),
    [
        (damage_registry, "state.registry", "fail", "damaged", ".recover"),
        (update_registry, "state.registry", "fail", "a newer nsa-ops (schema 99", "Update nsa-ops"),
        (empty_registry, "state.registry", "fail", "file is not a database", ".recover"),
        (edit_audit, "state.audit", "fail", "breaks at line 2 of 3", "nsa-ops audit"),
        (cut_audit, "state.audit", "fail", "its end: 4 lines written, and 2 there", "copy of"),
        (open_state, "state.private", "warn", "other users have access to", "next command"),
        (tear_audit, "state.audit", "fail", "breaks at line 3 of 3", "audit.jsonl"),
        (leave_socket, "links.stale", "warn", "1 socket whose ssh is gone", "rm "),
        (open_folder, "links.folder", "fail", "other users may enter", "chmod 700"),
        (lose_pin, "pods.gpu", "fail", "no pinned host key", "nsa-ops pod trust gpu"),
        (cut_an_act, "state.intents", "warn", "launch r1", "nsa-ops reconcile"),
        (set_clock_back, "clock.order", "warn", "in the future", "time server"),
    ],
)
def test_a_fault_is_named_with_its_fix(
    settings: Settings,
    plant: Callable[[Settings], None],
    name: str,
    status: str,
    said: str,
    fix: str,
) -> None:
    plant(settings)
    found = checks(settings)[name]
    assert found.status == status
    assert said in found.message
    assert fix in found.hint


@pytest.mark.parametrize(
    ("says", "status", "message"),
    [
        (MASTER, "pass", "1 open connection, no dead socket"),
        (b"220 a mail server\r\n", "warn", "1 socket whose ssh is gone or does not answer"),
    ],
)
def test_a_link_is_open_where_its_master_answers(
    settings: Settings, says: bytes, status: str, message: str
) -> None:
    settings.socket_dirs[0].mkdir(mode=0o700)
    with listener(settings.socket_dirs[0] / "0123456789abcdef", says):
        found = checks(settings)["links.stale"]
    assert (found.status, found.message) == (status, message)


def test_a_folder_for_sockets_whose_name_is_too_long_is_named(settings: Settings) -> None:
    long = replace(settings, socket_dirs=(settings.socket_dirs[0] / ("x" * 90),))
    found = checks(long)["links.socket"]
    assert found.status == "fail"
    assert "a unix socket may have" in found.message


def test_a_key_of_a_forgotten_pod_is_named(settings: Settings) -> None:
    pin(settings, "pod-gone")
    assert checks(settings)["pods.unknown_keys"].hint.endswith("known_hosts/pod-gone`")


def test_an_address_that_ssh_cannot_use_is_named(settings: Settings, tmp_path: Path) -> None:
    config = tmp_path / "broken.conf"
    config.write_text("Host *\n  NoSuchOption yes\n")
    values = settings.values.model_copy(update={"ssh_config": str(config)})
    found = checks(replace(settings, values=values))["pods.gpu"]
    assert found.status == "fail"
    assert "nosuchoption" in found.message.lower()


def test_looking_changes_nothing(settings: Settings) -> None:
    def state() -> dict[Path, bytes]:
        files = settings.state_dir.rglob("*")
        return {
            path: path.read_bytes() for path in files if path.is_file() and "-" not in path.name
        }

    before = state()
    read_laptop(settings)
    assert state() == before


def test_a_new_laptop_has_nothing_yet_and_is_fit(tmp_path: Path) -> None:
    new = read_settings({"HOME": str(tmp_path), "PATH": os.environ["PATH"]}, folder=tmp_path)
    found = checks(replace(new, socket_dirs=(Path("/tmp/s"),)))
    assert found["state.registry"].status == found["state.audit"].status == "skipped"
    assert not new.state_dir.exists()


def judged(facts: LaptopFacts, name: str) -> CheckResult:
    return next(check for check in judge_laptop(facts) if check.name == name)


def test_only_what_every_operator_needs_makes_it_unfit(settings: Settings) -> None:
    facts = read_laptop(settings)
    bare = replace(facts, versions=dict.fromkeys(facts.versions, ""), python=(3, 10))
    assert judged(bare, "laptop.ssh").status == "fail"
    assert judged(bare, "laptop.rsync").status == "warn"
    assert judged(bare, "laptop.python").status == "fail"
    assert judged(replace(facts, is_synchronised=False), "clock.sync").status == "warn"
    assert judged(replace(facts, state_free_bytes=10), "state.folder").status == "warn"
    assert judged(replace(facts, state_problem="no right"), "state.folder").status == "fail"


def test_the_command_ends_with_3_where_the_laptop_is_not_fit(
    cli: CommandLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    well = cli("doctor", "--json")
    assert json.loads(well.out)["ok"] is (well.exit_code == 0)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config" / "nsa-ops").mkdir(parents=True)
    (tmp_path / "config" / "nsa-ops" / "config.toml").write_text("no_such_setting = 1\n")
    broken = cli("doctor")
    assert broken.exit_code == 3
    assert "Unknown setting `no_such_setting`" in broken.out
    assert "laptop.settings" in broken.err
    data = json.loads(cli("doctor", "--json").out)
    assert (data["ok"], data["data"]["verdict"]) == (False, "fail")
