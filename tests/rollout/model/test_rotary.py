"""Rotary tables: a position's angles do not depend on the step that asks."""

from __future__ import annotations

import torch

from rollout.model.rotary import RotaryTable, inverse_frequencies
from tests.models import tiny_config


def test_a_position_has_the_same_rotation_in_every_step():
    table = RotaryTable(inverse_frequencies(tiny_config()))
    whole = table.at(torch.arange(2000))  # one growth
    grown = RotaryTable(inverse_frequencies(tiny_config()))
    for start in (0, 3, 250, 255, 256, 700, 1999):  # many
        positions = torch.arange(start, min(start + 5, 2000))
        few = grown.at(positions)
        assert torch.equal(few.cos[positions], whole.cos[positions])
        assert torch.equal(few.sin[positions], whole.sin[positions])
    assert whole.cos.shape[1] == 32
    angle = 7 * 10000.0 ** (-2 / 32)
    assert abs(float(whole.cos[7, 1]) - torch.tensor(angle).cos().item()) < 1e-6
