"""Sampling: reproducible, independent of who else is there, and from the right distribution."""

import dataclasses
import functools
import logging
import math
from typing import Any

import numpy as np
import pytest
import scipy.stats
import torch
from numpy.typing import NDArray
from transformers import GenerationConfig, Phi3Config, Phi3ForCausalLM

from dprlhf import DprlhfError, recipe
from dprlhf.boundary import Private, open_private
from dprlhf.data.users import Prompt
from dprlhf.gradients.clipping import Weighted
from dprlhf.gradients.micro_batches import user_gradients
from dprlhf.policies.loading import make_policy
from dprlhf.rollout import Responses, decoding, sample, sample_responses, sampling
from dprlhf.rollout.decoding import decode, inverse_cdf
from dprlhf.rollout.logprobs import token_logprobs
from helpers import kernels, tiny
from helpers.marks import slow
from helpers.sampled import (
    EOS,
    KEY,
    SLOTS,
    TEMPERATURE,
    TEXTS,
    USERS,
    answers,
    draw,
    five,
    model_of,
    policy_of,
    prompts_of,
)


@pytest.mark.parametrize("kind", ["gpt2", slow("llama")])
@pytest.mark.parametrize("base_policy", ["on-policy", "reference"])
def test_tokens_do_not_depend_on_the_batch(kind: tiny.Kind, base_policy: str) -> None:
    """Neither on the batch size, nor on the order of the prompts, nor on who else is there."""
    policy = policy_of(kind)
    whole = draw(policy, five(), responses=4, base_policy=base_policy)
    truth = answers(whole)
    for batch_size in (1, 3, 7):
        other = draw(policy, five(), responses=4, base_policy=base_policy, batch_size=batch_size)
        assert torch.equal(other.tokens, whole.tokens)
        assert torch.equal(other.mask, whole.mask)
    order = [4, 2, 0, 3, 1]
    shuffled = prompts_of(
        [TEXTS[i] for i in order], [USERS[i] for i in order], [SLOTS[i] for i in order]
    )
    assert answers(draw(policy, shuffled, responses=4, base_policy=base_policy)) == truth
    fewer = prompts_of(TEXTS[1:4], USERS[1:4], SLOTS[1:4])
    some = answers(draw(policy, fewer, responses=4, base_policy=base_policy))
    assert some == {key: truth[key] for key in some}
    assert len(some) == 12


def test_the_key_the_round_the_user_and_the_slot_decide_the_tokens() -> None:
    policy = policy_of()
    same = prompts_of(["a", "a", "a"], [3, 3, 7], [0, 1, 0])
    truth = answers(draw(policy, same))
    assert answers(draw(policy, same)) == truth
    assert len({tuple(tokens) for tokens in truth.values()}) == 6  # responses, slots, users differ
    other = answers(draw(policy, same, key=bytes(32)))
    assert all(other[key] != truth[key] for key in truth)
    other = answers(draw(policy, same, context=("rollout", 2)))
    assert all(other[key] != truth[key] for key in truth)


def test_the_private_wrapper_samples_the_round() -> None:
    policy = policy_of()
    spec = recipe.Rollout(responses=2, max_new_tokens=6, temperature=TEMPERATURE)
    wrapped = sample_responses(
        policy, Private(five()), spec, key=KEY, round_=5, max_prompt_tokens=16
    )
    direct = draw(policy, five(), context=("rollout", 5))
    assert torch.equal(open_private(wrapped).tokens, direct.tokens)


def test_rows_belong_to_their_prompts_and_users() -> None:
    ticks: list[int] = []
    spec = recipe.Rollout(responses=4, max_new_tokens=3, base_policy="reference", batch_size=3)
    responses = sample(
        policy_of(), five(), spec, key=KEY, context=(), max_prompt_tokens=16, tick=ticks.append
    )
    assert responses.prompt.tolist() == [p for p in range(5) for _ in range(4)]
    assert responses.user.tolist() == [0] * 8 + [1] * 4 + [2] * 4 + [3] * 4
    assert responses.users == 4
    assert responses.from_base.tolist() == [True, True, False, False] * 5
    assert sum(ticks) == 20
    assert len(responses.texts) == 20
    for row, prompt in enumerate(responses.prompt):
        text = TEXTS[prompt]
        ids = responses.tokens[row, : -responses.max_new_tokens]
        real = responses.mask[row, : -responses.max_new_tokens].bool()
        assert isinstance(text, str)
        assert ids[real].tolist() == tiny.tokenizer()(text)["input_ids"]
        assert real.tolist() == sorted(real.tolist())  # padded on the left
    assert not draw(policy_of(), five()).from_base.any()


def test_a_responses_repr_quotes_nobody() -> None:
    responses = draw(policy_of(), five())
    weighted = Weighted(responses, np.ones(10), np.empty((4, 0)), 0.0)
    for private in (responses, responses.prompts, weighted):
        assert "longer" not in repr(private)
        assert "tensor" not in repr(private)


def test_a_micro_batch_has_the_shape_that_is_asked_for() -> None:
    responses = draw(policy_of(), five())
    chosen = np.array([0, -1, 4, 7, -1])  # prompts of 1, 6 and 2 tokens
    real = chosen >= 0
    tokens, mask = responses.micro_batch(chosen)
    assert tokens.shape == mask.shape == (5, responses.width + responses.max_new_tokens)
    assert torch.equal(tokens[real], responses.tokens[chosen[real]])
    assert mask[real].sum() == responses.mask[chosen[real]].sum()
    assert mask[~real].sum(1).tolist() == [1 + responses.max_new_tokens] * 2
    assert responses.policy_micro_batch(chosen)[~real].sum() == 0


OWNERS = [0, 0, 1, 2, 2, 3, 4, 4, 5]  # of prompts; up to two of each user


def neighbours(policy, absent, k=2, **changes):
    """A round of six users with some of them blank: what it samples, and what each contributes."""
    texts: list[Prompt] = [f"p{i}" * (1 + i % 4) for i in range(len(OWNERS))]
    texts[3] = "a much longer prompt " * 2
    given = [n for n, owner in enumerate(OWNERS) if owner not in absent]
    slots = [OWNERS[:n].count(owner) for n, owner in enumerate(OWNERS)]
    prompts = dataclasses.replace(
        prompts_of(
            [texts[n] for n in given], [OWNERS[n] for n in given], [slots[n] for n in given]
        ),
        round_users=np.arange(6)[::-1],
        prompts_a_user=2,
    )
    responses = draw(
        policy, prompts, responses=k, batch_size=4 * k, max_prompt_tokens=64, **changes
    )
    assert responses.width == 64
    seen = answers(responses)
    weights = np.cos([hash(key) % 97 for key in seen])
    found = [torch.empty(0)] * 6
    logprobs = token_logprobs(policy, responses, 4 * k)
    for users, _, gradients, _ in user_gradients(
        policy, responses, weights, batch_size=4 * k, rows=k
    ):
        for user, gradient in zip(users.tolist(), gradients, strict=True):
            if user >= 0:
                own = torch.from_numpy(logprobs[responses.user == user])
                found[5 - user] = torch.cat([gradient.flatten().double(), own.flatten()])
    return seen, found


@pytest.mark.parametrize(
    ("kernel", "kind", "dtype", "k", "changes"),
    [
        (None, "gpt2", torch.bfloat16, 2, {}),
        (None, "llama", torch.float32, 8, {}),  # all behind one copy of their prompt
        (kernels.by_place, "gpt2", torch.float32, 2, {"base_policy": "reference"}),
        (kernels.by_place, "llama", torch.float32, 8, {}),
        (kernels.by_shape, "gpt2", torch.float32, 2, {}),
        slow(kernels.by_shape, "llama", torch.bfloat16, 2, {}),
        slow(kernels.by_place, "llama", torch.bfloat16, 2, None),  # as on a GPU
    ],
)
def test_a_blank_user_moves_nobody_else_not_even_by_rounding(
    kernel, kind, dtype, k, changes, monkeypatch
):
    """The sensitivity is a statement about real numbers; the others must stay bit for bit.

    The blank user has the longest prompt of all, or leaves a micro-batch that was full, or a whole
    one empty. On a kernel that rounds by place or by shape, a row that moves up would show.
    """
    policy = policy_of(kind, dtype)
    kernels.attach(policy, kernel)
    if changes is None:
        changes = {}
        monkeypatch.setattr(sampling, "replays_graphs", lambda *_: True)
    everyone, whole = neighbours(policy, [], k, **changes)
    for absent in ([0], [2], [5], [1, 2], [3, 4, 5]):
        seen, found = neighbours(policy, absent, k, **changes)
        assert seen == {key: tokens for key, tokens in everyone.items() if key[0] not in absent}
        for user in range(6):
            if user in absent:
                assert not len(found[user])
            else:
                assert float(whole[user].abs().max()) > 0
                assert torch.equal(found[user], whole[user])


def test_a_kernel_that_looks_at_other_rows_moves_them() -> None:
    """Negative control of the test above: this one is for the check at the start to refuse."""
    policy = policy_of("gpt2", torch.float32)
    kernels.attach(policy, kernels.by_contents)
    (_, whole), (_, found) = neighbours(policy, []), neighbours(policy, [2])
    assert not all(torch.equal(found[user], whole[user]) for user in (0, 1, 3, 4, 5))


def test_positions_that_turn_on_the_longest_row_are_out_of_reach() -> None:
    """LongRoPE scales every row by whether the longest of the batch passes its original length."""
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 16}
    factors = {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
    config = Phi3Config(
        vocab_size=257, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
        original_max_position_embeddings=16, sliding_window=None, pad_token_id=0, bos_token_id=0,
        eos_token_id=0, rope_parameters={**rope, **factors},
    )  # fmt: skip
    torch.manual_seed(0)
    spec = recipe.Adapter(type="lora", rank=1, target_modules=["qkv_proj"])
    policy = make_policy(Phi3ForCausalLM(config), tiny.tokenizer(), spec)
    tokens = torch.randint(1, 257, (2, 20))
    mask = torch.ones_like(tokens)
    mask[0, :8] = 0

    def first_row(other: int) -> torch.Tensor:
        mask[1] = torch.arange(20) >= 20 - other
        return policy.response_logprobs(tokens, mask, 4)[0]

    assert torch.equal(first_row(12), first_row(16))
    assert not torch.equal(first_row(12), first_row(20))  # the second row moves the first
    policy.check_context_length(16, "16 tokens are", "the model")
    with pytest.raises(
        DprlhfError, match=r"^17 tokens are more than the 16 positions of the model"
    ):
        policy.check_context_length(17, "17 tokens are", "the model")


def test_a_private_micro_batch_is_as_large_with_fewer_users(monkeypatch):
    sizes: list[int] = []

    def watched(policy: Any, prompts: Any, *args: Any, **settings: Any) -> Any:
        sizes.append(len(prompts))
        return decoding.decode(policy, prompts, *args, **settings)

    monkeypatch.setattr(sampling, "decode", watched)
    for count in (1, 2, 5):
        users = list(range(count))
        draw(policy_of(), prompts_of([f"p{i}" for i in users], users), batch_size=8)
    assert sizes == [4] * 4  # two responses each


def test_a_response_ends_where_its_room_does() -> None:
    prompts: list[list[int] | None] = [[1, 2], [3]]
    uniforms = torch.rand(2, 1, 6, generator=torch.Generator().manual_seed(0)).double()
    whole, short = (decode(policy_of(), prompts, uniforms, width=4, room=room)
                    for room in (None, [2, 5]))  # fmt: skip
    assert short == [row[:most] for row, most in zip(whole, (2, 5), strict=True)] != whole


def chi_squared(tokens: NDArray[np.int64], probabilities: NDArray[np.float64]) -> float:
    """The p-value of the counts; tokens that are expected fewer than 8 times count as one."""
    expected = probabilities * len(tokens)
    observed = np.bincount(tokens, minlength=len(expected))
    common = expected >= 8
    cells = [*observed[common], observed[~common].sum()]
    means = [*expected[common], expected[~common].sum()]
    statistic = sum((o - e) ** 2 / e for o, e in zip(cells, means, strict=True))
    return float(scipy.stats.chi2.sf(statistic, len(cells) - 1))


@torch.no_grad()
def next_token(model: Any, ids: list[int], temperature: float) -> NDArray[np.float64]:
    """P(· | ids), ``[257]``, by one unpadded forward pass."""
    logits = model(input_ids=torch.tensor([ids])).logits[0, -1].double() / temperature
    return logits.softmax(0).numpy()


MANY = 6000


@functools.cache
def many(kind: tiny.Kind) -> Responses:
    """Half the rows from the base model, half from the policy; a second prompt pads the first."""
    two = prompts_of(["q", "padding for it"])
    return draw(
        policy_of(kind), two, responses=2 * MANY, max_new_tokens=2, base_policy="reference",
        batch_size=4096,
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_first_tokens_come_from_the_right_distribution(kind: tiny.Kind) -> None:
    policy, responses = policy_of(kind), many(kind)
    ids = tiny.tokenizer()("q")["input_ids"]
    first = responses.tokens[responses.prompt == 0, -2].numpy()
    of_base, of_policy = first[:MANY], first[MANY:]
    tuned = functools.partial(next_token, policy.model, ids)
    # The base model, built anew without any adapter.
    base = functools.partial(next_token, model_of(kind), ids)
    assert chi_squared(of_policy, tuned(TEMPERATURE)) > 1e-3
    assert chi_squared(of_base, base(TEMPERATURE)) > 1e-3
    # Negative controls: another temperature, the other model.
    assert chi_squared(of_policy, tuned(1.0)) < 1e-9
    assert chi_squared(of_policy, tuned(0.65)) < 1e-2
    assert chi_squared(of_policy, base(TEMPERATURE)) < 1e-9
    assert chi_squared(of_base, tuned(TEMPERATURE)) < 1e-9


@pytest.mark.slow
def test_second_tokens_have_draws_of_their_own() -> None:
    """Each token's place in its conditional CDF is uniform, and independent of the other's."""
    policy, responses = policy_of("gpt2"), many("gpt2")
    rows = np.flatnonzero((responses.prompt == 0) & ~responses.from_base)
    rows = rows[responses.response_mask[rows, 1].bool().numpy()]
    places = []
    with torch.no_grad():
        tokens = torch.cat([responses.tokens[rows, -3:-2], responses.tokens[rows, -2:]], dim=1)
        logits = policy.model(input_ids=tokens).logits / TEMPERATURE
        for step in (1, 2):
            cumulative = logits[:, step - 1].softmax(1).cumsum(1)
            upper = cumulative.gather(1, tokens[:, step, None])[:, 0]
            mass = logits[:, step - 1].softmax(1).gather(1, tokens[:, step, None])[:, 0]
            jitter = np.random.default_rng(step).uniform(size=len(rows))
            places.append(upper.numpy() - jitter * mass.numpy())
    # Given that the first token is not the end: its place is uniform on what is left.
    assert scipy.stats.kstest(places[1], "uniform").pvalue > 1e-3
    assert abs(np.corrcoef(*places)[0, 1]) < 4 / math.sqrt(len(rows))


def test_a_repetition_penalty_of_the_checkpoint_is_not_applied() -> None:
    """generate() fills what is unset from the model's own generation config."""
    spec = recipe.Adapter(type="lora", rank=1)
    plain = make_policy(model_of("gpt2"), tiny.tokenizer(), spec, temperature=TEMPERATURE)
    model = model_of("gpt2")
    model.generation_config = GenerationConfig(
        repetition_penalty=5.0, suppress_tokens=list(range(1, 200)), min_new_tokens=5, top_k=3,
        temperature=0.1, num_beams=1, eos_token_id=tiny.tokenizer().eos_token_id,
    )  # fmt: skip
    biased = make_policy(model, tiny.tokenizer(), spec, temperature=TEMPERATURE)
    prompts = prompts_of(["aaaaaa"])
    assert answers(draw(biased, prompts, responses=50)) == answers(
        draw(plain, prompts, responses=50)
    )


def test_the_largest_uniform_number_never_picks_a_token_of_mass_zero(monkeypatch):
    """In float32 it would be 1, beyond the whole distribution."""
    policy = make_policy(tiny.model(), tiny.tokenizer(), recipe.Adapter())

    def forbid(module: Any, inputs: Any, logits: torch.Tensor) -> torch.Tensor:
        forbidden = torch.zeros_like(logits)
        forbidden[..., :100] = forbidden[..., 200:] = -torch.inf
        return logits + forbidden

    policy.model.get_output_embeddings().register_forward_hook(forbid)
    for uniform, token in ((1 - 2.0**-53, 199), (2.0**-53, 100)):
        monkeypatch.setattr(
            "dprlhf.rollout.sampling.draws_of",
            lambda prompts, key, context, k, length, u=uniform: torch.full(
                (len(prompts), k, length), u, dtype=torch.float64
            ),
        )
        assert draw(policy, prompts_of(["a"])).tokens[:, -6:].unique().tolist() == [token]


@pytest.mark.parametrize("words", [3, 256, 700])
def test_a_row_of_nan_costs_nobody_else(words: int) -> None:
    logits = torch.randn(4, words, generator=torch.Generator().manual_seed(0))
    uniform = torch.tensor([[0.2], [0.9], [0.5], [0.7]], dtype=torch.float64)
    expected = inverse_cdf(logits, uniform, 1.0)
    broken = logits.clone()
    broken[1, words // 2], broken[2, 0] = math.nan, math.inf
    found = inverse_cdf(broken, uniform, 1.0)
    assert found[[0, 3]].tolist() == expected[[0, 3]].tolist()
    assert 0 <= int(found.min()) <= int(found.max()) < words


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
@pytest.mark.parametrize("base", [False, True])
def test_log_probabilities_equal_those_of_an_unpadded_forward_pass(kind, base):
    policy = policy_of(kind)
    responses = draw(policy, five(), responses=6, max_new_tokens=12, temperature=0.7)
    with torch.no_grad():
        if base:
            with policy.base():
                measured = policy.response_logprobs(
                    responses.tokens, responses.mask, responses.max_new_tokens
                )
        else:
            measured = policy.response_logprobs(
                responses.tokens, responses.mask, responses.max_new_tokens
            )
    model = model_of(kind) if base else policy.model
    tolerance = 1e-10 if kind == "gpt2" else 1e-4  # Llama's norms compute in float32
    for row in range(len(responses.user)):
        ids = responses.tokens[row][responses.mask[row].bool()]
        count = int(responses.response_mask[row].sum())
        with torch.no_grad():
            logits = model(input_ids=ids[None]).logits[0].double() / TEMPERATURE
        expected = logits.log_softmax(1)[range(len(ids) - count - 1, len(ids) - 1), ids[-count:]]
        np.testing.assert_allclose(measured[row, :count], expected, rtol=tolerance, atol=tolerance)


def test_an_empty_prompt_becomes_the_end_token_and_a_long_one_keeps_its_end() -> None:
    policy = policy_of()
    responses = draw(policy, prompts_of(["", "0123456789"]), max_prompt_tokens=4)
    ids = responses.tokens[:, :-6]
    mask = responses.mask[:, :-6]
    assert ids[0][mask[0].bool()].tolist() == [EOS]
    assert ids[2][mask[2].bool()].tolist() == tiny.tokenizer()("6789")["input_ids"]
    assert policy.encode(["0123"], 4) == [tiny.tokenizer()("0123")["input_ids"]]


def test_no_log_line_tells_how_long_a_private_prompt_is(caplog: pytest.LogCaptureFixture) -> None:
    """transformers warns of a prompt beyond the model's length, and says how long it is."""
    policy = make_policy(tiny.model(), tiny.tokenizer(), recipe.Adapter())
    policy.tokenizer.model_max_length = 5
    policy.tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    logger = logging.getLogger("transformers")
    logger.addHandler(caplog.handler)
    level = logger.level  # other tests' runs hush the library
    logger.setLevel(logging.WARNING)
    try:
        policy.encode(["a prompt of 21 tokens"], 4)
        policy.encode([[{"role": "user", "content": "another of some tokens"}]], 4)
        assert not caplog.records
        tiny_tokenizer = tiny.tokenizer()
        tiny_tokenizer.model_max_length = 5
        tiny_tokenizer("a prompt of 21 tokens")  # negative control
        assert "21 > 5" in caplog.text
    finally:
        logger.setLevel(level)
        logger.removeHandler(caplog.handler)
