"""What a policy's states tell: states without padding, a readout that finds only what is there."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

from dprlhf.data.public import public_users
from dprlhf.errors import DprlhfError
from dprlhf.recipe import load_recipe
from noise.many_runs import ROOT
from worth import readable


def test_states_are_those_of_each_prompt_alone() -> None:
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=20, hidden_size=8, intermediate_size=16, num_hidden_layers=2,
            num_attention_heads=2,
        )
    ).eval()  # fmt: skip
    prompts = [[1, 2, 3], [4], [5, 6, 7], [8, 9]]
    found = readable.states(model, prompts)
    assert found.shape == (3, 4, 8)
    for place, prompt in enumerate(prompts):
        with torch.no_grad():
            alone = model(torch.tensor([prompt]), output_hidden_states=True).hidden_states
        for layer, states in enumerate(alone):
            assert found[layer, place] == pytest.approx(states[0, -1].numpy(), abs=1e-5)


def test_a_readout_finds_what_is_there_and_nothing_else() -> None:
    random = np.random.default_rng(0)
    features = random.normal(size=(600, 10))
    noise = random.normal(size=600)
    # With as much noise as signal a direction tells 3/4 right: 1 − arctan(1)/π.
    seen = features[:, 3] + noise > 0
    assert readable.told_right(features, seen) == pytest.approx(0.75, abs=0.06)
    assert readable.told_right(features, features[:, 3] > 0) > 0.95
    assert readable.told_right(features, noise > 0) == pytest.approx(0.5, abs=0.06)


def test_what_was_fitted_on_is_not_tested_on() -> None:
    """A hundred rows of a hundred random features are told right by heart, and by chance if new."""
    random = np.random.default_rng(1)
    right = random.random(100) < 0.5
    found = [readable.told_right(random.normal(size=(100, 100)), right) for _ in range(10)]
    assert np.mean(found) == pytest.approx(0.5, abs=0.06)


@pytest.mark.assets
@pytest.mark.parametrize("task", readable.TASKS.values(), ids=readable.TASKS)
def test_the_public_rows_tell_what_is_to_be_read(task: readable.Task) -> None:
    recipe = load_recipe(ROOT / "recipes" / f"{task.recipe}.yaml")
    try:
        users = public_users(recipe, None)
    except DprlhfError as error:
        pytest.skip(str(error))
    assert users is not None
    column = np.array(users.select(np.arange(users.count)).columns[task.column])
    assert 0.4 < (column > 0).mean() < 0.6
