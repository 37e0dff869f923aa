"""Every setting, argument and log field of TRL's trainers, and what becomes of it here.

The tables are complete: a test compares them with the installed TRL, and ``docs/reference/trl.md``
is made of them. A setting is

- ``honoured``: it means the same here;
- ``mapped``: the nearest meaning that stays within one user, which the note describes;
- ``no effect``: any value is taken, and nothing here depends on it;
- ``refused``: only the default is taken, for the reason in the note.

A log field is honoured, mapped, or ``absent`` for the reason in the note.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

Kind = Literal["honoured", "mapped", "no effect", "refused", "absent"]


@dataclass(frozen=True)
class Field:
    """What a private trainer does with one of TRL's settings."""

    kind: Kind  # Honoured, mapped, no effect, or refused; of a log field, also absent
    # The recipe's key, the nearest meaning, or the reason with the nearest private setting
    note: str


def _all(kind: Kind, note: str, names: str) -> Iterable[tuple[str, Field]]:
    return ((name, Field(kind, note)) for name in names.split())


_CUT = "log π is that of the distribution that is left, and TRL's that of the whole one"
_REGEX = "log-probabilities of what a pattern leaves are not computed: reward the format"
_SAMPLER = "the sampler is this package's own, with shapes that say nothing about the users"
_VLLM = "use_vllm=True takes the recipe's rollout.backend: vllm, in this process, which has no such"
_LOADER = "there is no data loader: the partition draws the users of a round"
_DDP = "gradients are not synchronised by DDP: clipped sums of processes are added up"
_ENTROPY = "an entropy bonus is not offered; beta keeps the policy near the base model"
_ONE_STEP = "a batch has one step, at which the ratio is 1"
_OTHER_LOSS = f"{_ONE_STEP}, where the weights of this loss are 1, whatever the setting"
_EVERY_ROUND = "every round is logged and leaves a checkpoint"
_PRECISION = "the trained parameters, the clipping and the noise are in float32 or wider; give the"
_PRECISION += " frozen model's dtype in model_init_kwargs"

COMMON: dict[str, Field] = {
    "output_dir": Field("honoured", "the run folder, which must not exist unless a run resumes"),
    "seed": Field("honoured", "of public draws alone; private ones come from the run's secret key"),
    "learning_rate": Field("honoured", "optimizer.learning_rate"),
    **dict(_all("refused", "it is 0.9: a slower average learns little",
                "adam_beta1 adam_beta2")),
    "adam_epsilon": Field("no effect", "it is 1e-8, as in transformers"),
    "max_completion_length": Field("honoured", "rollout.max_new_tokens"),
    "num_generations": Field("honoured", "rollout.responses"),
    "temperature": Field("honoured", "rollout.temperature"),
    "reward_weights": Field("honoured", "rewards.N.weight"),
    "report_to": Field("honoured", "tracking.report_to: released values and public ones"),
    "disable_tqdm": Field("honoured", "no progress bars"),
    "hub_model_id": Field("honoured", "the repository of push_to_hub()"),
    "hub_token": Field("honoured", "the token of push_to_hub(); without it that of the login"),
    "hub_private_repo": Field("honoured", "whether push_to_hub() makes a private repository"),
    "trust_remote_code": Field("honoured", "policy.trust_remote_code"),
    "resume_from_checkpoint": Field("honoured", "as of train(resume_from_checkpoint=…)"),
    "eval_steps": Field("honoured", "evaluation.every, in rounds; below 1 a share of them"),
    "max_steps": Field(
        "mapped", "rounds: a round is one step, with one noised release; without it 4 to 16, by the"
        " number of users",
    ),
    "num_train_epochs": Field(
        "mapped",
        "privacy.participations, the number of rounds that a user takes part in (more noise each)",
    ),
    "per_device_train_batch_size": Field("mapped", "update.batch_size, a micro-batch"),
    "gradient_accumulation_steps": Field(
        "no effect", "a round adds up all of its users; max_steps, or the number of users, decides"
        " how many there are",
    ),
    "generation_batch_size": Field("mapped", "derived; responses are sampled in batches of a size"
                                   " that rollout.batch_size: auto determines"),
    "steps_per_generation": Field("mapped", "derived, as generation_batch_size"),
    "max_grad_norm": Field(
        "no effect", "set privacy_clip_norm: each user's gradient is clipped, before noise is"
        " added; a clipped mean would still depend on one user without bound",
    ),
    "optim": Field("mapped", "adamw_torch, adamw_torch_fused and the like: adam; sgd: sgd"),
    "lr_scheduler_type": Field("mapped", "optimizer.schedule: constant, linear or cosine"),
    "warmup_steps": Field("no effect", "there is no warm-up: a run has few rounds"),
    "metric_for_best_model": Field(
        "honoured", "of eval_dataset, with eval_strategy 'steps': its best value is"
        " state.best_metric, by which EarlyStoppingCallback stops a run",
    ),
    "greater_is_better": Field("honoured", "as of metric_for_best_model"),
    "eval_strategy": Field("mapped", "'steps': evaluation.every; else before and after the run"),
    "model_init_kwargs": Field(
        "mapped", "dtype ('auto' is the machine's choice, not the checkpoint's),"
        " attn_implementation, revision and trust_remote_code; others are refused",
    ),
    "disable_dropout": Field("honoured", "dropout is always off: it would be a second randomness"),
    "use_cpu": Field("honoured", "through accelerate, which places the policy"),
    "use_vllm": Field("mapped", "rollout.backend: vllm (experimental)"),
    "push_to_hub": Field("mapped", "uploads the adapter after the last round, not during the run"),
    "project": Field("no effect", "runs are filed under the project dprlhf"),
    "mask_truncated_completions": Field(
        "honoured", "rollout.mask_truncated: weight 0 for a response that did not end"
    ),
    "top_p": Field("honoured", "rollout.top_p; " + _CUT),
    "top_k": Field("honoured", "rollout.top_k; " + _CUT),
    "min_p": Field("honoured", "rollout.min_p; " + _CUT),
    "repetition_penalty": Field("refused", "give a reward that counts repetition, or top_p"),
    "generation_kwargs": Field(
        "mapped", "temperature, top_k, top_p, min_p, max_new_tokens, stop_strings and vLLM's names"
        " of these; others are refused by name"
    ),
    "cache_implementation": Field("refused", _SAMPLER),
    "chat_template_kwargs": Field("honoured", "policy.chat_template_kwargs"),
    "num_iterations": Field(
        "refused", "a second step on a batch would be a second release at its own cost; DP-PPO"
        " (update: {name: ppo, epochs: …} in a recipe) steps within a user",
    ),
    "sync_ref_model": Field("refused", "the reference is the base model, the adapter off"),
    "log_completions": Field(
        "mapped", "completions of eval_dataset alone, in samples.json and public-samples.jsonl;"
        " those of private prompts stay private",
    ),
    "num_generations_eval": Field(
        "no effect", "the evaluation samples one response to a prompt, whose mean is the same"
    ),
    "weight_decay": Field("refused", "there is none: an adapter is small, and starts at zero"),
    "optim_args": Field("refused", "adam and sgd take none"),
    "optim_target_modules": Field("refused", "peft_config names what is trained"),
    "lr_scheduler_kwargs": Field("refused", "the schedules take none"),
    "label_smoothing_factor": Field("refused", "there are no labels"),
    "neftune_noise_alpha": Field("refused", "noise on embeddings would be no part of the policy"),
    "gradient_checkpointing": Field("mapped", "policy.gradient_checkpointing: the same gradients"),
    "activation_checkpointing": Field("mapped", "the newer name of gradient_checkpointing"),
    "torch_compile": Field("refused", "per-user gradients read the layers' inputs by hooks"),
    "use_liger_kernel": Field("refused", "its fused layers hide the inputs that clipping needs"),
    "auto_find_batch_size": Field("refused", "TRL refuses it, too: set a smaller batch size"),
    "fp16": Field("refused", _PRECISION),
    "deepspeed": Field("refused", "it owns the backward pass that users' gradients are taken from"),
    "fsdp": Field("refused", "accelerate launch asks for it (in its config, distributed_type)"),
    "parallelism_config": Field("refused", "processes share a round's users, and nothing else"),
    "full_determinism": Field("refused", "private draws come from a secret key by design"),
    "load_best_model_at_end": Field(
        "refused", "the last policy is the result; picking by rewards of public prompts is free:"
        " use eval_steps and look",
    ),
    "include_num_input_tokens_seen": Field("refused", "the tokens of a round tell about its users"),
    "use_transformers_continuous_batching": Field("no effect", _SAMPLER),
    "transformers_continuous_batching_config": Field("no effect", _SAMPLER),
    "use_transformers_paged": Field("no effect", _SAMPLER),
    "eval_on_start": Field("no effect", "the evaluation always begins before the first round"),
    "bf16": Field("no effect", _PRECISION),
    "tf32": Field("honoured", "by torch, for sampling; gradients are taken without it"),
    "beta": Field("mapped", "kl.beta: β times the whole response's log-ratio to the base model is"
                  " subtracted from its reward, not added to the loss"),
    **dict(_all("no effect", _LOADER, """
        dataloader_drop_last dataloader_num_workers dataloader_pin_memory
        dataloader_persistent_workers dataloader_prefetch_factor dataloader_in_order
        dataloader_multiprocessing_context remove_unused_columns label_names data_seed
        train_sampling_strategy length_column_name ignore_data_skip shuffle_dataset
        accelerator_config""")),
    **dict(_all("no effect", _DDP, """
        ddp_find_unused_parameters ddp_bucket_cap_mb ddp_broadcast_buffers ddp_static_graph
        ddp_backend ddp_timeout average_tokens_across_devices local_rank""")),
    **dict(_all("no effect", _EVERY_ROUND, """
        logging_strategy logging_steps logging_first_step logging_nan_inf_filter log_on_each_node
        save_strategy save_steps save_total_limit save_only_model save_on_each_node
        enable_jit_checkpoint restore_callback_states_from_checkpoint""")),
    **dict(_all("no effect", "it changes memory or speed in TRL, and nothing here", """
        gradient_checkpointing_kwargs activation_checkpointing_kwargs
        torch_compile_backend torch_compile_mode liger_kernel_config use_cache
        torch_empty_cache_steps pad_to_multiple_of ds3_gather_for_generation skip_memory_metrics
        fsdp_config debug""")),
    **dict(_all("no effect", "the evaluation is this package's own, on eval_dataset", """
        eval_delay per_device_eval_batch_size prediction_loss_only eval_do_concat_batches
        eval_use_gather_object eval_accumulation_steps include_for_metrics batch_eval_metrics
        bf16_full_eval fp16_full_eval do_train do_eval do_predict""")),
    **dict(_all("no effect", "for logging that is not offered", """
        log_level log_level_replica log_multimodal num_completions_to_print log_unique_prompts
        run_name trackio_space_id trackio_bucket_id trackio_static_space_id""")),
    **dict(_all("no effect", "uploads happen once, after the last round", """
        hub_strategy hub_always_push hub_revision""")),
    **dict(_all("no effect", "sync_ref_model is refused", """
        ref_model_mixup_alpha ref_model_sync_steps""")),
    **dict(_all("no effect", _VLLM + " setting", """
        vllm_model_impl vllm_enable_sleep_mode vllm_server_base_url vllm_server_host
        vllm_server_port vllm_server_timeout vllm_group_port vllm_gpu_memory_utilization
        vllm_max_model_length vllm_tensor_parallel_size""")),
    "vllm_mode": Field("refused", _VLLM + " mode as 'server'"),
    "vllm_structured_outputs_regex": Field("refused", _REGEX),
}  # fmt: skip
"""The settings that both configs have."""

GRPO: dict[str, Field] = COMMON | {
    "loss_type": Field(
        "mapped", "'grpo' and 'sapo' (update: grpo) weigh each response alike; the others (update:"
        f" pg) each token, as 'dr_grpo' does: {_ONE_STEP}, so that they differ in a divisor alone,"
        " which is a constant here and a count of the batch's tokens in TRL",
    ),
    "scale_rewards": Field(
        "mapped", "'group' or 'none'; with 'batch' the spread of the whole batch would couple the"
        " users",
    ),
    "epsilon": Field(
        "no effect", f"{_ONE_STEP} (update.clip_range); the privacy budget is privacy_epsilon"
    ),
    "epsilon_high": Field("no effect", _ONE_STEP),
    "delta": Field(
        "no effect", f"a clip of the ratio, above 1, and {_ONE_STEP}; a value of 1 or less is"
        " refused: the guarantee's δ is privacy_delta",
    ),
    "multi_objective_aggregation": Field(
        "refused", "'normalize_then_sum' normalises each reward over the batch, which would couple"
        " the users: weigh rewards of one scale with reward_weights",
    ),
    "top_entropy_quantile": Field(
        "refused", "the quantile is of the tokens of the whole batch, which would couple the users"
    ),
    "off_policy_mask_threshold": Field("no effect", _ONE_STEP + ", so nothing is off-policy"),
    "cast_lm_head_to_fp32": Field(
        "no effect", "log π is taken in float32 or wider of the logits that the head makes in the"
        " model's dtype; dtype float32 in model_init_kwargs makes them in float32, too",
    ),
    "use_adaptive_entropy": Field("refused", _ENTROPY),
    "entropy_coef": Field("refused", _ENTROPY),
    "router_aux_loss_coef": Field(
        "refused", "0 is taken: how experts share the tokens of a batch depends on all its users,"
        " and mixtures of experts train without this loss",
    ),
    "log_completions_hub_repo": Field("refused", "as log_completions"),
    "importance_sampling_level": Field("no effect", _ONE_STEP),
    "use_bias_correction_kl": Field("no effect", _ONE_STEP),
    **dict(_all("no effect", "use_adaptive_entropy is refused", """
        entropy_coef_min entropy_coef_max entropy_coef_delta entropy_target""")),
    **dict(_all("no effect", _OTHER_LOSS, """
        sapo_temperature_neg sapo_temperature_pos vespo_k_pos vespo_lambda_pos vespo_k_neg
        vespo_lambda_neg""")),
    **dict(_all("no effect", "vLLM's responses have the weight min(2, π/π_vllm)", """
        vllm_importance_sampling_correction vllm_importance_sampling_mode
        vllm_importance_sampling_clip_max vllm_importance_sampling_clip_min
        vllm_importance_sampling_cap""")),
    "max_tool_calling_iterations": Field("honoured", "rollout.agent.max_tool_calling_iterations"),
}  # fmt: skip
"""Every setting of TRL's ``GRPOConfig``."""

RLOO: dict[str, Field] = COMMON | {
    "router_aux_loss_coef": GRPO["router_aux_loss_coef"],
    "reward_clip_range": Field(
        "mapped", "reward_range: the weighted sum is clipped, to a range symmetric about 0"
    ),
    "normalize_advantages": Field(
        "refused", "advantages normalised over the batch would couple the users: PrivateGRPOTrainer"
        " normalises within a user",
    ),
    "epsilon": Field("no effect", _ONE_STEP + "; the privacy budget is privacy_epsilon"),
    "epsilon_high": Field("no effect", _ONE_STEP),
}  # fmt: skip
"""Every setting of TRL's ``RLOOConfig``."""

_RESPONSES = dict(_all("no effect", "there are no responses to sample", """
    cache_implementation chat_template_kwargs ds3_gather_for_generation generation_batch_size
    generation_kwargs log_completions log_multimodal log_unique_prompts mask_truncated_completions
    max_completion_length min_p num_completions_to_print num_generations num_generations_eval
    num_iterations repetition_penalty reward_weights shuffle_dataset steps_per_generation
    temperature top_k top_p transformers_continuous_batching_config
    use_transformers_continuous_batching use_transformers_paged use_vllm"""))  # fmt: skip
"""Settings of sampled responses, which ``KTOConfig`` has none of."""

KTO: dict[str, Field] = {
    name: field
    for name, field in COMMON.items()
    if name not in _RESPONSES and not name.startswith("vllm_")
} | {
    "loss_type": Field("honoured", "update.loss_type: kto or apo_zero_unpaired; the reference point"
                       " of kto is a mean over eval_dataset, or 0, and not over the batch. Or"
                       " linear_reward, which dprlhf init writes"),
    "beta": Field("honoured", "update.beta"),
    **dict(_all("refused", "it is 1",
                "desirable_weight undesirable_weight")),
    "max_length": Field("refused", "set privacy_max_prompt_tokens and max_completion_length"),
    "precompute_ref_log_probs": Field("refused", COMMON["sync_ref_model"].note),
    "precompute_ref_batch_size": Field("no effect", "precompute_ref_log_probs is refused"),
    "router_aux_loss_coef": GRPO["router_aux_loss_coef"],
    "dataset_num_proc": Field("no effect", "rows are tokenized as their round reads them"),
    "activation_offloading": COMMON["gradient_checkpointing_kwargs"],
}  # fmt: skip
"""Every setting of TRL's ``KTOConfig``."""

_RELEASE = "of private responses: each value would be a release of its own"

ARGUMENTS: dict[str, Field] = {
    "model": Field(
        "mapped", "a name, a folder or a model. A mixture of experts gets the rows of one user in"
        " each pass, which is slower: of several users, all together would decide the shape, and"
        " with it the rounding, of its experts' products. Refused are batch norm and"
        " encoder-decoders. A PeftModel is taken with one LoRA,"
        " without DoRA or modules beside it, that has not been trained yet, and its A is drawn"
        " again",
    ),
    "reward_funcs": Field(
        "mapped", "as in TRL, and tried on public prompts first. None means that a reward does not"
        " apply; one that applies to no public prompt is called for one user at a time. One that"
        " compares the responses of a batch is refused",
    ),
    "args": Field("mapped", "PrivateGRPOConfig or PrivateRLOOConfig, which have a budget"),
    "train_dataset": Field(
        "mapped", "the users' rows. None is refused, also with an environment that makes the"
        " prompts: without rows there is nobody to protect. A stream is read to its end",
    ),
    "eval_dataset": Field(
        "mapped", "PUBLIC prompts: a row that a user has is refused. Of a dictionary the run"
        " evaluates all rows together, and evaluate() each dataset by itself",
    ),
    "processing_class": Field("honoured", "the tokenizer; a processor has one"),
    "reward_processing_classes": Field("honoured", "a tokenizer for each reward model"),
    "callbacks": Field("mapped", "they see released and public values; hooks in the model are"
                       " refused"),
    "optimizers": Field("refused", "a resumed run makes the optimizer again: name it in args"),
    "quantization_config": Field("mapped", "bitsandbytes in 4 bit, or in 8 bit without outliers"),
    "peft_config": Field(
        "mapped", "configs that change the model's layers, such as LoraConfig; None is a LoRA of"
        " rank 1, and {'type': 'full'} trains all weights. Refused are prompt"
        " and prefix tuning, whose tokens stand before a prompt, and what the message names",
    ),
    "tools": Field("honoured", "functions, also asynchronous ones"),
    "rollout_func": Field("refused", "give tools or environment_factory"),
    "environment_factory": Field("mapped", "one environment for each trajectory"),
}  # fmt: skip
"""The arguments of TRL's trainers."""

LOG: dict[str, Field] = {
    "reward": Field(
        "mapped", "the noised mean; left out where the noise hides it, or a round drew nobody"
    ),
    "rewards/*/mean": Field("mapped", "as reward, for a single one of weight 1; else absent"),
    "grad_norm": Field("mapped", "of the noised mean gradient"),
    "learning_rate": Field("honoured", "of the step"),
    "train_loss": Field("mapped", "NaN, in the last entry, with epsilon and delta"),
    **dict(_all("absent", _RELEASE, """
        loss policy_loss aux_loss entropy entropy_coef kl reward_std rewards/*/std num_tokens
        frac_reward_zero_std completions/* clip_ratio/* cispo_clip_ratio vespo/* tools/*
        sampling/* step_time train_runtime train_samples_per_second train_steps_per_second
        total_flos""")),
    "eval_*loss": Field("absent", "eval_reward and the measures beside it say more"),
    "log_metric": Field(
        "absent", "what a reward logs is in secret/telemetry-*.jsonl, of private rows alone",
    ),
}  # fmt: skip
"""The fields of TRL's ``state.log_history``; ``*`` stands for any text."""
