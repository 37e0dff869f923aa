"""Every setting of TRL's configs is known, and each that is refused says why."""

import dataclasses
import inspect
from typing import Any

import pytest
import trl

from dprlhf.errors import DprlhfError
from dprlhf.trl import PrivateGRPOConfig, PrivateKTOConfig, PrivateRLOOConfig
from dprlhf.trl import config as configs
from dprlhf.trl.config import as_private, defaults
from dprlhf.trl.fields import ARGUMENTS, GRPO, KTO, RLOO

KINDS = [
    (PrivateGRPOConfig, trl.GRPOConfig, GRPO),
    (PrivateRLOOConfig, trl.RLOOConfig, RLOO),
    (PrivateKTOConfig, trl.KTOConfig, KTO),
]

CHANGED: dict[str, Any] = {
    "loss_type": "ppo", "scale_rewards": "batch", "vllm_mode": "server",
    "multi_objective_aggregation": "normalize_then_sum", "vllm_structured_outputs_regex": "a+",
    "cache_implementation": "static", "log_completions_hub_repo": "me/mine", "optim_args": "a=1",
}  # fmt: skip
"""Another value than the default, where one cannot be made up from the default's type."""


def changed(name: str, default: Any) -> Any:
    if name in CHANGED:
        return CHANGED[name]
    if isinstance(default, bool):
        return not default
    if isinstance(default, int | float):
        return default + 1
    return {"a": 1} if default is None else [default]


@pytest.mark.parametrize(("own", "theirs", "table"), KINDS)
def test_the_table_has_every_setting_of_trl_and_no_other(own: Any, theirs: Any, table: Any) -> None:
    assert {f.name for f in dataclasses.fields(theirs)} == table.keys()
    assert {f.name for f in dataclasses.fields(own)} >= table.keys()
    assert all(field.note and field.note[0] != " " for field in table.values())


REFUSED = [
    (own, name)
    for own, _, table in KINDS
    for name, field in table.items()
    if field.kind == "refused"
]


@pytest.mark.parametrize(("own", "name"), REFUSED)
def test_a_refused_setting_says_why(own: Any, name: str) -> None:
    value = changed(name, defaults(own)[name])
    with pytest.raises(ValueError, match=f"^{name}=") as caught:
        own(output_dir="x", privacy_epsilon=4.0, **{name: value})
    note = own.trl_fields[name].note
    assert str(caught.value).endswith(note)


@pytest.mark.parametrize("own", [PrivateGRPOConfig, PrivateRLOOConfig])
def test_a_setting_that_is_changed_later_is_refused_by_the_trainer(own: Any) -> None:
    config = own(output_dir="x", privacy_epsilon=4.0)
    assert as_private(config, own, "x") is config
    config.include_num_input_tokens_seen = False  # what a command line makes of "no"
    assert as_private(config, own, "x") is config
    config.weight_decay = 0.1
    with pytest.raises(ValueError, match=r"^weight_decay="):
        as_private(config, own, "x")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"loss_type": "ppo"}, r"^loss_type='ppo': give one of grpo, sapo, dr_grpo, dapo, "),
        ({"scale_rewards": "batch"}, "^scale_rewards='batch': .* would couple the users"),
        ({"delta": 1e-5}, "^delta=1e-05: .* the guarantee's δ is privacy_delta"),
    ],
)
def test_a_value_that_has_no_private_meaning_is_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        PrivateGRPOConfig(output_dir="x", privacy_epsilon=4.0, **given)


@pytest.mark.parametrize("own", [PrivateGRPOConfig, PrivateRLOOConfig])
def test_batch_sizes_without_effect_need_not_fit_the_responses(own: Any) -> None:
    given = {"steps_per_generation": 4, "generation_batch_size": 7, "eval_strategy": "steps"}
    for count in (2, 3, 12, 32):
        own(output_dir="x", privacy_epsilon=4.0, num_generations=count, eval_steps=1, **given)


def test_from_trl_keeps_what_was_set_and_says_the_other_defaults_once(capsys, monkeypatch):
    monkeypatch.setattr(configs, "_SAID", set())
    given = trl.GRPOConfig(
        output_dir="x", use_cpu=True, bf16=False, learning_rate=3e-5, num_generations=4,
        gradient_accumulation_steps=2, scale_rewards="none", temperature=0.7,
    )  # fmt: skip
    for _ in range(2):
        made = PrivateGRPOConfig.from_trl(given, privacy_epsilon=2.0, privacy_unit="who")
    for name in ("learning_rate", "num_generations", "scale_rewards", "temperature", "use_cpu"):
        assert getattr(made, name) == getattr(given, name)
    assert (made.loss_type, made.num_train_epochs, made.privacy_unit) == ("grpo", 1.0, "who")
    said = capsys.readouterr().err
    assert said.count("loss_type='grpo' (TRL: 'dapo')") == 1
    assert "num_train_epochs=1.0 (TRL: 3.0)" in said


def test_from_trl_refuses_what_is_refused() -> None:
    given = trl.GRPOConfig(output_dir="x", use_cpu=True, bf16=False, num_iterations=2)
    with pytest.raises(ValueError, match=r"^num_iterations=2"):
        PrivateGRPOConfig.from_trl(given, privacy_epsilon=2.0)
    with pytest.raises(ValueError, match="takes a GRPOConfig"):
        PrivateGRPOConfig.from_trl(
            trl.RLOOConfig(output_dir="x", use_cpu=True, bf16=False), privacy_epsilon=2.0
        )


def test_trls_own_config_has_no_budget() -> None:
    given = trl.RLOOConfig(output_dir="x", use_cpu=True, bf16=False)
    for args, said in ((given, "from_trl"), (None, "privacy_epsilon")):
        with pytest.raises(DprlhfError, match=said):
            as_private(args, PrivateRLOOConfig, "x")


def test_the_table_has_every_argument_of_trls_trainers() -> None:
    for trainer in (trl.GRPOTrainer, trl.RLOOTrainer):
        assert inspect.signature(trainer).parameters.keys() <= ARGUMENTS.keys()
    assert inspect.signature(trl.GRPOTrainer).parameters.keys() == ARGUMENTS.keys()
