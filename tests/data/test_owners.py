"""Rows that belong to several people: each person is in those of one user, and that is public."""

import itertools
import random
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
from datasets import Dataset
from pydantic import ValidationError

from dprlhf import DprlhfError
from dprlhf.boundary import open_private
from dprlhf.data.columns import MOST_BYTES
from dprlhf.data.users import Users
from dprlhf.recipe import Data
from dprlhf.recipe.loading import recipe_from
from helpers.recipes import recipe_settings

Pair = tuple[Any, ...]


def users_of(pairs: Iterable[Pair], prompts: list[Any] | None = None, **spec: Any) -> Users:
    rows = [dict(zip("abc", pair, strict=False)) for pair in pairs]
    for number, row in enumerate(rows):
        row["prompt"] = prompts[number] if prompts else f"row {number}"
    columns = sorted(rows[0].keys() - {"prompt"})
    data = Data(path="here", **{"user_column": columns, "max_prompts_per_user": 9, **spec})
    return Users(Dataset.from_list(rows), data)


def prompts_of(users: Users) -> list[list[Any]]:
    return [users.select(np.array([number])).prompts for number in range(users.count)]


def people_of(users: Users) -> list[set[str]]:
    """The names in the rows of each user."""
    found = []
    for number in range(users.count):
        columns = users.select(np.array([number])).columns
        found.append({str(name) for one in users._spec.owners for name in columns[one]})
    return found


def made_up(seed: int, people: int = 12, rows: int = 40) -> list[Pair]:
    draw = random.Random(seed)
    return [(f"p{draw.randrange(people)}", f"p{draw.randrange(people)}") for _ in range(rows)]


def test_each_person_is_in_the_rows_of_one_user() -> None:
    for seed in range(20):
        pairs = made_up(seed)
        users = users_of(pairs)
        groups = people_of(users)
        assert all(a.isdisjoint(b) for a, b in itertools.combinations(groups, 2))
        taken = set().union(*groups)
        for pair in pairs:  # no pair is left that could be added
            assert not taken.isdisjoint(pair)
        wanted = [[f"row {i}" for i, p in enumerate(pairs) if {*p} == group] for group in groups]
        assert prompts_of(users) == wanted
        assert [texts[0] for texts in wanted] == sorted(
            (texts[0] for texts in wanted), key=lambda text: int(text.split()[1])
        )


def test_people_with_few_partners_come_first() -> None:
    """Two pairs of a path of four, and all leaves but those of one person in the middle."""
    path = [("b", "c"), ("a", "b"), ("c", "d")]
    assert people_of(users_of(path)) == [{"a", "b"}, {"c", "d"}]
    star = [("m", "x"), ("m", "y"), ("m", "z"), ("x", "u")]
    assert people_of(users_of(star)) == [{"m", "y"}, {"x", "u"}]


def test_who_shares_rows_with_whom_decides_alone() -> None:
    """Not contents, lengths, what can be read, the order of rows, or how many a pair has."""
    for seed in range(10):
        pairs = made_up(seed)
        users = users_of(pairs)
        chosen = {frozenset(group) for group in people_of(users)}
        drawn = random.Random(seed)
        kinds = [None, "", "x" * (MOST_BYTES + 1), "why?", "longer " * 20]
        other = users_of(pairs, [drawn.choice(kinds) for _ in pairs])
        assert other.count == users.count
        assert other._order.tolist() == users._order.tolist()
        assert other._starts.tolist() == users._starts.tolist()
        more = [*pairs, *drawn.choices(pairs, k=15)]
        drawn.shuffle(more)
        turned = [pair[::-1] if drawn.random() < 0.5 else pair for pair in more]
        assert {frozenset(group) for group in people_of(users_of(turned))} == chosen


def test_blanking_a_person_changes_one_user() -> None:
    pairs = [*made_up(3), *(("m", name) for name in "xyz")]
    before, changed = prompts_of(users_of(pairs)), []
    for person in sorted({name for pair in pairs for name in pair}):
        blank = [None if person in pair else f"row {i}" for i, pair in enumerate(pairs)]
        after = prompts_of(users_of(pairs, blank))
        assert len(after) == len(before)
        changed.append(sum(a != b for a, b in zip(after, before, strict=True)))
    assert max(changed) == 1
    assert 0 in changed


def test_spellings_of_a_name_are_one_person_in_every_column() -> None:
    users = users_of([(17, "b"), (18, " ｂ"), (17, "18.0"), (19, "017"), (19, "19")])
    assert prompts_of(users) == [["row 1"], ["row 4"]]
    assert prompts_of(users_of([(17, "018"), (18, "17"), (17, "x")])) == [["row 0", "row 1"]]


def test_a_row_of_one_person_alone_and_of_three() -> None:
    alone = users_of([("a", "a"), ("a", "b"), ("b", "c"), ("a", "a")])
    assert prompts_of(alone) == [["row 0", "row 3"], ["row 2"]]
    three = users_of([("a", "b", "c"), ("c", "a", "b"), ("c", "d", "e"), ("d", "e", "e")])
    assert prompts_of(three) == [["row 0", "row 1"], ["row 3"]]


def test_a_missing_owner_is_refused_in_any_column() -> None:
    with pytest.raises(DprlhfError, match="user_column 'b' must hold a text or a number in every"):
        users_of([("a", "b"), ("c", None)])
    with pytest.raises(DprlhfError, match=r"there is no column 'z' \(user_column\)"):
        users_of([("a", "b")], user_column=["a", "z"])


def test_names_of_columns_have_one_order() -> None:
    def data(given: Any) -> Data:
        return Data(path="here", user_column=given)

    assert data(["b", "a"]) == data(("a", "b"))
    assert (data(["b", "a"]).owners, data(["b", "a"]).unit) == (["a", "b"], "a,b")
    assert data(["a"]) == data("a")
    assert (data("a").owners, data("a").unit) == (["a"], "a")
    assert (data(None).owners, data(None).unit) == ([], None)
    for wrong in ([], ["a", "a"], 3, [None]):
        with pytest.raises(ValidationError):
            data(wrong)
    made = recipe_from(recipe_settings(), ["data.user_column=[seller, buyer]"], source="test")
    assert made.data.user_column == ["buyer", "seller"]


def test_each_person_of_a_user_is_known_by_name() -> None:
    """The budget book charges all of them, and nobody whose rows are left out."""
    users = users_of([("a", "b"), ("b", "c"), ("c", "d"), ("a", "b"), ("d", "e"), ("d", "f")])
    charged = open_private(users.hashed(lambda names: {name.encode() for name in names}))
    assert charged == {name.encode() for group in people_of(users) for name in group}
    assert b"b" in charged
    assert charged < {b"a", b"b", b"c", b"d", b"e", b"f"}
    assert len(open_private(users.identities())) == len(charged)
    both = open_private(users.numbers_of(["b", " a"]))
    assert both[0] == both[1]
    left = sorted({"a", "b", "c", "d", "e", "f"} - {name.decode() for name in charged})
    with pytest.raises(DprlhfError, match="there is no user in the column 'a,b'"):
        users.numbers_of(left)
    traced = open_private(users.traces(["a", "b"]))["user"]
    assert len(traced) == len(charged)


def test_rows_left_out_are_counted_for_the_operator() -> None:
    users = users_of([("a", "b"), ("b", "c"), ("a", "b"), ("b", "d")], max_prompts_per_user=1)
    found = open_private(users.left_out(lambda prompts: []))
    kept = sum(map(len, prompts_of(users)))
    assert found["unmatched"] + found["beyond"] + kept == 4
    assert found["unmatched"] >= 2


def test_whoever_is_left_stays_with_whom_he_was() -> None:
    """Rows of a person who has withdrawn are deleted, and nobody finds another partner."""
    for seed in range(3):
        pairs = made_up(seed)
        users = users_of(pairs)
        for person in sorted(set().union(*people_of(users))):
            left = users.without(open_private(users.numbers_of([person])))
            there = [i for i, pair in enumerate(pairs) if person not in pair]
            file = users_of([pairs[i] for i in there], [f"row {i}" for i in there])
            again = file.of_groups(left.groups())
            assert open_private(again.digest()) == open_private(left.digest())
    assert users_of([("a", "a")], user_column="a").groups() == []
