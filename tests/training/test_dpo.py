"""DP-DPO: gradients of users against autograd in float64, TRL's loss, and whole runs."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import dprlhf
from dprlhf import DprlhfError, recipe
from dprlhf.boundary import Private
from dprlhf.cli.app import app
from dprlhf.data.given_rows import rows_from
from dprlhf.data.users import Prompts, Users
from dprlhf.gradients.clipping import Weighted, clipped_sum
from dprlhf.policies.causal_lm import CausalLMPolicy
from dprlhf.policies.loading import make_policy
from dprlhf.training.dpo import PreferredAnswers, split_prompt
from helpers import runs, tiny
from helpers.rounds import flat_gradient

ADAPTER = {"type": "lora", "rank": 2, "target_modules": ["c_attn"]}
DATA = {"path": "in-memory", "user_column": "user", "max_prompts_per_user": 2}
PAIRS = [
    {"user": u, "prompt": p, "chosen": c, "rejected": r}
    for u, p, c, r in [
        ("a", "is it ", "good", "bad news for all of us"), ("b", "so ", "far", "near"),
        ("b", "a prompt that is longer ", "yes", "x"), ("c", "once ", "this one", "not that one"),
    ]
]  # fmt: skip
LOSSES = [
    {"beta": 0.5},
    {"beta": 0.5, "loss_type": "hinge"},
    {"beta": 0.2, "loss_type": "ipo"},
]


def settings(**changes: Any) -> recipe.DPORecipe:
    values: dict[str, Any] = {
        "policy": {"model_name_or_path": "x", "adapter": ADAPTER},
        "data": DATA,
        "privacy": {"epsilon": 8.0},
        "rounds": 4,
    }
    return recipe.DPORecipe.model_validate(values | changes)


def at_its_start() -> CausalLMPolicy:
    """A policy in float64 whose adapter changes nothing yet."""
    made = make_policy(tiny.model(), tiny.tokenizer(), recipe.Adapter.model_validate(ADAPTER))
    made.model.double()
    return made


@torch.no_grad()
def moved(trained: CausalLMPolicy) -> CausalLMPolicy:
    """The same policy with its adapter away from its start."""
    torch.manual_seed(1)
    for parameter in trained.parameters.values():
        parameter.add_(0.3 * torch.randn_like(parameter))
    return trained


def policy() -> CausalLMPolicy:
    return moved(at_its_start())


def examples(rows: list[dict[str, Any]], data: recipe.Data) -> Prompts:
    users = Users(rows_from(rows, data.prompt_column), data)
    return users.select(np.arange(users.count))


def user_sums(
    spec: recipe.DPORecipe, rows: list[dict[str, str]], clip_norm: float, batch_size: int = 4
) -> torch.Tensor:
    trained, task = policy(), PreferredAnswers(spec)
    encoded = task.encode(trained, examples(rows, spec.data))
    weights = task.weights(trained, encoded, batch_size)
    weighted = Weighted(encoded, weights, np.zeros((encoded.users, 0)), 0.0)
    total = clipped_sum(
        trained, Private(weighted), clip_norm=clip_norm, batch_size=batch_size, reduce=lambda x: x
    )
    return total.bounded.total


def logprob(trained: CausalLMPolicy, prompt: str, completion: str) -> tuple[torch.Tensor, int]:
    before = trained.tokenizer(prompt)["input_ids"]
    learnt = [*trained.tokenizer(completion)["input_ids"], 0]
    logits = trained.model(input_ids=torch.tensor([before + learnt])).logits[0]
    start = len(before) - 1
    found = torch.log_softmax(logits, -1)[range(start, start + len(learnt)), learnt].sum()
    return found, len(learnt)


def pair_loss(trained: CausalLMPolicy, pair: dict[str, str], spec: recipe.DPORecipe) -> Any:
    gained = []
    for key in ("chosen", "rejected"):
        now, tokens = logprob(trained, pair["prompt"], pair[key])
        with torch.no_grad(), trained.base():
            reference, _ = logprob(trained, pair["prompt"], pair[key])
        gained.append((now - reference) / (tokens if spec.update.loss_type == "ipo" else 1))
    margin, beta = gained[0] - gained[1], spec.update.beta
    return {
        "sigmoid": lambda: -torch.nn.functional.logsigmoid(beta * margin),
        "hinge": lambda: torch.relu(1 - beta * margin),
        "ipo": lambda: (margin - 1 / (2 * beta)) ** 2,
    }[spec.update.loss_type]()


@pytest.mark.parametrize("update", LOSSES, ids=lambda u: u.get("loss_type", "sigmoid"))
def test_a_users_gradient_is_that_of_its_mean_loss_clipped_over_all_pairs(
    update: dict[str, Any],
) -> None:
    spec, trained = settings(update=update), policy()
    of_user = {}
    for user in "abc":
        own = torch.stack([pair_loss(trained, p, spec) for p in PAIRS if p["user"] == user])
        of_user[user] = -flat_gradient(trained, own.mean())
    norms = sorted(float(g.norm()) for g in of_user.values())
    for clip_norm in (1e6, norms[1] * 0.9):
        expected = sum(g * min(1.0, clip_norm / float(g.norm())) for g in of_user.values())
        found = user_sums(spec, PAIRS, clip_norm)
        # Where it clips, S is made smaller by the margin for rounding.
        error = 1e-12 if clip_norm > norms[-1] else 2e-6
        assert float((found - expected).norm()) < error * norms[-1]


@pytest.mark.parametrize("user", ["a", "b"])
def test_one_user_fewer_moves_the_sum_by_its_own_part(user: str) -> None:
    spec = settings()
    own = [p for p in PAIRS if p["user"] == user]
    others = [p for p in PAIRS if p["user"] != user]
    whole, fewer, alone = (user_sums(spec, rows, 1e-3) for rows in (PAIRS, others, own))
    assert 0.99e-3 < float((whole - fewer).norm()) <= 1e-3 * (1 + 1e-9)
    torch.testing.assert_close(whole - fewer, alone, rtol=1e-8, atol=1e-11)


@pytest.mark.slow
def test_micro_batches_do_not_change_the_sum() -> None:
    found = [user_sums(settings(), PAIRS, 0.05, size) for size in (1, 3, 4, 64)]
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], rtol=1e-8, atol=1e-12)


@pytest.mark.parametrize("update", LOSSES, ids=lambda u: u.get("loss_type", "sigmoid"))
def test_loss_and_metrics_are_those_of_trl(update: dict[str, Any], tmp_path: Path) -> None:
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    trained, spec = at_its_start(), settings(update=update)
    tokenizer = tiny.tokenizer()
    tokenizer.pad_token = "!"
    rows = [{k: p[k] for k in ("prompt", "chosen", "rejected")} for p in PAIRS]
    wanted = {"loss_type": [update.get("loss_type", "sigmoid")]}
    config = DPOConfig(
        output_dir=str(tmp_path), report_to=[], use_cpu=True, bf16=False,
        gradient_checkpointing=False, per_device_train_batch_size=4, **{**update, **wanted},
    )  # fmt: skip
    trainer = DPOTrainer(
        trained.model, args=config, train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
    )  # fmt: skip
    moved(trained)  # TRL has copied the adapter's start as its reference
    batch = trainer.data_collator(list(trainer.train_dataset))
    theirs = float(trainer._compute_loss(trained.model, batch, False).detach())
    seen = {k: v[-1] for group in trainer._metrics.values() for k, v in group.items() if v}
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
    trained = policy()
    one = PreferredAnswers(plain).encode(trained, examples(rows, plain.data))
    two = PreferredAnswers(implicit).encode(trained, examples(joined, implicit.data))
    assert torch.equal(one.tokens, two.tokens)
    assert torch.equal(one.mask, two.mask)


def test_pairs_may_be_conversations() -> None:
    trained = policy()
    trained.tokenizer.chat_template = (
        "{% for m in messages %}<{{ m.role[0] }}>{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}<a>{% endif %}"
    )
    said = [{"role": "user", "content": "hi"}]
    answers = [[{"role": "assistant", "content": text}] for text in ("yo", "no")]
    row = {"chosen": said + answers[0], "rejected": said + answers[1]}
    data = recipe.PreferencePairs(path="x", prompt_column="chosen")
    found = examples([row], data)
    encoded = PreferredAnswers(settings(data=data)).encode(trained, found)
    texts = [
        trained.tokenizer.decode(t[m.bool()])
        for t, m in zip(encoded.tokens, encoded.mask, strict=True)
    ]
    assert texts == ["<u>hi<a>yo", "<u>hi<a>no"]
    assert encoded.response_mask.sum(1).tolist() == [2, 2]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"update": {"loss_type": "aot"}}, "sigmoid"),
        ({"update": {"ld_alpha": 0.5}}, "ld_alpha is not offered: all tokens"),
        ({"update": {"sync_ref_model": True}}, "stays so"),
        ({"update": {"label_smoothing": 0.1}}, "label_smoothing is not offered"),
        ({"data": {**DATA, "prompt_column": "chosen", "prompt_words": 3}}, "would cut chosen"),
        ({"data": {**DATA, "rejected_column": "chosen"}}, "column of its own"),
    ],
)
def test_settings_that_do_not_fit_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        settings(**changes)


def test_a_list_of_one_loss_is_read_as_in_trl() -> None:
    assert settings(update={"loss_type": ["ipo"]}).update.loss_type == "ipo"


def people(count: int, first: int = 0) -> list[dict[str, str]]:
    return [
        {"user": f"u{i}", "prompt": "it was", "chosen": " aaaa", "rejected": " zzz"}
        for i in range(first, first + count)
    ]


@pytest.mark.slow
def test_it_learns_without_noise_and_resumes_after_an_interruption(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dprlhf.runs.folder.new_key", lambda: bytes(range(32)))
    model = str(runs.save_sharp(tmp_path / "model"))
    spec = settings(
        policy={"model_name_or_path": model, "adapter": ADAPTER},
        data={"path": "in-memory", "user_column": "user", "max_completion_tokens": 8},
        optimizer={"learning_rate": 0.05},
        evaluation={
            "data": {"path": "in-memory"},
            "prompts": 4,
            "declared_public": True,
        },
    )
    public = people(4, 100)
    free = spec.model_copy(
        update={"privacy": spec.privacy.model_copy(update={"epsilon": math.inf})}
    )
    given: dict[str, Any] = {"data": people(40), "evaluation_data": public, "quiet": True}
    run = dprlhf.train_stage(free, output_dir=tmp_path / "free", **given)
    assert run.before["rewards/margins"].mean == 0.0
    assert run.before["loss"].mean == pytest.approx(math.log(2))
    assert run.after["rewards/margins"].mean > 0.02
    assert run.after["rewards/accuracies"].mean == 1.0
    last = json.loads((tmp_path / "free/evaluation.json").read_text())["after"]
    assert set(last) == set(recipe.DPORecipe.public_losses)
    whole = dprlhf.train_stage(spec, output_dir=tmp_path / "whole", **given)
    assert whole.plan.guarantee.epsilon <= 8

    def stop(metrics: dict[str, Any]) -> None:
        if metrics["round"] == 2:
            raise RuntimeError

    with pytest.raises(DprlhfError, match="RuntimeError during the run"):
        dprlhf.train_stage(spec, output_dir=tmp_path / "cut", callbacks=[stop], **given)
    resumed = dprlhf.resume_stage(tmp_path / "cut", **given)
    for name, value in whole.policy.state().items():
        assert torch.equal(value, resumed.policy.state()[name])


@pytest.mark.slow
def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from typer.testing import CliRunner

    monkeypatch.chdir(tmp_path)
    model = tiny.save(Path("model"))
    Path("pairs.jsonl").write_text("".join(json.dumps(d) + "\n" for d in people(20)))
    Path("dpo.yaml").write_text(
        f"stage: dpo\npolicy: {{model_name_or_path: {model}, adapter: {json.dumps(ADAPTER)}}}\n"
        "data: {path: pairs.jsonl, user_column: user, max_completion_tokens: 8}\n"
        "privacy: {epsilon: 8}\nrounds: 2\n"
    )
    runner = CliRunner()
    done = runner.invoke(app, ["dpo", "dpo.yaml", "update.beta=0.5", "--output-dir", "one"])
    assert done.exit_code == 0, done.output
    assert "the next stage names one/model" in done.output
    wrong = runner.invoke(app, ["sft", "dpo.yaml"])
    assert "run it with dprlhf dpo" in str(wrong.exception)


def test_the_start_that_a_template_writes_is_not_learnt_after_itself() -> None:
    """An empty prompt is read as the start token, which the template writes as well."""
    trained = at_its_start()
    trained.tokenizer.bos_token = "<eos>"
    trained.tokenizer.chat_template = (
        "{{ bos_token }}{% for m in messages %}<{{ m.role[0] }}>{{ m.content }}{% endfor %}"
    )
    rows = [
        {"prompt": "", "chosen": [{"role": "assistant", "content": "o"}],
         "rejected": [{"role": "assistant", "content": "x"}]},
    ]  # fmt: skip
    spec = settings(data={"path": "in-memory", "max_completion_tokens": 4})
    task, pairs = PreferredAnswers(spec), examples(rows, spec.data)
    encoded = task.encode(trained, pairs)
    seen = [t[m.bool()] for t, m in zip(encoded.tokens, encoded.mask, strict=True)]
    assert [trained.tokenizer.decode(tokens) for tokens in seen] == ["<eos><a>o", "<eos><a>x"]
    assert task.cut(trained, pairs) == [False]
