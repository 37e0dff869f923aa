"""Run the demo (recipes/demo.yaml), print what it shows, and keep the figures.

    make demo
    python scripts/demo.py --results docs/results/demo.json
    python scripts/demo.py --public-only --results docs/results/demo.json

What the cache lacks is fetched and made first. On two or more cores and without a GPU, a second
process fits the reward model while the first makes the language model and shows its texts; then the
two share the rounds and the evaluation. The second command keeps the figures, the third tunes the
same model by the same method on as many PUBLIC prompts instead, without noise and clipping. That
takes as long as the demo itself, so the demo does not repeat it: it prints the kept figure and says
from when it is.
"""

from __future__ import annotations

import argparse
import atexit
import json
import math
import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dprlhf import load_recipe, train
from dprlhf.assets import pull
from dprlhf.cli.output import flat
from dprlhf.data.public import evaluated, public_users
from dprlhf.recipe import Recipe
from dprlhf.rollout import sample
from dprlhf.runs.measurements import Result, write_results
from dprlhf.runs.model_card import guarantee_sentence
from dprlhf.training.build import hush_libraries
from dprlhf.training.measures import RewardEstimate
from dprlhf.training.policy_setup import load_policy_of

SCRIPT = str(Path(__file__).resolve())
ROOT = Path(__file__).resolve().parents[1]
RECIPE = ROOT / "recipes" / "demo.yaml"
KEPT = ROOT / "docs" / "results" / "demo.json"
PUBLIC_ONLY = "demo: reward after public prompts alone"
PUBLIC_ROWS = (
    "data.split=sentences", "privacy.epsilon=.inf", "update.clip_norm=.inf", "update.subspace=null",
)  # fmt: skip
"""The demo with public sentences for users: neither noise nor clipping, nor a subspace for them."""
SHOWN_FIRST = ("smollm2-135m", "community", "minilm")  # their three wheels come side by side
REWARD = "sentiment-minilm-fast"
PAIRS = 5
UNIT = "logit difference"

JUDGE = "evaluation.judges={words: worth.lexicon:judge}"
"""Adds the judge "words" to a recipe: words of opinion as the author wants them, less others."""


class Helper:
    """The second process of the demo: it fits the reward model, then joins the run as rank 1.

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
    """Fit the reward model, then take part in the run; print the processor time of that part."""
    pull([REWARD], quiet=True)
    pull(SHOWN_FIRST, quiet=True)
    if os.getppid() != parent:
        raise SystemExit("the first process has ended")
    print("ready", flush=True)
    began = time.process_time()
    train(RECIPE, overrides=[JUDGE, *overrides], quiet=True)
    print(time.process_time() - began)


@dataclass(frozen=True)
class Wishes:
    """What the authors of the held-out prompts want.

    Attributes:
        wants: The sign of each author's rating, ``[prompts]``.
        most: The bound R on rewards: what the best continuation earns.
    """

    wants: Sequence[int]
    most: float

    @property
    def praise(self) -> float:
        """What praise for everybody would earn: R times the mean wish; criticism, its opposite."""
        return self.most * sum(self.wants) / len(self.wants)


def wishes(recipe: Recipe) -> Wishes:
    """Return the wishes of a recipe's held-out prompts, which are public rows."""
    prompts = evaluated(recipe, public_users(recipe, None))
    assert prompts is not None
    return Wishes([int(value) for value in prompts.columns["wants"]], recipe.reward_range)


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
    """Return a prompt with its author's rating."""
    rating = "good; wants praise" if wish > 0 else "bad; wants criticism"
    return f"{flat(prompt)} ...   (rating: {rating})"


def over_before(result: Any, measure: str) -> float:
    """Return a measure of the tuned policy's texts over that of the base model's."""
    return float(result.after.measures[measure].mean / result.before.measures[measure].mean)


def show_pairs(samples: Sequence[dict[str, Any]], wants: Sequence[int]) -> None:
    """Print the first pairs, as they come: of each five authors, four gave a bad rating."""
    print(f"\nThe first {PAIRS} held-out prompts, each continued with the same random numbers:")
    for pair, wish in zip(samples[:PAIRS], wants, strict=False):
        print(f"\n{asked(pair['prompt'], wish)}")
        print(f"  before ({pair['reward_before']:+.2f}): {flat(pair['before'])}")
        print(f"  after  ({pair['reward_after']:+.2f}): {flat(pair['after'])}")


def show(result: Any, told: Wishes, public: dict[str, dict[str, Any]]) -> None:
    """Print the pairs, the guarantee, and what the users' prompts brought."""
    before, after, rise = result.before, result.after, result.difference
    show_pairs(result.samples, told.wants)
    print(f"\nguarantee: {guarantee_sentence(json.loads(result.folder.privacy.read_text()))}\n")
    print(f"reward on {before.prompts} held-out prompts, sentiment × sign of the author's rating:")
    print(f"  before                              {shown(before)}")
    print(f"  after                               {shown(after)}   rise {shown(rise)}")
    if PUBLIC_ONLY in public:
        row, error = public[PUBLIC_ONLY], public[f"{PUBLIC_ONLY}, standard error"]["value"]
        print(f"  public prompts alone, no privacy    {row['value']:+.3f} ± {error:.3f}", end="")
        print(f"   measured {row['date']}: {row['command']}")
    print(f"  praise for everybody would earn     {told.praise:+.3f}")
    print(f"  criticism for everybody would earn  {-told.praise:+.3f}")
    words = result.compared["words"].difference
    print(f"words of opinion as wanted, less others, a text: rise {shown(words)}")
    old, new = before.measures, after.measures
    print(f"KL to the base model: {new['kl'].mean:.2f} nats a response")
    for words, name in (("different pairs of words, a word", "distinct_2"),
                        ("perplexity under the base model", "perplexity")):  # fmt: skip
        print(f"{words}: {old[name].mean:.3g} before, {new[name].mean:.3g} after")
    print(f"run folder: {result.folder.path}")


def shown(value: RewardEstimate) -> str:
    """Return a mean with its standard error."""
    return f"{value.mean:+.3f} ± {value.standard_error:.3f}"


def rows(result: Any, told: Wishes, public: dict[str, dict[str, Any]]) -> list[Result]:
    """Return the figures as rows of docs/results/demo.json."""
    before, after, rise = result.before, result.after, result.difference
    epsilon, gold = result.plan.guarantee.epsilon, result.compared["words"].difference
    distinct, fluency = over_before(result, "distinct_2"), over_before(result, "perplexity")
    found = [
        Result("demo: epsilon (delta 1e-5)", epsilon, "1", "at most 4", epsilon <= 4),
        Result("demo: private users", result.plan.users, "users"),
        Result("demo: held-out prompts", before.prompts, "prompts", "at least 256",
               before.prompts >= 256),
        Result("demo: reward before", before.mean, UNIT),
        Result("demo: reward before, standard error", before.standard_error, UNIT),
        Result("demo: reward after", after.mean, UNIT),
        Result("demo: reward after, standard error", after.standard_error, UNIT),
        Result("demo: rise of the reward", rise.mean, UNIT),
        Result("demo: rise of the reward, standard error", rise.standard_error, UNIT),
        Result("demo: rise over its standard error", rise.mean / max(rise.standard_error, 1e-9),
               "1", "at least 5", rise.mean >= 5 * rise.standard_error),
        Result("demo: reward of praise for everybody", told.praise, UNIT),
        Result("demo: reward of criticism for everybody", -told.praise, UNIT),
        Result("demo: lexicon, rise", gold.mean, "words a text", "above 0", gold.mean > 0),
        Result("demo: lexicon, rise, standard error", gold.standard_error, "words a text"),
        Result("demo: KL to the base model", after.measures["kl"].mean, "nats a response"),
        Result("demo: distinct bigrams, after over before", distinct, "1",
               "within 5% of 1", abs(distinct - 1) <= 0.05),
        Result("demo: perplexity under the base model, after over before", fluency, "1",
               "within 5% of 1", abs(fluency - 1) <= 0.05),
    ]  # fmt: skip
    if PUBLIC_ONLY in public:
        error = public[f"{PUBLIC_ONLY}, standard error"]["value"]
        above = (after.mean - public[PUBLIC_ONLY]["value"]) / math.hypot(
            after.standard_error, error
        )
        name = "demo: reward above public prompts alone, over its standard error"
        found.append(Result(name, above, "1", "at least 3", above >= 3))
    return found


def kept() -> dict[str, dict[str, Any]]:
    """Return the rows of the kept figures, by name."""
    return {row["name"]: row for row in json.loads(KEPT.read_text())} if KEPT.exists() else {}


def public_only(overrides: Sequence[str]) -> list[Result]:
    """Tune on public sentences, whose only wish is praise; return the reward that is reached."""
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
        fitted: The reward model is there.
        rewards: The noised mean reward of each round.
    """

    began: float
    built: float = math.nan
    texts: float = math.nan
    fitted: float = math.nan
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
        made = self.built - self.began + self.fitted - self.texts
        texts, reward, end = (t - started for t in (self.texts, self.rewards[0], time.time()))
        return [
            Result("demo: installing", ready - started, "s"),
            Result("demo: models, data and the reward's fit", made, "s"),
            Result("demo: waiting for the reward's fit", self.fitted - self.texts, "s"),
            Result("demo: first continuations", texts, "s", "at most 180", texts <= 180),
            Result("demo: first noised reward", reward, "s", "at most 180", reward <= 180),
            Result("demo: make demo, clean clone", end, "s", "at most 360", end <= 360),
        ]


def tune(overrides: Sequence[str], times: Times) -> list[Result]:
    """Show the untuned model, fit the reward, tune, show the result; return the figures."""
    helper = Helper(overrides) if cores() > 1 and not torch.cuda.is_available() else None
    pull(SHOWN_FIRST)
    times.built = time.time()
    given = [JUDGE, *overrides]
    recipe = load_recipe(RECIPE, given)
    told, public = wishes(recipe), kept()
    show_start(recipe, told.wants)
    times.texts = time.time()
    accuracy = json.loads((pull([REWARD])[REWARD] / "metrics.json").read_text())["accuracy"]
    times.fitted, processor = time.time(), time.process_time()
    if helper is not None:
        helper.wait()
    result = train(RECIPE, overrides=given, callbacks=[times.report])
    show(result, told, public)
    print(f"accuracy of the reward model on held-out sentences: {accuracy:.3f}")
    seconds, processor = time.time() - times.fitted, time.process_time() - processor
    processor += helper.processor_seconds() if helper is not None else 0
    print(f"seconds for tuning and evaluation: {seconds:.0f} ({processor:.0f} of a processor)")
    return [
        *rows(result, told, public),
        Result("demo: accuracy of the reward model", accuracy, "1", "at least 0.82",
               accuracy >= 0.82),
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
        pull([*SHOWN_FIRST, REWARD])
        found = public_only(options.overrides)
    else:
        found = tune(options.overrides, times)
        if options.started is not None and options.ready is not None:
            found += times.rows(options.started, options.ready)
    if options.results is not None:
        write_results(options.results, found)


if __name__ == "__main__":
    main()
