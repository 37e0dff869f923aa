"""The adapters by name: what they train, where they start, and how they are stored."""

import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from transformers import Phi3Config, Phi3ForCausalLM

from dprlhf import DprlhfError
from dprlhf.policies.adapters import adapter_rollback
from dprlhf.policies.causal_lm import CausalLMPolicy
from dprlhf.policies.classifier import load_reward_model
from dprlhf.policies.given import adapter_of
from dprlhf.policies.loading import load_policy, make_policy
from dprlhf.recipe import Adapter, Policy, load_any_recipe
from helpers import families, runs, tiny
from helpers.policies import off_start

KINDS = ("gpt2", "llama")
HIDDEN, LAYERS = 32, 2
ROOT = Path(__file__).resolve().parents[2]


def of_peft(peft_type: str, **fields: Any) -> dict[str, Any]:
    """The section of an adapter that PEFT names, on GPT-2's attention unless told."""
    fields = {"peft_type": peft_type, "target_modules": ["c_attn"], **fields}
    return {"type": "peft", "peft": {k: v for k, v in fields.items() if v is not None}}


PLAIN = {"rank": 2, "target_modules": ["c_attn"]}
GPT2: dict[str, tuple[dict[str, Any], int]] = {
    # c_attn has shape 32 → 96; there are 2 norms a layer and one more
    "lora": ({"type": "lora", **PLAIN}, LAYERS * 2 * (32 + 96)),
    "dora": (of_peft("LORA", r=2, use_dora=True), LAYERS * (2 * (32 + 96) + 96)),
    "ffa-lora": ({"type": "ffa-lora", **PLAIN}, LAYERS * 2 * 96),
    "vera": (of_peft("VERA", r=2), LAYERS * (2 + 96)),
    "ia3": (of_peft("IA3", feedforward_modules=[]), LAYERS * 96),
    "norms": (of_peft("LN_TUNING", target_modules=None), (2 * LAYERS + 1) * 2 * 32),
    "lora with biases": (of_peft("LORA", r=2, lora_bias=True), LAYERS * (2 * (32 + 96) + 96)),
    "lora and head": (
        of_peft("LORA", r=2, modules_to_save=["ln_f"]),
        LAYERS * 2 * (32 + 96) + 2 * 32,
    ),
    "lora on tokens": (of_peft("LORA", r=2, target_modules=["wte"]), 2 * (257 + 32)),
}


def make(kind, name, *, dtype=torch.float32, **settings):
    adapter = Adapter.model_validate({**GPT2[name][0], **settings})
    return make_policy(tiny.model(kind).to(dtype), tiny.tokenizer(), adapter, seed=3)


def test_a_mixture_of_experts_has_one_user_a_pass(tmp_path: Path) -> None:
    """Whatever trains it: a user's tokens decide the shapes of the experts' products."""
    adapter = Adapter(type="lora", target_modules=["q_proj"])
    families.model("mixtral").save_pretrained(tmp_path)
    tiny.tokenizer().save_pretrained(tmp_path)
    spec = Policy(model_name_or_path=str(tmp_path), adapter=adapter)
    for policy in (load_policy(spec), load_reward_model(spec, None)):
        assert "layers.0.mlp' " in str(policy.mixes_rows)
        assert policy.one_user_a_pass == policy.mixes_rows
    assert make_policy(tiny.model("llama"), tiny.tokenizer(), adapter).mixes_rows is None
    both = families.model("mixtral")
    both.model.norm = torch.nn.BatchNorm1d(8)
    with pytest.raises(DprlhfError, match=r"norm' .* mixes the users of a batch: it normalises"):
        make_policy(both, tiny.tokenizer(), adapter)


@pytest.mark.parametrize("type_", sorted(GPT2))
def test_an_adapter_is_taken_off_again(type_: str) -> None:
    """The model of a program is as it was, what was frozen in it too; then it takes another."""
    model = tiny.model("gpt2")
    model.transformer.wte.weight.requires_grad_(False)
    before = [(name, type(module)) for name, module in model.named_modules()]
    grads = {name: p.requires_grad for name, p in model.named_parameters()}
    weights = {name: p.clone() for name, p in model.named_parameters()}
    take_off = adapter_rollback(model)
    make_policy(model, tiny.tokenizer(), Adapter.model_validate(GPT2[type_][0]))
    assert hasattr(model, "peft_config")
    take_off()
    assert not hasattr(model, "peft_config")
    assert [(name, type(module)) for name, module in model.named_modules()] == before
    assert {name: p.requires_grad for name, p in model.named_parameters()} == grads
    assert all(torch.equal(p, weights[name]) for name, p in model.named_parameters())
    assert make_policy(model, tiny.tokenizer(), Adapter(type="lora")).dimension


@pytest.mark.parametrize("path", sorted((ROOT / "recipes").glob("*.yaml")), ids=lambda p: p.stem)
def test_the_adapter_of_every_recipe_can_be_built(path: Path) -> None:
    policy = load_any_recipe(path).policy
    kind: tiny.Kind = "gpt2" if "gpt2" in policy.model_name_or_path else "llama"
    model = tiny.model(kind, layers=30)
    assert make_policy(model, tiny.tokenizer(), policy.adapter).parameters


def logprobs(policy: CausalLMPolicy) -> torch.Tensor:
    tokens = torch.randint(1, 200, (4, 12), generator=torch.Generator().manual_seed(0))
    return policy.response_logprobs(tokens, torch.ones_like(tokens), 6)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning")  # PEFT's, where it loads them
@pytest.mark.parametrize(
    ("type_", "dtype"),
    [*((name, torch.float32) for name in GPT2), ("lora", torch.bfloat16), ("dora", torch.bfloat16)],
    ids=str,
)
def test_starts_as_the_base_model_and_comes_back_from_disk(type_, dtype, tmp_path):
    kind: tiny.Kind = "gpt2"
    policy = make(kind, type_, dtype=dtype)
    assert {p.dtype for p in policy.parameters.values()} == {torch.float32}
    with policy.base(), torch.no_grad():
        base = logprobs(policy)
    with torch.no_grad():
        assert torch.equal(logprobs(policy), base)
        off_start(policy)
        moved = logprobs(policy)
        assert not torch.allclose(moved, base, atol=1e-4)
        with policy.base():
            assert torch.equal(logprobs(policy), base)

    policy.save(tmp_path)
    loaded = peft.PeftModel.from_pretrained(tiny.model(kind).to(dtype), tmp_path, is_trainable=True)
    with torch.no_grad():
        again = logprobs(CausalLMPolicy(loaded.eval(), tiny.tokenizer()))
    torch.testing.assert_close(again, moved, atol=1e-5 if dtype == torch.float32 else 0.1, rtol=0)

    other = make(kind, type_, dtype=dtype)
    other.load_state(policy.state())
    with torch.no_grad():
        assert torch.equal(logprobs(other), moved)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.filterwarnings("ignore::UserWarning")  # PEFT's, where it loads them
def test_dora_is_pefts_own_and_merges(kind: tiny.Kind, tmp_path: Path) -> None:
    target = "c_attn" if kind == "gpt2" else "v_proj"
    config = peft.LoraConfig(r=2, use_dora=True, target_modules=[target])
    adapter = Adapter.model_validate(adapter_of(config))
    policy = make_policy(tiny.model(kind), tiny.tokenizer(), adapter, seed=3)
    assert [n for n in policy.parameters if "lora_magnitude_vector" in n]
    off_start(policy)
    policy.save(tmp_path)
    loaded = peft.PeftModel.from_pretrained(tiny.model(kind), tmp_path)
    tokens = torch.arange(1, 25).view(2, 12)
    with torch.no_grad():
        wanted = policy.model(input_ids=tokens).logits
        torch.testing.assert_close(loaded.eval()(input_ids=tokens).logits, wanted)
        merged = loaded.merge_and_unload()
        torch.testing.assert_close(merged(input_ids=tokens).logits, wanted, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("type_", list(GPT2))
def test_what_is_frozen_and_what_is_trained_follow_from_the_seed_alone(type_: str) -> None:
    found = []
    for before in (1, 2):  # what a program, or a launcher, did with torch's own generator
        model = tiny.model()
        torch.manual_seed(before)
        adapter = Adapter.model_validate(GPT2[type_][0])
        found.append(make_policy(model, tiny.tokenizer(), adapter, seed=3).model.state_dict())
    for name, value in found[0].items():
        assert torch.equal(value, found[1][name]), name


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (of_peft("LORA", target_modules=["nothing"]), "Target modules .* not found"),
        ({"type": "lora", **PLAIN, "layers": [5]}, "5, but the model has 2 layers"),
        (of_peft("LORAX"), "LORAX is unknown to PEFT; it has ADALORA, "),
        (of_peft("LORA", colour=1), "unexpected keyword argument 'colour'"),
        (
            of_peft("PROMPT_TUNING", num_virtual_tokens=2, target_modules=None),
            "PROMPT_TUNING is not trained: its learnt tokens stand before a prompt",
        ),
        (of_peft("LORA", alora_invocation_tokens=[1]), "which sampling does not know"),
        (of_peft("LORA", init_lora_weights="corda"), "corda reads data"),
        (of_peft("LORA", init_lora_weights="pissa_niter_4"), "drawn again at loading: take pissa"),
        (of_peft("LORA", layer_replication=[[0, 2], [1, 2]]), "makes another base model"),
        (of_peft("LORA", bias="all"), "bias trains weights of the base"),
        (of_peft("LORA", ensure_weight_tying=True), "a layer that PEFT does not save"),
        ({"type": "ffa-lora", "target_modules": ["wte"]}, "an embedding's A starts at zero"),
        (of_peft("ADALORA", total_step=9), "set target_r to init_r"),
        (of_peft("XLORA", target_modules=None, hidden_size=32, adapters={}), "trained adapters"),
    ],
    ids=str,
)
def test_an_adapter_that_cannot_be_trained_is_refused(settings, message):
    with pytest.raises(DprlhfError, match=message) as caught:
        make_policy(tiny.model("gpt2"), tiny.tokenizer(), Adapter(**settings))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "config",
    [
        peft.LoraConfig(r=2, target_modules=["q_proj"]),
        peft.LoraConfig(r=2, rank_pattern={"v_proj": 3}, modules_to_save=["lm_head"]),
        peft.LoHaConfig(r=2, target_modules=["v_proj"], module_dropout=0.5),
        peft.OFTConfig(target_modules=["v_proj"], oft_block_size=8),
        peft.LNTuningConfig(),
    ],
    ids=lambda config: type(config).__name__,
)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_config_of_peft_becomes_a_recipe_that_trains_the_same(config: Any) -> None:
    section = json.loads(json.dumps(adapter_of(config)))  # as a recipe is stored
    policy = make_policy(tiny.model("llama"), tiny.tokenizer(), Adapter(**section))
    adapted = peft.get_peft_model(tiny.model("llama"), config)
    wanted = {n: p.shape for n, p in adapted.named_parameters() if p.requires_grad}
    assert {n: p.shape for n, p in policy.parameters.items()} == wanted


@pytest.mark.parametrize("start", ["pissa", "olora"])
def test_an_adapter_that_takes_from_the_base_weights_has_the_same_base_policy(start, tmp_path):
    adapter = Adapter(**of_peft("LORA", target_modules=["q_proj"], init_lora_weights=start))
    policy = make_policy(tiny.model("llama"), tiny.tokenizer(), adapter)
    tokens = torch.arange(1, 17)[None]
    with torch.no_grad():
        wanted = tiny.model("llama")(input_ids=tokens).logits
        off_start(policy)
        moved = policy.model(input_ids=tokens).logits
        with policy.base(), policy.base():
            torch.testing.assert_close(policy.model(input_ids=tokens).logits, wanted)
        assert torch.equal(policy.model(input_ids=tokens).logits, moved)
        policy.save(tmp_path)
        loaded = peft.PeftModel.from_pretrained(tiny.model("llama"), tmp_path).eval()
        torch.testing.assert_close(loaded(input_ids=tokens).logits, moved)
    with pytest.raises(DprlhfError, match="changes the base weights, and the model was given"):
        load_policy(
            Policy(model_name_or_path="x", adapter=adapter),
            model=tiny.model("llama"),
            tokenizer=tiny.tokenizer(),
        )


def phi3(**settings: Any) -> Any:
    torch.manual_seed(0)
    return Phi3ForCausalLM(
        Phi3Config(
            vocab_size=257, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128,
            pad_token_id=0, bos_token_id=0, eos_token_id=0, **settings,
        )
    )  # fmt: skip


@pytest.mark.parametrize("type_", ["ffa-lora", "lora"])
def test_an_architecture_that_peft_does_not_know_has_its_projections_adapted(type_: str) -> None:
    policy = make_policy(phi3(), tiny.tokenizer(), Adapter(type=type_))
    trained = {name.split(".layers.0.")[1] for name in policy.parameters if ".layers.0." in name}
    assert {name.rpartition(".qkv_proj")[0] for name in trained} == {"self_attn"}
    layers = policy.model.named_modules()
    assert not [name for name, _ in layers if "lora_A" in name and "qkv_proj" not in name]


@pytest.mark.slow
def test_the_start_follows_public_prompts_alone(tmp_path: Path) -> None:
    """Other private prompts, the same public ones: the same frozen A."""
    adapter = {"type": "ffa-lora", "target_modules": ["c_attn"], "init": "public-activations"}
    settings = {
        "epsilon": 8.0, "rounds": 1, "policy__adapter": adapter, "evaluation__prompts": 10,
        "evaluation_prompts": [f"guest {i} says" for i in range(30)],
    }  # fmt: skip
    model = str(tiny.save(tmp_path / "model"))
    starts = []
    for name, prompts in (("a", [f"user {i} says" for i in range(60)]), ("b", ["xyz!"] * 60)):
        made = runs.train(model, tmp_path / name, prompts=prompts, **settings).policy.model
        starts.append({n: w for n, w in made.named_parameters() if "lora_A" in n})
    assert starts[0]
    assert all(torch.equal(w, starts[1][n]) for n, w in starts[0].items())
