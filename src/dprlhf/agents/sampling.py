"""Sampling with tools: turns of the policy, answers of the tools, until no more is called.

The promises of :mod:`dprlhf.rollout` hold for every turn, in micro-batches whose shapes are public:
place p of a response has the draw p of the row's own stream, in whichever turn. A turn's context is
read anew, at the trajectory's own place and in one public width. **How many turns there are depends
on the users**, as the number of decoding steps does: the time that a private round takes is shown
nowhere (``docs/privacy.md``).
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from dprlhf import recipe
from dprlhf.agents.agent import (
    ENVIRONMENT,
    Agent,
    EnvironmentFactories,
    OwnRandomness,
    SharedEnvironmentError,
    Trajectory,
    begin,
    call,
)
from dprlhf.agents.chat import Tool, answer_tokens, read_turn, showing
from dprlhf.data.columns import MOST_BYTES
from dprlhf.data.messages import text_of
from dprlhf.data.users import Prompts
from dprlhf.errors import EXITS, DprlhfError, one_line
from dprlhf.policies.causal_lm import CausalLMPolicy
from dprlhf.privacy.randomness import uint64_stream
from dprlhf.recipe import IN_MEMORY
from dprlhf.rewards.isolation import SecretSink, captured, kept_process_state
from dprlhf.rewards.loading import load_function
from dprlhf.rollout.batch import Responses, Tick, prompt_width, responses_of, token_rows
from dprlhf.rollout.sampling import draws_of, generate_rows, left_of, text_of_tokens

_NOTHING = {"role": "assistant", "content": ""}


def to_one_line_error(problem: BaseException) -> BaseException:
    """Return an error on public prompts as one line; an exit and a clear error stay as they are."""
    if isinstance(problem, (*EXITS, DprlhfError)):
        return problem
    text = one_line(problem)
    return DprlhfError(f"rollout.agent: on a public prompt, {type(problem).__name__}: {text}")


class AgentSampler:
    """Samples trajectories with an :class:`Agent`, keeping the promises of ``rollout.sample``."""

    def __init__(self, agent: Agent) -> None:
        self.agent = agent
        self.sink: SecretSink | None = None

    def attach(self, policy: CausalLMPolicy) -> int:
        """Let a policy act, with the tools in its template; return the tokens that they take."""
        policy.sampler = self
        return self.agent.attach(policy)

    def __call__(
        self,
        policy: CausalLMPolicy,
        prompts: Prompts,
        spec: recipe.Rollout,
        *,
        key: bytes,
        context: tuple[str | int, ...],
        max_prompt_tokens: int,
        tick: Tick | None,
        private: bool,
    ) -> Responses:
        """Sample ``spec.responses`` trajectories for each prompt."""
        k, length = spec.responses, spec.max_new_tokens
        run = _Turns(policy, spec, max_prompt_tokens, self.agent, self.sink, private)
        rows = run.begun(prompts, key, context)
        draws = draws_of(prompts, key, context, k, length)
        from_base = np.arange(k) < (k // 2 if spec.base_policy == "reference" else 0)
        for base in np.unique(from_base):
            numbers = np.flatnonzero(from_base == base)
            chosen = (k * np.arange(len(prompts))[:, None] + numbers).ravel()
            with policy.base() if base else contextlib.nullcontext():
                run.all_turns([rows[r] for r in chosen], prompts, draws[:, numbers], tick)
        # A trajectory that failed has one token, an end token if there is any.
        end = policy.end_tokens[0] if policy.end_tokens else policy.tokenizer.pad_token_id
        for row in rows:
            if row.failed or not row.tokens:
                row.tokens, row.own = [end], [1]
        given = [row.prompt[-max_prompt_tokens:] or [end] for row in rows]
        written = [row.tokens[:length] for row in rows]
        own = [row.own[:length] for row in rows]
        values = {
            "environments": [row.environment for row in rows],
            "turn_rewards": [row.turn_rewards or None for row in rows],
        }
        return responses_of(
            prompts,
            k,
            given,
            written,
            width=prompt_width(prompts, given, max_prompt_tokens),
            length=length,
            padding=policy.tokenizer.pad_token_id,
            from_base=np.tile(from_base, len(prompts)),
            texts=[text_of_tokens(policy, response) for response in written],
            # An environment's first observation may make each row's prompt another.
            num_generations=1 if self.agent.factories else k,
            tool_mask=token_rows([[]] * len(rows), own, width=0, length=length, padding=0)[0],
            completions=[[_NOTHING] if row.failed else row.messages or [_NOTHING] for row in rows]
            or None,
            asked=[row.asked for row in rows] or None,
            extra={name: values[name] for name in self.agent.columns},
            failed=np.array([row.failed for row in rows], dtype=bool),
        )


@dataclass
class _Turns:
    """The turns of some trajectories."""

    policy: CausalLMPolicy
    spec: recipe.Rollout
    longest: int  # prompt in tokens
    agent: Agent
    sink: SecretSink | None
    private: bool

    def begun(
        self, prompts: Prompts, key: bytes, context: tuple[str | int, ...]
    ) -> list[Trajectory]:
        """Return the trajectories before their first turn, each with an environment of its own."""
        k, rows = self.spec.responses, []
        with self._quiet():
            for p, asked in enumerate(prompts.prompts):
                owner = int(prompts.users[p]), int(prompts.slots[p])
                seeds = uint64_stream(key, *context, *owner, "tools", count=k) >> np.uint64(1)
                columns: dict[str, Any] = {"prompt": asked} if prompts.in_rows else {}
                columns |= {name: values[p] for name, values in prompts.columns.items()}
                if self.agent.several and not self.private:
                    # Public prompts need not name one: they try the environments in turn.
                    names = list(self.agent.factories)
                    columns.setdefault(ENVIRONMENT, names[owner[0] % len(names)])
                rows += [self._begun(asked, columns, OwnRandomness(int(s))) for s in seeds]
        return rows

    def _begun(self, asked: Any, columns: dict[str, Any], own: OwnRandomness) -> Trajectory:
        """Return a trajectory before its first turn; a private one that cannot begin has failed."""
        # So has one whose environment another trajectory has had: nothing of it is read.
        environment, failed, name = None, False, columns.get(ENVIRONMENT)
        tools: dict[str, Tool] = {}
        if self.agent.several:  # the name is not for reset, as in TRL
            columns = {key: value for key, value in columns.items() if key != ENVIRONMENT}
        try:
            if isinstance(asked, str):
                raise DprlhfError(
                    "rollout.agent: tools are called in conversations, and a prompt is plain text:"
                    ' give prompts as lists of messages, [{"role": "user", "content": …}]'
                )
            with own():
                environment = self.agent.environment(name)
            if environment is not None:
                # It may change what it gets, which the other trajectories of the prompt and the
                # rewards get, too. One copy, as a column may be the prompt itself.
                asked, columns = copy.deepcopy((asked, columns))
                asked = begin(environment, own, asked, columns)
            if len(text_of(asked)) > MOST_BYTES:
                raise DprlhfError("rollout.agent: a conversation is longer than a row may be")
            tools = self.agent.tools_of(environment)
            with showing(self.policy, list(tools.values())):
                whole = self.policy.encode([asked], self.longest + 1)[0]
            ids = whole[-self.longest :]
            if len(whole) > self.longest:
                asked = left_of(self.policy, asked, ids)
        except BaseException as problem:
            shared = isinstance(problem, SharedEnvironmentError) and self.agent.in_rounds
            if not (self.private or shared):
                raise to_one_line_error(problem) from None
            ids, failed = self.policy.encode([""], self.longest)[0], True
        return Trajectory(asked, ids, tools, environment, own, failed=failed)

    def all_turns(
        self,
        rows: Sequence[Trajectory],
        prompts: Prompts,
        draws: torch.Tensor,  # Their uniform numbers, [prompts, responses, max_new_tokens]
        tick: Tick | None,
    ) -> None:
        """Let trajectories act until each has ended."""
        # Trajectories that failed take part in the first turn: shapes must not depend on them.
        live, iterations = list(range(len(rows))), 0
        while live:
            before = {n: rows[n].context for n in live}
            first = not iterations
            for n, tokens in self._sampled(rows, live, prompts, draws, first=first):
                rows[n].add(tokens, own=True)
            if tick is not None:
                tick(len(rows) if first else 0)
            most = self.agent.most_iterations
            last = most is not None and iterations >= most
            with self._quiet():
                live = [n for n in live if self._answered(rows[n], before[n], last=last)]
            iterations += 1

    def _sampled(
        self,
        rows: Sequence[Trajectory],
        live: Sequence[int],
        prompts: Prompts,
        draws: torch.Tensor,
        *,
        first: bool,
    ) -> Iterator[tuple[int, list[int]]]:
        """Yield the number of each live trajectory, and the tokens of its next turn."""
        _, k, response = draws.shape
        alike = first and not self.agent.factories
        each = k if alike else 1  # responses that share their prompt's prefill
        longest = self.longest if first else self.longest + response
        starts = np.array(live, dtype=np.int64)[::each]
        number = np.full(len(rows) + 1, -1)  # the last one for places without a row
        number[starts] = np.arange(len(starts))
        places = prompts.places[:, None]
        places = np.where(places < 0, -1, k * places + np.arange(0, k, each)).ravel()
        contexts = [rows[n].context for n in starts.tolist()]
        room = [response - len(rows[n].tokens) for n in starts.tolist()]
        left = torch.full((len(starts) * each, response), 0.5, dtype=torch.float64)
        numbers = (starts[:, None] + np.arange(each)).ravel()
        for place, n in enumerate(numbers.tolist()):
            done = len(rows[n].tokens)
            left[place, : response - done] = draws[n // k, n % k, done:]
        for positions, turns in generate_rows(
            self.policy,
            contexts,
            left.view(len(starts), each, response),
            self.spec,
            places=number[places],
            width=prompt_width(prompts, contexts, longest),
            room=room,
        ):
            for position, turn in zip(positions.tolist(), turns, strict=True):
                if position >= 0:
                    yield int(numbers[position]), turn

    def _answered(self, row: Trajectory, before: list[int], *, last: bool) -> bool:
        """Read a turn, call its tools and append their answers; return whether a turn follows."""
        if row.failed:
            return False
        try:
            start, tools = len(before) - len(row.prompt), list(row.tools.values())
            turn = read_turn(self.policy, before, row.tokens[start:], tools)
            row.messages.append(turn)
            calls = [] if last else turn.get("tool_calls") or []
            answers = [call(row, made["function"], private=self.private) for made in calls]
            row.end_turn()
            # The longest is never tokenized: there is no room for it, as below.
            if not answers or sum(len(answer["content"]) for answer in answers) > MOST_BYTES:
                return False
            with showing(self.policy, tools):
                tokens = answer_tokens(self.policy, answers)
        except BaseException as problem:
            if not self.private:
                raise to_one_line_error(problem) from None
            row.failed = True
            return False
        if len(row.tokens) + len(tokens) >= self.spec.max_new_tokens:
            return False  # no room for an answer and a turn after it: as in TRL, it is left out
        row.messages += answers
        row.add(tokens, own=False)
        return True

    @contextlib.contextmanager
    def _quiet(self) -> Iterator[None]:
        """Keep what tools print about private trajectories away from the terminal."""
        with captured(self.sink) if self.private else kept_process_state():
            yield


def load_sampler(
    spec: recipe.Agent,
    *,
    tools: Sequence[Tool] | None = None,
    environment_factory: EnvironmentFactories | None = None,
) -> AgentSampler:
    """Return what samples the trajectories of a recipe."""
    _check_passed("tools", tools, spec.tools)
    named = spec.environment
    several = list(named.values()) if isinstance(named, dict) else [named]
    _check_passed("environment_factory", environment_factory, several)
    given = list(tools) if tools is not None else [_named(name, "tool") for name in spec.tools]
    factory = environment_factory
    if factory is None and named is not None:
        factory = (
            {name: _named(source, "environment") for name, source in named.items()}
            if isinstance(named, dict)
            else _named(named, "environment")
        )
    return AgentSampler(Agent(given, factory, spec.max_tool_calling_iterations))


def _check_passed(name: str, passed: Any, of_recipe: Sequence[str | None]) -> None:
    """Refuse an object of the program where the recipe names what to load."""
    if passed is not None and IN_MEMORY not in of_recipe:
        raise DprlhfError(f"{name}: this run has what its recipe names: pass none")


def _named(source: str, kind: str) -> Any:
    if source == IN_MEMORY:
        raise DprlhfError(f"this run's {kind} was given in Python: give it again to resume()")
    function = load_function(source, kind)
    if not callable(function):
        raise DprlhfError(f"{kind} {source!r} is a {type(function).__name__}, not a callable")
    return function
