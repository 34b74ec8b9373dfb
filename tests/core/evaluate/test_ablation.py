"""What is cut is exactly gone, and everything is back afterwards."""

from typing import Never

import pytest
import torch

from nsa_core.evaluate.ablation import cut_branches, nsa_layers, only_forced_blocks
from nsa_core.evaluate.sampling import stream
from nsa_core.kernels.gathered_backend import GatheredBackend
from nsa_core.kernels.geometry import BlockGeometry
from nsa_core.kernels.packing import Packing
from tests.core.model.cases import SIZES, small_config, small_model, tokens

BRANCH = {"compressed": "_cmp", "selected": "_slc", "sliding": "_win"}


@pytest.mark.parametrize("branch", BRANCH)
def test_a_cut_branch_has_no_influence_and_the_others_keep_theirs(branch: str) -> None:
    model, row = small_model(), tokens(1, 23)
    names = ("k_cmp", "k_slc", "k_win", "v_cmp", "v_slc", "v_win")
    value = names.index(f"v{BRANCH[branch]}")
    with cut_branches(model, branch):
        before = model(row)
        _scale_values(model, value, 3.0)
        assert torch.equal(model(row), before)
        for other in BRANCH:
            if other != branch:
                _scale_values(model, names.index(f"v{BRANCH[other]}"), 3.0)
                assert not torch.allclose(model(row), before)
    assert not torch.allclose(model(row), before)


def _scale_values(model, part, factor: float) -> None:
    """Multiply one of the six projections of keys and values in every layer."""
    for layer in nsa_layers(model):
        groups, config = layer.config.num_kv_groups, layer.config
        widths = [groups * config.head_dim_k] * 3 + [groups * config.head_dim_v] * 3
        with torch.no_grad():
            layer.kv.weight.split(widths)[part].mul_(factor)


def test_all_is_back_afterwards_even_after_an_error() -> Never:
    model, row = small_model(), tokens(1, 23)
    before = model(row)
    with pytest.raises(RuntimeError), cut_branches(model, "selected"), only_forced_blocks(model):
        assert not torch.allclose(model(row), before)
        raise RuntimeError
    assert torch.equal(model(row), before)


def test_decode_is_cut_as_well() -> None:
    model = small_model()
    with cut_branches(model, "selected"):
        row = [1, 2, 3, 4, 5, 6, 7, 8, 9]
        wanted = list(row)
        for _ in range(6):
            wanted.append(int(model(torch.tensor([wanted]))[0, -1].argmax()))
        assert list(stream(model, row, max_new_tokens=6)) == wanted[9:]


def test_a_dense_model_has_nothing_to_cut() -> None:
    with (
        pytest.raises(ValueError, match="nothing to cut: 0 NSA layers"),
        cut_branches(small_model(small_config(attention="dense")), "selected"),
    ):
        pass


def test_only_the_forced_blocks_are_chosen() -> None:
    model = small_model()
    geometry = BlockGeometry.from_config(small_config().nsa)
    with only_forced_blocks(model):
        chooser = nsa_layers(model)[0].backends.compressed
        packing = Packing.from_lengths([3, 30])
        q, k, v = torch.zeros(33, 4, 6), torch.zeros(16, 2, 6), torch.zeros(16, 2, 5)
        _, lse = chooser.compressed(q, k, v, geometry, packing)
        ids = chooser.select(q, k, lse, geometry, packing)
    assert isinstance(nsa_layers(model)[0].backends.compressed, GatheredBackend)
    for row, position in enumerate([*range(3), *range(30)]):
        chosen = [block for block in ids[row, 0].tolist() if block >= 0]
        assert chosen == sorted(geometry.forced_blocks(position))
        assert torch.equal(ids[row, 0], ids[row, 1])
    assert SIZES["select_block"] == geometry.select_block


def test_forced_blocks_change_nothing_where_all_blocks_are_forced() -> None:
    model, row = small_model(), tokens(1, 12)
    before = model(row)
    with only_forced_blocks(model):
        assert torch.equal(model(row), before)
