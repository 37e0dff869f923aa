"""Rewards as TRL 1.16 calls them: trainer_state, log_metric, log_extra, asynchronous, stateful."""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import dprlhf
from dprlhf.errors import DprlhfError
from dprlhf.rewards import LoadedReward, Scorer, Scores, check_reward
from dprlhf.rewards.reward import RoundState
from dprlhf.rewards.scoring import CallLog, gathered
from helpers import tiny

PROMPTS = ["p", "q", "r", "s"]
TEXTS = ["a", "bb", "ccc", "dddd"]


def score(reward: Any, texts: Sequence[str], **settings: Any) -> Scores:
    rewards = reward if isinstance(reward, list) else [reward]
    private = settings.pop("private", False)
    users = settings.pop("users", range(len(texts)))
    scorer = Scorer(rewards, 100.0, **settings)
    return scorer.score(["p"] * len(texts), texts, [[]] * len(texts), {}, users, private=private)


def length(completions: list[str]) -> list[float]:
    return [float(len(text)) for text in completions]


def run(tmp_path: Path, reward: Any, **flat: Any) -> Path:
    settings: dict[str, Any] = {
        "epsilon": 8.0, "delta": 1e-4, "rounds": 3, "rollout__max_new_tokens": 2,
        "evaluation__prompts": 4, "evaluation__every": 1,
    }  # fmt: skip
    dprlhf.train(
        model=str(tiny.save(tmp_path / "model")), prompts=[f"private {i}" for i in range(12)],
        reward=reward, evaluation_prompts=[f"public {i}" for i in range(8)],
        output_dir=tmp_path / "run", quiet=True, **settings | flat,
    )  # fmt: skip
    return tmp_path / "run"


@pytest.mark.parametrize(
    "answer",
    [
        [np.float32(1.5), np.int64(2)],
        [torch.tensor(1.5), torch.tensor([2.0])],
        torch.tensor([1.5, 2.0], dtype=torch.bfloat16),
        torch.tensor([1.5, 2.0], requires_grad=True),
        np.array([1.5, 2], dtype=object),
    ],
)
def test_scalars_and_arrays_of_other_libraries_are_numbers(answer: Any) -> None:
    assert score(lambda completions: answer, ["a", "b"]).values.tolist() == [1.5, 2.0]


@pytest.mark.slow
def test_a_curriculum_sees_the_round_and_nothing_of_the_users(tmp_path: Path) -> None:
    seen: list[tuple[bool, RoundState]] = []

    def curriculum(prompts: list[str], completions: list[str], trainer_state: Any) -> list[float]:
        seen.append((any(p.startswith("private") for p in prompts), trainer_state))
        share = trainer_state.global_step / trainer_state.max_steps
        return [share * len(text) for text in completions]

    run(tmp_path, curriculum, update__clip_norm=0.5)
    private = {state for is_private, state in seen if is_private}
    assert private <= {RoundState(t, 3, 1) for t in range(3)}
    assert len(private) > 1
    public = [state for is_private, state in seen if not is_private]
    assert set(public) == {RoundState(0, 3, 1), RoundState(3, 3, 1)}  # the check; evaluations
    # All evaluations measure by the reward of the end, so that they can be compared.
    assert public[-1].epoch == 1.0


def test_the_state_has_public_fields_alone_and_cannot_carry_anything() -> None:
    found = []

    def keeping(completions: list[str], trainer_state: Any) -> list[float]:
        found.append(trainer_state)
        return [0.0] * len(completions)

    state = RoundState(2, 10, 3)
    for texts in (["a"], ["b"] * 7):
        score(keeping, texts, state=state, private=True)
    assert set(found) == {state}
    assert {f.name for f in dataclasses.fields(state)} == {
        "global_step", "max_steps", "num_train_epochs",
    }  # fmt: skip
    with pytest.raises(dataclasses.FrozenInstanceError):
        state.best = 1  # type: ignore[attr-defined]
    assert state.epoch == pytest.approx(0.6)


def test_a_reward_that_couples_users_in_later_rounds_is_refused() -> None:
    def later(completions: list[str], trainer_state: Any) -> list[float]:
        mean = sum(map(len, completions)) / len(completions)
        return [len(c) - mean * (trainer_state.global_step > 5) for c in completions]

    assert check_reward(later, PROMPTS, TEXTS, state=RoundState(0, 5)).checked_rows == 64
    with pytest.raises(DprlhfError, match=r"fails the check 'alone'"):
        check_reward(later, PROMPTS, TEXTS, state=RoundState(0, 6))


SECRET = 4321.5


def logging_reward(prompts, completions, log_metric, log_extra):
    private = any(p.startswith("private") for p in prompts)
    log_metric("share", SECRET if private else 0.25)
    log_metric("only private" if private else "only public", np.float32(0.5))
    log_extra("said", [f"about {p}" for p in prompts])
    return [float(len(c)) for c in completions]


@pytest.mark.slow
def test_what_is_logged_of_private_rows_stays_in_the_secret_folder(tmp_path: Path) -> None:
    folder = run(tmp_path, logging_reward)
    for file in folder.rglob("*"):
        if file.is_file() and "secret" not in file.relative_to(folder).parts:
            content = file.read_bytes()
            assert b"4321.5" not in content, file
            assert b"only private" not in content, file
            assert b"about private" not in content, file
            assert b"only public" not in content, file
    secret = "".join(f.read_text() for f in (folder / "secret").glob("telemetry-*.jsonl"))
    assert all(text in secret for text in ("4321.5", "only private", "about private"))
    assert "only public" not in secret


def test_rows_that_are_scored_apart_are_logged_in_their_places() -> None:
    def logging(completions: list[str], log_extra: Any, log_metric: Any) -> list[float]:
        if "bb" in completions and len(completions) > 1:
            raise ValueError
        log_extra("text", np.array([len(c) for c in completions]))
        log_metric("rows", len(completions))
        return [1.0] * len(completions)

    for reward in (logging, LoadedReward(logging, "r", per_user=True)):
        logged = score(reward, TEXTS, private=True).logged
        assert dict(logged.extra) == {"text": [1, 2, 3, 4]}
        assert dict(logged.metrics) == {"rows": 1.0}  # the call that failed logged nothing


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("log_metric", "high", r"log_metric\('x', …\) got a value that is not a finite number"),
        ("log_metric", float("nan"), r"not a finite number"),
        ("log_extra", [1, 1, 1], r"log_extra\('x', …\) needs a list with one value per completion"),
        ("log_extra", 3, r"needs a list"),
    ],
)
def test_what_cannot_be_logged_is_refused_on_public_prompts_alone(name, value, text):
    def reward(completions: list[str], **columns: Any) -> list[float]:
        columns[name]("x", value)
        return length(completions)

    with pytest.raises(DprlhfError, match=text):
        check_reward(reward, PROMPTS, TEXTS)
    scores = score(reward, TEXTS, private=True)
    assert scores.valid.all()  # there it must not cost a user its score
    assert (dict(scores.logged.metrics), dict(scores.logged.extra)) == ({}, {})


class _OfOne(list[Any]):
    """Says that it has one value, whatever it has."""

    def __len__(self) -> int:
        return 1


class _Rude:
    """Raises whatever it is asked."""

    def __getattr__(self, name: str) -> Any:
        raise ValueError(name)

    def __repr__(self) -> str:
        raise ValueError("repr")


_cycle: list[Any] = []
_cycle.append(_cycle)
_wide: list[Any] = [1]
for _ in range(60):  # 2⁶⁰ numbers as text
    _wide = [_wide, _wide]


@pytest.mark.parametrize(
    "values",
    [
        9**9999, -(2**63), [9**9999], float("nan"), "\ud800", "x" * 10**6, b"\xff" * 10**6, _cycle,
        _wide, _Rude(), {"a": {1, 2}}, np.float32(0.5), np.array([1, 2]), torch.tensor(2.0),
        type("x" * 10**6, (), {}), 1j,
    ],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_whatever_a_reward_logs_becomes_a_short_value_that_can_be_written(values: Any) -> None:
    logged = CallLog(1)
    logged.log_extra("column", [values])
    logged.log_metric(values, 1.0)
    logged.log_metric("value", values)
    logged.log_extra(values, 3)
    written = json.dumps(vars(gathered([(logged, [0])], 1)))
    assert len(written) < 200_000


def test_the_mean_of_what_is_logged_is_a_number_where_its_sum_is_none() -> None:
    most, log = 1.7e308, CallLog(1)
    for value in (most, most, -1.0, most):
        log.log_metric("large", value)
    mean = gathered([(log, [0])], 1).metrics["large"]
    assert mean == pytest.approx(0.75 * most)


def test_a_list_that_lies_about_its_length_costs_its_user_alone() -> None:
    def reward(completions: list[str], log_extra: Any) -> list[float]:
        log_extra("short", _OfOne())
        return _OfOne() if "bb" in completions else [1.0] * len(completions)

    scores = score(LoadedReward(reward, "r", per_user=True), TEXTS, private=True)
    assert scores.valid.tolist() == [text != "bb" for text in TEXTS]
