import os
import subprocess
import sys

import pytest

from nsa_core.rundir import process

pytestmark = pytest.mark.integration


@pytest.fixture
def sleeper():
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    yield child
    child.kill()
    child.wait()


def test_a_process_is_alive_until_it_ends_and_a_zombie_is_not(sleeper):
    identity = process.identify(sleeper.pid)
    assert identity is not None
    assert process.is_alive(identity)
    os.kill(sleeper.pid, 9)
    os.waitid(os.P_PID, sleeper.pid, os.WEXITED | os.WNOWAIT)
    assert not process.is_alive(identity)


def test_a_recycled_pid_or_another_boot_is_not_the_process(sleeper):
    identity = process.identify(sleeper.pid)
    assert identity is not None
    other_start = identity.model_copy(update={"start_ticks": identity.start_ticks - 1})
    other_boot = identity.model_copy(update={"boot_id": "0" * 36})
    assert not process.is_alive(other_start)
    assert not process.is_alive(other_boot)


def test_a_command_name_with_brackets_does_not_confuse_the_reader(tmp_path):
    script = tmp_path / "a ) b ( c"
    script.symlink_to(sys.executable)
    child = subprocess.Popen([script, "-c", "import time; time.sleep(60)"])
    try:
        identity = process.identify(child.pid)
        assert identity is not None
        assert 0 <= process.age_s(identity) < 60
    finally:
        child.kill()
        child.wait()
