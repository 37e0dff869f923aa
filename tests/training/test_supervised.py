"""The supervised stages: gradients against loops over users in float64, and whole pipelines."""

import json
import math
import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
import yaml
from tokenizers.normalizers import Replace
from tokenizers.processors import TemplateProcessing
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedTokenizerFast,
)
from typer.testing import CliRunner

import dprlhf
from dprlhf import DprlhfError, recipe
from dprlhf.boundary import open_private
from dprlhf.cli.app import app
from dprlhf.data.given_rows import rows_from
from dprlhf.data.loading import load_rows
from dprlhf.data.users import Prompts, Users
from dprlhf.gradients.clipping import clipped_sum
from dprlhf.policies.causal_lm import CausalLMPolicy
from dprlhf.policies.classifier import load_reward_model
from dprlhf.privacy.ledger import read_ledger
from dprlhf.rewards.classifier import ClassifierReward, classifier_tokens
from dprlhf.rollout import Responses, sample
from dprlhf.runs.earlier import records_of, total_of_runs
from dprlhf.training.dpo import PreferredAnswers, encode_pairs
from dprlhf.training.dry_run import dry_run_stage, explain
from dprlhf.training.feedback import Reactions
from dprlhf.training.supervised import made_up_rows, with_lengths
from dprlhf.training.tasks import (
    Labels,
    NextTokens,
    Pairs,
    Task,
    check_template,
    pack,
    split_row,
)  # fmt: skip
from dprlhf.training.trainer import rehearse_end
from helpers import stages, tiny
from helpers.rounds import flat_gradient
from helpers.runs import ADAPTER
from helpers.stages import examples, moved, people, preferences, user_sums, wide_policy

FORM = (
    recipe.Preferences(path="x"),
    pa.schema([(name, pa.string()) for name in ("prompt", "chosen", "rejected")]),
    {},
)


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny.save_bert(tmp_path_factory.mktemp("encoder"))


def clipped(vector: torch.Tensor, norm: float) -> torch.Tensor:
    return vector * min(1.0, norm / float(vector.norm()))


DOCUMENTS = [
    {"user": u, "prompt": p, "completion": c}
    for u, p, c in [
        ("a", "say", " yes"), ("b", "a long prompt of many", " words"), ("a", "", "nothing before"),
        ("c", "cut", " off because it is much too long for that"), ("b", "end", ""),
    ]
]  # fmt: skip
OF_USERS = recipe.Documents(
    path="x", user_column="user", max_prompts_per_user=2, max_completion_tokens=12
)


def document_loss(trained: CausalLMPolicy, prompt: str, completion: str) -> torch.Tensor:
    """Mean −log π of one document's learnt tokens, without padding."""
    prompt_ids = trained.tokenizer(prompt)["input_ids"] or [0]
    learnt = (trained.tokenizer(completion)["input_ids"] + [0])[:12]
    logits = trained.model(input_ids=torch.tensor([prompt_ids + learnt])).logits[0]
    logprobs = torch.log_softmax(logits, -1)
    start = len(prompt_ids) - 1
    return -logprobs[range(start, start + len(learnt)), learnt].mean()


@pytest.mark.parametrize("clip_norm", [1e6, 0.5])
def test_sft_clips_each_users_loss_gradient_over_all_its_documents(clip_norm: float) -> None:
    trained, rows = wide_policy(0.1), examples(DOCUMENTS, OF_USERS)
    found, encoded = user_sums(NextTokens(OF_USERS), trained, rows, clip_norm)
    expected = torch.zeros_like(found)
    for user in "abc":
        own = [d for d in DOCUMENTS if d["user"] == user]
        losses = [document_loss(trained, d["prompt"], d["completion"]) for d in own]
        expected -= clipped(flat_gradient(trained, torch.stack(losses).mean()), clip_norm)
    torch.testing.assert_close(found, expected, rtol=1e-7, atol=1e-9)
    [losses] = NextTokens(OF_USERS).losses(trained, encoded, 2)
    alone = [document_loss(trained, d["prompt"], d["completion"]) for d in
             sorted(DOCUMENTS, key=lambda d: d["user"])]  # fmt: skip
    np.testing.assert_allclose(losses, torch.stack(alone).detach().numpy(), rtol=1e-7)


def test_a_text_is_followed_by_an_end_whatever_it_ends_with() -> None:
    trained, data = wide_policy(0.1), recipe.Documents(path="x")
    for text in ("yo", "yo<eos>", "yo<eos>!"):
        encoded = NextTokens(data).encode(
            trained, examples([{"prompt": "hi", "completion": text}], data)
        )
        learnt = encoded.tokens[0, -encoded.response_mask.shape[1] :]
        learnt = learnt[encoded.response_mask[0].bool()]
        assert trained.tokenizer.decode(learnt) == f"{text}<eos>"


TEMPLATES = ["deepseek_r1_distill", "gemma3", "gptoss", "llama3_1", "qwen3", "qwen3_5_think"]
TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    },
}


@pytest.mark.parametrize("template", TEMPLATES)
def test_a_conversation_is_learnt_as_its_template_writes_it(template: str) -> None:
    """Prompt and completion are the rendered row, token for token, in every stage."""
    pytest.importorskip("trl")
    file = Path(find_spec("trl").submodule_search_locations[0]) / f"chat_templates/{template}.jinja"  # type: ignore[union-attr, index]
    trained = wide_policy(0.1)
    trained.tokenizer.chat_template = file.read_text()
    ask, yo, no = ([{"role": r, "content": t}] for r, t in
                   [("user", "hi"), ("assistant", "yo"), ("assistant", "no")])  # fmt: skip
    arguments: dict[str, Any] = {"enable_thinking": False}
    if template.startswith(("qwen", "llama", "glm")):
        arguments["tools"] = [TOOL]
    columns = {"chat_template_kwargs": {"enable_thinking": False}, "tools": arguments.get("tools")}
    length = {"max_prompt_tokens": 9999, "max_completion_tokens": 9999}

    def rows_of(task: Any, row: dict[str, Any], spec: Any) -> list[list[int]]:
        encoded = task.encode(trained, examples([{**row, **columns}], spec))
        return [t[m.bool()].tolist() for t, m in zip(encoded.tokens, encoded.mask, strict=True)]

    truth = [
        trained.tokenizer.apply_chat_template([*ask, *answer], **arguments)["input_ids"]
        for answer in (yo, no)
    ]
    documents, pairs = (
        recipe.Documents(path="x", **length),
        recipe.PreferencePairs(path="x", **length),
    )
    (learnt,) = rows_of(NextTokens(documents), {"prompt": ask, "completion": yo}, documents)
    assert learnt[: len(truth[0])] == truth[0]
    assert learnt[len(truth[0]) :] in ([], [trained.tokenizer.eos_token_id])
    stage = recipe.DPORecipe(policy={"model_name_or_path": "x"}, data=pairs, rounds=1,
                             privacy={"epsilon": 1, "delta": 1e-5})  # fmt: skip
    both = rows_of(PreferredAnswers(stage), {"prompt": ask, "chosen": yo, "rejected": no}, pairs)
    assert both == truth
    preferences = recipe.Preferences(path="x", max_tokens=9999)
    scored = rows_of(Pairs(preferences), {"prompt": ask, "chosen": yo, "rejected": no}, preferences)
    assert [row[:-1] for row in scored] == truth  # the last column is the answer's


def test_a_response_is_sampled_behind_what_its_row_has_for_the_template() -> None:
    trained, data = wide_policy(0.1), recipe.Data(path="x")
    trained.chat_template_kwargs = {"mood": "calm ", "tone": "low "}
    trained.tokenizer.chat_template = (
        "{{ mood }}{{ tone }}{% for t in tools or [] %}{{ t.name }} {% endfor %}"
        "{{ messages[0].content }}"
    )
    ask = [{"role": "user", "content": "hi"}]
    rows = [
        {"prompt": ask, "tools": [{"name": "add"}], "chat_template_kwargs": {"mood": "glad "}},
        {"prompt": ask, "tools": None, "chat_template_kwargs": None},
        {"prompt": ask, "tools": '[{"name": "sum"}]', "chat_template_kwargs": '{"mood": ""}'},
    ]
    texts = []
    for row in rows:  # each alone, as a column has one type
        spec = recipe.Rollout(max_new_tokens=1, batch_size=2)
        sampled = sample(trained, examples([row], data), spec, key=bytes(32), context=("test",),
                         max_prompt_tokens=64)  # fmt: skip
        seen = sampled.mask[0, : -sampled.response_mask.shape[1]].bool()
        texts.append(trained.tokenizer.decode(sampled.tokens[0, : len(seen)][seen]))
    assert texts == ["glad low add hi", "calm low hi", "low sum hi"]


def test_a_reward_gets_of_a_cut_prompt_what_the_policy_saw() -> None:
    trained, spec = wide_policy(0.1), recipe.Rollout(max_new_tokens=1, batch_size=2)
    trained.tokenizer.chat_template = "{{ messages[0].content }}:{{ messages[-1].content }}"
    talk = [{"role": "system", "content": "aaaaaa"}, {"role": "user", "content": "why?"}]
    for given, seen in (
        ("short", "short"),
        ("aaaaaa why?", "aaa why?"),
        (talk, [{"role": "user", "content": "aaa:why?"}]),
        (talk[1:], talk[1:]),
    ):
        rows = examples([{"prompt": given, "wish": 3}], recipe.Data(path="x"))
        sampled = sample(trained, rows, spec, key=bytes(32), context=("test",),
                         max_prompt_tokens=9 if given == talk[1:] else 8)  # fmt: skip
        assert sampled.prompts.prompts == [seen]
        assert sampled.prompts.columns == {"wish": [3]}


@pytest.mark.parametrize(
    "bad", [{"tokenize": False}, {"chat_template": "{{ 1 }}"}, ["x"], {"tools": []}]
)
def test_a_row_sets_nothing_but_the_arguments_of_its_own_template(bad: Any) -> None:
    trained = wide_policy(0.1)
    trained.tokenizer.chat_template = "{{ messages[0].content }}"
    asked = [{"role": "user", "content": "hi"}]
    with pytest.raises(DprlhfError, match="the template's own arguments"):
        trained.encode([asked], 9, [{"chat_template_kwargs": bad}])
    with pytest.raises(DprlhfError, match="a list of schemas"):
        trained.encode([asked], 9, [{"tools": ["add"]}])
    assert trained.encode(["text"], 9, [{"tools": ["add"]}]) == trained.encode(["text"], 9)


PAIRS = [
    {"user": u, "prompt": p, "chosen": c, "rejected": r}
    for u, p, c, r in [
        ("a", "is it ", "good", "bad news for all of us"), ("b", "so ", "far", "near"),
        ("b", "", "empty prompt", "x"), ("c", "twice ", "same", "same"),
    ]
]  # fmt: skip
OF_PAIRS = recipe.Preferences(path="x", user_column="user", max_prompts_per_user=2, max_tokens=24)


def score(trained: Any, text: str) -> torch.Tensor:
    """The logits of one text without padding, ``[outputs]``."""
    ids = trained.tokenizer(text, truncation=True, max_length=24)["input_ids"]
    return trained.model(input_ids=torch.tensor([ids])).logits[0]


@pytest.mark.parametrize(("kind", "clip_norm"), [("model", 1e6), ("encoder", 0.01)])
def test_pairs_clip_each_users_bradley_terry_gradient(kind, clip_norm, request):
    path = request.getfixturevalue(kind)
    targets = {"model": ["c_attn"], "encoder": ["query"]}[kind]
    spec = recipe.Policy(
        model_name_or_path=path, adapter=recipe.Adapter(type="lora", target_modules=targets)
    )
    trained = moved(load_reward_model(spec, None), 0.1)
    assert any("score" in n or "classifier" in n for n in trained.parameters)
    found, encoded = user_sums(Pairs(OF_PAIRS), trained, examples(PAIRS, OF_PAIRS), clip_norm, 4)

    def loss(pair: dict[str, str]) -> torch.Tensor:
        better, worse = (score(trained, pair["prompt"] + pair[k]) for k in ("chosen", "rejected"))
        return -torch.nn.functional.logsigmoid(better - worse)[0]

    expected = torch.zeros_like(found)
    for user in "ab":  # c's gradient is zero
        own = torch.stack([loss(p) for p in PAIRS if p["user"] == user]).mean()
        expected -= clipped(flat_gradient(trained, own), clip_norm)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-9)
    losses, accuracy = Pairs(OF_PAIRS).losses(trained, encoded, 4)
    of_pairs = np.array([float(loss(p).detach()) for p in PAIRS])
    np.testing.assert_allclose(losses, of_pairs, rtol=1e-7)
    # The last pair is a tie, up to how a row's place in the batch rounds it.
    np.testing.assert_array_equal(accuracy[:3], of_pairs[:3] < math.log(2))


def test_labels_clip_each_users_cross_entropy_gradient(encoder: str) -> None:
    data = recipe.Preferences(
        path="x", prompt_column="text", label_column="label", max_tokens=24, user_column="user",
        max_prompts_per_user=3,
    )  # fmt: skip
    rows = [
        {"user": "a", "text": "nice", "label": "good"},
        {"user": "b", "text": "awful", "label": "bad"},
        {"user": "a", "text": "so so it was", "label": "meh"},
    ]
    names = ["bad", "meh", "good"]
    spec = recipe.Policy(model_name_or_path=encoder, adapter=VALUE_BIASES)
    trained, task = moved(load_reward_model(spec, names), 0.1), Labels(data, names)
    found, encoded = user_sums(task, trained, examples(rows, data), 1e6)
    expected = torch.zeros_like(found)
    for user in "ab":
        own = [
            torch.log_softmax(score(trained, r["text"]), -1)[names.index(r["label"])]
            for r in rows
            if r["user"] == user
        ]
        expected += flat_gradient(trained, torch.stack(own).mean())
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-9)
    losses, _ = task.losses(trained, encoded, 2)
    assert losses.mean() > 0
    assert [task.number(label) for label in (0.0, 2.0, 1)] == [0, 2, 1]
    for label in (0.5, 3.0, -1, math.nan, "SECRET", ["good", "meh"], None):
        with pytest.raises(DprlhfError, match="none of the labels bad, meh, good") as caught:
            task.number(label)
        assert "SECRET" not in str(caught.value)


VALUE_BIASES = recipe.Adapter(
    type="peft", peft={"peft_type": "LORA", "lora_bias": True, "target_modules": ["value"]}
)


def stage_of(kind: Any, model: str, folder: Path, **changes: Any) -> Any:
    return stages.stage_of(kind, model, **{"rounds": 2, "output_dir": str(folder), **changes})


def sft(model: str, folder: Path, **changes: Any) -> recipe.SFTRecipe:
    fixed = {"optimizer": {"learning_rate": 0.05}, "rounds": 4}
    return stage_of(recipe.SFTRecipe, model, folder, **fixed | changes)


def test_the_bound_on_a_rounds_users_is_the_plans(model, tmp_path, monkeypatch):
    """With a bound of its own, how many users a round has could end a run."""
    given: list[int] = []

    def summed(*arguments: Any, **named: Any) -> Any:
        given.append(named["most_users"])
        return clipped_sum(*arguments, **named)

    monkeypatch.setattr("dprlhf.training.supervised.clipped_sum", summed)
    made = dprlhf.train_stage(sft(model, tmp_path / "run"), data=people(0, 40), quiet=True)
    assert given == [made.plan.users] * made.plan.rounds


def test_a_document_that_cannot_be_encoded_stops_nobody(model, tmp_path, monkeypatch):
    from dprlhf.training import tasks

    def picky(policy: Any, prompt: Any, completions: Any, row: Any) -> Any:
        if completions == [" zzzz"]:
            raise ValueError(completions)
        return split_row(policy, prompt, completions, row)

    monkeypatch.setattr(tasks, "split_row", picky)
    rows = people(0, 42)
    rows[40]["completion"], rows[41]["completion"] = " zzzz", None  # type: ignore[assignment]
    rows[41]["user"] = "u0"  # who has another row
    data = {"path": "in-memory", "user_column": "user", "max_prompts_per_user": 2}
    stage = sft(model, tmp_path / "run", data={**data, "max_completion_tokens": 8})
    dprlhf.train_stage(stage, data=rows, quiet=True)
    told = (tmp_path / "run/secret/operator.txt").read_text().splitlines()
    assert {line.partition(":")[0] for line in told if line.startswith("row ")} == {
        "row 41 is left out", "row 42 is left out",
    }  # fmt: skip
    lines = (tmp_path / "run/secret/telemetry-0.jsonl").read_text().splitlines()
    assert sum(json.loads(line)["users_not_readable"] or 0 for line in lines) == 1


def test_the_rehearsal_of_the_end_leaves_nothing(model, tmp_path, monkeypatch):
    seen = []

    def rehearsed(stage: Any, prepared: Any, beside: Path | None) -> None:
        assert beside == tmp_path / "run"  # what is above it may not be written
        before = prepared.policy.state()
        with monkeypatch.context() as patch:
            patch.setattr(stage, "rehearse", lambda *_: seen.append(prepared.policy.state()))
            rehearse_end(stage, prepared, beside)
        after = prepared.policy.state()
        assert all(torch.equal(before[name], after[name]) for name in before)
        assert not any(torch.equal(before[name], seen[0][name]) for name in before)

    monkeypatch.setattr("dprlhf.training.build.rehearse_end", rehearsed)
    (tmp_path / "run").mkdir()
    dprlhf.train_stage(sft(model, tmp_path / "run"), data=people(0, 40), quiet=True)
    assert seen
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


@pytest.mark.slow
def test_a_pipeline_states_one_total(model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    first = dprlhf.train_stage(sft(model, Path("one")), data=people(0, 40), quiet=True)
    assert AutoModelForCausalLM.from_pretrained(first.folder.model).num_parameters() > 0
    assert len([e for e in read_ledger(first.folder.ledger) if e.kind == "charge"]) == 4

    second = stage_of(
        recipe.RewardRecipe, model, Path("two"), privacy={"epsilon": 4.0}, rounds=4,
        data={"path": "in-memory", "user_column": "user", "max_tokens": 16},
        previous=[{"run": "one", "users": "disjoint"}],
    )  # fmt: skip
    with pytest.raises(DprlhfError, match="one and this run are declared to have no users") as bad:
        dprlhf.train_stage(second, data=preferences(39, 40), quiet=True)
    assert "u39" not in str(bad.value)
    assert not Path("two").exists()
    two = dprlhf.train_stage(second, data=preferences(40, 40), quiet=True)
    card = json.loads(two.folder.privacy.read_text())
    one_epsilon = first.plan.guarantee.epsilon
    assert card["total"]["epsilon"] == pytest.approx(one_epsilon)  # parallel: the dearer stage
    head = AutoModelForSequenceClassification.from_pretrained(two.folder.model).score.weight
    assert head.abs().sum() > 0
    reward = ClassifierReward(str(two.folder.model))
    assert len(reward(["it was"], [" aaaa"])) == 1

    rl: dict[str, Any] = {
        "model": "one/model", "prompts": [{"user": f"u{i}", "prompt": "it was"} for i in range(80)],
        "data__user_column": "user", "rewards": [{"classifier": "two/model"}], "epsilon": 4.0,
        "rounds": 4, "policy__adapter": ADAPTER, "rollout__max_new_tokens": 4, "quiet": True,
    }  # fmt: skip
    with pytest.raises(DprlhfError, match="'one/model' was tuned by a private run"):
        dprlhf.train(**rl, output_dir="three")
    with pytest.raises(DprlhfError, match=r"rewards\.0\.classifier 'two/model' was tuned"):
        dprlhf.train(**rl, previous=[{"run": "one"}], output_dir="three")
    both = [{"run": "one"}, {"run": "two"}]
    rows = {**rl, "model": model, "data__user_column": None, "previous": both[1:]}
    with pytest.raises(DprlhfError, match="two protects users by the column 'user', this run rows"):
        dprlhf.train(**rows, output_dir="three")
    three = dprlhf.train(**rl, previous=both, output_dir="three")
    terms = read_ledger(three.folder.ledger)[0].body
    assert [r["name"] for r in terms["previous"]] == ["one", "two"]
    whole = json.loads(three.folder.privacy.read_text())["total"]
    # u0 .. u39 are in one and three, u40 .. u79 in two and three.
    assert one_epsilon < whole["epsilon"] < one_epsilon + 4
    records, cost = total_of_runs([Path("three")])
    assert cost.epsilon == pytest.approx(whole["epsilon"])
    assert {r.name for r in records} == {"one", "two", "three"}
    again, same = total_of_runs([Path("one"), Path("two"), Path("three")])
    assert (len(again), same.epsilon) == (3, cost.epsilon)
    assert "In total" in (three.folder.policy / "README.md").read_text()
    with pytest.raises(DprlhfError, match="declared to have no users in common"):
        total_of_runs([Path("one"), Path("three")], disjoint=True)
    assert records_of(Path("two"))[0].disjoint == [records_of(Path("one"))[0].run]


@pytest.mark.slow
def test_a_dry_run_times_public_rows_only(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = stage_of(
        recipe.RewardRecipe, model, Path("run"), rounds=4,
        data={
            "path": "in-memory", "user_column": "user", "max_tokens": 16, "max_prompts_per_user": 1,
        },
        evaluation={"data": {"path": "in-memory"}, "prompts": 6},
        privacy={"epsilon": 4.0, "tuning_runs": 1},
    )  # fmt: skip
    encoded: list[Any] = []
    real = Pairs.encode

    def spied(self: Pairs, policy: CausalLMPolicy, prompts: Prompts) -> Responses:
        encoded.extend(prompts.prompts)
        return real(self, policy, prompts)

    monkeypatch.setattr(Pairs, "encode", spied)
    public = [{"prompt": f"p{i}", "chosen": " aaaa", "rejected": " zzz"} for i in range(8)]
    plan = dry_run_stage(spec, preferences(0, 40), public)
    made_up = [str(row.prompts[0]) for row in made_up_rows(*FORM)]
    assert set(encoded) == {f"p{i}" for i in range(6)} | set(made_up)
    # 4 rounds of 10 users; a forward pass is about a third of a step, twice over 6 rows.
    assert plan["estimated_seconds"] == pytest.approx(plan["seconds_a_row"] * (40 + 4))
    assert plan["epsilon"] <= 4 < plan["total_epsilon"]
    shown = explain(plan)
    assert "in total             epsilon = " in shown
    assert "time for a row" in shown
    assert "rows                 at most " in shown


def test_a_baseline_takes_every_later_guarantee_away(model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    stage = sft(model, Path("free"), privacy={"epsilon": float("inf")}, rounds=2)
    dprlhf.train_stage(stage, data=people(0, 20), quiet=True)
    with pytest.raises(DprlhfError, match="free has no privacy, so no epsilon can be stated"):
        dprlhf.train_stage(
            sft("free/model", Path("next"), previous=[{"run": "free"}]),
            data=people(0, 20),
            quiet=True,
        )
    assert total_of_runs([Path("free")])[1].epsilon == float("inf")


@pytest.mark.parametrize(
    ("kind", "adapter", "message"),
    [
        ("llama", {"type": "peft", "peft": {"peft_type": "LORA", "lora_bias": True}}, "no bias"),
        ("gpt2", {"type": "lora", "target_modules": ["wte"]}, "computes something else"),
    ],
)
def test_an_adapter_that_cannot_be_merged_is_refused_before_anybody_is_charged(
    tmp_path: Path, kind: tiny.Kind, adapter: dict[str, Any], message: str
) -> None:
    """The next stage starts from the merged model; Llama's projections have no biases."""
    model = str(tiny.save(tmp_path / "model", kind))
    policy = {"model_name_or_path": model, "adapter": adapter}
    with pytest.raises(DprlhfError, match=message):
        dprlhf.train_stage(
            sft(model, tmp_path / "run", policy=policy), data=people(0, 40), quiet=True
        )
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_the_commands(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("docs.jsonl").write_text("".join(json.dumps(d) + "\n" for d in people(0, 20)))
    Path("sft.yaml").write_text(
        f"policy: {{model_name_or_path: {model}, adapter: {json.dumps(ADAPTER)}}}\n"
        "data: {path: docs.jsonl, user_column: user, max_completion_tokens: 8}\n"
        "privacy: {epsilon: 8}\nrounds: 2\n"
    )  # the command implies the stage
    runner = CliRunner()
    held = sorted(Path().rglob("*"))
    alone = runner.invoke(app, ["sft", "sft.yaml", "--json"])
    assert "--json prints the plan of --dry-run" in str(alone.exception)
    ahead = runner.invoke(app, ["sft", "sft.yaml", "--dry-run", "--json"])
    plan = json.loads(ahead.output.splitlines()[-1])
    assert 7.9 < plan["epsilon"] <= 8
    assert (plan["users"], plan["users_a_round"], plan["seconds_a_row"]) == (20, 10, None)
    assert sorted(Path().rglob("*")) == held  # nothing was written
    done = runner.invoke(app, ["sft", "sft.yaml", "update.batch_size=8", "--output-dir", "one"])
    assert done.exit_code == 0, done.output
    told = json.loads(runner.invoke(app, ["privacy", "total", "one", "--json"]).output)
    assert told["by_run"][0]["epsilon"] == told["epsilon"] <= 8
    table = runner.invoke(app, ["privacy", "total", "one"]).output.splitlines()
    assert told["epsilon"] <= float(table[1].split()[2]) < told["epsilon"] * 1.01
    assert runner.invoke(app, ["resume", "one"]).exit_code == 0


def test_an_end_that_the_tokenizer_adds_is_learnt_behind_the_completion_alone() -> None:
    trained = wide_policy(0.1)
    plain, inner = trained.tokenizer, trained.tokenizer.backend_tokenizer
    start, end, *texts = (plain(text)["input_ids"] for text in ("!", "<eos>", "hi", "yo", "no"))
    inner.post_processor = TemplateProcessing(
        single="! $A <eos>", special_tokens=[("!", start[0]), ("<eos>", end[0])]
    )
    assert plain("hi")["input_ids"] == start + texts[0] + end
    rows = [{"prompt": "hi", "completion": "yo", "chosen": "yo", "rejected": "no"}]
    limits = {"path": "x", "max_prompt_tokens": 6, "max_completion_tokens": 6}
    documents, pairs = recipe.Documents(**limits), recipe.PreferencePairs(**limits)
    for encoded in (
        NextTokens(documents).encode(trained, examples(rows, documents)),
        encode_pairs(pairs, trained, examples(rows, pairs)),
    ):
        read = [t[m.bool()].tolist() for t, m in zip(encoded.tokens, encoded.mask, strict=True)]
        assert read == [start + texts[0] + after + end for after in texts[1:]][: len(read)]
    assert trained.encode(["hi", "i" * 9], 3) == [start + texts[0], texts[0][1:] * 3]
    assert trained.encode([""], 3) == [start]
    assert classifier_tokens(plain, ["hi"], ["hi"], whole=False, max_tokens=9) == [
        start + texts[0] + end
    ]
    inner.normalizer = Replace("a", "")  # an alphabet without it, as of proteins
    vars(trained).pop("_added_behind")
    assert trained.encode(["hi"], 6) == [start + texts[0]]


@pytest.mark.parametrize(
    ("labels", "given", "learnt"),
    [
        (["1", "0"], [1, 0, 1.0], ["1", "0", "1"]),
        (["-1", "0", "1"], [0, 1, -1], ["0", "1", "-1"]),
        (["0.5", "1.0"], [0.5, 1], ["0.5", "1.0"]),
        (["true", "false"], [True, False, "true"], ["true", "false", "true"]),
        (["no", "yes"], [0, 1, True, False], ["no", "yes", "yes", "no"]),
        (["no", "yes"], ["0", " 1", "true", "FALSE"], ["no", "yes", "yes", "no"]),  # a stray word
        (["1", "0"], ["1", "0", "1.0"], ["1", "0", "1"]),
    ],
)
def test_a_number_that_is_the_name_of_a_label_is_no_index(labels, given, learnt):
    task = Labels(recipe.Preferences(path="x", label_column="label"), labels)
    assert [labels[task.number(label)] for label in given] == learnt


def test_a_users_stray_word_leaves_the_others_labels_as_they_are(tmp_path: Path) -> None:
    """A CSV column is then text; nobody else's row says something else, and the row is counted."""
    data = recipe.Preferences(path=str(tmp_path / "a.csv"), label_column="label")
    task = Labels(data, ["bad", "good"])

    def read(labels: list[str]) -> tuple[list[int], Any]:
        rows = "".join(f"talk {n},{label}\n" for n, label in enumerate(labels))
        Path(data.path).write_text(f"prompt,label\n{rows}")
        users = Users(load_rows(data), data)

        def cut(some: Prompts) -> list[bool]:
            for label in some.columns["label"]:
                task.number(label)
            return [False] * len(some)

        some = users.readable(np.arange(users.count), cut)
        return [task.number(x) for x in some.columns["label"]], open_private(users.left_out(cut))

    assert read(["0", "1", "1"]) == ([0, 1, 1], {})
    assert read(["0", "1", "spam"]) == ([0, 1], {"unreadable": 1})
    assert read(["0", "1", ""]) == ([0, 1], {"missing": 1})
    with pytest.raises(DprlhfError, match="none of the labels"):
        task.lengths(None, Prompts(["a"], np.zeros(1), np.zeros(1), {"label": ["spam"]}))  # type: ignore[arg-type]


def test_a_row_of_another_kind_is_no_reason_to_ask_for_a_chat_template(tmp_path: Path) -> None:
    data = recipe.Documents(path=str(tmp_path / "a.jsonl"), completion_column=None)
    task, trained = NextTokens(data), wide_policy(0.3)
    for odd in (5, [{"role": "user", "content": "hi"}]):
        rows = [{"prompt": "one day"}, {"prompt": odd}]
        Path(data.path).write_text("".join(json.dumps(row) + "\n" for row in rows))
        users = Users(load_rows(data), data)
        check_template(data, users, trained)
        read = users.readable(np.arange(2), lambda rows: task.encode(trained, rows)).prompts
        assert read[0] == "one day"
        assert len(read) == (2 if odd == 5 else 1)
    Path(data.path).write_text(json.dumps(rows[1]))
    with pytest.raises(DprlhfError, match="holds conversations, and the policy's"):
        check_template(data, Users(load_rows(data), data), trained)


@pytest.mark.parametrize("suffix", ["csv", "jsonl"])
def test_completions_that_are_numbers_are_texts(suffix: str, tmp_path: Path) -> None:
    """Answers to sums, say; a word in another user's row changes nothing."""
    data = recipe.Documents(path=str(tmp_path / f"a.{suffix}"), max_completion_tokens=4)
    task, trained, learnt = NextTokens(data), wide_policy(0.3), []
    for other in ("5", "five"):
        if suffix == "csv":
            Path(data.path).write_text(f"prompt,completion\n1+1=,2\n2+3=,{other}\n")
        else:
            rows = [{"prompt": "1+1=", "completion": 2},
                    {"prompt": "2+3=", "completion": 5 if other == "5" else other}]  # fmt: skip
            Path(data.path).write_text("".join(json.dumps(row) + "\n" for row in rows))
        users = Users(load_rows(data), data)
        some = users.readable(np.arange(2), lambda rows: task.encode(trained, rows))
        assert some.columns["completion"] == ["2", other]
        learnt.append(task.encode(trained, some).tokens[0].tolist())
    assert learnt[0] == learnt[1]


def test_where_some_label_is_a_number_no_number_is_an_index() -> None:
    task = Labels(recipe.Preferences(path="x", label_column="label"), ["1", "2", "none"])
    for label in (0, 3, 1.5, math.nan):
        with pytest.raises(DprlhfError, match=r"a row has none of the labels 1, 2, none$"):
            task.number(label)


def refused(spec: recipe.AnyRecipe, match: str, **given: Any) -> str:
    """Check that a stage is refused before it makes a folder, and return the message."""
    with pytest.raises(DprlhfError, match=match) as caught:
        dprlhf.train_stage(spec, quiet=True, **given)
    assert not Path(spec.output_dir or "").exists()
    assert len(str(caught.value).splitlines()) == 1
    return str(caught.value)


def said(text: str) -> list[dict[str, str]]:
    return [{"role": "assistant", "content": text}]


def test_a_padding_token_without_an_embedding_is_replaced_for_reward_models(tmp_path: Path) -> None:
    made = tiny.tokenizer()
    made.add_special_tokens({"pad_token": "[PAD]"})
    made.save_pretrained(tiny.save(tmp_path / "base"))
    reward = load_reward_model(recipe.Policy(model_name_or_path=str(tmp_path / "base")), None)
    assert reward.tokenizer.pad_token == made.eos_token


@pytest.mark.parametrize("kind", ["sft", "dpo"])
def test_a_tokenizer_without_an_end_is_refused(kind: str, tmp_path: Path) -> None:
    """No row could be encoded, so that the run would spend all of its budget on noise."""
    base, inner = str(tiny.save(tmp_path / "base")), tiny.tokenizer().backend_tokenizer
    made = PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<eos>", pad_token="<eos>")
    made.save_pretrained(base)
    make, rows = {
        "sft": (recipe.SFTRecipe, people), "dpo": (recipe.DPORecipe, preferences),
    }[kind]  # fmt: skip
    said = "^data: no row can be read.*no end-of-sequence token"
    refused(stage_of(make, base, tmp_path / "run"), said, data=rows(0, 8))


def test_a_made_up_row_has_the_form_of_the_users_rows() -> None:
    """A form of which a made-up row is refused although the users' rows are read stops a run."""
    part = pa.list_(pa.struct([("type", pa.string()), ("text", pa.string())]))
    talk = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))
    parts = pa.list_(pa.struct([("role", pa.string()), ("content", part)]))
    documents = recipe.Documents(path="x")
    [row] = made_up_rows(documents, pa.schema([("prompt", pa.int64()), ("completion", parts)]), {})
    assert isinstance(row.prompts[0], str)
    [[message]] = row.columns["completion"]
    assert (message["role"], message["content"][0]["type"]) == ("assistant", "text")
    whole = recipe.Documents(path="x", completion_column=None)
    [row] = made_up_rows(whole, pa.schema([("prompt", talk)]), {})
    assert [message["role"] for message in row.prompts[0]] == ["user", "assistant"]
    labelled = recipe.Preferences(path="x", label_column="label")
    [row] = made_up_rows(
        labelled, pa.schema([("prompt", pa.string()), ("label", pa.int64())]), {"label": "2"}
    )
    assert row.columns == {"label": ["2"]}
    several = pa.schema([("prompt", pa.json_()), ("completion", pa.json_())])
    made = made_up_rows(documents, several, {})
    forms = [(row.prompts[0], row.columns["completion"][0]) for row in made]
    assert {tuple(isinstance(x, str) for x in form) for form in forms} == {
        (a, b) for a in (True, False) for b in (True, False)
    }


def test_a_public_row_that_cannot_be_read_is_found_before_the_first_charge(model, tmp_path):
    label = {"path": "in-memory", "label_column": "label"}
    spec = stage_of(
        recipe.RewardRecipe, model, tmp_path / "run", labels=["bad", "good"], data=label,
        evaluation={"data": {"path": "in-memory"}, "prompts": 64},
    )  # fmt: skip
    rows = [{"prompt": f"it was {i}", "label": "good"} for i in range(8)]
    public = [{"prompt": f"pub {i}", "label": "bad"} for i in range(40)]
    odd = [*public, {"prompt": "odd", "label": "zanzibar"}]
    told = refused(
        spec, r"^evaluation.data.label_column 'label'.*\(row 41\)$", data=rows, evaluation_data=odd
    )
    assert "zanzibar" not in told
    documents = sft(
        model, tmp_path / "run", evaluation={"data": {"path": "in-memory"}, "declared_public": True}
    )
    for lacks in ("prompt", "completion"):
        public = [*people(90, 5), {**people(99, 1)[0], lacks: None}]
        refused(
            documents, r"^evaluation.data: .*\(row 6\)$", data=people(0, 8), evaluation_data=public
        )


def learnt_of(task: Task, trained: CausalLMPolicy, rows: Prompts) -> str:
    encoded = task.encode(trained, rows)
    learnt = encoded.tokens[0, -encoded.response_mask.shape[1] :][encoded.response_mask[0].bool()]
    return str(trained.tokenizer.decode(learnt))


def test_the_start_that_a_template_writes_is_not_learnt_after_itself() -> None:
    trained = wide_policy(0.1)
    trained.tokenizer.bos_token = "<eos>"
    trained.tokenizer.chat_template = (
        "{{ bos_token }}{% for m in messages %}<{{ m.role[0] }}>{{ m.content }}{% endfor %}"
    )
    whole = recipe.Documents(path="x", completion_column=None, max_completion_tokens=9)
    talk = [{"prompt": [{"role": "user", "content": "hi"}, *said("o")]}]
    rows = examples(talk, whole)
    assert learnt_of(NextTokens(whole), trained, rows) == "<u>hi<a>o"
    encoded = NextTokens(whole).encode(trained, rows)
    seen = encoded.tokens[0][encoded.mask[0].bool()].tolist()
    assert seen[:10] == trained.render(talk[0]["prompt"])[:10]
    of_row = {"max_prompt_tokens": [1], "max_completion_tokens": [10]}  # the end is cut
    assert NextTokens(whole).lengths(trained, rows) == of_row
    # A short turn: the start, which is the end token as well, is not taken for an end.
    short = recipe.Documents(path="x", completion_column=None)
    trained.tokenizer.chat_template = "{{ bos_token }}{{ messages[0].content }}"
    rows = examples([{"prompt": [{"role": "user", "content": "o"}]}], short)
    assert learnt_of(NextTokens(short), trained, rows) == "o<eos>"
    # After a prompt, the same token is an answer's own.
    data = recipe.Documents(path="x")
    rows = examples([{"prompt": "hi", "completion": "<eos>o"}], data)
    assert learnt_of(NextTokens(data), trained, rows) == "<eos>o<eos>"


def of_length(prompt: int, completion: int) -> dict[str, Any]:
    """Return a row of any stage with so many tokens, each of a byte."""
    learnt = "c" * completion
    answers = {"completion": learnt, "chosen": learnt, "rejected": "no"}
    return {"prompt": "p" * prompt, **answers, "label": True}


@pytest.mark.parametrize(
    ("kind", "task"),
    [
        (recipe.SFTRecipe, lambda spec: NextTokens(spec.data)),
        (recipe.FeedbackRecipe, Reactions),
        (recipe.DPORecipe, PreferredAnswers),
    ],
)
@pytest.mark.parametrize(
    ("parts", "given", "room", "expected"),
    [
        ((20, 40), {}, math.inf, (32, 48)),
        ((20, 47), {}, math.inf, (32, 48)),  # with its end
        ((20, 48), {}, math.inf, (32, 64)),
        ((3, 3), {"max_prompt_tokens": 5}, math.inf, (5, 16)),
        ((3, 3), {"max_completion_tokens": 5}, math.inf, (16, 5)),
        ((90, 90), {}, 100, (50, 50)),
        ((20, 90), {}, 100, (32, 68)),
        ((90, 20), {}, 100, (68, 32)),
        ((90, 90), {"max_prompt_tokens": 80}, 100, (80, 20)),
        ((90, 90), {"max_completion_tokens": 99}, 100, (1, 99)),
        (None, {}, math.inf, (64, 64)),
    ],
)
def test_the_lengths_that_rows_keep_follow_from_public_ones(
    kind, task, parts, given, room, expected
):
    spec = stages.stage_of(kind, data={"path": "in-memory", **given})
    trained = wide_policy(0.1)
    trained.room = room
    public = None
    if parts is not None:  # one of two hundred is longer
        rows = [*[of_length(*parts)] * 199, of_length(500, 500)]
        public = Users(rows_from(rows, "prompt"), spec.data)
    found = with_lengths(spec, task(spec), trained, public).data
    assert (found.max_prompt_tokens, found.max_completion_tokens) == expected


@pytest.mark.parametrize(("labels", "expected"), [(["a", "b"], 48), (None, 64)])
def test_a_reward_models_texts_are_as_long_as_public_ones(encoder, labels, expected) -> None:
    data = recipe.Preferences(path="x", label_column="label" if labels else None)
    given = {"data": data.model_dump(exclude_unset=True), "labels": labels}
    spec = stages.stage_of(recipe.RewardRecipe, encoder, **given)
    trained = load_reward_model(spec.policy.model_copy(update={"adapter": VALUE_BIASES}), labels)
    row = {"prompt": "t" * 38, "label": "a", "chosen": "c" * 20, "rejected": "no"}
    task = Pairs(spec.data) if labels is None else Labels(spec.data, labels)
    public = Users(rows_from([row] * 20, "prompt"), spec.data)
    assert with_lengths(spec, task, trained, public).data.max_tokens == expected
    stated = spec.model_copy(update={"data": data.model_copy(update={"max_tokens": 7})})
    assert with_lengths(stated, task, trained, public).data.max_tokens == 7


def test_a_run_keeps_the_lengths_that_public_rows_show(model, tmp_path, monkeypatch) -> None:
    """Prompts of 70 tokens were cut to 64."""
    widths: list[Any] = []

    def packed(*given: Any) -> Responses:
        widths.append(given[-2:])
        return pack(*given)

    monkeypatch.setattr("dprlhf.training.tasks.pack", packed)
    public = [{"prompt": "p" * 70, "completion": "c" * i} for i in range(1, 9)]
    spec = sft(
        model, tmp_path / "run", evaluation={"data": {"path": "in-memory"}},
        data={"path": "in-memory", "user_column": "user"},
    )  # fmt: skip
    rows = [{**row, "prompt": "q" * 70} for row in people(0, 30)]
    result = dprlhf.train_stage(spec, data=rows, evaluation_data=public, quiet=True)
    kept = yaml.safe_load(result.folder.recipe.read_text())["data"]
    assert (kept["max_completion_tokens"], kept["max_prompt_tokens"]) == (16, 80)
    assert set(widths) == {(16, 80)}
    note = (result.folder.secret / "operator.txt").read_text()
    assert "no private row is left out, unreadable or cut" in note


def test_a_tokenizer_that_warns_puts_no_text_into_a_log(model, tmp_path, monkeypatch, capfd):
    real = PreTrainedTokenizerFast.__call__

    def noisy(self: Any, text: Any = None, *rest: Any, **named: Any) -> Any:
        if "zanzibar" in str(text):
            warnings.warn(f"odd text: {text}", UserWarning, stacklevel=1)
            print(text)
        return real(self, text, *rest, **named)

    monkeypatch.setattr(PreTrainedTokenizerFast, "__call__", noisy)
    rows = [*people(0, 8), {"user": "u8", "prompt": "it was", "completion": " zanzibar"}]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        dprlhf.train_stage(sft(model, tmp_path / "run", rounds=2), data=rows, quiet=True)
    assert not any("zanzibar" in str(one.message) for one in caught)
    assert "zanzibar" not in "".join(capfd.readouterr())
