"""Verifiable rewards: a completion is checked against the answer in the user's row.

Each has TRL's signature and is named in a recipe as
``function: dprlhf.rewards.verifiable:exact_match``. It scores 1 for a completion that passes and 0
for any other, :func:`passes_tests` the share of tests passed. The column that it reads (``answer``,
``numbers``, ``tests``) is part of the user's row, so it is as private as the prompt.

Completions are texts, or lists of messages of which the last one's content counts. Nothing that a
model wrote is executed (:mod:`dprlhf.rewards.expressions`).
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

from dprlhf.data.messages import last_text
from dprlhf.rewards.expressions import number_of, parse, value_of

_MINUS = {ord("−"): "-"}
# Any other comma parts the numbers of a list: "3,4" is no 34.
_THOUSANDS = r"(?<![\d.])\d{1,3}(?:,\d{3})+(?!\d)"
# A hyphen after a digit is no sign: the last number of "10-12" is 12.
_NUMBER = re.compile(
    rf"(?:(?<!\d)-)?\$?(?:(?:{_THOUSANDS}|\d+)(?:\.\d+)?|(?<!\d)\.\d+)(?:[eE][-+]?\d+)?"
)
# For texts with single spaces: runs of them, which a model may write without end, would take a time
# quadratic in their length.
# "a" and "I" before another word are an article and a pronoun: "the answer is a guess".
_CHOICE = re.compile(r"(?i:answer(?: is)?) ?:? ?\(?([A-Ja-j])\b(?!['’])(?!(?<=[aI]) \w)")
_LEADING_CHOICE = re.compile(r"\(?([A-Ja-j])(?:[).:]|$)")


def exact_match(completions: Sequence[Any], answer: Sequence[Any]) -> list[float]:
    """Exact match: return 1 for each completion that is the answer, else 0.

    White space around and between words, the case of letters and a full stop at the end do not
    count. In a row without an answer (null) every completion is wrong.

    Args:
        completions: The completions.
        answer: The right answer to each prompt.

    >>> exact_match([" Red.", "red or blue", [{"role": "assistant", "content": "Blue"}]],
    ...             answer=["red", "red", "blue"])
    [1.0, 0.0, 1.0]
    """

    def same(text: str, right: Any) -> bool:
        return right is not None and _plain(text) == _plain(str(right))

    return _each(same, completions, answer)


def numeric_match(
    completions: Sequence[Any],
    answer: Sequence[Any],
    tolerance: Sequence[Any] | None = None,
) -> list[float]:
    """Return 1 for each completion whose last number is the answer within a tolerance, else 0.

    The number is taken from the marked answer (:func:`final_answer`) where there is one, else from
    the whole text; it may have commas between thousands, a dollar sign and an exponent.

    Args:
        completions: The completions.
        answer: The right number of each prompt, or a text whose last number it is.
        tolerance: Largest absolute difference that counts as right, for each prompt; without this
            column, 1e-6 times the answer's absolute value, at least 1e-6.

    >>> numeric_match(["So it is 1,234.50.", "about 3.1"], answer=[1234.5, 3.14159])
    [1.0, 0.0]
    >>> numeric_match(["about 3.1"], answer=[3.14159], tolerance=[0.1])
    [1.0]
    """

    def close(text: str, right: Any, allowed: Any) -> bool:
        # As text, a number of Python may have an exponent: 1e-05 is no 5.
        wanted = _last_number(right) if isinstance(right, str) else _exact_number(right)
        found = _last_number(text)
        if found is None or wanted is None:
            return False
        bound = max(Fraction(1), abs(wanted)) / 10**6 if allowed is None else number_of(allowed)
        return abs(found - wanted) <= bound

    return _each(close, completions, answer, tolerance or [None] * len(answer))


def math_answer(completions: Sequence[Any], answer: Sequence[Any]) -> list[float]:
    r"""Return 1 for each completion whose marked answer is the right one, as for GSM8K and MATH.

    A completion must mark its answer as :func:`final_answer` reads it. Two numbers are compared as
    numbers, so that 1,000 is 1000.0; all else is compared as text without spaces. In a row without
    an answer (null) every completion is wrong.

    Args:
        completions: The completions.
        answer: The right answer to each prompt, or a worked solution that marks it, such as the
            column ``answer`` of GSM8K.

    >>> math_answer(["6 * 7 = 42\n#### 42", r"It is \boxed{41}.", "42"], answer=["#### 42"] * 3)
    [1.0, 0.0, 0.0]
    """

    def right(text: str, wanted: Any) -> bool:
        key = (final_answer(str(wanted)) or str(wanted)).translate(_MINUS)
        found = final_answer(text).translate(_MINUS)
        if not found or wanted is None:
            return False
        one, other = _exact_number(found), _exact_number(key)
        if one is not None and other is not None:
            return one == other
        return "".join(found.split()) == "".join(key.split())

    return _each(right, completions, answer)


def multiple_choice(completions: Sequence[Any], answer: Sequence[str]) -> list[float]:
    r"""Return 1 for each completion that names the right option, a letter from A to J, else 0.

    The option is looked for in the marked answer (:func:`final_answer`), and if that names none in
    the whole text. It is the letter after the last "answer", as in "The answer is **(B)**"; or else
    the letter with which the text begins, alone or before a bracket, full stop or colon. After
    "answer", an "a" or "I" before another word is an article or a pronoun. A completion that names
    no option so is wrong, and so is every one where the row has no letter.

    Args:
        completions: The completions.
        answer: The letter of the right option of each prompt.

    >>> multiple_choice(["B", "(b) Rome", r"So \boxed{B}", "A good question: the answer is C.",
    ...                  "A dog"], answer=["B", "B", "B", "C", "A"])
    [1.0, 1.0, 1.0, 1.0, 0.0]
    """

    def right(text: str, letter: str) -> bool:
        wanted = str(letter).strip().strip("().").upper()
        return (_option(final_answer(text)) or _option(text)) == wanted != ""

    return _each(right, completions, answer)


def countdown(
    completions: Sequence[Any], numbers: Sequence[Sequence[int] | str], answer: Sequence[Any]
) -> list[float]:
    """Return 1 for each expression that makes the answer from the numbers given, else 0.

    The "Countdown" task: ``(25 - 1) * 2`` makes 48 from 1, 2, 25. The expression is the marked
    answer (:func:`final_answer`), or else the whole completion. It may use each number once, the
    operations +, −, × and ÷, and brackets; a quotient is exact, never rounded (``//``). In a row
    without numbers or answer (null) every completion is wrong.

    Args:
        completions: The completions.
        numbers: The numbers that may be used, for each prompt: a list, or the JSON text of one.
        answer: The value to reach, for each prompt.

    >>> countdown(["(25 - 1) * 2", "48", "<answer>25 + 25 - 2</answer>"], numbers=[[1, 2, 25]] * 3,
    ...           answer=[48] * 3)
    [1.0, 0.0, 0.0]
    """

    def right(text: str, given: Sequence[int] | str | None, target: Any) -> bool:
        written = final_answer(text) or text
        if given is None or target is None:
            return False
        if not set(written) <= set("0123456789+-*/(). \t\n") or "//" in written:
            return False
        allowed = json.loads(given) if isinstance(given, str) else given
        used = Counter(re.findall(r"[\d.]+", written))  # with its point, .25 is no 25
        reached = value_of(parse(written))
        return reached == number_of(target) and used <= Counter(str(number) for number in allowed)

    return _each(right, completions, numbers, answer)


def passes_tests(completions: Sequence[Any], tests: Sequence[Any]) -> list[float]:
    """Return the share of the user's test cases that each expression passes, in [0, 1].

    The expression is the marked answer (:func:`final_answer`), or else the whole completion. It is
    written in Python, in the names of a test's inputs; what it may contain stands in
    :mod:`dprlhf.rewards.expressions`. Programs are not offered: to run one safely takes a sandbox
    of its own and a time limit, and a score may not depend on the clock. In a row without test
    cases (null, or an empty list) every completion scores 0.

    Args:
        completions: The completions.
        tests: Test cases of each prompt: a list, or the JSON text of one, of pairs of inputs by
            name and the right value, which are numbers or truth values. Whole numbers are compared
            exactly, others up to a relative difference of 1e-9, as floats are rounded.

    >>> cases = '[[{"x": 3, "y": 5}, 5], [{"x": 7, "y": 2}, 7]]'
    >>> passes_tests(["max(x, y)", "y", "open('/etc/passwd').read()"], tests=[cases] * 3)
    [1.0, 0.5, 0.0]
    """

    def share(text: str, cases: Any) -> float:
        wanted = json.loads(cases) if isinstance(cases, str) else cases
        if not wanted:
            return 0.0
        tree = parse(final_answer(text) or text)
        passed = [_same(value_of(tree, inputs), number_of(right)) for inputs, right in wanted]
        return sum(passed) / len(passed)

    return _each(share, completions, tests)


def marked_answer(completions: Sequence[Any]) -> list[float]:
    """Format reward: return 1 for each completion that marks an answer, right or wrong, else 0.

    :func:`final_answer` says which marks count.

    Args:
        completions: The completions.
    """
    return _each(lambda text: bool(final_answer(text)), completions)


def matches(pattern: str) -> Callable[[Sequence[Any]], list[float]]:
    r"""Return a format reward: 1 for each completion that a regular expression matches as a whole.

    Assign it to a name in a file of your own, ``two_lines = matches(r"[^\n]+\n[^\n]+")``, and name
    that in the recipe. The pattern is the same for all users; one from a user's row could take
    hours to match.

    Args:
        pattern: A regular expression, for :func:`re.fullmatch` with ``.`` for any character. It is
            yours to choose one that does not backtrack without end.
    """
    compiled = re.compile(pattern, re.DOTALL)

    def format_reward(completions: Sequence[Any]) -> list[float]:
        return _each(lambda text: compiled.fullmatch(text) is not None, completions)

    return format_reward


def final_answer(text: str) -> str:
    r"""Return the answer that a text marks, or "" if it marks none.

    It is what stands last: after ``####`` on its line (GSM8K), in ``\boxed{…}`` (MATH) or in
    ``<answer>…</answer>``. Of marks in one another, the inner one counts.

    >>> final_answer(r"First \boxed{1}, no: \boxed{\frac{1}{2}}.")
    '\\frac{1}{2}'
    """
    marked = (_on_a_line(text), _in_a_box(text), _in_tags(text))
    _, answer = max((one for one in marked if one is not None), default=(0, ""))
    return answer.strip()


def _each(score: Callable[..., float], completions: Sequence[Any], *columns: Any) -> list[float]:
    rows = zip(completions, *columns, strict=True)
    return [float(score(last_text(completion), *row)) for completion, *row in rows]


def _plain(text: str) -> str:
    return " ".join(text.split()).casefold().removesuffix(".").rstrip()


def _on_a_line(text: str) -> tuple[int, str] | None:
    """Return where the last line with ``####`` has it, and what follows on that line."""
    last = text.rfind("####")
    if last < 0:
        return None
    start = text.find("####", text.rfind("\n", 0, last) + 1)
    line = text[start + len("####") :].partition("\n")[0]
    return start, line.partition("</answer>")[0]


def _in_a_box(text: str) -> tuple[int, str] | None:
    r"""Return where the last ``\boxed{`` starts, and the text up to the brace that closes it."""
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    inside = text[start + len("\\boxed{") :]
    depth = 1
    for place, letter in enumerate(inside):
        depth += (letter == "{") - (letter == "}")
        if not depth:
            return start, inside[:place]
    return None


def _in_tags(text: str) -> tuple[int, str] | None:
    """Return where the last closed ``<answer>`` starts, and the text up to ``</answer>``."""
    # Searched for from the end, not by a pattern: an answer may contain "<", and a pattern that
    # allows it takes a time quadratic in the number of tags that are never closed.
    start = text.rfind("<answer>", 0, max(0, text.rfind("</answer>")))
    if start < 0:
        return None
    return start, text[start + len("<answer>") :].partition("</answer>")[0]


def _option(text: str) -> str:
    """Return the letter of the option that a text names, in upper case, or "" if it names none."""
    text = " ".join(text.replace("*", "").split())  # "*": bold print in Markdown
    named = _CHOICE.findall(text)
    leading = _LEADING_CHOICE.match(text)
    return (named[-1] if named else leading[1] if leading else "").upper()


def _last_number(text: str) -> Fraction | None:
    text = text.translate(_MINUS)
    marked = _NUMBER.findall(final_answer(text)) or _NUMBER.findall(text)
    return _exact_number(marked[-1]) if marked else None


def _exact_number(value: Any) -> Fraction | None:
    if isinstance(value, str) and "," in re.sub(_THOUSANDS, "", value):
        return None
    try:
        return number_of(value)
    except (ValueError, ArithmeticError):
        return None


def _same(found: Fraction | None, right: Fraction) -> bool:
    """Return whether two numbers are equal; of fractions, up to the rounding of floats."""
    if found is None or found.denominator == right.denominator == 1:
        return found == right
    return math.isclose(found, right, rel_tol=1e-9, abs_tol=1e-12)
