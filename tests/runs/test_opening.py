"""No row of a user is evaluated in the open, whatever its source is called."""

import json
import unicodedata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import numpy as np
import pytest

import dprlhf
from dprlhf.boundary import open_private
from dprlhf.data.given_rows import rows_from
from dprlhf.data.public import Guides
from dprlhf.data.users import Users
from dprlhf.errors import DprlhfError
from dprlhf.recipe import AnyRecipe, RewardRecipe, SFTRecipe, make_recipe
from dprlhf.runs.comparing import check_apart
from dprlhf.runs.folder import RunFolder
from dprlhf.runs.opening import (
    check_declared_rows_unchanged,
    check_disjoint,
    check_public,
    recipe_digest,
)
from helpers.recipes import recipe_settings

ABSENT = "/absent/folder/model"
"""A model that is never looked for: a run is refused before."""
REFUSED = "some of its rows are users' rows, too"


def recipe(**changes: Any) -> AnyRecipe:
    return make_recipe(recipe_settings(evaluation={"data": {"path": "other.csv"}}, **changes))


def refused(private: Any, public: Any, **changes: Any) -> bool:
    """Return whether a run on the users' prompts is refused these prompts for its evaluation."""
    made = recipe(**changes)
    users = Users(rows_from(private, "prompt"), made.data)
    rows = made.evaluation.data.like(made.data)
    try:
        check_public(made, users, Users(rows_from(public, "prompt"), rows))
    except DprlhfError as error:
        message = str(error)
        # No count, and no place.
        return REFUSED in message and not any(str(digit) in message for digit in range(10))
    return False


PROMPTS = [f"user {i} says" for i in range(30)]
OTHERS = [f"guest {i} says" for i in range(30)]


@pytest.mark.parametrize(
    ("public", "expected"),
    [
        (OTHERS, False),
        ([*OTHERS, PROMPTS[7]], True),
        (list(PROMPTS), True),
        ([*OTHERS, "  User 7\n SAYS "], True),
        ([{"prompt": text} for text in (*OTHERS, PROMPTS[7])], True),
        ([[{"role": "user", "content": PROMPTS[7]}]], True),
        (["", *OTHERS], False),
    ],
    ids=["others", "one", "equal", "spelt-otherwise", "dicts", "a-conversation", "empty"],
)
def test_rows_are_recognised_by_their_text(public: Any, expected: bool) -> None:
    assert refused(["", *PROMPTS], public) is expected


@pytest.mark.parametrize(("user", "place"), [(0, 30), (7, 8), (8, 7), (29, 0)])
def test_no_row_is_left_out_of_the_comparison(user, place, monkeypatch):
    """Rows are read in batches: one is a user's in the first, at an edge, or in the last."""
    monkeypatch.setattr("dprlhf.data.users.ROWS_AT_ONCE", 8)
    public = [*OTHERS[:place], PROMPTS[user], *OTHERS[place:]]
    assert refused(PROMPTS, public, evaluation__prompts=31)


def in_parts(text: str) -> list[dict[str, Any]]:
    """Return a conversation whose message has a list of parts."""
    return [{"role": "user", "content": [{"type": "text", "text": text}]}]


def call(name: str) -> list[dict[str, Any]]:
    """Return a conversation whose message calls a tool and has no text."""
    return [{"role": "assistant", "content": "", "tool_calls": [{"function": {"name": name}}]}]


@pytest.mark.parametrize("form", [in_parts, call])
def test_a_conversation_is_recognised_however_its_messages_are_written(form: Any) -> None:
    private = [form("mine"), form("yours")]
    assert refused(private, [form("another's"), form("mine")])
    assert not refused(private, [form("another's")])


def test_an_empty_message_is_nobodys() -> None:
    empty = [{"role": "user", "content": ""}]
    assert not refused([empty], [empty])


def test_a_letter_in_two_characters_is_the_letter() -> None:
    private = [unicodedata.normalize("NFC", "CAFÉ au lait")]
    assert refused(private, [unicodedata.normalize("NFD", "café au lait")])


def test_a_key_of_another_row_does_not_hide_a_message_without_text() -> None:
    """Arrow gives every row the keys of all others, with no value."""
    other = [{"role": "user", "content": "hi", "name": "Bo"}]
    assert refused([call("mine"), other], [call("mine")])


def test_rows_that_are_not_evaluated_do_not_matter() -> None:
    """The evaluation takes rows from the start, and 64 more to fit settings to."""
    public = [f"guest {i}" for i in range(80)]
    for place, expected in ((65, True), (66, False)):
        mixed = [*public[:place], PROMPTS[0], *public[place:]]
        assert refused(PROMPTS, mixed, evaluation__prompts=2) is expected


def test_a_subspace_may_take_all_public_rows_so_all_are_compared() -> None:
    public = [*(f"guest {i}" for i in range(200)), PROMPTS[0]]
    changes = {"evaluation__prompts": 2, "update__subspace": {"rank": 1, "prompts": 2}}
    assert refused(PROMPTS, public, **changes)
    assert not refused(PROMPTS, public[:-1], **changes)


@pytest.mark.parametrize(
    ("copied", "same"),
    [
        (lambda rows: rows, True),
        (lambda rows: rows.with_format("numpy"), True),
        (lambda rows: datasets.Dataset.from_dict(rows.to_dict()), True),
        (lambda rows: rows.select(range(len(rows) - 1)), False),
    ],
    ids=["itself", "in numpy", "read again", "one row less"],
)
def test_no_declaration_makes_the_users_dataset_public(copied: Any, same: bool) -> None:
    """Whose rows these are need not be asked of their texts: they are the users', all of them."""
    given = datasets.Dataset.from_dict({"prompt": PROMPTS})
    made = recipe(evaluation__declared_public=True)
    users, public = (Users(rows_from(one, "prompt"), made.data) for one in (given, copied(given)))
    if same:
        with pytest.raises(DprlhfError, match=r"^evaluation.data: these are the users' rows"):
            check_public(made, users, public)
    else:
        check_public(made, users, public)


def test_no_row_that_a_subspace_is_fitted_to_is_a_users() -> None:
    spec = {"rank": 1, "prompts": 2, "data": {"path": "public"}}
    for prompts, expected in (
        ([*PROMPTS[:1], "a guest"], True),
        (["another guest", "a guest"], False),
    ):
        made = recipe(update__subspace=spec)
        users = Users(rows_from(PROMPTS, "prompt"), made.data)
        guides = Guides(Users(rows_from(prompts, "prompt"), made.data))
        if expected:
            with pytest.raises(DprlhfError, match=r"update\.subspace\.data: some of its rows are"):
                check_public(made, users, None, guides)
        else:
            check_public(made, users, None, guides)


def test_a_cut_prompt_is_the_one_that_it_was_cut_from_but_a_common_beginning_is_not() -> None:
    private = [f"it was one of the best films number {i}" for i in range(20)]
    cut = {"data__prompt_words": 8}
    assert refused(private, ["it was one of the best films number"], **cut)
    assert not refused(private, [f"it was one of the best films of {i}" for i in range(9)], **cut)
    assert refused(["a b c"], ["a b c d"], data__prompt_words=3)


@pytest.mark.parametrize(
    ("earlier", "now"), [([17, 18], [17.0, 0.5]), ([" Ann"], ["Ann"])], ids=str
)
def test_runs_that_are_called_disjoint_are_compared_by_names_however_they_are_spelt(
    earlier: list[Any], now: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def users_of(names: list[Any]) -> Users:
        rows = [{"prompt": "why?", "who": name} for name in names]
        return Users(rows_from(rows, "prompt"), made.data)

    declared = [{"run": str(tmp_path / "old"), "users": "disjoint"}]
    made = recipe(data__user_column="who", previous=declared)
    old = RunFolder(tmp_path / "old")
    held = old.identities
    held.parent.mkdir(parents=True)
    old.ledger.write_text('{"body": {"key_commitment": "its key"}}')
    own = [SimpleNamespace(run="its key")]
    monkeypatch.setattr("dprlhf.runs.opening.records_of", lambda run: own)
    np.save(held, open_private(users_of(earlier).identities()))
    with pytest.raises(DprlhfError, match="declared to have no users in common"):
        check_disjoint(made, users_of(now))
    check_disjoint(made, users_of(["Bea", "170"]))


def test_users_are_recognised_by_their_names() -> None:
    private = [{"prompt": p, "author": f"a{i}"} for i, p in enumerate(PROMPTS)]
    for name, expected in (("a3", True), ("b3", False)):
        public = [{"prompt": "a new text", "author": name}]
        assert refused(private, public, data__user_column="author") is expected


def test_what_is_declared_to_be_public_passes_and_the_digest_stays() -> None:
    assert not refused(PROMPTS, PROMPTS, evaluation__declared_public=True)
    assert recipe_digest(recipe()) == recipe_digest(recipe(evaluation__declared_public=True))


def file(folder: Path, rows: list[dict[str, Any]]) -> str:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_slices_of_one_split_that_overlap_are_refused(tmp_path: Path) -> None:
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "train.csv").write_text("prompt\n" + "\n".join(PROMPTS) + "\n")
    for split, wanted in (("train[50%:]", REFUSED), ("train[90%:]", ABSENT)):
        with pytest.raises(DprlhfError, match=wanted):
            dprlhf.train(
                model=ABSENT, data={"path": str(tmp_path / "set"), "split": "train[:90%]"},
                evaluation={"data": {"path": str(tmp_path / "set"), "split": split}},
                rewards=[{"function": "builtins:len"}], epsilon=4.0, rounds=2,
                output_dir=tmp_path / "run",
            )  # fmt: skip
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("stage", ["sft", "reward"])
def test_a_supervised_stage_compares_prompt_and_completions(stage: str, tmp_path: Path) -> None:
    """Many documents have one prompt, so a shared prompt alone is no shared row."""
    kind, answers = (
        (SFTRecipe, ("completion",)) if stage == "sft" else (RewardRecipe, ("chosen", "rejected"))
    )
    rows = [{"prompt": "Sum up:", **{a: f"{a} {i}" for a in answers}} for i in range(20)]
    others = [{"prompt": "Sum up:", **{a: f"{a} {i}" for a in answers}} for i in range(50, 60)]
    model = {"policy": {"model_name_or_path": ABSENT}}
    values = {"data": {"path": file(tmp_path, rows)}, "rounds": 2, "privacy": {"epsilon": 4.0}}
    made = kind.model_validate({**values, **model})
    for public, wanted in ((others, ABSENT), ([*others, rows[3]], REFUSED)):
        with pytest.raises(DprlhfError, match=wanted):
            dprlhf.train_stage(made, evaluation_data=public, output_dir=tmp_path / "run")


def run_of(folder: Path, key: str, names: list[int]) -> Path:
    """Write what a run folder tells of its users."""
    run = RunFolder(folder)
    run.secret.mkdir(parents=True)
    run.ledger.write_text(json.dumps({"body": {"key_commitment": key}}))
    np.save(run.identities, np.array(names, dtype=np.uint64))
    return folder


def test_each_run_is_compared_with_all_before_it(tmp_path: Path) -> None:
    users = {"a": [1], "b": [2], "c": [1, 3]}
    named = [(run_of(tmp_path / key, key, names), key) for key, names in users.items()]
    with pytest.raises(DprlhfError, match="a and c are declared"):
        check_apart(named)
    check_apart(named[:2])


FIXED: dict[str, Any] = {
    "rewards__0__weight": 2.0, "reward_range": 1.0, "kl": {"beta": 0.1}, "seed": 3, "rounds": 5,
    "data__max_prompts_per_user": 2, "data__max_prompt_tokens": 7, "data__skip": 1,
    "data__limit": 5, "update__clip_norm": 0.5, "update__name": "grpo", "rollout__responses": 8,
    "rollout__temperature": 0.5, "optimizer__learning_rate": 0.5, "policy__adapter__rank": 3,
    "policy__model_name_or_path": "other", "privacy__epsilon": 2.0, "privacy__delta": 1e-7,
    "privacy__tuning_runs": 1,
}  # fmt: skip


@pytest.mark.parametrize("name", FIXED)
def test_a_run_goes_on_with_what_it_was_started_with(name: str) -> None:
    changed = make_recipe(recipe_settings(**{name: FIXED[name]}))
    assert recipe_digest(changed) != recipe_digest(make_recipe(recipe_settings()))


def test_a_declaration_is_held_to_the_rows_for_which_it_was_said(tmp_path: Path) -> None:
    """A resumed run got the users' own prompts under it, and wrote them in the open."""
    folder = RunFolder(tmp_path / "run")
    folder.create()

    def hold(texts: list[str], **changes: Any) -> None:
        made = recipe(**changes)
        assert made.evaluation is not None
        check_declared_rows_unchanged(folder, made, Users(rows_from(texts, "prompt"), made.data))

    declared: dict[str, Any] = {"evaluation__declared_public": True}
    hold(PROMPTS)  # without a declaration, check_public looks at the rows each time
    hold(OTHERS[:5], **declared)
    hold(OTHERS[:5], **declared)
    hold(PROMPTS[:5])
    for other in (PROMPTS[:5], OTHERS[:6], OTHERS[4::-1]):
        with pytest.raises(
            DprlhfError, match=r"^evaluation\.data: declared_public was said of oth"
        ):
            hold(other, **declared)
    hold(OTHERS[:5], **declared)
    assert [file.name for file in folder.path.iterdir()] == ["secret"]
