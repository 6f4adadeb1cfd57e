"""The names that TRL and verl have for settings, and those of this project; docs/names.md is the same for readers."""

from grpo_lightning.output.shell import shell_word

SAME = {
    "num_generations": "rollout.group_size",
    "rollout.n": "rollout.group_size",
    "data.train_batch_size": "data.prompts_per_step",
    "num_iterations": "module.ppo_epochs",
    "actor.ppo_epochs": "module.ppo_epochs",
    "actor.ppo_max_token_len_per_gpu": "module.microbatch_tokens",
    "beta": "loss.kl_coef",
    "actor.kl_loss_coef": "loss.kl_coef",
    "epsilon": "loss.surrogate.epsilon_low",
    "epsilon_high": "loss.surrogate.epsilon_high",
    "actor.clip_ratio_low": "loss.surrogate.epsilon_low",
    "actor.clip_ratio_high": "loss.surrogate.epsilon_high",
    "max_completion_length": "rollout.max_new_tokens",
    "data.max_response_length": "rollout.max_new_tokens",
    "learning_rate": "optimizer.lr",
    "actor.optim.lr": "optimizer.lr",
    "max_grad_norm": "module.max_grad_norm",
    "actor.optim.clip_grad": "module.max_grad_norm",
    "mask_truncated_completions": "rollout.mask_truncated",
    "top_entropy_quantile": "rollout.top_entropy",
    "delta": "loss.surrogate.delta",
    "actor.clip_ratio_c": "loss.surrogate.dual_clip",
    "ref_model_sync_steps": "callbacks.reference.every",
    "ref_model_mixup_alpha": "callbacks.reference.alpha",
    "entropy_coef": "loss.entropy_coef",
    "actor.entropy_coeff": "loss.entropy_coef",
    "temperature": "rollout.temperature",
    "top_p": "rollout.top_p",
    "top_k": "rollout.top_k",
    "min_p": "rollout.min_p",
    "warmup_steps": "schedule.warmup_steps",
    "actor.optim.lr_warmup_steps": "schedule.warmup_steps",
    "eval_steps": "validation.every",
    "trainer.test_freq": "validation.every",
    "num_generations_eval": "validation.samples_per_prompt",
    "rollout.val_kwargs.n": "validation.samples_per_prompt",
    "rollout.val_kwargs.temperature": "validation.temperature",
    "rollout.val_kwargs.top_p": "validation.top_p",
    "rollout.val_kwargs.top_k": "validation.top_k",
    "train_dataset": "data.path",
    "data.train_files": "data.path",
    "eval_dataset": "data.validation_path",
    "data.val_files": "data.validation_path",
}
"""Their key -> the key that takes the same value."""

SIMILAR = {
    "generation_batch_size": "data.prompts_per_step, which counts prompts, not completions",
    "per_device_train_batch_size": "data.prompts_per_step for a rollout, module.minibatch_size for an optimizer "
    "step and module.microbatch_tokens for memory",
    "gradient_accumulation_steps": "module.microbatch_tokens, which changes memory and never results",
    "actor.ppo_mini_batch_size": "module.minibatch_size, which counts completions, not prompts",
    "actor.use_dynamic_bsz": "module.microbatch_tokens, which is always on",
    "actor.use_kl_loss": "loss.kl_coef, which is 0 without",
    "loss_type": "loss, such as loss=dr_grpo, or loss.weights._target_",
    "actor.loss_agg_mode": "loss.weights._target_, such as grpo_lightning.loss.token_mean",
    "use_bias_correction_kl": "loss.kl._target_=grpo_lightning.loss.k3_weighted",
    "actor.kl_loss_type": "loss.kl._target_, such as grpo_lightning.loss.k3",
    "scale_rewards": "advantage, such as advantage=centered, standardized or batch_standardized",
    "algorithm.adv_estimator": "advantage, such as advantage=standardized or leave_one_out",
    "algorithm.norm_adv_by_std_in_grpo": "advantage, such as advantage=centered or standardized",
    "reward_weights": "reward.NAME.weight, such as reward.accuracy.weight=1.0",
    "algorithm.gdpo_reward_weights": "reward.NAME.weight, such as reward.accuracy.weight=1.0",
    "sync_ref_model": "callbacks=reference_refresh",
    "lr_scheduler_type": "schedule, such as schedule=cosine",
    "actor.optim.lr_scheduler_type": "schedule, such as schedule=cosine",
    "eval_strategy": "validation.every, which counts steps",
    "eval_on_start": "validation.every; a validation always precedes the first step",
    "trainer.val_before_train": "validation.every; a validation always precedes the first step",
    "data.filter_overlong_prompts": "data.max_prompt_length, which drops longer prompts",
    "reward_funcs": "reward, such as reward=[accuracy,custom] with reward.custom.function._target_",
    "reward.custom_reward_function.path": "reward=custom with reward.custom.function._target_=FILE.FUNCTION",
    "reward.custom_reward_function.name": "reward=custom with reward.custom.function._target_=FILE.FUNCTION",
    "max_steps": "steps, which counts rollouts",
    "num_train_epochs": "steps, which counts rollouts",
    "trainer.total_epochs": "steps, which counts rollouts",
    "trainer.total_training_steps": "steps, which counts rollouts",
    "output_dir": "hydra.run.dir",
    "model_name_or_path": "policy=hf with policy.path",
    "actor_rollout_ref.model.path": "policy=hf with policy.path",
    "resume_from_checkpoint": "checkpoint, a path or last",
}
"""Their key -> what to use here, in words."""

USUAL = {
    "resume": "checkpoint, a path or last",
    "resume_from": "checkpoint, a path or last",
    "epochs": "steps, which counts rollouts",
    "num_epochs": "steps, which counts rollouts",
    "max_epochs": "steps, which counts rollouts",
    "batch_size": "data.prompts_per_step for a rollout, module.minibatch_size for an optimizer step and "
    "module.microbatch_tokens for memory",
    "model": "policy, such as policy=hf with policy.path",
    "model_path": "policy=hf with policy.path",
    "model_name": "policy=hf with policy.path",
    "dataset": "data, such as data=hub with data.path",
    "device": "trainer, such as trainer=gpu",
}
"""Names that many other programs have -> what to use here, in words."""

_BELOW = "actor_rollout_ref."
"""Where verl has its settings of the actor and of rollouts."""


def translated(key: str, value: str | None = None) -> str | None:
    """What a setting of TRL, verl or many others is called here, as the end of a sentence; None if it is none.

    Args:
        key: As a user wrote it, with or without verl's ``actor_rollout_ref``.
        value: What it was set to; None: not known.
    """
    last = key.rpartition(".")[2]
    foreign = [last] if SAME.get(last, "").rpartition(".")[2] != last else []  # rollout.top_p is a word of both
    for name in (key, key.removeprefix(_BELOW), *foreign):
        if ours := SAME.get(name):
            word = ours if value is None else shell_word(f"{ours}={value}")
            return f"allowed here is {word}, as this project calls it"
        if ours := SIMILAR.get(name) or USUAL.get(name):
            return f"allowed here is {ours}"
    return None
