"""The clipped sum over users, against plain autograd on one user at a time."""

import dataclasses
import functools
import math
import warnings
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import peft
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray
from torch import nn
from transformers import MixtralConfig, MixtralForCausalLM

from dprlhf import recipe
from dprlhf.boundary import Private, open_private
from dprlhf.errors import DprlhfError
from dprlhf.gradients.clipping import Weighted, clip_factors, clip_users, clipped_sum
from dprlhf.gradients.ghost_norm import OuterProducts, add_weighted, square_norm
from dprlhf.gradients.micro_batches import micro_batches, user_gradients
from dprlhf.gradients.per_user import PerUserGradients
from dprlhf.policies.causal_lm import CausalLMPolicy
from dprlhf.policies.loading import make_policy
from dprlhf.rollout import Responses
from helpers import commands, tiny
from helpers.autograd import gradient_of_user, relative_error
from helpers.batches import MIXED, Shape, batch_of, rows_of
from helpers.marks import slow
from helpers.policies import TARGETS, exact_norms, off_start, policy_of


def lora(**settings: Any) -> Callable[[tiny.Kind], peft.PeftConfig]:
    return lambda kind: peft.LoraConfig(
        task_type="CAUSAL_LM", r=2, target_modules=TARGETS[kind], fan_in_fan_out=kind == "gpt2",
        **settings,
    )  # fmt: skip


def vera(kind: tiny.Kind) -> peft.PeftConfig:
    targets = ["c_fc"] if kind == "gpt2" else ["v_proj", "gate_proj"]
    return peft.VeraConfig(
        task_type="CAUSAL_LM", r=4, target_modules=targets, fan_in_fan_out=kind == "gpt2"
    )


def ia3(kind: tiny.Kind) -> peft.PeftConfig:
    targets = ["c_attn", "c_fc"] if kind == "gpt2" else ["k_proj", "v_proj", "down_proj"]
    return peft.IA3Config(
        task_type="CAUSAL_LM", target_modules=targets, feedforward_modules=targets[-1:],
        fan_in_fan_out=kind == "gpt2",
    )  # fmt: skip


PEFT: dict[str, Callable[[tiny.Kind], peft.PeftConfig]] = {
    "rslora": lora(use_rslora=True),
    "dora": lora(use_dora=True),
    "lora with bias": lora(lora_bias=True),
    "lora and biases": lora(bias="all"),
    "lora and head": lora(modules_to_save=["lm_head"]),
    "vera": vera,
    "ia3": ia3,
    "norms": lambda kind: peft.LNTuningConfig(task_type="CAUSAL_LM"),
}
TRAINED = ["full", "tied", "lora", "ffa-lora", *PEFT]


@functools.cache
def trained_policy(kind, trained, dtype=torch.float64):
    """A policy that trains what ``trained`` names, all of it away from where it starts."""
    model: Any = tiny.model(kind)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT's, on tied weights
        if trained in PEFT:
            policy = CausalLMPolicy(
                peft.get_peft_model(model, PEFT[trained](kind)), tiny.tokenizer(), 0.7
            )
        elif trained in ("full", "tied"):
            # GPT-2 ties its embedding as it comes, Llama does not.
            if (trained == "tied") != (kind == "gpt2"):
                tied = model.get_input_embeddings().weight
                model.lm_head.weight = tied if trained == "tied" else nn.Parameter(tied.clone())
            policy = CausalLMPolicy(model, tiny.tokenizer(), 0.7)
        else:
            adapter = {"type": trained, "rank": 2, "target_modules": TARGETS[kind]}
            spec = recipe.Adapter.model_validate(adapter)
            policy = make_policy(model, tiny.tokenizer(), spec, temperature=0.7)
    off_start(policy, 0.2).model.to(dtype)
    if dtype == torch.float64:
        exact_norms(policy.model)
    policy.parameters = {n: p for n, p in policy.model.named_parameters() if p.requires_grad}
    if trained == "dora" and dtype == torch.bfloat16:  # as PEFT and add_adapter leave them
        for parameter in policy.parameters.values():
            parameter.data = parameter.data.float()
    return policy


def alone(policy, weighted):
    """The gradient of each user."""
    given = policy, weighted.responses, weighted.weights
    return [gradient_of_user(*given, user) for user in range(weighted.responses.users)]


def reference_sum(gradients, weighted, clip_norm):
    """The clipped sum by a loop over users, and the norms before clipping."""
    bound = math.sqrt(clip_norm**2 - weighted.extra_norm**2)
    total, norms = torch.zeros(0), []
    for user, gradient in enumerate(gradients):
        extra = torch.from_numpy(weighted.extra[user])
        norms.append(float(gradient.norm()))
        gradient = gradient * min(1.0, bound / norms[-1])
        if len(extra):
            extra = extra * min(1.0, weighted.extra_norm / float(extra.norm()))
        both = torch.cat([gradient, extra])
        total = total + both if len(total) else both
    return total, np.array(norms)


def weighted_of(responses: Responses, seed: int, extra: int = 0, extra_norm: float = 0) -> Weighted:
    random = np.random.default_rng(seed)
    # Users of very different size, so that some are clipped and some are not.
    scale = 10.0 ** random.uniform(-2, 1, responses.users)
    weights = random.standard_normal(len(responses.user)) * scale[responses.user]
    coordinates = extra_norm * random.standard_normal((responses.users, extra))
    return Weighted(responses, weights, coordinates, extra_norm)


def run(policy, weighted, clip_norm, batch_size=4):
    return clipped_sum(
        policy, Private(weighted), clip_norm=clip_norm, batch_size=batch_size, reduce=lambda x: x,
        most_users=100,
    )  # fmt: skip


SHAPES = {
    "one": Shape([[3], [6], [1], [2]], k=2, length=4),
    "two": Shape([[5, 1], [2, 3], [7], [4, 6]], k=2, length=4),
    "three": Shape([[3, 1, 5], [2, 2, 6]], k=2, length=4), "mixed": MIXED, "apart": MIXED,
}  # fmt: skip


@pytest.mark.parametrize("kind", ["gpt2", slow("llama")])
@pytest.mark.parametrize(
    ("trained", "per_user"),
    [
        ("lora", "one"), ("lora", "apart"), slow("lora", "three"), slow("lora", "mixed"),
        *(slow(trained, "two") for trained in TRAINED),
    ],
)  # fmt: skip
def test_clipped_sum_equals_autograd_on_one_user_at_a_time(kind, trained, per_user):
    policy = trained_policy(kind, trained)
    copies = 1 if per_user == "apart" else None
    batch = batch_of(SHAPES[per_user], seed=3, shuffled=per_user != "one", copies=copies)
    weighted, batch_size = weighted_of(batch, seed=4), 8 if per_user == "two" else 4
    gradients = alone(policy, weighted)
    unclipped, norms = reference_sum(gradients, weighted, 1e9)
    clip_norm = float(np.median(norms)) * 1.01  # some users are clipped, some are not
    truth, _ = reference_sum(gradients, weighted, clip_norm)
    result = run(policy, weighted, clip_norm, batch_size)
    assert (norms > clip_norm).any()
    assert (norms < clip_norm).any()
    assert result.bounded.clip_norm == clip_norm
    # The margin under S is a relative 1e-9: the clipped users' part of the sum.
    assert relative_error(result.bounded.total, truth) < 2e-9
    np.testing.assert_allclose(open_private(result.norms), norms, rtol=1e-10)
    for large in (1e9, math.inf):
        whole = run(policy, weighted, large, batch_size).bounded.total
        assert relative_error(whole, unclipped) < 1e-10
    measured = run(trained_policy(kind, trained, torch.float32), weighted, clip_norm, batch_size)
    assert relative_error(measured.bounded.total, truth) < 2e-5
    assert measured.bounded.total.dtype == torch.float64


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_with_dora_the_sum_is_that_of_users_alone_whatever_the_micro_batch(kind: tiny.Kind) -> None:
    """PEFT multiplies A and B by an identity for the norm: it is no row of any user's."""
    policy = trained_policy(kind, "dora")
    hidden = policy.model.config.hidden_size
    shape = Shape([[n % 5 + 1] for n in range(hidden)], k=1, length=2)
    weighted = weighted_of(batch_of(shape, seed=3), seed=4)
    gradients = alone(policy, weighted)
    _, norms = reference_sum(gradients, weighted, 1.0)
    clip_norm = float(np.median(norms)) * 1.01
    truth, _ = reference_sum(gradients, weighted, clip_norm)
    for batch_size in (5, hidden):  # the identity has as many rows as the last of these
        result = run(policy, weighted, clip_norm, batch_size=batch_size)
        assert relative_error(result.bounded.total, truth) < 2e-9
        np.testing.assert_allclose(open_private(result.norms), norms, rtol=1e-10)
    magnitudes = [n for n in policy.parameters if "lora_magnitude_vector" in n]
    assert len(magnitudes) == len(policy.parameters) / 3


@pytest.mark.parametrize(("k", "batch_size", "height"), [(8, 64, 64), (8, 12, 8), (6, 4, 3)])
def test_a_user_with_many_rows_takes_passes_of_one_shape(k, batch_size, height):
    """A larger batch for that user alone could run out of memory, at each resume again."""
    responses = batch_of(Shape([[3], [4], [5] * 64], k=k, length=4), seed=0)
    batches = list(micro_batches(responses, batch_size))
    parts = [part for batch in batches for part in batch.passes()]
    assert max(part.height for part in parts) <= batch_size
    of_many = [part for part in parts if 2 in part.users]
    assert {(part.height, len(part.users)) for part in of_many} == {(height, 1)}
    rows = np.concatenate([part.rows[part.rows >= 0] for part in of_many])
    np.testing.assert_array_equal(rows, np.flatnonzero(responses.user == 2))
    for part in of_many:  # a pass has whole prompts, or an equal part of one
        assert set(np.bincount(responses.prompt[part.rows[part.rows >= 0]])) - {0} == {
            min(k, height)
        }


@pytest.mark.parametrize("trained", ["lora", "full"])
def test_what_is_kept_of_a_user_is_no_larger_than_the_weights(trained: str) -> None:
    policy = trained_policy("gpt2", trained)
    responses = batch_of(Shape([[30] * 40], k=2, length=4), seed=0)
    kept: list[dict[str, int]] = []
    norms = PerUserGradients.norms

    def watched(engine: PerUserGradients) -> Any:
        kept.append({n: g.numel() for n, g in engine._gradients.items()})
        for name, uses in engine._factors.items():
            kept[-1][name] = sum(f.numel() for use in uses for f in use)
        return norms(engine)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PerUserGradients, "norms", watched)
        run(policy, weighted_of(responses, seed=1), 1.0, batch_size=4)
    sizes = {name: p.numel() for name, p in policy.parameters.items()}
    [of_user] = kept
    assert of_user.keys() == sizes.keys()
    assert all(of_user[name] <= sizes[name] for name in sizes)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize(
    ("kind", "trained"), [("gpt2", "lora"), slow("gpt2", "full"), slow("llama", "dora")]
)
def test_gradient_checkpointing_changes_nothing(kind, trained, reentrant):
    policy = trained_policy.__wrapped__(kind, trained)
    weighted = weighted_of(batch_of(MIXED, seed=3), seed=4)
    expected = run(policy, weighted, 1.0).bounded.total
    policy.model.train()  # transformers checkpoints in training mode only; nothing drops out here
    policy.model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    forwards = [0]

    def count(*_: Any) -> None:
        forwards[0] += 1

    first = next(m for n, m in policy.model.named_modules() if n.endswith("attn"))
    first.register_forward_hook(count)
    assert torch.equal(run(policy, weighted, 1.0).bounded.total, expected)
    passes = sum(len([*batch.passes()]) for batch in micro_batches(weighted.responses, 4))
    assert forwards[0] == 2 * passes  # it was on


@pytest.mark.parametrize("how", ["weights", "autocast"])
@pytest.mark.parametrize("trained", ["lora", "dora", "full"])
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_under_bfloat16_norms_factors_and_sums_are_float32_or_wider(kind, trained, how):
    """Activations round to 8 bits; what is made of them must be exact to 24."""
    policy = trained_policy(kind, trained, torch.bfloat16 if how == "weights" else torch.float32)
    responses = batch_of(Shape([[3, 1], [2, 6], [5, 4]], k=2, length=4), seed=3)
    weighted = weighted_of(responses, seed=4)
    with torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast"):
        ((_, _, parts, _),) = user_gradients(
            policy, responses, weighted.weights, batch_size=12, rows=4
        )
        result = run(policy, weighted, 1.0, batch_size=12)
    assert parts.dtype == torch.float32
    clipped, norms = clip_users(parts.flatten(0, 1), 1.0)
    np.testing.assert_allclose(open_private(result.norms), norms, rtol=1e-5)
    assert relative_error(result.bounded.total, clipped.sum(0)) < 1e-4
    assert (norms > 1).any()
    # Negative control: bfloat16 was on, and its rounding is far above that tolerance.
    exact, _ = reference_sum(alone(trained_policy(kind, trained), weighted), weighted, 1.0)
    assert relative_error(result.bounded.total, exact) > 1e-3


@pytest.mark.skipif(not hasattr(torch.backends, "fp32_precision"), reason="torch before 2.9")
@pytest.mark.parametrize(
    "switch",
    [
        "torch.backends.fp32_precision = 'tf32'",
        "torch.backends.cuda.matmul.fp32_precision = 'tf32'",
        "torch.backends.mkldnn.matmul.fp32_precision = 'bf16'",
        "torch.backends.cuda.matmul.allow_tf32 = True",
        "torch.set_float32_matmul_precision('medium')",
    ],
)
def test_a_program_may_lower_the_precision_of_products_in_any_way_that_torch_has(switch, tmp_path):
    """The switches are the process's, so each is tried in one of its own."""
    program = tmp_path / "program.py"
    program.write_text(
        f"""
import torch
from dprlhf.gradients.per_user import exact_products
def kept():
    return [torch.backends.cuda.matmul.fp32_precision, torch.backends.mkldnn.matmul.fp32_precision]
{switch}
before = kept()
assert before != ["none", "none"], before
with exact_products(torch.device("cpu")):
    assert kept() == ["ieee", "ieee"], kept()
    assert torch.get_float32_matmul_precision() == "highest"
    assert not torch.backends.cuda.matmul.allow_tf32
assert kept() == before, kept()
"""
    )
    found = commands.python(str(program))
    assert found.returncode == 0, found.stderr


shapes = st.builds(
    Shape,
    prompts=st.lists(st.lists(st.integers(1, 6), min_size=1, max_size=2), min_size=1, max_size=3),
    k=st.integers(1, 3),
    length=st.integers(1, 5),
)


@pytest.mark.slow
@settings(max_examples=20, deadline=None, derandomize=True)
@given(
    shape=shapes,
    kind=st.sampled_from(["gpt2", "llama"]),
    trained=st.sampled_from(TRAINED),
    batch_size=st.integers(1, 12),
    clip_norm=st.floats(0.05, 20),
    extra=st.integers(0, 2),
    seed=st.integers(0, 1000),
)
def test_clipped_sum_equals_autograd_for_drawn_shapes(
    shape: Shape,
    kind: tiny.Kind,
    trained: str,
    batch_size: int,
    clip_norm: float,
    extra: int,
    seed: int,
) -> None:
    policy = trained_policy(kind, trained)
    responses = batch_of(shape, seed, shuffled=True)
    weighted = weighted_of(responses, seed + 1, extra, 0.3 * clip_norm if extra else 0.0)
    truth, norms = reference_sum(alone(policy, weighted), weighted, clip_norm)
    result = run(policy, weighted, clip_norm, batch_size)
    scale = float(np.minimum(norms, clip_norm).sum()) + clip_norm * bool(extra)
    assert float((result.bounded.total - truth).norm()) < 2e-9 * scale
    np.testing.assert_allclose(open_private(result.norms), norms, rtol=1e-9)


def test_extra_coordinates_are_appended_and_clipped_apart() -> None:
    policy = policy_of()
    responses = batch_of(Shape([[2], [3], [4]], k=2, length=3), seed=1)
    extra = np.array([[0.1, 0.0], [3.0, 4.0], [math.nan, 1.0]])
    weights = np.array([1e3, 1e3, 1e-3, 1e-3, 1e3, 1e3])
    result = run(policy, Weighted(responses, weights, extra, 0.5), 1.0)
    gradient, coordinates = (
        result.bounded.total[: policy.dimension],
        result.bounded.total[policy.dimension :],
    )
    np.testing.assert_allclose(coordinates, [0.1 + 0.3, 0.4], rtol=1e-8)
    expected = torch.zeros(policy.dimension, dtype=torch.float64)
    for user in range(3):
        of_user = gradient_of_user(policy, responses, weights, user)
        expected += of_user * min(1.0, math.sqrt(0.75) / float(of_user.norm()))
    assert relative_error(gradient, expected) < 1e-8


@pytest.mark.parametrize("clip_norm", [1.0, math.inf])
def test_an_empty_batch_gives_zero(clip_norm: float) -> None:
    policy = policy_of()
    empty = torch.empty((0, 3), dtype=torch.int64)
    nobody = rows_of(empty, empty, 1, 2)
    result = run(policy, Weighted(nobody, np.empty(0), np.empty((0, 2)), 0.1), clip_norm)
    assert result.bounded.total.shape == (policy.dimension + 2,)
    assert not result.bounded.total.any()


numbers = st.one_of(
    st.floats(width=64, allow_nan=True, allow_infinity=True, allow_subnormal=True),
    st.floats(-10, 10),
    st.sampled_from([0.0, 5e-324, -1e-310, 1e-160, 1e150, 1e308, math.nan, math.inf]),
)


def exact_square(row: NDArray[np.float64]) -> Fraction:
    """‖row‖² of floating-point numbers, without any rounding."""
    return sum((Fraction(float(x)) ** 2 for x in row), Fraction(0))


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    rows=hnp.arrays(
        np.float64, hnp.array_shapes(min_dims=2, max_dims=2, max_side=6), elements=numbers
    ),
    exponent=st.floats(-6, 6),
)
def test_no_clipped_row_is_longer_than_the_clip_norm(rows, exponent):
    clip_norm = 10.0**exponent
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        clipped, norms = (
            t.numpy() for t in clip_users(torch.from_numpy(rows), clip_norm, most_users=100)
        )
    assert clipped.dtype == np.float64
    assert np.isfinite(clipped).all()
    for row, result, norm in zip(rows, clipped, norms, strict=True):
        assert exact_square(result) <= Fraction(clip_norm) ** 2
        if not np.isfinite(row).all():
            assert not result.any()
            assert not np.isfinite(norm)
            continue
        square = exact_square(row)
        if square >= Fraction(10) ** 307:  # its norm overflows: no direction to keep
            assert not result.any() or exact_square(result) <= Fraction(clip_norm) ** 2
        elif square <= (Fraction(clip_norm) * (1 - Fraction(2, 10**9))) ** 2:
            assert np.array_equal(result, row)
        else:
            length = float(np.linalg.norm(row))
            factor = min(1.0, clip_norm / length)
            np.testing.assert_allclose(result, row * factor, rtol=2e-9, atol=1e-300)


def test_a_row_in_float32_is_measured_in_float64() -> None:
    """Its norm in float32 errs by more than the margin of a small round covers."""
    random = torch.Generator().manual_seed(0)
    rows = torch.randn(64, 500, generator=random)
    clipped, _ = clip_users(rows, 1.0, most_users=1)
    exact = [sum(Fraction(x) ** 2 for x in row.tolist()) for row in clipped]
    assert max(exact) <= 1


Summing = Callable[[CausalLMPolicy, Weighted, float], torch.Tensor]
S, EXTRA_NORM = 0.8, 0.25


def right(policy: CausalLMPolicy, weighted: Weighted, clip_norm: float) -> torch.Tensor:
    return run(policy, weighted, clip_norm, batch_size=3).bounded.total


def clipping_rows(policy: CausalLMPolicy, weighted: Weighted, clip_norm: float) -> torch.Tensor:
    """Wrong: what a library does that takes each response for an example."""
    responses = weighted.responses
    rows = len(responses.user)
    split = dataclasses.replace(responses, user=np.arange(rows), users=rows, grid=np.empty(0))
    extra = np.zeros((rows, weighted.extra.shape[1]))
    extra[np.unique(responses.user, return_index=True)[1]] = weighted.extra
    return right(policy, dataclasses.replace(weighted, responses=split, extra=extra), clip_norm)


def clipping_the_sum(policy: CausalLMPolicy, weighted: Weighted, clip_norm: float) -> torch.Tensor:
    """Wrong: ordinary gradient clipping."""
    free = dataclasses.replace(weighted, extra_norm=math.inf)
    total = run(policy, dataclasses.replace(free, extra_norm=0.0), math.inf).bounded.total
    total[policy.dimension :] = torch.from_numpy(np.nan_to_num(weighted.extra).sum(0))
    return total * min(1.0, clip_norm / float(total.norm()))


def without(weighted: Weighted, user: int) -> Weighted:
    responses = weighted.responses
    rows = np.flatnonzero(responses.user != user)
    kept = np.delete(np.arange(responses.users), user)
    fewer = dataclasses.replace(
        responses, tokens=responses.tokens[rows], mask=responses.mask[rows],
        prompt=np.unique(responses.prompt[rows], return_inverse=True)[1],
        user=np.searchsorted(kept, responses.user[rows]), from_base=responses.from_base[rows],
        texts=[""] * len(rows), users=len(kept), grid=np.empty(0),
    )  # fmt: skip
    return Weighted(fewer, weighted.weights[rows], weighted.extra[kept], weighted.extra_norm)


def replaced(weighted: Weighted, user: int, how: str, seed: int) -> Weighted:
    """The same data but for one user's tokens, weights and coordinates."""
    responses = weighted.responses
    random = np.random.default_rng(seed)
    rows = responses.user == user
    tokens, weights, extra = (
        responses.tokens.clone(),
        weighted.weights.copy(),
        weighted.extra.copy(),
    )
    if how == "opposite":
        weights[rows] *= -1
        extra[user] *= -1
    else:
        tokens[rows] = torch.from_numpy(random.integers(1, 257, tuple(tokens[rows].shape)))
        value = {"other": 3.0, "huge": 1e300, "large": 1e12, "nan": math.nan, "inf": math.inf}[how]
        weights[rows] = value * random.choice([-1.0, 1.0], int(rows.sum()))
        extra[user] = value
    return Weighted(
        dataclasses.replace(responses, tokens=tokens), weights, extra, weighted.extra_norm
    )


@pytest.mark.slow
@settings(max_examples=20, deadline=None, derandomize=True)
@given(
    shape=shapes.filter(lambda s: len(s.prompts) > 1),
    kind=st.sampled_from(["gpt2", "llama"]),
    how=st.sampled_from(["other", "huge", "large", "nan", "inf", "opposite"]),
    seed=st.integers(0, 1000),
)
def test_one_user_moves_the_sum_by_at_most_the_clip_norm(shape, kind, how, seed):
    policy = policy_of(kind)
    weighted = weighted_of(batch_of(shape, seed, shuffled=True), seed + 1, 2, EXTRA_NORM)
    user = seed % len(shape.prompts)
    other = replaced(weighted, user, how, seed + 2)
    total, changed = right(policy, weighted, S), right(policy, other, S)
    rest = right(policy, without(weighted, user), S)
    assert torch.isfinite(torch.stack([total, changed, rest])).all()
    assert float((total - rest).norm()) <= S
    assert float((changed - rest).norm()) <= S
    assert float((total - changed).norm()) <= 2 * S
    if how in ("nan", "inf"):  # nothing but rounding is left of it
        assert float((changed - rest).norm()) < 1e-12


def worst_case() -> tuple[Weighted, int]:
    """User 1 shouts; user 0 says the opposite, less loudly, with the same tokens."""
    responses = batch_of(Shape([[3, 4], [3, 4]], k=2, length=4), seed=7)
    half = len(responses.tokens) // 2
    responses = dataclasses.replace(
        responses,
        tokens=responses.tokens[:half].repeat(2, 1),
        mask=responses.mask[:half].repeat(2, 1),
    )
    weights = np.concatenate([np.full(half, -1e3), np.full(half, 2e3)])
    extra = np.array([[-0.1, 0.0], [0.2, 0.3]])
    return Weighted(responses, weights, extra, EXTRA_NORM), 1


def distances(summing: Summing) -> tuple[float, float]:
    """How far adding and replacing the worst user moves the sum."""
    policy = policy_of()
    weighted, user = worst_case()
    total = summing(policy, weighted, S)
    removed = float((total - summing(policy, without(weighted, user), S)).norm())
    opposite = replaced(weighted, user, "opposite", 0)
    return removed, float((total - summing(policy, opposite, S)).norm())


def test_a_worst_case_user_comes_near_the_bound() -> None:
    removed, exchanged = distances(right)
    assert S * (1 - 1e-6) < removed <= S
    assert 2 * S * (1 - 1e-6) < exchanged <= 2 * S


def test_the_same_harness_catches_clipping_rows_instead_of_users() -> None:
    removed, exchanged = distances(clipping_rows)
    assert removed > 1.2 * S
    assert exchanged > 2.4 * S


def test_the_same_harness_catches_clipping_the_sum() -> None:
    removed, _ = distances(clipping_the_sum)
    assert removed > 1.9 * S


def test_a_user_with_bad_weights_leaves_the_others_as_they_are() -> None:
    policy = policy_of()
    weighted = weighted_of(batch_of(MIXED, seed=5), seed=6)
    rest = right(policy, without(weighted, 2), S)
    rows = np.flatnonzero(weighted.responses.user == 2)
    for bad in (math.nan, math.inf):
        weights = weighted.weights.copy()
        weights[rows[0]] = bad  # one of its rows is enough
        result = run(policy, dataclasses.replace(weighted, weights=weights), S, batch_size=64)
        assert relative_error(result.bounded.total, rest) < 1e-12
        assert not np.isfinite(open_private(result.norms)[2])
        assert np.isfinite(np.delete(open_private(result.norms), 2)).all()


@pytest.mark.parametrize("trained", ["lora", "full", "norms"])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_bad_user_counts_as_one_of_weight_zero_to_the_bit(trained: str, bad: float) -> None:
    policy = trained_policy("llama", trained, torch.float32)
    shape = Shape([[3, 4], [5, 6], [2, 3]], k=2, length=4)
    weighted = weighted_of(batch_of(shape, seed=5), seed=6)
    rows = np.flatnonzero(weighted.responses.user == 1)
    silent, broken = weighted.weights.copy(), weighted.weights.copy()
    silent[rows], broken[rows[1]] = 0.0, bad
    expected, total = (
        run(policy, dataclasses.replace(weighted, weights=w), S, batch_size=12).bounded.total
        for w in (silent, broken)
    )
    assert torch.equal(total, expected)
    assert total.any()


class Net(nn.Module):
    """Two linear layers, the first used twice, and something in between."""

    def __init__(self, between: nn.Module) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.between = between
        self.last = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.between(torch.tanh(self.first(torch.tanh(self.first(x))))))


def per_row_gradients(net: nn.Module, x: torch.Tensor, users: int | None = None) -> torch.Tensor:
    engine = PerUserGradients(net, dict(net.named_parameters()), whole=True)
    engine.run(lambda: net(x).square().sum(), users=users or len(x), rows=len(x))
    return engine.gradients()


def test_a_layer_that_mixes_users_is_refused_by_name() -> None:
    for layer in (nn.BatchNorm1d(6), nn.SyncBatchNorm(6)):
        net = Net(nn.Sequential(nn.Identity(), layer))
        trainable = {"last.weight": net.last.weight}
        with pytest.raises(DprlhfError, match=r"'between\.1' \(.*BatchNorm.*\) mixes the users"):
            PerUserGradients(net, trainable)
    moe = MixtralForCausalLM(
        MixtralConfig(
            vocab_size=32, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
            num_attention_heads=1, num_key_value_heads=1, num_local_experts=2,
        )
    )  # fmt: skip
    head = {"lm_head.weight": moe.lm_head.weight}
    with pytest.raises(DprlhfError, match=r"'model\.layers\.0\.mlp' .* mixes the users .* choose"):
        PerUserGradients(moe, head)
    PerUserGradients(Net(nn.LayerNorm(6)), {})  # negative control: it looks at one row alone


@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv1d(6, 6, 1),
        nn.Bilinear(6, 6, 6),
        nn.Embedding(6, 6, max_norm=1.0),
        nn.Embedding(6, 6, scale_grad_by_freq=True),
        nn.MultiheadAttention(6, 1),
    ],
    ids=lambda layer: type(layer).__name__,
)
def test_a_layer_without_a_rule_is_named(layer: nn.Module) -> None:
    net = Net(layer)
    name, parameter = next(iter(layer.named_parameters()))
    with pytest.raises(DprlhfError) as caught:
        PerUserGradients(net, {f"between.{name}": parameter})
    assert f"'between.{name}' ({type(layer).__name__})" in str(caught.value)
    assert "\n" not in str(caught.value)
    PerUserGradients(net, {"last.weight": net.last.weight})  # frozen, it may stay


def test_a_layer_that_does_not_work_on_rows_is_refused() -> None:
    class Once(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) + self.between(torch.ones(1, 6))[..., :3]

    with pytest.raises(DprlhfError, match=r"'between\.weight' \(Linear\) works on \(1, 6\)"):
        per_row_gradients(Once(nn.Linear(6, 6)), torch.randn(4, 2, 6))


def test_a_model_may_write_to_the_output_of_a_trained_layer() -> None:
    """Falcon adds attention's output to that of its feed-forward layer in place."""

    class InPlace(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = self.between(torch.tanh(self.first(x)))
            hidden += torch.tanh(self.first(x))
            return self.last(hidden)

    torch.manual_seed(0)
    net, x = InPlace(nn.Linear(6, 6)).double(), torch.randn(4, 2, 6, dtype=torch.float64)
    found = per_row_gradients(net, x)
    for row, gradient in zip(x, found, strict=True):
        expected = torch.autograd.grad(net(row[None]).square().sum(), list(net.parameters()))
        torch.testing.assert_close(gradient, torch.cat([g.flatten() for g in expected]))


def hooks_of(model: nn.Module) -> int:
    return sum(
        len(m._forward_hooks) + len(m._backward_hooks) + len(m._forward_pre_hooks)
        for m in model.modules()
    )


def test_nothing_is_left_behind_in_the_model() -> None:
    policy = policy_of()
    before = hooks_of(policy.model)
    state = {n: p.detach().clone() for n, p in policy.model.named_parameters()}
    weighted = weighted_of(batch_of(MIXED, seed=5), seed=6)
    run(policy, weighted, 1.0)
    assert hooks_of(policy.model) == before
    assert all(p.grad is None for p in policy.model.parameters())
    assert all(torch.equal(p, state[n]) for n, p in policy.model.named_parameters())

    def boom(rows: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        clipped_sum(
            policy, Private(weighted), clip_norm=1.0, batch_size=2, reduce=lambda x: x, tick=boom
        )
    assert hooks_of(policy.model) == before
    assert all(p.requires_grad for p in policy.parameters.values())


def test_a_parameter_that_is_not_used_is_named() -> None:
    net = Net(nn.Identity())
    net.spare = nn.Linear(2, 2)
    with pytest.raises(DprlhfError, match=r"'spare\.weight' received no gradient"):
        per_row_gradients(net, torch.randn(3, 2, 6))


def test_switching_the_adapter_off_and_on_keeps_what_is_frozen_frozen() -> None:
    """PEFT makes lora_A trainable again when the adapter comes back."""
    policy = make_policy(tiny.model(), tiny.tokenizer(), recipe.Adapter(type="ffa-lora"))
    trainable = {n for n, p in policy.model.named_parameters() if p.requires_grad}
    with policy.base():
        assert {n for n, p in policy.model.named_parameters() if p.requires_grad} <= trainable
    assert {n for n, p in policy.model.named_parameters() if p.requires_grad} == trainable
    assert trainable == set(policy.parameters)
    assert all("lora_B" in name for name in trainable)


def cancelling(how: str, tokens: int, n: int, m: int) -> OuterProducts:
    """A user of huge terms whose sum is small, or nothing."""
    generator = torch.Generator().manual_seed(0)
    left = 1e6 * torch.randn(tokens, n, generator=generator)
    right = torch.randn(tokens, m, generator=generator)
    half = tokens // 2
    if how == "in halves":
        left[half:], right[half:] = -left[:half], right[:half]
    elif how == "in turn":
        left, right = left[:1].repeat(tokens, 1), right[:1].repeat(tokens, 1)
        left[::2] *= -1
    else:
        left = left[:1] + 1e-3 * left
        right = right[:1] + 1e-3 * right
        left[half:] *= -1
    return OuterProducts(left[None], right[None])


@pytest.mark.parametrize("size", [(32, 16, 24), (256, 64, 48), (1024, 24, 32)], ids=str)
@pytest.mark.parametrize("how", ["in halves", "in turn", "nearly"])
def test_a_user_whose_terms_cancel_stays_below_the_clip_norm(how, size):
    """In float32 its rounding alone may exceed S: the bound must cover it, beside others too."""
    tokens, n, m = size
    user = cancelling(how, tokens, n, m)
    generator = torch.Generator().manual_seed(1)
    three = OuterProducts(
        torch.randn(3, tokens, n, generator=generator),
        torch.randn(3, tokens, m, generator=generator),
    )
    joint = OuterProducts(*(torch.cat(pair) for pair in zip(user, three, strict=True)))
    square, bound = square_norm([joint])

    def moved(norms: torch.Tensor) -> float:
        factors, totals = clip_factors(norms, S), []
        for first in (factors[0], torch.zeros_like(factors[0])):
            total = torch.zeros(n, m, dtype=torch.float64)
            add_weighted([joint], torch.cat([first[None], factors[1:]]), total)
            totals.append(total)
        return float((totals[0] - totals[1]).norm())

    assert moved(bound.sqrt()) <= S
    exact = (user.left.double().mT @ user.right.double()).norm()
    assert float(bound.sqrt()[0]) >= float(exact)
    # Honest users are hardly shrunk: at 1,024 tokens in random directions, by 0.6%.
    torch.testing.assert_close(bound[1:], square[1:], rtol=2e-2, atol=0)
    if how == "in halves" and tokens > 256:  # negative control: by its norm alone it would pass
        assert moved(square.sqrt()) > S


def test_norms_of_uses_that_share_a_parameter_have_their_cross_terms() -> None:
    """An embedding tied to the output layer: one use by index, one by a dense product."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 5, (3, 7), generator=generator)
    dense = [torch.randn(3, 4, k, generator=generator).double() for k in (5, 6)]
    at_tokens = torch.randn(3, 7, 6, generator=generator).double()
    whole = dense[0].mT @ dense[1] + nn.functional.one_hot(tokens, 5).double().mT @ at_tokens
    square, bound = square_norm([OuterProducts(*dense), OuterProducts(tokens, at_tokens)])
    expected = whole.square().sum((1, 2))
    torch.testing.assert_close(square, expected, rtol=1e-12, atol=0)
    torch.testing.assert_close(bound, expected, rtol=1e-9, atol=0)


@pytest.mark.parametrize("one_hot", [False, True])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_a_left_out_user_holds_does_not_reach_the_sum(one_hot: bool, bad: float) -> None:
    """Users kept as factors, one of them with factor 0: 0 · NaN would be NaN."""
    generator = torch.Generator().manual_seed(0)
    left = torch.randn(2, 3, 4, generator=generator)
    if one_hot:
        left = torch.randint(4, (2, 3), generator=generator)
    else:
        left[1] = bad
    right = torch.randn(2, 3, 5, generator=generator)
    right[1] = bad
    total, alone = torch.zeros(2, 4, 5, dtype=torch.float64)
    add_weighted([OuterProducts(left, right)], torch.tensor([0.5, 0.0]), total)
    add_weighted([OuterProducts(left[:1], right[:1])], torch.tensor([0.5]), alone)
    torch.testing.assert_close(total, alone)
    assert float(alone.norm()) > 0
