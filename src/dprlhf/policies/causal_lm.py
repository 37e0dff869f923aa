"""A causal language model with a trainable PEFT adapter: the policy π_θ."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from dprlhf import recipe
from dprlhf.errors import DprlhfError, one_line
from dprlhf.hardware import native_dtype
from dprlhf.hub import check_reachable, pinned
from dprlhf.policies import shared_prompt
from dprlhf.policies.adapters import add_adapter, quiet_peft, stored_state
from dprlhf.policies.head_logprobs import has_plain_head, head_logprobs
from dprlhf.policies.kept import Replay
from dprlhf.policies.mixing import refuse_mixing
from dprlhf.policies.quantization import keep_unpacked, quantization_config
from dprlhf.policies.stopping import StopStrings
from dprlhf.policies.warpers import Rows, Sampling, warped_logprobs


class CausalLMPolicy:
    """The policy π_θ as a PEFT model; with its adapter off, the same network is the base policy.

    Args:
        model: The PEFT model. It is put into evaluation mode: dropout would be a second source of
            randomness.
        tokenizer: A tokenizer with a padding token that pads on the left.
        temperature: Sampling temperature. Log-probabilities are taken at the same temperature.
        sampling: Top-k, top-p, min-p, repetition penalty and shortest response. Log-probabilities
            are those of what these leave.

    Attributes:
        parameters: The trainable parameters by name, in a fixed order.
        dimension: Number d of trainable parameters.
        checkpointed: The layers of which only the inputs are kept for the backward pass; empty
            without gradient checkpointing.
        end_tokens: Tokens at which a response ends: the tokenizer's end-of-sequence token and those
            of the checkpoint's generation config. Nothing else of that config is used: what
            responses are sampled from is stated in the recipe.
        stop: The strings at which a response ends; None for none.
        chat_template_kwargs: Further arguments of the chat template.
        is_base: Whether the adapter is off, inside :meth:`base`.
        tools: The functions that the chat template shows to the model; empty for none.
        sampler: The way to sample responses of several turns, a
            :class:`~dprlhf.rollout.sampling.Sampler`; None for responses of one turn.

    Raises:
        DprlhfError: Nothing is trainable, or the model has a layer that mixes the rows of a batch.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        temperature: float = 1.0,
        sampling: Sampling | None = None,
    ) -> None:
        refuse_mixing(model)
        self.model = model.eval()
        keep_unpacked(model)
        self.tokenizer = tokenizer
        self.temperature = temperature
        self.sampling = sampling or Sampling()
        self.end_tokens = _end_tokens(model, tokenizer)
        self.stop: StopStrings | None = None
        self.chat_template_kwargs: dict[str, Any] = {}
        self.checkpointed: list[Any] = []
        self.is_base = False
        self.tools: Sequence[Any] = ()
        self.sampler: Any = None
        self.parameters = {n: p for n, p in model.named_parameters() if p.requires_grad}
        self.dimension = sum(p.numel() for p in self.parameters.values())
        # torch multiplies a sliced (non-contiguous) batch by the vocabulary as one bmm, for which
        # it copies the weight once a row: two thirds of the sampling time on a CPU.
        if (head := model.get_output_embeddings()) is not None:
            head.register_forward_pre_hook(
                lambda module, inputs: (inputs[0].contiguous(), *inputs[1:])
            )
        if self.dimension == 0:
            raise DprlhfError("the policy has no trainable parameters: check policy.adapter")
        self._plain_head = has_plain_head(model, frozenset(map(id, self.parameters.values())))

    @property
    def network(self) -> Any:
        """The transformers model inside, with the adapter's layers in place."""
        return getattr(self.model, "get_base_model", lambda: self.model)()

    @property
    def device(self) -> torch.device:
        """Device of the model's parameters."""
        device: torch.device = next(self.model.parameters()).device
        return device

    @contextlib.contextmanager
    def base(self) -> Iterator[None]:
        """Switch the adapter off within the context, where the network is the base policy."""
        outer, self.is_base = self.is_base, True
        try:
            with self.model.disable_adapter():
                yield
        finally:
            self.is_base = outer
            # PEFT makes all of an adapter trainable when it switches it on, frozen parts too
            for name, parameter in self.model.named_parameters():
                parameter.requires_grad_(name in self.parameters)

    @contextlib.contextmanager
    def sampled_with(self, sampling: Sampling, temperature: float | None = None) -> Iterator[bool]:
        """Take log-probabilities of another distribution within the context.

        Args:
            sampling: The settings of that distribution.
            temperature: Its temperature; None leaves it as it is.

        Yields:
            Whether that is another distribution than outside.
        """
        own = self.sampling, self.temperature
        self.sampling = sampling
        self.temperature = self.temperature if temperature is None else temperature
        try:
            yield own != (self.sampling, self.temperature)
        finally:
            self.sampling, self.temperature = own

    def encode(self, prompts: Sequence[Any], max_tokens: int) -> list[list[int]]:
        """Tokenize prompts one by one: text as it is, conversations by the chat template.

        A prompt longer than ``max_tokens`` keeps its last tokens; an empty one becomes the
        beginning-of-sequence (or end-of-sequence) token.

        Raises:
            DprlhfError: The chat template refuses a conversation. The message does not quote it.
        """
        tokenizer = self.tokenizer
        start = tokenizer.bos_token_id
        if start is None:
            start = tokenizer.eos_token_id
        encoded = []
        for number, prompt in enumerate(prompts, 1):
            if isinstance(prompt, str):
                ids = tokenizer(prompt, verbose=False)["input_ids"]  # a warning tells the length
            else:
                try:
                    ids = self.render(prompt, add_generation_prompt=True)
                except Exception as error:
                    raise DprlhfError(
                        f"the tokenizer's chat template refuses conversation {number} of"
                        f" {len(prompts)} ({type(error).__name__}): check its roles and their order"
                    ) from None
            encoded.append(list(ids)[-max_tokens:] or [start])
        return encoded

    def render(self, messages: Sequence[Any], *, add_generation_prompt: bool = False) -> list[int]:
        """Return the tokens of a conversation, as the chat template writes it."""
        return list(
            self.tokenizer.apply_chat_template(
                messages,
                tools=list(self.tools) or None,
                add_generation_prompt=add_generation_prompt,
                return_dict=True,
                tokenizer_kwargs={"verbose": False},
                **self.chat_template_kwargs,
            )["input_ids"]
        )

    def check_context_length(self, tokens: int, what: str, name: str) -> None:
        """Refuse texts that are longer than the model's context.

        Past its original length, LongRoPE rescales all rows of a batch if one of them is longer:
        one user would change the values of the others.

        Args:
            tokens: Length of the longest text.
            what: Start of the error message, which names the setting.
            name: Name of the model, for the error message.

        Raises:
            DprlhfError: The texts are longer.
        """
        config = self.model.config.get_text_config()
        room = getattr(config, "max_position_embeddings", math.inf)
        rope = getattr(config, "rope_parameters", None) or {}
        for part in (rope, *rope.values()):  # some models have one for each type of layer
            if isinstance(part, dict) and part.get("rope_type") == "longrope":
                room = min(room, part["original_max_position_embeddings"])
        if tokens > room:
            raise DprlhfError(f"{what} more than the {room} positions of {name}")

    def checkpoint_layers(self) -> None:
        """Keep only the decoder layers' inputs for the backward pass, and compute the rest again.

        transformers checkpoints layers in training mode alone, where it also takes the cache away
        from sampling. So only the flag of the layers is set, and only as gradients are computed;
        what is inside them stays in evaluation mode.

        Raises:
            DprlhfError: The model's class does not support it.
        """
        from transformers.modeling_layers import GradientCheckpointingLayer

        network = self.network
        layers = [m for m in network.modules() if isinstance(m, GradientCheckpointingLayer)]
        if not layers or not getattr(network, "supports_gradient_checkpointing", False):
            raise DprlhfError(
                f"policy.gradient_checkpointing: {type(network).__name__} has no layers for it;"
                " lower update.batch_size to save memory"
            )
        network.gradient_checkpointing_enable({"use_reentrant": False})
        self.checkpointed = layers

    @contextlib.contextmanager
    def _checkpointing(self) -> Iterator[None]:
        """Switch the layers' checkpoints on within the context, if gradients are computed."""
        layers = self.checkpointed if torch.is_grad_enabled() else []
        try:
            for layer in layers:
                layer.training = True
            yield
        finally:
            for layer in layers:
                layer.training = False

    def shared_rows(self, num_generations: int, prompt: int, responses: int) -> int:
        """Return the fastest number of responses to compute in one row, behind one prompt.

        It depends on public numbers alone: it decides the shape of a batch, and rounding depends on
        the shape.

        Args:
            num_generations: Number of adjacent rows that share a prompt.
            prompt: Width of the prompt part, in tokens.
            responses: Width of the response part, in tokens.

        Returns:
            A divisor of ``num_generations``, for :meth:`response_logprobs`.
        """
        if num_generations == 1 or not shared_prompt.supported(getattr(self.model, "config", None)):
            return 1
        hidden = self.model.get_input_embeddings().embedding_dim
        return shared_prompt.best_shared_rows(num_generations, prompt, responses, hidden)

    def shared_cache(self, num_generations: int, prompt: int, responses: int) -> int:
        """Return how many responses to decode behind one copy of their prompt's keys and values.

        Arguments and result are those of :meth:`shared_rows`.
        """
        if not shared_prompt.supported(getattr(self.model, "config", None)):
            return 1
        return shared_prompt.most_behind_one_cache(num_generations, prompt, responses)

    def inputs_of(
        self, tokens: torch.Tensor, mask: torch.Tensor, responses: int, shared_rows: int
    ) -> dict[str, Any]:
        """Return the model's inputs for the logits of the responses' tokens.

        Arguments are those of :meth:`response_logprobs`.
        """
        if shared_rows > 1:
            dtype = self.model.get_input_embeddings().weight.dtype
            return shared_prompt.behind_one_prompt(tokens, mask, responses, shared_rows, dtype)
        # The last token predicts nothing, so it is left out. A masked column comes in front:
        # without it, the attention kernel would depend on the batch's users (dprlhf.rollout).
        ids, seen = F.pad(tokens[:, :-1], (1, 0)), F.pad(mask[:, :-1], (1, 0))
        positions = (seen.cumsum(1) - 1).clamp(min=0)
        return {
            "input_ids": ids,
            "attention_mask": seen,
            "position_ids": positions,
            "logits_to_keep": responses,
        }

    def response_logprobs(
        self,
        tokens: torch.Tensor,
        mask: torch.Tensor,
        responses: int,
        shared_rows: int = 1,
        replay: Replay | None = None,
    ) -> torch.Tensor:
        """Return log π(token | all tokens before it) of the last ``responses`` tokens of each row.

        π is the distribution that responses are sampled from, at ``temperature`` and with
        ``sampling``.

        Args:
            tokens: ``[rows, prompt + response]``, prompts padded on the left.
            mask: 1 for real tokens and 0 for padding, same shape.
            responses: Width of the response part, in tokens.
            shared_rows: Number of adjacent rows that share a prompt and go through the model as
                one row.
            replay: What sampling kept of these rows; None computes everything.

        Returns:
            ``[rows, responses]``, float32 or wider.
        """
        inputs = self.inputs_of(tokens, mask, responses, shared_rows)
        chosen = tokens[:, -responses:].flatten()
        fits = replay is not None and replay.fits(self)
        taken = contextlib.nullcontext() if replay is None else replay.replacing(self)
        if fits and not torch.is_grad_enabled():
            assert replay is not None
            logits = replay.of_logits()
        elif self._plain_head and self.sampling.plain and not fits:
            kept = inputs.pop("logits_to_keep")
            with self._checkpointing(), taken:
                states = self.network.base_model(**inputs, use_cache=False)[0]
            states = states[:, slice(-kept, None) if isinstance(kept, int) else kept].flatten(0, 1)
            head = self.network.get_output_embeddings()
            return head_logprobs(head, states, chosen, self.temperature).view(-1, responses)
        else:
            with self._checkpointing(), taken:
                logits = self.model(**inputs, use_cache=False).logits
        logits = logits.flatten(0, 1)
        if self.sampling.plain:
            found = chosen_logprobs(logits, chosen, self.temperature)
        else:
            rows = Rows(tokens, mask, responses, self.end_tokens)
            found = warped_logprobs(logits, rows, self.sampling, self.temperature)
        return found.view(len(tokens), responses)

    @torch.no_grad()
    def last_states(self, tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Return the last layer's hidden state of the last token, ``[rows, hidden]``.

        Args:
            tokens: ``[rows, tokens]``, padded on the left.
            mask: 1 for real tokens and 0 for padding, same shape.
        """
        ids, seen = F.pad(tokens, (1, 0)), F.pad(mask, (1, 0))  # as in response_logprobs
        states: torch.Tensor = self.network.base_model(
            input_ids=ids,
            attention_mask=seen,
            position_ids=(seen.cumsum(1) - 1).clamp(min=0),
            use_cache=False,
        )[0]
        return states[:, -1]

    def state(self) -> dict[str, torch.Tensor]:
        """Return a copy of the whole adapter, frozen parts included, on the CPU."""
        import peft

        with quiet_peft():
            weights = peft.get_peft_model_state_dict(self.model)
        return {name: weight.detach().cpu().clone() for name, weight in weights.items()}

    def load_state(self, state: dict[str, torch.Tensor]) -> None:
        """Load adapter weights that :meth:`state` returned."""
        import peft

        peft.set_peft_model_state_dict(self.model, state)

    def save(self, folder: Path) -> None:
        """Save the adapter in PEFT's format, and the tokenizer."""
        with quiet_peft():
            self.model.save_pretrained(folder, state_dict=stored_state(self.model))
        self.tokenizer.save_pretrained(folder)


class WholePolicy(CausalLMPolicy):
    """The policy π_θ without an adapter: every weight of the model is trained.

    The base policy is a frozen copy of the weights that the run started from, which is swapped in
    inside :meth:`base`. So a model takes twice its memory.

    Args:
        model: The transformers model. Its weights become trainable, in float32 or wider.
        tokenizer: A tokenizer with a padding token that pads on the left.
        temperature: Sampling temperature.
    """

    def __init__(self, model: Any, tokenizer: Any, temperature: float = 1.0) -> None:
        for parameter in model.parameters():
            parameter.data = parameter.data.to(torch.promote_types(parameter.dtype, torch.float32))
            parameter.requires_grad_(True)
        super().__init__(model, tokenizer, temperature)
        self._start = {n: p.detach().clone() for n, p in self.parameters.items()}

    @property
    def network(self) -> Any:
        """The transformers model."""
        return self.model

    @contextlib.contextmanager
    def base(self) -> Iterator[None]:
        """Put the weights of the run's start in the place of the trained ones."""
        if self.is_base:
            yield
            return
        self.is_base = True
        trained = {name: p.data for name, p in self.parameters.items()}
        try:
            for name, parameter in self.parameters.items():
                self._start[name] = self._start[name].to(parameter.device)
                parameter.data = self._start[name]
            yield
        finally:
            self.is_base = False
            for name, parameter in self.parameters.items():
                parameter.data = trained[name]

    def state(self) -> dict[str, torch.Tensor]:
        """Return a copy of all weights on the CPU."""
        return {n: p.detach().cpu().clone() for n, p in self.parameters.items()}

    @torch.no_grad()
    def load_state(self, state: dict[str, torch.Tensor]) -> None:
        """Load weights that :meth:`state` returned."""
        for name, parameter in self.parameters.items():
            parameter.copy_(state[name])

    def save(self, folder: Path) -> None:
        """Save the whole model and the tokenizer."""
        self.model.save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)


def chosen_logprobs(logits: torch.Tensor, chosen: torch.Tensor, temperature: float) -> torch.Tensor:
    """Return log softmax(logits / temperature) at one token a row, in float32 or wider.

    Args:
        logits: The model's output, ``[rows, vocabulary]``. The backward pass keeps it as it is.
        chosen: One token for each row, ``[rows]``.
        temperature: Temperature that the logits are divided by.

    Returns:
        Log-probabilities, ``[rows]``.
    """
    found: torch.Tensor = _ChosenLogProbs.apply(logits, chosen, temperature)  # type: ignore[no-untyped-call]
    return found


class _ChosenLogProbs(torch.autograd.Function):
    """The function behind :func:`chosen_logprobs`, with little memory.

    It takes some of the rows at a time: their float32 copies stay in the processor's cache, and the
    backward pass keeps the logits as the model gave them. ``cross_entropy`` makes three float32
    copies of all rows.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, chosen: torch.Tensor, temperature: float
    ) -> torch.Tensor:
        wide = torch.promote_types(logits.dtype, torch.float32)
        scale = 1 / temperature
        normalizers = torch.empty(len(logits), dtype=wide, device=logits.device)
        for rows in _parts(logits):
            torch.logsumexp(logits[rows].to(wide) * scale, 1, out=normalizers[rows])
        ctx.save_for_backward(logits, chosen, normalizers)
        ctx.scale = scale
        return logits.gather(1, chosen[:, None])[:, 0].to(wide) * scale - normalizers

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        logits, chosen, normalizers = ctx.saved_tensors
        of_logits = torch.empty_like(logits)
        gradient = gradient * ctx.scale
        for rows in _parts(logits):
            part = logits[rows].to(gradient.dtype) * ctx.scale  # a copy: the rest is in place
            part = part.sub_(normalizers[rows, None]).exp_().mul_(-gradient[rows, None])
            of_logits[rows] = part.scatter_add_(1, chosen[rows, None], gradient[rows, None])
        return of_logits, None, None


def _parts(logits: torch.Tensor) -> Iterator[slice]:
    """Cut the rows of ``[rows, vocabulary]`` into parts of a few million numbers."""
    most = 2**28 if logits.is_cuda else 2**21
    size = max(1, most // logits.shape[1])
    for start in range(0, len(logits), size):
        yield slice(start, start + size)


def load_policy(
    spec: recipe.Policy,
    *,
    temperature: float = 1.0,
    seed: int = 0,
    model: Any = None,
    tokenizer: Any = None,
) -> CausalLMPolicy:
    """Load a base model through transformers and put a new adapter on it.

    Args:
        spec: The recipe's section.
        temperature: Sampling temperature of the policy.
        seed: Seed of the adapter's initial weights, which are public.
        model: A loaded transformers model to use in place of the one that ``spec`` names. The
            adapter is put into it.
        tokenizer: A tokenizer to use in place of the model's own.

    Raises:
        DprlhfError: The model cannot be loaded, or the adapter does not fit it.
    """
    if model is None and spec.model_name_or_path == recipe.IN_MEMORY:
        raise DprlhfError("this run's model was given in Python: continue it there, with the model")
    if hasattr(model, "peft_config"):
        raise DprlhfError(
            "model: it has an adapter already: merge it (merge_and_unload()), and say what to train"
        )
    if model is not None and tokenizer is None and not model.config._name_or_path:
        raise DprlhfError(
            "processing_class: a model that was not loaded from a hub id or a folder does not say"
            " which tokenizer it has: give it"
        )
    if model is None:
        check_reachable(spec.model_name_or_path, spec.revision, "policy.model_name_or_path")
    try:
        if tokenizer is None:
            tokenizer = _tokenizer_of(spec, model)
        if model is None:
            model = _base_of(spec)
    except (OSError, ValueError) as error:
        raise DprlhfError(
            f"policy.model_name_or_path {spec.model_name_or_path!r}: {one_line(error)}"
        ) from None
    policy = make_policy(model, tokenizer, spec.adapter, temperature=temperature, seed=seed)
    if spec.gradient_checkpointing:
        policy.checkpoint_layers()
    if spec.adapter.type != "full":
        policy.model.peft_config["default"].revision = spec.revision  # stored with the adapter
    policy.chat_template_kwargs = spec.chat_template_kwargs
    return policy


def _tokenizer_of(spec: recipe.Policy, model: Any) -> Any:
    from transformers import AutoTokenizer

    from dprlhf.assets import resolve

    name = spec.model_name_or_path if model is None else model.config._name_or_path
    return AutoTokenizer.from_pretrained(
        resolve(name),
        trust_remote_code=spec.trust_remote_code,
        padding_side="left",
        **pinned(name, spec.revision, "policy.revision"),
    )


def _base_of(spec: recipe.Policy) -> Any:
    from transformers import AutoModelForCausalLM

    from dprlhf.assets import resolve

    settings: dict[str, Any] = pinned(spec.model_name_or_path, spec.revision, "policy.revision")
    dtype = native_dtype() if spec.dtype == "auto" else getattr(torch, spec.dtype)
    if spec.quantization is not None:
        settings["quantization_config"] = quantization_config(spec.quantization, dtype)
    return AutoModelForCausalLM.from_pretrained(
        resolve(spec.model_name_or_path),
        dtype=dtype,
        attn_implementation=spec.attn_implementation,
        trust_remote_code=spec.trust_remote_code,
        **settings,
    )


def make_policy(
    model: Any,
    tokenizer: Any,
    adapter: recipe.Adapter,
    *,
    temperature: float = 1.0,
    seed: int = 0,
) -> CausalLMPolicy:
    """Put a new adapter on a loaded transformers model, and prepare its tokenizer.

    Args:
        model: A causal language model.
        tokenizer: Its tokenizer; it is set to pad on the left.
        adapter: The recipe's section.
        temperature: Sampling temperature of the policy.
        seed: Seed of the adapter's initial weights, which are public.
    """
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    tokenizer.padding_side = "left"
    if adapter.type == "full":
        return WholePolicy(model, tokenizer, temperature)
    adapted = add_adapter(model, adapter, seed=seed)
    return CausalLMPolicy(adapted, tokenizer, temperature)


@torch.no_grad()
def align_with_activations(
    policy: CausalLMPolicy, tokens: torch.Tensor, mask: torch.Tensor, batch_size: int
) -> None:
    """Set each ``lora_A`` to the principal directions of its layer's inputs on PUBLIC text.

    The rows of A become the leading right singular vectors of the inputs, not centred, with the
    norms of the random initial rows (compare EVA, arXiv 2410.07170). Few tokens have a component
    along a random direction, nearly all along the leading one, so the gradients of different users
    agree more and stand out more from the noise.

    Args:
        policy: A policy whose adapter has ``lora_A``; it is changed in place.
        tokens: Public text, ``[rows, tokens]``.
        mask: 1 for real tokens and 0 for padding, same shape.
        batch_size: Rows in one forward pass.
    """
    second_moments: dict[str, torch.Tensor] = {}
    real = torch.empty(0)

    def capture(name: str) -> Any:
        def hook(module: Any, inputs: tuple[torch.Tensor, ...], output: Any) -> None:
            if inputs[0].dim() == 2:
                return  # DoRA multiplies A by the identity to take the merged weight's norm
            x = inputs[0][real].double()
            second_moments[name] = second_moments.get(name, 0) + x.T @ x

        return hook

    layers = {n: m for n, m in policy.model.named_modules() if ".lora_A." in n}
    hooks = [layer.register_forward_hook(capture(name)) for name, layer in layers.items()]
    # response_logprobs puts a column in front and leaves the last one out.
    tokens, mask = F.pad(tokens, (0, 1)), F.pad(mask, (0, 1))
    for start in range(0, len(tokens), batch_size):
        rows = slice(start, start + batch_size)
        real = mask[rows].roll(1, dims=1).bool().to(policy.device)
        policy.response_logprobs(tokens[rows].to(policy.device), mask[rows].to(policy.device), 1)
    for hook in hooks:
        hook.remove()
    for name, layer in layers.items():
        _, directions = torch.linalg.eigh(second_moments[name])
        leading = directions.flip(1)[:, : layer.weight.shape[0]].T
        signs = leading.sum(1, keepdim=True).sign()  # eigenvectors have no sign of their own
        lengths = layer.weight.double().norm(dim=1, keepdim=True)
        layer.weight.copy_(leading * signs * lengths)


def _end_tokens(model: Any, tokenizer: Any) -> list[int]:
    configured = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    every = configured if isinstance(configured, list) else [configured]
    return sorted({token for token in [tokenizer.eos_token_id, *every] if token is not None})
