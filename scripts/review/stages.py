"""What the stages teach, refuse and tell an operator, before and after.

Writes rows to ``docs/results/review.json``, in about two minutes on one core. With ``--before`` it
measures an older source, which is to be first on the path::

    git worktree add ../before 79285c4
    PYTHONPATH=../before/src python -m scripts.review.stages --before
    PYTHONPATH=src python -m scripts.review.stages
"""

from __future__ import annotations

import argparse
import contextlib
import io
import sys
import tempfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
OUT = ROOT / "docs" / "results" / "review.json"
sys.path.insert(0, str(ROOT / "tests"))

import dprlhf  # noqa: E402
from dprlhf import recipe  # noqa: E402
from dprlhf.data.given_rows import rows_from  # noqa: E402
from dprlhf.data.users import Users  # noqa: E402
from dprlhf.errors import DprlhfError  # noqa: E402
from dprlhf.policies.loading import make_policy  # noqa: E402
from dprlhf.privacy.ledger import read_ledger  # noqa: E402
from dprlhf.runs.measurements import Result, write_results  # noqa: E402
from dprlhf.training.dpo import PreferredAnswers  # noqa: E402
from dprlhf.training.tasks import NextTokens  # noqa: E402
from helpers import runs, tiny  # noqa: E402

TEMPLATES = ("deepseek_r1_distill", "gemma3", "gptoss", "llama3_1", "qwen3", "qwen3_5_think")
LORA = {"type": "lora", "rank": 2, "target_modules": ["c_attn"]}
UNREAD = {
    "policy.quantization": "nf4",
    "policy.gradient_checkpointing": True,
    "policy.chat_template_kwargs": {"enable_thinking": False},
    "data.max_prompt_tokens": 128,
}
DPO = {"policy": {"model_name_or_path": "x"}, "rounds": 1, "privacy": {"epsilon": 1}}


def taught_otherwise() -> int:
    """Count rows of tokens, of 18, that are not what the chat template writes for the row."""
    folder = Path(str(find_spec("trl").origin)).parent / "chat_templates"  # type: ignore[union-attr]
    policy = make_policy(tiny.model(), tiny.tokenizer(), recipe.Adapter.model_validate(LORA))
    ask, yes, no = ([{"role": role, "content": text}] for role, text in
                    (("user", "hi"), ("assistant", "yo"), ("assistant", "no")))  # fmt: skip
    long: dict[str, Any] = {"max_prompt_tokens": 9999, "max_completion_tokens": 9999}
    found = 0
    for name in TEMPLATES:
        policy.tokenizer.chat_template = (folder / f"{name}.jinja").read_text("utf-8")
        row: dict[str, Any] = {"chat_template_kwargs": {"enable_thinking": False}, "prompt": ask}
        documents, pairs = (
            recipe.Documents(path="x", **long),
            recipe.PreferencePairs(path="x", **long),
        )
        dpo = PreferredAnswers(recipe.DPORecipe.model_validate({**DPO, "data": pairs.model_dump()}))
        for task, data, columns in (
            (NextTokens(documents), documents, {"completion": yes}),
            (dpo, pairs, {"chosen": yes, "rejected": no}),
        ):
            users = Users(rows_from([row | columns], "prompt"), data)
            packed = task.encode(policy, users.select(np.arange(1)))
            for tokens, mask, said in zip(
                packed.tokens, packed.mask, columns.values(), strict=True
            ):
                truth = policy.tokenizer.apply_chat_template([*ask, *said], enable_thinking=False)
                found += (
                    tokens[mask.bool()].tolist()[: len(truth["input_ids"])] != truth["input_ids"]
                )
    return found


def accepted_unread() -> int:
    """Count settings that ``dprlhf reward`` takes, of 4 that it does not read."""
    taken = 0
    for key, value in UNREAD.items():
        section, name = key.split(".")
        given: dict[str, Any] = {
            "policy": {"model_name_or_path": "x"}, "data": {"path": "y"}, "rounds": 1,
            "privacy": {"epsilon": 1},
        }  # fmt: skip
        given[section][name] = value
        with contextlib.suppress(ValueError):
            recipe.RewardRecipe.model_validate(given)
            taken += 1
    return taken


def spent_in_vain(base: Path) -> int:
    """Count the rounds that a stage charges before it finds that it cannot be saved."""
    given = {
        "policy": {
            "model_name_or_path": str(base / "model"),
            "adapter": {**LORA, "target_modules": ["lm_head"]},
        },
        "data": {"path": "in-memory", "max_prompt_tokens": 16, "max_completion_tokens": 8},
        "privacy": {"epsilon": 8, "delta": 1e-3},
        "rounds": 4,
        "output_dir": str(base / "tied"),
    }
    rows = [{"prompt": f"it was {i}", "completion": " aaaa"} for i in range(40)]
    with contextlib.suppress(DprlhfError):
        dprlhf.train_stage(recipe.SFTRecipe.model_validate(given), data=rows, quiet=True)
    ledger = base / "tied" / "ledger.jsonl"
    return sum(entry.kind == "charge" for entry in read_ledger(ledger)) if ledger.exists() else 0


def of_a_run(base: Path) -> Iterator[tuple[str, float, str]]:
    """Yield what a run tells its operator off a terminal, and what its reward sees."""
    seen: list[int] = []

    def reward(prompts: list[str], completions: list[str]) -> list[float]:
        seen.extend(map(len, prompts))
        return [0.1 * len(text) for text in completions]

    rows = [f"user {i} says" for i in range(40)] + ["a prompt that is cut" * 9]
    settings = runs.run_settings(str(base / "model"), prompts=rows, reward=reward, rounds=2)
    log = io.StringIO()
    with contextlib.redirect_stderr(log):
        result = dprlhf.train(
            **settings | {"quiet": False, "data__max_prompt_tokens": 16, "output_dir": base / "run"}
        )
    promised = "epsilon" in log.getvalue() and "user =" in log.getvalue()
    yield "facts of the plan in a run's log", float(promised), "1"
    notes = base / "run" / "secret" / "operator.txt"
    told = notes.exists() and "1 longer than" in notes.read_text("utf-8")
    yield "a cut prompt is noted in secret/ off a terminal", float(told), "1"
    yield "longest prompt that the reward sees, of 16 tokens", float(max(seen)), "characters"
    yield "length of a result's repr", float(len(repr(result))), "characters"


def main() -> None:
    """Measure, and write the rows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--before", action="store_true", help="the source is an older one")
    when = "before" if parser.parse_args().before else "after"
    with tempfile.TemporaryDirectory() as place:
        base = Path(place)
        tiny.save(base / "model")
        figures = [
            ("conversations taught otherwise than written, of 18", taught_otherwise(), "rows"),
            ("unread settings that dprlhf reward takes, of 4", accepted_unread(), "settings"),
            ("rounds charged by a stage that cannot be saved", spent_in_vain(base), "rounds"),
            *of_a_run(base),
        ]  # fmt: skip
    rows = [Result(f"stages: {name} ({when})", float(v), unit) for name, v, unit in figures]
    for row in rows:
        print(f"{row.name}: {row.value:g} {row.unit}")
    write_results(OUT, rows)


if __name__ == "__main__":
    main()
