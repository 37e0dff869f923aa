"""Run the demo (recipes/demo.yaml), print what it shows, and keep the figures.

    make demo
    python scripts/demo.py --results docs/results/demo.json
    python scripts/demo.py --public-only --results docs/results/demo.json

What the cache lacks is fetched and made first. On two or more cores and without a GPU, a second
process shares the rounds and the evaluation with the first. The second command keeps the figures,
the third tunes the same model by the same method on as many PUBLIC prompts instead, without noise
and clipping. That takes as long as the demo itself, so the demo does not repeat it: it prints the
kept figure and says from when it is.
"""

from __future__ import annotations

import argparse
import atexit
import itertools
import json
import math
import os
import re
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dprlhf import load_recipe, train
from dprlhf.assets import pull
from dprlhf.assets.voices import FIRST_PERSON, words_of
from dprlhf.cli.train import flat
from dprlhf.data.loading import load_rows
from dprlhf.data.public import evaluated, public_users
from dprlhf.recipe import Recipe
from dprlhf.rollout import sample
from dprlhf.runs.card import guarantee_sentence
from dprlhf.runs.measurements import Result, at_least, at_most, write_results
from dprlhf.training.build import hush_libraries
from dprlhf.training.evaluate import RewardEstimate
from dprlhf.training.setup import load_policy_of

SCRIPT = str(Path(__file__).resolve())
ROOT = Path(__file__).resolve().parents[1]
RECIPE = ROOT / "recipes" / "demo.yaml"
KEPT = ROOT / "docs" / "results" / "demo.json"
PUBLIC_ONLY = "demo: reward after public prompts alone"
PUBLIC_ROWS = (
    "data.split=sentences", "privacy.epsilon=.inf", "update.clip_norm=.inf", "update.subspace=null",
)  # fmt: skip
"""The demo with public sentences for users: neither noise nor clipping, nor a subspace for them."""
NEEDED = ("smollm2-135m", "voices")  # their two wheels come side by side
PAIRS = 5
UNIT = "score"
FREQUENT = 5
"""Public sentences that must have a word before the judge counts it."""


class Helper:
    """The second process of the demo: it joins the run as rank 1.

    Two processes of one thread each make better use of two cores than two threads of one process,
    which wait for each other after each of many small products.
    """

    def __init__(self, overrides: Sequence[str]) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        launch = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
        launch |= {"MASTER_PORT": str(port), "OMP_NUM_THREADS": str(max(1, cores() // 2))}
        os.environ |= launch | {"RANK": "0", "LOCAL_RANK": "0"}
        torch.set_num_threads(max(1, cores() // 2))
        self._process = subprocess.Popen(
            [sys.executable, SCRIPT, "--helper", str(os.getpid()), *overrides],
            env={**os.environ, "RANK": "1", "LOCAL_RANK": "1"},
            stdout=subprocess.PIPE,
            text=True,
            process_group=0,  # Ctrl-C is for the first process, which waits for a safe point
        )
        atexit.register(self._process.kill)

    def wait(self) -> None:
        """Wait until it is ready for the run; raise an error if it has ended instead.

        A run of two processes would wait for the other's connection, for an hour.
        """
        assert self._process.stdout is not None
        if not self._process.stdout.readline():
            raise SystemExit(f"the second process ended with status {self._process.wait()}")

    def processor_seconds(self) -> float:
        """Wait for its end; return the processor time of its part of the run."""
        return float(self._process.communicate()[0].split()[-1])


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def help_tuning(parent: int, overrides: Sequence[str]) -> None:
    """Take part in the run, and print the processor time of that."""
    pull(NEEDED, quiet=True)
    if os.getppid() != parent:
        raise SystemExit("the first process has ended")
    print("ready", flush=True)
    began = time.process_time()
    train(RECIPE, overrides=overrides, quiet=True)
    print(time.process_time() - began)


@dataclass(frozen=True)
class Wishes:
    """What is known of the authors of the held-out prompts.

    Attributes:
        wants: 1 for an author who writes in the first person, −1 for another, ``[prompts]``.
        most: The bound R on rewards: what the best continuation earns.
        telling: Log-odds of the words that tell a sentence in the first person from others, without
            the first-person words themselves.
    """

    wants: Sequence[int]
    most: float
    telling: Mapping[str, float]

    @property
    def alike(self) -> float:
        """What the first person for everybody would earn: R times the mean wish."""
        return self.most * sum(self.wants) / len(self.wants)

    def judged(self, samples: Sequence[Mapping[str, Any]]) -> tuple[float, float]:
        """Return how far the other words of the texts have moved as authors want, with its error.

        The reward counts first-person words, and this judge sees all others.
        """
        rises = [
            wish * (log_odds(pair["after"], self.telling) - log_odds(pair["before"], self.telling))
            for wish, pair in zip(self.wants, samples, strict=True)
        ]
        return float(np.mean(rises)), float(np.std(rises, ddof=1) / math.sqrt(len(rises)))


def log_odds(text: str, telling: Mapping[str, float]) -> float:
    """Return the log-odds that a text is in the first person, by its other words (naive Bayes)."""
    return sum(telling.get(word, 0.0) for word in {*words_of(text)})


def telling_words(texts: Sequence[str]) -> dict[str, float]:
    """Fit naive Bayes to the sentences of public reviews."""
    counts: dict[bool, Counter[str]] = {True: Counter(), False: Counter()}
    sentences = Counter[bool]()
    for sentence in itertools.chain.from_iterable(re.split(r"[.!?]+", text) for text in texts):
        words = {*words_of(sentence)}
        spoken = not FIRST_PERSON.isdisjoint(words)
        sentences[spoken] += 1
        counts[spoken].update(words - FIRST_PERSON)
    return {
        word: math.log((counts[True][word] + 1) / (sentences[True] + 2))
        - math.log((counts[False][word] + 1) / (sentences[False] + 2))
        for word in counts[True].keys() | counts[False].keys()
        if counts[True][word] + counts[False][word] >= FREQUENT
    }


def wishes(recipe: Recipe) -> Wishes:
    """Return what is known of the authors of a recipe's held-out prompts, which are public rows."""
    assert recipe.evaluation is not None
    prompts = evaluated(recipe, public_users(recipe, None))
    assert prompts is not None
    wants = [int(value) for value in prompts.columns["wants"]]
    data = recipe.evaluation.data.like(recipe.data)
    others = load_rows(data)[data.prompt_column][len(wants) :]
    return Wishes(wants, recipe.reward_range, telling_words(others))


def show_start(recipe: Recipe, wants: Sequence[int]) -> None:
    """Print what is about to happen, and how the untuned model continues the first prompts."""
    users, budget = recipe.data.limit, recipe.privacy
    print(
        f"{users} private users, ε = {budget.epsilon:g}, δ = {budget.delta:g}; the untuned model:"
    )
    public, policy = public_users(recipe, None), load_policy_of(recipe)
    assert public is not None
    few = {"responses": 1, "batch_size": PAIRS}
    with policy.base():
        prompts = public.select(np.arange(PAIRS))
        found = sample(
            policy,
            prompts,
            recipe.rollout.model_copy(update=few),
            key=bytes(32),
            context=("evaluation", recipe.seed),
            max_prompt_tokens=recipe.data.max_prompt_tokens,
        )
    for prompt, text, wish in zip(prompts.prompts, found.texts, wants, strict=False):
        print(f"  {asked(prompt, wish)}\n      {flat(text)}")
    print(flush=True)


def asked(prompt: Any, wish: int) -> str:
    """Return a prompt with what its author does."""
    how = "in" if wish > 0 else "without"
    return f"{flat(prompt)} ...   (its author goes on {how} the first person)"


def over_before(result: Any, measure: str) -> float:
    """Return a measure of the tuned policy's texts over that of the base model's."""
    return float(result.after.measures[measure].mean / result.before.measures[measure].mean)


def show_pairs(samples: Sequence[dict[str, Any]], wants: Sequence[int]) -> None:
    """Print the first pairs, as they come: of each five authors, four say "I"."""
    print(f"\nThe first {PAIRS} held-out prompts, each continued with the same random numbers:")
    for pair, wish in zip(samples[:PAIRS], wants, strict=False):
        print(f"\n{asked(pair['prompt'], wish)}")
        print(f"  before ({pair['reward_before']:+.2f}): {flat(pair['before'])}")
        print(f"  after  ({pair['reward_after']:+.2f}): {flat(pair['after'])}")


def show(result: Any, wishes: Wishes, public: dict[str, dict[str, Any]]) -> None:
    """Print the pairs, the guarantee, and what the users' prompts brought."""
    before, after, rise = result.before, result.after, result.difference
    show_pairs(result.samples, wishes.wants)
    print(f"\nguarantee: {guarantee_sentence(json.loads(result.folder.privacy.read_text()))}\n")
    print(f"reward on {before.prompts} held-out prompts (first-person words, as their authors do):")
    print(f"  before                              {shown(before)}")
    print(f"  after                               {shown(after)}   rise {shown(rise)}")
    if PUBLIC_ONLY in public:
        row, error = public[PUBLIC_ONLY], public[f"{PUBLIC_ONLY}, standard error"]["value"]
        print(f"  public prompts alone, no privacy    {row['value']:+.3f} ± {error:.3f}", end="")
        print(f"   measured {row['date']}: {row['command']}")
    print(f"  the first person for everybody      {wishes.alike:+.3f}")
    print(f"  the first person for nobody         {-wishes.alike:+.3f}")
    rise, error = wishes.judged(result.samples)
    print(
        f"a judge of all other words, as their authors write: rise {rise:+.3f} ± {error:.3f} nats"
    )
    old, new = before.measures, after.measures
    print(f"KL to the base model: {new['kl'].mean:.2f} nats a response")
    for words, name in (("different pairs of words, a word", "distinct_2"),
                        ("perplexity under the base model", "perplexity")):  # fmt: skip
        print(f"{words}: {old[name].mean:.3g} before, {new[name].mean:.3g} after")
    print(f"run folder: {result.folder.path}")


def shown(value: RewardEstimate) -> str:
    """Return a mean with its standard error."""
    return f"{value.mean:+.3f} ± {value.standard_error:.3f}"


def rows(result: Any, wishes: Wishes, public: dict[str, dict[str, Any]]) -> list[Result]:
    """Return the figures as rows of docs/results/demo.json."""
    before, after, rise = result.before, result.after, result.difference
    epsilon, (judged, error) = result.plan.guarantee.epsilon, wishes.judged(result.samples)
    distinct, fluency = over_before(result, "distinct_2"), over_before(result, "perplexity")
    found = [
        at_most("demo: epsilon (delta 1e-5)", epsilon, "1", 2),
        at_most("demo: private users", result.plan.users, "users", 500),
        at_least("demo: held-out prompts", before.prompts, "prompts", 256),
        Result("demo: reward before", before.mean, UNIT),
        Result("demo: reward before, standard error", before.standard_error, UNIT),
        Result("demo: reward after", after.mean, UNIT),
        Result("demo: reward after, standard error", after.standard_error, UNIT),
        Result("demo: rise of the reward", rise.mean, UNIT),
        Result("demo: rise of the reward, standard error", rise.standard_error, UNIT),
        at_least("demo: rise over its standard error",
                 rise.mean / max(rise.standard_error, 1e-9), "1", 5),
        Result("demo: reward of the first person for everybody", wishes.alike, UNIT),
        Result("demo: judge of other words, rise", judged, "nats"),
        at_least("demo: judge of other words, rise over its standard error",
                 judged / max(error, 1e-9), "1", 5),
        Result("demo: KL to the base model", after.measures["kl"].mean, "nats a response"),
        Result("demo: distinct bigrams, after over before", distinct, "1"),
        Result("demo: perplexity under the base model, after over before", fluency, "1"),
    ]  # fmt: skip
    if PUBLIC_ONLY in public:
        error = public[f"{PUBLIC_ONLY}, standard error"]["value"]
        above = after.mean - public[PUBLIC_ONLY]["value"]
        name = "demo: reward above public prompts alone, over its standard error"
        found.append(at_least(name, above / math.hypot(after.standard_error, error), "1", 3))
    return found


def kept() -> dict[str, dict[str, Any]]:
    """Return the rows of the kept figures, by name."""
    return {row["name"]: row for row in json.loads(KEPT.read_text())} if KEPT.exists() else {}


def public_only(overrides: Sequence[str]) -> list[Result]:
    """Tune on the critics' sentences as they write; return the reward that is reached."""
    result = train(RECIPE, overrides=[*PUBLIC_ROWS, *overrides])
    assert result.after
    print(f"reward on {result.after.prompts} held-out prompts: {shown(result.after)}")
    return [
        Result(PUBLIC_ONLY, result.after.mean, UNIT),
        Result(f"{PUBLIC_ONLY}, standard error", result.after.standard_error, UNIT),
    ]


@dataclass
class Times:
    """When the parts of the demo ended, in seconds since 1970.

    Attributes:
        began: The start of this script.
        built: The language model and the reviews are there.
        texts: The untuned model's texts are on the screen.
        rewards: The noised mean reward of each round.
    """

    began: float
    built: float = math.nan
    texts: float = math.nan
    rewards: list[float] = field(default_factory=list)

    def report(self, metrics: dict[str, Any]) -> None:
        """Print the first round's released mean reward: the first figure that users paid for."""
        self.rewards.append(time.time())
        if len(self.rewards) == 1:
            mean, noise = metrics["private_reward_noised"], metrics["private_reward_noise_std"]
            known = "the noise hides it" if mean is None else f"{mean:+.2f} ± {noise:.2f} (noise)"
            print(f"mean reward of the first round's users: {known}", flush=True)

    def rows(self, started: float, ready: float) -> list[Result]:
        """Return the seconds of each part of ``make demo``, which started at ``started``."""
        texts, reward, end = (t - started for t in (self.texts, self.rewards[0], time.time()))
        return [
            Result("demo: installing", ready - started, "s"),
            Result("demo: model and data", self.built - self.began, "s"),
            at_most("demo: first continuations", texts, "s", 180),
            at_most("demo: first noised reward", reward, "s", 180),
            at_most("demo: make demo, clean clone", end, "s", 300),
        ]


def tune(overrides: Sequence[str], times: Times) -> list[Result]:
    """Show the untuned model, tune, show the result; return the figures."""
    pull(NEEDED)
    times.built = time.time()
    helper = Helper(overrides) if cores() > 1 and not torch.cuda.is_available() else None
    recipe = load_recipe(RECIPE, overrides)
    known, public = wishes(recipe), kept()
    show_start(recipe, known.wants)
    times.texts, processor = time.time(), time.process_time()
    if helper is not None:
        helper.wait()
    result = train(RECIPE, overrides=overrides, callbacks=[times.report])
    show(result, known, public)
    seconds, processor = time.time() - times.texts, time.process_time() - processor
    processor += helper.processor_seconds() if helper is not None else 0
    print(f"seconds for tuning and evaluation: {seconds:.0f} ({processor:.0f} of a processor)")
    return [
        *rows(result, known, public),
        Result("demo: tuning and evaluation", seconds, "s"),
        Result("demo: tuning and evaluation, processor time", processor, "s"),
    ]  # fmt: skip


def main() -> None:
    """Tune, print, and keep."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--results", type=Path, help="write the figures here")
    parser.add_argument(
        "--started", type=float, help="when 'make demo' started, seconds since 1970"
    )
    parser.add_argument("--ready", type=float, help="when its packages were installed")
    parser.add_argument("--public-only", action="store_true", help="tune on public prompts instead")
    parser.add_argument("--helper", type=int, help=argparse.SUPPRESS)
    parser.add_argument("overrides", nargs="*", help="section.key=value")
    options = parser.parse_args()
    hush_libraries()
    if options.helper is not None:
        return help_tuning(options.helper, options.overrides)
    times = Times(time.time())
    if options.public_only:
        pull(NEEDED)
        found = public_only(options.overrides)
    else:
        found = tune(options.overrides, times)
        if options.started is not None and options.ready is not None:
            found += times.rows(options.started, options.ready)
    if options.results is not None:
        write_results(options.results, found)


if __name__ == "__main__":
    main()
