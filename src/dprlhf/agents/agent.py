"""An agent: its tools, and one fresh environment for each trajectory."""

from __future__ import annotations

import contextlib
import inspect
import random
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from dprlhf.agents.chat import Tool, check_chat
from dprlhf.data.columns import listed_names
from dprlhf.data.spelling import storable
from dprlhf.errors import EXITS, DprlhfError, one_line
from dprlhf.policies.causal_lm import CausalLMPolicy
from dprlhf.rewards.reward import wait_for

EnvironmentFactory = Callable[[], Any]
"""Makes an environment with a method ``reset``; TRL's ``environment_factory``."""

EnvironmentFactories = EnvironmentFactory | Mapping[str, EnvironmentFactory]
"""One factory for all rows, or factories by the name in each row's column ``environment``."""

ENVIRONMENT = "environment"
"""The column that names a row's environment where there are several, as in TRL."""

_OWN = ("reset", "get_reward", "get_turn_reward")


class OwnRandomness:
    """The global generators of Python, NumPy and PyTorch, in states that are one trajectory's own.

    A game that draws from ``random`` would otherwise take its numbers from a stream that all users
    share, and each user's draws would shift those of the next. The seed is from the run's key.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._states: tuple[Any, Any, list[torch.Tensor]] | None = None

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        """Put the trajectory's states in for the context, and those from before back after it."""
        outside = self._read()
        if self._states is None:
            random.seed(self._seed)
            np.random.seed(self._seed % 2**32)
            torch.manual_seed(self._seed)  # those of all GPUs, too
        else:
            self._write(self._states)
        try:
            yield
        finally:
            self._states = self._read()
            self._write(outside)

    @staticmethod
    def _read() -> tuple[Any, Any, list[torch.Tensor]]:
        used = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        on_gpu = torch.cuda.get_rng_state_all() if used else []
        drawn = torch.random.get_rng_state()
        return random.getstate(), np.random.get_state(), [drawn, *on_gpu]

    @staticmethod
    def _write(states: tuple[Any, Any, list[torch.Tensor]]) -> None:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.random.set_rng_state(states[2][0])
        if states[2][1:]:
            torch.cuda.set_rng_state_all(states[2][1:])


@dataclass(repr=False, eq=False)
class Trajectory:
    """One response in the making: its turns so far, and what only this trajectory has."""

    asked: Any  # the conversation that the policy answers
    prompt: list[int]
    tools: Mapping[str, Tool]
    environment: Any
    own_randomness: OwnRandomness
    tokens: list[int] = field(default_factory=list)
    own: list[int] = field(default_factory=list)  # 1 for each token that the policy wrote, else 0
    messages: list[dict[str, Any]] = field(default_factory=list)
    turn_rewards: list[Any] = field(default_factory=list)
    failed: bool = False

    @property
    def context(self) -> list[int]:
        """All tokens that stand before the next turn."""
        return self.prompt + self.tokens

    def end_turn(self) -> None:
        """Ask the environment for the score of a turn whose tools have been called."""
        if not callable(getattr(self.environment, "get_turn_reward", None)):
            return
        with self.own_randomness():
            score = self.environment.get_turn_reward()
            self.turn_rewards.append(wait_for(score) if inspect.isawaitable(score) else score)

    def add(self, tokens: Sequence[int], *, own: bool) -> None:
        """Append tokens that the policy wrote (``own``) or that it got as an answer."""
        self.tokens += tokens
        self.own += [int(own)] * len(tokens)


class SharedEnvironmentError(DprlhfError):
    """A factory returned an environment again: two trajectories would share its state."""


class _Returned:
    """The environments that factories have returned so far."""

    def __init__(self) -> None:
        # One that nobody holds any more cannot come again, so weak references tell all that can.
        # What has no weak references (__slots__) is held.
        self._alive: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        self._held: dict[int, Any] = {}

    def is_new(self, environment: Any) -> bool:
        """Note an environment, and return whether it has not come before."""
        number = id(environment)
        if number in self._held or self._alive.get(number) is environment:
            return False
        try:
            self._alive[number] = environment
        except TypeError:
            self._held[number] = environment
        return True


class Agent:
    """What a policy acts with: tools, and a factory of environments.

    Tools and environments run outside the model, in this process. One that keeps something from
    call to call (a counter, a cache, a file), or asks a service that does, lets one user change
    what another gets; then ε is wrong, and nothing here can see it in general. A fresh environment
    for each trajectory and generators of its own close the common ways.

    Args:
        environment_factory: Makes an environment; its public methods are tools, but for ``reset``,
            ``get_reward`` and ``get_turn_reward``. A dictionary has a factory for each name that
            the column ``environment`` may hold, and the tools of a trajectory are those of its own.
        max_tool_calling_iterations: Most turns in which tools are called; None for any number.

    Attributes:
        factories: The factories by name; a single one has the name None.
        shown: The tools of all environments, which prompts show outside of a trajectory, such as
            where those are counted that are too long.
        in_rounds: Whether rounds may have begun. How many environments there have been depends on
            the users from then on, so one that comes twice may not end the run, not even on public
            prompts.
    """

    def __init__(
        self,
        tools: Sequence[Tool] = (),
        environment_factory: EnvironmentFactories | None = None,
        max_tool_calling_iterations: int | None = None,
    ) -> None:
        self.tools = list(tools)
        self.several = isinstance(environment_factory, Mapping)
        self.factories = factories_by_name(environment_factory)
        if self.several and not self.factories:
            raise DprlhfError("rollout.agent.environment: give an environment for each name")
        self.most_iterations = max_tool_calling_iterations
        self.in_rounds = False
        self._returned = _Returned()
        self._first = [self._made(name) for name in self.factories]
        for first in self._first:
            if not callable(getattr(first, "reset", None)):
                raise DprlhfError(
                    f"rollout.agent.environment: {type(first).__name__} has no method reset,"
                    " which begins a trajectory"
                )
        self._shown = [[*self.tools, *_methods(one)] for one in self._first or [None]]
        for shown in self._shown:
            _check_tools(shown)
        self.shown = list({tool.__name__: tool for one in self._shown for tool in one}.values())

    def attach(self, policy: CausalLMPolicy) -> int:
        """Let the chat template show the tools, check that it can, and return their tokens."""
        tokens = []
        for shown in self._shown:
            policy.tools = shown
            tokens.append(check_chat(policy))
        policy.tools = self.shown
        return max(tokens)

    def check_columns(self, names: Sequence[str]) -> None:
        """Check that rows name their environment where there are several."""
        if self.several and ENVIRONMENT not in names:
            raise DprlhfError(
                f"rollout.agent.environment: with environments by name ({self._names}), each row"
                f" needs its own in the column {ENVIRONMENT!r}; the columns are"
                f" {listed_names(names)}"
            )

    def environment(self, name: Any = None) -> Any:
        """Return a new environment, of this name where there are several; None without any."""
        if not self.factories:
            return None
        if not self.several:
            return self._made(None)
        if name not in list(self.factories):  # which takes any value that a row may hold
            raise DprlhfError(
                f"the column {ENVIRONMENT!r} names no environment of rollout.agent.environment:"
                f" {name!r} is none of {self._names}"
            )
        return self._made(name)

    def _made(self, name: Any) -> Any:
        environment = self.factories[name]()
        if not self._returned.is_new(environment):
            raise SharedEnvironmentError(
                "rollout.agent.environment: the factory returned the same environment twice, so"
                " that one user would act in another's: it must make a new one at each call"
            )
        return environment

    @property
    def columns(self) -> list[str]:
        """Names of the values that rewards get from the environments."""
        by_turn = any(callable(getattr(one, "get_turn_reward", None)) for one in self._first)
        return ["environments"] * bool(self._first) + ["turn_rewards"] * by_turn

    @property
    def _names(self) -> str:
        return ", ".join(map(str, self.factories))

    def tools_of(self, environment: Any) -> dict[str, Tool]:
        """Return the tools of a trajectory by name."""
        return {tool.__name__: tool for tool in (*self.tools, *_methods(environment))}


def factories_by_name(factory: EnvironmentFactories | None) -> dict[Any, EnvironmentFactory]:
    """Return factories by name: a single one has the name None, and without one there is none."""
    if factory is None:
        return {}
    factories: dict[Any, Any] = dict(factory) if isinstance(factory, Mapping) else {None: factory}
    for make in factories.values():
        if not callable(make):
            raise DprlhfError(
                "environment_factory: give a class, a function that makes an environment, or a"
                f" dictionary of these, not a {type(make).__name__}"
            )
    return factories


def begin(
    environment: Any, own_randomness: OwnRandomness, prompt: Any, row: Mapping[str, Any]
) -> Any:
    """Reset an environment and return the conversation with its first observation appended."""
    takes = inspect.signature(environment.reset).parameters.values()
    named = {p.name for p in takes}
    every = any(p.kind is p.VAR_KEYWORD for p in takes)
    with own_randomness():
        seen = environment.reset(**{k: v for k, v in row.items() if every or k in named})
        seen = wait_for(seen) if inspect.isawaitable(seen) else seen
    if seen is None:
        return prompt
    last = prompt[-1]
    return [*prompt[:-1], {**last, "content": storable(_joined(last.get("content"), seen))}]


def _joined(content: Any, seen: Any) -> str | list[dict[str, Any]]:
    """Return what a message says with an observation behind it: parts if either is a list."""
    if isinstance(content, list) or isinstance(seen, list):
        return [*_parts(content), *_parts(seen)]
    return f"{'' if content is None else content}{seen}"


def _parts(content: Any) -> list[dict[str, Any]]:
    """Return a text, or a list of parts, as parts of its own."""
    if not isinstance(content, list):
        return [{"type": "text", "text": "" if content is None else str(content)}]
    for part in content:
        a_text = isinstance(part, Mapping) and part.get("type") == "text"
        if not a_text or not isinstance(part.get("text"), str):
            raise DprlhfError(
                "rollout.agent.environment: a message, or what reset returned, has a part that is"
                " no text, and the models here read text alone: give a text, or a list of parts"
                " {'type': 'text', 'text': …}"
            )
    return [dict(part) for part in content]


def call(trajectory: Trajectory, made: Mapping[str, Any], *, private: bool) -> dict[str, Any]:
    """Call a tool and return its answer as a message ``{"role": "tool", "name", "content"}``.

    An exception is an answer, too: ``{'error': …}`` with its text, as in TRL; where ``private``
    also a tool that exits, so that no user's call can end the run. Half a character becomes "?".
    """
    name = made["name"]
    try:
        if name not in trajectory.tools:
            raise ValueError(f"Tool {name} not found.")
        with trajectory.own_randomness():
            result = trajectory.tools[name](**made["arguments"])
            result = wait_for(result) if inspect.isawaitable(result) else result
        content = storable(str(result))
    except BaseException as problem:
        if isinstance(problem, EXITS) and not private:
            raise
        content = str({"error": _text_of(problem)})
    return {"role": "tool", "name": name, "content": content}


def _text_of(problem: BaseException) -> str:
    try:
        return str(problem)
    except Exception:
        return type(problem).__name__


def _methods(environment: Any) -> list[Tool]:
    """Return the public methods of an environment, as tools, in the order of their names."""
    if environment is None:
        return []
    functions = inspect.getmembers(type(environment), predicate=inspect.isfunction)
    return [
        getattr(environment, name)
        for name, _ in functions
        if name not in _OWN and not name.startswith("_")
    ]


def _check_tools(tools: Sequence[Tool]) -> None:
    from transformers.utils import get_json_schema

    names = [getattr(tool, "__name__", None) for tool in tools]
    for tool, name in zip(tools, names, strict=True):
        if name is None or names.count(name) > 1:
            raise DprlhfError(
                f"rollout.agent: the tool {name or tool!r} has no name of its own: give functions"
                " with different names"
            )
        try:
            get_json_schema(tool)
        except Exception as problem:
            raise DprlhfError(
                f"rollout.agent: the tool {name!r} cannot be shown to the model:"
                f" {one_line(problem)}"
            ) from None
