"""The agent that probes the network between pods, with real sockets on loopback."""

import hmac
import json
import socket
import struct
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

from nsa_ops.context import Operator
from nsa_ops.errors import VerificationError
from nsa_ops.fleet.reachability import LISTEN_S, probe_meeting
from nsa_ops.pod import reach
from nsa_ops.pod.reach import Caller, Listener, ipv4_addresses, parse_ipv6
from nsa_ops.remote.local import LocalTransport
from tests.integration.ssh_server import free_port
from tests.ops.fakes import FakeTransport, completed
from tests.ops.operators import POD, Desk

TOKEN = "5a" * 32


@contextmanager
def listening(**changes: Any) -> Iterator[Listener]:
    asked = {"token": TOKEN, "me": 1, "port": 0, "timeout_s": 2.0, "callers": [0]}
    listener = Listener(asked | changes)
    served = threading.Thread(target=listener.serve, args=(5.0,))
    served.start()
    yield listener
    served.join(10)
    assert not served.is_alive()


def call(listener: Listener, **changes: Any) -> list[dict[str, Any]]:
    target = {"number": 1, "addresses": ["127.0.0.1"], "port": listener.free_port,
              "free_port": listener.free_port} | changes.pop("target", {})  # fmt: skip
    asked = {"token": TOKEN, "me": 0, "timeout_s": 2.0, "num_bytes": 2**20, "listeners": [target]}
    return Caller(asked | changes).call_all()


def test_a_caller_with_the_token_is_answered_and_its_bytes_are_timed() -> None:
    with listening() as listener:
        (found,) = call(listener)
    assert (found["port_problem"], found["free_port_problem"]) == ("", "")
    assert found["from_address"] == "127.0.0.1"
    assert found["mb_per_s"] > 1


def test_a_caller_without_the_token_counts_for_nothing() -> None:
    with listening() as listener:
        (stranger,) = call(listener, token="00" * 32)
        with socket.create_connection(("127.0.0.1", listener.free_port)) as link:
            link.sendall(b"GET / HTTP/1.1\r\n\r\n" + bytes(64))
            assert len(link.recv(4096)) == 16  # its nonce, and no more
        call(listener)
    assert stranger["port_problem"] == "it closed the connection"
    assert "mb_per_s" not in stranger


def test_a_caller_that_announces_too_much_is_answered_after_what_a_listener_takes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(reach, "MAX_BYTES", 1024)
    with listening() as listener:
        with socket.create_connection(("127.0.0.1", listener.free_port), 5) as link:
            nonce, head = link.recv(16), struct.pack("!BI", 0, 2**31)
            token = bytes.fromhex(TOKEN)
            proof = hmac.digest(token, b"call" + nonce + head, "sha256")
            link.sendall(bytes(16) + head + proof + bytes(1024))
            answer = hmac.digest(token, b"answer" + bytes(16) + b"\1", "sha256")
            with link.makefile("rb") as said:
                assert said.read(33) == answer + b"\0"
        call(listener)


def test_another_listener_at_the_address_is_not_taken_for_the_pod() -> None:
    with listening() as listener:
        (found,) = call(listener, target={"number": 2})
        call(listener)
    assert found["port_problem"] == "another machine or program answers there"


def test_a_port_in_use_is_a_problem_of_that_port_alone() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        listening(port=taken.getsockname()[1]) as listener,
    ):
        assert listener.problem == "Address already in use"
        (found,) = call(listener, target={"port": free_port()})
    assert found["port_problem"] == "Connection refused"
    assert found["free_port_problem"] == ""


def test_a_listener_ends_by_itself() -> None:
    listener = Listener({"token": TOKEN, "me": 0, "port": 0, "timeout_s": 1.0, "callers": [1]})
    listener.serve(0.05)
    with pytest.raises(OSError, match="Connection refused"):
        socket.create_connection(("127.0.0.1", listener.free_port))


def test_addresses_are_read_with_their_interfaces() -> None:
    assert ("lo", "127.0.0.1") in ipv4_addresses()
    table = (
        "fe80000000000000021422fffe123456 02 40 20 80     eth0\n"
        "20010db8000000000000000000000007 02 40 00 80     eth0\n"
        "00000000000000000000000000000001 01 80 10 80       lo\n"
    )
    assert parse_ipv6(table) == [("eth0", "2001:db8::7")]


def test_two_pods_of_one_machine_meet_there(desk: Desk) -> None:
    operator = replace(desk.operator, connect=lambda _pod, _settings: LocalTransport({}))
    names = ["a", "b"]
    pods = [replace(POD, name=name, python=sys.executable) for name in names]
    port = free_port()
    began_s = time.monotonic()
    meeting = probe_meeting(operator, [operator.link(pod) for pod in pods], port)
    assert time.monotonic() - began_s < LISTEN_S  # all said goodbye
    assert sorted(meeting.order) == [0, 1]  # one of them had the port
    assert [node.rank for node in meeting.nodes] == [0, 1]
    assert {(node.address, node.port) for node in meeting.nodes} == {(meeting.addresses[0], port)}
    assert {(path.source, path.target) for path in meeting.paths} == {("a", "b"), ("b", "a")}
    assert min(path.mb_per_s for path in meeting.paths) > 1


@pytest.mark.parametrize(
    "answer",
    [
        "not JSON",
        json.dumps({"addresses": [{"interface": "eth0; reboot", "address": "10.0.0.1"}]}),
        json.dumps({"addresses": [{"interface": "eth0", "address": "evil.example"}]}),
    ],
)
def test_what_a_pod_says_of_its_network_is_checked(desk: Desk, answer: str) -> None:
    transport = FakeTransport({"-I": completed(answer)})
    operator: Operator = replace(desk.operator, connect=lambda _pod, _settings: transport)
    links = [operator.link(replace(POD, name=name)) for name in ("a", "b")]
    with pytest.raises(VerificationError, match="gave no answer about its network"):
        probe_meeting(operator, links, 29_500)
    assert b"reach" in transport.inputs[0]  # the agent goes by stdin
