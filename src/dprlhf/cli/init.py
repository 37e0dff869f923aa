"""``dprlhf init``: a short, commented recipe from a few answers."""

from __future__ import annotations

from typing import Any

import yaml

from dprlhf.cli.answers import columns_of
from dprlhf.recipe.loading import recipe_from
from dprlhf.training.defaults import with_defaults

_HEAD = """\
# Look before you run:  dprlhf {command} THIS.yaml --dry-run
# Run:                  dprlhf {command} THIS.yaml
# What is not here has its default; any key can be added, or overridden such as privacy.epsilon=1.

"""

_ABOUT = {
    "policy": "few trained parameters mean little noise",
    "data": "the private rows; those with one value of user_column are one user",
    "rewards": "their weighted sum is clipped to the range -reward_range to reward_range (3)",
    "rollout": "responses: 4 of at most max_new_tokens: 32 for each prompt; more cost time alone",
    "update": "directions from public rows that the evaluation leaves: less noise",
    "feedback update": "linear_reward: a reward from one release, and steps on fresh responses to"
    " public\n# prompts; policy_gradient or kto: steps on the log itself, of which value_rounds: 1"
    "\n# estimates in the last round what the tuned policy is worth",
    "optimizer": "learning_rate is the length of the longest step, which target_kl shortens",
    "reward optimizer": "a new head takes small steps",
    "privacy": "a smaller epsilon is more private; 1 to 8 are usual. Keep delta below 1 / users",
    "feedback rounds": "one for linear_reward; for other losses by the number of users: dprlhf"
    " plan --users {users} --epsilon {epsilon}",
    "rounds": "by the number of users; others: dprlhf plan --users {users} --epsilon {epsilon}",
    "evaluation": "public rows: measured before and after, at no privacy cost",
}
"""What a recipe says above a section."""


def new_recipe(
    *,
    model: str,
    prompts: str,  # File, folder or hub id of the private rows
    user_column: str,  # Several have commas between them; if empty, every row is a user
    public_prompts: str,  # File of public rows for the evaluation; if empty, there is none
    epsilon: float,
    reward: str = "",
    stage: str = "rl",
    users: int | None = None,  # Number of users; None if it is not known
    public: int | None = None,  # Number of public rows; None if it is not known
    columns: dict[str, str | None] | None = None,
) -> str:
    """Return a YAML recipe that loads: the answers, and what follows from them."""
    values: dict[str, Any] = {} if stage == "rl" else {"stage": stage}
    values["policy"] = {"model_name_or_path": model}
    values["data"] = {"path": prompts, **(columns or {}), "user_column": columns_of(user_column)}
    if stage == "rl":
        values["rewards"] = [_reward(reward)]
    values["privacy"] = {"epsilon": epsilon, "delta": 1e-5}
    if public_prompts:
        values["evaluation"] = {"data": {"path": public_prompts}}
    values = with_defaults(values, users=users, public=public, model=model)
    if stage == "feedback" and "loss_type" not in values["update"]:
        values["update"] = {"value_rounds": 1}
    text = _HEAD.format(command="train" if stage == "rl" else stage)
    for name, section in values.items():
        if section:
            key = f"{stage} {name}" if f"{stage} {name}" in _ABOUT else name
            about = _ABOUT.get(key, "").format(users=users or "N", epsilon=f"{epsilon:g}")
            part = yaml.safe_dump({name: section}, sort_keys=False)
            text += f"# {about}\n{part}\n" if about else f"{part}\n"
    recipe_from(yaml.safe_load(text), (), source="init")
    return text


def _reward(source: str) -> dict[str, str]:
    if source.rpartition(":")[0] and not source.startswith("asset:"):
        return {"function": source}
    return {"classifier": source, "label": "POSITIVE"}  # whose log-odds are the reward
