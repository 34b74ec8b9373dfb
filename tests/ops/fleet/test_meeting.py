"""Which pod becomes node 0, and what is refused."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from pydantic import ValidationError

from nsa_ops.errors import ConfigurationError, RefusedError
from nsa_ops.fleet.meeting import CalledAddress, PodCalls, PodNetwork, choose_meeting

PORT = 29_500
#: For (source, target): why the chosen port and any other port cannot be used.
Problems = Mapping[tuple[int, int], tuple[str, str]]


def network(number: int, **changes: Any) -> PodNetwork:
    addresses = [
        {"interface": "lo", "address": "127.0.0.1"},
        {"interface": "eth1", "address": f"10.0.0.{number}"},
        {"interface": "eth0", "address": f"172.16.0.{number}"},
    ]
    facts = {"addresses": addresses, "torch": "2.9.0", "boot_id": f"boot-{number}",
             "first_port": 32_768, "last_port": 60_999}  # fmt: skip
    return PodNetwork.model_validate(facts | changes)


def pods(num: int, problems: Problems, slow: str = "") -> list[PodCalls]:
    """Pods on two networks; a path without a problem is whole, one that begins as `slow` slow."""
    found = []
    for i in range(num):
        called = []
        for j in range(num):
            for net in ("10.0.0.", "172.16.0."):
                port, free = problems.get((i, j), ("", ""))
                speed = 10.0 if slow and net.startswith(slow) else 100.0
                called += [
                    CalledAddress(
                        target=j, address=f"{net}{j}", from_address=f"{net}{i}", port_problem=port,
                        free_port_problem=free, mb_per_s=speed,
                    )
                ] * (i != j)  # fmt: skip
        found.append(PodCalls("abcdefgh"[i], network(i), called=tuple(called)))
    return found


def test_the_first_pod_is_node_0_at_its_first_address() -> None:
    meeting = choose_meeting(pods(3, {}), PORT)
    assert meeting.order == (0, 1, 2)
    assert [(n.rank, n.address, n.port, n.interface) for n in meeting.nodes] == [
        (0, "10.0.0.0", PORT, "eth1"), (1, "10.0.0.0", PORT, "eth1"), (2, "10.0.0.0", PORT, "eth1"),
    ]  # fmt: skip
    assert meeting.addresses == ("10.0.0.0", "10.0.0.1", "10.0.0.2")
    assert len(meeting.paths) == 6


def test_a_network_that_is_much_faster_is_taken() -> None:
    meeting = choose_meeting(pods(2, {}, slow="10."), PORT)
    assert (meeting.nodes[0].address, meeting.nodes[1].interface) == ("172.16.0.0", "eth0")
    assert meeting.slowest is not None
    assert meeting.slowest.mb_per_s == 100.0


def test_the_next_pod_that_all_reach_becomes_node_0() -> None:
    blocked = {(1, 0): ("timed out", ""), (2, 0): ("timed out", "")}
    meeting = choose_meeting(pods(3, blocked), PORT)
    assert meeting.order == (1, 0, 2)
    assert meeting.nodes[0].address == "10.0.0.1"


def test_node_0_stays_where_the_checkpoints_are() -> None:
    with pytest.raises(RefusedError, match="`b` cannot reach pod `a`"):
        choose_meeting(pods(2, {(1, 0): ("timed out", "")}), PORT, is_first_fixed=True)


def test_pods_that_nobody_reaches_are_refused_with_what_was_tried() -> None:
    blocked = {(1, 0): ("timed out", "timed out"), (0, 1): ("refused", "refused")}
    with pytest.raises(RefusedError) as caught:
        choose_meeting(pods(2, blocked), PORT)
    assert caught.value.message == (
        "Pod `b` cannot reach pod `a` on port 29500; tried 10.0.0.0 (timed out), 172.16.0.0 "
        "(timed out)"
    )
    assert "Open port 29500" in caught.value.hint


def test_a_pair_that_only_meets_on_the_chosen_port_is_refused() -> None:
    with pytest.raises(RefusedError) as caught:
        choose_meeting(pods(3, {(2, 1): ("", "timed out")}), PORT)
    assert caught.value.message == (
        "Pod `c` cannot reach pod `b` at 10.0.0.1 on a port that the kernel picks "
        "(32768 to 60999): timed out"
    )


def test_different_versions_of_torch_are_refused() -> None:
    one, other = pods(2, {})
    other = PodCalls("b", network(1, torch="2.8.0"), called=other.called)
    with pytest.raises(ConfigurationError, match=r"2\.9\.0 on pod `a`, 2\.8\.0 on pod `b`"):
        choose_meeting([one, other], PORT)


def test_an_address_that_no_interface_has_is_refused() -> None:
    one, other = pods(2, {})
    moved = tuple(call.model_copy(update={"from_address": "10.9.9.9"}) for call in other.called)
    with pytest.raises(RefusedError, match="which none of its interfaces has"):
        choose_meeting([one, PodCalls("b", other.network, called=moved)], PORT)


def test_a_port_that_is_taken_on_every_pod_is_named() -> None:
    taken = [
        PodCalls(one.pod, one.network, "Address already in use", one.called) for one in pods(2, {})
    ]
    with pytest.raises(RefusedError, match="Port 29500 of pod `a` cannot be opened") as caught:
        choose_meeting(taken, PORT)
    assert "`--port`" in caught.value.hint


def test_loopback_counts_only_where_all_pods_are_one_machine() -> None:
    apart, together = network(0), network(0, boot_id="boot", network_id=7)
    assert "127.0.0.1" not in apart.usable(with_loopback=False)
    assert together.usable(with_loopback=True)[-1] == "127.0.0.1"


def test_an_address_each_that_the_others_do_not_share_is_told() -> None:
    found = pods(3, {})
    missed = {(1, "10.0.0.0"), (2, "172.16.0.0")}
    found = [
        replace(one, called=tuple(
            call.model_copy(update={"port_problem": "timed out"})
            if (number, call.address) in missed else call
            for call in one.called
        ))
        for number, one in enumerate(found)
    ]  # fmt: skip
    with pytest.raises(RefusedError) as caught:
        choose_meeting(found, PORT, is_first_fixed=True)
    assert caught.value.message == (
        "Pod `a` has no address that all others reach on port 29500: `b` at 172.16.0.0; `c` at "
        "10.0.0.0"
    )


def test_one_pod_without_an_address_is_refused() -> None:
    with pytest.raises(RefusedError, match="Pod `a` has no address"):
        choose_meeting([PodCalls("a", network(0, addresses=[]))], PORT)


@pytest.mark.parametrize("address", ["fe80::1%eth0", "fe80::1%\x1b[31m\n--foo", "pod", "", "1"])
def test_what_is_no_address_for_another_pod_is_no_answer(address: str) -> None:
    with pytest.raises(ValidationError):
        network(0, addresses=[{"interface": "eth0", "address": address}])
