"""The schedule's scale is applied to the peak of each group, whatever was set before."""

import pytest
import torch

from nsa_core.config.training import OptimizerConfig
from nsa_core.train.optimizer import OptimizerSet
from tests.core.train.models import make_model


def test_every_group_of_every_optimizer_has_its_own_peak_times_the_last_scale():
    config = OptimizerConfig(kind="muon", learning_rate=0.1, muon_learning_rate=0.4)
    made = OptimizerSet(make_model().parameter_infos(), config, torch.device("cpu"))
    for scale in (0.5, 0.25):
        assert made.set_scale(scale) == pytest.approx(0.1 * scale)
        rates = [[group["lr"] for group in one.param_groups] for one in made.torch_optimizers]
        assert [len(groups) for groups in rates] == [2, 1]
        assert rates[0] == pytest.approx([0.1 * scale] * 2)
        assert rates[1] == pytest.approx([0.4 * scale])
