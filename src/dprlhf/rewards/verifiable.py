"""Verifiable rewards: a completion is checked against the answer in the user's row.

Each has TRL's signature and is named in a recipe as
``function: dprlhf.rewards.verifiable:exact_match``. It scores 1 for a completion that passes and 0
for any other. The column that it reads, ``answer``, is part of the user's row, so it is as private
as the prompt.

Completions are texts, or lists of messages of which the last one's content counts. Nothing that a
model wrote is executed. TRL's ``accuracy_reward`` is another such check, but Math-Verify under it
has time limits: a score would depend on what else the machine does, other users' rows among it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from decimal import Decimal
from fractions import Fraction
from typing import Any

from dprlhf.data.messages import last_text

_MINUS = {ord("−"): "-"}
# Any other comma parts the numbers of a list: "3,4" is no 34.
_THOUSANDS = r"(?<![\d.])\d{1,3}(?:,\d{3})+(?!\d)"
_LONGEST = 60
"""Most digits of a number; all else is compared as text. A million digits take minutes."""


def exact_match(completions: Sequence[Any], answer: Sequence[Any]) -> list[float]:
    """Exact match: return 1 for each completion that is the answer, else 0.

    White space around and between words, the case of letters and a full stop at the end do not
    count. In a row without an answer (null) every completion is wrong.

    >>> exact_match([" Red.", "red or blue", [{"role": "assistant", "content": "Blue"}]],
    ...             answer=["red", "red", "blue"])
    [1.0, 0.0, 1.0]
    """

    def same(text: str, right: Any) -> bool:
        return right is not None and _plain(text) == _plain(str(right))

    return _each(same, completions, answer)


def math_answer(completions: Sequence[Any], answer: Sequence[Any]) -> list[float]:
    r"""Return 1 for each completion whose marked answer is the right one, as for GSM8K and MATH.

    A completion must mark its answer as :func:`final_answer` reads it. Two numbers are compared as
    numbers, so that 1,000 is 1000.0; all else is compared as text without spaces. In a row without
    an answer (null) every completion is wrong.

    Args:
        answer: The right answer to each prompt, or a worked solution that marks it, such as the
            column ``answer`` of GSM8K.

    >>> math_answer(["6 * 7 = 42\n#### 42", r"It is \boxed{41}.", "42"], answer=["#### 42"] * 3)
    [1.0, 0.0, 0.0]
    """

    def right(text: str, wanted: Any) -> bool:
        key = (final_answer(str(wanted)) or str(wanted)).translate(_MINUS)
        actual = final_answer(text).translate(_MINUS)
        if not actual or wanted is None:
            return False
        one, other = _exact_number(actual), _exact_number(key)
        if one is not None and other is not None:
            return one == other
        return "".join(actual.split()) == "".join(key.split())

    return _each(right, completions, answer)


def marked_answer(completions: Sequence[Any]) -> list[float]:
    """Format reward: return 1 for each completion that marks an answer, right or wrong, else 0.

    :func:`final_answer` says which marks count.
    """
    return _each(lambda text: bool(final_answer(text)), completions)


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


def _exact_number(text: str) -> Fraction | None:
    if "," in re.sub(_THOUSANDS, "", text):
        return None
    written = text.replace(",", "").replace("$", "").strip()
    try:
        # Bounded before each conversion: 1e999999 as a fraction would fill the memory.
        decimal = Decimal(written) if len(written) <= _LONGEST else None
        in_bounds = decimal is not None and abs(decimal.adjusted()) <= _LONGEST
        return Fraction(decimal) if decimal is not None and in_bounds else None
    except (ValueError, ArithmeticError):
        return None
