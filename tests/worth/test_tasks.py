"""Who is trained on what: public runs read no private row, and pairs turn every user's wish."""

from __future__ import annotations

import json
import math
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from dprlhf.cli.app import app
from dprlhf.data.public import HELD_OUT
from dprlhf.errors import DprlhfError
from dprlhf.recipe import load_recipe
from dprlhf.worth import comparison, runs, tasks
from dprlhf.worth.comparison import Comparison, compare, in_words, results
from dprlhf.worth.pages import table, write_all
from dprlhf.worth.runs import judged_by
from dprlhf.worth.statistics import Estimated
from dprlhf.worth.tasks import EVALUATED, TASKS, TUNING_USERS, Cell, PublicPrompts, Setup, Task
from helpers.runs import save_sharp

CLONE = Path(__file__).parents[2]
REWARD = """
def score(prompts, completions, **columns):
    return [4.0 * sum(c.islower() for c in text) / max(len(text), 1) for text in completions]
"""
RECIPE = """
policy:
  model_name_or_path: {model}
  adapter: {{type: lora, rank: 4, target_modules: all-linear}}
data: {{path: {private}, prompt_column: text}}
rewards: [{{function: "{reward}:score", times_column: wants, weight: 0.25}}]
rollout: {{max_new_tokens: 6, responses: 2}}
optimizer: {{learning_rate: 0.3}}
privacy: {{epsilon: 8, partition: random-allocation, delta: 1.0e-5}}
rounds: 4
evaluation: {{data: {{path: {public}, prompt_column: text}}, prompts: 24, every: 2}}
"""
PLACES = [(task, name) for task in TASKS for name in TASKS[task].public]


def rows(count: int, who: str) -> list[dict[str, Any]]:
    return [{"text": f"{who} {i} says", "wants": 1 if i % 3 else -1} for i in range(count)]


@pytest.fixture
def setup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Setup:
    """A task with a drawn secret, whose private file does not exist."""
    clone = tmp_path / "clone"
    (clone / "recipes").mkdir(parents=True)
    (tmp_path / "reward.py").write_text(REWARD)
    public = tmp_path / "public.jsonl"
    public.write_text("".join(json.dumps(row) + "\n" for row in rows(200, "public")))
    recipe = RECIPE.format(
        model=save_sharp(tmp_path / "model"),
        private=tmp_path / "private.jsonl",
        public=public,
        reward=tmp_path / "reward.py",
    )
    (clone / "recipes" / "secret.yaml").write_text(recipe)
    made = Task(
        "A secret",
        "secret",
        160 + TUNING_USERS,
        {"reviews": PublicPrompts(str(public), "train", 30, 100, wants="praise")},
        turned=("rewards.0.weight=-0.25",),
        method="today",
    )
    monkeypatch.setitem(TASKS, "secret", made)
    settings = {"reference": {}, "today": {}}
    monkeypatch.setitem(tasks.METHODS, "smollm2", settings)
    # A second thread on so small a model only waits, where the tests take all cores.
    monkeypatch.setattr(runs, "usable_cores", lambda: 1)
    small = {"evaluation.prompts": 24, "evaluation.every": 2}
    return Setup("smollm2", clone, tmp_path / "runs", extra=small)


@pytest.mark.slow
def test_public_prompts_gain_exactly_nothing_on_a_secret_and_no_private_row_is_read(
    setup: Setup,
) -> None:
    (job,) = setup.jobs(Cell("secret", "reviews", math.inf, 40), seed=0)
    found = comparison.run_all([job], setup.folder, recipes=setup.clone / "recipes")[job.file]
    kept, turned = found["judged"]
    assert kept == pytest.approx(found["rise"])
    assert kept > 0.01  # what was learned is praise, which one of the two secrets likes
    assert kept + turned == 0.0
    assert comparison.gain(found) == 0.0
    assert math.isinf(found["epsilon"])
    assert [len(point) for point in found["curve"]] == [2, 2]


@pytest.mark.slow
def test_a_comparison_is_written_and_read_again(
    setup: Setup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    users = "".join(json.dumps(row) + "\n" for row in rows(160 + TUNING_USERS, "user"))
    (tmp_path / "private.jsonl").write_text(users)
    arguments: dict[str, Any] = {"epsilons": [4.0, 1.0], "users": 24, "seeds": 2}
    assert compare(setup, "secret", **arguments, write_only=True) is None
    found = compare(setup, "secret", **arguments)
    assert found is not None
    assert found.seeds == 2
    assert found.public["reviews"].tolist() == [0.0, 0.0]
    assert list(found.private) == [1.0, 4.0]
    monkeypatch.setattr("dprlhf.worth.runs.train", None)
    again = compare(setup, "secret", **arguments)
    assert again is not None
    assert again.plain.tolist() == found.plain.tolist()
    assert "| no privacy |" in write_all([found], tmp_path, "the command")
    assert (tmp_path / "images" / "worth-secret-smollm2.png").stat().st_size > 0
    written = json.loads((tmp_path / "results" / "worth.json").read_text())
    assert {row["command"] for row in written} == {"the command"}
    assert str(tmp_path) not in json.dumps(written)


def test_writing_alone_trains_no_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("the model is trained"))
    (tmp_path / "recipes").mkdir()
    words = ["bench", "worth", "--write-only", "--clone", str(tmp_path), "--runs", str(tmp_path)]
    refused = CliRunner().invoke(app, words).exception
    assert isinstance(refused, DprlhfError)
    assert "drop --write-only" in str(refused)


def test_no_process_is_one_process(tmp_path: Path) -> None:
    job = runs.Job("a", "b", ())
    assert runs.run_all([job], tmp_path, recipes=tmp_path, side_by_side=0, write_only=True) == {}


@pytest.mark.parametrize("number", [1, 2])
def test_a_run_gives_torchs_threads_back(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or whatever the process does after it has others, and may round in another way."""
    seen, before = [], torch.get_num_threads()

    def train(*_: Any, **__: Any) -> None:
        seen.append(torch.get_num_threads())
        raise DprlhfError("enough")

    monkeypatch.setattr(runs, "train", train)
    with pytest.raises(DprlhfError, match="enough"):
        runs.run(runs.Job("a", "b", ()), tmp_path, tmp_path, threads=number)
    assert seen == [number]
    assert torch.get_num_threads() == before


@pytest.mark.slow
@pytest.mark.parametrize(("task", "name"), PLACES)
def test_a_public_run_names_no_private_rows(
    task: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def load_rows(data: Any) -> datasets.Dataset:
        asked.append((data.path, data.split))
        many = rows(2000, data.split)
        return datasets.Dataset.from_list([{**row, "label": i % 2} for i, row in enumerate(many)])

    monkeypatch.setattr(tasks, "load_rows", load_rows)
    for model in ("small", "smollm2"):
        setup = Setup(model, CLONE, tmp_path)
        (job,) = setup.jobs(Cell(task, name, math.inf, 300), seed=0)
        path = CLONE / "recipes" / f"{TASKS[task].recipe}.yaml"
        made = load_recipe(path, overrides=job.overrides)
        users = load_recipe(path).data
        assert made.privacy.baseline
        assert Path(made.data.path).parent == tmp_path / "public"
        assert made.data.limit == 300
        assert made.update.subspace is None
        assert made.evaluation is not None
        assert made.evaluation.prompts == EVALUATED
        assert made.evaluation.data.split != users.split
        assert (users.path, users.split) not in asked
        # The rows are not those of the evaluation, nor those after them that settings look at.
        texts = datasets.Dataset.from_parquet(made.data.path)["text"]
        assert len(texts) == 300
        if asked[0] == (made.evaluation.data.path, made.evaluation.data.split):
            numbers = {int(text.split()[1]) for text in texts}
            assert min(numbers) >= EVALUATED + HELD_OUT
            assert len(numbers) <= TASKS[task].public[name].same_kind


@pytest.mark.slow
@pytest.mark.parametrize("task", TASKS)
def test_private_users_are_paired_by_seed_and_never_those_for_tuning(
    task: str, tmp_path: Path
) -> None:
    setup = Setup("smollm2", CLONE, tmp_path)
    path = CLONE / "recipes" / f"{TASKS[task].recipe}.yaml"

    def users_of(epsilon: float, seed: int) -> list[Any]:
        made = [
            load_recipe(path, overrides=job.overrides)
            for job in setup.jobs(Cell(task, "", epsilon, 1500), seed)
        ]
        assert len(made) == (2 if TASKS[task].turned else 1)
        assert len({recipe.rewards[0].weight for recipe in made}) == len(made)
        assert {recipe.privacy.baseline for recipe in made} == {math.isinf(epsilon)}
        return [(recipe.data.split, recipe.data.skip, recipe.data.limit) for recipe in made]

    for seed in (0, 1, 4, 14):
        assert users_of(1.0, seed) == users_of(math.inf, seed)
        assert max(skip + limit for _, skip, limit in users_of(1.0, seed)) <= (
            TASKS[task].users - TUNING_USERS
        )
    assert users_of(1.0, 0) != users_of(1.0, 1)


@pytest.mark.parametrize("task", ["community", "house-style", "style-by-cluster", "praise"])
def test_a_judge_counts_for_and_against_as_the_users_wish(task: str, tmp_path: Path) -> None:
    setup = Setup("small", CLONE, tmp_path)
    path = CLONE / "recipes" / f"{TASKS[task].recipe}.yaml"
    weights = []
    for job in setup.jobs(Cell(task, "", 1.0, 300), seed=0):
        made = load_recipe(path, overrides=job.overrides)
        own = made.rewards[0]
        assert made.evaluation is not None
        assert set(made.evaluation.judges) == {"lexicon", "classifier"}
        for judge in made.evaluation.judges.values():
            assert (judge.times_column, judge.weight) == (own.times_column, own.weight)
            assert judge.name != own.name
        weights.append(own.weight)
    assert len(set(weights)) == (2 if TASKS[task].turned else 1)


@pytest.mark.parametrize(("task", "rank"), [("community", 1), ("house-style", 1), ("praise", 64)])
def test_the_small_model_runs_a_task_along_its_own_directions(
    task: str, rank: int, tmp_path: Path
) -> None:
    setup = Setup("small", CLONE, tmp_path)
    path = CLONE / "recipes" / f"{TASKS[task].recipe}.yaml"

    def subspace(epsilon: float) -> Any:
        job, *_ = setup.jobs(Cell(task, "", epsilon, 300), seed=0)
        return load_recipe(path, overrides=job.overrides).update.subspace

    assert (subspace(1.0).rank, subspace(1.0).mean_first) == (rank, rank == 1)
    assert subspace(math.inf) is None


def test_a_judge_of_both_wishes_sees_nothing() -> None:
    seen = {"judges": {"lexicon": 0.3}}
    assert judged_by("lexicon", {**seen, "judged": []}) == 0.3
    assert judged_by("lexicon", {**seen, "judged": [0.1, -0.1]}) == 0.0


def test_public_rows_are_repeated_and_what_they_want_is_what_the_public_knows(
    tmp_path: Path,
) -> None:
    source = tmp_path / "source.jsonl"
    lines = [{"text": f"row {i}", "wants": -1, "label": i % 2} for i in range(10)]
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    for wants, expected in (("praise", {1}), ("label", {-1, 1}), (None, {-1})):
        file = tmp_path / f"{wants}.parquet"
        PublicPrompts(str(source), "train", 4, 3, wants).write(9, 0, file)  # type: ignore[arg-type]
        written = datasets.Dataset.from_parquet(str(file))
        counts = np.unique(written["text"], return_counts=True)
        assert counts[0].tolist() == ["row 3", "row 4", "row 5", "row 6"]
        assert sorted(counts[1]) == [2, 2, 2, 3]
        assert set(written["wants"]) == expected
        if wants == "label":
            for text, value in zip(written["text"], written["wants"], strict=True):
                assert value == 2 * (int(text.split()[1]) % 2) - 1
    by_cluster = PublicPrompts(str(source), "train", 4, 3, "praise", "wants_by_cluster")
    by_cluster.write(9, 0, tmp_path / "by-cluster.parquet")
    written = datasets.Dataset.from_parquet(str(tmp_path / "by-cluster.parquet"))
    assert set(written["wants_by_cluster"]) == {1}
    assert set(written["wants"]) == {-1}
    with pytest.raises(DprlhfError, match="no 20 public rows"):
        PublicPrompts(str(source), "train", 20).write(9, 0, tmp_path / "other.parquet")


def example(seeds: int = 5) -> Comparison:
    def gains(value: float) -> np.ndarray:
        return value + 0.01 * np.arange(seeds)

    return Comparison(
        "community",
        "small",
        1500,
        gains(1.0),
        {0.5: gains(-0.1), 1.0: gains(0.85), 4.0: gains(0.95)},
        {
            "sentences, praise": gains(-1.7),
            "sentences, their labels": gains(-0.2),
            "100 reviews": gains(0.6),
            "900 reviews": gains(1.1),
        },
        {"no privacy": [[(1.0, 1.0)]], "ε = 1": [[(0.5, 0.8)]]},
    )


@pytest.mark.slow
def test_goals_and_the_best_public_alternative() -> None:
    found = example()
    assert found.levels == [0, 100, 900]
    # Whoever has nothing that helps leaves the model as it is.
    assert found.public_only(0)[0] == tasks.UNTRAINED
    assert found.public_only(100)[0] == "100 reviews"
    by_name = {row.name.removeprefix("worth (small): community, 1500 users"): row
               for row in results(found)}  # fmt: skip
    kept = by_name[", epsilon 1: share of the non-private gain"]
    assert (kept.value, kept.holds) == (pytest.approx(0.87 / 1.02), True)
    assert by_name[", epsilon 1: price"].value == pytest.approx(0.15)
    against = "public prompts of the users' kind"
    assert by_name[f", epsilon 1: value against 0 {against}"].value == pytest.approx(0.87)
    assert by_name[f", epsilon 1: value against 900 {against}"].value == pytest.approx(-0.25)
    even = by_name[f": break-even epsilon against 100 {against}"]
    assert 0.5 < even.value < 1.0
    assert even.holds
    above = by_name[f": break-even epsilon against 900 {against}"]
    assert (above.value, above.holds) == (4.0, False)
    assert above.unit.startswith("epsilon; above")
    assert by_name[", no privacy: gain, worst seed"].value == 1.0
    assert all(math.isfinite(row.value) for row in by_name.values())
    few = {row.name: row for row in results(example(seeds=2))}
    assert not any(row.holds for row in few.values() if not row.name.endswith(": learned"))
    single = [row.name for row in results(example(seeds=1))]
    assert not any("standard error" in name or "lower end" in name for name in single)
    nothing = replace(found, plain=np.array([0.5, -0.4, 0.3, -0.2, 0.1]))
    assert not any("share" in row.name for row in results(nothing))
    assert "No share is stated" in "\n".join(table(nothing, "command"))
    assert "-0.250 ± 0.000" in "\n".join(table(found, "command"))


def test_break_even_in_words() -> None:
    assert in_words(Estimated(0.0, 0.0, 0.7), [0.5, 1.0]) == "below 0.5 (95%: below 0.5 to 0.7)"
    assert in_words(Estimated(math.inf), [0.5, 8.0]) == "above 8"
