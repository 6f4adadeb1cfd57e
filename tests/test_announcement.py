"""What a run says at its start and at its end."""

from grpo_lightning import __version__
from grpo_lightning.checkpoint.resume import resume_command
from grpo_lightning.config.shell import command_name
from grpo_lightning.output.announcement import fitted, greeting, opening
from grpo_lightning.output.ending import closing, label, outcome

DEFAULTS = {"algorithm": "grpo", "loss": "grpo", "policy": "tiny", "reward": ["accuracy", "format"]}
CONFIG = {"mode": "fit", "steps": 120, "seed": 0, "checkpoint": None, "run_dir": "runs/a", "sweep_metric": "val/pass@1"}
WORK = (
    "8 prompts x 16 completions = 128 completions per rollout; 1 optimizer step per rollout; 120 rollouts = "
    "15360 completions, 120 optimizer steps in total"
)


def test_the_first_line_says_what_is_done():
    assert greeting(CONFIG) == f"grpo-lightning {__version__}: fit, 120 steps, seed 0"
    measured = CONFIG | {"mode": "validate", "checkpoint": "last"}
    assert greeting(measured) == f"grpo-lightning {__version__}: validate, seed 0, from checkpoint=last"


def test_the_default_run_has_nothing_to_name():
    assert opening(DEFAULTS, DEFAULTS, [], CONFIG, WORK) == [
        "8 prompts x 16 completions = 128 completions per rollout; 1 optimizer step per",
        "  rollout; 120 rollouts = 15360 completions, 120 optimizer steps in total",
        "directory: runs/a (settings: .hydra/config.yaml)",
    ]


def test_what_differs_has_a_line_what_was_asked_for_first():
    choices = {"loss": "dapo", "policy": "tiny", "reward": ["accuracy", "length"], "algorithm": "dapo", "sweep": "mine"}
    words = ["+trainer.benchmark=true", "~reward.format", "steps=9", "seed=7", "algorithm=dapo", "logger.token=hf_abc"]
    lines = opening(choices, DEFAULTS, words, CONFIG | {"mode": "validate"}, WORK)
    assert lines == [
        "trainer.benchmark: true",
        "reward.format: left out",
        "algorithm: dapo",
        "logger.token: REDACTED",
        "loss: dapo",
        "reward: accuracy, length",
        "sweep: mine",
        "directory: runs/a (settings: .hydra/config.yaml)",
    ]


def test_a_long_text_is_folded():
    assert [len(line) for line in fitted("memory: " + "much " * 20)] == [77, 31]
    assert fitted("a" * 90) == ["a" * 90]


VALUES = {
    "val/pass@1": {
        "first": 0.2612,
        "last": 0.9712,
        "best": 0.9791,
        "best_step": 100,
        "first_step": 0,
        "last_step": 120,
    },
    "reward/accuracy": {"first": 0.25, "last": 0.75},
    "loss/total": {"first": 2.5, "last": 0.125},
}


def test_the_outcome_fits_a_line():
    summary = {"values": VALUES, "seconds": 43.4}
    assert outcome(summary, "val/pass@1") == "pass@1 .261 → .971 (best .979 at 100) · 43 s"
    assert outcome(summary, "reward/accuracy") == "accuracy .250 → .750 · 43 s"
    assert outcome(summary, "val/absent") == "pass@1 .261 → .971 (best .979 at 100) · 43 s"
    assert outcome({"values": {"loss/total": VALUES["loss/total"]}, "seconds": 0.6}, "val/pass@1") == (
        "loss 2.500 → .125 · 1 s"
    )
    once = {"val/pass@1": VALUES["val/pass@1"] | {"first_step": 120}}
    assert outcome({"values": once, "seconds": 3}, "val/pass@1") == "pass@1 .971 · 3 s"
    assert outcome({"values": {}, "seconds": 3}, "val/pass@1") == "3 s"
    assert [label(name) for name in ("val/reward/total", "val/reward/mine", "optim/lr")] == [
        "reward",
        "mine",
        "optim/lr",
    ]


def test_a_run_ends_with_what_it_leaves_behind(tmp_path):
    summary = {"values": VALUES, "seconds": 43.4, "metrics": {"val/pass@1": 0.5, "val/maj@4": 0.25, "loss/total": 1.0}}
    told = "pass@1 .261 → .971 (best .979 at 100) · 43 s"
    assert closing(summary, CONFIG, tmp_path, "again") == [told]
    for name in ("export", "tensorboard", "checkpoints"):
        (tmp_path / name).mkdir()
    (tmp_path / "checkpoints" / "last.ckpt").touch()
    assert closing(summary, CONFIG, tmp_path, "again", is_job=True) == [told]
    lines = closing(summary, CONFIG, tmp_path, "again")
    text = " ".join(" ".join(lines).split())
    assert text == (
        f"{told} exported to {tmp_path}/export look at it with: tensorboard --logdir {tmp_path} continue with: again"
    )
    assert all(len(line) <= 80 or line == f"  {line.split()[-1]}" or "--logdir" in line for line in lines)
    long = tmp_path / ("d" * 90)
    (long / "export").mkdir(parents=True)
    assert closing(summary, CONFIG, long, "again") == [told, "exported to", f"  {long}/export"]
    assert closing(summary, CONFIG | {"mode": "export"}, tmp_path, "again") == []
    assert closing(summary, CONFIG | {"mode": "validate"}, tmp_path, "again") == [
        "validated: pass@1 .500 · maj@4 .250 · 43 s"
    ]
    many = summary | {"metrics": {f"val/pass@{k}": 0.5 for k in (1, 2, 4, 8, 16, 32)}}
    assert len(closing(many, CONFIG | {"mode": "validate"}, tmp_path, "again")) == 8  # a line for each


def test_a_finished_run_is_continued_for_as_many_steps_again(tmp_path):
    command = resume_command(["seed=1", "steps=40", "checkpoint=last"], tmp_path, steps=80)
    assert command == f"{command_name()} seed=1 steps=80 hydra.run.dir={tmp_path} checkpoint=last"
