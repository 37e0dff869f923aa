"""What an update must do: :func:`check_update`."""

from __future__ import annotations

import copy
import functools
import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

from dprlhf import recipe
from dprlhf.boundary import BoundedSum, Private, Released
from dprlhf.data.users import Prompts
from dprlhf.errors import DprlhfError
from dprlhf.policies.causal_lm import CausalLMPolicy
from dprlhf.policies.loading import make_policy
from dprlhf.privacy.gate import Gate
from dprlhf.privacy.ledger import Ledger
from dprlhf.privacy.plan import make_plan
from dprlhf.rewards import Scores
from dprlhf.rollout import Responses
from dprlhf.updates import PrivateRound
from dprlhf.updates.round import subtract_kl
from dprlhf.updates.telemetry import TelemetryCoordinates


def tiny_policy(adapter: recipe.Adapter | None = None) -> CausalLMPolicy:
    """Return a random two-layer GPT-2 over bytes with an adapter, in float64, made in memory.

    Its weights are the same at each call; every trained parameter is away from zero.

    Args:
        adapter: LoRA of rank 2 on the attention by default.
    """
    adapter = adapter or recipe.Adapter(type="lora", rank=2, target_modules=["c_attn"])
    return copy.deepcopy(_policy_with(adapter.model_dump_json()))


def save_tiny_model(folder: Path) -> str:
    """Save the model and the tokenizer of :func:`tiny_policy`, and return the folder's path."""
    _tiny_model().save_pretrained(folder)
    _byte_tokenizer().save_pretrained(folder)
    return str(folder)


@functools.cache
def _policy_with(adapter: str) -> CausalLMPolicy:
    spec = recipe.Adapter.model_validate_json(adapter)
    policy = make_policy(_tiny_model(), _byte_tokenizer(), spec, temperature=0.7)
    policy.model.to(torch.float64)
    policy.parameters = {n: p for n, p in policy.model.named_parameters() if p.requires_grad}
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in policy.parameters.values():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    return policy


def _tiny_model() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = GPT2Config(
            vocab_size=257, n_positions=128, n_embd=16, n_layer=2, n_head=2, resid_pdrop=0.0,
            embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
        )  # fmt: skip
        return GPT2LMHeadModel(config)


def _byte_tokenizer() -> Any:
    """Return a tokenizer with 256 byte tokens after an end-of-sequence token."""
    from transformers import GPT2Tokenizer
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    tokens = ["<eos>", *sorted(bytes_to_unicode().values())]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    special = dict.fromkeys(("bos_token", "eos_token", "pad_token", "unk_token"), "<eos>")
    return GPT2Tokenizer(vocab=vocabulary, merges=[], padding_side="left", **special)


Update = Callable[[PrivateRound, Any], None]
"""An update: it gets the round and its own settings, releases, and steps."""

TIGHT, WIDE = 0.05, 100.0
"""Clip norms to test at: one shortens most users, the other lets every difference show."""

_USERS = tuple(range(5))
_EARLIER = (0, 5)  # of the round before
_GENERATIONS = 4  # responses to each prompt: an even number, for updates that pair them
_LONGEST_PROMPT, _LONGEST_RESPONSE = 20, 4


@dataclass(frozen=True)
class UpdateReport:
    """What :func:`check_update` measured on made-up users.

    Attributes:
        releases: J, the noised sums that the update took from a round.
        dimension: Number of trained parameters of the tiny policy.
        largest: Largest L2 norm of one user's contribution to a sum, in units of the clip norm, by
            the clip norm that it was measured at.
    """

    releases: int
    dimension: int
    largest: dict[float, float]


def check_update(
    update: Update, settings: Any, *, adapter: recipe.Adapter | None = None, seed: int = 0
) -> UpdateReport:
    """Check an update's contract with the privacy accountant on made-up users.

    The checks, each on rounds of a tiny language model in float64:

    - **releases**: the update asks the gate for exactly ``settings.releases`` sums, each clipped to
      the planned norm S;
    - **influence**: taking one user out moves each sum by that user's own contribution, which has
      L2 norm at most S, whoever else is there; at a small S, and at one that clips nobody, where a
      baseline or a normalisation over the batch would show, in the first round and in the second;
    - **failures**: a user with a failed reward (0 or NaN in its place) contributes zero, and one
      whose advantages overflow does not reach the others;
    - **micro-batches**: the sums do not depend on ``settings.batch_size``;
    - **leftovers**: after two rounds with other users that release the same values, policy,
      optimizer and the next round are the same: nothing but released values outlives a round;
    - **empty round**: without users every sum is zero, and without noise the policy stays.

    Args:
        update: The update function, for example ``dprlhf.updates.UPDATES["pg"]``.
        settings: Its settings, a subclass of the recipe's update section; ``clip_norm`` and
            ``batch_size`` are set by the checks.
        adapter: What the tiny policy trains; LoRA of rank 2 on the attention by default.
        seed: Seed of the made-up responses and rewards.

    Raises:
        AssertionError: A check fails; the message names it.
        DprlhfError: The update is no function.

    >>> from dprlhf import recipe
    >>> from dprlhf.updates import UPDATES
    >>> check_update(UPDATES["pg"], recipe.PG()).releases
    1
    """
    if not callable(update):
        raise DprlhfError(
            f"check_update: give the function of an update, such as UPDATES['pg'], not {update!r}"
        )
    name = getattr(settings, "name", update)
    trial = _Trial(update, settings, f"update {name!r} fails the check", adapter, seed)
    largest = {clip_norm: _check_influence(trial, clip_norm, 1) for clip_norm in (TIGHT, WIDE)}
    _check_influence(trial, WIDE, 2)
    _check_failures(trial)
    _check_micro_batches(trial)
    _check_leftovers(trial)
    _check_empty_round(trial)
    return UpdateReport(settings.releases, trial.policy().dimension, largest)


@dataclass(frozen=True)
class _Trial:
    """Rounds of one update on made-up users."""

    update: Update
    settings: Any
    fails: str
    adapter: recipe.Adapter | None
    seed: int

    def policy(self) -> CausalLMPolicy:
        """Return the policy that every round starts from."""
        return tiny_policy(self.adapter)

    def sums(
        self,
        clip_norm: float,
        users: Sequence[int] = _USERS,
        batch_size: int = 8,
        t: int = 1,
        **scores: Any,
    ) -> list[torch.Tensor]:
        """Run round t, after others of the same users for all, and return the gate's sums."""
        policy = self.policy()
        optimizer = _optimizer(policy)
        with _RecordingGate(TIGHT, self.settings.releases) as gate:  # small steps
            for before in range(1, t):
                responses = _responses(_EARLIER, self.seed)
                given = _scores(responses, _EARLIER, self.seed)
                self.round(policy, optimizer, gate, before, responses, given)
        with _RecordingGate(clip_norm, self.settings.releases) as gate:
            responses = _responses(users, self.seed)
            given = _scores(responses, users, self.seed, **scores)
            self.round(policy, optimizer, gate, t, responses, given, batch_size)
        return gate.sums

    def round(
        self,
        policy: CausalLMPolicy,
        optimizer: torch.optim.Optimizer,
        gate: _RecordingGate,
        t: int,
        responses: Responses,
        scores: Scores,
        batch_size: int = 8,
    ) -> None:
        """Run round t, as the training loop does."""
        plan, before = gate.plan, len(gate.sums)
        telemetry = TelemetryCoordinates.from_plan(plan, reward_range=3.0)
        if plan.clip_norm >= WIDE:  # at the large norm the coordinates would outshine all else
            telemetry = TelemetryCoordinates(0.0, reward_range=3.0)
        round_ = PrivateRound(
            policy=policy,
            responses=Private(responses),
            scores=Private(scores),
            plan=plan,
            telemetry=telemetry,
            optimizer=optimizer,
            reduce=lambda x: x,
            gate=functools.partial(gate.release, t),
            t=t,
        )
        subtract_kl(round_, recipe.KL(beta=0.2), batch_size)
        changes = {"clip_norm": plan.clip_norm, "batch_size": batch_size}
        self.update(round_, self.settings.model_copy(update=changes))
        released = len(gate.sums) - before
        assert released == plan.releases_per_round, (
            f"{self.fails} 'releases': it took {released} noised sums from the round, and"
            f" settings.releases announces {plan.releases_per_round}, which ε is computed from"
        )


class _RecordingGate:
    """The real gate behind a recorder, which replaces each sum by zeros before the noise.

    So what is released is noise under a fixed key: the same values, whoever the users were.
    """

    def __init__(self, clip_norm: float, releases: int, noise_multiplier: float = 1.0) -> None:
        self.plan = make_plan(
            users=20_000,
            rounds=2,
            delta=1e-5,
            noise_multiplier=noise_multiplier,
            clip_norm=clip_norm,
            partition="fixed",
            releases_per_round=releases,
        )
        self.sums: list[torch.Tensor] = []

    def __enter__(self) -> _RecordingGate:
        self._folder = tempfile.TemporaryDirectory(prefix="dprlhf-")
        self._ledger = Ledger(Path(self._folder.name) / "ledger.jsonl", self.plan.terms())
        self._gate = Gate(self.plan, self._ledger, bytes(32))
        return self

    def __exit__(self, *_: object) -> None:
        self._ledger.close()
        self._folder.cleanup()

    def release(self, t: int, bounded: BoundedSum) -> Released[torch.Tensor]:
        self.sums.append(bounded.total.clone())
        bounded.total.zero_()
        # A charge draws its noise afresh; here both runs of a comparison must get the same.
        with mock.patch("dprlhf.privacy.ledger.new_nonce", return_value="the same noise"):
            return self._gate.release(t, bounded)


def _optimizer(policy: CausalLMPolicy) -> torch.optim.Optimizer:
    return torch.optim.SGD(policy.parameters.values(), lr=0.1, momentum=0.9)


def _responses(users: Sequence[int], seed: int) -> Responses:
    """Make up a round: one or two prompts of each user, in an order that mixes the users.

    What a user brings depends on its own number and the seed. The first half of the responses to a
    prompt come from the base policy.
    """
    k = _GENERATIONS
    width = _LONGEST_PROMPT + _LONGEST_RESPONSE
    made = []
    for place, user in enumerate(users):
        random = np.random.default_rng((seed, user))
        # The second user's prompt is too long for the others' width of a micro-batch.
        lengths = [18] if user == 1 else random.integers(1, 12, 1 + user % 2).tolist()
        for slot, length in enumerate(lengths):
            tokens = random.integers(1, 257, (k, width))
            tokens[:, :_LONGEST_PROMPT] = tokens[0, :_LONGEST_PROMPT]
            ends = random.integers(1, _LONGEST_RESPONSE + 1, k)
            mask = np.arange(width) < _LONGEST_PROMPT + ends[:, None]
            mask &= np.arange(width) >= _LONGEST_PROMPT - length
            made.append((random.random(), place, slot, tokens, mask))
    made.sort(key=lambda prompt: prompt[0])
    owner = np.array([place for _, place, *_ in made], dtype=np.int64)
    slots = np.array([slot for _, _, slot, *_ in made], dtype=np.int64)
    tokens = np.concatenate([np.zeros((0, width)), *(tokens for *_, tokens, _ in made)])
    masks = np.concatenate([np.zeros((0, width)), *(mask for *_, mask in made)])
    return Responses(
        tokens=torch.from_numpy(tokens.astype(np.int64)),
        mask=torch.from_numpy(masks.astype(np.int64)),
        prompt=np.repeat(np.arange(len(made)), k),
        user=np.repeat(owner, k),
        from_base=np.tile(np.arange(k) < k // 2, len(made)),
        texts=[""] * (k * len(made)),
        prompts=Prompts([""] * len(made), owner, slots, {}),
        users=len(users),
        max_new_tokens=_LONGEST_RESPONSE,
        num_generations=k,
    )


def _scores(
    responses: Responses,
    users: Sequence[int],
    seed: int,
    failed: Mapping[int, float] | None = None,
    huge: Collection[int] = (),
) -> Scores:
    """Draw each user's rewards; some users have a failed one, in its place a number or NaN."""
    values, valid = np.zeros(len(responses.user)), np.ones(len(responses.user), dtype=bool)
    for place, user in enumerate(users):
        rows = np.flatnonzero(responses.user == place)
        values[rows] = np.random.default_rng((seed, user, 1)).uniform(-3, 3, len(rows))
        if user in huge:
            values[rows] = 1e300
        if user in (failed or {}):
            values[rows[1]], valid[rows[1]] = (failed or {})[user], False
    return Scores(values, valid, {})


def _check_influence(trial: _Trial, clip_norm: float, t: int) -> float:
    """Check that a user moves each sum by its own contribution; return the longest, over S."""
    whole, largest = trial.sums(clip_norm, t=t), 0.0
    for user in _USERS:
        fewer = trial.sums(clip_norm, [u for u in _USERS if u != user], t=t)
        alone = trial.sums(clip_norm, [user], t=t)
        for j, (with_, without, own) in enumerate(zip(whole, fewer, alone, strict=True), 1):
            at = f"{trial.fails} 'influence' in round {t}, release {j}, at S = {clip_norm}:"
            moved = float((with_ - without).norm())
            assert moved <= clip_norm * (1 + 1e-9), (
                f"{at} leaving one user out moves the sum by {moved:.6g}, more than S. Clip each"
                " user's whole contribution (round_.clipped_sum, round_.clipped_vectors)"
            )
            apart = float((with_ - without - own).norm())
            assert apart <= 1e-9 * max(1.0, moved), (
                f"{at} what a user contributes changes by {apart:.3g} with who else is in the"
                " round. Look for a mean, a maximum or a count over the batch"
            )
            largest = max(largest, float(own.norm()) / clip_norm)
    assert largest > 1e-9, (
        f"{trial.fails} 'influence' at clip norm S = {clip_norm}: no user contributes anything, so"
        " there is nothing to check"
    )
    return largest


def _check_failures(trial: _Trial) -> None:
    everybody = trial.sums(WIDE, failed={2: 0.0, 4: float("nan")}, huge=[3])
    fewer = trial.sums(WIDE, [0, 1, 3], huge=[3])
    for j, (with_, without) in enumerate(zip(everybody, fewer, strict=True), 1):
        apart = float((with_ - without).norm())
        assert apart <= 1e-9 * max(1.0, float(without.norm())), (
            f"{trial.fails} 'failures' in release {j}: users with a failed reward, beside one"
            f" whose advantages overflow, move the sum by {apart:.3g} and not by zero. Give the"
            " rows of users outside round_.valid the weight zero"
        )
        assert float(without.norm()) > 1e-9, (
            f"{trial.fails} 'failures' in release {j}: the sum is zero once one user's advantages"
            " overflow, so that user took the others with it"
        )


def _check_micro_batches(trial: _Trial) -> None:
    sums = [trial.sums(WIDE, batch_size=size) for size in (1, 8, 64)]
    for other in sums[1:]:
        for j, (one, many) in enumerate(zip(sums[0], other, strict=True), 1):
            apart = float((one - many).norm())
            assert apart <= 1e-8 * max(1.0, float(one.norm())), (
                f"{trial.fails} 'micro-batches' in release {j}: the sum moves by {apart:.3g} with"
                " settings.batch_size. Look for a mean over what is computed at once"
            )


def _check_empty_round(trial: _Trial) -> None:
    policy = trial.policy()
    before = {name: parameter.clone() for name, parameter in policy.parameters.items()}
    responses = _responses([], trial.seed)
    with _RecordingGate(1.0, trial.settings.releases, noise_multiplier=0.0) as gate:
        scores = _scores(responses, [], trial.seed)
        trial.round(policy, _optimizer(policy), gate, 1, responses, scores)
    assert not any(bool(total.any()) for total in gate.sums), (
        f"{trial.fails} 'empty round': a sum over no users is not zero, so something in it does"
        " not belong to a user"
    )
    assert all(torch.equal(p, before[n]) for n, p in policy.parameters.items()), (
        f"{trial.fails} 'empty round': without users and without noise the policy moved. Step"
        " along released values only"
    )


def _check_leftovers(trial: _Trial) -> None:
    outcomes = []
    for first, seed in (((0, 2, 3), trial.seed + 1), ((1, 4), trial.seed + 2)):
        policy = trial.policy()
        optimizer = _optimizer(policy)
        moved: dict[str, torch.Tensor] = {}
        with _RecordingGate(WIDE, trial.settings.releases) as gate:
            for t, users, drawn in ((1, first, seed), (2, _USERS, trial.seed)):
                responses = _responses(users, drawn)
                given = _scores(responses, users, drawn)
                trial.round(policy, optimizer, gate, t, responses, given)
                state = policy.state() | {
                    f"{number}.{name}": torch.as_tensor(value).clone()
                    for number, of_one in optimizer.state_dict()["state"].items()
                    for name, value in of_one.items()
                }
                moved |= {f"{t}.{name}": value for name, value in state.items()}
        outcomes.append((moved, gate.sums[trial.settings.releases :]))
    (moved, sums), (other_moved, other_sums) = outcomes
    same = all(torch.equal(value, other_moved[name]) for name, value in moved.items())
    assert same, (
        f"{trial.fails} 'leftovers': policy or optimizer differ after two rounds with other users"
        " that released the same. Step along released values only, not along a sum"
    )
    assert all(torch.equal(a, b) for a, b in zip(sums, other_sums, strict=True)), (
        f"{trial.fails} 'leftovers': a round differs with the users of the round before it, which"
        " released the same. Keep nothing between rounds but what was released"
    )
