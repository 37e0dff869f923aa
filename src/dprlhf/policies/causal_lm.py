"""A causal language model with a trainable adapter: the policy π_θ, with μ inside it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from dprlhf import recipe
from dprlhf.errors import DprlhfError


class CausalLMPolicy:
    """π_θ as a PEFT model; the base policy is the same network with its adapter off.

    Args:
        model: the PEFT model, in evaluation mode (dropout would be a second source of randomness).
        tokenizer: with a padding token, padding on the left.
        temperature: of sampling; log-probabilities are taken at the same temperature.

    Attributes:
        parameters: the trainable parameters by name, in a fixed order.
        dimension: d, their number.
    """

    def __init__(self, model: Any, tokenizer: Any, temperature: float = 1.0) -> None:
        from transformers import GenerationConfig

        self.model = model.eval()
        self.tokenizer = tokenizer
        self.temperature = temperature
        # generate() fills in from here what a call leaves unset: a checkpoint's own repetition
        # penalty or suppressed tokens would sample from another distribution than π_θ.
        model.generation_config = GenerationConfig()
        self.parameters = {n: p for n, p in model.named_parameters() if p.requires_grad}
        self.dimension = sum(p.numel() for p in self.parameters.values())
        # torch multiplies a sliced (non-contiguous) batch by the vocabulary as one bmm, for which
        # it copies the weight once a row: two thirds of the sampling time on a CPU.
        model.get_output_embeddings().register_forward_pre_hook(
            lambda module, inputs: (inputs[0].contiguous(), *inputs[1:])
        )
        if self.dimension == 0:
            raise DprlhfError("the policy has no trainable parameters: check policy.adapter")

    @property
    def device(self) -> torch.device:
        """Where the model computes."""
        device: torch.device = next(self.model.parameters()).device
        return device

    @contextlib.contextmanager
    def base(self) -> Iterator[None]:
        """Switch the adapter off: inside, the network is the base policy."""
        try:
            with self.model.disable_adapter():
                yield
        finally:  # PEFT makes all of an adapter trainable when it switches it on, frozen parts too
            for name, parameter in self.model.named_parameters():
                parameter.requires_grad_(name in self.parameters)

    def encode(self, prompts: Sequence[Any], max_tokens: int) -> list[list[int]]:
        """Tokenize prompts, each by itself: text as it is, conversations by the chat template.

        A prompt longer than ``max_tokens`` keeps its last tokens; an empty one becomes the
        beginning-of-sequence (or end-of-sequence) token.
        """
        tokenizer = self.tokenizer
        start = tokenizer.bos_token_id
        if start is None:
            start = tokenizer.eos_token_id
        encoded = []
        for prompt in prompts:
            if isinstance(prompt, str):
                ids = tokenizer(prompt, verbose=False)["input_ids"]  # a warning tells the length
            else:
                ids = tokenizer.apply_chat_template(
                    prompt,
                    add_generation_prompt=True,
                    return_dict=True,
                    tokenizer_kwargs={"verbose": False},
                )["input_ids"]
            encoded.append(list(ids)[-max_tokens:] or [start])
        return encoded

    def response_logprobs(
        self, tokens: torch.Tensor, mask: torch.Tensor, responses: int
    ) -> torch.Tensor:
        """Return log π(token | what stands before it) for the last ``responses`` tokens.

        Args:
            tokens: ``[rows, prompt + response]``, prompts padded on the left.
            mask: 1 where a token is real, same shape.
            responses: the length of the response part.

        Returns:
            ``[rows, responses]``, float32 or wider.
        """
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        logits = self.model(
            input_ids=tokens,
            attention_mask=mask,
            position_ids=positions,
            logits_to_keep=responses + 1,
            use_cache=False,
        ).logits[:, :-1]
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32)) / self.temperature
        targets = tokens[:, -responses:]
        chosen = logits.gather(2, targets[:, :, None])[:, :, 0]
        logprobs: torch.Tensor = chosen - logits.logsumexp(2)
        return logprobs

    def state(self) -> dict[str, torch.Tensor]:
        """Return a copy of the whole adapter, frozen parts included, on the CPU."""
        import peft

        weights = peft.get_peft_model_state_dict(self.model)
        return {name: weight.detach().cpu().clone() for name, weight in weights.items()}

    def load_state(self, state: dict[str, torch.Tensor]) -> None:
        """Put back what :meth:`state` returned."""
        import peft

        peft.set_peft_model_state_dict(self.model, state)

    def save(self, folder: Path) -> None:
        """Save the adapter in PEFT's format, and the tokenizer."""
        self.model.save_pretrained(folder, safe_serialization=True)
        self.tokenizer.save_pretrained(folder)


def load_policy(spec: recipe.Policy, *, temperature: float = 1.0, seed: int = 0) -> CausalLMPolicy:
    """Load a base model through transformers and put a fresh adapter on it.

    The adapter's starting point is drawn from ``seed``; it is public.

    Raises:
        DprlhfError: the model cannot be loaded, or the adapter does not fit it.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from dprlhf.assets import resolve

    path = resolve(spec.model_name_or_path)
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            path, trust_remote_code=spec.trust_remote_code, padding_side="left"
        )
        model = AutoModelForCausalLM.from_pretrained(
            path, dtype=getattr(torch, spec.dtype), trust_remote_code=spec.trust_remote_code
        )
    except (OSError, ValueError) as error:
        raise DprlhfError(
            f"policy.model_name_or_path {spec.model_name_or_path!r}: "
            f"{' '.join(str(error).split())[:300]}"
        ) from None
    return make_policy(model, tokenizer, spec.adapter, temperature=temperature, seed=seed)


def make_policy(
    model: Any,
    tokenizer: Any,
    adapter: recipe.Adapter,
    *,
    temperature: float = 1.0,
    seed: int = 0,
) -> CausalLMPolicy:
    """Put a fresh adapter on a loaded model."""
    import peft

    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    tokenizer.padding_side = "left"
    config = peft.LoraConfig(
        task_type="CAUSAL_LM",
        r=adapter.rank,
        lora_alpha=adapter.alpha,
        lora_dropout=0.0,
        target_modules=adapter.target_modules,
        layers_to_transform=_layers(model, adapter.layers),
        fan_in_fan_out=model.config.model_type == "gpt2",
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        try:
            adapted = peft.get_peft_model(model, config)
        except ValueError as error:
            raise DprlhfError(f"policy.adapter: {' '.join(str(error).split())[:300]}") from None
    if adapter.type == "lora-b":
        for name, parameter in adapted.named_parameters():
            if "lora_A" in name:
                parameter.requires_grad_(False)
    return CausalLMPolicy(adapted, tokenizer, temperature)


@torch.no_grad()
def align_with_activations(
    policy: CausalLMPolicy, tokens: torch.Tensor, mask: torch.Tensor, batch_size: int
) -> None:
    """Point each lora_A along the main directions of its layer's inputs on PUBLIC text.

    The rows of A become the leading right singular vectors of the inputs, not centred, at the
    length that the random start has (compare EVA, arXiv 2410.07170). A random direction is seen
    by few tokens; the leading one is common to nearly all, so the gradients of different users
    agree more and stand out more from the noise.

    Args:
        tokens: public text, ``[rows, tokens]``.
        mask: 1 where a token is real, same shape.
    """
    second_moments: dict[str, torch.Tensor] = {}
    real = torch.empty(0)

    def capture(name: str) -> Any:
        def hook(module: Any, inputs: tuple[torch.Tensor, ...], output: Any) -> None:
            x = inputs[0][real].double()
            second_moments[name] = second_moments.get(name, 0) + x.T @ x

        return hook

    layers = {n: m for n, m in policy.model.named_modules() if ".lora_A." in n}
    hooks = [layer.register_forward_hook(capture(name)) for name, layer in layers.items()]
    for start in range(0, len(tokens), batch_size):
        rows = slice(start, start + batch_size)
        real = mask[rows].bool().to(policy.device)
        policy.response_logprobs(tokens[rows].to(policy.device), mask[rows].to(policy.device), 1)
    for hook in hooks:
        hook.remove()
    for name, layer in layers.items():
        _, directions = torch.linalg.eigh(second_moments[name])
        leading = directions.flip(1)[:, : layer.weight.shape[0]].T
        signs = leading.sum(1, keepdim=True).sign()  # eigenvectors have no sign of their own
        lengths = layer.weight.double().norm(dim=1, keepdim=True)
        layer.weight.copy_(leading * signs * lengths)


def _layers(model: Any, asked: list[int] | None) -> list[int] | None:
    if asked is None:
        return None
    count = model.config.num_hidden_layers
    for layer in asked:
        if not -count <= layer < count:
            raise DprlhfError(f"policy.adapter.layers: {layer}, but the model has {count} layers")
    return [layer % count for layer in asked]
