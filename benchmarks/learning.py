"""Seconds of training until 0.9 of the sampled answers to held-out problems of the default task are right.

Same weights, problems in the same order, rewards and optimisation for both; then each with settings that suit it
better. Every run is a process of its own, the systems in turns. Measuring pass@1 (256 problems, 4 samples each, by the
same code for both) does not count.
"""

import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from datasets import Dataset
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate
from lightning import Callback, seed_everything
from transformers import TrainerCallback

from benchmarks.process import result
from benchmarks.setting import Setting
from grpo_lightning.reward.scoring import Scoring
from grpo_lightning.reward.spec import clip_scores, total
from grpo_lightning.rollout.scoring import StepContext

GOAL, EVERY, STEPS = 0.9, 1, 120
STYLES: dict[str, dict[str, Any]] = {
    "same": {
        "ours": [],
        "theirs": {"learning_rate": 4e-4, "lr_scheduler_type": "linear", "beta": 0.04},
    },
    "best": {
        "ours": ["loss.kl_coef=0"],
        "theirs": {"learning_rate": 4e-4, "lr_scheduler_type": "linear", "beta": 0.0},
    },
}


class Progress:
    """Adds up the seconds of steps and measures the policy every few."""

    def __init__(self, measure: Callable[[int], float]) -> None:
        self.measure = measure
        self.steps, self.seconds, self.started = 0, 0.0, 0.0
        self.curve: list[tuple[int, float, float]] = []

    def open(self) -> None:
        self.started = time.perf_counter()

    def end(self) -> bool:
        """Whether the goal is reached."""
        self.seconds += time.perf_counter() - self.started
        self.steps += 1
        if self.steps % EVERY == 0:
            self.curve.append((self.steps, self.seconds, self.measure(self.steps)))
        return bool(self.curve) and self.curve[-1][2] >= GOAL


def parts(overrides: list[str], seed: int, steps: int) -> tuple[Any, Any, Any, Callable[[int], float]]:
    """Settings, module, data and how the module's policy is measured."""
    given = [f"run_dir={tempfile.mkdtemp()}", f"seed={seed}", f"steps={steps}", "data.validate_every=null"]
    with initialize_config_dir(str(Path(__file__).parents[1] / "conf"), version_base="1.3"):
        cfg = compose("train", [*given, *overrides])
    seed_everything(seed, verbose=False)
    data, module = instantiate(cfg.data, _convert_="all"), instantiate(cfg.module, _convert_="all")

    def measure(step: int) -> float:
        for number, prompts in enumerate(data.val_dataloader()):
            context = StepContext(seed=module.seed_of(step, number), clock=module.clock)
            module.validation.step(module.policy, prompts, completed_steps=step, context=context)
        return float(module.validation.compute()["val/pass@1"])

    return cfg, module, data, measure


def ours(style: str, seed: int, steps: int) -> Progress:
    cfg, module, data, measure = parts(STYLES[style]["ours"], seed, steps)
    progress = Progress(measure)

    class Watch(Callback):
        def on_train_batch_start(self, *_):
            progress.begin()

        def on_train_batch_end(self, trainer, *_):
            trainer.should_stop |= progress.end()

    cfg.trainer.callbacks, cfg.trainer.logger, cfg.trainer.enable_checkpointing = [], False, False
    trainer = instantiate(cfg.trainer, _convert_="all", limit_val_batches=0, callbacks=[Watch()])
    trainer.fit(module, datamodule=data)
    return progress


def theirs(style: str, seed: int, steps: int) -> Progress:
    from benchmarks import theirs as system

    cfg, module, data, measure = parts([], seed, steps)
    policy, rewards, rollout = module.policy, instantiate(cfg.reward, _convert_="all"), cfg.rollout
    rows = [
        (text, {name: values[i] for name, values in batch.columns.items()})
        for batch in data.train_dataloader()
        for i, text in enumerate(batch.texts)
    ]
    prompts = [policy.render(text) for text, _ in rows]
    if policy.tokenizer(prompts[:8])["input_ids"] != policy.tokenize([text for text, _ in rows[:8]]):
        raise SystemExit("the two would read other tokens")

    def reward(prompts, completions, completion_ids, row, **_):
        columns = [json.loads(text) for text in row]
        given = {name: [column[name] for column in columns] for name in columns[0]}
        found = Scoring(rewards, prompts, given).finish(completions, completion_ids)
        return total(rewards, clip_scores(rewards, found.values))

    class Watch(TrainerCallback):
        def on_step_begin(self, *_, **__):
            progress.begin()

        def on_step_end(self, args, state, control, **_):
            control.should_training_stop = progress.end()

    def loaded(step: int) -> float:
        policy.model.load_state_dict(trainer.accelerator.unwrap_model(trainer.model).state_dict())
        return measure(step)

    progress = Progress(loaded)
    directory = str(Path(__file__).parents[1] / cfg.policy.path.removeprefix("pkg://"))
    setting = Setting("learning", group=rollout.group_size, prompts=cfg.data.prompts_per_step)
    trainer = system.built(
        setting,
        directory,
        reward_funcs=reward,
        train_dataset=Dataset.from_dict({"prompt": prompts, "row": [json.dumps(row) for _, row in rows]}),
        callbacks=[Watch()],
        max_steps=steps,
        max_completion_length=rollout.max_new_tokens,
        max_grad_norm=cfg.module.max_grad_norm,
        seed=seed,
        **STYLES[style]["theirs"],
    )
    trainer.train()
    return progress


def run(*, seeds: Sequence[int] = (0, 1, 2), styles: Sequence[str] = ("same", "best"), steps: int = STEPS) -> dict:
    found: dict = {}
    for style in styles:
        found[style] = {"settings": STYLES[style], "ours": {}, "theirs": {}}
        for seed in seeds:
            for system in ("ours", "theirs"):
                curve = result("benchmarks.learning", system, style, str(seed), str(steps))
                found[style][system][str(seed)] = curve
                taken, seconds, passed = curve[-1]
                name = "ours" if system == "ours" else "TRL"
                print(
                    f"learning {style} {name:5} seed {seed}: {passed:.3f} after {taken} steps, {seconds:.0f} s",
                    flush=True,
                )
        times = {name: [curve[-1][1] for curve in found[style][name].values()] for name in ("ours", "theirs")}
        found[style]["ratios"] = [slow / fast for slow, fast in zip(times["theirs"], times["ours"], strict=True)]
        print(f"learning {style}: {median(found[style]['ratios']):.2f} times faster", flush=True)
    return found


if __name__ == "__main__":
    system = {"ours": ours, "theirs": theirs}[sys.argv[1]]
    print(json.dumps(system(sys.argv[2], int(sys.argv[3]), int(sys.argv[4])).curve))
