"""What callbacks write, read back from real files."""

import html
import json
import math
import os
import re
from dataclasses import replace

import pytest
import torch
from lightning import Callback
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugin_util import markdown_to_safe_html
from torch.utils.tensorboard import SummaryWriter

from grpo_lightning.callbacks.completions import completions_table, escape_markdown, fence
from grpo_lightning.callbacks.tensorboard import hparams_columns
from grpo_lightning.checkpoint import rewind
from grpo_lightning.checkpoint.io import AtomicCheckpointIO, read
from grpo_lightning.config.redaction import escape_control
from grpo_lightning.module import GRPOLightningModule
from grpo_lightning.report.comparison import compare
from grpo_lightning.report.runs import read_run
from grpo_lightning.sweep import is_finished
from grpo_lightning.types import Prompts, Scored
from tests.support.running import small_run
from tests.test_rollout import Fixed


def scalars(directory) -> dict[str, list[tuple[int, float]]]:
    found = EventAccumulator(str(directory), size_guidance={"scalars": 0}, purge_orphaned_data=False)
    found.Reload()
    return {tag: [(e.step, e.value) for e in found.Scalars(tag)] for tag in found.Tags()["scalars"]}


def test_events_are_cut_back_to_the_recorded_length(tmp_path):
    writer = SummaryWriter(str(tmp_path), filename_suffix=rewind.EVENTS_SUFFIX)
    writer.add_scalar("x", 1.0, 1)
    writer.flush()
    known = rewind.event_lengths(tmp_path)
    writer.add_scalar("x", 2.0, 2)
    writer.close()
    later = SummaryWriter(str(tmp_path), filename_suffix=f".later{rewind.EVENTS_SUFFIX}")
    later.add_scalar("x", 3.0, 3)
    later.close()
    assert sorted(step for step, _ in scalars(tmp_path)["x"]) == [1, 2, 3]
    rewind.rewind_events(tmp_path, known)
    assert scalars(tmp_path)["x"] == [(1, 1.0)]
    assert rewind.event_lengths(tmp_path) == known
    rewind.rewind_events(tmp_path, {})
    assert rewind.event_lengths(tmp_path) == {}


def test_a_checkpoint_is_whole_or_the_old_one(tmp_path, monkeypatch):
    path, io = tmp_path / "new" / "last.ckpt", AtomicCheckpointIO()
    io.save_checkpoint({"step": {"completed": 1}, "w": torch.ones(2)}, path)

    def interrupted(*arguments):
        arguments[1].write(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(torch, "save", interrupted)
    with pytest.raises(OSError, match="disk full"):
        io.save_checkpoint({"step": {"completed": 2}}, path)
    assert io.load_checkpoint(path)["step"] == {"completed": 1}
    assert os.listdir(path.parent) == ["last.ckpt"]
    io.remove_checkpoint(path)
    assert not path.exists()


def test_a_checkpoint_with_code_or_of_another_program_is_refused(tmp_path):
    torch.save({"step": print}, tmp_path / "code.ckpt")
    with pytest.raises(Exception, match="holds more than tensors and plain values"):
        read(tmp_path / "code.ckpt")
    torch.save({"state_dict": {}}, tmp_path / "other.ckpt")
    with pytest.raises(ValueError, match=r"other.ckpt was not written by this program"):
        read(tmp_path / "other.ckpt")


HOSTILE = [
    "plain",
    "``` breaks out ``` <script>alert(1)</script>",
    "`````\n# heading\n`````",
    "bell \x07 escape \x1b[31m red \x00 override \u202e rtl",
    "",
]


def test_a_completion_cannot_leave_its_fence():
    for text in HOSTILE:
        fenced = fence(escape_control(text))
        opening, *body, closing = fenced.split("\n")
        marks = opening.removesuffix("text")
        assert set(marks) == {"`"}
        assert len(marks) >= 3
        assert closing == marks
        assert marks not in "\n".join(body)
        assert not any((ord(c) < 32 and c not in "\n\t") or c in "\u202e\x1b" for c in fenced)


def scored_rows() -> Scored:
    """Two prompts, three completions each; the second prompt is a chat."""
    sampled = Fixed().sample(("p", "q"), group_size=3, sampling=None, seed=0)
    rewards = {"total": torch.tensor([0.0, 1.0, 2.0, 3.0, 4.0, 5.0]), "format": torch.full((6,), math.nan)}
    chat = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "q?"}]
    right, nothing = torch.zeros(6, dtype=torch.bool), torch.zeros(6, 1)
    prompts = Prompts(("p", chat), {"answer": ("7", "|8|")})
    return Scored(prompts, sampled, rewards, right, scores=nothing, steps=nothing)


def test_a_table_of_completions_has_a_row_for_each():
    scored = scored_rows()
    table = completions_table(scored, torch.arange(6) / 8, max_rows=200, max_characters=100)
    assert table.columns == ["prompt", "answer", "completion", "length", "end", "total", "format", "advantage"]
    assert len(table.rows) == 6
    length, end = int(scored.sampled.mask[4].sum()), "end" if scored.sampled.finished[4] else "cut"
    expected = ["[system] be brief\n\n[user] q?", "|8|", scored.sampled.texts[4], length, end, 4.0, None, 0.5]
    assert table.rows[4] == expected
    assert "```text\n[system] be brief\n\n[user] q?\n```\n\n**Answer** &#124;8&#124;" in table.page
    assert f"| {scored.sampled.texts[4]} | {length} | {end} | 4 | - | 0.5 |" in table.page


def test_a_table_ends_after_the_last_whole_group_and_says_so():
    table = completions_table(scored_rows(), max_rows=5, max_characters=100)
    assert [row[0] for row in table.rows] == ["p"] * 3
    assert "advantage" not in table.columns
    assert table.page.endswith("*The first 3 of 6 completions.*")
    assert len(completions_table(scored_rows(), max_rows=2, max_characters=100).rows) == 2


def test_long_texts_are_cut_visibly():
    table = completions_table(scored_rows(), max_rows=3, max_characters=1)
    assert [row[2] for row in table.rows] == ["a", "b", "a […]"]


def test_no_part_of_a_secret_is_left_by_a_cut():
    scored = replace(scored_rows(), prompts=Prompts(("say hf_" + 24 * "a", "q"), {}))
    table = completions_table(scored, max_rows=3, max_characters=14)
    assert table.rows[0][0] == "say REDACTED"


def test_a_completion_in_a_table_is_shown_and_nothing_else():
    for text in (*HOSTILE, "a | b |\n|---|\n", "![x](http://e.vil/p.png)", "<img src=x>", "&lt;b&gt;"):
        page = markdown_to_safe_html(
            f"| completion | end |\n|---|---:|\n| {escape_markdown(escape_control(text))} | cut |"
        )
        cells = re.findall(r"<td[^>]*>(.*?)</td>", page, re.DOTALL)
        assert len(cells) == 2, page
        assert cells[1] == "cut"
        assert not re.findall(r"<(?!br\b)", cells[0])
        shown = html.unescape(re.sub(r"<br ?/?>", "\n", cells[0]))
        assert shown.split() == escape_control(text).split()


def test_columns_of_a_run_are_what_was_asked_for_and_then_its_parts():
    settings = {
        "steps": 7,
        "seed": 0,
        "loss": {"kl_coef": 0.5},
        "reward": {"accuracy": {"weight": 1}, "format": {}},
        "policy": {"stop": ["a"], "share": True},
        "run_dir": "/x",
    }
    words = ["+loss.kl_coef=0.5", "policy.stop=[a]", "algorithm=dapo", "policy.share=true", "run_dir=/x", "~a=b"]
    words += ["callbacks.samples.every=2", "logger=csv", "reward=[accuracy]", "gone.key=1"]
    choices = {"algorithm": "dapo", "policy": "tiny", "logger": "csv"}
    shown = hparams_columns(settings, words, choices, ["algorithm", "reward", "policy", "data"])
    assert list(shown.items()) == [
        ("loss.kl_coef", 0.5),
        ("policy.stop", "['a']"),
        ("algorithm", "dapo"),
        ("policy.share", "True"),
        ("reward", "accuracy+format"),
        ("policy", "tiny"),
    ]


@pytest.mark.slow
def test_an_export_replaces_nothing_but_an_export(tmp_path, monkeypatch):
    home = tmp_path / "home"
    home.mkdir()
    small_run(tmp_path / "empty", f"callbacks.export.directory={home}")
    assert (home / "config.json").exists()
    small_run(tmp_path / "again", f"callbacks.export.directory={home}")
    (home / "README.md").write_text("my own model")
    (tmp_path / "file").write_text("mine")
    monkeypatch.setattr(GRPOLightningModule, "training_step", lambda *_: pytest.fail("a step was made"))
    for place in (home, tmp_path / "file"):
        with pytest.raises(ValueError, match=rf"callbacks.export.directory={place} holds other files than an export"):
            small_run(tmp_path / f"refused_{place.name}", f"callbacks.export.directory={place}")
    assert (home / "README.md").read_text() == "my own model"
    assert (home / "config.json").exists()
    mine = tmp_path / "run" / "export" / "mine.txt"
    mine.parent.mkdir(parents=True)
    mine.write_text("mine")
    with pytest.raises(ValueError, match=r"hydra.run.dir/export=.*export holds other files than an export"):
        small_run(tmp_path / "run", "mode=export")
    assert mine.read_text() == "mine"


@pytest.mark.parametrize("mask, expected", [(0o022, 0o644), (0o077, 0o600), (0o002, 0o664)])
def test_exported_files_have_the_mode_of_new_files(mask, expected, tmp_path):
    before = os.umask(mask)
    try:
        small_run(tmp_path)
    finally:
        os.umask(before)
    modes = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "export").rglob("*") if path.is_file()}
    assert "model.safetensors" in modes
    assert set(modes.values()) == {expected}


class Stop(Callback):
    """Ends the training after a step, as a limit on time would."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_end(self, trainer, module, *_):
        trainer.should_stop = module.completed_steps >= self.step


@pytest.mark.slow
def test_a_run_that_a_callback_ends_has_its_last_step_saved(tmp_path):
    small_run(tmp_path, "steps=6", "+callbacks.stop={_target_: tests.test_callbacks.Stop, step: 3}")
    assert read(tmp_path / "checkpoints" / "last.ckpt")["step"]["completed"] == 3
    small_run(tmp_path, "steps=6", "checkpoint=last")
    assert [step for step, _ in scalars(tmp_path / "tensorboard")["reward/total"]] == [1, 2, 3, 4, 5, 6]


def test_a_run_writes_scalars_texts_histograms_and_settings(tmp_path, capsys):
    module = small_run(
        tmp_path, "steps=4", "validation.every=2", "callbacks.samples.every=3", "callbacks.progress.every=1"
    )
    found = EventAccumulator(str(tmp_path / "tensorboard"), size_guidance={"tensors": 0, "scalars": 0, "histograms": 0})
    found.Reload()
    tags = found.Tags()
    written = scalars(tmp_path / "tensorboard")
    for name in (
        *("reward/total", "reward/custom", "reward/format", "reward/std", "advantage/mean", "advantage/std"),
        *("policy/kl_divergence", "policy/entropy", "policy/clip_fraction", "policy/ratio_mean", "policy/ratio_max"),
        *("loss/total", "loss/policy", "loss/kl", "group/all_right", "group/all_wrong", "group/mixed"),
        *("completion/length_mean", "completion/length_max", "completion/truncated_fraction"),
        *("optim/grad_norm", "optim/lr", "optim/skipped"),
        *("time/rollout", "time/reward", "time/score", "time/update", "time/step"),
        *("perf/tokens_per_second", "perf/peak_memory_gb"),
    ):
        assert [step for step, _ in written[name]] == [1, 2, 3, 4], name
    for name in ("val/reward/total", "val/reward/custom", "val/pass@1", "val/pass@4", "val/maj@4"):
        assert [step for step, _ in written[name]] == [0, 2, 4], name
    assert written["reward/total"][-1][1] == pytest.approx(module.metrics["reward/total"])
    assert set(tags["histograms"]) == {
        f"~histogram/{name}" for name in ("reward_total", "advantage", "completion_length", "policy_ratio")
    }
    assert not set(tags["histograms"]) & set(tags["scalars"])
    assert [event.step for event in found.Histograms("~histogram/completion_length")] == [1, 3]
    tables = {name: f"completions/{name}/text_summary" for name in ("train", "validation")}
    assert [event.step for event in found.Tensors(tables["train"])] == [1, 3]
    assert [event.step for event in found.Tensors(tables["validation"])] == [0, 2, 4]
    page = found.Tensors(tables["train"])[0].tensor_proto.string_val[0].decode()
    assert page.count("**Prompt ") == 2
    assert len([line for line in page.splitlines() if line.startswith("| ")]) == 2 * (1 + 4)
    assert "_hparams_/session_start_info" in str(found.summary_metadata.keys()) or any(
        "hparams" in tag for tag in found.summary_metadata
    )
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("step ")]
    assert [line.split()[1] for line in lines] == ["0/4", "1/4", "2/4", "3/4", "4/4"]
    assert "pass@1" in lines[0]
    assert "reward" in lines[-1]


@pytest.mark.slow
def test_a_run_that_a_callback_ends_says_so(tmp_path, caplog):
    stop = "{_target_: lightning.pytorch.callbacks.EarlyStopping, monitor: val/pass@1, patience: 1, mode: max}"
    given = ("steps=6", "validation.every=1", "optimizer.lr=1e-12", f"+callbacks.stop={stop}")
    small_run(tmp_path / "run", *given)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    made = summary["steps"]
    assert (summary["status"], made) == ("stopped", 2)  # the first validation is the best, the second no better
    assert f"a callback has ended the run after {made} of 6 steps" in caplog.text
    record = read_run(tmp_path / "run")
    assert is_finished(record, 6)
    assert list(compare([record]).unfinished) == []
    small_run(tmp_path / "run", "steps=6", "validation.every=1", "checkpoint=last")
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["status"], summary["steps"]) == ("finished", 6)
