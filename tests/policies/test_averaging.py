"""The average of the parameters over rounds, alone and in whole runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import dprlhf
from dprlhf import DprlhfError, recipe
from dprlhf.policies.averaging import ParameterAverage
from dprlhf.privacy.gate import Gate
from dprlhf.runs.opening import recipe_digest
from dprlhf.training import trainer
from helpers.recipes import recipe_settings, refusal
from helpers.runs import lower_case, save_sharp, train, weights

PATH = torch.randn(10, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
"""The parameters after each of ten rounds, ``[rounds, dimension]``."""


def averaged(rounds: range, state: Any = None, **spec: float) -> ParameterAverage:
    """Return an average that saw the given rounds of the path, perhaps from a saved state."""
    parameter = torch.nn.Parameter(torch.zeros(4, dtype=torch.float64))
    average = ParameterAverage(recipe.Average(**spec), {"p": parameter}, len(PATH))
    if state is not None:
        average.load_state(state)
    for t in rounds:
        with torch.no_grad():
            parameter.copy_(PATH[t - 1])
        average.update(t)
    return average


def mean_of(average: ParameterAverage) -> np.ndarray:
    with average.applied():
        return average._parameters["p"].detach().numpy().copy()


@pytest.mark.parametrize(("tail", "rounds"), [(1.0, 10), (0.5, 5), (0.26, 3), (0.01, 1)])
def test_the_tail_of_the_rounds_counts_alike(tail: float, rounds: int) -> None:
    found = mean_of(averaged(range(1, 11), tail=tail))
    np.testing.assert_allclose(found, PATH[-rounds:].mean(0), rtol=1e-12)


@pytest.mark.parametrize("decay", [0.0, 0.6, 0.99])
@pytest.mark.parametrize("rounds", [1, 3, 10])
def test_the_decaying_average_has_its_bias_corrected(decay: float, rounds: int) -> None:
    share = np.array([decay**n for n in range(rounds)])[::-1]
    found = mean_of(averaged(range(1, rounds + 1), decay=decay))
    np.testing.assert_allclose(found, share @ PATH[:rounds].numpy() / share.sum(), rtol=1e-12)


def test_a_round_that_was_lost_counts_for_nothing() -> None:
    first = averaged(range(1, 8), tail=0.5)
    found = mean_of(averaged(range(9, 11), first.state(), tail=0.5))
    np.testing.assert_allclose(found, PATH[[5, 6, 8, 9]].mean(0), rtol=1e-12)


def test_training_goes_on_with_the_last_parameters() -> None:
    average = averaged(range(1, 11), tail=1.0)
    with pytest.raises(KeyError), average.applied():
        raise KeyError
    assert torch.equal(average._parameters["p"], PATH[-1])
    early = averaged(range(1, 4), tail=0.5)  # nothing is averaged yet
    np.testing.assert_array_equal(mean_of(early), PATH[2])


@pytest.mark.parametrize("average", [{}, {"tail": 0.5, "decay": 0.5}, {"tail": 0}, {"decay": 1}])
def test_bad_settings_are_refused(average: dict[str, float]) -> None:
    said = refusal(recipe_settings(optimizer={"average": average}))
    assert said.startswith("optimizer.average")


def test_the_key_left_out_is_the_recipe_of_before() -> None:
    plain = recipe.make_recipe(recipe_settings())
    assert "average" in plain.optimizer.model_dump()
    asked = recipe.make_recipe(recipe_settings(optimizer={"average": {"tail": 0.5}}))
    assert recipe_digest(plain) != recipe_digest(asked)


@pytest.mark.slow
@pytest.mark.parametrize("average", [{"tail": 0.5}, {"decay": 0.7}])
def test_a_run_leaves_the_average_and_resumes_exactly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, average: dict[str, float]
) -> None:
    path: list[dict[str, torch.Tensor]] = []
    seen: list[dict[str, torch.Tensor]] = []
    save = trainer.save

    def saving(run: Any, t: int) -> None:
        path.append({n: p.detach().clone() for n, p in run.policy.parameters.items()})
        save(run, t)

    public = [f"public {i}" for i in range(8)]
    common: dict[str, Any] = {
        "epsilon": 8.0, "rounds": 4, "learning_rate": 0.1, "evaluation_prompts": public,
        "evaluation__every": 3, "prompts": [f"user {i} says" for i in range(24)],
        "rollout__max_new_tokens": 3, "optimizer__average": average,
    }  # fmt: skip
    model = save_sharp(tmp_path / "model")
    monkeypatch.setattr(trainer, "save", saving)
    stage = "dprlhf.training.reinforcement.Reinforcement.public_metrics"

    def metrics(self: Any, run: Any, t: int) -> dict[str, float]:
        seen.append({n: p.detach().clone() for n, p in run.policy.parameters.items()})
        return {}

    with monkeypatch.context() as patch:
        patch.setattr(stage, metrics)
        left = train(model, tmp_path / "whole", **common).policy.parameters
    share = [0.7**n for n in (3, 2, 1, 0)] if "decay" in average else [0.0, 0.0, 1.0, 1.0]
    for name, parameter in left.items():
        terms = [s * p[name] for s, p in zip(share, path, strict=True)]
        torch.testing.assert_close(parameter, torch.stack(terms).sum(0) / sum(share))
        early = torch.stack(terms[:3]).sum(0) / sum(share[:3])
        torch.testing.assert_close(seen[0][name], early)  # evaluated during the run
        assert not torch.equal(parameter, path[-1][name])
    release = Gate.release

    def crash(self: Any, round_: int, bounded: Any) -> Any:
        if round_ == 4:
            raise MemoryError("crash")
        return release(self, round_, bounded)

    with monkeypatch.context() as patch:
        patch.setattr(Gate, "release", crash)
        with pytest.raises(DprlhfError, match="resume"):
            train(model, tmp_path / "run", **common)
    given = {name: common[name] for name in ("prompts", "evaluation_prompts")}
    again = dprlhf.resume(tmp_path / "run", reward=lower_case, quiet=True, **given)
    for name, parameter in left.items():
        assert torch.equal(again.policy.parameters[name], parameter)
    for file in ("policy", "average", "optimizer"):
        one, other = (
            load_file(tmp_path / run / f"checkpoint/{file}.safetensors") for run in ("whole", "run")
        )
        assert all(torch.equal(one[name], other[name]) for name in one)
    held = weights(tmp_path / "run")
    last = {n.replace(".default", ""): p for n, p in path[3].items()}
    assert all(torch.equal(p, held[n]) for n, p in last.items())  # the raw iterate goes on
    texts = dprlhf.generate(tmp_path / "run", public)
    assert [pair["tuned"] for pair in texts] == _texts_of(again.policy, tmp_path / "run", public)


def _texts_of(policy: Any, folder: Path, prompts: list[str]) -> list[str]:
    """Return what the given policy says where ``dprlhf.generate`` loads one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dprlhf.api, "load_tuned", lambda *_: None)
        patch.setattr(dprlhf.api, "load_policy_of", lambda _: policy)
        return [pair["tuned"] for pair in dprlhf.generate(folder, prompts)]
