"""An adapter's start from public activations, against the definitions in float64."""

from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import scipy.linalg
import torch

from dprlhf.data.public import HELD_OUT, used_rows
from dprlhf.policies.activations import RIDGE, align_with_activations
from dprlhf.policies.causal_lm import CausalLMPolicy
from dprlhf.policies.loading import make_policy
from dprlhf.recipe import Adapter
from helpers import families, tiny
from helpers.recipes import least
from helpers.runs import train

ROWS, WIDTH = 24, 6


def policy_of(rank: int = 1) -> CausalLMPolicy:
    adapter = Adapter(type="ffa-lora", rank=rank, target_modules=["c_attn"], layers=[1])
    return make_policy(tiny.model(), tiny.tokenizer(), adapter, seed=3)


def rows_of(policy: CausalLMPolicy) -> tuple[torch.Tensor, torch.Tensor, list[str]]:
    """Rows of two classes that differ in their first word, some with padding on the left."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(3, 30, (ROWS, WIDTH), generator=generator)
    mask = torch.ones_like(tokens)
    mask[::3, :2] = 0
    classes = ["one" if i % 2 else "two" for i in range(ROWS)]
    tokens[1::2, 3] = 5
    tokens[::2, 3] = 6
    return tokens * mask, mask, classes


def inputs_of(policy: CausalLMPolicy, tokens: torch.Tensor, mask: torch.Tensor) -> Any:
    """Return the layer's inputs of all real tokens, and the row of each."""
    layer = next(m for n, m in policy.model.named_modules() if ".lora_A." in n)
    found: list[torch.Tensor] = []
    hook = layer.register_forward_hook(lambda m, given, out: found.append(given[0].detach()))
    for row in range(ROWS):  # one at a time, without padding
        real = tokens[row, mask[row].bool()][None]
        pad = torch.nn.functional.pad
        policy.response_logprobs(pad(real, (0, 1)), pad(torch.ones_like(real), (0, 1)), 1)
    hook.remove()
    length = [int(m.sum()) for m in mask]
    inputs = torch.cat([f[0, -n:] for f, n in zip(found, length, strict=True)]).double().numpy()
    return layer, inputs, np.repeat(np.arange(ROWS), length)


def test_the_principal_directions_are_those_of_the_inputs() -> None:
    policy = policy_of(rank=2)
    tokens, mask, _ = rows_of(policy)
    layer, inputs, _ = inputs_of(policy, tokens, mask)
    lengths = layer.weight.norm(dim=1).double()
    align_with_activations(policy, tokens, mask, batch_size=7)
    right = np.linalg.svd(inputs)[2][:2]
    made = layer.weight.detach().double()
    assert made.norm(dim=1).numpy() == pytest.approx(lengths.detach().numpy(), rel=1e-5)
    cosines = np.abs(np.sum(right * (made / made.norm(dim=1, keepdim=True)).numpy(), axis=1))
    assert cosines == pytest.approx(1.0, abs=1e-5)


@pytest.mark.parametrize("kinds", ["ab", "abcaab"], ids=["two classes", "three, unequal"])
def test_the_discriminants_are_those_of_the_generalised_eigenproblem(kinds: str) -> None:
    policy = policy_of()
    tokens, mask, _ = rows_of(policy)
    classes = [kinds[i % len(kinds)] for i in range(ROWS)]
    tokens[:, 3] = torch.tensor([5 + ord(kind) - ord("a") for kind in classes])
    layer, inputs, rows = inputs_of(policy, tokens, mask)
    length = float(layer.weight.detach().norm())
    align_with_activations(policy, tokens, mask, batch_size=7, classes=classes)
    made = layer.weight.detach().double().numpy()[0]

    of_token = np.array(classes)[rows]
    mean = inputs.mean(0)
    parts = [inputs[of_token == kind] for kind in sorted(set(kinds))]
    within = sum(len(p) * np.cov(p.T, bias=True) for p in parts) / len(inputs)
    apart = [p.mean(0) - mean for p in parts]
    between = sum(len(p) * np.outer(a, a) for p, a in zip(parts, apart, strict=True)) / len(inputs)
    centred = np.eye(len(mean)) - np.outer(mean, mean) / (mean @ mean)
    ridge = RIDGE * within.diagonal().mean() * np.eye(len(mean))
    _, vectors = scipy.linalg.eigh(centred @ between @ centred, centred @ within @ centred + ridge)
    expected = vectors[:, -1]
    cosine = abs(made @ expected) / np.linalg.norm(made) / np.linalg.norm(expected)
    assert cosine == pytest.approx(1.0, abs=1e-5)
    # All tokens together have no component along it, and classes lie on its two sides.
    assert abs(made @ mean) < 1e-4 * np.linalg.norm(made) * np.linalg.norm(mean)
    along = [p @ made for p in parts]
    assert np.ptp([a.mean() for a in along]) > 0.5 * along[0].std()
    # Along it the inputs are as long as along the leading direction of the row's former length.
    top = np.linalg.svd(inputs)[1][0] / np.sqrt(len(inputs))
    assert np.sqrt(np.mean((inputs @ made) ** 2)) == pytest.approx(top * length, rel=1e-4)


@pytest.mark.parametrize("kind", ["opt", "mixtral", "bert"])
def test_a_layer_that_reads_its_input_otherwise_keeps_its_start_or_follows(kind: str) -> None:
    """OPT's inputs are flat, experts read their weights uncalled, BERT's head the last tokens."""
    policy = families.policy(kind)
    start = {n: p.clone() for n, p in policy.model.named_parameters() if ".lora_A." in n}
    tokens = torch.randint(1, 200, (6, 10), generator=torch.Generator().manual_seed(0))
    align_with_activations(policy, tokens, torch.ones_like(tokens), 3)
    own = dict(policy.model.named_parameters())
    moved = [n for n, before in start.items() if not torch.equal(own[n], before)]
    assert any("q_proj" in n or "query" in n for n in moved)
    assert all(bool(own[n].isfinite().all()) for n in start)


CONTRAST = {
    "type": "ffa-lora", "target_modules": ["c_attn"], "init": "public-contrast",
    "contrast_column": "kind",
}  # fmt: skip


def run_with(tmp_path: Path, adapter: dict[str, Any], kinds: str = "ab", **changes: Any) -> Any:
    rows = [
        {"prompt": f"{kinds[i % len(kinds)]} {i}", "kind": kinds[i % len(kinds)]} for i in range(40)
    ]
    settings = {"evaluation_prompts": rows, "evaluation__prompts": 8, "epsilon": 8.0, "rounds": 2}
    return train(
        str(tiny.save(tmp_path / "model")), tmp_path / "run", policy__adapter=adapter,
        **settings | changes,
    )  # fmt: skip


def test_a_run_starts_along_what_tells_public_prompts_apart(tmp_path: Path) -> None:
    with mock.patch(
        "dprlhf.training.setup.align_with_activations", wraps=align_with_activations
    ) as aligned:
        run_with(tmp_path, CONTRAST)
    tokens, classes = aligned.call_args.args[1], aligned.call_args.args[4]
    assert len(tokens) == len(classes) == 32  # those that the evaluation does not use
    assert classes == ["a", "b"] * 16
    text = tiny.tokenizer().batch_decode(tokens, skip_special_tokens=True)
    assert [line[0] for line in text] == classes


def test_all_public_rows_are_compared_with_the_users_where_all_may_be_taken() -> None:
    def used(adapter: dict[str, Any]) -> int | None:
        evaluation = {"data": {"path": "public.csv"}, "prompts": 8}
        policy = {"model_name_or_path": "m", "adapter": adapter}
        return used_rows(least(policy=policy, evaluation=evaluation))

    assert used(CONTRAST) is None
    assert used({"init": "public-activations"}) == 8 + HELD_OUT
