"""DP-PG from top to bottom in one file: the algorithm of this package, without the package.

A random GPT-2 of one layer learns to write vowels. Its 2,000 prompts are private: each belongs to a
user, who takes part in one of 20 rounds. What is published (the policy after every round) is
(ε, δ)-differentially private in the data of any one user.

    python examples/dp_policy_gradient.py          # half a minute on one core

The algorithm is the one-pass policy gradient of He & Zhou (2025, arXiv 2510.21060, Algorithms 1 and
2), with per-user clipping and exact accounting in place of the paper's formula for the noise, which
is too small (``docs/privacy.md``). `dprlhf` does the same for models of any size, and guards what
this file leaves to its reader:

- noise drawn exactly from a cryptographic stream; here floating-point noise, whose low bits leak;
- each round charged to a ledger on disk before its noise is drawn; here a crash forgets the charge;
- by default a secret random round for every user, which needs less noise for the same ε;
- rewards from other people's code, checked for coupling between users and kept out of the logs;
- batched gradients of many users at once; here one user at a time, which is easy to read.

A test compares one step and ε with those of the package (``tests/end_to_end/test_one_file.py``).
"""

from __future__ import annotations

import copy
import string
from dataclasses import dataclass

import torch
from dp_accounting import GaussianDpEvent, NeighboringRelation
from dp_accounting.pld import PLDAccountant
from transformers import GPT2Config, GPT2LMHeadModel

LETTERS = " " + string.ascii_lowercase  # a token is a letter
PROMPT, RESPONSE = 8, 8  # tokens; every prompt and every response has as many
DELTA = 1e-5


@dataclass(frozen=True)
class Settings:
    """The settings of a run, all public."""

    users: int = 2000
    rounds: int = 20
    noise_multiplier: float = 1.0811  # z, for ε = 4 at δ = 1e-5: see epsilon_of
    clip_norm: float = 0.5  # S
    largest_ratio: float = 2.0  # of π_θ(y|x) / μ(y|x)
    learning_rate: float = 1.0
    seed: int = 0


# --- the model and what it is asked ------------------------------------------------------------


def make_policy(seed: int) -> GPT2LMHeadModel:
    """Return a random GPT-2 over letters with one layer, about 5,000 weights."""
    torch.manual_seed(seed)
    config = GPT2Config(
        vocab_size=len(LETTERS), n_positions=PROMPT + RESPONSE, n_embd=16, n_layer=1, n_head=2,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    return GPT2LMHeadModel(config).eval()


def make_prompts(users: int, generator: torch.Generator) -> torch.Tensor:
    """Return the users' private prompts, ``[users, PROMPT]``: here random letters."""
    return torch.randint(len(LETTERS), (users, PROMPT), generator=generator)


def reward(prompts: torch.Tensor, responses: torch.Tensor) -> torch.Tensor:
    """Return the share of vowels among a response's letters, ``[rows]``.

    The reward of a row may depend on that row alone: were it a rank within the batch, say, one
    user's prompt would move the gradients of others, and no bound on a user would hold.
    """
    vowels = torch.tensor([letter in "aeiou" for letter in LETTERS])
    return vowels[responses].double().mean(1)


@torch.no_grad()
def sample(
    policy: GPT2LMHeadModel, prompts: torch.Tensor, generator: torch.Generator
) -> torch.Tensor:
    """Return a sampled response to each prompt, ``[rows, RESPONSE]``."""
    tokens = prompts
    for _ in range(RESPONSE):
        probabilities = policy(tokens).logits[:, -1].softmax(-1)
        tokens = torch.cat([tokens, torch.multinomial(probabilities, 1, generator=generator)], 1)
    return tokens[:, PROMPT:]


def log_probability(
    policy: GPT2LMHeadModel, prompts: torch.Tensor, responses: torch.Tensor
) -> torch.Tensor:
    """Return log π(response | prompt), ``[rows]``."""
    logits = policy(torch.cat([prompts, responses], 1)).logits[:, PROMPT - 1 : -1]
    return logits.log_softmax(-1).gather(2, responses[..., None])[..., 0].sum(1)


# --- what one user contributes -----------------------------------------------------------------


def user_gradient(
    policy: GPT2LMHeadModel,
    base: GPT2LMHeadModel,
    prompt: torch.Tensor,
    arms: torch.Tensor,
    largest_ratio: float,
) -> torch.Tensor:
    """Return the mean over a user's responses of ratio · Â(x, y) · ∇ log π_θ(y|x), ``[dimension]``.

    The two responses are y ~ μ and y′ ~ π_θ, and the advantage of each is its reward less that of
    the other: a baseline of the user's own, independent of the response. The gradient of log π_θ at
    a response of μ is unbiased only with the importance ratio π_θ(y|x) / μ(y|x), which the paper's
    Algorithm 2 leaves out; its truncation keeps a rare response from filling the clip norm.

    Args:
        policy: The policy π_θ of this round.
        base: The base policy μ.
        prompt: The user's prompt x, ``[PROMPT]``.
        arms: The responses y and y′, ``[2, RESPONSE]``.
        largest_ratio: Where the importance ratio is truncated.
    """
    prompts = prompt.expand(2, -1)
    rewards = reward(prompts, arms)
    advantages = rewards - rewards.flip(0)
    of_policy = log_probability(policy, prompts, arms)
    with torch.no_grad():
        ratio = (of_policy - log_probability(base, prompts, arms)).exp().clamp(max=largest_ratio)
        ratio[1] = 1.0  # y′ comes from π_θ itself
    loss = (ratio * advantages * of_policy).mean()
    gradients = torch.autograd.grad(loss, list(policy.parameters()))
    return torch.cat([g.flatten() for g in gradients]).double()


def clip(gradient: torch.Tensor, clip_norm: float) -> torch.Tensor:
    """Return the gradient, scaled down to norm S where it is longer: the bound behind ε.

    A gradient with a NaN or an infinity becomes zero: the user's data must not reach the others.
    """
    norm = gradient.norm()
    if not norm.isfinite():
        return torch.zeros_like(gradient)
    return gradient * min(1.0, clip_norm / max(float(norm), 1e-300))


# --- what is released ---------------------------------------------------------------------------


def clipped_sum(
    policy: GPT2LMHeadModel,
    base: GPT2LMHeadModel,
    prompts: torch.Tensor,
    arms: torch.Tensor,
    settings: Settings,
) -> torch.Tensor:
    """Return the sum of the users' clipped gradients, ``[dimension]``.

    A user whose data are blank adds zero, so between two datasets that differ in one user the sums
    differ by at most S (zero-out adjacency).

    Args:
        policy: The policy π_θ of this round.
        base: The base policy μ.
        prompts: The prompts of the round's users, ``[users, PROMPT]``.
        arms: Their responses y and y′, ``[users, 2, RESPONSE]``.
        settings: The run's settings.
    """
    total = torch.zeros(sum(p.numel() for p in policy.parameters()), dtype=torch.float64)
    for prompt, of_user in zip(prompts, arms, strict=True):
        gradient = user_gradient(policy, base, prompt, of_user, settings.largest_ratio)
        total += clip(gradient, settings.clip_norm)
    return total


def release(total: torch.Tensor, settings: Settings, generator: torch.Generator) -> torch.Tensor:
    """Return (Σ g_u + N(0, (zS)² I)) / m, the only value that leaves the users of a round.

    The divisor m is a public constant, the planned number of users a round: the number that were
    really there would be a second release.
    """
    std = settings.noise_multiplier * settings.clip_norm
    noise = std * torch.randn(total.shape, generator=generator, dtype=torch.float64)
    return (total + noise) / (settings.users / settings.rounds)


@torch.no_grad()
def step(policy: GPT2LMHeadModel, direction: torch.Tensor, learning_rate: float) -> None:
    """Move θ along the released direction, which costs no more privacy (post-processing)."""
    for parameter in policy.parameters():
        part, direction = direction.split([parameter.numel(), len(direction) - parameter.numel()])
        parameter += learning_rate * part.reshape(parameter.shape).to(parameter.dtype)


def epsilon_of(noise_multiplier: float, delta: float = DELTA) -> float:
    """Return ε of the whole run.

    Every user takes part in one round, so that two datasets which differ in one user differ in one
    Gaussian release: the rounds compose in parallel, and the run costs what one of them costs. The
    sensitivity is S and the standard deviation zS; zero-out accounts like add-or-remove here.
    """
    accountant = PLDAccountant(NeighboringRelation.ADD_OR_REMOVE_ONE)
    accountant.compose(GaussianDpEvent(noise_multiplier))
    return float(accountant.get_epsilon(delta))


# --- the run ------------------------------------------------------------------------------------


def train(settings: Settings, quiet: bool = False) -> GPT2LMHeadModel:
    """Train a policy on private prompts, and return it; every policy on the way may be published.

    The prompts are the users' data. Everything else that this function computes with is public, or
    comes out of :func:`release`.
    """
    generator = torch.Generator().manual_seed(settings.seed)
    base = make_policy(settings.seed)
    policy = copy.deepcopy(base)
    private_prompts = make_prompts(settings.users, generator)
    public_prompts = make_prompts(200, generator)  # nobody's: what is measured on them is free

    # Which user is in which round must not depend on the users' data: here their order decides.
    for t, users in enumerate(torch.arange(settings.users).chunk(settings.rounds), 1):
        prompts = private_prompts[users]
        arms = torch.stack(
            [sample(base, prompts, generator), sample(policy, prompts, generator)], 1
        )
        total = clipped_sum(policy, base, prompts, arms, settings)
        step(policy, release(total, settings, generator), settings.learning_rate)
        if not quiet:
            answers = sample(policy, public_prompts, generator)
            mean = float(reward(public_prompts, answers).mean())
            print(f"round {t:2}: mean reward on public prompts {mean:.3f}")
    return policy


def main() -> None:
    """Train with the settings above, and print what the run costs its users."""
    settings = Settings()
    print(f"ε = {epsilon_of(settings.noise_multiplier):.3f} at δ = {DELTA} for each user")
    train(settings)


if __name__ == "__main__":
    main()
