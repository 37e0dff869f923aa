"""``dprlhf init``: a commented recipe from six answers."""

from __future__ import annotations

import math
from dataclasses import dataclass

import yaml

from dprlhf.cli.answers import PROMPT_COLUMNS
from dprlhf.recipe import make_recipe

_PROMPT, _RESPONSE = 64, 32
_FEWEST_ROUNDS, _MOST_ROUNDS, _USERS_A_ROUND = 4, 16, 125


@dataclass(frozen=True)
class Target:
    """The modules of a model that the adapter trains.

    Attributes:
        module: Name of the one kind of module, as in PEFT's ``target_modules``; None takes PEFT's
            choice for the type of model.
        layers: Indices of the decoder layers; negative ones count from the last.
        prompt: The longest prompt in tokens, for which the model has positions.
    """

    module: str | None = None
    layers: tuple[int, ...] = (-2, -1)
    prompt: int = _PROMPT


def new_recipe(
    *,
    model: str,
    prompts: str,
    user_column: str,
    reward: str,
    public_prompts: str,
    epsilon: float,
    target: Target | None = None,
    users: int | None = None,
    prompt_column: str = "prompt",
) -> str:
    """Return a commented YAML recipe that loads.

    Args:
        model: Hub id or folder of a causal language model.
        prompts: File, folder or hub id of the private prompts.
        user_column: Column that names the user: rows with equal values are one user. If empty,
            every row is a user.
        reward: Reward as ``file.py:function`` or ``package.module:function``; anything else is the
            name of a classifier.
        public_prompts: File of prompts for the evaluation; if empty, there is none.
        epsilon: Privacy budget ε.
        target: The modules to train, from :func:`target_of`.
        users: Number of users, from :func:`users_in`; it decides the number of rounds.
        prompt_column: Column of the prompts, private and public.

    Raises:
        DprlhfError: An answer makes no valid recipe; the message names the key.
    """
    target = target or Target()
    column = prompt_column if prompt_column in PROMPT_COLUMNS else _quoted(prompt_column)
    text = _TEMPLATE.format(
        model=_quoted(model),
        module=f"[{target.module}]" if target.module else "null",
        about_module="one kind" if target.module else "PEFT's choice; one kind of module",
        layers=list(target.layers),
        prompt=target.prompt,
        response=_RESPONSE,
        start=_PUBLIC_START if public_prompts else _RANDOM_START,
        prompts=_quoted(prompts),
        prompt_column=column,
        user_column=_quoted(user_column) if user_column else "null",
        max_prompts=4 if user_column else 1,
        reward=_reward(reward),
        epsilon=repr(float(epsilon)).removesuffix(".0"),
        rounds=_rounds(users),
        users=users or "N",
        evaluation=_EVALUATION.format(_quoted(public_prompts)) if public_prompts else _NONE,
    )
    make_recipe(yaml.safe_load(text), source="init")
    return text


def target_of(model: str) -> Target:
    """Choose one kind of module and a few layers above the middle, from the config on disk.

    The module is the value projection if PEFT names one for the type of model, otherwise the first
    that PEFT names (``c_attn`` for GPT-2). Without a config on disk, the default :class:`Target`.
    """
    from peft.utils import constants
    from transformers import AutoConfig

    from dprlhf.assets import resolve
    from dprlhf.policies.causal_lm import context_length, prompt_room

    try:
        config = AutoConfig.from_pretrained(
            resolve(model), trust_remote_code=False, local_files_only=True
        ).get_text_config()
        kind, count = config.model_type, int(config.num_hidden_layers)
    except Exception:  # not on disk, or of another kind: the dry run reports the reason
        return Target()
    names = sorted(constants.TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING.get(kind, ()))
    values = [name for name in names if name.startswith("v")]
    first = count // 2
    layers = range(first, first + max(1, min(8, count // 4)))
    prompt = prompt_room(context_length(config), _RESPONSE, _PROMPT)
    return Target(next(iter(values or names), None), tuple(layers), prompt)


def _rounds(users: int | None) -> int:
    """Return 4 to 16 rounds, such that each has about 125 users to set against the noise."""
    if users is None:
        return _MOST_ROUNDS
    return min(users, max(_FEWEST_ROUNDS, min(_MOST_ROUNDS, users // _USERS_A_ROUND)))


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
  dtype: auto                   # bfloat16 where the machine is faster in it, else float32
  adapter:                      # few trained parameters mean little noise
    type: ffa-lora              # A frozen, B trained
    rank: 1
    target_modules: {module:<12}# {about_module} is less noise than several
    layers: {layers}  # few; there is no backward pass below them
    {start}

data:                           # the private prompts
  path: {prompts}
  prompt_column: {prompt_column:<15}# text, or a list of messages with role and content
  user_column: {user_column:<17}# rows with the same value are one user; null: every row is one
  max_prompts_per_user: {max_prompts:<8}# further prompts of a user are dropped
  max_prompt_tokens: {prompt:<11}# a longer prompt keeps its last tokens

rewards:
  - {reward}
reward_range: 3.0               # the weighted sum of rewards is clipped to ±3

rollout:
  responses: 4                  # a prompt; more cost time, never privacy
  max_new_tokens: {response}

update:
  name: pg                      # the policy gradient; also grpo, ppo, rebel, npg
  clip_norm: 1.0                # S, the bound on one user's influence

optimizer:
  name: adam
  learning_rate: 0.02
  betas: [0.9, 0.9]             # rounds are few

privacy:
  epsilon: {epsilon:<21}# smaller is more private; 1 to 8 are usual
  delta: 1.0e-5                 # keep it well below 1 / number of users
  partition: random-allocation

rounds: {rounds:<24}# compare with: dprlhf plan --users {users} --epsilon {epsilon}

{evaluation}
"""

_PUBLIC_START = "init: public-activations    # A along the main direction of public activations"
_RANDOM_START = "init: random                # with public prompts, public-activations is better"

_EVALUATION = """\
evaluation:                     # public prompts: rewards before, during and after
  data:
    path: {}
  prompts: 128
  every: 4"""

_NONE = """\
# evaluation:                   # with public prompts a run shows its reward before and after
#   data: {path: public.csv}"""
