"""What settings may name: the members of this package and of libraries that run no code on the word of a setting."""

from collections.abc import Mapping

OWN = (
    *("advantage", "correction", "loss", "schedule", "rollout.selection"),
    *(f"varying.{name}" for name in ("Linear", "Cosine", "Piecewise", "Proportional", "Stepwise", "Adaptive")),
    *("callbacks.checkpoint.RunCheckpoint", "callbacks.export.Export", "callbacks.hparams.HParams"),
    *("callbacks.charts.Charts", "callbacks.doctor.Doctor", "callbacks.rollouts.RecordRollouts"),
    *("callbacks.progress.RunProgress", "callbacks.reference.ReferenceRefresh", "callbacks.samples.Samples"),
    *("callbacks.reward_model.RewardModelTraining", "checkpoint.io.AtomicCheckpointIO"),
    *("composition.part", "data.PromptData"),
    *(f"data.{name}.prompts" for name in ("demonstrations", "hub", "jsonl", "reasoning_gym", "rows")),
    *("data.hub.gsm8k_row", "data.hub.has_answer", "data.jsonl.Inline", "data.taught.Demonstrations"),
    *("data.episodes.Numbers", "data.episodes.Products"),
    *("environment.Environment", "environment.Played"),
    *("distributed.strategies.FullyShardedStrategy", "distributed.strategies.ReplicatedStrategy"),
    *("environment.calculator.calculator", "environment.guess.guess"),
    *("environment.gymnasium.Gymnasium", "environment.python.Python", "environment.retry.Retry"),
    "environment.tools.Tools",
    *("logger.csv.CSVLogger", "logger.mlflow.MLFlowLogger", "logger.wandb.WandbLogger"),
    *("module.GRPOLightningModule", "module.SFTLightningModule", "policy.hf.HFPolicy", "policy.hf.load"),
    *("policy.plain.PlainPolicy", "policy.scratch.character_llama"),
    *(f"reference.{name}" for name in ("adapter_off", "another_model", "frozen_copy", "none", "of_model")),
    *(f"reward.accuracy.{name}" for name in ("demonstrated", "exact", "numeric", "reasoning_gym")),
    *(f"reward.format.{name}" for name in ("format", "reasoning_steps", "tag_count")),
    *(f"reward.length.{name}" for name in ("cosine_length", "length", "repetition", "soft_overlong", "word_variety")),
    *(
        "reward.code.code",
        "reward.countdown.countdown",
        "reward.accuracy.of_environment",
        "reward.json_schema.json_schema",
        "reward.judge.ChatJudge",
    ),
    *("reward.mathematics.math", "reward.model.RewardModel", "reward.pattern.keyword", "reward.pattern.pattern"),
    *("reward.text.answer_text", "sampler.own.Own"),
    *("sampler.vllm.inside.VLLM", "sampler.vllm.server.VLLMServer"),
    *("reward.PerCompletion", "reward.Weighted", "rollout.Collector", "rollout.Recorded", "validation.Validation"),
)
"""What of this package settings may name: modules of plain arithmetic with all that they define, and single members.

A function that others call after a check of its arguments must not be here: settings would call it without.
"""
DEFINED: Mapping[str, str] = {
    "composition.overrides.part": "composition.part",
    "data.prompt_data.PromptData": "data.PromptData",
    "environment.environment.Environment": "environment.Environment",
    "environment.played.Played": "environment.Played",
    "module.grpo.GRPOLightningModule": "module.GRPOLightningModule",
    "module.sft.SFTLightningModule": "module.SFTLightningModule",
    "reward.engine.weighted.PerCompletion": "reward.PerCompletion",
    "reward.engine.weighted.Weighted": "reward.Weighted",
    "reward.judge.chat.ChatJudge": "reward.judge.ChatJudge",
    "rollout.collector.Collector": "rollout.Collector",
    "rollout.recorded.Recorded": "rollout.Recorded",
    "validation.validation.Validation": "validation.Validation",
}
"""Where members of ``OWN`` are defined that a part hands out under a name of its own."""

_OF_BITSANDBYTES: Mapping[str, str] = {
    "adagrad": "Adagrad Adagrad8bit Adagrad32bit",
    "adam": "Adam Adam8bit Adam32bit PagedAdam PagedAdam8bit PagedAdam32bit",
    "adamw": "AdamW AdamW8bit AdamW32bit PagedAdamW PagedAdamW8bit PagedAdamW32bit",
    "ademamix": "AdEMAMix AdEMAMix8bit PagedAdEMAMix PagedAdEMAMix8bit",
    "lamb": "LAMB LAMB8bit LAMB32bit",
    "lars": "LARS LARS8bit LARS32bit PytorchLARS",
    "lion": "Lion Lion8bit Lion32bit PagedLion PagedLion8bit PagedLion32bit",
    "rmsprop": "RMSprop RMSprop8bit RMSprop32bit",
    "sgd": "SGD SGD8bit SGD32bit",
}
"""Optimizers that make states of the sizes that their kernels write to.

In bitsandbytes 0.50.2 AdEMAMix32bit makes one of half the size, and the classes below all take any kernel's name.
"""
LIBRARIES: Mapping[str, tuple[str, ...]] = {
    "torch.optim": ("torch.optim",),
    **{
        f"bitsandbytes.optim.{place}{name}": (f"bitsandbytes.optim.{module}",)
        for module, names in _OF_BITSANDBYTES.items()
        for name in names.split()
        for place in ("", f"{module}.")
    },
    "transformers.Adafactor": ("transformers.optimization",),
    "transformers.optimization.Adafactor": ("transformers.optimization",),
    "lightning.Trainer": ("lightning.pytorch.trainer",),
    "lightning.pytorch.Trainer": ("lightning.pytorch.trainer",),
    **{
        f"lightning.pytorch.{part}.{name}": homes or (f"lightning.pytorch.{part}",)
        for part, homes, names in (
            (
                "callbacks",
                (),
                "DeviceStatsMonitor EMAWeightAveraging EarlyStopping LambdaCallback LearningRateMonitor "
                "ModelCheckpoint ModelSummary RichModelSummary RichProgressBar StochasticWeightAveraging "
                "TQDMProgressBar ThroughputMonitor Timer WeightAveraging",
            ),
            ("loggers", (), "CSVLogger TensorBoardLogger"),
            ("profilers", (), "AdvancedProfiler PassThroughProfiler PyTorchProfiler SimpleProfiler"),
            ("strategies", (), "DDPStrategy SingleDeviceStrategy"),
            ("accelerators", (), "CPUAccelerator CUDAAccelerator MPSAccelerator"),
            (
                "plugins.environments",
                ("lightning.fabric.plugins.environments",),
                "KubeflowEnvironment LSFEnvironment LightningEnvironment SLURMEnvironment TorchElasticEnvironment",
            ),
            ("plugins.precision", (), "BitsandbytesPrecision DoublePrecision HalfPrecision MixedPrecision"),
        )
        for name in names.split()
    },
}
"""Prefix of a path -> the modules in which the class that it leads to is defined."""

_ALSO_IN: Mapping[str, tuple[str, ...]] = {
    "checkpoint": ("trainer",),
    "distributed": ("trainer",),
    "logger": ("logger", "trainer"),
    "reward": ("reward", "environment"),
}
PLACES: Mapping[str, tuple[str, ...]] = {
    **{
        f"grpo_lightning.{part}": _ALSO_IN.get(part, (part,))
        for part in sorted({name.partition(".")[0] for name in OWN} - {"composition", "varying"})
    },
    **dict.fromkeys(("torch.optim", "bitsandbytes.optim", "transformers"), ("optimizer",)),
    **dict.fromkeys(("lightning.Trainer", "lightning.pytorch"), ("trainer",)),
    "lightning.pytorch.callbacks": ("callbacks", "trainer"),
    "lightning.pytorch.loggers": ("logger", "trainer"),
}
"""Prefix of a path -> the parts of the settings in which it may stand; varying numbers and objects stand anywhere."""

PLAIN = (
    *(f"grpo_lightning.{part}" for part in ("advantage", "correction", "loss", "schedule")),
    "grpo_lightning.rollout.selection",
    *(f"grpo_lightning.data.{name}" for name in ("hub.gsm8k_row", "hub.has_answer", "episodes", "jsonl.Inline")),
    "grpo_lightning.data.taught.Demonstrations",
    *("grpo_lightning.environment.calculator.calculator", "grpo_lightning.environment.guess.guess"),
    *(
        f"grpo_lightning.reward.{name}"
        for name in (
            *("accuracy", "code", "countdown", "environment", "format", "json_schema", "length", "mathematics"),
            *("pattern", "text"),
        )
    ),
    *("torch.optim", "bitsandbytes.optim", "transformers"),
)
"""What loads and writes nothing, whatever its arguments are."""
CALLED = (*PLAIN, "grpo_lightning.reference")
"""What may be ``_partial_``: called later, with more arguments than those of the settings."""
WATCHING = (
    *("DeviceStatsMonitor", "EarlyStopping", "EMAWeightAveraging", "LearningRateMonitor", "Timer"),
    "grpo_lightning.callbacks.reference.ReferenceRefresh",
)
"""Lightning's callbacks and this package's that write nothing of their own, which brought settings may add."""
