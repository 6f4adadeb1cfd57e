"""Seconds of training until 0.9 of the sampled answers to held-out problems of the default task are right.

Same weights, problems, rewards and optimisation as TRL; then each with settings that suit it better. Every run is a
process of its own, the systems in turns. Measuring pass@1 (256 problems, 4 samples each, by the same code) does not
count.
"""

import json
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable
from statistics import median
from typing import Any

from lightning import Callback

import grpo_lightning
from benchmarks.process import ROOT, result
from benchmarks.setting import Setting
from grpo_lightning.reward import Scoring
from grpo_lightning.reward.spec import clip_scores, total

GOAL, STEPS = 0.9, 120
STYLES: dict[str, dict[str, Any]] = {
    "same": {"ours": [], "theirs": {"beta": 0.04}},
    "best": {"ours": ["loss.kl_coef=0"], "theirs": {"beta": 0.0}},
}


class Progress:
    """Adds up the seconds of steps, and measures the policy after each."""

    def __init__(self, run: Any, load: Callable[[], None] = lambda: None) -> None:
        self.run, self.load = run, load
        self.seconds, self.started = 0.0, 0.0
        self.curve: list[tuple[int, float, float]] = []

    def begin(self) -> None:
        self.started = time.perf_counter()

    def end(self) -> bool:
        """Whether the goal is reached."""
        self.seconds += time.perf_counter() - self.started
        self.load()
        module, step = self.run.module, len(self.curve) + 1
        for number, prompts in enumerate(self.run.data.val_dataloader()):
            context = module.context("measure", step, number)
            module.validation.step(module.policy, prompts, completed_steps=step, context=context)
        self.curve.append((step, self.seconds, float(module.validation.compute()["val/pass@1"])))
        return self.curve[-1][2] >= GOAL


def compose(overrides: list[str], seed: int, steps: int) -> Any:
    settings = (f"seed={seed}", f"steps={steps}", "logger=none", "~callbacks.checkpoint", "~callbacks.export")
    run = grpo_lightning.compose(*settings, "data.validate_every=null", *overrides, run_dir=tempfile.mkdtemp())
    run.data.load()
    return run


def ours(style: str, seed: int, steps: int) -> Progress:
    from benchmarks.ours import bare_trainer

    run = compose(STYLES[style]["ours"], seed, steps)
    progress = Progress(run)

    class Watch(Callback):
        def on_train_batch_start(self, *_: Any) -> None:
            progress.begin()

        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            trainer.should_stop |= progress.end()

    bare_trainer(callbacks=[Watch()]).fit(run.module, datamodule=run.data)
    return progress


def theirs(style: str, seed: int, steps: int) -> Progress:
    from datasets import Dataset
    from transformers import TrainerCallback

    from benchmarks import theirs as trl

    run = compose([], seed, steps)
    module, config = run.module, run.config
    module.begin_without_trainer()
    policy, rewards = module.policy, module.rollout.reward
    rows = [
        (text, {name: values[i] for name, values in batch.columns.items()})
        for batch in run.data.train_dataloader()
        for i, text in enumerate(batch.texts)
    ]
    prompts = [policy.chat.render(text) for text, _ in rows]
    if policy.tokenizer(prompts[:8])["input_ids"] != policy.tokenize([text for text, _ in rows[:8]]):
        raise SystemExit("the two would read other tokens")

    def reward(prompts: Any, completions: Any, completion_ids: Any, row: Any, **_: Any) -> Any:
        columns = [json.loads(text) for text in row]
        by_name = {name: [column[name] for column in columns] for name in columns[0]}
        scores = Scoring(rewards, prompts, by_name).finish(completions, completion_ids)
        return total(rewards, clip_scores(rewards, scores.values))

    class Watch(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            progress.begin()

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_training_stop = progress.end()

    def load() -> None:
        policy.model.load_state_dict(trainer.accelerator.unwrap_model(trainer.model).state_dict())

    progress = Progress(run, load)
    trainer = trl.build(
        Setting("learning", group=module.rollout.group_size, prompts=config["data"]["prompts_per_step"]),
        str(ROOT / config["policy"]["path"].removeprefix("pkg://")),
        reward_funcs=reward,
        train_dataset=Dataset.from_dict({"prompt": prompts, "row": [json.dumps(row) for _, row in rows]}),
        callbacks=[Watch()],
        max_steps=steps,
        max_completion_length=module.rollout.max_new_tokens,
        max_grad_norm=config["module"]["max_grad_norm"],
        seed=seed,
        learning_rate=4e-4,
        lr_scheduler_type="linear",
        **STYLES[style]["theirs"],
    )
    trainer.train()
    return progress


def run(options: Namespace) -> dict[str, Any]:
    """All seeds of both systems, in turns."""
    figures: dict[str, Any] = {}
    styles, seeds, steps = (["same"], [0], 1) if options.smoke else (list(STYLES), options.seeds, STEPS)
    print(f"| settings | TRL: seconds / steps, seeds {seeds} | ours | TRL / ours, median |\n|---|---|---|---|")
    for style in styles:
        curves: dict[str, list[Any]] = {"theirs": [], "ours": []}
        for seed in seeds:
            for system, found in curves.items():
                found.append(result("benchmarks.learning", system, style, str(seed), str(steps)))
        ends = {system: [curve[-1] for curve in found] for system, found in curves.items()}
        ratios = [slow[1] / fast[1] for slow, fast in zip(ends["theirs"], ends["ours"], strict=True)]
        cells = [", ".join(f"{seconds:.0f} s / {steps}" for steps, seconds, _ in ends[system]) for system in curves]
        print(f"| {style} | {' | '.join(cells)} | **{median(ratios):.2f}** |", flush=True)
        figures[style] = {**curves, "ratios": ratios}
    return figures


if __name__ == "__main__":
    system = {"ours": ours, "theirs": theirs}[sys.argv[1]]
    print(json.dumps(system(sys.argv[2], int(sys.argv[3]), int(sys.argv[4])).curve))
