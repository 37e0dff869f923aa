from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dprlhf.recipe import Reward
from dprlhf.rewards import check_reward, load_reward, verifiable

TEXTS = st.text(max_size=60)
NUMBERS = st.integers(-(10**6), 10**6)


@pytest.mark.parametrize("said", ["None", "none.", r"\boxed{None}", "#### None", "A", "", "0"])
@pytest.mark.parametrize("reward", [verifiable.exact_match, verifiable.math_answer])
def test_no_completion_is_right_where_the_row_has_no_answer(reward: Any, said: str) -> None:
    assert reward([said], answer=[None]) == [0.0]


@given(text=TEXTS, other=TEXTS)
def test_exact_match_is_equality_up_to_spaces_case_and_a_full_stop(text: str, other: str) -> None:
    assert verifiable.exact_match([f" {text}\n"], answer=[text]) == [1.0]
    (forth,), (back,) = (
        verifiable.exact_match([a], answer=[b]) for a, b in ((text, other), (other, text))
    )
    assert forth == back
    assert verifiable.exact_match([f"x{text}"], answer=[text]) == [0.0]


def test_exact_match_reads_parts_numbers_and_no_text_where_there_is_none() -> None:
    in_parts = [{"role": "assistant", "content": [{"type": "text", "text": "red"}]}]
    call = [{"role": "assistant", "content": None, "tool_calls": []}]
    answers = ["red", "None", 7]
    assert verifiable.exact_match([in_parts, call, "7"], answer=answers) == [1.0, 0.0, 1.0]


@given(number=NUMBERS, wrong=NUMBERS, after=st.text("xyz \n", max_size=9))
def test_a_marked_answer_counts_and_the_last_one_only(number: int, wrong: int, after: str) -> None:
    for mark in ("\n#### {}\n", "\\boxed{{{}}}", "<answer>{}</answer>"):
        for earlier in ("\n#### {}\n", "\\boxed{{{}}}", "<answer>{}</answer>"):
            text = earlier.format(wrong) + mark.format(f" {number:,}.0 ") + after
            right = verifiable.math_answer([text], answer=[f"so\n#### {number}"])
            assert right == [1.0], text
    if wrong != number:
        text = f"\\boxed{{{number}}} or \\boxed{{{wrong}}}"
        assert verifiable.math_answer([text], answer=[number]) == [0.0]
        text = f"\\boxed{{−{abs(number)}}}"
        assert verifiable.math_answer([text], answer=[-abs(number)]) == [1.0]
    # An answer without a mark is no answer, and neither is a mark without one.
    assert verifiable.math_answer([f"{number}", "\\boxed{", "####"], answer=[number] * 3) == [0] * 3


@pytest.mark.parametrize(
    ("text", "answer", "right"),
    [
        ("3,4", "34", 0), ("3,4", "3,4", 1), ("3, 4", "3,4", 1), ("34", "3,4", 0),
        ("1,234", "1234", 1), ("1,234.", "1234", 1), ("+1,234", 1234, 1), ("$1,234.50", 1234.5, 1),
        ("1234,567", "1234567", 0), ("1,2345", "12345", 0), ("1.5,000", "1.5", 0),
        ("−7", -7, 1), ("-7", "−7", 1), ("−x", "-x", 1), ("7", "−7", 0),
    ],
)  # fmt: skip
def test_a_list_with_commas_is_no_number(text: str, answer: Any, right: int) -> None:
    assert verifiable.math_answer([f"#### {text}"], answer=[answer]) == [right]


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("<answer>x if x < y else y</answer>", "x if x < y else y"),
        ("<answer>1</answer> no, <answer>2 < 3</answer>.", "2 < 3"),
        ("<answer>4</answer> said I</answer>", "4"),
        ("<answer>#### 5</answer>", "5"), ("#### <answer>6</answer>", "6"),
        ("<answer>\\boxed{7}</answer>", "7"), ("#### 8 ####\nend", "8 ####"),
        ("<answer>9", ""), ("9</answer>", ""), ("</answer>9<answer>", ""),
    ],
)  # fmt: skip
def test_what_stands_in_a_mark_is_the_answer(text: str, answer: str) -> None:
    assert verifiable.final_answer(text) == answer
    assert verifiable.marked_answer([text]) == [float(bool(answer))]


ROWS = {
    "exact_match": ["red", "blue", 3.0],
    "math_answer": ["1", "#### 2", "x"],
    "marked_answer": None,
}


@pytest.mark.parametrize("name", ROWS)
def test_each_is_named_in_a_recipe_and_keeps_the_contract(name: str) -> None:
    reward = load_reward(Reward(function=f"dprlhf.rewards.verifiable:{name}"))
    answers = {} if ROWS[name] is None else {"answer": ROWS[name]}
    report = check_reward(reward, ["p", "q", "r"], ["1", "#### 2", "B. red"], answers)
    assert 0 <= report.minimum <= report.maximum <= 1


@pytest.mark.parametrize("answer", ["1." + "1" * 10**6, "7" * 10**6, "1e999999", "nan"])
def test_an_answer_that_is_no_number_in_bounds_is_a_text(answer: str) -> None:
    """A fraction of a million digits takes minutes, in the round of its user."""
    said = [f"#### {answer}", "#### 1"]
    assert verifiable.math_answer(said, answer=[answer] * 2) == [1.0, 0.0]
