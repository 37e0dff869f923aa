"""Rows that belong to two people: what one person can move, and how many people a matching keeps.

    python -m scripts.review.owners --chitchat dataset.json

Writes rows to ``docs/results/feedback.json``. The first part is brute force: in small runs every
person's rows are blanked in turn, with what was released before held fast, and the largest change
of a round's clipped sum is compared with the clip norm. The second part counts in the graph of who
talked to whom in ``chitchat-dataset`` 0.9.0 (its wheel has ``dataset.json``).
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from unittest import mock

import networkx
import numpy as np
import torch
from datasets import Dataset

import dprlhf
from dprlhf.boundary import Released
from dprlhf.data.users import Users
from dprlhf.privacy.gate import Gate
from dprlhf.recipe import Data
from dprlhf.runs.measurements import Result, at_most, write_results
from helpers.runs import run_settings, save_sharp
from helpers.stages import stage_of_logs

OUT = Path(__file__).resolve().parents[2] / "docs/results/feedback.json"
OWNERS, KEPT = ["a", "b"], 2
TALKS = [
    ("p0", "p1"), ("p1", "p2"), ("p2", "p3"), ("p3", "p3"), ("p4", "p5"), ("p4", "p6"),
    ("p7", "p6"), ("p8", "p9"), ("p9", "p0"), ("p10", "p11"), ("p11", "p8"), ("p1", "p0"),
]  # fmt: skip


def blanked(person: str | None) -> list[dict[str, Any]]:
    """Return two rows of each talk, with nothing but their owners where a person took part."""
    rows = []
    for n, (a, b) in enumerate(TALKS * 2):
        row: dict[str, Any] = {"prompt": f"{a} to {b} {n}", "completion": f" {n}"}
        row["label"] = n % 3 > 0
        if person in (a, b):
            row = dict.fromkeys(row)
        rows.append({**row, "a": a, "b": b})
    return rows


def sums_of(
    stage: str, unit: Any, model: str, person: str | None, released: list[Any]
) -> list[torch.Tensor]:
    """Return the rounds' sums in a run without a person; the first run fills ``released``."""
    sums, real = list[torch.Tensor](), Gate.release
    replay = bool(released)

    def release(self: Gate, t: int, bounded: Any) -> Released[torch.Tensor]:
        sums.append(bounded.total / bounded.clip_norm)  # a copy: noise is added in place
        made = real(self, t, bounded)
        if not replay:
            released.append(made.map(torch.clone))
        return released[len(sums) - 1].map(torch.clone)

    rows = blanked(person)
    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.object(Gate, "release", release),
        mock.patch("dprlhf.runs.folder.new_key", return_value=bytes(range(32))),
    ):
        if stage == "rl":
            own = run_settings(
                model, prompts=rows, rounds=2, data__max_prompt_tokens=16, update__clip_norm=1e-3,
                data__user_column=unit, data__max_prompts_per_user=KEPT,
            )  # fmt: skip
            dprlhf.train(**own, output_dir=f"{folder}/run")
        else:
            changes: dict[str, Any] = {
                "data": {"path": "in-memory", "user_column": unit, "max_prompts_per_user": KEPT},
                "update": {"clip_norm": 1e-3},
            }
            recipe = stage_of_logs(model, Path(folder) / "run", rounds=2, **changes)
            dprlhf.train_stage(recipe, data=rows, quiet=True)
    return sums


def influence() -> list[Result]:
    """Return the largest influence of a person in runs of two stages."""
    people = sorted({person for talk in TALKS for person in talk})
    data = Data(path="in-memory", user_column=OWNERS, max_prompts_per_user=KEPT)

    def prompts(person: str | None) -> list[list[Any]]:
        users = Users(Dataset.from_list(blanked(person)), data)
        return [users.select(np.array([number])).prompts for number in range(users.count)]

    whole, rows = prompts(None), []
    moved = max(sum(a != b for a, b in zip(prompts(p), whole, strict=True)) for p in people)
    name = "owners: one of 12 people blanked: users changed, most of all people"
    rows.append(at_most(name, moved, "users", 1))
    with tempfile.TemporaryDirectory() as folder:
        model = save_sharp(Path(folder) / "model")
        for stage, unit in (("rl", OWNERS), ("feedback", OWNERS), ("feedback", "a")):
            released = list[Any]()
            before = sums_of(stage, unit, model, None, released)
            largest = 0.0
            for person in people:
                after = sums_of(stage, unit, model, person, released)
                apart = [float((a - b).norm()) for a, b in zip(after, before, strict=True)]
                largest = max(largest, *apart)
                print(stage, unit, person, apart, flush=True)
            name = f"owners: one of 12 people blanked, {stage}: largest change of a round's sum"
            goal, held = ("at most 1", largest <= 1 + 1e-6) if unit == OWNERS else ("", None)
            name += "" if unit == OWNERS else ", with one owner as the user"
            rows.append(Result(name, largest, "clip norms", goal, held))
    return rows


def chosen(pairs: Iterable[tuple[str, str]], most: int) -> list[tuple[str, str]]:
    """Return pairs taken in this order, so that each person is in at most so many."""
    count, taken = Counter[str](), []
    for pair in pairs:
        if all(count[person] < most for person in pair):
            taken.append(pair)
            count.update(pair)
    return taken


def chitchat(file: Path) -> list[Result]:
    """Return what matchings keep of the conversations of exactly two people."""
    talks = []
    for talk in json.loads(file.read_text("utf-8")).values():
        people = {sent["sender"] for turn in talk["messages"] for sent in turn}
        if len(people) == 2:
            talks.append(tuple(sorted(people)))
    rows = [{"a": a, "b": b, "prompt": "?"} for a, b in talks]
    users = Users(Dataset.from_list(rows), Data(path="x", user_column=OWNERS))
    held = users.select(np.arange(users.count))
    kept = Counter(zip(held.columns["a"], held.columns["b"], strict=True))
    people, pairs = {person for talk in talks for person in talk}, Counter(talks)
    best = len(networkx.max_weight_matching(networkx.Graph(list(pairs)), maxcardinality=True))
    degree = Counter(person for pair in pairs for person in pair)
    by_degree = sorted(pairs, key=lambda pair: (degree[pair[0]] + degree[pair[1]], pair))
    assert {frozenset(pair) for pair in kept} == {frozenset(p) for p in chosen(by_degree, 1)}

    def row(name: str, *given: Any) -> Result:
        return Result(f"owners: chitchat, {name}", *given)

    share, first, of = users.count / best, len(chosen(pairs, 1)) / best, "over a maximum matching's"
    found = [
        row("people in conversations of two", len(people), "people"),
        row("conversations of two", len(talks), "rows"),
        row(f"pairs kept {of}", share, "1", "at least 0.95", share >= 0.95),
        row(f"pairs kept if chosen in the order of rows, {of}", first, "1"),
        row("people kept", 2 * users.count / len(people), "share"),
        row("rows kept, at most 4 a pair", len(held) / len(talks), "share"),
    ]
    for k in (1, 2, 3, 4):
        name = f"each person in at most {k} pairs: pairs over k"
        found.append(row(name, len(chosen(by_degree, k)) / k, "pairs"))
    return found


def main() -> None:
    """Measure and write the rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--chitchat", type=Path, help="dataset.json of chitchat-dataset 0.9.0")
    options = parser.parse_args()
    rows = influence() + (chitchat(options.chitchat) if options.chitchat else [])
    write_results(OUT, rows, show=True)


if __name__ == "__main__":
    main()
