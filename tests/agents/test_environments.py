"""Several environments by name: whose tools a row sees, and who pays for a name that is wrong."""

from typing import Any

import numpy as np
import pytest

from dprlhf import DprlhfError, recipe
from dprlhf.agents import Agent, AgentSampler, check_apart, load_sampler
from dprlhf.agents.agent import OwnRandomness, begin
from dprlhf.policies.causal_lm import CausalLMPolicy
from dprlhf.rewards import Scorer
from dprlhf.rewards.scoring import score_responses
from dprlhf.rollout import Responses
from helpers.agents import LENGTH, LONGEST, TWO, Adding, draw, policy_of, prompts_of, trajectory

USERS = ["2 and 1?", "two and two, please?", "0 1", "what?", "1 and 2 and so on and on"]
NAMES = ["sums", "numbers", "sums", "numbers", "sums"]


def acting(environments: Any = None, *tools: Any) -> CausalLMPolicy:
    policy = policy_of()
    AgentSampler(Agent(tools, environments or TWO)).attach(policy)
    return policy


def shown(responses: Responses, row: int) -> str:
    prompt = responses.mask[row].bool()
    prompt[-LENGTH:] = False
    return policy_of().tokenizer.decode(responses.tokens[row][prompt])


def turns(completions: list[Any], environments: list[Any], **columns: Any) -> list[float]:
    assert all(environments), "failed trajectories are not scored"
    return [float(len(messages)) for messages in completions]


def test_each_row_acts_in_its_own_environment_with_its_tools_alone() -> None:
    policy = acting()
    assert [tool.__name__ for tool in policy.tools] == ["add", "guess"]
    prompts = prompts_of(USERS, environment=NAMES, seed=[1, 2, 3, 4, 5])
    responses = draw(policy, prompts)
    assert [tool.__name__ for tool in policy.tools] == ["add", "guess"]
    answers = set()
    for row, environment in enumerate(responses.extra["environments"]):
        name = NAMES[responses.user[row]]
        assert type(environment) is TWO[name]
        start = {"sums": "[add]", "numbers": "[guess]"}[name]
        assert shown(responses, row).startswith(start + "u" + USERS[responses.user[row]])
        if isinstance(environment, Adding):  # the name chooses, and is no column for reset
            assert set(environment.row) == {"prompt", "seed"}
        answers |= {
            (name, m["name"], "not found" in m["content"])
            for m in responses.completions[row]
            if m["role"] == "tool"
        }
    assert {("sums", "add", False), ("numbers", "guess", False)} <= answers
    assert {("sums", "guess", True), ("numbers", "add", True)} & answers
    assert not {("sums", "guess", False), ("numbers", "add", False)} & answers


@pytest.mark.slow
@pytest.mark.parametrize("wrong", ["nothing", None, ["sums"]], ids=["unknown", "none", "list"])
def test_a_user_with_an_unknown_environment_contributes_zero_and_nobody_else(wrong: Any) -> None:
    policy = acting()
    good = draw(policy, prompts_of(USERS, environment=NAMES))
    names = [wrong if user == 1 else name for user, name in enumerate(NAMES)]
    responses = draw(policy, prompts_of(USERS, environment=names))
    assert not good.failed.any()
    assert responses.failed.tolist() == [user == 1 for user in responses.user]
    before, after = (score_responses(Scorer([turns], 3.0), each) for each in (good, responses))
    assert after.valid.tolist() == [user != 1 for user in responses.user]
    for row in np.flatnonzero(responses.user != 1).tolist():
        assert trajectory(good, row) == trajectory(responses, row)
        assert before.values[row] == after.values[row]
    with pytest.raises(DprlhfError, match="names no environment"):
        draw(policy, prompts_of(USERS, environment=names), private=False)


def test_no_row_with_a_name_is_no_error_on_private_rows() -> None:
    responses = draw(acting(), prompts_of(USERS))
    assert responses.failed.all()


class Counted(Adding):
    """An environment that keeps a count of all trajectories."""

    count = 0

    def reset(self, **row: Any) -> str:
        """Count."""
        Counted.count += 1
        return f"{Counted.count} and 1?"


@pytest.mark.slow
def test_the_check_before_the_first_charge_tries_every_environment() -> None:
    spec = recipe.Rollout(responses=2, max_new_tokens=LENGTH)
    check_apart(acting(), spec, prompts_of(USERS), LONGEST)
    kinds = {f"sums{number}": Adding for number in range(5)} | {"counted": Counted}
    with pytest.raises(DprlhfError, match="keeps something from call to call"):
        check_apart(acting(kinds), spec, prompts_of(USERS), LONGEST)


def test_environments_are_named_in_a_recipe() -> None:
    named = {"sums": "helpers.agents:Adding", "numbers": "helpers.agents:Guessing"}
    sampler = load_sampler(recipe.Agent(environment=named))
    assert isinstance(sampler, AgentSampler)
    assert [type(make()).__name__ for make in sampler.agent.factories.values()] == [
        "Adding",
        "Guessing",
    ]
    for environments, why in [({}, "give an environment for each"), ({"a": dict}, "no method re")]:
        with pytest.raises(DprlhfError, match=why):
            Agent([], environments)
    with pytest.raises(DprlhfError, match="column 'environment'; the columns are prompt, seed"):
        Agent([], TWO).check_columns(["prompt", "seed"])


def part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


class Saying:
    """An environment that begins with what it was made with."""

    def __init__(self, said: Any) -> None:
        self.said = said

    def reset(self) -> Any:
        return self.said


@pytest.mark.parametrize(
    ("message", "said", "joined"),
    [
        ({"content": "a"}, "b", "ab"), ({"content": "a"}, 7, "a7"),
        ({"content": None}, "b", "b"), ({}, "b", "b"),
        ({"content": [part("a")]}, "b", [part("a"), part("b")]),
        ({"content": "a"}, [part("b")], [part("a"), part("b")]),
        ({"content": None}, [part("b")], [part(""), part("b")]),
        ({"content": [part("a")]}, [part("b"), part("c")], [part("a"), part("b"), part("c")]),
        ({"content": [part("a")]}, None, [part("a")]),
        ({"content": [part("a")]}, "\ud83d", [part("a"), part("?")]),
    ],
)  # fmt: skip
def test_what_reset_returns_is_joined_to_a_text_or_to_parts(message, said, joined):
    asked = [{"role": "system", "content": "s"}, {"role": "user", **message}]
    begun = begin(Saying(said), OwnRandomness(1), asked, {})
    assert begun == [asked[0], {"role": "user", "content": joined}]
    assert asked[1] == {"role": "user", **message}


@pytest.mark.parametrize("other", [{"type": "image"}, {"type": "image", "text": "a cat"}, "text"])
def test_a_part_that_is_no_text_costs_its_user_alone(other: Any) -> None:
    prompts = prompts_of(USERS, environment=NAMES)
    prompts.prompts[1] = [{"role": "user", "content": [part("What is this?"), other]}]
    responses = draw(acting(), prompts)
    assert responses.failed.tolist() == [user == 1 for user in responses.user]
    with pytest.raises(DprlhfError, match="a part that is no text") as refusal:
        draw(acting(), prompts, private=False)
    assert "What is this" not in str(refusal.value)
    assert "\n" not in str(refusal.value)
