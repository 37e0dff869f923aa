"""The messages of a turn as tokens: tool calls in what the policy wrote, tool answers behind it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from dprlhf.data.spelling import storable
from dprlhf.errors import EXITS, DprlhfError
from dprlhf.policies.causal_lm import CausalLMPolicy
from dprlhf.rollout.sampling import text_of_tokens

Tool = Callable[..., Any]

PLAIN = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<tool_call>",  # not used: what is parsed starts with the response
    "fields": {
        "tool_calls": {
            "open": "<tool_call>",
            "close_pattern": r"</tool_call>\s*",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"close_pattern": r"\Z", "content": "text"},
    },
}
"""The response template for a tokenizer that has none: ``<tool_call>{"name": …, "arguments":
{…}}</tool_call>``, as Qwen and Hermes models write their calls."""

_MARKS = ("tool_a8f3", "answer_c4f9", "argument_d6e7")


@contextlib.contextmanager
def showing(policy: CausalLMPolicy, tools: Sequence[Tool]) -> Iterator[None]:
    """Let the chat template show these tools for the context: those of a trajectory."""
    outside, policy.tools = policy.tools, tools
    try:
        yield
    finally:
        policy.tools = outside


def read_turn(
    policy: CausalLMPolicy, before: Sequence[int], tokens: Sequence[int], tools: Sequence[Tool]
) -> dict[str, Any]:
    """Return what the policy wrote in a turn as a message, with its ``tool_calls``.

    A turn that cannot be read, such as a call that is no JSON, is plain text without calls.
    """
    from transformers.utils.chat_parsing import parse_response

    tokenizer = policy.tokenizer
    own = list(tokens[:-1] if tokens and tokens[-1] in policy.end_tokens else tokens)
    try:
        template = getattr(tokenizer, "response_template", None)
        text, start = tokenizer.decode(own if template is None else list(tokens)), ""
        if template is not None:
            start = tokenizer.decode(list(before))
        message = parse_response(text, template or PLAIN, prefix=start, tools=list(tools))
        message["content"] = message.get("content") or ""
        message["tool_calls"] = [_call(call) for call in message.get("tool_calls") or []]
    except EXITS:
        raise
    except BaseException:  # whatever the policy wrote must not end the run
        return {"role": "assistant", "content": text_of_tokens(policy, own)}
    if not message["tool_calls"]:
        del message["tool_calls"]
    return dict(message)


def _call(call: Any) -> dict[str, Any]:
    """Return a call as ``{"type": "function", "function": {"name", "arguments"}}``."""
    function = call.get("function", call)
    name, arguments = function["name"], function.get("arguments") or {}
    if not isinstance(name, str) or not isinstance(arguments, dict):
        raise ValueError("a call has a name and a mapping of arguments")
    # JSON can write half a character ("\\ud800"), which no template's text may hold.
    return {"type": "function", "function": storable({"name": name, "arguments": arguments})}


def answer_tokens(policy: CausalLMPolicy, answers: Sequence[dict[str, Any]]) -> list[int]:
    """Return the tokens of tool messages and of the next turn's start, as the template has them."""
    # Rendered behind a made-up conversation, which is cut off: what was sampled stays.
    call = {"type": "function", "function": {"name": answers[0]["name"], "arguments": {}}}
    before = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
    ]
    start = policy.render(before, add_generation_prompt=False)
    whole = policy.render([*before, *answers], add_generation_prompt=True)
    ends = sum(token in policy.end_tokens for token in start)
    places = [i for i, token in enumerate(whole) if token in policy.end_tokens]
    if ends and len(places) >= ends:  # templates may write an answered call otherwise than a last
        return whole[places[ends - 1] + 1 :]
    if ends or whole[: len(start)] != start:
        raise ValueError("the chat template writes the same turn otherwise when more follows")
    return whole[len(start) :]


def check_chat(policy: CausalLMPolicy) -> int:
    """Check that the template shows tools, calls and answers; return the tokens that tools take."""
    try:
        import transformers.utils.chat_parsing  # noqa: F401
    except ImportError:
        raise DprlhfError("rollout.agent: tools need transformers 5.15 or newer") from None
    tool, answer, argument = _MARKS
    call = {"type": "function", "function": {"name": tool, "arguments": {"x": argument}}}
    asked = [{"role": "user", "content": "?"}]
    turns: list[dict[str, Any]] = [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "name": tool, "content": answer},
    ]
    try:
        shown = policy.tokenizer.decode(policy.render([*asked, *turns]))
        start = policy.render(asked, add_generation_prompt=True)
        behind = policy.tokenizer.decode(answer_tokens(policy, turns[1:]))
    except Exception as error:
        raise DprlhfError(
            "rollout.agent: the chat template of the policy's tokenizer refuses a conversation"
            f" with a tool call ({type(error).__name__}): take a model that was tuned for tools"
        ) from None
    names = [getattr(tool, "__name__", "") for tool in policy.tools]
    written = policy.tokenizer.decode(start)
    lacking = [
        what
        for what, problem in {
            "tools": all(name in written for name in names),
            "tool calls": tool in shown and argument in shown,
            "tool answers": answer in shown and answer in behind,
        }.items()
        if not problem
    ]
    if lacking:
        raise DprlhfError(
            "rollout.agent: the chat template of the policy's tokenizer leaves out"
            f" {' and '.join(lacking)}: take a model that was tuned for tools"
        )
    return len(start)
