"""``dprlhf init``: a commented recipe from six answers."""

from __future__ import annotations

import math

import yaml

from dprlhf.recipe import make_recipe


def new_recipe(
    *, model: str, prompts: str, user_column: str, reward: str, public_prompts: str, epsilon: float
) -> str:
    """Return a commented YAML recipe that loads.

    Args:
        model: hub id or folder of a causal language model.
        prompts: the private prompts: a file, folder or hub id.
        user_column: rows with one value of it are one user; empty makes each row a user.
        reward: ``file.py:function`` or ``package.module:function``, else a classifier.
        public_prompts: prompts for the evaluation; empty leaves it out.
        epsilon: ε to keep within.

    Raises:
        DprlhfError: an answer makes no valid recipe; the message names the key.
    """
    text = _TEMPLATE.format(
        model=_quoted(model),
        prompts=_quoted(prompts),
        user_column=_quoted(user_column) if user_column else "null",
        max_prompts=4 if user_column else 1,
        reward=_reward(reward),
        epsilon=epsilon,
        evaluation=_EVALUATION.format(_quoted(public_prompts)) if public_prompts else _NONE,
    )
    make_recipe(yaml.safe_load(text), source="init")
    return text


def _quoted(text: str) -> str:
    return yaml.safe_dump(text, default_style='"', width=math.inf).strip()


def _reward(source: str) -> str:
    function = source.rpartition(":")[0] and not source.startswith("asset:")
    if function:
        return f"function: {_quoted(source)}"
    return (
        f"classifier: {_quoted(source)}\n"
        "    label: POSITIVE             # whose log-odds are the reward; see the model's config"
    )


_TEMPLATE = """\
# Look before you run:  dprlhf train THIS.yaml --dry-run
# Run:                  dprlhf train THIS.yaml
# Any key can be overridden, such as privacy.epsilon=1; a misspelt one is refused.

policy:
  model_name_or_path: {model}
  dtype: auto                   # bfloat16 where the machine computes in it, else float32
  adapter:
    type: lora-b                # few trained parameters mean little noise
    rank: 1
    target_modules: all-linear  # fewer modules or layers: still less noise

data:                           # the private prompts
  path: {prompts}
  prompt_column: prompt         # text, or a list of messages with role and content
  user_column: {user_column:<17}# rows with the same value are one user; null: every row is one
  max_prompts_per_user: {max_prompts:<8}# further prompts of a user are dropped
  max_prompt_tokens: 64

rewards:
  - {reward}
reward_range: 3.0               # the weighted sum of rewards is clipped to ±3

rollout:
  responses: 4                  # a prompt; more cost time, never privacy
  max_new_tokens: 32

update:
  name: pg                      # the policy gradient; also grpo, ppo, rebel, npg
  clip_norm: 1.0                # S, the bound on one user's influence

optimizer:
  name: adam
  learning_rate: 0.02

privacy:
  epsilon: {epsilon:<21g}# smaller is more private; 1 to 8 are usual
  delta: 1.0e-5                 # keep it well below 1 / number of users
  partition: random-allocation

rounds: 16                      # compare with: dprlhf plan --users N --epsilon {epsilon:g}

{evaluation}
"""

_EVALUATION = """\
evaluation:                     # public prompts: rewards before, during and after
  data:
    path: {}
    prompt_column: prompt
    max_prompt_tokens: 64
  prompts: 128
  every: 4"""

_NONE = """\
# evaluation:                   # with public prompts a run shows its reward before and after
#   data: {path: public.csv}"""
