"""What is tried before the first charge: the largest shapes, and that no row moves another."""

import contextlib
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

import dprlhf
from dprlhf import recipe
from dprlhf.errors import DprlhfError
from dprlhf.policies import kept, warpers
from dprlhf.policies.causal_lm import CausalLMPolicy, random_adapter
from dprlhf.policies.kept import Replay
from dprlhf.policies.loading import make_policy
from dprlhf.policies.protocol import Sampling
from dprlhf.recipe import STAGES
from dprlhf.rollout.static_steps import StaticSteps
from dprlhf.testing import save_tiny_model
from dprlhf.training import build, made_up_rounds, trainer
from dprlhf.training.made_up_rounds import Shapes, check_layout
from helpers import families, kernels, tiny
from helpers.runs import ADAPTER, run_settings, save_sharp
from helpers.stages import logs, people, preferences

UPDATES: dict[str, Any] = {
    "pg": recipe.PG(name="pg", batch_size=8),
    "ppo": recipe.PPO(name="ppo", batch_size=8),
    "npg": recipe.NPG(name="npg", batch_size=8),
}


class OneProcess:
    """The part of :class:`dprlhf.training.processes.Processes` that the check needs."""

    main = True

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        return values


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(made_up_rounds, "_KNOWN", set())


def policy_of(kind: tiny.Kind = "llama") -> CausalLMPolicy:
    target = "c_attn" if kind == "gpt2" else "q_proj"
    adapter = recipe.Adapter(type="lora", rank=2, target_modules=[target])
    return make_policy(tiny.model(kind), tiny.tokenizer(), adapter)


def shapes_of(update: str = "pg", prompts: int = 1) -> Shapes:
    return Shapes(
        prompt=20, response=5, rows=4, num_generations=4, prompts=prompts, update=UPDATES[update],
        rollout=recipe.Rollout(responses=4, max_new_tokens=5, batch_size=8),
    )  # fmt: skip


def phase(policy: CausalLMPolicy, shapes: Shapes) -> str | None:
    found = made_up_rounds._first_dependent_phase(policy, shapes)
    return found and found.split(":")[0]


def check(policy: CausalLMPolicy, shapes: Shapes) -> str:
    return check_layout(policy, shapes, OneProcess())  # type: ignore[arg-type]


@pytest.mark.parametrize("kernel", [None, kernels.by_place, kernels.by_shape])
@pytest.mark.parametrize("update", UPDATES)
def test_a_kernel_may_round_by_place_and_by_shape(update, kernel, capsys):
    policy = policy_of()
    kernels.attach(policy, kernel)
    before = {name: p.detach().clone() for name, p in policy.parameters.items()}
    sentence = check(policy, shapes_of(update))
    assert "checked at start on this machine" in sentence
    assert "in sampling, log-probabilities, gradients" in sentence
    assert all(torch.equal(p, before[name]) for name, p in policy.parameters.items())
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.parametrize(
    ("kernel", "message"),
    [
        (kernels.by_contents, r"sampling: .* depend on what the other rows contain"),
        (kernels.at_random(), r"sampling: the same rows give other bits each time"),
    ],
)
def test_a_kernel_that_looks_at_other_rows_or_at_chance_is_refused(kernel, message, kind):
    policy = policy_of(kind)
    kernels.attach(policy, kernel)
    with pytest.raises(DprlhfError, match=message):
        check(policy, shapes_of())


@pytest.mark.parametrize("around", ["blank", "other"])
@pytest.mark.parametrize("update", UPDATES)
def test_blank_rows_and_rows_of_other_users_are_both_tried(around: str, update: str) -> None:
    """A part that is moved by one of the two alone, and in the backward pass alone."""
    policy = policy_of()

    def moved(module: Any, gradients: Any, of_output: tuple[torch.Tensor, ...]) -> Any:
        rows = of_output[0].flatten(1).abs().amax(1) > 0
        blank = not bool(rows.all())
        error = float(blank) if around == "blank" else float(of_output[0].abs().max())
        return None if around == "blank" and not blank else (gradients[0] * (1 + 1e-6 * error),)

    policy.network.model.layers[1].mlp.register_full_backward_hook(moved)
    with pytest.raises(DprlhfError, match=r"gradients: .* what the other rows contain"):
        check(policy, shapes_of(update))


@pytest.mark.parametrize("moves", [False, True])
def test_steps_over_fixed_tensors_are_tried_where_the_run_takes_them(moves, monkeypatch):
    policy, shapes = policy_of(), shapes_of()
    monkeypatch.setattr("dprlhf.rollout.sampling.replays_graphs", lambda *_: True)
    step, made = StaticSteps.logits, []

    def by_batch(steps: StaticSteps, *args: Any) -> torch.Tensor:
        made.append(steps)
        logits = step(steps, *args)
        return logits + 1e-3 * logits.abs().mean() if moves else logits

    monkeypatch.setattr(StaticSteps, "logits", by_batch)
    assert phase(policy, shapes) == ("sampling" if moves else None)
    assert made
    made_up_rounds._try_largest(policy, shapes)


@pytest.mark.parametrize("where", ["nowhere", "sampling", "gradients"])
def test_tokens_that_are_kept_by_what_others_have_are_found(where, monkeypatch):
    """What top-p keeps is compared, too: of the draws and of the gradients."""
    policy, shapes = policy_of(), shapes_of()
    policy.sampling = Sampling(top_p=0.8)
    cutoff = warpers.cutoff

    def by_batch(scores: torch.Tensor, sampling: Sampling) -> torch.Tensor:
        found = cutoff(scores, sampling)
        return found.amax(0, keepdim=True).expand_as(found)

    if where == "sampling":
        monkeypatch.setattr(warpers, "cutoff", by_batch)
    if where == "gradients":
        real = policy.response_logprobs

        def of_update(*arguments: Any, **named: Any) -> torch.Tensor:
            with monkeypatch.context() as patch:
                patch.setattr(warpers, "cutoff", by_batch)
                return real(*arguments, **named)

        monkeypatch.setattr(policy, "response_logprobs", of_update)
    assert phase(policy, shapes) == (None if where == "nowhere" else where)


@pytest.mark.parametrize("steps", [False, True])
def test_a_model_to_which_padding_is_text_is_refused(steps: bool) -> None:
    """Its rows keep apart, and it would learn another distribution than its own."""
    policy = families.policy("llama")

    def without_mask(module: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        of_step = kwargs.get("past_key_values") is not None
        return args, {**kwargs, "attention_mask": None} if of_step == steps else kwargs

    check(policy, shapes_of())
    policy.network.register_forward_pre_hook(without_mask, with_kwargs=True)
    made_up_rounds._KNOWN.clear()
    with pytest.raises(DprlhfError, match="LlamaForCausalLM gives a token other probabilities"):
        check(policy, shapes_of())


@pytest.mark.parametrize("where", ["gradients", "log-probabilities"])
def test_each_phase_is_looked_at(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name = {"gradients": "recorded_by_user", "log-probabilities": "token_logprobs"}[where]
    whole = getattr(made_up_rounds, name)

    def by_rows(policy: Any, rows: Any, *given: Any, **named: Any) -> Any:
        found, error = whole(policy, rows, *given, **named), 1e-6 * int(rows.tokens.sum())
        if where == "log-probabilities":
            return found + error
        return [(users, [t + error for t in tensors]) for users, tensors in found]

    monkeypatch.setattr(made_up_rounds, name, by_rows)
    assert phase(policy_of(), shapes_of()) == where


def test_the_values_that_are_compared_are_not_all_zero() -> None:
    """An adapter starts at zero, and equal zeros would say nothing."""
    policy = policy_of()
    with random_adapter(policy):
        for values in made_up_rounds.gradients_of(policy, shapes_of(), [0, 1]):
            assert all(bool(value.any()) for value in values)
        [[first, *_], [second, *_]] = made_up_rounds.logits_of(
            policy, shapes_of(), shapes_of().turns[0], [0, 1]
        )
        assert not torch.equal(first, second)


def out_of_memory(*_: Any, **__: Any) -> Any:
    raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: 99 bytes")


@pytest.mark.parametrize("update", UPDATES)
def test_a_user_with_all_its_prompts_is_tried(update: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = made_up_rounds._made_up
    most: list[int] = []

    def watched(*given: Any, **named: Any) -> Any:
        rows = made(*given, **named)
        most.append(int(np.bincount(rows.user).max()))
        return rows

    monkeypatch.setattr(made_up_rounds, "_made_up", watched)
    check(policy_of(), shapes_of(update, prompts=9))
    assert max(most) == 36
    assert most.count(36) == 1


def test_every_response_of_a_row_is_compared() -> None:
    """Behind one copy of its prompt, a response's logits are not all at the row's last place."""
    policy, shapes = policy_of("llama"), shapes_of()
    assert policy.shared_cache(shapes.sampled_together, 16, shapes.response) > 1
    tokens, prefill, *steps = made_up_rounds.logits_of(policy, shapes, shapes.turns[0], [0, 1])[0]
    assert len(tokens) > shapes.sampled_together
    assert [len(step) for step in steps] == [shapes.sampled_together * len(prefill)] * 3


@pytest.mark.slow
def test_a_resumed_run_checks_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = save_sharp(tmp_path / "model")
    settings = run_settings(model, rounds=1)
    dprlhf.train(**settings, output_dir=tmp_path / "run")
    monkeypatch.setattr(made_up_rounds, "_KNOWN", set())
    monkeypatch.setattr(made_up_rounds, "decode", out_of_memory)
    given = {"prompts": settings["prompts"], "reward": settings["reward"]}
    with pytest.raises(DprlhfError, match="does not fit into memory"):
        dprlhf.resume(tmp_path / "run", **given)


def stage(kind: str, model: str, folder: Path, update: dict[str, Any]) -> None:
    rows = {"sft": people, "dpo": preferences, "feedback": logs}.get(kind, preferences)
    values = {
        "policy": {"model_name_or_path": model, "adapter": ADAPTER},
        "data": {"path": "in-memory", "user_column": "user"}, "update": update, "rounds": 2,
        "privacy": {"epsilon": 8.0}, "output_dir": str(folder),
    }  # fmt: skip
    dprlhf.train_stage(STAGES[kind].model_validate(values), data=rows(0, 40), quiet=True)


@pytest.mark.parametrize(
    ("kind", "changes", "read"),
    [
        ("pg", {}, False),
        ("grpo", {}, False),
        ("ppo", {}, False),
        ("npg", {}, False),
        ("rebel", {"update": {"name": "rebel", "steps": 2}}, True),
        ("pg", {"kl__beta": 0.1}, True),
        ("pg", {"rollout__base_policy": "reference"}, True),
        ("sft", {}, False),
        ("dpo", {}, True),
        ("reward", {}, True),
        ("feedback", {}, True),
        ("feedback", {"loss_type": "kto"}, True),
    ],
)
def test_log_probabilities_are_checked_where_users_contributions_depend_on_them(
    kind: str, changes: dict[str, Any], read: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Feedback's, of one row a reaction, had not been."""
    checked, calls = [], []

    def check_of(policy: Any, shapes: Shapes, processes: Any) -> str:
        def counted(*given: Any, real: Any = policy.response_logprobs) -> torch.Tensor:
            if not torch.is_grad_enabled():
                calls.append(1)
            return real(*given)

        checked.append("log-probabilities" in check_layout(policy, shapes, processes))
        monkeypatch.setattr(policy, "response_logprobs", counted)
        return ""

    monkeypatch.setattr(build, "check_layout", check_of)
    monkeypatch.setattr(trainer, "check_finite", lambda *_: None)  # it looks at no user's rows
    model = save_sharp(tmp_path / "model")
    if kind in STAGES:
        stage(kind, model, tmp_path / "run", changes)
    else:
        fixed = {"prompts": ["a", "b", "c", "d"], "rounds": 1, "update": {"name": kind}}
        dprlhf.train(**run_settings(model, **fixed | changes), output_dir=tmp_path / "run")
    assert checked == [read]
    assert bool(calls) == read


@pytest.mark.parametrize(("kind", "fits"), [("qwen3_moe", False), ("gpt_oss", True)])
def test_ppo_refuses_what_its_copies_do_not_reach(kind: str, fits: bool) -> None:
    """Experts' LoRA is read, not called: it had no move, and noise in a run with a guarantee."""
    with contextlib.nullcontext() if fits else pytest.raises(DprlhfError, match=r"'.*experts.*'"):
        check(families.policy(kind), shapes_of("ppo"))


@pytest.mark.parametrize("init", ["random", "public-activations"])
def test_a_model_that_computes_nan_is_refused_as_such(init: str, tmp_path: Path) -> None:
    """Directions of public activations, which come first, had ended with an error of eigh."""
    model = save_tiny_model(tmp_path / "model")
    broken = AutoModelForCausalLM.from_pretrained(model)
    with torch.no_grad():
        broken.get_input_embeddings().weight[:] = math.nan
    broken.save_pretrained(model)
    settings = run_settings(str(model), evaluation_prompts=["public", "more"])
    settings["policy__adapter"] = {**settings["policy__adapter"], "init": init}
    with pytest.raises(DprlhfError, match="the model computes NaN"):
        dprlhf.train(**settings, output_dir=tmp_path / "run")
    assert not (tmp_path / "run/ledger.jsonl").exists()


@pytest.mark.parametrize("where", ["nowhere", "sampling", "gradients"])
def test_kept_outputs_that_depend_on_other_rows_are_found(where, monkeypatch):
    policy, shapes = policy_of(), replace(shapes_of(), keep="outputs")

    def by_contents(y: torch.Tensor) -> torch.Tensor:
        return y * (1 + y.mean())

    if where == "sampling":  # of the prompts alone, in one layer, that no logit shows
        real = kept._keeping

        def keeping(name: str, *arguments: Any) -> Any:
            plain = real(name, *arguments)
            if not name.endswith("down_proj"):
                return plain
            return lambda module, args, y: plain(module, args, by_contents(y))

        monkeypatch.setattr(kept, "_keeping", keeping)
    if where == "gradients":
        taken = Replay.of_tokens
        monkeypatch.setattr(Replay, "of_tokens", lambda self, name: by_contents(taken(self, name)))
    assert phase(policy, shapes) == (None if where == "nowhere" else where)
