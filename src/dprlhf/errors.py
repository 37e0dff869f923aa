"""The one exception type that users see, and how its line is worded."""

import contextlib
import difflib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

EXITS = (KeyboardInterrupt, SystemExit)
"""The exceptions that end a program on purpose. Any other may come from a user's data, also one
that is no ``Exception``: code compiled from Rust, such as ``tokenizers``, raises such panics."""


class DprlhfError(ValueError):
    """A problem that the user can mend: one line that names the offender and what to do.

    It is a ``ValueError``, as what other libraries raise about an argument: where this package
    catches a library's, it lets its own pass.

    The command line prints the message without a traceback and exits with status 2. The message
    is shown outside ``secret/``, so it must never quote a private prompt, response or reward.
    """


class MissingPathError(DprlhfError):
    """There is nothing at a relative path, as where a run is resumed from another folder."""


class InterruptedRunError(KeyboardInterrupt):
    """Ctrl-C at a safe point of a run; the message says how to continue."""


class BrokenLinesError(Exception):
    """Lines of a file cannot be read."""

    def __init__(self, lines: Sequence[int], why: str) -> None:
        super().__init__(why)
        self.lines, self.why = lines, why


def missing_path(said: str, path: str) -> DprlhfError:
    """Return the error of a missing file; of a relative path, it says where that starts."""
    if Path(path).is_absolute():
        return DprlhfError(said)
    return MissingPathError(f"{said}: paths start at {Path.cwd()}")


REMOVED = {
    "update.critic": "update.baseline: loo subtracts the user's own other responses",
    "optimizer.name=adam-corrected": "take adam, over which it had no measured gain",
    "policy.adapter.type=lora-b": "take type: ffa-lora, its name in the literature",
    "policy.adapter.type=lora-xs": "take type: ffa-lora, which trains few parameters, too",
    "policy.adapter.type=vera": "take type: peft with peft: {peft_type: VERA, r: …}",
    "policy.adapter.type=ia3": "take type: peft with peft: {peft_type: IA3}",
    "policy.adapter.type=norms": "take type: peft with peft: {peft_type: LN_TUNING, …}",
    "policy.adapter.type=biases": "take type: peft with {peft_type: LORA, lora_bias: true, …}",
    "optimizer.average": "the run leaves its last parameters",
    "update.subspace.source": "give public prompts in update.subspace.data or evaluation.data",
    "tracking.live": "trackers get all rounds when the run ends; metrics.jsonl has each at once",
    "trained_on_private_users": "no ε holds for a model or reward that was fitted on the same users"
    " at no stated cost: take another, or privacy.epsilon=.inf for a baseline",
    "use_dora": "write policy.adapter={type: peft, peft: {peft_type: LORA, use_dora: true, …}}",
    "use_rslora": "write policy.adapter={type: peft, peft: {peft_type: LORA, use_rslora: true, …}}",
    "rollout_func": "responses are sampled by the code that epsilon relies on: give tools, or an"
    " environment",
    "rewards.plugin": "write function: package.module:attribute",
    "rewards.per_user": "write dprlhf_per_user = True on the function",
    "rewards.by_turn": "write dprlhf_by_turn = True on the function",
    "evaluation.judges": "score the texts in samples.json, before and after, by what you like",
    "rewards.batch_size": "a classifier scores 32 texts at once",
    "revision": "write it behind the hub id: org/name@revision",
    "min_new_tokens": "a response may end at any token",
    "data.prompts_per_round": "data.max_prompts_per_user bounds a user's part in a round",
    "privacy.reward_share": "the mean reward takes 1% of the clip norm in every run",
    "kl.level": "the penalty of a response is taken as a whole",
    "max_importance_ratio": "ratios are truncated at 2",
    "update.max_ratio": "ratios are truncated at 2",
    "desirable_weight": "completions of both kinds count alike",
    "undesirable_weight": "completions of both kinds count alike",
    "rollout.cuda_graphs": "a GPU replays graphs wherever it can",
    "rollout.repetition_penalty": "give a reward that counts repetition, or rollout.top_p",
    "optimizer.betas": "Adam's are 0.9 and 0.9, which learns most in few rounds",
    "local_optimizer": "users' copies are trained by SGD",
    "update.minibatches": "a user's copy takes one step an epoch: write update.epochs",
    "update.local_learning_rate": "it is 0.1: scale update.clip_norm and the step of the optimizer",
    "update.eta": "it is 1: rewards.N.weight multiplies the advantage as it did",
    "chosen_column": "the columns of pairs are called chosen and rejected, as in TRL",
    "rejected_column": "the columns of pairs are called chosen and rejected, as in TRL",
    "sketch": "sufficient-statistics takes up to 2,000 dimensions",
    "optimizer.eps": "Adam's epsilon is 1e-8",
    "tracking.project": "runs are filed under the project dprlhf",
    "rewards.max_tokens": "a classifier reads a text up to its model's own limit",
    "model": "policy is the section of the trained model, in every stage",
    "privacy.auto": "dprlhf plan RECIPE prints the best choice as overrides of the recipe",
    "dprlhf privacy selection": "declare the runs on the same users in privacy.tuning_runs",
    "dprlhf bench": "in a clone of the repository, python -m papers.control runs the tables",
    "dprlhf convert": "write a recipe: dprlhf init makes one that fits your data",
}
"""Commands and settings of earlier versions that are gone, each with what takes its place."""


@contextlib.contextmanager
def extra(name: str, what: str) -> Iterator[None]:
    """Say what to install where the imports inside lack a package."""
    try:
        yield
    except ModuleNotFoundError as missing:
        raise DprlhfError(f'{what} needs {missing.name}: pip install "dprlhf[{name}]"') from None


def one_line(text: object, limit: int | None = 300) -> str:
    """Return an error's message, or a text, on one line, cut to ``limit`` characters."""
    return " ".join(str(text).split())[:limit]


def unit_in_words(column: str | None) -> str:
    """Return what a run or a budget protects: rows, or the users whom a column names."""
    return "rows" if column is None else f"users by the column {column!r}"


def nearest(name: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """Return the known name most like ``name``; None if none reaches ``cutoff``, in [0, 1]."""
    return next(iter(difflib.get_close_matches(name, list(known), 1, cutoff)), None)
