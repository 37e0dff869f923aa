"""Rows without prompts, to which an environment gives them: who is a user, and by what."""

from typing import Any

import datasets
import numpy as np
import pytest

from dprlhf import DprlhfError
from dprlhf.boundary import open_private
from dprlhf.data.users import Users
from dprlhf.recipe import Data

ROWS = {"environment": ["a", "b", "a"], "seed": [1, 2, 3], "who": ["x", "y", "x"]}


def users_of(rows: dict[str, list[Any]], **settings: Any) -> Users:
    may = settings.pop("may_lack_prompts", True)
    spec = Data(path="in-memory", **settings)
    return Users(datasets.Dataset.from_dict(rows), spec, may_lack_prompts=may)


def test_each_row_is_a_user_with_an_empty_message_and_its_columns() -> None:
    users = users_of(ROWS)
    assert users.count == 3
    assert users.conversations
    prompts = users.readable(np.array([2, 0]), lambda some: None)
    assert prompts.prompts == [[{"role": "user", "content": ""}]] * 2
    assert prompts.columns["seed"] == [3, 1]
    assert not prompts.in_rows
    assert not prompts.take([1]).in_rows
    assert not open_private(users.left_out(lambda some: [False] * len(some)))


def test_a_column_makes_users_of_several_rows() -> None:
    users = users_of(ROWS, user_column="who", max_prompts_per_user=2)
    assert users.count == 2
    assert users.select(np.array([0])).columns["seed"] == [1, 3]
    named = users_of({**ROWS, "prompt": ["?"] * 3}, user_column="who")
    same = [open_private(each.identities()).tolist() for each in (users, named)]
    assert same[0] == same[1]


def test_rows_are_known_by_all_their_columns() -> None:
    other = {**ROWS, "seed": [1, 2, 4]}
    first, second = users_of(ROWS), users_of(other)
    assert open_private(first.digest()) != open_private(second.digest())
    shared = np.isin(open_private(first.identities()), open_private(second.identities()))
    assert shared.tolist().count(True) == 2
    assert len(shared) == 3
    hashed = [open_private(each.hashed(lambda names: {n.encode() for n in names}))
              for each in (first, second)]  # fmt: skip
    assert len(hashed[0] & hashed[1]) == 2
    traces = [open_private(each.traces("who"))["text"] for each in (first, second)]
    assert np.isin(traces[0], traces[1]).sum() == 2


def test_a_row_to_which_an_environment_gives_the_prompt_is_a_user_even_without_values() -> None:
    users = users_of({"environment": ["a", None], "seed": [1, None]})
    assert len(open_private(users.identities())) == 2
    assert len(open_private(users.hashed(lambda names: {n.encode() for n in names}))) == 2


def test_the_name_of_an_environment_alone_is_nobodys_row() -> None:
    users = users_of({"environment": ["a", "b"]})
    assert len(open_private(users.traces(None))["text"]) == 0
    assert users.count == 2


def test_a_missing_column_is_refused_unless_an_environment_gives_the_prompt() -> None:
    with pytest.raises(DprlhfError, match="no column 'prompt'"):
        users_of(ROWS, may_lack_prompts=False)
    with pytest.raises(DprlhfError, match="no column 'question'"):
        users_of(ROWS, prompt_column="question")
    with pytest.raises(DprlhfError, match="no column 'name'"):
        users_of(ROWS, user_column="name")
