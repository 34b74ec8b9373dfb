"""What two configurations do not share."""

from nsa_core.config.compare import differing_values, other_model
from nsa_core.config.run import RunConfig


def test_a_difference_names_the_key_and_both_values() -> None:
    changed = RunConfig.model_validate({"optimizer": {"learning_rate": 0.5}})
    (found,) = differing_values(RunConfig(), changed)
    assert str(found) == "optimizer.learning_rate 0.0006 -> 0.5"
    assert differing_values(changed, changed) == []


def test_only_a_value_of_the_model_makes_it_another_one() -> None:
    before = RunConfig()
    longer = RunConfig.model_validate({"schedule": {"steps": 7}})
    deeper = RunConfig.model_validate({"schedule": {"steps": 7}, "model": {"num_layers": 3}})
    assert other_model(before, longer) is None
    found = other_model(before, deeper)
    assert found is not None
    assert (found.key, found.now) == ("model.num_layers", 3)
