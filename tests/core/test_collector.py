"""Loading with the collector left out: what was loaded is out of its reach, and it runs again."""

import gc

import pytest

from nsa_core.collector import collect_nothing


def test_what_was_loaded_is_not_walked_again_and_the_collector_runs_on() -> None:
    before = gc.get_freeze_count()
    with collect_nothing():
        assert not gc.isenabled()
        loaded = [[]]
    assert gc.isenabled()
    assert gc.get_freeze_count() > before
    assert not any(one is loaded for one in gc.get_objects())


def test_a_failure_to_load_leaves_the_collector_running() -> None:
    with pytest.raises(ImportError), collect_nothing():
        raise ImportError
    assert gc.isenabled()


def test_an_inner_block_leaves_the_outer_one_its_end() -> None:
    with collect_nothing():
        with collect_nothing():
            pass
        assert not gc.isenabled()
    assert gc.isenabled()
