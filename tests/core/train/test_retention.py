from nsa_core.config.training import CheckpointConfig
from nsa_core.train.retention import apply_retention, find_known_good, plan_removal


def test_the_newest_are_kept():
    config = CheckpointConfig(keep_last=2)
    assert plan_removal([10, 40, 20, 30], config, None) == [20, 10]


def test_every_mth_is_kept_for_good():
    config = CheckpointConfig(keep_last=1, keep_every=100)
    assert plan_removal([100, 150, 200, 250, 300], config, None) == [250, 150]


def test_the_last_known_good_is_kept():
    assert plan_removal([10, 20, 30], CheckpointConfig(keep_last=1), 10) == [20]


def test_fifty_clean_steps_make_a_checkpoint_known_good():
    assert find_known_good([100, 120], 149, None) is None
    assert find_known_good([100, 120], 150, None) == 100
    assert find_known_good([100, 120], 170, None) == 120


def test_an_anomaly_after_a_checkpoint_keeps_it_from_being_known_good():
    assert find_known_good([100, 120], 200, 110) == 120
    assert find_known_good([100], 200, 110) is None


def test_an_abandoned_future_goes_once_a_known_good_checkpoint_has_passed_it(run):
    for name in ("aside_attempt2_step_000040", "aside_attempt2_step_000040_again",
                 "aside_attempt2_step_000060", "aside_of_mine"):  # fmt: skip
        (run.checkpoints / name).mkdir(parents=True)
    apply_retention(run, CheckpointConfig(keep_last=1), 30)
    assert len(list(run.checkpoints.iterdir())) == 4
    apply_retention(run, CheckpointConfig(keep_last=1), 50)
    left = sorted(folder.name for folder in run.checkpoints.iterdir())
    assert left == ["aside_attempt2_step_000060", "aside_of_mine"]
