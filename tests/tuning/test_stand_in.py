"""Runs on public prompts in place of users: the same noise, no promise, and no row out of place."""

import math
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from dprlhf import DprlhfError
from dprlhf.data.in_memory import InMemoryInputs
from dprlhf.privacy.ledger import read_ledger
from dprlhf.privacy.plan import make_plan
from dprlhf.recipe import Recipe
from dprlhf.runs.folder import RunFolder
from dprlhf.training.build import open_run
from dprlhf.training.run import Run
from dprlhf.tuning import stand_in
from dprlhf.tuning.public_rows import PublicRows, public_rows
from dprlhf.tuning.space import with_settings
from dprlhf.tuning.stand_in import _of_stand_ins, excess_variance, run_stand_ins, stand_in_plan
from helpers.recipes import least
from helpers.runs import ADAPTER, lower_case

PUBLIC = [f"public {i}" for i in range(120)]
FINAL = 8


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    place = tmp_path / "temporary"
    place.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    return place


def recipe_of(model: str, **changes: Any) -> Recipe:
    own = {
        "policy": {"model_name_or_path": model, "adapter": ADAPTER}, "rounds": 3,
        "data": {"path": "no-such-file.csv", "limit": 60}, "privacy": {"epsilon": 8},
        "rollout": {"max_new_tokens": 4},
        "evaluation": {"data": {"path": "in-memory"}, "prompts": FINAL},
    }  # fmt: skip
    return least(**own | changes)


def rows_for(recipe: Recipe, count: int = len(PUBLIC)) -> PublicRows:
    return public_rows(recipe, rows=PUBLIC[:count], scored=16)


@pytest.mark.parametrize("asked", ["epsilon", "noise_multiplier", "max_guess"])
def test_stand_ins_have_no_promise_whatever_the_run_has(asked: str) -> None:
    recipe = recipe_of("m", privacy={asked: 0.6})
    made = _of_stand_ins(recipe, rows_for(recipe), every=2, in_memory=True)
    assert made.privacy.baseline
    assert made.privacy.max_guess is None


@pytest.mark.parametrize("stated", [{}, {"max_prompt_tokens": 9}])
def test_public_rows_settle_the_longest_prompt_of_stand_ins_as_of_a_run(stated) -> None:
    recipe = recipe_of("m", data={"path": "x", **stated})
    changed = with_settings(recipe, {"rounds": 2})
    for made in (changed, _of_stand_ins(changed, rows_for(recipe), every=2, in_memory=True)):
        assert ("max_prompt_tokens" in made.data.model_fields_set) == bool(stated)
        assert made.data.max_prompt_tokens == stated.get("max_prompt_tokens", 64)


class TestThePlan:
    @pytest.mark.parametrize("stand_ins", [10, 1000])
    @pytest.mark.parametrize(
        ("partition", "participations"),
        [("random-allocation", 1), ("random-allocation", 2), ("fixed", 1), ("poisson", 2)],
    )
    def test_the_released_mean_has_the_private_runs_noise(
        self, partition: Any, participations: int, stand_ins: int
    ) -> None:
        # Without noise no accountant is asked, which for some partitions takes seconds.
        silent = make_plan(
            users=60, rounds=4, delta=1e-5, epsilon=math.inf, clip_norm=0.5,
            partition=partition, participations=participations,
        )  # fmt: skip
        private = replace(silent, mechanism=silent.mechanism.with_noise(0.9))
        plan = stand_in_plan(private, stand_ins)
        assert plan.noise_std / plan.expected_batch_size == pytest.approx(
            private.noise_std / private.expected_batch_size, rel=1e-12
        )
        assert private.noise_std == pytest.approx(0.45)
        assert (plan.users, plan.rounds) == (stand_ins, 4)
        # What a private run of that many users would divide by.
        same = make_plan(
            users=stand_ins, rounds=4, delta=1e-5, epsilon=math.inf,
            partition=partition, participations=participations,
        )  # fmt: skip
        assert plan.expected_batch_size == same.expected_batch_size

    def test_a_plan_with_a_promise_is_refused_for_stand_ins(self, model, tmp_path):
        private = make_plan(users=60, rounds=3, delta=1e-5, epsilon=2.0)
        sources = InMemoryInputs(PUBLIC[:60], lower_case, None, stand_in_plan=lambda r: private)
        recipe = recipe_of(model, data={"path": "in-memory"}, evaluation=None)
        folder = RunFolder(tmp_path / "run")
        with (
            pytest.raises(ValueError, match="states no epsilon"),
            open_run(recipe, folder, sources, create=True),
        ):
            pass
        assert not folder.path.exists()

    def test_the_excess_of_thinning(self) -> None:
        """S²(1/m′ − 1/m) over d(zS/m)², and a bound on what clipped vectors have."""
        private = make_plan(users=4000, rounds=4, delta=1e-5, noise_multiplier=0.5, clip_norm=2.0)
        m, thinned = 1000.0, 250.0
        sampling = 2.0**2 * (1 / thinned - 1 / m)
        noise = 16 * (0.5 * 2.0 / m) ** 2
        assert excess_variance(private, 1000, 16) == pytest.approx(sampling / noise)
        assert excess_variance(private, 4000, 16) == 0.0
        vectors = np.random.default_rng(0).standard_normal((20_000, 16))
        vectors *= 2.0 / np.linalg.norm(vectors, axis=1, keepdims=True)  # all at the clip norm
        of_mean = vectors.reshape(-1, 250, 16).mean(1).var(0).sum()
        assert of_mean - vectors.var(0).sum() / m <= 1.1 * sampling


class TestTheRows:
    def test_final_rows_score_nothing_and_stand_in_for_nobody(self, model: str) -> None:
        rows = rows_for(recipe_of(model))
        used = [*rows.stand_ins["prompt"], *rows.scoring["prompt"]]
        assert not set(used) & set(PUBLIC[:FINAL])
        assert len(set(used)) == len(used) == len(PUBLIC) - FINAL
        assert rows.scoring["prompt"][16:] == PUBLIC[FINAL : FINAL + 64]  # as in the private run

    def test_no_stand_in_guides_the_subspace(self, model: str, tmp_path: Path) -> None:
        recipe = recipe_of(model, update={"name": "pg", "subspace": {"rank": 2, "prompts": 10}})
        rows = rows_for(recipe)
        guides = rows.scoring["prompt"][16 + 64 :]
        assert len(guides) == 10
        assert not set(guides) & {*rows.stand_ins["prompt"], *rows.scoring["prompt"][: 16 + 64]}
        file = tmp_path / "guides.csv"
        apart = PUBLIC[100:110]
        file.write_text("prompt\n" + "\n".join(apart))
        subspace = {"rank": 2, "prompts": 10, "data": {"path": str(file)}}
        rows = rows_for(recipe_of(model, update={"name": "pg", "subspace": subspace}))
        assert not set(apart) & {*rows.stand_ins["prompt"], *rows.scoring["prompt"]}
        more = tmp_path / "same.csv"  # after 64 for fitting, only guides are left
        more.write_text("prompt\n" + "\n".join(PUBLIC[:64] + apart))
        guided = recipe_of(model, update={"name": "pg", "subspace": subspace})
        with pytest.raises(DprlhfError, match=r"0 public .* for users\. 10 more guide update\.s"):
            public_rows(guided, more, rows=PUBLIC, scored=10)

    def test_no_stand_in_is_contrasted(self, model: str, tmp_path: Path) -> None:
        contrast = ADAPTER | {"init": "public-contrast", "contrast_column": "kind"}
        contrasted = {"model_name_or_path": model, "adapter": contrast}
        rows = rows_for(recipe_of(model, policy=contrasted))
        guides = rows.scoring["prompt"][16 + 64 :]
        assert len(guides) == (len(PUBLIC) - FINAL - 64 - 16) // 2  # of few rows, half
        assert not set(guides) & set(rows.stand_ins["prompt"])
        file = tmp_path / "guides.csv"  # which are contrasted where the subspace names them
        file.write_text("prompt,kind\n" + "".join(f"apart {i},{i % 2}\n" for i in range(20)))
        subspace = {"rank": 2, "prompts": 10, "data": {"path": str(file)}}
        changes = {"policy": contrasted, "update": {"name": "pg", "subspace": subspace}}
        assert len(rows_for(recipe_of(model, **changes)).scoring) == 16 + 64

    def test_the_private_file_is_refused(self, tmp_path: Path) -> None:
        file = tmp_path / "users.csv"
        file.write_text("prompt\n" + "\n".join(PUBLIC))
        with pytest.raises(DprlhfError, match="these are the private users' rows"):
            public_rows(recipe_of("m", data={"path": str(file)}), file)


class TestTheRun:
    @pytest.mark.slow
    def test_no_private_row_no_book_no_promise_and_nothing_left(
        self, model: str, temporary: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("DPRLHF_BOOK", str(tmp_path / "book.sqlite"))
        recipe = recipe_of(model)
        rows = rows_for(recipe)
        seen: list[str] = []

        def reward(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
            seen.extend(prompts)
            return lower_case(prompts, completions)

        opened = []

        def look(t: int, value: float) -> bool:
            (ledger,) = temporary.glob("dprlhf-stand-ins-*/*/ledger.jsonl")
            opened.append(read_ledger(ledger)[0].body)
            assert not [*temporary.glob("**/privacy.json")]
            return False

        result = run_stand_ins(recipe, rows, reward=reward, every=1, stop=look)
        assert [o["epsilon"] for o in opened] == ["infinity", "infinity"]
        assert "public prompts that stand in" in opened[0]["accountant"]
        assert not [*temporary.iterdir()]
        assert not (tmp_path / "book.sqlite").exists()
        assert set(seen) <= set(PUBLIC[FINAL:])
        assert [t for t, _ in result.curve] == [0, 1, 2, 3]
        assert result.plan.guarantee.epsilon <= 8
        assert (result.stand_ins, result.prompts) == (60, 32)
        assert result.rise.mean == pytest.approx(result.after.mean - result.before.mean)
        assert result.score == result.after.mean
        assert result.excess == 0.0

    @pytest.mark.slow
    @pytest.mark.parametrize("stand_ins", [None, 18])
    def test_noise_in_what_is_released(self, model: str, stand_ins: int | None) -> None:
        """Under a constant reward all is noise: its norm is zS√d/m with the PRIVATE z and m."""
        norms = []
        run_rounds = stand_in.run_rounds

        def watched(run: Run) -> None:
            run.callbacks.append(lambda metrics: norms.append(metrics["released_gradient_norm"]))
            run_rounds(run)

        recipe = recipe_of(model, rounds=6)

        def constant(completions: list[str], **columns: Any) -> list[float]:
            return [1.0] * len(completions)

        with mock.patch.object(stand_in, "run_rounds", watched):
            result = run_stand_ins(recipe, rows_for(recipe), reward=constant, stand_ins=stand_ins)
        plan = result.plan
        expected = plan.noise_multiplier * math.sqrt(result.dimension) / (60 / 6)
        # The clip norm's share of the telemetry is the only other thing in a release.
        assert np.mean(norms) == pytest.approx(expected, rel=0.15)
        assert (result.excess > 0) == (stand_ins is not None)

    @pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError("it broke")])
    def test_what_ends_it(self, model: str, temporary: Path, error: Any) -> None:
        """An interrupt names no folder to resume; an error is quoted, for its rows are public."""
        recipe = recipe_of(model)

        def stop(t: int, reward: float) -> bool:
            raise error

        expected = KeyboardInterrupt if error is KeyboardInterrupt else DprlhfError
        with pytest.raises(expected) as caught:
            run_stand_ins(recipe, rows_for(recipe), reward=lower_case, stop=stop)
        assert "resume" not in str(caught.value)
        assert expected is KeyboardInterrupt or "it broke" in str(caught.value)
        assert not [*temporary.iterdir()]
