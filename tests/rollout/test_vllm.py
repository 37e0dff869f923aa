"""Sampling by vLLM: its CPU engine where it is installed (``scripts/vllm_check.sh``).

What vLLM must be refused for is tested without it, and so is the check of its rows, on made-up
answers. The CPU engine has no batch-invariant mode, so the tests replace the one function that asks
for a GPU and the mode.
"""

import importlib.util
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from packaging.requirements import Requirement
from transformers import LlamaConfig, LlamaForCausalLM

import dprlhf
from dprlhf import DprlhfError, recipe
from dprlhf.policies.causal_lm import CausalLMPolicy
from dprlhf.policies.loading import make_policy
from dprlhf.policies.protocol import Sampling
from dprlhf.policies.warpers import StopStrings
from dprlhf.rollout import Responses, resolve_batch_size
from dprlhf.rollout import vllm as backend
from dprlhf.rollout.logprobs import token_logprobs
from helpers import tiny
from helpers.runs import charged, lower_case
from helpers.sampled import (
    EOS,
    SLOTS,
    TEMPERATURE,
    TEXTS,
    USERS,
    answers,
    draw,
    five,
    policy_of,
    prompts_of,
)

REPOSITORY = Path(__file__).parents[2]
SHARE_OF_GPU = backend._share_of_gpu
needs_vllm = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None, reason="vllm is not installed: scripts/vllm_check.sh"
)


def bfloat16_policy(temperature: float = TEMPERATURE, **adapter: Any) -> CausalLMPolicy:
    spec = recipe.Adapter(**{"type": "lora", "rank": 3, **adapter})
    return make_policy(
        tiny.model("llama").bfloat16(), tiny.tokenizer(), spec, temperature=temperature
    )


# --- refused before vLLM is loaded ---------------------------------------------------------------


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A policy on a GPU, and the batch-invariant mode asked for."""
    monkeypatch.setattr(CausalLMPolicy, "device", torch.device("cuda:0"))
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    monkeypatch.delenv("VLLM_ENABLE_V1_MULTIPROCESSING", raising=False)


def put(patch: pytest.MonkeyPatch, *, mode: bool, cuda: bool) -> None:
    platform = SimpleNamespace(is_cuda=lambda: cuda)
    for name, module in {
        "vllm": SimpleNamespace(__version__="0.9"),
        "vllm.envs": SimpleNamespace(VLLM_BATCH_INVARIANT=mode),
        "vllm.platforms": SimpleNamespace(current_platform=platform),
    }.items():
        patch.setitem(sys.modules, name, module)  # type: ignore[arg-type]


REFUSALS: dict[str, Any] = {
    "one process with a GPU": lambda patch: patch.setattr(
        CausalLMPolicy, "device", torch.device("cpu")
    ),
    "VLLM_BATCH_INVARIANT=1": lambda patch: patch.setenv("VLLM_BATCH_INVARIANT", "0"),
    "unset VLLM_ENABLE_V1_MULTIPROCESSING": lambda patch: patch.setenv(
        "VLLM_ENABLE_V1_MULTIPROCESSING", "0"
    ),
    r"pip install -e '\.\[vllm\]'": lambda patch: patch.setitem(sys.modules, "vllm", None),
    "version 0.9 has no batch-invariant": lambda patch: put(patch, mode=False, cuda=True),
    "0.9 has no batch-invariant mode; put": lambda patch: put(patch, mode=True, cuda=False),
}


@pytest.mark.parametrize("message", REFUSALS)
def test_vllm_is_refused_where_it_cannot_keep_users_apart(gpu, monkeypatch, message):
    REFUSALS[message](monkeypatch)
    with pytest.raises(DprlhfError, match=message):
        resolve(bfloat16_policy())


def test_vllm_is_refused_for_policies_that_it_cannot_sample() -> None:
    fields = {"peft_type": "LORA", "use_dora": True, "target_modules": ["v_proj"]}
    dora = bfloat16_policy(type="peft", rank=1, peft=fields)
    no_adapter = CausalLMPolicy(tiny.model("llama").bfloat16(), tiny.tokenizer())
    mixed = bfloat16_policy()
    mixed.sampling = Sampling(top_p=0.9, min_p=0.1)
    stopping = bfloat16_policy()
    stopping.stop = StopStrings(stopping.tokenizer, ["x"])
    for policy, message in (
        (stopping, "rollout.stop"),
        (mixed, "rollout.min_p: vllm applies it before top_p"),
        (dora, "LoRA adapters only"),
        (no_adapter, "LoRA adapters only"),
        (policy_of("llama", torch.float32), "policy.dtype: bfloat16"),
        (bfloat16_policy(temperature=0.001), "rollout.temperature 0.001"),
        (bfloat16_policy(temperature=2.5), "rollout.temperature 2.5"),
    ):
        with pytest.raises(DprlhfError, match=message):
            backend.engine(policy)
    wide = bfloat16_policy()
    wide.model.peft_config["default"].r = 513
    with pytest.raises(DprlhfError, match=r"policy.adapter.rank 513"):
        backend._largest_rank(wide)


# --- the check before the first round, on made-up answers -----------------------------------------


class Answers:
    """Answers requests by their seeds, in the place of ``_sample``; something couples them."""

    def __init__(self, coupled: str = "") -> None:
        self.coupled = coupled
        self.calls: list[tuple[list[list[int]], list[int]]] = []

    def __call__(self, llm: Any, policy: Any, prompts: Any, seeds: Any, lengths: Any) -> list[Any]:
        self.calls.append((prompts, lengths))
        moved = any(p.any() for name, p in policy.parameters.items() if "lora_B" in name)
        others = len(prompts) * (self.coupled == "tokens" or (self.coupled == "adapter" and moved))
        wrong = 1e-5 * len(prompts) * (self.coupled == "logprobs")
        return [
            SimpleNamespace(
                token_ids=[seed % 7 + others] * length,
                logprobs=[{seed % 7 + others: SimpleNamespace(logprob=-1 - wrong)}] * length,
            )
            for seed, length in zip(seeds, lengths, strict=True)
        ]


@pytest.fixture
def made_up(monkeypatch: pytest.MonkeyPatch) -> Answers:
    config = SimpleNamespace(max_model_len=42)
    llm = SimpleNamespace(llm_engine=SimpleNamespace(model_config=config))
    monkeypatch.setattr(backend, "engine", lambda policy: llm)
    answering = Answers()
    monkeypatch.setattr(backend, "_sample", answering)
    return answering


def resolve(policy: CausalLMPolicy, response: int = 12) -> None:
    spec = recipe.Rollout(backend="vllm", max_new_tokens=response)
    resolve_batch_size(spec, policy, rows=40, max_prompt_tokens=30)


@pytest.mark.parametrize("coupled", ["tokens", "logprobs", "adapter", ""])
def test_vllm_must_not_let_requests_move_each_other(made_up, coupled):
    """Neither tokens nor log-probabilities, and not with an adapter that has moved alone."""
    policy = bfloat16_policy()
    before = policy.state()
    made_up.coupled = coupled
    if coupled:
        with pytest.raises(DprlhfError, match="tokens or log-probabilities alone"):
            resolve(policy)
    else:
        resolve(policy)
    assert all(torch.equal(before[name], now) for name, now in policy.state().items())


def test_the_check_has_the_lengths_of_the_run(made_up: Answers) -> None:
    resolve(bfloat16_policy())
    sizes = [len(prompts) for prompts, _ in made_up.calls]
    assert (max(sizes), min(sizes)) == (40, 1)
    assert max(len(p) for prompts, _ in made_up.calls for p in prompts) == 30
    assert max(max(lengths) for _, lengths in made_up.calls) == 12


def test_rows_that_the_engine_cannot_hold_are_refused_at_the_start(made_up: Answers) -> None:
    with pytest.raises(DprlhfError, match=r"do not fit into the 42.*max_prompt_tokens"):
        resolve(bfloat16_policy(), 13)
    resolve(bfloat16_policy(), 12)


def test_a_response_that_stops_without_an_end_costs_its_user_alone(made_up, monkeypatch) -> None:
    policy = bfloat16_policy()
    policy.end_tokens = []
    whole = draw(policy, five(), backend="vllm")

    def cut_short(*given: Any) -> list[Any]:
        _, *others = made_up(*given)
        return [SimpleNamespace(token_ids=[1], logprobs=None), *others]

    monkeypatch.setattr(backend, "_sample", cut_short)
    broken = draw(policy, five(), backend="vllm")
    assert broken.failed is not None
    assert whole.failed is not None
    assert not whole.failed.any()
    assert np.flatnonzero(broken.failed).tolist() == [0]
    assert torch.equal(whole.tokens[1:], broken.tokens[1:])


# --- the library itself ---------------------------------------------------------------------------


def save_model(folder: Path) -> str:
    """Save a model that vLLM's CPU engine takes: attention heads of 32, and no tied embeddings."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=257, hidden_size=64, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=256,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(8)
    model.bfloat16().save_pretrained(folder)
    tiny.tokenizer().save_pretrained(folder)
    return str(folder)


def policy_in(folder: str, dtype: torch.dtype = torch.bfloat16) -> CausalLMPolicy:
    """The policy of :func:`save_model` with an adapter away from zero."""
    model = LlamaForCausalLM.from_pretrained(folder, dtype=dtype)
    spec = recipe.Adapter(type="lora", rank=3, target_modules=["q_proj", "v_proj", "up_proj"])
    policy = make_policy(model.eval(), tiny.tokenizer(), spec, temperature=TEMPERATURE)
    move(policy, seed=1)
    return policy


def move(policy: CausalLMPolicy, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in policy.parameters.values():
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_model(tmp_path_factory.mktemp("llama"))


def on_cpu(patch: pytest.MonkeyPatch) -> None:
    """Let the CPU engine pass, with little memory: nothing that a user can set does this."""
    patch.setattr(backend, "_share_of_gpu", lambda policy: 0.05)
    patch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    patch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    patch.setenv("HF_HUB_OFFLINE", "1")


@pytest.fixture(scope="module")
def llm(folder: str) -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        on_cpu(patch)
        backend.engine.cache_clear()
        yield backend.engine(policy_in(folder))
    backend.engine.cache_clear()


@pytest.fixture
def policy(folder: str, llm: Any, monkeypatch: pytest.MonkeyPatch) -> CausalLMPolicy:
    """A policy for which the one engine of this file is taken."""
    monkeypatch.setattr(backend, "engine", lambda policy: llm)
    return policy_in(folder)


def gaps(policy: CausalLMPolicy, responses: Responses) -> np.ndarray[Any, Any]:
    """|log p of transformers − log p of vLLM| of the response tokens of each row's own policy."""
    assert responses.sampled is not None
    with policy.base():
        of_base = token_logprobs(policy, responses, 16)
    own = np.where(responses.from_base[:, None], of_base, token_logprobs(policy, responses, 16))
    real = responses.response_mask.numpy() != 0
    gap: np.ndarray[Any, Any] = np.abs(own - responses.sampled)[real]
    return gap


@needs_vllm
@pytest.mark.slow
def test_the_engine_is_started_as_its_guarantee_needs_it(llm: Any, folder: str) -> None:
    config = llm.llm_engine.vllm_config
    assert config.model_config.model == folder
    assert config.model_config.dtype == torch.bfloat16
    assert config.model_config.generation_config == "vllm"
    assert config.model_config.logprobs_mode == "processed_logprobs"
    assert config.attention_config.backend.name == "TRITON_ATTN"
    assert not config.cache_config.enable_prefix_caching
    assert not config.scheduler_config.async_scheduling
    assert (config.lora_config.max_lora_rank, config.lora_config.max_loras) == (8, 1)
    with (REPOSITORY / "pyproject.toml").open("rb") as file:
        (pinned,) = tomllib.load(file)["project"]["optional-dependencies"]["vllm"]
    assert sys.modules["vllm"].__version__.partition("+")[0] in Requirement(pinned).specifier


@needs_vllm
@pytest.mark.slow
def test_the_cpu_engine_is_refused_outside_of_tests(gpu: None, folder: str) -> None:
    """It takes VLLM_BATCH_INVARIANT=1 without a word, and has no such mode."""
    with pytest.raises(DprlhfError, match="no batch-invariant mode"):
        SHARE_OF_GPU(policy_in(folder))


@needs_vllm
@pytest.mark.slow
@pytest.mark.parametrize(
    "sampling", [Sampling(), Sampling(top_k=5), Sampling(top_p=0.7), Sampling(min_p=0.2)], ids=str
)
def test_each_row_has_the_log_probabilities_of_its_own_policy(policy, sampling):
    """Its prompt, its adapter or none, and what top-k, top-p or min-p leave, renormalised."""
    policy.sampling = sampling
    arms = "reference" if sampling == Sampling() else "on-policy"
    found = draw(policy, five(), backend="vllm", responses=8, base_policy=arms)
    assert np.median(gaps(policy, found)) < 0.03
    assert found.failed is not None
    assert not found.failed.any()
    if sampling == Sampling():
        with policy.base():  # of no adapter, rows of both arms
            assert gaps(policy, found).mean() > 0.2


@needs_vllm
@pytest.mark.slow
def test_an_adapter_that_moved_is_sent_again(policy: CausalLMPolicy) -> None:
    draw(policy, five(), backend="vllm")
    before = policy.state()
    move(policy, seed=2)
    found = draw(policy, five(), backend="vllm", responses=8)
    assert np.median(gaps(policy, found)) < 0.03
    policy.load_state(before)
    assert np.median(gaps(policy, found)) > 0.1


@needs_vllm
@pytest.mark.slow
def test_seeds_repeat_and_rows_come_back_to_their_places(policy: CausalLMPolicy) -> None:
    whole, again = (draw(policy, five(), backend="vllm", responses=4) for _ in range(2))
    assert answers(whole) == answers(again)
    assert len({tuple(tokens) for tokens in answers(whole).values()}) > 15
    fewer = prompts_of(TEXTS[3:0:-1], USERS[3:0:-1], SLOTS[3:0:-1])
    some = answers(draw(policy, fewer, backend="vllm", responses=4))
    truth = answers(whole)
    # Not all to the bit: this engine has no batch-invariant mode.
    assert sum(truth[key] == tokens for key, tokens in some.items()) > 8
    assert len(some) == 12
    assert draw(policy, prompts_of([], [], []), backend="vllm").users == 0


@needs_vllm
@pytest.mark.slow
def test_a_response_ends_at_an_end_token_or_at_its_length(policy: CausalLMPolicy) -> None:
    policy.end_tokens = [EOS, *range(100, 200)]
    found = draw(policy, five(), backend="vllm", responses=8)
    lengths = [len(tokens) for tokens in answers(found).values()]
    assert max(lengths) == 6
    assert min(lengths) < 6
    for tokens in answers(found).values():
        assert not set(tokens[:-1]) & set(policy.end_tokens)
        assert len(tokens) == 6 or tokens[-1] in policy.end_tokens


@needs_vllm
@pytest.mark.slow
def test_a_prompt_that_is_too_long_costs_no_other_user(policy: CausalLMPolicy) -> None:
    """It is cut before; what the engine itself refuses is named without the prompt."""
    long = prompts_of(["x" * 500, *TEXTS[1:]], USERS, SLOTS)
    found = draw(policy, long, backend="vllm")
    assert found.failed is not None
    assert not found.failed.any()
    draws, spec = torch.full((1, 1, 6), 0.5), recipe.Rollout(backend="vllm")
    with pytest.raises(DprlhfError, match=r"^rollout.backend vllm stopped: \w+$"):
        list(backend.generate(policy, [[88] * 500], draws, spec))
    assert len(answers(draw(policy, five(), backend="vllm"))) == 10


@needs_vllm
@pytest.mark.slow
def test_a_private_run_of_two_rounds(policy, folder, tmp_path, monkeypatch):
    checked = []
    monkeypatch.setattr(backend, "_check_invariance", lambda *given: checked.append(given[2:]))
    result = dprlhf.train(
        model=folder, prompts=[f"user {i} says" for i in range(40)], reward=lower_case,
        epsilon=8.0, rounds=2, data__max_prompt_tokens=16, policy__dtype="bfloat16",
        policy__adapter={"type": "lora", "rank": 2, "target_modules": ["q_proj", "v_proj"]},
        rollout__backend="vllm", rollout__responses=2, rollout__max_new_tokens=6,
        output_dir=tmp_path / "run", quiet=True,
    )  # fmt: skip
    assert checked
    assert charged(tmp_path / "run") == [1, 2]
    assert any(parameter.any() for parameter in result.policy.parameters.values())
