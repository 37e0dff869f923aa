"""A causal language model with a trainable PEFT adapter: the policy π_θ."""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from dprlhf.data.messages import template_arguments
from dprlhf.errors import DprlhfError
from dprlhf.policies import shared_prompt
from dprlhf.policies.adapters import base_is_its_start, quiet_peft
from dprlhf.policies.head_logprobs import chosen_logprobs, has_plain_head, head_logprobs
from dprlhf.policies.kept import Replay, forwards_replaced
from dprlhf.policies.protocol import Sampling
from dprlhf.policies.refusals import refuse_mixing

if TYPE_CHECKING:
    from dprlhf.policies.warpers import StopStrings


class SetUp:
    """Copies of tokenizer and configs from before the first round, restored before saving.

    A reward may share the program's tokenizer or model. What it leaves there on private prompts,
    such as the padded length of a batch, is computed from users and has no noise.
    """

    def __init__(self) -> None:
        self._kept: dict[str, tuple[Any, Any, Any]] = {}

    def keep(self, owner: Any, name: str) -> None:
        """Keep a copy of an attribute until :meth:`end`."""
        held = getattr(owner, name, None)
        if held is None:
            return
        try:
            self._kept[name] = owner, held, copy.deepcopy(held)
        except Exception as problem:
            raise DprlhfError(
                f"the {name} ({type(held).__name__}) cannot be copied ({type(problem).__name__}),"
                " so what private prompts leave in it could not be kept out of the saved one"
            ) from None

    def put_back(self) -> None:
        """Put the copies back into the objects that they were taken from."""
        # In place: the program may save its own objects again, or pass them to another run.
        for name, (owner, held, kept) in self._kept.items():
            fresh = copy.deepcopy(kept)
            vars(held).clear()
            vars(held).update(vars(fresh))
            setattr(owner, name, held)

    def end(self) -> None:
        """Put the copies back for good: what the program changes from now on is its own affair."""
        self.put_back()
        self._kept.clear()


class CausalLMPolicy:
    """The policy π_θ as a PEFT model; with its adapter off, the same network is the base policy."""

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        temperature: float = 1.0,
        sampling: Sampling | None = None,
    ) -> None:
        self.mixes_rows = refuse_mixing(model, alone=True)  # why every pass has one user, if so
        self.model = model.eval()
        self.tokenizer = tokenizer
        self.temperature = temperature
        self.sampling = sampling or Sampling()
        configured = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
        every = configured if isinstance(configured, list) else [configured]
        self.embeddings = model.get_input_embeddings().weight.shape[0]  # tokens that have one
        asked = {token for token in [tokenizer.eos_token_id, *every] if token is not None}
        # A token without an embedding is never sampled, and cannot stand for a failed trajectory.
        self.end_tokens = sorted(token for token in asked if 0 <= token < self.embeddings)
        self.first_position = first_position(model)  # of a text's first token
        # The longest text in tokens that the model has positions for; infinite without a limit.
        self.room = context_length(getattr(model, "config", None), self.first_position)
        self.last_position = self.first_position + int(min(self.room, 2.0**62)) - 1
        self.stop: StopStrings | None = None
        self.chat_template_kwargs: dict[str, Any] = {}
        self.checkpointed: list[Any] = []  # layers of which only the inputs are kept
        self.is_base = False  # whether the adapter is off, inside base()
        self.tools: Sequence[Any] = ()  # functions that the chat template shows to the model
        self.sampler: Any = None  # for responses of several turns, see rollout.sampling.sample
        # Why a gradient pass has one user, if it must.
        self.one_user_a_pass = self.mixes_rows
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
        self.set_up = SetUp()
        started = self.parameters.items() if base_is_its_start(model) else ()
        self._start = {n: p.detach().clone() for n, p in started}

    @contextlib.contextmanager
    def without_dropout(self) -> Iterator[None]:
        """Keep all modules in evaluation mode within the context, whatever a program does."""
        # A sampler, a reward or a callback may call model.train(). Dropout draws the masks of a
        # batch together, so that one user's row would change the gradient of every other user.
        modules = list(self.model.modules())  # to walk them takes ms, and a token is one pass

        def evaluate(*_: Any) -> None:
            if any(module.training for module in modules):
                self.model.eval()

        body = getattr(self.network, "base_model", self.network)  # every pass goes through it
        hook = body.register_forward_pre_hook(evaluate)
        try:
            yield
        finally:
            hook.remove()

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
        # Without an adapter, or where it moved a part of the base weights into itself, the
        # parameters of the run's start take the place of the trained ones.
        outer, self.is_base = self.is_base, True
        if outer:
            yield
            return
        trained = {name: self.parameters[name].data for name in self._start}
        try:
            with contextlib.nullcontext() if self._start else self.model.disable_adapter():
                for name, start in self._start.items():
                    self._start[name] = start.to(self.parameters[name].device)
                    self.parameters[name].data = self._start[name]
                yield
        finally:
            self.is_base = False
            for name, data in trained.items():
                self.parameters[name].data = data
            # PEFT makes all of an adapter trainable when it switches it on, frozen parts too
            for name, parameter in self.model.named_parameters():
                parameter.requires_grad_(name in self.parameters)

    @contextlib.contextmanager
    def sampled_with(self, sampling: Sampling, temperature: float | None = None) -> Iterator[bool]:
        """Take log-probabilities of another distribution within the context."""
        own = self.sampling, self.temperature
        self.sampling = sampling
        self.temperature = self.temperature if temperature is None else temperature
        try:
            yield own != (self.sampling, self.temperature)
        finally:
            self.sampling, self.temperature = own

    def encode(
        self,
        prompts: Sequence[Any],
        max_tokens: int,
        for_template: Sequence[Mapping[str, Any]] | None = None,
    ) -> list[list[int]]:
        """Tokenize prompts one by one: text as it is, conversations by the chat template.

        A prompt longer than ``max_tokens`` keeps its last tokens; an empty one becomes the
        beginning-of-sequence token, or else the end-of-sequence or padding token.
        """
        tokenizer = self.tokenizer
        rows = [{}] * len(prompts) if for_template is None else for_template
        encoded = []
        for number, (prompt, row) in enumerate(zip(prompts, rows, strict=True), 1):
            if isinstance(prompt, str):
                ids = tokenizer(prompt, verbose=False)["input_ids"]  # a warning tells the length
                ids = ids[: len(ids) - self._added_behind]  # the end is for the model to write
            else:
                try:
                    ids = self.render(prompt, add_generation_prompt=True, row=row)
                except DprlhfError:
                    raise
                except Exception as error:
                    raise DprlhfError(
                        f"the tokenizer's chat template refuses conversation {number} of"
                        f" {len(prompts)} ({type(error).__name__}): check its roles and their order"
                    ) from None
            encoded.append(self.known(list(ids))[-max_tokens:] or [self.start_token])
        return encoded

    @cached_property
    def _added_behind(self) -> int:
        """How many special tokens the tokenizer puts behind a text."""
        for probe in ("a", "A", "1"):  # of letters alone, or of capitals; for "" nothing is known
            text, whole = (
                self.tokenizer(probe, add_special_tokens=own)["input_ids"] for own in (False, True)
            )
            if text:
                break
        else:
            return 0
        places = range(len(whole) - len(text) + 1)
        return next((n for n in places if whole[: len(whole) - n][-len(text) :] == text), 0)

    @property
    def start_token(self) -> int:
        """The token that replaces an empty prompt: BOS, else EOS, else padding."""
        own = self.tokenizer
        special: tuple[int | None, ...] = (own.bos_token_id, own.eos_token_id, own.pad_token_id)
        return next(token for token in special if token is not None and token < self.embeddings)

    def known(self, tokens: list[int]) -> list[int]:
        """Return tokens, all of which the model has an embedding for."""
        # Some tokenizers have more tokens than the model, such as Gemma 3's for an image. Whoever
        # writes the name of one in a prompt would end the run of everybody.
        if max(tokens, default=0) >= self.embeddings:
            raise DprlhfError(
                f"the tokenizer has tokens beyond the {self.embeddings} that the model has"
                " embeddings for, and a text has one of them"
            )
        return tokens

    def render(
        self,
        messages: Sequence[Any],
        *,
        add_generation_prompt: bool = False,
        row: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Return the tokens of a conversation, as the chat template writes it."""
        arguments = {**self.chat_template_kwargs, **template_arguments(row or {})}
        if self.tools:
            arguments["tools"] = list(self.tools)
        ids = self.tokenizer.apply_chat_template(
            messages,
            add_generation_prompt=add_generation_prompt,
            return_dict=True,
            tokenizer_kwargs={"verbose": False},
            **arguments,
        )["input_ids"]
        return self.known(list(ids))

    def position_ids(self, mask: torch.Tensor) -> torch.Tensor:
        """Return the position of each token in its own text, without the padding before it."""
        return (mask.cumsum(1) - 1).clamp(min=0) + self.first_position

    def check_context_length(self, tokens: int, what: str, name: str) -> None:
        """Refuse texts that are longer than the model's context."""
        if tokens > self.room:
            raise DprlhfError(f"{what} more than the {self.room} positions of {name}")

    @property
    def layers(self) -> list[Any]:
        """The decoder layers, from below; none where transformers does not know them."""
        from transformers.modeling_layers import GradientCheckpointingLayer

        layers = [m for m in self.network.modules() if isinstance(m, GradientCheckpointingLayer)]
        inner = {id(m) for layer in layers for m in layer.modules() if m is not layer}
        return [layer for layer in layers if id(layer) not in inner]

    def checkpoint_layers(self) -> None:
        """Keep only the decoder layers' inputs for the backward pass; compute the rest again."""
        network, layers = self.network, self.layers
        if not layers or not getattr(network, "supports_gradient_checkpointing", False):
            raise DprlhfError(
                f"policy.gradient_checkpointing: {type(network).__name__} has no layers for it;"
                " lower update.batch_size to save memory"
            )
        self.checkpointed = layers

    @contextlib.contextmanager
    def _checkpointing(self) -> Iterator[None]:
        """Compute the layers under checkpoints within the context, if gradients are computed."""
        # transformers' own checkpoints work in training mode alone, where some layers drop out.
        layers = self.checkpointed if torch.is_grad_enabled() else []
        again = {m: partial(checkpoint, m.forward, use_reentrant=False) for m in layers}
        with forwards_replaced(again):
            yield

    def shared_rows(self, num_generations: int, prompt: int, responses: int) -> int:
        """Return the fastest number of responses to compute in one row, behind one prompt."""
        # From public numbers alone: it decides a batch's shape, and rounding depends on that.
        if num_generations == 1 or not shared_prompt.supported(getattr(self.model, "config", None)):
            return 1
        hidden = self.model.get_input_embeddings().weight.shape[1]
        return shared_prompt.best_shared_rows(num_generations, prompt, responses, hidden)

    def shared_cache(self, num_generations: int, prompt: int, responses: int) -> int:
        """Return how many responses to decode behind one copy of their prompt's keys and values."""
        if not shared_prompt.supported(getattr(self.model, "config", None)):
            return 1
        return shared_prompt.most_behind_one_cache(num_generations, prompt, responses)

    def inputs_of(
        self, tokens: torch.Tensor, mask: torch.Tensor, responses: int, shared_rows: int
    ) -> dict[str, Any]:
        """Return the model's inputs for the logits of the responses' tokens."""
        if shared_rows > 1:
            dtype = self.model.get_input_embeddings().weight.dtype
            return shared_prompt.behind_one_prompt(tokens, mask, responses, shared_rows, dtype)
        # The last token predicts nothing, so it is left out. A masked column comes in front:
        # without it, the attention kernel would depend on the batch's users (dprlhf.rollout).
        ids, seen = F.pad(tokens[:, :-1], (1, 0)), F.pad(mask[:, :-1], (1, 0))
        return {
            "input_ids": ids,
            "attention_mask": seen,
            "position_ids": self.position_ids(seen),
            "logits_to_keep": responses,
        }

    def response_logprobs(
        self,
        tokens: torch.Tensor,  # [rows, prompt + response], prompts padded on the left
        mask: torch.Tensor,
        responses: int,
        shared_rows: int = 1,
        replay: Replay | None = None,
    ) -> torch.Tensor:
        """Return log π(token | all tokens before it) of each row's last ``responses`` tokens."""
        # π is the distribution that responses are sampled from.
        inputs = self.inputs_of(tokens, mask, responses, shared_rows)
        chosen = tokens[:, -responses:].flatten()
        fits = replay is not None and replay.kept.has_logits(self)
        taken = contextlib.nullcontext() if replay is None else replay.replacing(self)
        if fits and self._plain_head and not torch.is_grad_enabled():
            assert replay is not None
            logits = replay.of_logits()  # what the head made, which some models scale afterwards
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
        if shared_rows == 1:
            logits = logits[:, -responses:]  # some models take logits_to_keep for nothing
        logits = logits.flatten(0, 1)
        if self.sampling.plain:
            logprobs = chosen_logprobs(logits, chosen, self.temperature)
        else:
            from dprlhf.policies.warpers import warped_logprobs  # most runs cut nothing

            logprobs = warped_logprobs(logits, chosen, self.sampling, self.temperature)
        return logprobs.view(len(tokens), responses)

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
        """Save the adapter in PEFT's format, and the tokenizer as it was before the first round."""
        self.set_up.put_back()
        with quiet_peft():
            self.model.save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)


def context_length(config: Any, first: int = 0) -> float:
    """Return how many tokens a model has positions for, the first of them ``first``."""
    # Past its original length, LongRoPE rescales all rows of a batch if one of them is longer: one
    # user would change the values of the others. So that length is the limit.
    config = getattr(config, "get_text_config", lambda: config)()
    stored = [getattr(config, name, None) for name in _POSITIONS]
    usable = next((count for count in stored if count), 0) - first
    room = usable if usable > 0 else math.inf  # XLNet states -1
    rope = getattr(config, "rope_parameters", None) or {}
    for part in (rope, *rope.values()):  # some models have one for each type of layer
        if isinstance(part, dict) and part.get("rope_type") == "longrope":
            room = min(room, part["original_max_position_embeddings"])
    return room


def prompt_room(room: float, response: int, most: int) -> int:
    """Return the default for the longest prompt: what a response leaves of a context, in tokens."""
    return int(max(1, min(most, room - response)))


LENGTH_ROWS = 512
"""Public rows whose lengths decide how many tokens a row keeps."""


def usual_length(lengths: list[int]) -> int:
    """Return the default for the longest text: that of 99 of 100 PUBLIC ones, to a multiple of 16.

    >>> usual_length([3] * 199 + [500]), usual_length([16]), usual_length([17])
    (16, 16, 32)
    """
    usual = sorted(lengths)[math.ceil(0.99 * (len(lengths) - 1))]
    return 16 * max(1, math.ceil(usual / 16))


_POSITIONS = ("max_position_embeddings", "n_positions", "max_seq_len")
"""How a config may call the length of a context; most of transformers' take the first name."""


def first_position(model: Any) -> int:
    """Return the position of a text's first token."""
    # RoBERTa and its relatives number positions behind that of padding: of 514, 512 are left.
    padding = [
        getattr(module, "padding_idx", None)
        for name, module in model.named_modules()
        if "position_embeddings" in name.split(".")  # or what an adapter wraps there
    ]
    return max((place + 1 for place in padding if place is not None), default=0)


@contextlib.contextmanager
def random_adapter(policy: CausalLMPolicy, by: float = 0.02) -> Iterator[None]:
    """Move the trained parameters by PUBLIC random numbers of this scale, inside the context."""
    before = {name: p.detach().clone() for name, p in policy.parameters.items()}
    generator = torch.Generator().manual_seed(0)
    try:
        with torch.no_grad():
            for p in policy.parameters.values():
                p.add_(by * torch.randn(p.shape, generator=generator).to(p))
        yield
    finally:
        with torch.no_grad():
            for name, p in policy.parameters.items():
                p.copy_(before[name])
