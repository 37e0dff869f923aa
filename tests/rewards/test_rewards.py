import asyncio
import contextlib
import doctest
import functools
import io
import logging
import math
import os
import pickle
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
import transformers
from accelerate import Accelerator
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2ForSequenceClassification,
    PreTrainedTokenizerFast,
)

from dprlhf import recipe
from dprlhf.data.in_memory import InMemoryInputs
from dprlhf.errors import DprlhfError
from dprlhf.rewards import LoadedReward, Scorer, Scores, check_reward, classifier, load_reward
from dprlhf.rewards.check import RewardSummary
from dprlhf.rewards.classifier import ClassifierReward
from dprlhf.rewards.reward import as_reward
from dprlhf.runs.lineage import attach
from dprlhf.training.build import load_parts
from dprlhf.training.processes import Processes
from dprlhf.training.setup import check_declared
from helpers import kernels, tiny
from helpers.marks import slow
from helpers.recipes import least

CANARY = "CANARY-my-private-prompt"


def score(rewards, completions, *, users=None, bound=10.0, sink=None, prompts=None, **columns):
    rewards = rewards if isinstance(rewards, list) else [rewards]
    return Scorer(rewards, bound, sink=sink).score(
        ["p"] * len(completions) if prompts is None else prompts, completions,
        [list(str(c).encode()) for c in completions], columns,
        list(range(len(completions))) if users is None else users,
    )  # fmt: skip


def length(completions: list[str], **_: Any) -> list[float]:
    return [float(len(c)) for c in completions]


def batch_normalised(completions: list[str], **_: Any) -> list[float]:
    raw = np.array([len(c) for c in completions], dtype=float)
    return list((raw - raw.mean()) / (raw.std() + 1e-4))


def test_weights_add_none_drops_its_term_and_the_bound_clips() -> None:
    def sparse(completions: list[str]) -> list[float | None]:
        return [None if c.startswith("n") else 100.0 for c in completions]

    result = score(
        [LoadedReward(length, "length", -0.5), LoadedReward(sparse, "sparse", 0.25)],
        ["na", "abcd", "n" * 90, "n"],
        bound=20.0,
    )
    assert result.values.tolist() == [-1.0, 20.0, -20.0, -0.5]
    assert result.valid.all()
    assert result.failures == {}
    assert result.values.dtype == np.float64


def test_a_column_multiplies_each_answer_by_its_own_rows_value() -> None:
    reward = LoadedReward(length, "length", 0.5, times_column="wants")
    result = score(reward, ["a", "bb", "ccc", "dddd", "e", "ff"], wants=[1, -1, 0.5, 0, True, -9])
    assert result.values.tolist() == [0.5, -1.0, 0.75, 0.0, 0.5, -9.0]
    report = check_reward(reward, ["p", "q"], ["a", "bb"], {"wants": [1, -1]})
    assert report.scores == (1.0, -2.0)
    for kept in (replace(reward, per_user=True, checked_rows=0), replace(reward, checked_rows=4)):
        assert score(kept, ["a", "bb"], wants=[-1, 2], users=[0, 1]).values.tolist() == [-0.5, 2.0]


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (math.nan, "nan"),
        (math.inf, "infinity"),
        ("one", "str"),
        (None, "None"),
        (1e308, "infinity"),
    ],
)
def test_a_row_without_a_number_to_multiply_by_is_invalid_alone(value: Any, kind: str) -> None:
    reward = LoadedReward(length, "length", times_column="wants")
    result = score(reward, ["a", "b" * 20, "c"], wants=[1, value, -1])
    assert result.values.tolist() == [1.0, 0.0, -1.0]
    assert result.valid.tolist() == [True, False, True]
    assert result.failures == {kind: 1}


def test_a_column_to_multiply_by_that_is_missing_is_named() -> None:
    reward = LoadedReward(length, "length", times_column="wants")
    with pytest.raises(DprlhfError, match=r"needs the column 'wants', which the prompts lack"):
        check_reward(reward, ["p", "q"], ["a", "bb"], {"other": [1, -1]})
    plain: Any = None  # a recipe without an agent, which no plain reward asks for
    with pytest.raises(DprlhfError, match=r"times_column 'wants', which the private rows lack"):
        check_declared([reward], plain, ["text", "label"])
    check_declared([reward], plain, ["text", "wants"])


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (math.nan, "nan"),
        (-math.inf, "infinity"),
        ("1.0", "str"),
        ([1.0], "list"),
        (10**400, "int"),
        (None, "None"),
    ],
)
def test_an_answer_that_is_no_finite_number_makes_its_row_invalid(answer: Any, kind: str) -> None:
    result = score(lambda completions: [answer if c == "x" else 2 for c in completions], ["x", "y"])
    assert result.values.tolist() == [0.0, 2.0]
    assert result.valid.tolist() == [False, True]
    assert result.failures == {kind: 1}


def raising_for(trigger: str, problem: BaseException) -> Callable[..., list[float]]:
    def reward(completions: list[str]) -> list[float]:
        if trigger in completions:
            raise problem
        return [float(len(c)) for c in completions]

    return reward


class UnprintableError(Exception):
    def __repr__(self) -> str:
        raise BaseException


@pytest.mark.parametrize(
    "problem", [ValueError("x"), asyncio.CancelledError(), GeneratorExit(), UnprintableError()]
)
def test_a_raise_costs_the_rows_of_its_user_only(problem: BaseException) -> None:
    reward = raising_for("bad", problem)
    result = score(reward, ["abc", "bad", "ok", "a"], users=["u", "v", "v", "w"])
    assert result.valid.tolist() == [True, False, False, True]
    assert result.values.tolist() == [3.0, 0.0, 0.0, 1.0]
    assert result.failures == {type(problem).__name__: 2}


Row = st.sampled_from(["good", "good", "long text", "none", "nan", "text", "raise", "short"])


@settings(max_examples=60, deadline=None)
@given(rows=st.lists(st.tuples(st.integers(0, 3), Row), min_size=1, max_size=10))
def test_a_user_scores_the_same_whoever_else_is_in_the_batch(rows: list[tuple[int, str]]) -> None:
    def reward(completions: list[str]) -> list[Any]:
        if "raise" in completions:
            raise ValueError
        special = {"none": None, "nan": math.nan, "text": "text"}
        return [special.get(c, len(c)) for c in completions if c != "short"]

    users = np.array([user for user, _ in rows])
    completions = [completion for _, completion in rows]
    together = score([reward, LoadedReward(length, "length", 0.5)], completions, users=users)
    total: dict[str, int] = {}
    for user in set(users.tolist()):
        mine = np.flatnonzero(users == user)
        alone = score(
            [reward, LoadedReward(length, "length", 0.5)],
            [completions[i] for i in mine],
            users=[user] * len(mine),
        )
        np.testing.assert_array_equal(together.values[mine], alone.values)
        np.testing.assert_array_equal(together.valid[mine], alone.valid)
        for kind, count in alone.failures.items():
            total[kind] = total.get(kind, 0) + count
    assert together.failures == total


@pytest.mark.parametrize(("checked", "sizes"), [(0, [2] * 7), (4, [4, 4, 4, 2]), (256, [8, 4, 2])])
def test_private_rows_come_in_calls_of_checked_sizes(checked: int, sizes: list[int]) -> None:
    called: list[int] = []

    def counting(completions: list[str]) -> list[float]:
        called.append(len(completions))
        return length(completions)

    users = np.repeat(np.arange(7), 2)
    texts = ["x" * i for i in range(14)]
    reward = LoadedReward(counting, "counting", checked_rows=checked)
    made = Scorer([reward], 100.0)
    scores = made.score(["p"] * 14, texts, [[]] * 14, {}, users, private=True)
    assert called == sizes
    assert scores.values.tolist() == list(range(14))


def test_calls_of_private_rows_that_fail_cost_their_failing_users_only() -> None:
    def raising(completions: list[str]) -> list[float]:
        if {"xxx", "xxxxxxx"}.intersection(completions):
            raise ValueError
        return length(completions)

    reward = LoadedReward(raising, "r", checked_rows=2)
    texts = ["x" * i for i in range(9)]
    users = np.repeat(np.arange(3), 3)  # calls of two rows cut users
    made = Scorer([reward], 100.0)
    scores = made.score(["p"] * 9, texts, [[]] * 9, {}, users, private=True)
    assert scores.valid.tolist() == [True] * 3 + [False] * 6
    assert scores.values.tolist() == [0, 1, 2] + [0] * 6


def test_a_user_alone_is_scored_in_calls_of_checked_sizes_too() -> None:
    """A size that nobody tried may round otherwise, and who is beside a user would decide on it."""
    sizes: list[int] = []

    def odd_in_sixes(completions: list[str]) -> list[float]:
        sizes.append(len(completions))
        if "boom" in completions:
            raise ValueError
        return [len(text) + 1e-3 * (len(completions) == 6) for text in completions]

    report = check_reward(odd_in_sixes, PROMPTS, COMPLETIONS, most_rows=4)
    reward = replace(as_reward(odd_in_sixes), checked_rows=report.checked_rows)

    def scored(*others: str) -> Scores:
        texts, users = ["x" * i for i in range(1, 7)] + [*others], [0] * 6 + [1] * len(others)
        count = len(texts)
        return Scorer([reward], 100.0).score(
            ["p"] * count, texts, [[]] * count, {}, users, private=True
        )

    sizes.clear()
    for company in ((), ("a", "b"), ("a", "boom")):
        assert scored(*company).values[:6].tolist() == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
    assert set(sizes) == {4, 2}
    # A failure costs its user all rows, in whatever call it is, and no others.
    assert scored("boom", *"abcde").valid.tolist() == [True] * 6 + [False] * 6
    # Nothing was checked of a reward that is called for one user at a time.
    for whole in (replace(reward, per_user=True, checked_rows=0), replace(reward, checked_rows=0)):
        sizes.clear()
        reward = whole
        scored("a")
        assert sizes == [6, 1]


def test_the_check_finds_the_largest_call_that_changes_no_score() -> None:
    def up_to_20(completions: list[str]) -> list[float]:
        return [len(c) + 1e-9 * (len(completions) > 20) for c in completions]

    def at_the_end_of_64(completions: list[str]) -> list[float]:
        moved = [1e-9 if i == 63 else 0.0 for i in range(len(completions))]
        return [len(c) + more for c, more in zip(completions, moved, strict=True)]

    sizes = [
        check_reward(reward, PROMPTS, COMPLETIONS, most_rows=128).checked_rows
        for reward in (length, up_to_20, at_the_end_of_64, LoadedReward(length, "l", 1, True))
    ]
    assert sizes == [128, 16, 32, 0]

    def couples_forty(completions: list[str]) -> list[float]:
        return [len(c) + len(completions) // 40 for c in completions]

    with pytest.raises(DprlhfError, match=r"fails the check 'size'.* in a call of 64"):
        check_reward(couples_forty, PROMPTS, COMPLETIONS)


@pytest.mark.slow
def test_a_reward_says_beyond_how_many_rows_a_call_is_no_faster(tmp_path: Path) -> None:
    called: list[int] = []

    class Four:
        dprlhf_most_rows = 4

        def __call__(self, completions: list[str], **_: Any) -> list[float]:
            called.append(len(completions))
            return length(completions)

    stage, _ = assembled(tmp_path, {"function": recipe.IN_MEMORY}, [Four()])
    [reward] = stage.rewards
    assert reward.checked_rows == 4
    called.clear()
    stage.scorer.score(PROMPTS, COMPLETIONS, [[1]] * len(PROMPTS), {}, range(len(PROMPTS)),
                       private=True)  # fmt: skip
    assert max(called) == 4


@pytest.mark.parametrize("kernel", [None, "by_place", "by_shape", "by_contents"])
def test_a_classifier_scores_each_text_at_its_place(kernel: str | None, tmp_path: Path) -> None:
    """Another user's text may move a score through the batch alone, and the check finds it."""
    folder, _, _ = bert(tmp_path, ["reward"])
    function = ClassifierReward(str(folder), text="completion", batch_size=4)
    if kernel is not None:
        for module in function.model.modules():
            if isinstance(module, torch.nn.Linear):
                module.register_forward_hook(getattr(kernels, kernel))
    texts = ["good", "bad film " * 3, "a film", "good film " * 6, "x", "bad", "a good one", "no"]
    report = check_reward(function, PROMPTS, COMPLETIONS)
    assert (report.moved > 0) == (kernel == "by_contents")
    reward = replace(as_reward(function), checked_rows=report.checked_rows)
    reward = replace(reward, per_user=True, checked_rows=0) if report.moved else reward

    def scored(absent: int) -> dict[int, float]:
        left = [n for n in range(len(texts)) if n != absent]
        scores = Scorer([reward], 100.0).score(
            [""] * len(left), [texts[n] for n in left], [[1]] * len(left), {}, left, places=left,
            private=True,
        )  # fmt: skip
        assert scores.valid.all()
        return dict(zip(left, scores.values.tolist(), strict=True))

    everyone = scored(99)
    for absent in range(len(texts)):
        assert scored(absent) == {n: s for n, s in everyone.items() if n != absent}


def positioned(kind: str, positions: int) -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=259, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, num_labels=1,
        intermediate_size=16, pad_token_id=2, d_model=16, n_layer=1, n_head=2, d_inner=16,
        **({"max_position_embeddings": positions} if positions else {}),
    )  # fmt: skip
    return getattr(transformers, f"{kind}ForSequenceClassification")(config)


@pytest.mark.parametrize(
    ("kind", "positions", "limit"),
    [
        ("Roberta", 103, 100), ("MPNet", 103, 101), slow("Esm", 103, 100), ("Bert", 97, 97),
        ("GPT2", 100, 100), ("XLNet", 0, 200),
    ],
)  # fmt: skip
def test_the_longest_text_that_a_model_has_positions_for_has_a_score(kind, positions, limit):
    """A family stores positions for padding too, and no family has some for a wider padding."""
    reward = ClassifierReward(
        positioned(kind, positions), tokenizer=byte_tokenizer(), max_tokens=200, batch_size=2,
        text="completion",
    )  # fmt: skip
    texts = ["x" * (limit + more) for more in (-5, -3, -2, 0, 300)]  # with two special tokens
    scores = score(reward, texts)
    assert scores.valid.all()
    assert scores.values.tolist() == score(reward, texts[::-1]).values.tolist()[::-1]
    lengths = [len(ids) for ids in reward._tokens([""] * 5, texts)]
    assert lengths == [limit - 3, limit - 1, limit, limit, limit]


def test_a_text_is_padded_as_it_is_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, _, _ = bert(tmp_path, ["reward"])
    reward = ClassifierReward(str(folder), text="completion", batch_size=4)
    widths: list[int] = []
    forward = reward._forward

    def watched(batch: list[list[int] | None], width: int) -> list[float]:
        widths.extend([width] * sum(ids is not None for ids in batch))
        return forward(batch, width)

    monkeypatch.setattr(reward, "_forward", watched)
    texts = ["good", "good film " * 6]
    for some in ([texts[0]], [texts[1]], texts):
        reward(prompts=[""] * len(some), completions=some)
    alone, company = widths[:2], widths[2:]
    assert alone == company
    assert alone[0] < alone[1]


@pytest.mark.parametrize(
    ("kind", "positions", "limit"), [("Bert", 100, 32), ("Roberta", 35, 32), ("Llama", 32, 32)]
)
def test_a_shorter_text_of_another_user_leaves_the_attention_kernel(
    kind: str, positions: int, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a masked column, fused attention takes a kernel of its own, which may round."""
    reward = ClassifierReward(
        positioned(kind, positions), tokenizer=byte_tokenizer(), max_tokens=limit, batch_size=2,
        text="completion",
    )  # fmt: skip
    real, masks = torch.nn.functional.scaled_dot_product_attention, []

    def watched(*given: Any, attn_mask: Any = None, is_causal: bool = False, **more: Any) -> Any:
        masks.append((attn_mask is not None, is_causal))
        return real(*given, attn_mask=attn_mask, is_causal=is_causal, **more)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", watched)
    full, short = "x" * 90, "x" * (limit - 4)
    alone = reward(prompts=["", ""], completions=[full, full])
    company = reward(prompts=["", ""], completions=[full, short])
    assert len(masks) > 1
    assert set(masks) == {(True, False)}
    assert alone[0] == company[0]


@pytest.mark.parametrize(
    ("kind", "positions"), [("Bert", 40), ("Roberta", 43), ("GPT2", 40), ("XLNet", 0)]
)
def test_a_score_is_that_of_the_text_alone(kind: str, positions: int) -> None:
    """The columns behind a text change nothing, also where the model has no position for them."""
    model = positioned(kind, positions)
    reward = ClassifierReward(
        model, tokenizer=byte_tokenizer(), max_tokens=40, batch_size=2, text="completion"
    )
    texts = ["x" * 30, "y" * 90]
    for ids, found in zip(
        reward._tokens(["", ""], texts), reward(prompts=["", ""], completions=texts), strict=True
    ):
        with torch.no_grad():
            wanted = float(model(input_ids=torch.tensor([ids])).logits)
        assert found == pytest.approx(wanted, abs=1e-6)


def test_a_classifier_with_experts_is_called_for_one_user_at_a_time(tmp_path, monkeypatch):
    folder, _, _ = bert(tmp_path, ["reward"])
    monkeypatch.setattr(
        "dprlhf.rewards.classifier.mixing_layers", lambda model: [("'moe'", "mixes")]
    )
    assert load_reward(recipe.Reward(classifier=str(folder))).per_user


def test_async_rewards_run_with_and_without_a_running_loop() -> None:
    async def slow(completions: list[str], **_: Any) -> list[float]:
        await asyncio.sleep(0)
        return length(completions)

    class Callable_:  # noqa: N801
        async def __call__(self, completions: list[str]) -> list[float]:
            if "bad" in completions:
                raise ValueError(CANARY)
            return await slow(completions)

    async def inside_a_notebook() -> Scores:
        return score([slow, Callable_()], ["a", "bcd"])

    assert score([slow, Callable_()], ["a", "bcd"]).values.tolist() == [2.0, 6.0]
    assert asyncio.run(inside_a_notebook()).values.tolist() == [2.0, 6.0]
    assert score(Callable_(), ["a", "bad"]).values.tolist() == [1.0, 0.0]


def test_a_callable_gets_the_columns_that_it_names() -> None:
    seen: list[set[str]] = []

    def named(completions: list[str], answer: list[str], other: Any = "default") -> list[float]:
        assert other == "default"
        return [float(c == a) for c, a in zip(completions, answer, strict=True)]

    def everything(**columns: Any) -> list[float]:
        seen.append(set(columns))
        columns["log_extra"]("column", [CANARY])
        columns["log_metric"]("metric", 1.0)
        return [float(len(ids)) for ids in columns["completion_ids"]]

    result = score(
        [named, everything], ["a", "bc"], answer=["a", "x"], level=[1, 2], prompt=["q", "q"]
    )
    assert result.values.tolist() == [2.0, 2.0]
    assert seen == [
        {"prompts", "completions", "completion_ids", "answer", "level"}
        | {"trainer_state", "log_extra", "log_metric"}
    ]


@pytest.mark.parametrize("changed", ["prompts", "completions", "tests"])
def test_a_reward_cannot_change_the_messages_of_the_caller(changed: str) -> None:
    def shouting(**columns: Any) -> list[float]:
        found = float(len(columns[changed][0]))
        columns[changed][0][0]["content"] = "HELLO"
        columns[changed][0][0]["parts"].append("more")
        columns[changed][0].append({})
        return [found] * len(columns["prompts"])

    def said() -> list[list[dict[str, Any]]]:
        return [[{"role": "user", "content": "hello", "parts": []}] for _ in range(2)]

    prompts, completions, tests = said(), said(), said()
    for private in (True, False, True):
        made = Scorer([shouting], 10.0)
        scores = made.score(
            prompts, completions, [[1]] * 2, {"tests": tests}, [0, 1], private=private
        )
        assert scores.values.tolist() == [1.0, 1.0]
    assert prompts == completions == tests == said()


def test_a_stream_that_is_closed_for_one_user_is_open_for_the_next() -> None:
    def closing(completions: list[str]) -> list[float]:
        print(completions)
        sys.stdout.close()
        return length(completions)

    assert score(LoadedReward(closing, "c", per_user=True), ["a", "b"]).valid.all()


LOGGER = logging.getLogger("tests.chatty")


def chatty(completions: list[str], **_: Any) -> list[float]:
    print(f"{CANARY} stdout")
    print(f"{CANARY} stderr", file=sys.stderr)
    sys.__stdout__.write(f"{CANARY} original stdout\n")  # stays in its buffer
    sys.__stderr__.write(f"{CANARY} original stderr\n")
    os.write(1, f"{CANARY} descriptor\n".encode())
    os.system(f"echo {CANARY} subprocess")
    warnings.warn(f"{CANARY} warning", stacklevel=1)
    LOGGER.error("%s logging", CANARY)
    logging.getLogger().critical("%s root logging", CANARY)
    raise ValueError(f"{CANARY} exception")


class Records(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


@pytest.mark.parametrize("as_async", [False, True])
def test_what_a_reward_says_reaches_the_secret_sink_only(as_async, capfd, monkeypatch):
    # Buffered, whatever PYTHONUNBUFFERED says: a late flush must not reach the terminal either.
    original_stdout = open(1, "w", closefd=False)  # noqa: SIM115
    monkeypatch.setattr(sys, "__stdout__", original_stdout)

    async def chatty_async(completions: list[str]) -> list[float]:
        return chatty(completions)

    records = Records()
    LOGGER.addHandler(records)
    LOGGER.propagate = False
    sink = io.StringIO()
    pieces: list[str] = []
    reward = chatty_async if as_async else chatty
    try:
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("error")
            result = score(reward, ["a", "b"], sink=sink)
            score(reward, ["a"], sink=pieces.append)
            score(reward, ["a"])
        original_stdout.flush()
        out, err = capfd.readouterr()
        assert CANARY not in out + err
        assert (records.messages, seen) == ([], [])
        assert result.failures == {"ValueError": 2}
        for text in (sink.getvalue(), "".join(pieces)):
            for kind in ("stdout", "stderr", "warning", "logging", "root logging", "exception"):
                assert f"{CANARY} {kind}" in text

        # Control: outside the scorer all of these channels are open and watched.
        with warnings.catch_warnings(record=True) as seen, contextlib.suppress(ValueError):
            warnings.simplefilter("always")
            chatty(["a"])
        original_stdout.flush()
        out, err = capfd.readouterr()
        for kind in ("stdout", "original stdout", "descriptor", "subprocess"):
            assert f"{CANARY} {kind}" in out.splitlines()
        assert f"{CANARY} stderr" in err
        assert f"{CANARY} original stderr" in err
        assert len(seen) == 1
        assert records.messages == [f"{CANARY} logging"]
    finally:
        LOGGER.removeHandler(records)
        LOGGER.propagate = True


class Notebook(io.StringIO):
    """A stream without a file descriptor."""


@pytest.mark.parametrize("name", ["stdout", "stderr"])
@pytest.mark.parametrize("kind", [io.StringIO, Notebook])
def test_a_stream_without_descriptor_that_a_library_kept_shows_nothing(kind, name, monkeypatch):
    notebook, sink = kind(), io.StringIO()
    monkeypatch.setattr(sys, name, notebook)
    kept = getattr(sys, name)  # as loguru and tqdm keep it when they are imported

    def logging_itself(completions: list[str]) -> list[float]:
        kept.write(f"{CANARY} kept\n")
        print(f"{CANARY} print", file=kept)
        kept.writelines([f"{CANARY} lines"])
        return length(completions)

    assert score(logging_itself, ["a"], sink=sink).valid.all()
    assert score(logging_itself, ["a"]).valid.all()
    assert notebook.getvalue() == ""
    assert all(f"{CANARY} {way}" in sink.getvalue() for way in ("kept", "print", "lines"))
    print("still here", file=kept)  # afterwards it writes as before, by its own method
    assert notebook.getvalue() == "still here\n"
    assert "write" not in vars(notebook)
    notebook.write = lambda text: 0  # type: ignore[method-assign]
    own = notebook.write
    score(logging_itself, ["a"])
    assert notebook.write is own


@pytest.mark.parametrize("problem", [KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("as_async", [False, True])
def test_interrupts_pass_without_their_text(problem, as_async, capfd):
    def leaving(completions: list[str]) -> list[float]:
        raise problem(CANARY)

    async def leaving_async(completions: list[str]) -> list[float]:
        async def task() -> None:
            raise problem(CANARY)

        await asyncio.gather(task())
        return []

    with pytest.raises(problem) as caught:
        score(leaving_async if as_async else leaving, ["a"])
    assert CANARY not in str(caught.value)
    assert caught.value.__suppress_context__
    if problem is SystemExit:
        assert caught.value.code == 1  # type: ignore[attr-defined]
    # The terminal is back, and so is the thread of asynchronous rewards.
    os.write(1, b"still here\n")
    assert capfd.readouterr().out == "still here\n"
    assert score(leaving_async, []).valid.all()

    async def fine(completions: list[str]) -> list[float]:
        return [7.0]

    assert score(fine, ["a"]).values.tolist() == [7.0]


PROMPTS = ["one", "one", "two", "three"]
COMPLETIONS = ["a", "bcd", "efghijk", "some more"]


class RunningMean:
    def __init__(self, momentum: float) -> None:
        self.momentum = momentum
        self.mean = 0.0

    def __call__(self, completions: list[str], **_: Any) -> list[float]:
        raw = [float(len(c)) for c in completions]
        self.mean += self.momentum * (sum(raw) / len(raw) - self.mean)
        return [r - self.mean for r in raw]


class Exhausted:
    """Answers something else after so many calls."""

    def __init__(self, calls: int) -> None:
        self.calls = calls

    def __call__(self, completions: list[str]) -> list[float]:
        self.calls -= 1
        return [float(self.calls < 0)] * len(completions)


def first_copy_only(completions: list[str]) -> list[float]:
    return [float(c not in completions[:i]) for i, c in enumerate(completions)]


def in_order_of_length(completions: list[str]) -> list[float]:
    # Right alone and in batches that happen to be sorted, as this one is.
    return [float(len(c)) for c in sorted(completions, key=len)]


def position(completions: list[str]) -> list[float]:
    # Zero when alone, so that only the order can show it.
    return [0.0 if len(completions) == 1 else i / len(completions) for i in range(len(completions))]


@pytest.mark.parametrize(
    ("reward", "check", "numbers"),
    [
        (batch_normalised, "alone", ["-1.2648", "0.0 alone"]),
        (lambda completions: [float(len(completions))] * len(completions), "alone", ["4.0", "1.0"]),
        (position, "alone", ["0.25 in the batch", "0.0 alone"]),
        (
            lambda completions: [i // 2 * 1.0 * (len(completions) > 1) for i in range(4)][
                : len(completions)
            ],
            "alone",
            ["1.0 in the batch", "0.0 alone"],
        ),
        (in_order_of_length, "order", ["9.0 in the batch", "1.0 in reversed"]),
        (first_copy_only, "company", ["1.0 in the batch", "0.0 in a batch with a copy"]),
        (RunningMean(0.5), "repeat", ["-1.5", "-2.75"]),
        (Exhausted(calls=8), "repeat", ["0.0 in the batch", "1.0 after some more calls"]),
    ],
)
def test_rewards_that_couple_users_are_refused(reward: Any, check: str, numbers: list[str]) -> None:
    with pytest.raises(DprlhfError) as caught:
        check_reward(reward, PROMPTS, COMPLETIONS)
    message = str(caught.value)
    assert f"the check '{check}'" in message
    assert "\n" not in message
    for number in numbers:
        assert number in message
    if check == "repeat":
        assert "from call to call" in message
    else:
        assert "`dprlhf_per_user = True`" in message


def test_declared_per_user_a_batch_normalising_reward_passes() -> None:
    def declared(completions: list[str]) -> list[float]:
        return batch_normalised(completions)

    declared.dprlhf_per_user = True  # type: ignore[attr-defined]
    assert check_reward(declared, PROMPTS, COMPLETIONS).per_user
    assert load_reward(functools.partial(declared)).per_user
    check_reward(LoadedReward(batch_normalised, "b", per_user=True), PROMPTS, COMPLETIONS)
    # The rows of a user stay together and in order, so a ranking within a user may use positions.
    check_reward(LoadedReward(position, "position", per_user=True), PROMPTS, COMPLETIONS)
    with pytest.raises(DprlhfError, match="check 'repeat'"):
        check_reward(LoadedReward(RunningMean(0.5), "s", per_user=True), PROMPTS, COMPLETIONS)


@pytest.mark.parametrize(
    ("reward", "text"),
    [
        (lambda completions: [1.0], "answered 1 values for 4 completions"),
        (lambda completions: 1.0, "answered a float, not a list"),
        (lambda completions: [math.nan] * 4, "completion 0 gets nan"),
        (lambda completions: [1.0, "2", 3.0, 4.0], "completion 1 gets '2'"),
        (lambda completions: [None] * len(completions), "never applies"),
        (raising_for("a", ValueError("broken\nhere")), "ValueError: broken here"),
        (lambda completions, solution: [1.0] * 4, "needs the column 'solution'"),
        (lambda completions, solution, **_: [1.0] * 4, "needs the column 'solution'"),
    ],
)
def test_contract_says_what_is_wrong(reward: Any, text: str) -> None:
    with pytest.raises(DprlhfError) as caught:
        check_reward(reward, PROMPTS, COMPLETIONS)
    assert text in str(caught.value)
    assert "\n" not in str(caught.value)


def conversation(text: str) -> list[dict[str, str]]:
    return [{"role": "assistant", "content": text}]


def test_rewards_of_trl_run_unchanged() -> None:
    from trl import rewards as trl_rewards

    thinking = [conversation("<think>\nwhy\n</think>\nyes"), conversation("<think> no end")]
    prompts = [[{"role": "user", "content": "q"}]] * 2
    assert score(trl_rewards.think_format_reward, thinking, prompts=prompts).values.tolist() == [
        1.0,
        0.0,
    ]
    check_reward(trl_rewards.think_format_reward, prompts, thinking)

    # Token ids are the bytes: 5, 9 and 12 of them against a soft limit of 6 and a hard one of 10.
    texts = ["x" * n for n in (5, 9, 12)]
    overlong = trl_rewards.get_soft_overlong_punishment(max_completion_len=10, soft_punish_cache=4)
    assert score(overlong, texts).values.tolist() == [0.0, -0.75, -1.0]
    assert load_reward(overlong).name == "soft_overlong_punishment_reward"
    check_reward(overlong, ["p"] * 3, texts)

    repetition = trl_rewards.get_repetition_penalty_reward(ngram_size=2, max_penalty=-1.0)
    assert score(repetition, ["abcd", "aaaaa"]).values.tolist() == [0.0, -0.75]
    check_reward(repetition, ["p"] * 2, ["abcd", "aaaaa"])


def test_function_from_a_file(tmp_path: Path) -> None:
    first, second = tmp_path / "one" / "mine.py", tmp_path / "two" / "mine.py"
    for path, value in ((first, 1.0), (second, 2.0)):
        path.parent.mkdir()
        path.write_text(
            "from dataclasses import dataclass\n"
            "@dataclass\nclass Constant:\n"
            "    value: float\n    dprlhf_per_user = True\n"
            "    def __call__(self, completions):\n"
            "        return [self.value] * len(completions)\n"
            f"constant = Constant({value})\nnumber = 3\n"
        )
    rewards = [load_reward(recipe.Reward(function=f"{path}:constant")) for path in (first, second)]
    assert score(rewards, ["a", "b"]).values.tolist() == [3.0, 3.0]
    assert all(reward.per_user for reward in rewards)
    for attribute, text in (
        ("Constant", "is the class Constant, not an instance"),
        ("number", "is a int, not a callable"),
        ("constnat", "did you mean 'constant'?"),
    ):
        with pytest.raises(DprlhfError) as caught:
            load_reward(recipe.Reward(function=f"{first}:{attribute}"))
        assert text in str(caught.value)
    broken = tmp_path / "broken.py"
    broken.write_text("raise RuntimeError('two\\nlines')")
    with pytest.raises(DprlhfError, match="RuntimeError: two lines"):
        load_reward(recipe.Reward(function=f"{broken}:constant"))
    with pytest.raises(DprlhfError, match=r"missing\.py' does not exist"):
        load_reward(recipe.Reward(function=f"{tmp_path}/missing.py:f"))


def test_a_file_that_several_rewards_name_runs_once(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(
        "def one(completions): return [1.0] * len(completions)\n"
        "def two(completions): return [2.0] * len(completions)\n"
    )
    one, two, again = (load_reward(f"{path}:{name}").function for name in ("one", "two", "one"))
    assert one.__globals__ is two.__globals__  # what one of them loads, the other has
    assert again is one
    assert pickle.loads(pickle.dumps(one)) is one
    path.write_text("def three(completions): return [3.0] * len(completions)\n")
    assert load_reward(f"{path}:three").function(completions=["a"]) == [3.0]


def byte_tokenizer() -> PreTrainedTokenizerFast:
    specials = ["[PAD]", "[CLS]", "[SEP]"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE({t: i for i, t in enumerate(specials + alphabet)}, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    # As some published tokenizer files do; unmasked, it would change every score.
    inner.enable_padding(length=40, pad_id=0, pad_token="[PAD]")
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="[PAD]", cls_token="[CLS]", sep_token="[SEP]"
    )


def bert(folder: Path, labels: Sequence[str]) -> tuple[Path, Any, Any]:
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=259, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
        intermediate_size=64, max_position_embeddings=64, pad_token_id=0,
        num_labels=len(labels), id2label=dict(enumerate(labels)), initializer_range=0.5,
    )  # fmt: skip
    model = BertForSequenceClassification(config).eval()
    model.save_pretrained(folder)
    tokenizer = byte_tokenizer()
    tokenizer.save_pretrained(folder)
    return folder, model, tokenizer


def manual_logits(model: Any, text: str, limit: int = 10**6) -> torch.Tensor:
    """One text, unpadded, ids made by hand: bytes shifted behind the special tokens."""
    ids = [2 + token for token in tiny.tokenizer()(text)["input_ids"]][-(limit - 2) :]
    with torch.no_grad():
        logits: torch.Tensor = model(torch.tensor([[1, *ids, 2]])).logits[0].double()
    return logits


TEXTS = ["", "a", "good", "a longer text", "word " * 9, "x", "some middling text here"]


@pytest.mark.slow
def test_classifier_matches_single_unpadded_texts(tmp_path: Path) -> None:
    folder, model, _ = bert(tmp_path, ["bad", "fair", "good"])
    for label, index in (("bad", 0), ("good", 2)):
        spec = recipe.Reward(classifier=str(folder), label=label, weight=0.5)
        reward = load_reward(spec)
        prompts = ["p " * (i % 3) for i in range(len(TEXTS))]
        answers = reward.function(prompts=prompts, completions=TEXTS, anything=[1] * 7)
        for prompt, text, answer in zip(prompts, TEXTS, answers, strict=True):
            logits = manual_logits(model, prompt + text)
            probability = torch.softmax(logits, 0)[index]
            assert answer == pytest.approx(float(torch.logit(probability)), abs=1e-5)
        assert np.ptp(answers) > 0.1
        check_reward(reward, prompts, TEXTS, rtol=0.0, atol=1e-5)
    assert reward.weight == 0.5


def test_classifier_with_two_labels_is_the_difference_of_logits(tmp_path: Path) -> None:
    folder, model, _ = bert(tmp_path, ["NEGATIVE", "POSITIVE"])
    reward = ClassifierReward(str(folder), label="POSITIVE", text="completion")
    negative, positive = manual_logits(model, "well")
    [answer] = reward(prompts=["ignored"], completions=["well"])
    assert answer == pytest.approx(float(positive - negative), abs=1e-5)
    [message] = reward(prompts=[conversation("x")], completions=[conversation("well")])
    assert message == answer
    both = ClassifierReward(str(folder), label="POSITIVE")
    joined = both(prompts=[conversation("x")], completions=[conversation("well")])
    negative, positive = manual_logits(model, "x\nwell")
    assert joined == [pytest.approx(float(positive - negative), abs=1e-5)]


def test_truncation_keeps_the_end_of_the_completion(tmp_path: Path) -> None:
    folder, model, tokenizer = bert(tmp_path, ["n", "p"])
    long = "0123456789" * 20
    for limit, used in ((10, 10), (500, 64)):  # the model has 64 positions
        reward = ClassifierReward(str(folder), label="p", max_tokens=limit)
        [answer] = reward(prompts=[long], completions=["the end"])
        logits = manual_logits(model, long + "the end", limit=used)
        assert answer == pytest.approx(float(logits[1] - logits[0]), abs=1e-5)
    tokenizer.model_max_length = 20
    tokenizer.save_pretrained(folder)
    [answer] = ClassifierReward(str(folder), label="p")(prompts=[long], completions=["end"])
    logits = manual_logits(model, long + "end", limit=20)
    assert answer == pytest.approx(float(logits[1] - logits[0]), abs=1e-5)
    start_only = ClassifierReward(str(folder), label="p", max_tokens=10, text="completion")
    a, b = start_only(prompts=["", ""], completions=["12345678", "12345678 cut"])
    assert a == pytest.approx(b, abs=1e-5)


def test_chat_template_is_used_without_further_special_tokens(tmp_path: Path) -> None:
    folder, model, tokenizer = bert(tmp_path, ["n", "p"])
    tokenizer.chat_template = (
        "[CLS]{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}[SEP]"
    )
    tokenizer.save_pretrained(folder)
    [answer] = ClassifierReward(str(folder), label="p")(
        prompts=[[{"role": "user", "content": "q"}]], completions=[conversation("a")]
    )
    negative, positive = manual_logits(model, "<user>q<assistant>a")
    assert answer == pytest.approx(float(positive - negative), abs=1e-5)


def test_decoder_classifier_without_padding_token(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = GPT2ForSequenceClassification(
        GPT2Config(
            vocab_size=257, n_positions=64, n_embd=32, n_layer=2, n_head=4, num_labels=2,
            bos_token_id=0, eos_token_id=0, initializer_range=0.3,
        )
    ).eval()  # fmt: skip
    model.save_pretrained(tmp_path)
    tokenizer = tiny.tokenizer()
    tokenizer.pad_token = None
    tokenizer.save_pretrained(tmp_path)
    reward = ClassifierReward(str(tmp_path), label="LABEL_1", text="completion")
    answers = reward(prompts=[""] * 7, completions=TEXTS)
    for text, answer in zip(TEXTS, answers, strict=True):
        ids = tokenizer(text)["input_ids"] or [0]
        with torch.no_grad():
            hidden = model.transformer(torch.tensor([ids])).last_hidden_state[0, -1]
            logits = model.score(hidden).double()
        assert answer == pytest.approx(float(logits[1] - logits[0]), abs=1e-5)


def test_a_reward_model_object_scores_as_the_one_in_its_folder(tmp_path: Path) -> None:
    folder, model, tokenizer = bert(tmp_path, ["reward"])
    named = load_reward(str(folder))
    expected = named.function(prompts=TEXTS, completions=TEXTS)
    assert (named.name, named.weight) == (str(folder), 1.0)
    model.train()
    tokenizer.truncation_side = "right"
    for spec, its in ((model, tokenizer), ((model, -2), tokenizer)):
        reward = load_reward(spec, tokenizer=its)
        assert reward.function(prompts=TEXTS, completions=TEXTS) == expected
    assert reward.weight == -2.0
    assert not model.training
    assert tokenizer.truncation_side == "right"  # a copy is what is changed
    loaded = BertForSequenceClassification.from_pretrained(folder)
    own = load_reward(loaded)  # its tokenizer is the one beside its weights
    assert own.name == folder.name
    assert own.function(prompts=TEXTS, completions=TEXTS) == expected
    long = ClassifierReward(model, tokenizer=tokenizer)
    assert long._max_tokens == 64  # all that the model has


def test_a_classifier_reads_with_the_tokenizer_that_is_given(tmp_path: Path) -> None:
    folder, model, tokenizer = bert(tmp_path / "reward", ["reward"])
    tokenizer.backend_tokenizer.normalizer = normalizers.Lowercase()
    capitals, small = ({"prompts": [""], "completions": [text]} for text in ("ABC", "abc"))
    beside = load_reward(str(folder)).function
    assert beside(**capitals) != beside(**small)
    for source in (str(folder), model):
        given = load_reward(source, tokenizer=tokenizer).function
        assert given(**capitals) == pytest.approx(beside(**small))


def test_a_token_without_an_embedding_costs_its_user_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """It must not reach the model: on a GPU that would end the run of everybody."""
    model, tokenizer = positioned("Bert", 100), byte_tokenizer()
    tokenizer.add_tokens(["<image>"])  # one more than the model has, as of some families
    reward = ClassifierReward(model, tokenizer=tokenizer, batch_size=2)
    scores = score(reward, ["hi", "look <image>", "yo"])
    assert scores.valid.tolist() == [True, False, True]
    assert scores.failures == {"DprlhfError": 1}
    monkeypatch.setattr(reward, "_forward", lambda *_: pytest.fail("the model was called"))
    with pytest.raises(DprlhfError, match="tokens beyond the 259") as refusal:
        reward(prompts=["", ""], completions=["hi", "look <image>"])
    assert "look" not in str(refusal.value)


def assembled(tmp_path, reward, given):
    policy = {"model_name_or_path": str(tiny.save(tmp_path / "model"))}
    made = least(policy=policy, rewards=[reward] * len(given or [None]))
    sources = InMemoryInputs([f"user {i}" for i in range(40)], given, None)
    return load_parts(made, sources, Processes(Accelerator(cpu=True)), quiet=True)


def test_a_reward_that_rounds_with_its_batch_is_called_for_one_user_at_a_time(tmp_path):
    """The last digit of one user's score would be another's to change."""

    def rounding(prompts: list[str], completions: list[str]) -> list[float]:
        return [len(c) + 1e-6 * len(completions) for c in completions]

    def exact(prompts: list[str], completions: list[str]) -> list[float]:
        return [float(len(c)) for c in completions]

    assert check_reward(rounding, PROMPTS, COMPLETIONS).moved == pytest.approx(
        1e-6 * len(PROMPTS), rel=1e-3
    )
    assert check_reward(exact, PROMPTS, COMPLETIONS).moved == 0.0
    stage, _ = assembled(tmp_path, {"function": recipe.IN_MEMORY}, [rounding, exact])
    assert [r.per_user for r in stage.rewards] == [True, False]
    [slow] = [w for w in stage.spread.warnings if "rounding" in w]
    assert "called for one user at a time" in slow


TUNED = {"statement": "tuned", "runs": [{"run": "a-private-run"}]}
"""The record of a private run, as far as it is read here."""


@pytest.mark.parametrize(
    "form", ["name", "object", "instance", "instance of an object", "partial", "file"]
)
def test_a_reward_model_of_a_private_run_is_known_in_each_form(form: str, tmp_path: Path) -> None:
    """What it cost its users would be in no total."""
    folder, _, _ = bert(tmp_path / "tuned", ["reward"])
    attach(folder, TUNED)
    model = BertForSequenceClassification.from_pretrained(folder)
    file = tmp_path / "held.py"
    file.write_text(
        "from transformers import BertForSequenceClassification\n"
        f"MODEL = BertForSequenceClassification.from_pretrained({str(folder)!r})\n"
    )
    by_name: dict[str, Any] = {"function": recipe.IN_MEMORY}
    reward, given = {
        "name": ({"classifier": str(folder)}, None),
        "object": (by_name, [model]),
        "instance": (by_name, [ClassifierReward(str(folder))]),
        "instance of an object": (by_name, [ClassifierReward(model, tokenizer=byte_tokenizer())]),
        "partial": (by_name, [functools.partial(ClassifierReward(str(folder)))]),
        "file": ({"function": f"{file}:MODEL"}, None),
    }[form]
    with pytest.raises(DprlhfError, match=r"was tuned by a private run on users of its own"):
        assembled(tmp_path, reward, given)


def test_a_reward_with_an_adapter_in_memory_is_refused(tmp_path: Path) -> None:
    """PEFT keeps no record of where an adapter came from."""
    _, model, _ = bert(tmp_path / "base", ["reward"])
    adapted = peft.get_peft_model(model, peft.LoraConfig(task_type="SEQ_CLS", r=1))
    with pytest.raises(DprlhfError, match=r"an adapter in memory does not say which run tuned it"):
        ClassifierReward(adapted, tokenizer=byte_tokenizer())
    with pytest.raises(DprlhfError, match=r"an adapter in memory does not say which run tuned it"):
        assembled(tmp_path, {"function": recipe.IN_MEMORY}, [adapted])


def test_a_run_scores_on_its_own_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The meta device stands for a GPU: it is there everywhere, and is not the CPU."""
    folder, _, _ = bert(tmp_path, ["reward"])
    monkeypatch.setattr(Processes, "device", torch.device("meta"))
    unchecked = RewardSummary(responses=0, mean=0.0, std=1.0, clipped=0.0, bound=1.0, rounded={})
    monkeypatch.setattr("dprlhf.training.reinforcement.check_rewards", lambda *_, **__: unchecked)
    monkeypatch.setattr("dprlhf.training.made_up_rounds._problem", lambda *_: None)
    monkeypatch.setattr("dprlhf.training.made_up_rounds.check_gradients", lambda *_, **__: None)
    stage, parts = assembled(tmp_path, {"classifier": str(folder)}, None)
    [reward] = stage.rewards
    function: Any = reward.function
    assert function.model.device == parts.policy.device == torch.device("meta")


def test_the_guide_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    guide = Path(__file__).parents[2] / "docs" / "rewards.md"
    monkeypatch.chdir(tmp_path)
    failed, tried = doctest.testfile(str(guide), module_relative=False)
    assert failed == 0
    assert tried > 5


@pytest.mark.parametrize("whole", [True, False])
def test_a_conversation_does_not_change_how_a_text_beside_it_is_read(whole: bool) -> None:
    """A column may hold both: each row's tokens follow from that row alone."""
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }} {% endfor %}"
    prompts = ["a b", [{"role": "user", "content": "c"}]]
    completions = ["x", [{"role": "assistant", "content": "d"}]]

    def read(rows: slice) -> list[list[int]]:
        return classifier.classifier_tokens(
            tokenizer, prompts[rows], completions[rows], whole=whole, max_tokens=64
        )

    assert read(slice(None)) == read(slice(1)) + read(slice(1, 2))
