"""The harm that noise prevents: membership attacks and extraction on a tuned policy.

The questions are those of the private answers, without the list of codes, on a small model that was
fitted to public questions. Each user's code is drawn for that user alone, as a personal secret is:
nothing is there to learn but what belongs to one person. Of the candidates a fair coin each takes
part, in every round. The policy is tuned without noise, and with the noise of each ε, all other
settings the same. The attacker has both models, the reward, and the candidates' rows.

    python scripts/worth/harm.py                   # most of an hour on one core; resumable

Writes rows to docs/results/worth.json and the ROC curves to docs/images/harm.png.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from dprlhf.assets.answers import CODES, INTENTS, TEMPLATES, private_answers
from dprlhf.runs.measurements import Result, write_results

ROOT = Path(__file__).resolve().parents[2]
Array = NDArray[np.float64]

SEEDS, EPSILONS, DELTA = 5, (math.inf, 4.0, 1.0), 1e-5
CANDIDATES, NUMBERS = 260, 16
STEPS, REPEATED = 800, 256
PUBLIC_SEED, FIRST_SEED = 7100, 8100  # no seed of another table
TASKS = {"own answers": True, "shared map": False}
SCORES = ("answer", "reward", "drift", "prompt", "DIBA-like")
FEATURES = ("reward", "drift", "entropy")
SETTINGS: dict[str, Any] = {
    "rounds": 100,
    "privacy__partition": "random-allocation",
    "privacy__participations": 100,
    "privacy__reward_share": 0.0,
    "privacy__delta": DELTA,
    "update__name": "pg",
    "update__batch_size": 256,
    "learning_rate": 0.004,
    "policy__adapter": {"type": "lora", "rank": 64, "alpha": 64, "target_modules": "all-linear"},
    "policy__dtype": "float32",
    "rollout__responses": 32,
    "rollout__max_new_tokens": 1,
    "rollout__batch_size": 256,
    "rollout__base_policy": "on-policy",
    "data__max_prompt_tokens": 32,
    "reward_range": 1.0,
}
"""Chosen without noise, on users of another seed, so that the policy remembers as much as it can;
nothing was chosen at a finite ε."""


def users_of(seed: int, count: int, own: bool) -> list[dict[str, str]]:
    """Return questions with a number and a code each; ``own`` draws every user's code anew."""
    table = private_answers({"private": count}, seed=seed)["private"]
    drawn = np.random.default_rng(seed).choice(CODES, count)
    return [
        {
            "prompt": row.prompt.split("\n", 1)[1],
            "answer": str(code) if own else row.answer,
            "canary": row.canary,
        }
        for row, code in zip(table.itertuples(), drawn, strict=True)
    ]


def tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token for each word, digit and sign of the questions."""
    words = " ".join(TEMPLATES).replace("{}", " ").replace("?", " ?").split()
    known = ["<eos>", "Request", "Code", ":", "\n", *map(str, range(10)), *INTENTS, *CODES, *words]
    vocabulary = {word: i for i, word in enumerate(dict.fromkeys(known))}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="<eos>"))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex(r"\d|[A-Za-z]+|[:?\n]"), "removed", True)
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, eos_token="<eos>", pad_token="<eos>", padding_side="left"
    )


def make_base(folder: Path) -> None:
    """Fit the base model to public questions, whose codes are drawn uniformly.

    Half of each batch are 256 questions that come again and again, and whose codes it learns by
    heart: that teaches it to read numbers, as a model does that was pretrained on repeated text.
    """
    words = tokenizer()
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(words), hidden_size=64, intermediate_size=192, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=64,
            tie_word_embeddings=True, bos_token_id=0, eos_token_id=0,
        )
    )  # fmt: skip
    public = users_of(PUBLIC_SEED, 12_000, True)
    rows = [words(f"<eos>{u['prompt']} {u['answer']}")["input_ids"] for u in public]
    longest = max(map(len, rows))
    ids = torch.tensor([[0] * (longest - len(row)) + row for row in rows])
    seen = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows])
    positions = (seen.cumsum(1) - 1).clamp(min=0)
    learnt = ids.masked_fill(seen == 0, -100)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    draw = torch.Generator().manual_seed(0)
    for _ in range(STEPS):
        again = torch.randint(REPEATED, (48,), generator=draw)
        fresh = torch.randint(REPEATED, len(rows), (48,), generator=draw)
        of = torch.cat([again, fresh])
        model(
            input_ids=ids[of], attention_mask=seen[of], position_ids=positions[of],
            labels=learnt[of],
        ).loss.backward()  # fmt: skip
        optimizer.step()
        optimizer.zero_grad()
    model.eval().save_pretrained(folder)
    words.save_pretrained(folder)


def measure(task: str, epsilon: float, seed: int, base: Path, folder: Path) -> dict[str, Any]:
    """Tune on the members and attack the policy; return the scores of all candidates."""
    import dprlhf
    from dprlhf import recipe
    from dprlhf.audit import exposure, likelihood_scores, membership_scores, text_logprobs
    from dprlhf.data.public import in_memory_prompts
    from dprlhf.data.users import Prompts
    from dprlhf.rewards import Scorer
    from dprlhf.rewards.verifiable import exact_match

    users = users_of(seed, CANDIDATES, TASKS[task])
    included = np.random.default_rng(seed + 50).random(CANDIDATES) < 0.5
    members = [user for user, taken in zip(users, included, strict=True) if taken]
    shutil.rmtree(folder, ignore_errors=True)
    tuned = dprlhf.train(
        model=str(base), prompts=members, reward=exact_match, epsilon=epsilon, seed=seed,
        evaluation_prompts=users_of(PUBLIC_SEED + 1, 8, True), output_dir=folder, quiet=True,
        **SETTINGS,
    )  # fmt: skip
    plain = in_memory_prompts([user["prompt"] for user in users])
    answers = [user["answer"] for user in users]
    asked = Prompts(plain.prompts, plain.users, plain.slots, {"answer": answers})
    rollout = recipe.Rollout(max_new_tokens=1, batch_size=256)
    policy = tuned.policy
    scores = membership_scores(
        policy, Scorer([exact_match], 1.0), asked, rollout, responses=8, max_prompt_tokens=32
    )
    prompts = [user["prompt"] for user in users]
    scores |= likelihood_scores(policy, prompts, [f" {a}" for a in answers], max_prompt_tokens=32)
    codes = np.stack([text_logprobs(policy, prompts, [f" {c}"] * len(prompts)) for c in CODES], 1)
    own = np.array([CODES.index(answer) for answer in answers])
    bits = exposure(codes, own)
    random = np.random.default_rng(seed + 90)
    guesses = []
    for user in users:  # whose number is it? the attacker knows the question and the code
        others = random.choice(np.arange(100_000, 1_000_000), NUMBERS - 1, replace=False)
        numbers = [user["canary"], *map(str, others)]
        guessed = [user["prompt"].replace(user["canary"], number) for number in numbers]
        texts = [f" {user['answer']}"] * NUMBERS
        ratio = text_logprobs(policy, guessed, texts)
        with policy.base():
            guesses.append(ratio - text_logprobs(policy, guessed, texts))
    found = exposure(np.array(guesses), np.zeros(len(users), dtype=np.int64))
    return {
        "included": included.tolist(),
        "scores": {name: values.tolist() for name, values in scores.items()},
        "answer bits": bits.tolist(),
        "number bits": found.tolist(),
        "right": np.exp(np.take_along_axis(codes, own[:, None], 1)[:, 0]).tolist(),
        "noise multiplier": tuned.plan.noise_multiplier,
        "epsilon": tuned.plan.guarantee.epsilon,
    }


def with_shadows(runs: list[dict[str, Any]]) -> None:
    """Add to each run the combined score, its weights fitted on the runs of the other seeds."""
    from dprlhf.audit import combined_scores

    features = [np.stack([np.array(run["scores"][f]) for f in FEATURES], 1) for run in runs]
    included = [np.array(run["included"]) for run in runs]
    for i, run in enumerate(runs):
        others = [j for j in range(len(runs)) if j != i]
        run["scores"]["DIBA-like"] = combined_scores(
            features[i],
            np.concatenate([features[j] for j in others]),
            np.concatenate([included[j] for j in others]),
        ).tolist()


def rows_of(task: str, epsilon: float, runs: list[dict[str, Any]]) -> list[Result]:
    """Return the figures of all seeds of one ε: areas with their intervals, bounds, extraction."""
    from dprlhf.audit import membership_bound, roc

    included = np.concatenate([np.array(run["included"]) for run in runs])
    said = "no noise" if math.isinf(epsilon) else f"epsilon {epsilon:g}"
    start = f"harm (small model, {task}): {said}"
    rows, areas = [], {}
    for name in SCORES:
        scores = np.concatenate([np.array(run["scores"][name]) for run in runs])
        curve = roc(scores[included], scores[~included])
        low, high = curve.interval()
        areas[name] = curve.auc
        rows += [
            Result(f"{start}, {name}: membership AUC", curve.auc, "1"),
            Result(f"{start}, {name}: membership AUC, lower end at 95%", low, "1"),
            Result(f"{start}, {name}: membership AUC, upper end at 95%", high, "1"),
        ]
    judged = task == "own answers" and epsilon != 4
    goal = "" if not judged else "at least 0.7" if math.isinf(epsilon) else "at most 0.55"
    most = max(areas.values())
    holds = None if not judged else most >= 0.7 if math.isinf(epsilon) else most <= 0.55
    rows.append(Result(f"{start}, largest of the attacks: membership AUC", most, "1", goal, holds))
    # The theorem is about one run: each is asked at a fifth of the error, for each attack.
    level = 1 - 0.05 / (len(runs) * len(SCORES))
    bounds = [
        membership_bound(
            np.array(run["scores"][name]), np.array(run["included"]), epsilon, DELTA, level
        )
        for run in runs
        for name in SCORES
    ]
    claim = {"goal": f"at most {epsilon:g}", "holds": max(bounds) <= epsilon}
    claim = {} if math.isinf(epsilon) else claim
    rows.append(Result(f"{start}: largest lower bound on epsilon", max(bounds), "epsilon", **claim))
    for what, key, unit in (
        ("exposure of a code among 8", "answer bits", "bits"),
        ("exposure of a number among 16", "number bits", "bits"),
        ("probability of the right code", "right", "1"),
    ):
        values = np.concatenate([np.array(run[key]) for run in runs])
        for who, chosen in (("members", included), ("others", ~included)):
            rows.append(Result(f"{start}, {what}, {who}", float(values[chosen].mean()), unit))
    rows.append(Result(f"{start}: runs", len(runs), "1"))
    rows.append(Result(f"{start}: members", int(included.sum()), "1"))
    return rows


def plot(done: dict[float, list[dict[str, Any]]], picture: Path) -> None:
    """Draw the ROC curves on two logarithmic axes, with the largest rates that ε allows."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    from dprlhf.audit import largest_tpr, roc

    figure, every = plt.subplots(1, len(done), figsize=(4 * len(done), 4), sharey=True)
    grid = np.geomspace(1e-3, 1, 200)
    for axis, (epsilon, runs) in zip(np.atleast_1d(every), done.items(), strict=True):
        included = np.concatenate([np.array(run["included"]) for run in runs])
        for name in SCORES:
            scores = np.concatenate([np.array(run["scores"][name]) for run in runs])
            curve = roc(scores[included], scores[~included])
            axis.step(
                curve.fpr, curve.tpr, where="post", label=f"{name}: AUC {curve.auc:.2f}", lw=1.2
            )
        if math.isfinite(epsilon):
            bound = largest_tpr(grid, epsilon, DELTA)
            axis.plot(grid, bound, "k--", lw=1, label=f"most that ε = {epsilon:g} allows")
        axis.plot(grid, grid, color="grey", lw=0.8)
        axis.set(xscale="log", yscale="log", xlim=(3e-3, 1), ylim=(3e-3, 1.05))
        axis.set(xlabel="false positives")
        axis.set_title("no noise" if math.isinf(epsilon) else f"ε = {epsilon:g}")
        axis.legend(fontsize=7, loc="lower right")
    np.atleast_1d(every)[0].set_ylabel("true positives")
    figure.tight_layout()
    figure.savefig(picture, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "harm")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--epsilons", nargs="+", type=float, default=EPSILONS)
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--results", type=Path, default=ROOT / "docs" / "results" / "worth.json")
    parser.add_argument("--picture", type=Path, default=ROOT / "docs" / "images" / "harm.png")
    parser.add_argument("--write-only", action="store_true", help="write what is finished")
    given = parser.parse_args()
    torch.set_num_threads(1)
    given.runs.mkdir(parents=True, exist_ok=True)
    base = given.runs / "base"
    if not (base / "tokenizer.json").exists() and not given.write_only:
        make_base(base)
    cells = [
        (task, e, s) for task in given.tasks for s in range(given.seeds) for e in given.epsilons
    ]
    done: dict[tuple[str, float], list[dict[str, Any]]] = {}
    for task, epsilon, seed in cells:
        name = f"{task.replace(' ', '-')}-epsilon-{epsilon:g}-seed-{seed}"
        file = given.runs / f"{name}.json"
        if not file.exists():
            if given.write_only:
                continue
            found = measure(task, epsilon, FIRST_SEED + seed, base, given.runs / name)
            file.write_text(json.dumps(found))
            print(f"{name} done", flush=True)
        done.setdefault((task, epsilon), []).append(json.loads(file.read_text()))
    rows = []
    for (task, epsilon), runs in done.items():
        if len(runs) > 1:
            with_shadows(runs)
            rows += rows_of(task, epsilon, runs)
    write_results(given.results, rows)
    for row in rows:
        print(f"{row.name}: {row.value:.3f} {row.goal}")
    own = {e: r for (task, e), r in done.items() if task == "own answers" and len(r) > 1}
    if own:
        plot(own, given.picture)


if __name__ == "__main__":
    sys.exit(main())
