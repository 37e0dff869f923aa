"""Runs whose data and rewards hold canaries, for ``test_leaks.py``: ``python leaks.py FOLDER``.

Everything private carries :data:`TEXT` or :data:`NUMBER`: prompts, columns, user ids, rewards, and
whatever user code prints, warns, logs and raises. Each scenario is a fork of this process (the
libraries are imported once) that goes through the command line; ``FOLDER/<scenario>`` then holds
its run folder and ``output``, all that it wrote to the terminal.
"""

import base64
import contextlib
import json
import logging
import os
import re
import struct
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import accelerate.utils  # noqa: F401
import datasets
import peft  # noqa: F401

sys.path.insert(0, str(Path(__file__).parents[1]))  # run as a script, too

import torch
from transformers import GPT2LMHeadModel  # noqa: F401

import dprlhf.api
import dprlhf.cli.app
import dprlhf.runs.checkpoint
import dprlhf.training.build
import dprlhf.training.reinforcement
import dprlhf.training.rounds
import dprlhf.training.trainer
from dprlhf.boundary import open_private
from dprlhf.policies.causal_lm import CausalLMPolicy
from helpers import tiny
from helpers.fixed import fix_randomness, prepare_to_fork

TEXT = "zanzibar-7319"
NUMBER = 1.61803398875
INTEGER = 918273645546372
USERS = 12
SIDE_BY_SIDE = os.cpu_count() or 1
ROUNDS = 2

REWARD = f"""
import logging, os, sys, warnings

def careless(prompts, completions, note=None, **columns):
    print("scoring", prompts, note)
    print("scoring", prompts, file=sys.stderr)
    os.write(1, repr(prompts).encode())
    os.write(2, repr(note).encode())
    warnings.warn(f"odd prompts {{prompts}}")
    logging.getLogger("mine").error("odd prompts %s", prompts)
    if any(p.endswith(" 3") for p in prompts):
        raise ValueError(f"cannot score {{prompts}}")
    return [{NUMBER}] * len(prompts)
"""


def search(folder: Path) -> list[str]:
    """Return where canaries are outside ``secret/``: names and contents of files, and output."""
    found = []
    for path in sorted(folder.rglob("*")):
        inside = path.relative_to(folder).parts
        if "secret" in inside or inside[0] == "data":
            continue
        if TEXT in path.name:
            found.append(f"{'/'.join(inside)}: its name")
        if path.is_file():
            content = path.read_bytes()
            found += [f"{'/'.join(inside)}: {kind}" for kind, hit in CANARIES if hit(content)]
    return found


def _spellings() -> Iterator[tuple[str, Callable[[bytes], bool]]]:
    for kind, data in (("text", TEXT.encode()), ("reversed", TEXT[::-1].encode())):
        yield kind, lambda content, d=data: d in content
    yield "utf-16", lambda content: TEXT.encode("utf-16-le") in content
    yield "hex", lambda content: TEXT.encode().hex().encode() in content.lower()
    for shift in range(3):  # base64 of a text in which the canary starts at any place
        whole = base64.b64encode(b"x" * shift + TEXT.encode())
        middle = whole[4 if shift else 0 : -4]
        yield f"base64+{shift}", lambda content, d=middle: d in content
    ids = tiny.tokenizer()(TEXT)["input_ids"]
    yield "token ids", lambda content: b"".join(struct.pack("<q", i) for i in ids) in content
    listed = re.compile(rb"\D+".join(str(i).encode() for i in ids))
    yield "listed token ids", lambda content: bool(listed.search(content))
    for name, pattern in (("double", "<d"), ("float", "<f")):
        packed = struct.pack(pattern, NUMBER)
        yield name, lambda content, d=packed: d in content
    yield "number", lambda content: str(NUMBER)[:8].encode() in content
    yield "integer", lambda content: str(INTEGER).encode() in content
    yield "packed integer", lambda content: struct.pack("<q", INTEGER) in content


CANARIES = list(_spellings())


def write_data(folder: Path, change: Callable[[list[dict[str, Any]]], Any] | None = None) -> None:
    folder.mkdir(parents=True)
    rows: list[dict[str, Any]] = [
        {"prompt": f"{TEXT} {i}", "note": TEXT, "count": INTEGER, "who": f"{TEXT}-{i}"}
        for i in range(USERS)
    ]
    if change is not None:
        change(rows)
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "rewards.py").write_text(REWARD)


def recipe(folder: Path) -> None:
    (folder.parent / "recipe.yaml").write_text(f"""
policy: {{model_name_or_path: {folder.parent.parent}/model, adapter: {{target_modules: [c_attn]}}}}
data: {{path: {folder}/prompts.jsonl, user_column: who}}
rewards: [{{function: "{folder}/rewards.py:careless"}}]
rollout: {{max_new_tokens: 2, batch_size: 8}}
update: {{batch_size: 8}}
privacy: {{epsilon: 8, delta: 1.0e-2, partition: fixed}}
rounds: {ROUNDS}
""")


def quoting(*_: Any, **__: Any) -> Any:
    raise ValueError(f"bad value {TEXT} {NUMBER}")


def as_it_is(*_: Any) -> contextlib.nullcontext[None]:
    """Leave an error with its text, in the place of what hides it."""
    return contextlib.nullcontext()


def fails_in(owner: Any, name: str) -> Callable[[], None]:
    return lambda: setattr(owner, name, quoting)


def unusual(rows: list[dict[str, Any]]) -> None:
    rows[3]["prompt"] = [{"role": "user", "content": TEXT}]


def nobody(rows: list[dict[str, Any]]) -> None:
    rows[3]["who"] = None


def numbers_among_texts(rows: list[dict[str, Any]]) -> None:
    rows[3]["count"] = {"of": TEXT}


BAD_DATA: dict[str, Callable[[list[dict[str, Any]]], None]] = {
    "a-conversation-among-texts": unusual,
    "a-row-without-a-user": nobody,
    "columns-of-two-kinds": numbers_among_texts,
}


def no_prompt_can_be_read() -> None:
    """Public prompts can, or the run would be refused before it reads a user."""
    real = CausalLMPolicy.encode

    def encode(self: CausalLMPolicy, prompts: Any, *others: Any) -> Any:
        return quoting() if TEXT in str(prompts) else real(self, prompts, *others)

    CausalLMPolicy.encode = encode  # type: ignore[method-assign]


CARRIED_ON: dict[str, Callable[[], None]] = {"no-prompt-can-be-read": no_prompt_can_be_read}

FAILURES: dict[str, Callable[[], None]] = {
    "fails-in-sampling": fails_in(dprlhf.training.reinforcement, "sample_responses"),
    "fails-in-scoring": fails_in(dprlhf.training.reinforcement, "score_private"),
    "fails-in-checkpoint": fails_in(dprlhf.training.rounds, "save_checkpoint"),
    "fails-in-selecting": fails_in(dprlhf.training.trainer, "users_of_round"),
}


def in_round(leak: Callable[[Any], None]) -> Callable[[], None]:
    """Leak from the place that has a round's prompts and scores open."""

    def plant() -> None:
        real, rounds = dprlhf.training.trainer._report, []
        made = dprlhf.training.reinforcement.PrivateRound

        def make(**parts: Any) -> Any:
            rounds.append(made(**parts))
            return rounds[-1]

        def report(run: Any, t: int, outcome: Any) -> None:
            real(run, t, outcome)
            round_ = rounds[-1]
            leak((run, t, open_private(round_.responses), open_private(round_.unpenalised)))

        dprlhf.training.reinforcement.PrivateRound = make

        dprlhf.training.trainer._report = report

    return plant


def into_files(given: Any) -> None:
    from safetensors.torch import save_file

    run, _, responses, scores = given
    folder, prompts = run.folder, responses.prompts
    with open(folder.metrics, "a") as file:
        file.write(json.dumps({"reward": float(scores.values.max())}) + "\n")
    save_file({"r": torch.from_numpy(scores.values).float()}, folder.checkpoint / "r")
    torch.save(responses.tokens, folder.path / "tokens.pt")
    text = base64.b64encode(f"ab{prompts.prompts[0]}".encode())
    (folder.path / "debug").write_bytes(text)
    (folder.path / f"user-{prompts.columns['note'][0]}").touch()


def into_streams(given: Any) -> None:
    """Print, warn and log, each in a spelling of its own."""
    prompts = given[2].prompts
    print(prompts.prompts)
    warnings.warn(prompts.prompts[0][::-1], stacklevel=1)
    logging.error("%s", prompts.prompts[0].encode().hex())
    logging.error("%s", prompts.columns["count"])


def with_a_model_card() -> None:
    dprlhf.training.trainer.model_card = lambda *_: f"tuned on {TEXT}"
    in_round(into_files)()


def with_its_text() -> None:
    dprlhf.training.build._one_line_errors = as_it_is
    fails_in(dprlhf.training.reinforcement, "score_private")()


PLANTED: dict[str, tuple[Callable[[], None], set[str]]] = {
    "leaks-into-files": (
        with_a_model_card,
        {
            "run/metrics.jsonl: number", "run/checkpoint/r: float", "run/tokens.pt: token ids",
            "run/debug: base64+2", "run/policy/README.md: text",
            f"run/user-{TEXT}: its name",
        },
    ),
    "leaks-into-streams": (
        in_round(into_streams),
        {f"output: {kind}" for kind in ("text", "reversed", "hex", "integer")},
    ),
    "an-exception-with-its-text": (with_its_text, {"output: text"}),
}  # fmt: skip
"""What is planted, and where the search must find it."""


def scenario(folder: Path, name: str, prepare: Callable[[], None] | None = None) -> None:
    """Train through the command line in a fork; ``name`` may also name a kind of bad data."""
    here = folder / name
    write_data(here / "data", BAD_DATA.get(name))
    recipe(here / "data")
    child = os.fork()
    if child == 0:
        output = os.open(here / "output", os.O_WRONLY | os.O_CREAT)
        os.dup2(output, 1)
        os.dup2(output, 2)
        sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
        code: Any = 1
        try:
            fix_randomness()
            datasets.config.HF_DATASETS_CACHE = here / "data/cache"
            if prepare is not None:
                prepare()
            os.chdir(here)
            sys.argv = ["dprlhf", "train", "recipe.yaml", "--output-dir", "run"]
            dprlhf.cli.app.main()
            code = 0
        except SystemExit as stop:
            code = stop.code
        except BaseException:
            sys.excepthook(*sys.exc_info())
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            (here / "status").write_text(str(code))
            os._exit(0)


def longer(rows: list[dict[str, Any]]) -> None:
    for i, row in enumerate(rows):
        row["prompt"] = f"{TEXT} {i} " + "and more " * (i % 5)
        row["who"] = f"{TEXT}-{i // 3 if i < 3 else i + 100}"
    rows += [{**rows[0], "who": f"{TEXT}-x{i}"} for i in range(2)]  # as many users as before


BAD_DATA["other-data"] = longer


def main(folder: Path) -> None:
    prepare_to_fork()
    tiny.save(folder / "model")
    planted = {name: plant for name, (plant, _) in PLANTED.items()}
    everything = dict.fromkeys(["a-careless-reward", *BAD_DATA]) | CARRIED_ON | FAILURES | planted
    for number, (name, prepare) in enumerate(everything.items()):
        if number >= SIDE_BY_SIDE:
            os.wait()
        scenario(folder, name, prepare)
    for _ in range(min(SIDE_BY_SIDE, len(everything))):
        os.wait()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
