"""Users: grouped by their own rows alone, bounded, and never quoted."""

import gzip
import importlib
import io
import json
import logging
import math
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import datasets
import numpy as np
import pandas as pd
import PIL.Image
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dprlhf import DprlhfError
from dprlhf.boundary import Private, open_private
from dprlhf.data.columns import MOST_BYTES, bytes_of
from dprlhf.data.given_rows import rows_from
from dprlhf.data.in_memory import rows_of
from dprlhf.data.loading import load_rows
from dprlhf.data.messages import last_text, text_of
from dprlhf.data.names import names_as_written
from dprlhf.data.public import check_form, prompts_in
from dprlhf.data.spelling import DEPTH, written
from dprlhf.data.users import Prompts, Users
from dprlhf.recipe import Data

CANARY = "CANARY my private prompt"


def users(rows: dict[str, list[Any]], **spec: Any) -> Users:
    if "user" in rows:
        spec.setdefault("user_column", "user")
    return Users(datasets.Dataset.from_dict(rows), Data(path="here", **spec))


def prompts_of(made: Users) -> list[list[Any]]:
    """Return each user's prompts, in the order of the users."""
    return [made.select(np.array([u])).prompts for u in range(made.count)]


def hashed(made: Users) -> set[bytes]:
    """Return what the budget book knows of the users, here without its key."""
    return open_private(made.hashed(lambda names: {name.encode() for name in names}))


CALLS = {"type": "function", "function": {"arguments": {"z": 1, "a": 2}, "name": "look"}}
PLAIN_ROW = {
    "prompt": [{"role": "user", "content": "why?"}],
    "about": {"unit": "m", "by": "a"},
    "wants": 3,
}
OTHERS_ROWS: dict[str, dict[str, Any]] = {
    "another message key": {"prompt": [{"role": "user", "content": "b", "name": "Bo"}]},
    "a tool call": {"prompt": [{"role": "assistant", "content": "", "tool_calls": [CALLS]}]},
    "another order": {"prompt": [{"content": "b", "role": "user"}]},
    "a column of its own": {"prompt": [{"role": "user", "content": "b"}], "own": "x"},
    "another key in a column": {"about": {"size": 2, "unit": "km"}},
    "another order in a column": {"about": {"by": "b", "unit": "km"}},
    "no number": {"wants": None},
    "a fraction": {"wants": 2.5},
    "nothing": {"prompt": None, "about": None, "wants": None},
    "an empty row": {},
}


@pytest.mark.parametrize("source", ["list", "csv", "jsonl", "parquet", "generator"])
@pytest.mark.parametrize("other", OTHERS_ROWS)
def test_no_row_changes_how_another_is_read(other: str, source: str, tmp_path: Path) -> None:
    """A column has one type for all rows, so that a key or a gap of one shows in the others'."""
    row = dict.fromkeys(PLAIN_ROW) | OTHERS_ROWS[other]
    if source in ("list", "generator") and other == "an empty row":
        row = {}
    seen = [
        read_with(first, source, tmp_path / f"{number}")
        for number, first in enumerate([PLAIN_ROW, row])
    ]
    assert seen[0] == seen[1]


def read_with(first: dict[str, Any], source: str, folder: Path) -> str:
    """Return how two users are read behind a first one, keys in their order."""
    folder.mkdir()
    given = [first, PLAIN_ROW, PLAIN_ROW | {"wants": 4}]
    file = str(folder / f"rows.{source}")
    if source == "csv":  # which holds texts and numbers alone
        flat = [{k: v for k, v in one.items() if k == "wants"} for one in given]
        pd.DataFrame([{"prompt": "a", **one} for one in flat]).to_csv(file, index=False)
    elif source == "jsonl":
        Path(file).write_text("\n".join(map(json.dumps, given)))
    elif source == "parquet":
        rows_from(given, "prompt").to_parquet(file)
    kept: dict[str, Any] = {"list": given, "generator": iter(given)}
    rows = rows_from(kept[source], "prompt") if source in kept else load_rows(Data(path=file))
    found = Users(rows, Data(path="here")).select(np.array([1, 2]))
    return repr((found.prompts, {k: v for k, v in found.columns.items() if k != "own"}))


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["x", "x", "y", "z"], [["p0", "p1"], ["p2"], ["p3"]]),
        (["z", "a", "z", "a"], [["p0", "p2"], ["p1", "p3"]]),
        ([10, 9, 10, 9], [["p0", "p2"], ["p1", "p3"]]),
        ([-1, 0, 1, -1], [["p0", "p3"], ["p1"], ["p2"]]),
        (["1", "01", "1 ", "1"], [["p0", "p1", "p2", "p3"]]),
        (["", "b", "", "b"], [["p0", "p2"], ["p1", "p3"]]),
        (["é", "e\u0301", "é", "E"], [["p0", "p1", "p2"], ["p3"]]),
        ([0.5, 0.25, 0.5, 1e300], [["p0", "p2"], ["p1"], ["p3"]]),
        *(
            (np.array([0.0, 1.5, -0.0, 2.0], kind), [["p0", "p2"], ["p1"], ["p3"]])
            for kind in (np.float16, np.float32, np.float64)
        ),
    ],
    ids=str,
)
def test_rows_with_one_value_are_one_user_in_order_of_arrival(names, expected):
    made = users({"prompt": ["p0", "p1", "p2", "p3"], "user": names}, max_prompts_per_user=9)
    assert prompts_of(made) == expected
    assert made.count == len(expected)


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.string_view()])
def test_a_name_in_several_spellings_is_one_user(kind: pa.DataType) -> None:
    """As for the budget book, which would charge once for what two users bring."""
    names = ["José", "ann", "Jose\u0301", " José\u2003", "Ann", "ann\x1c", "José", "fi", "\ufb01"]
    table = pa.table({"prompt": list("abcdefghi"), "user": pa.array(names, kind)})
    spec = Data(path="here", user_column="user", max_prompts_per_user=9)
    made = Users(datasets.Dataset(table), spec)
    assert prompts_of(made) == [["a", "c", "d", "g"], ["b", "f"], ["e"], ["h", "i"]]
    assert hashed(made) == {name.encode() for name in ("José", "ann", "Ann", "fi")}


@pytest.mark.slow
@settings(max_examples=40)
@given(st.lists(st.from_regex(r"[-+ ]?[0-9.eA\u200b\uff10é\u0301]{0,6} ?", fullmatch=True)))
def test_a_column_of_names_is_written_as_each_of_them(names: list[str]) -> None:
    column = names_as_written(pa.chunked_array([pa.array(names, pa.string())]))
    assert column.to_pylist() == [written(name) for name in names]


@pytest.mark.parametrize(
    ("name", "text"),
    [("0010", "10"), ("-007.0", "-7"), ("000", "0"), ("-0.00", "0"), ("1.70", "1.70")]
    + [
        (name, "7")
        for name in ("+7", "\uff17", "7\u200b", "\ufeff7", "\u202e7", "7\x00", "\u00a07")
    ]
    + [(name, name) for name in ("007a", "1e3", "0x7", "7.", ".0", "0.5", "٠٧", "0 7", "", "A")],
)
def test_spellings_that_look_alike_tell_no_two_people_apart(name: str, text: str) -> None:
    assert written(name) == text
    assert names_as_written(pa.chunked_array([[name]])).to_pylist() == [text]


def test_a_name_is_one_persons_where_datasets_has_read_the_files(tmp_path: Path) -> None:
    """It guesses types for each file: the user "007" of the first is 7 in the second."""
    for number, names in enumerate((["A12", "007"], ["007"])):
        lines = ["user,prompt", *(f"{name},why" for name in names)]
        (tmp_path / f"train-{number}.csv").write_text("\n".join(lines) + "\n")
    rows = datasets.load_dataset(str(tmp_path), split="train", cache_dir=str(tmp_path / "cache"))
    assert rows["user"][:] == ["A12", "007", "7"]
    data = Data(path="here", user_column="user", max_prompts_per_user=2)
    assert Users(rows_from(rows, "prompt"), data).count == 2


def test_one_user_replaced_by_another_moves_nobody_else() -> None:
    # Under ``stream`` every m arrivals make a round: a rank among the sorted names would shift.
    prompts = [f"p{i}" for i in range(6)]
    first = users({"prompt": prompts, "user": ["b", "c", "d", "c", "e", "f"]})
    second = users({"prompt": prompts, "user": ["z", "c", "d", "c", "e", "f"]})
    assert prompts_of(first) == prompts_of(second)


@pytest.mark.parametrize(
    "names", [["a", None], [1.0, float("nan")], [["a"], ["b"]], [["a", "b"], ["c"]]], ids=str
)
def test_a_row_without_a_user_is_refused(names: list[Any]) -> None:
    with pytest.raises(DprlhfError, match="user_column 'user' must hold a text or a number"):
        users({"prompt": [CANARY, "b"], "user": names})


def test_select_tells_users_slots_and_the_other_columns() -> None:
    made = users(
        {
            "prompt": ["a0", "b0", "a1", "c0", "a2", "b1"],
            "user": ["a", "b", "a", "c", "a", "b"],
            "answer": [0, 1, 2, 3, 4, 5],
        },
        max_prompts_per_user=2,
    )
    chosen = made.select(np.array([2, 0, 1]))
    assert chosen.prompts == ["c0", "a0", "a1", "b0", "b1"]
    assert chosen.users.tolist() == [2, 0, 0, 1, 1]
    assert chosen.slots.tolist() == [0, 0, 1, 0, 1]
    assert chosen.columns == {"user": ["c", "a", "a", "b", "b"], "answer": [3, 0, 2, 1, 5]}
    assert len(chosen) == 5
    assert isinstance(made.dropped_prompts, Private)
    assert open_private(made.dropped_prompts) == 1


@pytest.mark.slow
@settings(max_examples=30, deadline=None)
@given(
    rows=st.lists(st.tuples(st.sampled_from("abcde"), st.integers(0, 99)), min_size=1, max_size=25),
    extra=st.lists(
        st.tuples(st.sampled_from("abcdexyz"), st.integers(100, 199), st.integers(0, 30)),
        max_size=10,
    ),
    limit=st.integers(1, 4),
)
def test_what_a_user_keeps_depends_on_its_own_rows_alone(rows, extra, limit):
    def kept(of: list[tuple[str, int]]) -> dict[str, list[str]]:
        made = users(
            {"prompt": [str(p) for _, p in of], "user": [u for u, _ in of]},
            max_prompts_per_user=limit,
        )
        chosen = made.select(np.arange(made.count))
        found: dict[str, list[str]] = {}
        for prompt, user in zip(chosen.prompts, chosen.columns["user"], strict=True):
            found.setdefault(user, []).append(str(prompt))
        return found

    before = kept(rows)
    for name in {u for u, _ in rows}:
        own = [str(p) for u, p in rows if u == name]
        assert before[name] == own[:limit]
        # Rows of others come in anywhere; this user keeps what it kept.
        mixed = list(rows)
        for other, prompt, place in extra:
            if other != name:
                mixed.insert(place, (other, prompt))
        assert kept(mixed)[name] == before[name]
        alone = [row for row in rows if row[0] == name]
        assert kept(alone) == {name: before[name]}


def test_missing_prompts_are_empty_and_words_are_counted() -> None:
    made = users({"prompt": [None, "", " one  two\nthree ", "x"]})
    assert prompts_of(made) == [[""], [""], [" one  two\nthree "], ["x"]]
    short = users({"prompt": [None, "", " one  two\nthree ", "x"]}, prompt_words=2)
    assert prompts_of(short) == [[""], [""], ["one two"], ["x"]]


def refusing_bad(error: type[BaseException]) -> Callable[[Prompts], None]:
    def encode(some: Prompts) -> None:
        if "bad" in some.prompts:
            raise error(some.prompts)

    return encode


def test_an_unreadable_row_is_left_out_alone_and_told_to_the_operator() -> None:
    made = users({"prompt": ["a", "bad", "c", "d", None], "name": ["x", "y", "y", "z", "x"]},
                 user_column="name", max_prompts_per_user=2)  # fmt: skip
    everyone, told, encode = np.arange(3), list[str](), refusing_bad(ValueError)
    made.tell = told.append
    left = made.readable(everyone, encode)
    assert left.prompts == ["a", "c", "d"]
    assert left.users.tolist() == [0, 1, 2]
    assert left.slots.tolist() == [0, 1, 0]
    assert left.grid.tolist() == [[0, -1], [-1, 1], [2, -1]]  # a place is its row's alone
    assert left.columns == {"name": ["x", "y", "z"]}
    made.readable(everyone, encode)  # in a further round nothing is told again
    assert told == [
        "row 5 is left out: it cannot be read (a row has no 'prompt': fill or drop it)",
        "row 2 is left out: it cannot be read (ValueError)",
    ]
    assert made.readable(everyone, lambda some: None).prompts == ["a", "bad", "c", "d"]
    assert made.readable(everyone, lambda some: 1 / 0).prompts == []


def nested(depth: int) -> Any:
    value: Any = "b"
    for _ in range(depth):
        value = [value]
    return value


TOO_LARGE: dict[str, Any] = {
    "long": "x" * (MOST_BYTES + 1),
    "long, in parts": [{"role": "user", "content": [{"type": "text", "text": "x" * 999}] * 1100}],
    "many entries": [[]] * 70_000,
    "deep": nested(DEPTH + 1),
    "deeper": nested(600),
    "many keys": {f"key {i}": 1 for i in range(2_000)},
}


@pytest.mark.parametrize("large", TOO_LARGE.values(), ids=TOO_LARGE)
def test_what_is_too_large_is_never_read(large: Any, tmp_path: Path) -> None:
    """A tokenizer takes up to 300 MB for a text of 1 MB: that of one user ends the process."""
    file = tmp_path / "a.jsonl"
    rows = [{"prompt": p, "user": u} for u, p in enumerate(["a", large, "x" * 5_000, nested(9)])]
    file.write_text("\n".join(map(json.dumps, rows)))
    read, told = list[Any](), list[str]()
    for column in ("user", None):
        data = Data(path=str(file), user_column=column)
        made = Users(load_rows(data), data)
        made.tell = told.append
        left = made.readable(np.arange(4), lambda some: read.extend(some.prompts))
        assert left.users.tolist() == [0, 2, 3]
        assert made.count == 4
        open_private(made.digest())
        assert len(open_private(made.identities())) >= 3
        open_private(made.traces(data.owners))
    assert all(len(str(prompt)) <= 5_000 for prompt in read)
    assert [line[:20] for line in told] == ["row 2 is left out: i"] * 2
    public = Users(load_rows(data), data)
    if public._too_large.any():
        with pytest.raises(DprlhfError, match=r"a row takes more than 1,048,576 bytes"):
            public.select(np.arange(4))


def test_bytes_are_counted_row_by_row() -> None:
    columns: list[tuple[pa.Array, list[int]]] = [
        (pa.array(["a", "bcé", None]), [1, 4, 0]),
        (pa.array(["a", "bcé"], pa.string_view()), [1, 4]),
        (pa.array(["a", "bb", "a"]).dictionary_encode(), [1, 2, 1]),
        (pa.array([["a", "bc"], None, [], ["d"]]), [35, 0, 0, 17]),
        (pa.array([{"role": "a", "content": ["bc"]}, None]), [19, 0]),
        (pa.array([[("k", "vv")], None], pa.map_(pa.string(), pa.string())), [19, 0]),
        (pa.array([b"x" * 64, b""]), [2, 0]),
        (pa.array([1.5, None]), [0, 0]),
    ]
    for column, sizes in columns:
        assert bytes_of(column).tolist() == sizes
        assert bytes_of(column.slice(1)).tolist() == sizes[1:]


def test_a_panic_in_compiled_code_leaves_out_its_user_and_nobody_else() -> None:
    """What PyO3 raises for a panic in Rust, as in ``tokenizers``, is no ``Exception``."""
    encode = refusing_bad(type("PanicError", (BaseException,), {}))
    assert users({"prompt": ["a", "bad", "c"]}).readable(np.arange(3), encode).prompts == ["a", "c"]


@pytest.mark.parametrize("exit_", [KeyboardInterrupt, SystemExit])
def test_an_interrupt_is_no_unreadable_prompt(exit_: type[BaseException]) -> None:
    with pytest.raises(exit_):
        users({"prompt": ["bad"]}).readable(np.arange(1), refusing_bad(exit_))


def picture(width: int) -> dict[str, Any]:
    held = io.BytesIO()
    PIL.Image.new("1", (width, width)).save(held, "PNG")
    return {"bytes": held.getvalue(), "path": None}


def test_an_image_that_is_broken_or_has_too_many_pixels_leaves_out_its_row_alone() -> None:
    """A hundred kilobytes hold so many that decoding them takes the memory of a run."""
    before = PIL.Image.MAX_IMAGE_PIXELS
    images = [picture(4), picture(6_000), {"bytes": b"broken", "path": None}]
    rows = datasets.Dataset.from_dict(
        {"prompt": ["a", "b", "c"], "image": images},
        features=datasets.Features({"prompt": datasets.Value("string"), "image": datasets.Image()}),
    )
    made = Users(rows, Data(path="given"))
    assert made.readable(np.arange(3), lambda some: None).prompts == ["a"]
    assert not open_private(made.left_out(lambda some: [False] * len(some)))  # none is decoded
    assert before == PIL.Image.MAX_IMAGE_PIXELS
    of_tasks = Users(rows.remove_columns("prompt"), Data(path="given"), may_lack_prompts=True)
    assert open_private(of_tasks.digest()) == open_private(of_tasks.digest())
    assert len(hashed(of_tasks)) == len(open_private(of_tasks.identities())) == 3
    assert len(open_private(of_tasks.traces([]))["text"])


ODD_VALUES: dict[str, tuple[Any, Any]] = {
    "a fraction, a long number": (0.5, 4929123456789012345),
    "a date, a number": ("2024-01-01T00:00:00Z", 1),
    "a list, a text": ([1], "x"),
    "a long number in a list": ([0.5], [4929123456789012345]),
}


@pytest.mark.parametrize("pair", ODD_VALUES.values(), ids=ODD_VALUES)
def test_values_that_no_type_holds_together_keep_what_they_are(pair: Any, tmp_path: Path) -> None:
    file, messages = tmp_path / "a.jsonl", tmp_path / "m.csv"
    file.write_text("".join(json.dumps({"prompt": "a", "of": one}) + "\n" for one in pair))
    assert load_rows(Data(path=str(file)))["of"] == list(pair)
    talks = [json.dumps([{**MESSAGE, "of": one}]) for one in pair]
    pd.DataFrame({"messages": talks}).to_csv(messages, index=False)
    data = Data(path=str(messages), prompt_column="messages")
    made = Users(load_rows(data), data).readable(np.arange(2), lambda some: None)
    assert [talk[0]["of"] for talk in made.prompts] == list(pair)


def test_nan_in_json_is_no_value(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text('{"prompt": "a", "x": NaN}\n{"prompt": NaN, "x": [1, 1e999]}\n')
    rows = load_rows(Data(path=str(file)))
    assert rows["prompt"] == ["a", None]
    assert rows["x"] == [None, [1, None]]


def test_a_first_row_that_is_no_header_is_not_quoted(tmp_path: Path) -> None:
    file = tmp_path / "a.csv"
    file.write_text("u17,My doctor says: SECRET\nu18,x\n")
    with pytest.raises(DprlhfError, match="there is no column 'prompt'") as refused:
        Users(load_rows(Data(path=str(file))), Data(path=str(file)))
    assert not any(word in str(refused.value) for word in ("SECRET", "u17"))


def test_the_same_rows_are_the_same_whatever_is_no_number() -> None:
    rows = {"prompt": ["a", "b"], "score": [math.nan, 1.0]}
    assert users(rows).has_rows_of(users(rows))
    assert not users(rows).has_rows_of(users({**rows, "score": [0.0, 1.0]}))


MESSAGE = {"role": "user", "content": "a"}
ONE_AFTER_ANOTHER: dict[str, list[Any]] = {
    "nothing, then text": [None, None, "a"],
    "whole numbers, then a fraction": [{"prompt": "a", "x": i} for i in (1, 2, 2.5)],
    "no value, then text": [{"prompt": "a", "x": x} for x in (None, None, "b")],
    "another column": [{"prompt": "a"}, {"prompt": "b"}, {"prompt": "c", "x": 1}],
    "no messages, then some": [[], [], [MESSAGE]],
    "another key of a message": [[MESSAGE], [MESSAGE], [{**MESSAGE, "name": "Bo"}]],
    "another order": [[MESSAGE], [MESSAGE], [{"content": "b", "role": "user"}]],
    "lists of numbers": [{"prompt": "a", "x": x} for x in ([], [1], [1.5])],
    "a mapping": [{"prompt": "a", "x": x} for x in (None, {"a": 1}, {"b": "c"})],
}


@pytest.mark.parametrize("rows", ONE_AFTER_ANOTHER.values(), ids=ONE_AFTER_ANOTHER)
@pytest.mark.parametrize("at_once", [1, 2, 10])
def test_a_generator_is_read_as_a_list_is(rows, at_once, tmp_path, monkeypatch):
    """It is kept on disk a part at a time, and a part may have other types than the first."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr("dprlhf.data.given_rows.ROWS_AT_ONCE", at_once)
    listed, made = rows_from(rows, "prompt"), rows_from(iter(rows), "prompt")
    assert made.features == listed.features
    assert made.to_dict() == listed.to_dict()
    assert not list(tmp_path.iterdir())  # a kill leaves nothing of them


def test_an_error_of_ones_own_generator_is_called_so_and_not_quoted() -> None:
    def fails_later() -> Iterator[Any]:
        yield {"prompt": "a"}
        raise KeyError(CANARY)

    def fails_at_once() -> Any:
        raise KeyError(CANARY)

    for prompts in (fails_later, fails_later(), fails_at_once):
        with pytest.raises(DprlhfError, match="prompts: what makes them raised KeyError") as caught:
            rows_from(prompts, "prompt")
        assert "CANARY" not in str(caught.value)
        assert caught.value.__suppress_context__


@pytest.mark.parametrize(
    ("prompts", "told"),
    [
        ([[CANARY], ["b", "c"]], "lists of string"),
        ([[{CANARY: "user", "value": "hi"}]], "lists of mappings without a role"),
        ([{"role": "user", "content": CANARY}], "mappings"),
        ([CANARY.encode()], "binary"),
        ([[]], "lists of null"),
    ],
    ids=["texts", "other keys", "one message", "bytes", "empty"],
)
def test_prompts_that_no_policy_reads_are_refused(prompts: list[Any], told: str) -> None:
    """Every user would be unreadable, and the whole budget be spent on nothing."""
    with pytest.raises(DprlhfError) as caught:
        users({"prompt": prompts})
    assert str(caught.value) == (
        f"data 'here': prompt_column 'prompt' holds {told}: give texts, numbers, or conversations,"
        " which are lists of messages with a role and a content"
    )


def digest(rows: dict[str, list[Any]], **spec: Any) -> str:
    found = users(rows, **spec).digest()
    assert isinstance(found, Private)
    return open_private(found)


def test_the_digest_changes_with_every_prompt_user_and_order() -> None:
    base: dict[str, list[Any]] = {"prompt": ["a", "b", "c"], "user": ["x", "y", "x"]}
    others: list[dict[str, list[Any]]] = [
        {"prompt": ["a", "b", "d"], "user": ["x", "y", "x"]},
        {"prompt": ["b", "a", "c"], "user": ["x", "y", "x"]},
        {"prompt": ["a", "b", "c"], "user": ["x", "x", "y"]},
        {"prompt": ["a", "b", "c"], "user": ["x", "y", "z"]},
        {"prompt": ["a", "b", "c", ""], "user": ["x", "y", "x", "x"]},
        {"prompt": ["a", "b"], "user": ["x", "y"]},
        {"prompt": ["a", "b", None], "user": ["x", "y", "x"]},
        {"prompt": ["ab", "", "c"], "user": ["x", "y", "x"]},
        {"prompt": ['a", "b', "", "c"], "user": ["x", "y", "x"]},
    ]
    digests = [digest(rows) for rows in (base, *others)]
    assert len(set(digests)) == len(digests)
    assert digest(base) == digests[0]
    assert all(len(bytes.fromhex(d)) == 32 for d in digests)


@pytest.mark.parametrize("rows", [{}, {"user": [f"u{i}" for i in range(5)]}], ids=["rows", "names"])
def test_every_user_is_known_again_however_many_there_are(rows, monkeypatch):
    """Their hashes are taken a part of the rows at a time."""
    monkeypatch.setattr("dprlhf.data.users.ROWS_AT_ONCE", 2)
    made = users({"prompt": [f"p{i}" for i in range(5)], **rows})
    assert len(open_private(made.identities())) == 5
    kind = "u" if rows else "p"
    assert hashed(made) == {f"{kind}{i}".encode() for i in range(5)}
    assert len(open_private(made.traces(["user"]))["text"]) == 5


@pytest.mark.parametrize(
    ("one", "another"),
    [
        ([17, 18], [17.0, 0.5]),
        ([17, 18], ["17", "x"]),
        (["17"], [17.0, 0.5]),
        ([" Ann"], ["Ann\n"]),
        (["é"], ["e\u0301"]),
        ([0.5], ["0.5"]),
        ([True], ["true"]),
        (["017"], [17]),
        (["17.00"], ["0017"]),
        (["-0"], [0.0, 0.5]),
    ],
    ids=str,
)
def test_a_user_is_known_again_however_a_file_spells_the_name(one, another):
    """As the budget book and the comparison with public rows have it: one person, one name."""
    made = [users({"prompt": ["a"] * len(n), "user": n}) for n in (one, another)]
    assert hashed(made[0]) & hashed(made[1])
    traced = [open_private(m.traces(["user"]))["user"] for m in made]
    assert np.isin(traced[0], traced[1]).any()
    known = [open_private(m.identities()) for m in made]
    assert np.isin(known[0], known[1]).any()
    assert np.isin(traced[0], known[0]).all()  # one hash of one spelling
    other = users({"prompt": ["a", "b"], "user": ["Bea", "170"]})
    assert not np.isin(known[0], open_private(other.identities())).any()


def test_each_row_brings_its_own_arguments_for_the_chat_template() -> None:
    own = [{"mood": "glad"}, {"mood": "calm"}]
    made = users({"prompt": ["a", "b"], "chat_template_kwargs": own})
    found = made.select(np.arange(2)).for_template
    assert [row["chat_template_kwargs"] for row in found] == own


def test_rows_without_a_prompt_are_nobody_in_particular() -> None:
    """They contribute nothing, and two of them in unrelated data are not one person."""
    made, other = users({"prompt": [None, "a", "", None]}), users({"prompt": ["b", None]})
    assert (made.count, other.count) == (4, 2)  # they count in N all the same
    assert hashed(made) == {b"a", b""}
    assert hashed(other) == {b"b"}
    known = [open_private(m.identities()) for m in (made, other)]
    assert [len(hashes) for hashes in known] == [2, 1]
    assert not np.isin(known[0], known[1]).any()
    # A word is a prompt, whatever it says, and whoever has a name is that person.
    assert hashed(users({"prompt": ["null", "None", "nan"]})) == {b"null", b"None", b"nan"}
    assert hashed(users({"prompt": [None, "a"], "user": ["x", "null"]})) == {b"x", b"null"}
    # Two such rows that change places are two users who change rounds.
    moved = [{"prompt": [None, "a", None], "answer": answers} for answers in ([1, 2, 3], [3, 2, 1])]
    assert digest(moved[0]) != digest(moved[1])


@pytest.mark.parametrize("prompts", ["aba", "abc"])
def test_where_rows_are_users_the_digest_covers_all_columns(prompts: str) -> None:
    """What a row has beside its prompt is a person's, who would be in two rounds if it moved."""
    rows: dict[str, list[Any]] = {"prompt": list(prompts), "answer": [1, 2, 3]}
    swapped = {"prompt": list(prompts), "answer": [3, 2, 1]}
    assert digest(rows) != digest(swapped)
    # Where names tell the users apart, another column may be mended between two starts.
    more = {"user": ["x", "y", "z"]}
    assert digest(rows | more) == digest(swapped | more)


TABLE: dict[str, list[Any]] = {"prompt": ["why?", "how?", "who?"], "wants": [1, -1, 1]}


@pytest.mark.parametrize("library", ["pandas", "pyarrow"])
def test_a_table_is_read_by_rows_not_by_the_names_of_its_columns(library: str) -> None:
    module = importlib.import_module(library)
    table = module.DataFrame(TABLE) if library == "pandas" else module.table(TABLE)
    if library == "pandas":
        table.index = [7, 7, 9]  # an index is no column
    assert rows_from(table, "prompt").to_dict() == TABLE


@pytest.mark.parametrize("second", [5, "as Arrow has it"])
def test_a_table_that_cannot_be_read_is_refused_without_quoting_it(second, monkeypatch):
    said = r"the column .prompt. mixes types"
    if second != 5:  # an error of the whole table
        said = r"could not be read \(ArrowInvalid\)"
        refuse = mock.Mock(side_effect=pa.ArrowInvalid(CANARY))
        monkeypatch.setattr(datasets.Dataset, "from_pandas", refuse)
    with pytest.raises(DprlhfError, match=said) as caught:
        rows_from(pd.DataFrame({"prompt": [CANARY, second]}), "prompt")
    assert "CANARY" not in str(caught.value)
    assert caught.value.__suppress_context__


TALKS: dict[str, list[Any]] = {
    "prompt": [[{"role": "user", "content": text}] for text in ("hello", "bye")],
    "answer": [1, 2],
    "user": ["a", "b"],
}
FORMATS = [
    {"type": "numpy"}, {"type": "pandas"}, {"type": "arrow"}, {"type": "torch"},
    {"type": None, "columns": ["answer"]},
]  # fmt: skip


@pytest.mark.parametrize("form", [{}, *FORMATS], ids=str)
@pytest.mark.parametrize("kind", ["memory", "disk", "streaming"])
def test_rows_are_read_alike_whatever_the_format_of_their_dataset(kind, form, tmp_path):
    """numpy, say, would make an array of a conversation, which trains as the text of its repr."""
    rows = datasets.Dataset.from_dict(TALKS).with_format(**form)
    if kind == "disk":
        rows.save_to_disk(tmp_path / "rows")
        read = load_rows(Data(path=str(tmp_path / "rows")))
    elif kind == "streaming":
        streaming = datasets.Dataset.from_dict(TALKS).to_iterable_dataset()
        read = rows_from(streaming.with_format(form.get("type")), "prompt")
    else:
        read = rows_from(rows, "prompt")
    made, plain = (Users(r, Data(path="x", user_column="user"))
                   for r in (read, datasets.Dataset.from_dict(TALKS)))  # fmt: skip
    assert prompts_of(made) == [[prompt] for prompt in TALKS["prompt"]]
    assert made.select(np.arange(2)).columns == {"answer": [1, 2], "user": ["a", "b"]}
    for name, hashes in open_private(plain.traces(["user"])).items():
        assert open_private(made.traces(["user"]))[name].tolist() == hashes.tolist()
    assert open_private(made.digest()) == open_private(plain.digest())
    assert rows_from(datasets.Dataset.from_dict(TALKS), "prompt").to_dict() == TALKS


@pytest.mark.parametrize("kind", [set, frozenset])
def test_a_set_is_refused_as_its_order_changes(kind: type) -> None:
    for prompts in (kind({CANARY, "b"}), lambda: kind({CANARY, "b"})):
        with pytest.raises(DprlhfError, match=r"could not be resumed: give sorted") as caught:
            rows_from(prompts, "prompt")
        assert "CANARY" not in str(caught.value)
    assert rows_from(dict.fromkeys(["b", "a"]).keys(), "prompt")["prompt"][:] == ["b", "a"]


@pytest.mark.parametrize(
    "mixture",
    [
        [5, CANARY],
        [CANARY, {"prompt": "a"}],
        [{"prompt": "a"}, CANARY],
        [{"prompt": 5}, {"prompt": CANARY}],
        [[{"role": "user", "content": CANARY}], [{"role": "user", "content": 5}]],
    ],
    ids=["numbers", "text first", "dict first", "values", "conversations"],
)
def test_a_mixture_is_refused_without_quoting_it(mixture: list[Any]) -> None:
    with pytest.raises(DprlhfError, match="rows of one kind") as caught:
        rows_from(mixture, "prompt")
    assert "CANARY" not in str(caught.value)
    assert caught.value.__suppress_context__


ROWS: dict[str, list[Any]] = {"prompt": ["a, b", 'say "c"', "d"], "user": ["x", "y", "x"]}


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def table(which: str = "") -> datasets.Dataset:
    return datasets.Dataset.from_dict({**ROWS, "prompt": [p + which for p in ROWS["prompt"]]})


def write_jsonl(rows: datasets.Dataset, path: Path) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


WRITERS: dict[str, Callable[[datasets.Dataset, Path], Any]] = {
    "csv": lambda rows, path: rows.to_csv(path),
    "jsonl": write_jsonl,
    "parquet": lambda rows, path: rows.to_parquet(path),
}


@pytest.mark.parametrize("kind", WRITERS)
def test_a_file(tmp_path: Path, kind: str) -> None:
    path = tmp_path / f"rows.{kind}"
    WRITERS[kind](table(), path)
    assert load_rows(Data(path=str(path))).to_dict() == ROWS
    assert load_rows(Data(path=str(path), limit=2)).to_dict() == {k: v[:2] for k, v in ROWS.items()}
    assert len(load_rows(Data(path=str(path), limit=100))) == 3


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_the_copy_that_datasets_makes_is_nobody_elses_to_read(kind, tmp_path, monkeypatch):
    cache = tmp_path / "cache"
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", cache)
    place = tmp_path / ("users.parquet" if kind == "file" else "data")
    file = place / "data/train-0.parquet" if kind == "folder" else place
    file.parent.mkdir(parents=True, exist_ok=True)
    pd.DataFrame({"text": [CANARY]}).to_parquet(file)
    assert load_rows(Data(path=str(place), prompt_column="text"))["text"] == [CANARY]
    copies = [f for f in cache.rglob("*") if f.is_file() and CANARY.encode() in f.read_bytes()]
    assert copies
    for copy in copies:
        within = [folder for folder in copy.parents if cache in folder.parents]
        assert any(folder.stat().st_mode & 0o077 == 0 for folder in within)


def test_a_dataset_saved_to_disk(tmp_path: Path) -> None:
    table().save_to_disk(tmp_path / "one")
    assert load_rows(Data(path=str(tmp_path / "one"))).to_dict() == ROWS
    both = datasets.DatasetDict({"train": table(), "test": table("!")})
    both.save_to_disk(tmp_path / "both")
    assert load_rows(Data(path=str(tmp_path / "both"))).to_dict() == ROWS
    assert load_rows(Data(path=str(tmp_path / "both"), split="test"))["prompt"][2] == "d!"
    with pytest.raises(DprlhfError, match="could not be loaded"):
        load_rows(Data(path=str(tmp_path / "both"), split="validation"))


@pytest.mark.parametrize("split", ["train[:1]", "train[50%:]", "train+test"])
@pytest.mark.parametrize("place", ["rows.jsonl", "saved", "both"])
def test_a_part_of_a_split_is_not_read_as_all_of_it(tmp_path: Path, place: str, split: str) -> None:
    """Rows of one's own have no such parts: all would be taken, and nothing would say so."""
    rows = datasets.Dataset.from_dict({"prompt": ["a", "b", "c"]})
    rows.to_json(tmp_path / "rows.jsonl")
    rows.save_to_disk(tmp_path / "saved")
    datasets.DatasetDict(train=rows, test=rows).save_to_disk(tmp_path / "both")
    with pytest.raises(DprlhfError, match="skip and limit") as refused:
        load_rows(Data(path=str(tmp_path / place), split=split))
    assert split in str(refused.value)


def test_only_what_can_be_a_hub_id_is_looked_up_on_the_hub(tmp_path, monkeypatch):
    """The name of a file may tell something, and must not leave the machine."""
    monkeypatch.chdir(tmp_path)
    asked: list[str] = []

    def load_dataset(path: str, *_: Any, **__: Any) -> Any:
        asked.append(path)
        raise FileNotFoundError("no such dataset")

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    monkeypatch.setattr("dprlhf.hub._hub_answers", lambda: True)
    for name in ("patients.arrow", "patients.xlsx", "patients.CSV", "patients"):
        (tmp_path / name).write_text("prompt\na\n")
        for path in (name, f"./{name}", str(tmp_path / name)):
            with pytest.raises(DprlhfError, match=r"use \.csv, \.json, \.jsonl"):
                load_rows(Data(path=path))
    missing = (
        "./clients", "../clients", "~/clients", "/clients", "~clients", "a/b/clients", "my clients",
        "clients.tsv", "a/clients.txt", "clients.csv.gz", "a/clients.JSONL",
    )  # fmt: skip
    for path in missing:
        with pytest.raises(DprlhfError, match="there is no such file"):
            load_rows(Data(path=path))
    assert asked == []
    for path in ("imdb", "stanfordnlp/imdb", "owner/set-v1.0"):
        with pytest.raises(DprlhfError, match="could not be loaded"):
            load_rows(Data(path=path))
    assert asked == ["imdb", "stanfordnlp/imdb", "owner/set-v1.0"]


BROKEN = {
    "quotes": ("a.csv", b'prompt,x\na,1\n"CANARY,2,3,4\nCANARY,1,2,3\n'),
    "json": ("c.jsonl", b'{"prompt": "a"}\n{"prompt": CANARY}\n'),
    "parquet": ("d.parquet", b"CANARY"),
    "encoding": ("e.csv", b"prompt\n\xff\xfeCANARY\n"),
    "empty": ("f.csv", b""),
    "tabs": ("g.tsv", b'prompt\tx\na\t1\n"CANARY\t2\t3\nCANARY\t1\t2\n'),
    "text": ("h.txt", b"a\n\xff\xfeCANARY\n"),
    "return": ("i.csv", b"prompt\na\rCANARY\n"),
    "short": ("j.csv", b"prompt,x\na,1\nCANARY\n"),
    "return in tabs": ("k.tsv", b"prompt\ta\rCANARY\n"),
    "return in a text": ("l.txt", b"a\rCANARY\n"),
    "return in json": ("m.jsonl", b'{"prompt": "a"}\r{"prompt": "CANARY"}\n'),
    "one name": ("o.csv", b"Unnamed: 1,\nCANARY,CANARY\n"),
    "open quote": ("n.csv", b'prompt\na\n"CANARY\nCANARY\n'),
}


@pytest.mark.parametrize(("name", "content"), BROKEN.values(), ids=BROKEN)
def test_a_broken_file_is_named_and_not_quoted(tmp_path, capsys, name, content):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(DprlhfError) as caught:
        load_rows(Data(path=str(path)))
    shown = str(caught.value)
    assert f"data '{path}': could not be loaded" in shown
    assert "\n" not in shown
    assert "CANARY" not in shown
    assert caught.value.__suppress_context__
    streams = capsys.readouterr()
    assert "CANARY" not in streams.out + streams.err


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.csv", "rows.parquet", "train.jsonl"])
def test_no_bar_shows_how_many_rows_were_read(tmp_path, monkeypatch, capsys, name):
    """The number of users is public, that of their rows is not."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "rows"
    folder.mkdir()
    rows = pd.DataFrame({"prompt": [f"prompt {i}" for i in range(1_237)]})
    if name.endswith(".csv"):
        rows.to_csv(folder / name, index=False)
    elif name.endswith(".parquet"):
        rows.to_parquet(folder / name, index=False)
    else:
        rows.to_json(folder / name, orient="records", lines=True)
    datasets.enable_progress_bars()
    assert (
        len(load_rows(Data(path=str(folder if name == "train.jsonl" else folder / name)))) == 1_237
    )
    streams = capsys.readouterr()
    assert streams.out + streams.err == ""
    assert datasets.is_progress_bar_enabled()  # as the program had it


def test_what_datasets_logs_about_a_file_is_not_shown(tmp_path, monkeypatch):
    """Its readers log what Arrow says, and Arrow quotes the value that it cannot convert."""
    logger = logging.getLogger("datasets.packaged_modules.text.text")
    logged: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = logged.append  # type: ignore[method-assign]

    def failing(*_: Any, **__: Any) -> Any:
        logger.error("Failed to read file: could not convert 'CANARY'")
        raise ValueError("CANARY")

    monkeypatch.setattr(datasets, "load_dataset", failing)
    (tmp_path / "a.parquet").write_text("a")
    logger.addHandler(handler)
    try:
        with pytest.raises(DprlhfError) as caught:
            load_rows(Data(path=str(tmp_path / "a.parquet")))
        assert not logged
        logger.error("the control")
    finally:
        logger.removeHandler(handler)
    assert [record.getMessage() for record in logged] == ["the control"]
    assert "CANARY" not in str(caught.value)


def test_the_lines_of_a_text_file_are_the_same_for_users_and_for_samples(tmp_path: Path) -> None:
    """A blank line is nobody, and a separator of lines within a line separates none."""
    file = tmp_path / "a.txt"
    file.write_text("a\n\nb\u2028c\r\n \t\nd\n\n", encoding="utf-8", newline="")
    lines = ["a", "b\u2028c", "d"]
    made = Users(load_rows(Data(path=str(file))), Data(path=str(file)))
    assert made.count == 3
    assert prompts_of(made) == [[line] for line in lines]
    assert prompts_in(file, "prompt") == lines
    assert load_rows(Data(path=str(file), skip=1))["prompt"][:] == lines[1:]
    file.write_text("\n \n", encoding="utf-8")
    assert len(load_rows(Data(path=str(file)))) == 0


@pytest.mark.parametrize("suffix", ["csv", "tsv"])
def test_only_an_empty_field_has_no_value(suffix: str, tmp_path: Path) -> None:
    """pandas takes "NA" and the like for gaps: their users would be nobody."""
    lines = ["prompt,answer,user", "N/A,None,NA", "null,007,nan", ",,x"]
    file = tmp_path / f"a.{suffix}"
    file.write_text("\n".join(lines).replace(",", "," if suffix == "csv" else "\t"))
    assert load_rows(Data(path=str(file))).to_dict() == {
        "prompt": ["N/A", "null", None],
        "answer": ["None", "007", None],
        "user": ["NA", "nan", "x"],
    }


PARTS = {
    "the lines of a file": {"rows.csv": ("A1,007",) * 10_000 + ("007,1", "0081,2")},
    "files of a folder": {"train-0.csv": ("A12,1", "007,2", "0081,3"), "train-1.csv": ("007,4",)},
    "one of them packed": {"train-0.csv": ("A12,1", "007,2"), "train-1.csv.gz": ("007,4",)},
    "with tabs": {"train.tsv": ("A12\t1",) * 10_000 + ("007\t2",)},
    "dates": {
        "train-0.jsonl": ('{"user": "abc"}', '{"user": "2024-01-01"}'),
        "train-1.jsonl": ('{"user": "2024-01-01"}',),
    },
}


@pytest.mark.parametrize("parts", PARTS)
def test_a_user_has_one_name_in_all_parts_of_a_source(parts: str, tmp_path: Path) -> None:
    """``datasets`` guesses types for each part: "007" among texts is 7 in another part."""
    names = set()
    for name, lines in PARTS[parts].items():
        table, mark = "sv" in name, "\t" if name.endswith(".tsv") else ","
        text = "\n".join([f"user{mark}prompt"] * table + list(lines)) + "\n"
        packed = gzip.compress(text.encode()) if name.endswith(".gz") else text.encode()
        (tmp_path / name).write_bytes(packed)
        names |= {line.split(mark)[0] if table else json.loads(line)["user"] for line in lines}
    place = tmp_path / "rows.csv" if "rows.csv" in PARTS[parts] else tmp_path
    data = Data(path=str(place), user_column="user", max_prompts_per_user=3)
    if parts == "dates":
        data = data.model_copy(update={"prompt_column": "user"})
    rows = load_rows(data)
    assert set(rows["user"]) == names
    assert Users(rows, data).count == len(names)


def test_a_csv_column_has_the_type_of_all_its_values(tmp_path: Path) -> None:
    """And no value of a user depends on which other users have lines near it."""
    cells = {
        "whole": ("3", "-4", "", "9007199254740993"), "number": ("3", "0.5", "1e-3", ""),
        "truth": ("True", "FALSE", "true", ""), "text": ("1.50", "007", "soon", ""),
        "long": ("9007199254740993", "0.5", "1", ""), "answer": ("yes", "no", "", ""),
    }  # fmt: skip
    lines = [",".join(cells), *(",".join(row) for row in zip(*cells.values(), strict=True))]
    (tmp_path / "a.csv").write_text("\n".join([lines[0], *lines[1:] * 4_000]) + "\n")
    rows = load_rows(Data(path=str(tmp_path / "a.csv"), prompt_column="answer"))[-4:]
    assert rows == {
        "whole": [3, -4, None, 9007199254740993],
        "number": [3.0, 0.5, 0.001, None],
        "truth": [True, False, True, None],
        "text": ["1.50", "007", "soon", None],
        # A fraction beside it would make this 9007199254740992.
        "long": ["9007199254740993", "0.5", "1", None],
        "answer": ["yes", "no", None, None],
    }
    assert [type(value) for value in rows["whole"][:2]] == [int, int]


def test_prompts_and_users_of_a_csv_file_stay_as_they_are_written(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("prompt,user\n007,1.0\n1.50,01\n")
    data = Data(path=str(tmp_path / "a.csv"), user_column="user")
    assert load_rows(data).to_dict() == {"prompt": ["007", "1.50"], "user": ["1.0", "01"]}


def test_a_text_of_a_json_file_stays_a_text_whatever_others_have(tmp_path: Path) -> None:
    """``datasets`` takes a text "7" beside a list for JSON, and returns 7."""
    contents = ["7", "null", "true", '"a"', [{"type": "text", "text": "a"}], None]
    talks = [[{"role": "user", "content": content}] for content in contents]
    answers = ["2024-01-01", "2024-01-02", "7", "8", "9", None]
    rows = [{"prompt": p, "answer": a} for p, a in zip(talks, answers, strict=True)]
    for text in ("\n".join(map(json.dumps, rows)), "\ufeff \n" + json.dumps(rows, indent=1)):
        (tmp_path / "a.json").write_text(text, encoding="utf-8")
        read = load_rows(Data(path=str(tmp_path / "a.json")))
        assert read["prompt"][:] == talks
        assert read["answer"][:] == answers


def test_a_csv_file_leaves_no_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "a.csv").write_text(f"prompt\n{CANARY}\n")
    assert load_rows(Data(path=str(tmp_path / "a.csv")))["prompt"][:] == [CANARY]
    assert not [file for file in (tmp_path / "cache").rglob("*") if file.is_file()]


def test_commas_at_the_ends_of_lines_move_no_column(tmp_path: Path) -> None:
    file = tmp_path / "a.csv"
    file.write_text("prompt,answer\na,b,\nc,d,\n")
    assert load_rows(Data(path=str(file))).to_dict() == {"prompt": ["a", "c"], "answer": ["b", "d"]}
    for lines in ("a,b,CANARY\nc,d,CANARY\n", "a,b,1,CANARY\n", "a,b,\nc,d,CANARY\n"):
        file.write_text("prompt,answer\n" + lines)
        with pytest.raises(DprlhfError, match=r"could not be loaded.*broken: some lines") as caught:
            load_rows(Data(path=str(file)))
        assert "CANARY" not in str(caught.value)


@pytest.mark.parametrize(
    "prompts",
    [
        ["a", "CANARY\ud800"],
        [{"prompt": "CANARY\ud800"}],
        [[{"role": "user", "content": "CANARY\ud800"}]],
        lambda: iter(["a", "CANARY\ud800"]),
        pd.DataFrame({"prompt": np.array(["CANARY\ud800"], dtype=object)}, dtype=object),
    ],
    ids=["texts", "dicts", "conversations", "generator", "table"],
)
def test_half_a_character_is_replaced_in_its_row_alone(prompts: Any) -> None:
    """JavaScript leaves one where it cuts a text within an emoji; no run is to end by it."""
    assert "CANARY?" in str(rows_from(prompts, "prompt")[-1]["prompt"])
    with pytest.raises(DprlhfError, match="mixture"):
        rows_from(["a", 1.5, ["b"]], "prompt")


@pytest.mark.parametrize("suffix", ["csv", "jsonl", "memory"])
def test_a_column_of_messages_that_is_text_holds_json(suffix: str, tmp_path: Path) -> None:
    """Its name and its type decide it for all rows, not what some of them hold."""
    talks = [[{"role": "user", "content": text}] for text in ("7", "[]", "b")]
    texts = [*map(json.dumps, talks), "no JSON", '"text"', "[1]", "[" * 9_999, None]
    data = Data(path=str(tmp_path / f"a.{suffix}"), prompt_column="messages", user_column="user")
    table = pd.DataFrame({"messages": texts, "user": range(len(texts))})
    if suffix == "csv":
        table.to_csv(data.path, index=False)
    elif suffix == "jsonl":
        table.to_json(data.path, orient="records", lines=True)
    made = Users(rows_of(data, table if suffix == "memory" else None), data)
    assert made.conversations
    assert made.count == len(texts)
    assert made.readable(np.arange(made.count), lambda some: None).prompts == talks
    other = data.model_copy(update={"prompt_column": "user"})
    assert rows_of(other, None if suffix != "memory" else table)["messages"][0] == texts[0]


def test_public_rows_have_the_form_of_the_users() -> None:
    """A reward would get texts of users, and lists of messages of public rows."""
    text, talk = users({"prompt": ["a"]}), users({"prompt": [[MESSAGE]]})
    check_form(text, text)
    check_form(talk, None)
    for one, other in ((text, talk), (talk, text)):
        with pytest.raises(DprlhfError, match=r"evaluation\.data holds .*: give both in one form"):
            check_form(one, other)
    as_json = users({"prompt": ["plain", json.dumps([MESSAGE])]})
    with pytest.raises(DprlhfError, match=r"written as JSON, .*: call the column 'messages'"):
        check_form(text, as_json)
    check_form(as_json, text)  # of users' rows nothing is looked at


def test_the_rows_that_are_left_out_cut_or_unreadable_are_counted() -> None:
    def cut(prompts: Prompts) -> list[bool]:
        if "refused" in prompts.prompts:
            raise ValueError("CANARY")
        return [len(str(prompt)) > 4 for prompt in prompts.prompts]

    made = users(
        {
            "prompt": ["fine", "long one", None, "", "refused", "fine", "longer", "third", "4th"],
            "user": ["a", "b", "c", "d", "e", "f", "f", "f", "f"],
        },
        max_prompts_per_user=2,
    )
    found = made.left_out(cut)
    assert isinstance(found, Private)
    assert open_private(found) == {
        "beyond": 2, "missing": 1, "empty": 1, "unreadable": 1, "cut": 2,
    }  # fmt: skip
    assert not open_private(users({"prompt": ["fine", "too"]}).left_out(cut))


def conversations_of(*rows: dict[str, Any]) -> Users:
    """Rows to which Arrow gives one type: all have the keys of all, in the first row's order."""
    return Users(rows_from(list(rows), "prompt"), Data(path="in-memory"))


@pytest.mark.parametrize(
    "other",
    [
        {"prompt": [{"content": "another order of keys", "role": "user"}]},
        {"prompt": [{"role": "user", "content": "one key more", "name": "bob"}]},
    ],
    ids=["order", "key"],
)
def test_no_row_makes_the_people_of_others_unknown(other: dict[str, Any]) -> None:
    own = [{"prompt": [{"role": "user", "content": f"question {i}"}]} for i in range(5)]
    before, after = conversations_of(*own), conversations_of(other, *own)
    assert len(hashed(before)) == 5
    assert hashed(before) <= hashed(after)
    known = set(open_private(before.identities()).tolist())
    assert known <= set(open_private(after.identities()).tolist())


@pytest.mark.parametrize(
    "other", [{"level": 1.5, "config": {"a": 1}}, {"level": 7, "config": {"b": 2, "a": 3, "c": 4}}]
)
def test_no_row_makes_rows_without_prompts_unknown(other: dict[str, Any]) -> None:
    own = [{"level": i, "config": {"a": 1, "b": i}} for i in range(5)]

    def known(*rows: dict[str, Any]) -> set[int]:
        made = datasets.Dataset.from_list(list(rows))
        users = Users(made, Data(path="in-memory"), may_lack_prompts=True)
        return set(open_private(users.identities()).tolist())

    assert known(*own) <= known(other, *own)


@pytest.mark.parametrize(("option", "taken"), [("sep: ';'", True), ("skiprows: 1", False)])
def test_a_data_set_that_reads_its_files_in_another_way_is_refused(tmp_path, option, taken):
    """Fields may be apart by another character; any further option would make other rows."""
    (tmp_path / "a.csv").write_text("user;prompt\nu1;a, b\n")
    head = f"---\nconfigs:\n- config_name: default\n  data_files: a.csv\n  {option}\n---\n"
    (tmp_path / "README.md").write_text(head)
    spec = Data(path=str(tmp_path))
    if taken:
        assert load_rows(spec)["prompt"] == ["a, b"]
    else:
        with pytest.raises(DprlhfError, match="read with skiprows, which is not known here"):
            load_rows(spec)


def test_a_log_is_not_told_which_rows(tmp_path: Path) -> None:
    """Which users' rows are odd, and how many, is for the operator; a log is passed on."""
    (tmp_path / "b.jsonl").write_text('{"prompt": "a"}\n[1]\n[2]\n')
    (tmp_path / "a.csv").write_text("prompt,who\na,x\nb,\nc,y\nd,\n")
    data = Data(path=str(tmp_path / "a.csv"), user_column="who")
    for refused in (
        lambda: load_rows(Data(path=str(tmp_path / "b.jsonl"))),
        lambda: Users(load_rows(data), data),
    ):
        with pytest.raises(DprlhfError, match=r"some (rows|lines) \(on a terminal") as caught:
            refused()
        text = str(caught.value).replace(str(tmp_path), "")
        assert not any(letter.isdecimal() for letter in text), text


def message(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


TEXT_PARTS = [{"type": "text", "text": "one"}, {"type": "image"}, {"type": "text", "text": "two"}]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("one", "one"),
        ("", ""),
        (None, ""),
        ([], ""),
        ([message("one"), message("two")], "one\ntwo"),
        ([message(TEXT_PARTS)], "one\n\ntwo"),
        ([message(None), message("two")], "\ntwo"),
        # Arrow fills the keys that other rows' parts have.
        ([message([{"type": "text", "text": "one", "content": None}])], "one"),
        ([message(["one", "two"])], "one\ntwo"),
    ],
)
def test_the_text_is_that_of_the_messages_and_their_parts(value: Any, text: str) -> None:
    assert text_of(value) == text


def test_the_last_message_of_a_completion_counts() -> None:
    assert last_text("one") == "one"
    assert last_text([message("one"), message(TEXT_PARTS)]) == "one\n\ntwo"
    assert last_text([message("one"), message(None)]) == ""
    assert last_text([]) == ""


ASKED_ROWS = {"environment": ["a", "b", "a"], "seed": [1, 2, 3], "who": ["x", "y", "x"]}


def users_of(rows: dict[str, list[Any]], lack: bool = True, **spec: Any) -> Users:
    made = datasets.Dataset.from_dict(rows)
    return Users(made, Data(path="in-memory", **spec), may_lack_prompts=lack)


def test_each_row_is_a_user_with_an_empty_message_and_its_columns() -> None:
    users = users_of(ASKED_ROWS)
    assert users.count == 3
    assert users.conversations
    prompts = users.readable(np.array([2, 0]), lambda some: None)
    assert prompts.prompts == [[{"role": "user", "content": ""}]] * 2
    assert prompts.columns["seed"] == [3, 1]
    assert not prompts.in_rows
    assert not prompts.take([1]).in_rows
    assert not open_private(users.left_out(lambda some: [False] * len(some)))


def test_a_column_makes_users_of_several_rows() -> None:
    users = users_of(ASKED_ROWS, user_column="who", max_prompts_per_user=2)
    assert users.count == 2
    assert users.select(np.array([0])).columns["seed"] == [1, 3]
    named = users_of({**ASKED_ROWS, "prompt": ["?"] * 3}, user_column="who")
    same = [open_private(each.identities()).tolist() for each in (users, named)]
    assert same[0] == same[1]


def test_rows_are_known_by_all_their_columns() -> None:
    other = {**ASKED_ROWS, "seed": [1, 2, 4]}
    first, second = users_of(ASKED_ROWS), users_of(other)
    assert open_private(first.digest()) != open_private(second.digest())
    shared = np.isin(open_private(first.identities()), open_private(second.identities()))
    assert shared.tolist().count(True) == 2
    assert len(shared) == 3
    assert len(hashed(first) & hashed(second)) == 2
    traces = [open_private(each.traces(["who"]))["text"] for each in (first, second)]
    assert np.isin(traces[0], traces[1]).sum() == 2


def test_a_row_to_which_an_environment_gives_the_prompt_is_a_user_even_without_values() -> None:
    users = users_of({"environment": ["a", None], "seed": [1, None]})
    assert len(open_private(users.identities())) == 2
    assert len(hashed(users)) == 2


def test_the_name_of_an_environment_alone_is_nobodys_row() -> None:
    users = users_of({"environment": ["a", "b"]})
    assert len(open_private(users.traces([]))["text"]) == 0
    assert users.count == 2


def test_a_missing_column_is_refused_unless_an_environment_gives_the_prompt() -> None:
    with pytest.raises(DprlhfError, match="no column 'prompt'"):
        users_of(ASKED_ROWS, lack=False)
    with pytest.raises(DprlhfError, match="no column 'question'"):
        users_of(ASKED_ROWS, prompt_column="question")
    with pytest.raises(DprlhfError, match="no column 'name'"):
        users_of(ASKED_ROWS, user_column="name")
