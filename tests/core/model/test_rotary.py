"""Rotary embedding: layout, relative positions, linear and YaRN scaling."""

import math

import pytest
import torch

from nsa_core.config.model import RopeConfig
from nsa_core.model.rotary import Rotary, amplitude, frequencies, rotate


def test_pairs_are_the_two_halves_of_one_head() -> None:
    rotary = Rotary(RopeConfig(), 4)
    x = torch.eye(2, 4).expand(1, 3, 2, 4).flatten(1, 2)
    turned = rotate(x, rotary.tables(torch.tensor([2])))
    first = [math.cos(2.0), 0.0, math.sin(2.0), 0.0]
    second = [0.0, math.cos(0.02), 0.0, math.sin(0.02)]
    torch.testing.assert_close(turned, torch.tensor([first, second] * 3).unsqueeze(0))


def test_position_zero_changes_nothing() -> None:
    x = torch.randn(1, 2, 8)
    assert torch.equal(rotate(x, Rotary(RopeConfig(), 8).tables(torch.tensor([0]))), x)


def test_no_row_is_no_error() -> None:
    x = torch.zeros(0, 2, 8)
    assert rotate(x, Rotary(RopeConfig(), 8).tables(torch.arange(0))).shape == x.shape


def test_products_depend_on_the_difference_of_positions() -> None:
    rotary = Rotary(RopeConfig(), 8)
    q, k = torch.randn(2, 1, 1, 8)

    def product(i: int, j: int):
        turned = [rotate(x, rotary.tables(torch.tensor([p]))) for x, p in ((q, i), (k, j))]
        return (turned[0] * turned[1]).sum()

    torch.testing.assert_close(product(9, 4), product(105, 100), rtol=1e-4, atol=1e-4)


def test_linear_scaling_divides_positions() -> None:
    plain = Rotary(RopeConfig(), 8)
    scaled = Rotary(RopeConfig(scaling="linear", scale=4.0), 8)
    for found, expected in zip(
        scaled.tables(torch.tensor([40])), plain.tables(torch.tensor([10])), strict=True
    ):
        torch.testing.assert_close(found, expected)


def test_yarn_keeps_short_wavelengths_and_stretches_long_ones() -> None:
    config = RopeConfig(scaling="yarn", scale=8.0, trained_context=2048)
    ratio = frequencies(config, 64) / frequencies(RopeConfig(), 64)
    turns = 2048 * frequencies(RopeConfig(), 64) / (2 * math.pi)
    torch.testing.assert_close(ratio[turns > 32], torch.ones(int((turns > 32).sum())))
    torch.testing.assert_close(ratio[turns < 1], torch.full((int((turns < 1).sum()),), 1 / 8))
    assert (ratio.diff() <= 1e-7).all()
    assert amplitude(config) == pytest.approx(0.1 * math.log(8) + 1)


def test_yarn_blends_a_wavelength_between_one_and_32_turns_in_proportion() -> None:
    """One radian a position in 104 positions: 16.5521 turns, (16.5521 - 1) / 31 = 0.501681 kept."""
    config = RopeConfig(scaling="yarn", scale=8.0, trained_context=104)
    assert frequencies(config, 2).item() == pytest.approx(0.501681 + 0.498319 / 8, abs=2e-6)


@pytest.mark.parametrize("scaling", ["linear", "yarn"])
def test_scaling_by_one_is_no_scaling(scaling: str) -> None:
    config = RopeConfig(scaling=scaling, scale=1.0)
    plain, scaled = Rotary(RopeConfig(), 64), Rotary(config, 64)
    position = torch.tensor([0, 1, 2047, 60_000])
    for found, expected in zip(scaled.tables(position), plain.tables(position), strict=True):
        assert torch.equal(found, expected)
    assert amplitude(config) == 1.0


def test_half_types_are_turned_in_float32() -> None:
    rotary, x = Rotary(RopeConfig(), 8), torch.randn(1, 1, 8).bfloat16()
    tables = rotary.tables(torch.tensor([30_000]))
    assert torch.equal(rotate(x, tables), rotate(x.float(), tables).bfloat16())
