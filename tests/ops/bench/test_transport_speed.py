from dataclasses import replace

import pytest

from nsa_ops.bench.transport_speed import bench_transport
from nsa_ops.errors import LocalResourceError
from tests.ops.fakes import completed
from tests.ops.operators import POD, Desk

SSH_POD = replace(POD, name="gpu", pod_id="pod-2", kind="ssh", address="u@192.0.2.9:22")
DF = "Filesystem 1024-blocks Used Available Capacity Mounted on\n/dev/a 9 9 1048576 9% /pod\n"


def test_a_file_that_would_fill_the_disk_of_a_pod_is_not_made(desk: Desk) -> None:
    desk.store.add_pod(SSH_POD)
    desk.transport.answers["df -Pk"] = completed(DF)
    with pytest.raises(LocalResourceError, match=r"`/pod` on .* has 1 GiB free, and the bench"):
        bench_transport(desk.operator, "gpu", mib=1000)
    assert not any("urandom" in " ".join(words) for words in desk.transport.asked)


def test_a_file_that_would_fill_the_disk_of_this_machine_is_not_made(desk: Desk) -> None:
    desk.store.add_pod(SSH_POD)
    desk.transport.answers["df -Pk"] = completed(DF.replace("1048576", "9" * 18))
    with pytest.raises(LocalResourceError, match="free, and the bench needs"):
        bench_transport(desk.operator, "gpu", mib=10**9)
    assert not any("urandom" in " ".join(words) for words in desk.transport.asked)
