"""Tools and environments: what the policy gets to see, and that nobody gets at another's."""

import dataclasses
import itertools
import random
import sys
from typing import Any

import numpy as np
import pytest

from dprlhf import DprlhfError, recipe
from dprlhf.agents import Agent, AgentSampler, check_apart, check_fresh
from dprlhf.agents.agent import OwnRandomness, Trajectory, call
from dprlhf.agents.chat import answer_tokens, read_turn
from dprlhf.agents.rewards import environment_reward, environment_rewards
from dprlhf.data.users import Prompts
from dprlhf.policies.causal_lm import CausalLMPolicy
from dprlhf.policies.protocol import Sampling
from dprlhf.rewards import Scorer, load_reward
from dprlhf.rewards.scoring import rows_to_score, score_responses
from dprlhf.rollout import Responses, sample
from dprlhf.rollout.logprobs import token_logprobs
from helpers.agents import (
    LENGTH,
    LONGEST,
    Adding,
    Guessing,
    add,
    asked,
    draw,
    fail,
    policy_of,
    prompts_of,
    trajectory,
    written,
)
from helpers.marks import slow
from helpers.policies import off_start
from helpers.rounds import flat_parameters, set_parameters


def with_agent(*tools: Any, environment: Any = None, most: int | None = None) -> CausalLMPolicy:
    policy = policy_of()
    AgentSampler(Agent(tools, environment, most)).attach(policy)
    return policy


USERS = ["2 and 1?", "two and two, please?", "0 1", "what?", "1 and 2 and so on and on"]


@pytest.fixture(scope="module")
def calculated() -> Responses:
    return draw(with_agent(add, fail), prompts_of(USERS))


def rows_with_tools(responses: Responses) -> list[int]:
    assert responses.completions is not None
    return [r for r, c in enumerate(responses.completions) if any(m["role"] == "tool" for m in c)]


def test_the_policy_calls_tools_and_their_answers_are_no_tokens_of_its_own(calculated):
    policy, rows = policy_of(), rows_with_tools(calculated)
    assert len(rows) >= 5
    for row in rows:
        messages = calculated.completions[row]
        own, real = calculated.policy_mask[row].bool(), calculated.response_mask[row].bool()
        tokens = calculated.tokens[row, -LENGTH:]
        said = [m["content"] for m in messages if m["role"] == "tool"]
        answered = policy.tokenizer.decode(tokens[real & ~own])
        assert answered.replace("<eos>a", "<eos>") == "".join(f"t{text}<eos>" for text in said)
        called = [made["function"] for m in messages[:-1] for made in m.get("tool_calls", [])]
        assert len(called) == len(said)
        for made, answer in zip(called, said, strict=True):
            if made["name"] == "add":
                assert answer == str(made["arguments"]["a"] + made["arguments"]["b"])
            shown = written(made["name"], **made["arguments"])
            assert shown in policy.tokenizer.decode(tokens[own])


def calls_of(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [made["function"] for m in messages for made in m.get("tool_calls", [])]


def test_failing_and_missing_tools_answer_with_their_error() -> None:
    def leave() -> None:
        sys.exit(3)

    tools = {"fail": fail, "leave": leave, "half": lambda: "a\ud83d"}
    trajectory = Trajectory([], [], tools, None, OwnRandomness(1))
    for name, private, answer in [
        ("fail", False, "{'error': 'this tool is broken'}"),
        ("nothing", False, "{'error': 'Tool nothing not found.'}"),
        ("leave", True, "{'error': '3'}"),
        ("half", False, "a?"),
    ]:
        made = {"name": name, "arguments": {}}
        said = call(trajectory, made, private=private)
        assert said == {"role": "tool", "name": name, "content": answer}
    with pytest.raises(SystemExit):
        call(trajectory, {"name": "leave", "arguments": {}}, private=False)


@pytest.mark.parametrize(
    ("chosen", "base_policy"),
    [([0], "on-policy"), ([3, 1], "on-policy"), slow([4, 3, 2, 1], "reference")],
)
def test_trajectories_do_not_depend_on_who_else_is_there(chosen, base_policy):
    policy = with_agent(add, fail)
    changes = {"base_policy": base_policy, "responses": 4}
    everyone = draw(policy, prompts_of(USERS), **changes)
    some = draw(policy, prompts_of(USERS).take(chosen), **changes)
    for place, number in enumerate(chosen):
        for response in range(4):
            a, b = 4 * number + response, 4 * place + response
            assert trajectory(everyone, a) == trajectory(some, b)
    assert len(rows_with_tools(everyone)) > 4


def test_a_trajectory_ends_after_the_last_iteration() -> None:
    for most in (1, 2):
        responses = draw(with_agent(add, fail, most=most), prompts_of(USERS))
        turns = [sum(m["role"] == "assistant" for m in c) for c in responses.completions]
        assert max(turns) == most + 1


def test_what_does_not_fit_is_left_out() -> None:
    responses = draw(with_agent(add, fail), prompts_of(USERS), max_new_tokens=6)
    assert responses.completions is not None
    assert int(responses.response_mask.sum(1).max()) <= 6
    own = responses.policy_mask.sum(1)
    assert int(own.min()) >= 1
    last = responses.response_mask.sum(1) - 1
    assert bool((responses.policy_mask[range(len(last)), last] == 1).all())


def test_each_trajectory_has_its_own_environment_and_draws() -> None:
    policy = with_agent(environment=Guessing)
    prompts = prompts_of(USERS, level=["a", "b", "c", "d", "e"])
    random.seed(5)
    before = random.getstate()
    responses = draw(policy, prompts, responses=8)
    assert random.getstate() == before
    environments = responses.extra["environments"]
    assert len({id(one) for one in environments}) == len(environments) == 40
    assert len({one.number for one in environments}) == 4
    assert responses.asked[8][0]["content"] == "two and two, please? (b)"
    assert responses.completions is not None
    for one, messages in zip(environments, responses.completions, strict=True):
        answered = [m["content"] for m in messages if m["role"] == "tool"]
        guesses = [c["arguments"]["number"] for c in calls_of(messages) if c["name"] == "guess"]
        assert one.guesses == guesses[: len(one.guesses)]
        assert answered.count("right") <= one.guesses.count(one.number)
    random.seed(6)  # nothing is drawn from the generators that all share
    again = draw(policy, prompts.take([3, 1]), responses=8)
    assert [e.number for e in again.extra["environments"]] == [
        e.number for e in environments[24:32] + environments[8:16]
    ]


def pool(size: int, kind: Any = Guessing) -> Any:
    """A factory that hands out the same few environments in turn."""
    turn = itertools.cycle([kind() for _ in range(size)])
    return lambda: next(turn)


def test_an_environment_for_two_trajectories_is_refused_on_public_prompts() -> None:
    for size in (1, 3):
        with pytest.raises(DprlhfError, match="same environment twice"):
            draw(with_agent(environment=pool(size)), prompts_of(USERS), private=False)
    policy = with_agent(environment=pool(20))
    draw(policy, prompts_of(USERS), private=False)  # 15, after the first: the next call sees one
    with pytest.raises(DprlhfError, match="same environment twice"):
        draw(policy, prompts_of(USERS), private=False)


class Bare:
    """An environment of which no weak reference can be made."""

    __slots__ = ("seen",)

    def reset(self, **row: Any) -> str:
        """Tell what an earlier trajectory was asked."""
        told = getattr(self, "seen", "")
        self.seen = row["prompt"][0]["content"]
        return f" {told}"

    def guess(self, number: int) -> str:
        """Guess the number.

        Args:
            number: The guess.
        """
        return "no"


@pytest.mark.parametrize("kind", [Guessing, Bare])
def test_one_that_comes_again_fails_its_second_trajectory_and_is_not_reset(kind: Any) -> None:
    policy = with_agent(environment=pool(20, kind))
    first, second = (draw(policy, prompts_of(USERS)) for _ in range(2))
    assert not first.failed.any()
    assert second.failed.tolist() == [number >= 4 for number in range(15)]
    assert second.extra["environments"][4:] == [None] * 11
    policy.sampler.agent.in_rounds = True  # how many there have been depends on users now
    public = draw(policy, prompts_of(USERS), private=False)
    assert public.failed.all()
    new = draw(with_agent(environment=kind), prompts_of(USERS))
    assert not new.failed.any()


def test_a_pool_as_large_as_two_average_rounds_is_found_before_any_is_used() -> None:
    for size, trajectories in ((31, 15.5), (1000, 10**6)):
        with pytest.raises(DprlhfError, match="same environment twice"):
            check_fresh(Agent([], pool(size)), trajectories)
        check_fresh(Agent([], pool(size + 1)), trajectories)
    named = {"good": Guessing, "bad": pool(4)}
    with pytest.raises(DprlhfError, match="same environment twice"):
        check_fresh(Agent([], named), 2)
    check_fresh(Agent([add]), 15)


def played(completions: list[Any], environments: list[Guessing]) -> list[float]:
    return [float(len(one.guesses)) for one in environments]


class Fragile(Guessing):
    def reset(self, prompt: Any, **columns: Any) -> str:
        if "please" in prompt[-1]["content"]:
            vars(self)["guess"] = None  # in place of the method
            raise ValueError("cannot play with " + prompt[-1]["content"])
        return super().reset(prompt, **columns)


def test_a_user_whose_environment_fails_is_alone_in_that() -> None:
    good = draw(with_agent(environment=Guessing), prompts_of(USERS))
    policy = with_agent(environment=Fragile)
    responses = draw(policy, prompts_of(USERS))
    assert responses.failed.tolist() == [u == 1 for u in responses.user]
    for row in np.flatnonzero(responses.user != 1).tolist():
        assert trajectory(good, row) == trajectory(responses, row)
    scores = score_responses(Scorer([played], 3.0), responses)
    assert scores.valid.tolist() == (~responses.failed).tolist()
    with pytest.raises(DprlhfError, match=r"public prompt, ValueError: cannot play"):
        draw(policy, prompts_of(USERS), private=False)


class Once(Guessing):
    """An environment that hands out its points once."""

    def __init__(self, points: float | None) -> None:
        super().__init__()
        self.points = points

    def get_reward(self) -> float:
        if self.points is None:
            raise ValueError("no points")
        given, self.points = self.points, 0.0
        return given


@pytest.mark.parametrize("named", [False, True])
def test_an_environment_is_not_asked_again_where_that_of_another_user_fails(named: bool) -> None:
    (by_name,) = environment_rewards(Once)
    loaded = load_reward(by_name if named else environment_reward)
    reward = dataclasses.replace(loaded, checked_rows=4)
    environments = [Once(1.0), Once(2.0), Once(None), Once(3.0)]
    found = Scorer([reward], 5.0).score(
        ["p"] * 4, ["x"] * 4, [[1]] * 4, {"environments": environments}, [0, 0, 1, 1], private=True
    )
    assert found.values.tolist() == [1.0, 2.0, 0.0, 0.0]
    assert found.valid.tolist() == [True, True, False, False]


class Cards(Guessing):
    """An environment that takes what it is given out of its row."""

    def reset(self, prompt: Any, cards: list[int]) -> str:
        prompt[0]["content"] = "."
        return f" {cards.pop(0)}"


def test_what_an_environment_takes_out_of_its_row_stays_in_the_other_trajectories() -> None:
    prompts = prompts_of(USERS[:2], cards=[[1, 2, 3], [4, 5, 6]])
    responses = draw(with_agent(environment=Cards), prompts)
    assert responses.failed is None or not responses.failed.any()
    assert [one[-1]["content"] for one in responses.asked] == [". 1"] * 3 + [". 4"] * 3
    assert prompts.columns["cards"] == [[1, 2, 3], [4, 5, 6]]
    assert prompts.prompts == prompts_of(USERS[:2]).prompts
    assert rows_to_score(responses).columns["cards"] == [[1, 2, 3]] * 3 + [[4, 5, 6]] * 3


class Crowded(Guessing):
    players = 0

    def reset(self, prompt: Any, **columns: Any) -> str:
        Crowded.players += 1
        return f"{super().reset(prompt, **columns)} player {Crowded.players}"


def counted() -> Any:
    calls: list[int] = []

    def add(a: int, b: int) -> int:
        """Add two numbers.

        Args:
            a: The first number.
            b: The second number.
        """
        calls.append(a)
        return len(calls)

    return add


def checked(policy: CausalLMPolicy) -> None:
    spec = recipe.Rollout(responses=4, max_new_tokens=LENGTH)
    check_apart(policy, spec, prompts_of(USERS), LONGEST)


@pytest.mark.slow
def test_tools_and_environments_that_keep_something_are_refused() -> None:
    with pytest.raises(DprlhfError, match="keeps something from call to call"):
        checked(with_agent(counted()))
    with pytest.raises(DprlhfError, match="keeps something from call to call"):
        checked(with_agent(environment=Crowded))


def test_turns_are_read_as_messages() -> None:
    policy = with_agent(add)

    def read(text: str) -> dict[str, Any]:
        return read_turn(policy, [], policy.tokenizer(text)["input_ids"], [add])

    assert read("Well.<eos>") == {"role": "assistant", "content": "Well."}
    both = read(f"So {written('add', a=1, b=2)}{written('nothing')}")
    assert both["content"] == "So"
    assert [c["function"]["name"] for c in both["tool_calls"]] == ["add", "nothing"]
    assert both["tool_calls"][0]["function"]["arguments"] == {"a": 1, "b": 2}
    for broken in ("<tool_call>{</tool_call>", "<tool_call>[1]</tool_call>", '<tool_call>{"a": 1}'):
        assert "tool_calls" not in read(broken)
    assert read_turn(policy, [], [], [add])["content"] == ""
    half = read('<tool_call>{"name": "\\ud83d", "arguments": {"a": ["\\ud83d"]}}</tool_call>')
    assert half["tool_calls"][0]["function"] == {"name": "?", "arguments": {"a": ["?"]}}


def test_answers_continue_the_conversation_as_the_template_has_it() -> None:
    policy = with_agent(add)
    answers = [{"role": "tool", "name": "add", "content": text} for text in ("3", "4")]
    assert policy.tokenizer.decode(answer_tokens(policy, answers)) == "t3<eos>t4<eos>a"


def test_a_template_that_shows_no_tools_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = policy_of()
    plain = "{% for m in messages %}{{ m.content }}<eos>{% endfor %}"
    monkeypatch.setattr(policy.tokenizer, "chat_template", plain)
    with pytest.raises(DprlhfError, match="leaves out tools and tool calls"):
        AgentSampler(Agent([add])).attach(policy)


def test_the_tokens_of_the_tools_are_those_of_the_largest_set() -> None:
    policy = policy_of()
    tokens = [AgentSampler(Agent([add, *more])).attach(policy) for more in ((), (fail,))]
    assert tokens[0] < tokens[1] == len(policy.render(asked("?"), add_generation_prompt=True))
    kinds = {"one": Adding, "other": Guessing}
    alone = [AgentSampler(Agent([], kind)).attach(policy) for kind in kinds.values()]
    assert AgentSampler(Agent([], kinds)).attach(policy) == max(alone)


@pytest.mark.parametrize("environment", [None, Guessing])
def test_a_prompt_that_is_no_conversation_fails_alone(environment: Any) -> None:
    """A file may mix texts and conversations: whoever has a text must not end a secret round."""
    policy = with_agent(*([] if environment else [add]), environment=environment)
    prompts = prompts_of(USERS)
    mixed = dataclasses.replace(prompts, prompts=["text", *prompts.prompts[1:]])
    whole, responses = draw(policy, prompts), draw(policy, mixed)
    assert responses.failed.tolist() == [user == 0 for user in responses.user]
    for row in np.flatnonzero(responses.user > 0).tolist():
        assert trajectory(responses, row) == trajectory(whole, row)
    with pytest.raises(DprlhfError, match="plain text"):
        draw(policy, mixed, private=False)


def test_each_token_of_each_turn_is_the_one_that_is_kept() -> None:
    """With top-k 1, log π̃ is 0 exactly where sampling and update see the same tokens before."""
    policy = policy_of()
    AgentSampler(Agent((add, fail), None, None)).attach(policy)
    texts = ["2 and 1?", "two and two, please?", "0 1", "what?"]
    prompts = Prompts([asked(t) for t in texts], np.arange(4), np.zeros(4, dtype=np.int64), {})
    spec = recipe.Rollout(responses=2, max_new_tokens=64, batch_size=8)
    with policy.sampled_with(Sampling(top_k=1)):
        responses = sample(
            policy, prompts, spec, key=bytes(32), context=("turns",), max_prompt_tokens=40
        )
        found = token_logprobs(policy, responses, 8)
    own = responses.policy_mask.numpy().astype(bool)
    later = own & (np.cumsum(~own & responses.response_mask.numpy().astype(bool), 1) > 0)
    assert later.sum() > 5  # tokens behind a tool's answer
    assert (found == 0).all()
    before = flat_parameters(policy)
    off_start(policy, 10.0, seed=2)  # the negative control: another policy
    with policy.sampled_with(Sampling(top_k=1)):
        assert (token_logprobs(policy, responses, 8)[later] < -0.01).any()
    set_parameters(policy, before)  # other tests share it
