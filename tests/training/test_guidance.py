"""Runs whose releases are in a subspace of public gradients: where it comes from, and resuming."""

import copy
import itertools
import json
import re
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import dprlhf
from dprlhf import DprlhfError, recipe
from dprlhf.data.in_memory import rows_of
from dprlhf.data.public import Guides, in_memory_prompts
from dprlhf.data.users import Users
from dprlhf.errors import InterruptedRunError
from dprlhf.privacy.gate import Gate
from dprlhf.privacy.ledger import read_ledger
from dprlhf.recipe import STAGES, make_recipe
from dprlhf.training import feedback, guidance
from dprlhf.training.timing import rows_a_round
from dprlhf.updates.public_gradients import likelihood_gradients
from helpers.recipes import recipe_settings
from helpers.runs import ADAPTER, save_sharp, train
from helpers.stages import logs, people, preferences, stage_of_logs

USERS = [f"user {i} says" for i in range(40)]
PUBLIC = [f"public {'words ' * (i % 3)}{i}" for i in range(30)]
FILES = ("policy.safetensors", "optimizer.safetensors", "subspace.safetensors")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_sharp(tmp_path_factory.mktemp("model"))


def spread(prompts: list[str], completions: list[str]) -> list[float]:
    """A reward in which the responses to nearly every prompt differ."""
    return [sum(text.encode()) % 17 / 4 - 2 for text in completions]


def settings(**changes: Any) -> dict[str, Any]:
    subspace = {"rank": 3, "prompts": 12, **changes.pop("subspace", {})}
    return {
        "epsilon": 8.0, "rounds": 3, "learning_rate": 0.05, "prompts": USERS,
        "data__max_prompt_tokens": 24, "reward": spread, "evaluation_prompts": PUBLIC,
        "evaluation__prompts": 6, "rollout__max_new_tokens": 4, "update__subspace": subspace,
        **changes,
    }  # fmt: skip


def subspace_in(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "checkpoint/subspace.safetensors")


@pytest.mark.slow
def test_a_resumed_run_equals_an_unbroken_one(model, tmp_path, monkeypatch):
    values = settings(rounds=3, subspace={"refresh": 2, "target_kl": 0.5})
    train(model, tmp_path / "whole", **values)
    release = Gate.release
    for stop in (2, 3):

        def crash(self: Any, t: int, bounded: Any, at: int = stop) -> Any:
            if t == at:
                raise MemoryError("crash")
            return release(self, t, bounded)

        folder = tmp_path / f"broken-{stop}"
        with monkeypatch.context() as patch:
            patch.setattr("dprlhf.privacy.gate.Gate.release", crash)
            with pytest.raises(DprlhfError, match="resume"):
                train(model, folder, **values)
        dprlhf.resume(folder, prompts=USERS, reward=spread, evaluation_prompts=PUBLIC, quiet=True)
        for file in FILES:
            whole, again = (
                load_file(f / "checkpoint" / file) for f in (tmp_path / "whole", folder)
            )
            assert all(torch.equal(whole[name], again[name]) for name in whole), (stop, file)


@pytest.mark.slow
def test_a_subspace_comes_from_public_prompts_alone(model: str, tmp_path: Path) -> None:
    """With other users the first round's subspace is the same, bit for bit."""
    found = []
    for name, prompts in (("one", USERS), ("other", [f"somebody else {i}" for i in range(40)])):
        seen: list[dict[str, torch.Tensor]] = []

        def look(metrics: dict[str, Any], seen: Any = seen, folder: Path = tmp_path / name) -> None:
            seen.append(subspace_in(folder))

        train(model, tmp_path / name, **settings(prompts=prompts), callbacks=[look])
        found.append(seen)
    first, second = (seen[0] for seen in found)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not torch.equal(found[0][-1]["directions"], found[1][-1]["directions"])  # the policies'


def test_public_rows_need_not_know_the_sign_that_only_users_know() -> None:
    made = make_recipe(
        recipe_settings(
            rewards=[
                {"function": "module:score", "times_column": name} for name in ("wants", "mood")
            ]
        )
    )
    prompts = in_memory_prompts(["one", "two"])
    prompts.columns["mood"] = [-1, 1]
    assert guidance.with_factors(prompts, made).columns == {"mood": [-1, 1], "wants": [1.0, 1.0]}


def test_public_prompts_without_a_gradient_are_refused_before_a_charge(model, tmp_path):
    def alike(prompts: list[str], completions: list[str]) -> list[float]:
        return [1.0 if prompt.startswith("public") else float(len(text)) for prompt, text in
                zip(prompts, completions, strict=True)]  # fmt: skip

    with pytest.raises(DprlhfError, match="no public prompt has a gradient"):
        train(model, tmp_path / "run", **settings(reward=alike))
    cut = settings(rollout__mask_truncated=True, rollout__max_new_tokens=1)
    with pytest.raises(DprlhfError, match=r"do not end \(rollout.mask_truncated\)"):
        train(model, tmp_path / "cut", **cut)
    ledger = read_ledger(tmp_path / "run/ledger.jsonl")
    assert [e for e in ledger if e.kind == "charge"] == []


@pytest.mark.slow
def test_no_row_of_a_user_guides_a_run(model: str, tmp_path: Path) -> None:
    file = tmp_path / "public.jsonl"
    for last, message in (
        (USERS[3], "update.subspace.data: some of its rows are users'"),
        ("", ""),
    ):
        rows = [{"prompt": f"guest {i}"} for i in range(8)] + [{"prompt": last}]
        file.write_text("\n".join(map(json.dumps, rows)))
        values = settings(subspace={"data": {"path": str(file)}})
        if message:
            with pytest.raises(DprlhfError, match=message):
                train(model, tmp_path / "run", **values)
            assert not (tmp_path / "run").exists()
        else:
            train(model, tmp_path / "run", **values)


@pytest.mark.slow
def test_directions_can_leave_the_perplexity_as_it_is(model, tmp_path, monkeypatch):
    found: list[torch.Tensor] = []

    def kept(*args: Any, **named: Any) -> torch.Tensor:
        found.append(likelihood_gradients(*args, **named))
        return found[-1]

    monkeypatch.setattr(guidance, "likelihood_gradients", kept)
    seen: dict[bool, torch.Tensor] = {}
    for keep in (False, True):
        folder = tmp_path / str(keep)

        def look(_: dict[str, Any], folder: Path = folder, which: bool = keep) -> None:
            seen.setdefault(which, subspace_in(folder)["directions"].double())

        chosen = {"mean_first": True, "keep_perplexity": keep, "refresh": 2}
        train(model, folder, **settings(rounds=2, subspace=chosen), callbacks=[look])
    assert len(found) == 1  # without the option there is no other pass, with it one a refresh
    mean = found[0].double().mean(0)
    cosine = {keep: (d @ mean).abs().max() / mean.norm() for keep, d in seen.items()}
    assert cosine[True] < 1e-6
    assert cosine[False] > 1e-3


@pytest.mark.slow
def test_the_mean_public_gradient_can_be_the_one_direction(model: str, tmp_path: Path) -> None:
    seen: dict[bool, torch.Tensor] = {}
    for mean_first in (False, True):
        folder = tmp_path / str(mean_first)

        def look(_: dict[str, Any], folder: Path = folder, which: bool = mean_first) -> None:
            seen.setdefault(which, subspace_in(folder)["directions"])

        given = settings(rounds=1, subspace={"rank": 1, "mean_first": mean_first})
        train(model, folder, **given, callbacks=[look])
    along = (seen[False].double() * seen[True].double()).sum().abs()
    assert along < 0.999


def divergences(policy: Any, states: list[dict[str, torch.Tensor]]) -> list[float]:
    """Return KL(π_t ‖ π_t+1) in nats a response of four tokens, all logits, on fresh draws."""
    end = policy.tokenizer.eos_token_id
    found = []
    torch.manual_seed(0)
    for before, after in itertools.pairwise(states):
        both = [copy.deepcopy(policy) for _ in range(2)]
        for one, state in zip(both, (before, after), strict=True):
            one.load_state(state)
        total = 0.0
        for text in PUBLIC[6:]:
            tokens = torch.tensor([policy.tokenizer(text)["input_ids"]] * 20)
            running = torch.ones(len(tokens), dtype=torch.bool)
            for _ in range(4):
                with torch.no_grad():
                    first, second = (
                        one.model(input_ids=tokens).logits[:, -1].double().log_softmax(1)
                        for one in both
                    )
                each = (first.exp() * (first - second)).sum(1)
                total += float(each[running].sum()) / len(tokens)
                drawn = torch.multinomial(first.exp(), 1)
                tokens = torch.cat([tokens, drawn], 1)
                running &= drawn[:, 0] != end
        found.append(total / len(PUBLIC[6:]))
    return found


@pytest.mark.slow
def test_a_round_moves_the_policy_by_its_share_of_the_target(model, tmp_path, monkeypatch):
    """Wherever the optimizer's step is too long; a step that is not stays as it is."""
    kept: dict[Any, list[dict[str, torch.Tensor]]] = {}
    # The noise follows from the recipe: runs without the limit have the same one.
    for target, limited in itertools.product((0.06, 1e9), (True, False)):
        folder, states = tmp_path / f"{target}-{limited}", kept.setdefault((target, limited), [])

        def look(_: dict[str, Any], folder: Path = folder, to: Any = states) -> None:
            to.append(load_file(folder / "checkpoint/policy.safetensors"))

        # Without a limit such a rate leads where a rounding decides whether weights stay finite.
        rate = 1e4 if limited and target == 0.06 else 10.0
        given = settings(
            subspace={"target_kl": target}, optimizer__name="normalized-sgd", learning_rate=rate
        )
        with monkeypatch.context() as patch:
            if not limited:
                patch.setattr(guidance.Guidance, "trust_region", lambda *_: nullcontext())
            policy = train(model, folder, **given, callbacks=[look]).policy
    for one, other in zip(kept[1e9, True], kept[1e9, False], strict=True):
        assert all(torch.equal(one[name], other[name]) for name in one)
    share = 0.06 * 4 / 24 / 3**2  # all responses have four tokens
    found, unlimited = (divergences(policy, kept[0.06, limited]) for limited in (True, False))
    assert all(share / 2 < one < 2 * share for one in found), found
    assert min(unlimited) > 4 * share


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["private update", "feedback"])
def test_with_the_same_releases_the_policy_is_the_same_whoever_the_users_are(
    stage: str, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Directions and length of the steps are functions of public rows and releases alone."""
    monkeypatch.setattr("dprlhf.runs.folder.new_key", lambda: bytes(range(32)))
    release = Gate.release

    def of_noise(self: Any, t: int, bounded: Any) -> Any:
        return release(self, t, replace(bounded, total=torch.zeros_like(bounded.total)))

    monkeypatch.setattr("dprlhf.privacy.gate.Gate.release", of_noise)
    measured, token_logprobs = [], guidance.token_logprobs

    def counted(*given: Any) -> Any:
        measured.append(len(given))
        return token_logprobs(*given)

    monkeypatch.setattr(guidance, "token_logprobs", counted)
    policies = []
    for name in ("some", "others"):
        folder, optimizer = tmp_path / name, {"name": "normalized-sgd", "learning_rate": 2.0}
        if stage == "feedback":
            spec, rows, public = stage_settings(
                stage, model, folder, subspace={"rank": 3, "prompts": 12, "target_kl": 0.03}
            )
            spec = spec.model_copy(update={"optimizer": recipe.Optimizer(**optimizer)})
            rows = [{**row, "prompt": f"{name} {row['prompt']}"} for row in rows]
            given = {"evaluation_data": public, "quiet": True}
            policies.append(dprlhf.train_stage(spec, data=rows, **given).policy)
        else:
            users = [f"{name} {i}" for i in range(40)]
            given = settings(prompts=users, subspace={"target_kl": 0.03}, optimizer=optimizer)
            del given["learning_rate"]
            policies.append(train(model, folder, **given).policy)
    start, end = (list(policy.parameters.values()) for policy in policies)
    assert all(torch.equal(one, other) for one, other in zip(start, end, strict=True))
    assert len(measured) > 2 * 3 * 2  # steps were shortened, and measured again
    lengths = subspace_in(folder)["directions"].norm(dim=1)
    natural = bool(lengths.max() > 1.01 * lengths.min())
    assert natural == (stage != "feedback")  # where the policy wrote the public responses


@pytest.mark.slow
def test_public_prompts_are_taken_in_parts_of_which_outputs_can_be_kept(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Room for 6 of 24 responses makes four parts, for fewer or none one, and one subspace."""
    seen: dict[int, torch.Tensor] = {}
    taken: dict[int, list[Any]] = {}
    sample = guidance.sample_public
    for room in (0, 2, 6, 24):
        calls = taken.setdefault(room, [])

        def sampled(policy: Any, prompts: Any, *args: Any, to: Any = calls, **given: Any) -> Any:
            to.append((len(prompts), given["keep"]))
            return sample(policy, prompts, *args, **given)

        def fits(*args: Any, rows: float, room: int = room, **given: Any) -> str | None:
            return "outputs" if rows <= room else "input" if room else None

        monkeypatch.setattr(guidance, "sample_public", sampled)
        monkeypatch.setattr(guidance, "most_kept", fits)
        folder = tmp_path / str(room)

        def look(_: dict[str, Any], folder: Path = folder, which: int = room) -> None:
            seen[which] = subspace_in(folder)["directions"]

        chosen = {"mean_first": True, "keep_perplexity": True}
        train(model, folder, **settings(rounds=1, subspace=chosen), callbacks=[look])
    kept = "outputs"
    few = {0: [(12, None)], 2: [(12, "input")]}
    assert taken == {**few, 6: [(3, kept)] * 4, 24: [(12, kept)]}
    for room in (0, 2, 6):
        torch.testing.assert_close(seen[room], seen[24], rtol=0, atol=1e-4)


def stage_settings(stage: str, model: str, folder: Path, **update: Any) -> tuple[Any, Any, Any]:
    """Return a recipe of a supervised stage with directions, private rows, and public rows."""
    rows = {"sft": people, "dpo": preferences, "feedback": logs}.get(stage, preferences)
    values = {
        "policy": {"model_name_or_path": model, "adapter": ADAPTER},
        "data": {"path": "in-memory", "user_column": "user"},
        "update": {"subspace": {"rank": 3, "prompts": 12, "target_kl": 0.5}, **update},
        "optimizer": {"name": "normalized-sgd", "learning_rate": 0.1},
        "evaluation": {"data": {"path": "in-memory"}, "prompts": 4, "declared_public": True},
        "privacy": {"epsilon": 8.0}, "rounds": 3, "output_dir": str(folder),
    }  # fmt: skip
    public = [
        {k: v + " xyz"[: i % 4] if isinstance(v, str) else v for k, v in row.items()}
        for i, row in enumerate(rows(100, 20))
    ]
    return STAGES[stage].model_validate(values), rows(0, 40), public


@pytest.mark.slow
@pytest.mark.parametrize("stage", STAGES)
def test_a_supervised_stage_releases_coordinates_along_public_directions(
    stage: str, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its policy moves in the span of the directions alone, and a broken run goes on as it was."""
    monkeypatch.setattr("dprlhf.runs.folder.new_key", lambda: bytes(range(32)))
    lengths: list[int] = []
    release = Gate.release

    def watched(self: Any, t: int, bounded: Any) -> Any:
        lengths.append(len(bounded.total))
        return release(self, t, bounded)

    monkeypatch.setattr("dprlhf.privacy.gate.Gate.release", watched)
    spec, rows, public = stage_settings(stage, model, tmp_path / "run")
    seen: list[tuple[dict[str, torch.Tensor], torch.Tensor]] = []

    def look(_: dict[str, Any]) -> None:
        kept = load_file(tmp_path / "run/checkpoint/policy.safetensors")
        seen.append((kept, subspace_in(tmp_path / "run")["directions"]))

    given: dict[str, Any] = {"evaluation_data": public, "quiet": True}
    result = dprlhf.train_stage(spec, data=rows, callbacks=[look], **given)
    assert lengths == [3] * 3
    (first, _), (second, directions) = seen[:2]
    names = [re.sub(r"\.default|\.modules_to_save", "", n) for n in result.policy.parameters]
    move = torch.cat([(second[name] - first[name]).flatten() for name in names])
    assert move.norm() > 0.02
    assert (move - directions.T @ (directions @ move)).norm() < 1e-5
    assert any("along 3 directions" in line for line in
               json.loads((tmp_path / "run/privacy.json").read_text())["released"])  # fmt: skip

    def stop(metrics: dict[str, Any]) -> None:
        if metrics["round"] == 2:
            raise KeyboardInterrupt

    again = spec.model_copy(update={"output_dir": str(tmp_path / "again")})
    with pytest.raises(InterruptedRunError, match="resume"):
        dprlhf.train_stage(again, data=rows, callbacks=[stop], **given)
    resumed = dprlhf.resume_stage(tmp_path / "again", data=rows, **given)
    for one, other in zip(*(r.policy.parameters.values() for r in (result, resumed)), strict=True):
        assert torch.equal(one, other)


@pytest.mark.slow
def test_directions_need_no_public_feedback(model, tmp_path, monkeypatch, capfd):
    """The sign of a row's gradient, which its label decides, leaves the span as it is.

    What is printed meanwhile is in no log, where it would show when a round ended.
    """
    found, of_rows = [], feedback.weighted_gradients

    def printing(*given: Any) -> torch.Tensor:
        print("about a public row", flush=True)
        return of_rows(*given)

    monkeypatch.setattr(feedback, "weighted_gradients", printing)
    for liked in (None, True, False):
        folder = tmp_path / str(liked)
        spec, rows, public = stage_settings("feedback", model, folder)
        public = [row if liked is None else {**row, "label": liked} for row in public]

        def look(metrics: dict[str, Any], folder: Path = folder) -> None:
            if metrics["round"] == 1:
                directions = subspace_in(folder)["directions"].double()
                found.append(directions.T @ directions)

        dprlhf.train_stage(spec, data=rows, evaluation_data=public, callbacks=[look], quiet=True)
    assert (found[0] - found[1]).abs().max() < 1e-4
    assert (found[0] - found[2]).abs().max() < 1e-4
    assert "about a public row" not in "".join(capfd.readouterr())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"evaluation": None}, "update.subspace needs public rows"),
        ({"update": {"subspace": {"keep_perplexity": True}}}, "keep_perplexity is for"),
        (
            {"data": {"path": "a"}, "update": {"subspace": {"data": {"path": "a"}}}},
            "update.subspace.data names the private users",
        ),
    ],
)
def test_a_stage_refuses_what_its_directions_cannot_have(changes, message):
    given = {"update": {"subspace": {"rank": 3}}, "evaluation": {"data": {"path": "b"}}} | changes
    with pytest.raises((DprlhfError, ValueError), match=message):
        stage_of_logs("x", Path("run"), **given)


def test_an_unreadable_public_row_of_the_directions_is_refused_before_a_charge(model, tmp_path):
    spec, rows, public = stage_settings("feedback", model, tmp_path / "run")
    public[10]["label"] = None
    with pytest.raises(DprlhfError, match=r"row 11"):
        dprlhf.train_stage(spec, data=rows, evaluation_data=public, quiet=True)
    ledger = read_ledger(tmp_path / "run/ledger.jsonl") if (tmp_path / "run").exists() else []
    assert [e for e in ledger if e.kind == "charge"] == []


@pytest.mark.parametrize(("stage", "part"), [("sft", 1), ("feedback", 3 / 5)])
def test_the_estimate_counts_public_rows_of_directions_and_step_length(
    stage, part, model, tmp_path
):
    """Of a log, they are differentiated without the two forward passes of a row's weight."""
    spec, rows, _ = stage_settings(stage, model, tmp_path)
    users = Users(rows_of(spec.data, rows), spec.data)
    terms = SimpleNamespace(expected_batch_size=10.0)
    counted = []
    for changes in ({}, {"refresh": 2}, {"target_kl": 1.0}):
        update = {"subspace": {"rank": 3, "prompts": 12, **changes}}
        made = type(spec).model_validate(spec.model_dump() | {"update": update})
        counted.append(rows_a_round(made, terms, Guides(users, first=4)))
    private = 10 * spec.data.prompts_in_round
    public = [12, 6, 12 + min(32, users.count - 4)]
    assert counted == [private + part * rows for rows in public]
    assert rows_a_round(made, terms, None) == private
