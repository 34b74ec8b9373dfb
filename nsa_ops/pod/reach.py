"""Who reaches whom: an agent that lists a pod's addresses, listens for other pods, or calls them.

It is sent as text and needs the standard library alone, so that pods can be asked before anything
of ours is on them. A caller and a listener prove to each other with HMAC that they know the token
of this probe, which never crosses the network: a stranger's connection counts for nothing.
"""

import array
import contextlib
import fcntl
import hashlib
import hmac
import importlib.metadata
import json
import os
import secrets
import select
import socket
import struct
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

_GET_INTERFACES = 0x8912  # SIOCGIFCONF: each interface with an IPv4 address, 40 bytes on 64 bits
_RECORD_BYTES, _MAX_INTERFACES = 40, 256
_SCOPE_GLOBAL = 0x00
_NONCE_BYTES = 16
#: Source, then how many bytes follow the greeting.
_HEAD = struct.Struct("!BI")
#: Instead of a number of bytes: the caller has done with this listener.
_GOODBYE = 0xFFFF_FFFF
MAX_BYTES = 64 * 2**20
_PIECE_BYTES = 2**18
_MAX_CALLS_AT_ONCE = 64
_LOOK_S = 0.2
_MICRO = 1e6


class Address(NamedTuple):
    """One address of this machine and the interface that has it."""

    interface: str
    address: str


def ipv4_addresses() -> list[Address]:
    """IPv4 addresses of the interfaces that are up, in the kernel's order."""
    size = _RECORD_BYTES * _MAX_INTERFACES
    answer = array.array("B", bytes(size))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        request = struct.pack("iL", size, answer.buffer_info()[0])
        used = struct.unpack("iL", fcntl.ioctl(asked.fileno(), _GET_INTERFACES, request))[0]
    found = []
    for at in range(0, used, _RECORD_BYTES):
        record = answer[at : at + _RECORD_BYTES].tobytes()
        label = record[:16].split(b"\0")[0].decode(errors="replace")
        found.append(Address(label.split(":")[0], socket.inet_ntoa(record[20:24])))
    return found


def parse_ipv6(table: str) -> list[Address]:
    """Addresses of /proc/net/if_inet6 that other machines can use."""
    found = []
    for line in table.splitlines():
        digits, _, _, scope, _, interface = line.split()
        if int(scope, 16) == _SCOPE_GLOBAL:
            found.append(
                Address(interface, socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits)))
            )
    return found


def _ipv6_addresses() -> list[Address]:
    try:
        return parse_ipv6(Path("/proc/net/if_inet6").read_text(encoding="utf-8"))
    except FileNotFoundError:  # a kernel without IPv6
        return []


def describe() -> dict[str, Any]:
    """What other pods have to know of this one: addresses, torch, and which machine it is."""
    try:
        torch = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        torch = ""
    port_range = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text(encoding="utf-8").split()
    return {
        "addresses": [one._asdict() for one in (*ipv4_addresses(), *_ipv6_addresses())],
        "torch": torch,
        "boot_id": Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip(),
        "network_id": Path("/proc/self/ns/net").stat().st_ino,
        "first_port": int(port_range[0]),
        "last_port": int(port_range[1]),
    }


def _sign(token: bytes, words: bytes) -> bytes:
    return hmac.new(token, words, hashlib.sha256).digest()


def _receive(link: socket.socket, size: int) -> bytes:
    content = b""
    while len(content) < size:
        piece = link.recv(size - len(content))
        if not piece:
            message = "it closed the connection"
            raise ConnectionError(message)
        content += piece
    return content


class Listener:
    """Answers callers that know the token, on one chosen port and on one that the kernel picks."""

    def __init__(self, asked: dict[str, Any]) -> None:
        """Open the ports; a chosen one that cannot be opened is a `problem`, and no error."""
        self._token = bytes.fromhex(asked["token"])
        self._me = int(asked["me"])
        self._timeout_s = float(asked["timeout_s"])
        self._awaited = set(asked["callers"])
        self._calls: list[threading.Thread] = []
        free = open_port(0)
        #: Picked by the kernel, as it picks those of collectives.
        self.free_port = int(free.getsockname()[1])
        self.problem = ""
        self._ports = [free]
        try:
            self._ports.append(open_port(int(asked["port"])))
        except OSError as error:
            self.problem = os.strerror(error.errno or 0)

    def serve(self, seconds: float) -> None:
        """Answer until every caller has said goodbye or the time is over."""
        end = time.monotonic() + seconds
        while self._awaited and time.monotonic() < end:
            ready, _, _ = select.select(self._ports, [], [], _LOOK_S)
            self._calls = [one for one in self._calls if one.is_alive()]
            for port in ready:
                link, _ = port.accept()
                self._begin(link)
        for port in self._ports:
            port.close()

    def _begin(self, link: socket.socket) -> None:
        if len(self._calls) >= _MAX_CALLS_AT_ONCE:
            link.close()
            return
        call = threading.Thread(target=self._answer, args=(link,), daemon=True)
        call.start()
        self._calls.append(call)

    def _answer(self, link: socket.socket) -> None:
        with link, contextlib.suppress(OSError):  # it hung up, or was silent: nothing was proven
            link.settimeout(self._timeout_s)
            self._converse(link)

    def _converse(self, link: socket.socket) -> None:
        nonce = secrets.token_bytes(_NONCE_BYTES)
        link.sendall(nonce)
        greeting = _receive(link, _NONCE_BYTES + _HEAD.size)
        head = greeting[_NONCE_BYTES:]
        proof = _receive(link, hashlib.sha256().digest_size)
        if not hmac.compare_digest(proof, _sign(self._token, b"call" + nonce + head)):
            return
        source, num_bytes = _HEAD.unpack(head)
        answer = b"answer" + greeting[:_NONCE_BYTES] + bytes([self._me])
        link.sendall(_sign(self._token, answer))
        if num_bytes == _GOODBYE:
            self._awaited.discard(source)
            return
        left = min(num_bytes, MAX_BYTES)
        while left:
            left -= len(_receive(link, min(left, _PIECE_BYTES)))
        link.sendall(b"\0")


def open_port(port: int) -> socket.socket:
    """Listen on a port of every address, of both families where the kernel has both."""
    try:
        return socket.create_server(
            ("::", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=_MAX_CALLS_AT_ONCE
        )
    except (OSError, ValueError) as error:
        if isinstance(error, OSError) and error.errno not in _NO_IPV6:
            raise
    return socket.create_server(("", port), backlog=_MAX_CALLS_AT_ONCE)


#: EAFNOSUPPORT, EADDRNOTAVAIL: a machine without IPv6.
_NO_IPV6 = {97, 99}


class Caller:
    """Calls listeners on all addresses that they may have."""

    def __init__(self, asked: dict[str, Any]) -> None:
        self._token = bytes.fromhex(asked["token"])
        self._me = int(asked["me"])
        self._timeout_s = float(asked["timeout_s"])
        self._num_bytes = int(asked["num_bytes"])
        self._asked = asked

    def call_all(self) -> list[dict[str, Any]]:
        """Every address of every listener: whether both its ports answer, and how fast it is."""
        pairs = list(self._pairs())
        with ThreadPoolExecutor(max(1, min(len(pairs), _MAX_CALLS_AT_ONCE))) as pool:
            found = list(pool.map(lambda pair: self._try_address(*pair), pairs))
        for one, (listener, address) in zip(found, pairs, strict=True):
            ports = self._open_ports(one, listener)
            if ports:
                self._measure(one, listener["number"], address, ports[0])
        for listener in self._asked["listeners"]:
            self._say_goodbye(listener, found)
        return found

    def _pairs(self) -> Iterator[tuple[dict[str, Any], str]]:
        for listener in self._asked["listeners"]:
            for address in listener["addresses"]:
                yield listener, address

    def _try_address(self, listener: dict[str, Any], address: str) -> dict[str, Any]:
        number = listener["number"]
        found: dict[str, Any] = {"target": number, "address": address, "from_address": ""}
        for name in ("port", "free_port"):
            try:
                found["from_address"] = self._call(number, address, listener[name], 0)[0]
                found[f"{name}_problem"] = ""
            except OSError as error:
                found[f"{name}_problem"] = (error.strerror or str(error) or "no answer")[:200]
        return found

    @staticmethod
    def _open_ports(found: dict[str, Any], listener: dict[str, Any]) -> list[int]:
        return [listener[name] for name in ("port", "free_port") if not found[f"{name}_problem"]]

    def _measure(self, found: dict[str, Any], number: int, address: str, port: int) -> None:
        try:
            _, seconds = self._call(number, address, port, self._num_bytes)
        except OSError as error:
            why = f"it broke off under load: {error.strerror or error}"[:200]
            found["port_problem"] = found["free_port_problem"] = why
            return
        found["mb_per_s"] = self._num_bytes / _MICRO / max(seconds, 1 / _MICRO)

    def _say_goodbye(self, listener: dict[str, Any], found: Sequence[dict[str, Any]]) -> None:
        for one in found:
            ports = self._open_ports(one, listener)
            if one["target"] == listener["number"] and ports:
                with contextlib.suppress(OSError):  # then it ends when its time is over
                    self._call(listener["number"], one["address"], ports[0], _GOODBYE)
                return

    def _call(self, number: int, address: str, port: int, num_bytes: int) -> tuple[str, float]:
        """One connection: the own address that it left from, and seconds until all had arrived."""
        with socket.create_connection((address, port), self._timeout_s) as link:
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            theirs, mine = _receive(link, _NONCE_BYTES), secrets.token_bytes(_NONCE_BYTES)
            head = _HEAD.pack(self._me, num_bytes)
            link.sendall(mine + head + _sign(self._token, b"call" + theirs + head))
            proof = _receive(link, hashlib.sha256().digest_size)
            if not hmac.compare_digest(
                proof, _sign(self._token, b"answer" + mine + bytes([number]))
            ):
                message = "another machine or program answers there"
                raise ConnectionError(message)
            local = str(link.getsockname()[0])
            return local, _send(link, 0 if num_bytes == _GOODBYE else num_bytes)


def _send(link: socket.socket, num_bytes: int) -> float:
    """Seconds from the first byte to the receipt of the last; 0 for none."""
    if not num_bytes:
        return 0.0
    piece, began_s = bytes(_PIECE_BYTES), time.monotonic()
    left = num_bytes
    while left:
        left -= link.send(piece[:left])
    _receive(link, 1)
    return time.monotonic() - began_s


def main(asked: dict[str, Any]) -> None:
    """Do what is asked; each line of stdout is one JSON document."""
    if asked["do"] == "describe":
        _say(describe())
    elif asked["do"] == "call":
        _say({"found": Caller(asked).call_all()})
    else:
        listener = Listener(asked)
        _say({"free_port": listener.free_port, "port_problem": listener.problem})
        listener.serve(float(asked["seconds"]))


def _say(document: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(document) + "\n")
    sys.stdout.flush()
