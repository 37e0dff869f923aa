"""DP-DPO: gradients of users against autograd in float64, TRL's loss, and whole runs."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dprlhf import recipe
from dprlhf.policies.causal_lm import CausalLMPolicy
from dprlhf.training.dpo import PreferredAnswers, split_prompt
from helpers.stages import (
    check_user_sums,
    examples,
    gained,
    loss_of_trl,
    stage_of,
    wide_policy,
)

DATA = {"path": "in-memory", "user_column": "user", "max_prompts_per_user": 2}
PAIRS = [
    {"user": u, "prompt": p, "chosen": c, "rejected": r}
    for u, p, c, r in [
        ("a", "is it ", "good", "bad news for all of us"), ("b", "so ", "far", "near"),
        ("b", "a prompt that is longer ", "yes", "x"), ("c", "once ", "this one", "not that one"),
    ]
]  # fmt: skip
LOSSES = [{"beta": 0.5}, {"beta": 0.5, "loss_type": "hinge"}, {"beta": 0.2, "loss_type": "ipo"}]


def settings(**changes: Any) -> recipe.DPORecipe:
    return stage_of(recipe.DPORecipe, **{"data": DATA, **changes})


def pair_loss(trained: CausalLMPolicy, pair: dict[str, str], spec: recipe.DPORecipe) -> Any:
    gains = []
    for key in ("chosen", "rejected"):
        now, reference, tokens = gained(trained, pair["prompt"], pair[key])
        gains.append((now - reference) / (tokens if spec.update.loss_type == "ipo" else 1))
    margin, beta = gains[0] - gains[1], spec.update.beta
    return {
        "sigmoid": lambda: -torch.nn.functional.logsigmoid(beta * margin),
        "hinge": lambda: torch.relu(1 - beta * margin),
        "ipo": lambda: (margin - 1 / (2 * beta)) ** 2,
    }[spec.update.loss_type]()


@pytest.mark.parametrize("update", LOSSES, ids=lambda u: u.get("loss_type", "sigmoid"))
def test_a_users_gradient_is_that_of_its_mean_loss_clipped_over_all_pairs(update):
    spec, trained = settings(update=update), wide_policy(0.3)
    check_user_sums(
        PreferredAnswers(spec), trained, PAIRS, spec.data, lambda p: pair_loss(trained, p, spec)
    )


@pytest.mark.filterwarnings("ignore:invalid value")  # a round silences it
@pytest.mark.parametrize("update", LOSSES, ids=lambda u: u.get("loss_type", "sigmoid"))
def test_a_tie_is_no_accurate_pair_and_a_margin_that_is_no_number_counts_for_nothing(update):
    spec = settings(update=update)
    task, found = PreferredAnswers(spec), examples(PAIRS, spec.data)
    trained = wide_policy(0)
    encoded = task.encode(trained, found)
    assert task.losses(trained, encoded, 4)[-1].tolist() == [0.0] * len(PAIRS)
    with torch.no_grad():
        next(iter(trained.parameters.values()))[0] = math.inf
    assert np.isnan(task.weights(trained, encoded, 4)).all()


@pytest.mark.parametrize("update", LOSSES, ids=lambda u: u.get("loss_type", "sigmoid"))
def test_loss_and_metrics_are_those_of_trl(update: dict[str, Any], tmp_path: Path) -> None:
    from trl import DPOConfig, DPOTrainer

    trained, spec = wide_policy(0), settings(update=update)
    rows = [{k: p[k] for k in ("prompt", "chosen", "rejected")} for p in PAIRS]
    wanted = update | {"loss_type": [update.get("loss_type", "sigmoid")]}
    theirs, seen = loss_of_trl(DPOTrainer, DPOConfig, trained, rows, tmp_path, **wanted)
    task = PreferredAnswers(spec)
    encoded = task.encode(trained, examples(rows, recipe.PreferencePairs(path="x")))
    ours = dict(zip(task.metrics, task.losses(trained, encoded, 3), strict=True))
    assert float(ours.pop("loss").mean()) == pytest.approx(theirs, rel=1e-5)
    for name, values in ours.items():
        assert float(values.mean()) == pytest.approx(seen[name], rel=1e-4, abs=1e-5), name


def test_an_implicit_prompt_is_what_both_completions_begin_with() -> None:
    from trl import extract_prompt

    for chosen, rejected in [("so it was good", "so it was bad"), ("the end", "the start")]:
        theirs = extract_prompt({"chosen": chosen, "rejected": rejected})
        assert split_prompt(chosen, rejected) == tuple(theirs.values())
    assert split_prompt("abc", "xyz ") == ("", "abc", "xyz ")
    plain, implicit = settings(), settings(data={**DATA, "prompt_column": "chosen"})
    rows = [{"prompt": "so it was", "chosen": " good", "rejected": " bad", "user": "u"}]
    joined = [{**r, **{k: r["prompt"] + r[k] for k in ("chosen", "rejected")}} for r in rows]
    joined = [{k: v for k, v in r.items() if k != "prompt"} for r in joined]
    trained = wide_policy(0.3)
    one = PreferredAnswers(plain).encode(trained, examples(rows, plain.data))
    two = PreferredAnswers(implicit).encode(trained, examples(joined, implicit.data))
    assert torch.equal(one.tokens, two.tokens)
    assert torch.equal(one.mask, two.mask)
