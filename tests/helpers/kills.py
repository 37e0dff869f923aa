"""Runs that are killed and resumed, for ``test_kills.py``.

``python kills.py FOLDER < CASES``: a list of cases as JSON. The libraries are imported once; each
life of a run is a fork of this process, in which chosen functions note what passes, and one of them
ends in SIGKILL. ``FOLDER/report.json`` then says for each case what went wrong, if anything.

A case is ``{"kill": [...]}`` with one entry for each life before the last:

- ``["point", name, occurrence]``: at the so-manieth time that a point of ``POINTS`` is reached
- ``["call", share]``: after this share of all calls of functions of this project
"""

import hashlib
import json
import os
import signal
import sys
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import accelerate.utils  # noqa: F401
import datasets  # noqa: F401
import peft  # noqa: F401

sys.path.insert(0, str(Path(__file__).parents[1]))  # run as a script, too

from safetensors.torch import load_file
from transformers import GPT2LMHeadModel  # noqa: F401

import dprlhf
import dprlhf.api
import dprlhf.training.build
import dprlhf.training.trainer
from dprlhf import DprlhfError
from dprlhf.boundary import open_private
from dprlhf.privacy import gate, rounded_gaussian
from dprlhf.privacy.accounting import Mechanism, epsilon
from dprlhf.privacy.ledger import Ledger, read_ledger
from dprlhf.runs.folder import JsonLines
from helpers import tiny
from helpers.fixed import fix_randomness, prepare_to_fork

PROMPTS = [f"user {i} says" for i in range(9)]
ROUNDS = 3

# name: (what holds the function, its name, whether to kill before or after it)
POINTS: dict[str, tuple[Any, str, str]] = {
    "ledger opened": (dprlhf.training.build, "open_ledger", "after"),
    "after the charge": (Ledger, "charge", "after"),
    "noise drawn": (rounded_gaussian, "uint64_stream", "after"),
    "released": (gate.Gate, "release", "after"),
    "a rename done": (os, "replace", "after"),
    "before the commit": (Ledger, "commit", "before"),
}


def reward(prompts: list[str], completions: list[str]) -> list[float]:
    return [len(text.encode()) / 8 for text in completions]


class Life:
    """One life of a run: notes what passes, durably enough to outlive its own SIGKILL."""

    def __init__(self, notes: Path) -> None:
        self._notes = os.open(notes, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        self._users: list[int] = []

    def note(self, *event: Any) -> None:
        os.write(self._notes, (json.dumps(event) + "\n").encode())

    def watch(self) -> None:
        """Note which users a released sum is over, and which noise it got."""
        fix_randomness()
        stream, drawn = rounded_gaussian.uint64_stream, dprlhf.training.trainer.users_of_round
        release = gate.Gate.release
        total = ""

        def users_of_round(run: Any, t: int) -> Any:
            found = drawn(run, t)
            self._users = open_private(found).tolist()
            return found

        def noted(key: bytes, *context: Any, count: int) -> Any:
            assert context[0] == "noise", context  # all that a gate draws is noise
            self.note("noise", context, total, self._users)
            return stream(key, *context, count=count)

        def released(self_: Any, round_: int, bounded: Any) -> Any:
            nonlocal total
            total = hashlib.sha256(bounded.total.numpy().tobytes()).hexdigest()
            return release(self_, round_, bounded)

        dprlhf.training.trainer.users_of_round = users_of_round
        rounded_gaussian.uint64_stream = noted
        gate.Gate.release = released


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def kill_at_point(name: str, occurrence: int) -> None:
    owner, function, when = POINTS[name]
    real, calls = getattr(owner, function), [0]

    def killing(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        if calls[0] == occurrence and when == "before":
            die()
        value = real(*args, **kwargs)
        if calls[0] == occurrence:
            die()
        return value

    setattr(owner, function, killing)


def count_calls(limit: int | None) -> list[int]:
    """Count the calls of functions of this project, and die at the limit."""
    root, calls = str(Path(dprlhf.__file__).parent), [0]

    def profile(frame: Any, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(root):
            calls[0] += 1
            if calls[0] == limit:
                die()

    sys.setprofile(profile)
    return calls


def train(folder: Path, run: str) -> None:
    dprlhf.train(
        model=str(folder / "model"), prompts=PROMPTS, reward=reward, epsilon=8.0, delta=1e-2,
        rounds=ROUNDS, learning_rate=0.5,
        policy__adapter={"type": "lora", "rank": 1, "target_modules": ["c_attn"]},
        data__max_prompt_tokens=16, rollout__max_new_tokens=2, rollout__batch_size=4,
        update__batch_size=4, update__clip_norm=0.1, output_dir=folder / run, quiet=True,
    )  # fmt: skip


def resume(folder: Path, run: str) -> None:
    dprlhf.resume(folder / run, prompts=PROMPTS, reward=reward, quiet=True)


def live(folder: Path, run: str, action: Callable[[], None]) -> int:
    """Fork, run an action, and return its exit code."""
    child = os.fork()
    if child == 0:
        output = os.open(folder / f"{run}-output", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(output, 1)
        os.dup2(output, 2)
        code = 1
        try:
            action()
            code = 0
        except DprlhfError as error:
            print(f"dprlhf: {error}", flush=True)
            code = 2
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def run_case(folder: Path, name: str, case: dict[str, Any], whole: dict[str, Any]) -> list[str]:
    """Live a case to its end, and return what is wrong with it."""
    notes = folder / f"{name}-notes"

    def life(how: list[Any] | None, action: Callable[[Path, str], None]) -> Callable[[], None]:
        def lived() -> None:
            Life(notes).watch()
            if how and how[0] == "point":
                kill_at_point(how[1], how[2])
            if how and how[0] == "call":
                count_calls(max(1, int(how[1] * whole["calls"])))
            action(folder, name)

        return lived

    codes = []
    for number, how in enumerate([*case["kill"], None]):
        action = train if number == 0 else resume
        codes.append(live(folder, name, life(how, action)))
    if case["kill"] and codes[0] != -signal.SIGKILL:
        kind = case["kill"][0][0]
        return [] if kind != "point" and codes[0] == 0 else [f"was not killed: {codes}"]
    return verdict(folder, name, codes[-1], whole)


def verdict(folder: Path, name: str, code: int, whole: dict[str, Any]) -> list[str]:
    """Return which promises a killed and resumed run broke."""
    run, wrong = folder / name, []
    notes = folder / f"{name}-notes"
    events = [json.loads(line) for line in notes.read_text().splitlines()] if notes.exists() else []
    sums_of_noise: dict[str, set[str]] = {}
    rounds_of_user: dict[int, set[int]] = {}
    releases: set[tuple[Any, ...]] = set()
    for _, context, total, users in events:
        sums_of_noise.setdefault(json.dumps(context), set()).add(total)
        releases.add(tuple(context[1:4]))  # round, number, and the charge that it belongs to
        for user in users:
            rounds_of_user.setdefault(user, set()).add(context[1])
    if any(len(sums) > 1 for sums in sums_of_noise.values()):
        wrong.append("a noise key served two sums")
    if any(len(rounds) > 1 for rounds in rounds_of_user.values()):
        wrong.append("a user is in two rounds")
    output = (folder / f"{name}-output").read_text()
    if "Traceback" in output:
        wrong.append("a traceback")
    if code != 0:
        # Nothing was spent yet: a refusal that says so is as good as an end.
        if events or not any(s in output for s in ("not a run folder", "cannot be continued")):
            wrong.append(f"did not end: {code} {output[-300:]}")
        return wrong
    entries = read_ledger(run / "ledger.jsonl")  # raises if the chain is broken
    terms = entries[0].body
    draws = Counter(round_ for round_, *_ in releases)
    charged = [e.body["round"] for e in entries if e.kind == "charge"]
    saved = [e.body["round"] for e in entries if e.kind == "commit"]
    if charged != sorted(set(charged)) or charged[-1] != ROUNDS:
        wrong.append(f"charged rounds: {charged}")
    if not set(draws) <= set(charged):
        wrong.append("noise without a charge")
    if max(draws.values()) > terms["releases_per_round"]:
        wrong.append("more releases than charged for")
    true = epsilon(
        Mechanism(
            terms["noise_multiplier"], ROUNDS, terms["partition"], terms["adjacency"],
            releases_per_round=max(draws.values()),
        ),
        terms["delta"],
    )  # fmt: skip
    stated = json.loads((run / "privacy.json").read_text())["epsilon"]
    if stated < true.epsilon_lower:
        wrong.append(f"states epsilon {stated}, true {true.epsilon}")
    lines = [line["round"] for line in JsonLines(run / "metrics.jsonl").read()]
    if len(lines) != len(set(lines)):
        wrong.append("a round has two lines of metrics")
    if not (run / "policy/adapter_model.safetensors").exists():
        wrong.append("no policy")
    if saved == charged:  # nothing was lost
        weights = load_file(run / "checkpoint/policy.safetensors")
        if any((weights[n] != w).any() for n, w in whole["weights"].items()):
            wrong.append("the policy is not that of an undisturbed run")
    return wrong


def undisturbed(folder: Path) -> dict[str, Any]:
    """Return what a run is like that nobody kills."""

    def action() -> None:
        Life(folder / "whole-notes").watch()
        calls = count_calls(None)
        train(folder, "whole")
        sys.setprofile(None)
        (folder / "calls").write_text(str(calls[0]))

    code = live(folder, "whole", action)
    assert code == 0, (folder / "whole-output").read_text()[-2000:]
    return {
        "calls": int((folder / "calls").read_text()),
        "weights": load_file(folder / "whole/checkpoint/policy.safetensors"),
    }


def main(folder: Path) -> None:
    prepare_to_fork()
    tiny.save(folder / "model")
    whole = undisturbed(folder)
    report = {}
    for number, case in enumerate(json.load(sys.stdin)):
        report[json.dumps(case)] = run_case(folder, f"run-{number}", case, whole)
        (folder / "report.json").write_text(json.dumps(report))
        print(number, case, report[json.dumps(case)], flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
