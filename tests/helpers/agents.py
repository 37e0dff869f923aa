"""A tiny model that calls tools: calls are tokens of its own, and its random weights write them."""

import functools
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

from dprlhf import recipe
from dprlhf.data.users import Prompts
from dprlhf.policies.causal_lm import CausalLMPolicy
from dprlhf.policies.loading import make_policy
from dprlhf.rollout import Responses, sample
from helpers import tiny
from helpers.policies import off_start

KEY = bytes(range(32))
LONGEST, LENGTH = 40, 64

TEMPLATE = (
    "{% for t in tools or [] %}[{{ t.function.name }}]{% endfor %}"
    "{% for m in messages %}{{ m.role[0] }}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}"
    "<eos>{% endfor %}{% if add_generation_prompt %}a{% endif %}"
)


def written(name: str, **arguments: Any) -> str:
    """Return a call as Qwen and Hermes models write it."""
    made = ", ".join(f'"{key}": {value!r}' for key, value in arguments.items())
    return f'<tool_call>{{"name": "{name}", "arguments": {{{made}}}}}</tool_call>'


ADDITIONS = [written("add", a=a, b=b) for a in range(3) for b in range(3)]
MOVES = [written("guess", number=n) for n in range(4)]
BROKEN = [written("fail"), written("nothing"), '<tool_call>{"name": }</tool_call>']
CALLS = [*ADDITIONS, *MOVES, *BROKEN]


def tokenizer() -> PreTrainedTokenizerFast:
    """The byte-level tokenizer with a chat template, and a token for each of ``CALLS``."""
    made = tiny.tokenizer()
    made.add_tokens(CALLS)
    made.chat_template = TEMPLATE
    return made


def model(seed: int = 0, calls: float = 3.0, ends: float = 6.0) -> GPT2LMHeadModel:
    """A two-layer model that likes to call tools (``calls``) and to end turns (``ends``)."""
    torch.manual_seed(seed)
    made = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=257 + len(CALLS), n_positions=256, n_embd=32, n_layer=2, n_head=4,
            bos_token_id=0, eos_token_id=0, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
            tie_word_embeddings=False,
        )
    )  # fmt: skip
    with torch.no_grad():
        head, always = made.lm_head.weight, made.transformer.ln_f.bias
        head.mul_(10)
        always.fill_(1.0)  # a direction that every hidden state has
        head[257:] += calls / len(always)
        head[0] += ends / len(always)
    return made.eval()


@functools.cache
def _policy(dtype: torch.dtype) -> CausalLMPolicy:
    spec = recipe.Adapter.model_validate({"rank": 2, "alpha": 8.0, "target_modules": ["c_attn"]})
    made = off_start(make_policy(model(), tokenizer(), spec, temperature=0.9), 1.0)
    made.model.to(dtype)
    return made


def policy_of(dtype: torch.dtype = torch.float64) -> CausalLMPolicy:
    """A policy without tools, shared by the tests of a process."""
    made = _policy(dtype)
    made.tools, made.sampler, made.end_tokens = (), None, [0]
    return made


def save(folder: Path) -> str:
    """Save model and tokenizer as ``from_pretrained`` expects them."""
    folder.mkdir(parents=True, exist_ok=True)
    model().save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return str(folder)


def asked(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def prompts_of(texts: list[str], users: list[int] | None = None, **columns: Any) -> Prompts:
    """Return conversations, each of a user of its own unless users are given."""
    owners = np.arange(len(texts)) if users is None else np.array(users)
    slots = np.array([list(owners[:i]).count(u) for i, u in enumerate(owners)], dtype=np.int64)
    return Prompts([asked(text) for text in texts], owners, slots, columns)


def draw(policy: CausalLMPolicy, prompts: Prompts, **changes: Any) -> Responses:
    """Sample three private trajectories for each prompt."""
    private = changes.pop("private", True)
    settings = {"responses": 3, "max_new_tokens": LENGTH, "batch_size": 8, **changes}
    spec = recipe.Rollout.model_validate(settings)
    return sample(
        policy, prompts, spec, key=KEY, context=("rollout", 1), max_prompt_tokens=LONGEST,
        private=private,
    )  # fmt: skip


def trajectory(responses: Responses, row: int) -> tuple[Any, ...]:
    """Return all that a trajectory is, without padding."""
    seen = responses.mask[row].bool()
    return (
        responses.tokens[row][seen].tolist(),
        responses.policy_mask[row].tolist(),
        responses.completions[row],
    )


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    return a + b


def fail() -> str:
    """Fail, whatever is asked."""
    raise ValueError("this tool is broken")


class Guessing:
    """Guess a number from 0 to 3; the environment says whether it is larger or smaller."""

    def __init__(self) -> None:
        self.number = -1
        self.guesses: list[int] = []

    def reset(self, prompt: Any, **columns: Any) -> str:
        """Choose another number."""
        self.number = random.randrange(4)
        return f" ({columns.get('level', 'easy')})"

    def guess(self, number: int) -> str:
        """Guess the number.

        Args:
            number: The guess.
        """
        self.guesses.append(number)
        if number == self.number:
            return "right"
        return "larger" if number < self.number else "smaller"

    def get_reward(self) -> float:
        return float(self.number in self.guesses)


class Adding:
    """Add numbers; the environment keeps the sums. It gives no reward of its own."""

    def __init__(self) -> None:
        self.row: dict[str, Any] = {}
        self.sums: list[int] = []

    def reset(self, **row: Any) -> str:
        """Keep what is given, and ask for a sum."""
        self.row = row
        return f"{row.get('seed', 0)} and 1?"

    def add(self, a: int, b: int) -> int:
        """Add two numbers.

        Args:
            a: The first number.
            b: The second number.
        """
        self.sums.append(a + b)
        return a + b


class Asking(Guessing):
    """A game whose rows have no prompt: it asks itself."""

    def reset(self, seed: int = 0) -> str:  # type: ignore[override]
        """Ask, and keep a number."""
        self.number = seed % 4
        return f"number {seed}?"


TWO = {"sums": Adding, "numbers": Guessing}


def run_settings(model: str, folder: Path, **changes: Any) -> dict[str, Any]:
    """What ``dprlhf.train`` gets for a short run of 24 users, but for the reward."""
    return {
        "model": model, "prompts": [asked(f"{i % 3} and {i % 2}?") for i in range(24)],
        "epsilon": 8.0, "rounds": 2, "learning_rate": 0.05,
        "policy__adapter": {"type": "lora", "rank": 2, "target_modules": ["c_attn"]},
        "data__max_prompt_tokens": 40, "rollout__max_new_tokens": 40, "rollout__responses": 2,
        "rollout__batch_size": 16, "update__batch_size": 16, "quiet": True, "output_dir": folder,
        **changes,
    }  # fmt: skip
