"""How a model begins, and its plain MLP, against values computed by hand."""

import pytest
import torch

from nsa_core.model.compression import LinearCompression
from nsa_core.model.layers import MLP
from nsa_core.model.transformer import LanguageModel
from tests.core.model.cases import small_config


def test_what_writes_into_the_residual_stream_starts_smaller_by_the_root_of_its_writers() -> None:
    config = small_config(dim=64, mlp_width=128, num_layers=8, head_dim_v=16)
    block = LanguageModel(config).block_list[3]
    for writer in (block.attention.out, block.mlp.down):
        assert writer.weight.std().item() == pytest.approx(0.005, rel=0.05)
    assert block.mlp.up.weight.std().item() == pytest.approx(0.02, rel=0.05)


def test_linear_compression_starts_at_the_mean_of_its_block() -> None:
    phi = LinearCompression(num_groups=2, block=4, width=6)
    block_RLGD = torch.randn(3, 4, 2, 6, generator=torch.Generator().manual_seed(0))
    phi.reset(0.0, torch.Generator())
    torch.testing.assert_close(phi(block_RLGD), block_RLGD.mean(dim=1))


@pytest.mark.parametrize(("inner", "activated"), [(1.0, 0.7310586), (-2.0, -0.2384058)])
def test_the_plain_mlp_has_silu_between_its_matrices(inner: float, activated: float) -> None:
    config = small_config(activation="silu")
    mlp = MLP(config)
    with torch.no_grad():
        mlp.up.weight.fill_(inner / config.dim)
        mlp.down.weight.fill_(1 / config.mlp_width)
    expected = torch.full((1, config.dim), activated)
    torch.testing.assert_close(mlp(torch.ones(1, config.dim)), expected)
