"""What callbacks write, read back from real files."""

import html
import json
import math
import os
import re
from contextlib import nullcontext, suppress
from functools import partial
from types import SimpleNamespace

import bitsandbytes
import pytest
import torch
from lightning import Callback
from lightning.pytorch.callbacks import BackboneFinetuning, LambdaCallback, ModelCheckpoint
from lightning.pytorch.callbacks.spike import SpikeDetection
from lightning.pytorch.strategies import SingleDeviceStrategy
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugin_util import markdown_to_safe_html
from torch import nn
from torch.utils.tensorboard import SummaryWriter

import grpo_lightning as grpo
from grpo_lightning.batch import Prompts, Scored
from grpo_lightning.callbacks.completions import _clean, completions_table, fence, inert
from grpo_lightning.callbacks.hparams import columns
from grpo_lightning.checkpoint import tensorboard
from grpo_lightning.checkpoint.io import AtomicCheckpointIO, read
from grpo_lightning.checkpoint.of_others import check, check_network, check_weights, leave_out
from grpo_lightning.composition.sweep import is_done
from grpo_lightning.data import PromptData
from grpo_lightning.data.jsonl import Inline
from grpo_lightning.module import GRPOLightningModule
from grpo_lightning.output import redaction
from grpo_lightning.output.terminal import printable
from grpo_lightning.report.comparison import compare
from grpo_lightning.report.records import read_run
from tests.support.provocations import provocation
from tests.support.running import SMALL, small_run
from tests.test_rollout import Fixed


def scalars(directory) -> dict[str, list[tuple[int, float]]]:
    found = EventAccumulator(str(directory), size_guidance={"scalars": 0}, purge_orphaned_data=False)
    found.Reload()
    return {tag: [(e.step, e.value) for e in found.Scalars(tag)] for tag in found.Tags()["scalars"]}


def test_events_are_cut_back_to_the_recorded_length(tmp_path):
    writer = SummaryWriter(str(tmp_path), filename_suffix=tensorboard.SUFFIX)
    writer.add_scalar("x", 1.0, 1)
    writer.flush()
    known = tensorboard.position(tmp_path)
    writer.add_scalar("x", 2.0, 2)
    writer.close()
    later = SummaryWriter(str(tmp_path), filename_suffix=f".later{tensorboard.SUFFIX}")
    later.add_scalar("x", 3.0, 3)
    later.close()
    assert sorted(step for step, _ in scalars(tmp_path)["x"]) == [1, 2, 3]
    assert tensorboard.rewind(tmp_path, known) > 0
    assert scalars(tmp_path)["x"] == [(1, 1.0)]
    assert tensorboard.position(tmp_path) == known
    assert tensorboard.rewind(tmp_path, known) == 0
    tensorboard.rewind(tmp_path, {})
    assert tensorboard.position(tmp_path) == {}


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
    with pytest.raises(Exception, match="[Ww]eights.only"):
        read(tmp_path / "code.ckpt")
    torch.save({"state_dict": {}}, tmp_path / "other.ckpt")
    with pytest.raises(ValueError, match=r"other.ckpt' was not written by this program"):
        read(tmp_path / "other.ckpt")


HOSTILE = [
    "plain",
    "``` breaks out ``` <script>alert(1)</script>",
    "`````\n# heading\n`````",
    "bell \x07 escape \x1b[31m red \x00 override \u202e rtl",
    "",
]


@pytest.mark.parametrize("text", HOSTILE)
def test_a_completion_cannot_leave_its_fence(text):
    fenced = fence(printable(text))
    opening, *body, closing = fenced.split("\n")
    marks = opening.removesuffix("text")
    assert set(marks) == {"`"}
    assert len(marks) >= 3
    assert closing == marks
    assert marks not in "\n".join(body)
    assert not any(ord(c) < 32 and c not in "\n\t" for c in fenced)
    assert "\u202e" not in fenced
    assert "\x1b" not in fenced


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
    table = completions_table("c", scored, torch.arange(6) / 8, max_rows=200, max_characters=100)
    assert table.columns == ["prompt", "answer", "completion", "length", "end", "total", "format", "advantage"]
    assert len(table.rows) == 6
    length, end = int(scored.sampled.mask[4].sum()), "end" if scored.sampled.finished[4] else "cut"
    expected = ["[system] be brief\n\n[user] q?", "|8|", scored.sampled.texts[4], length, end, 4.0, None, 0.5]
    assert table.rows[4] == expected
    assert "```text\n[system] be brief\n\n[user] q?\n```\n\n**Answer** &#124;8&#124;" in table.page
    assert f"| {scored.sampled.texts[4]} | {length} | {end} | 4 | - | 0.5 |" in table.page


def test_a_table_ends_after_the_last_whole_group_and_says_so():
    table = completions_table("c", scored_rows(), max_rows=5, max_characters=100)
    assert [row[0] for row in table.rows] == ["p"] * 3
    assert "advantage" not in table.columns
    assert table.page.endswith("*The first 3 of 6 completions.*")
    assert len(completions_table("c", scored_rows(), max_rows=2, max_characters=100).rows) == 2


def test_long_texts_are_cut_visibly():
    table = completions_table("c", scored_rows(), max_rows=3, max_characters=1)
    assert [row[2] for row in table.rows] == ["a", "b", "a […]"]


def test_no_part_of_a_secret_is_left_by_a_cut(monkeypatch):
    monkeypatch.setattr(redaction, "_known", {"a secret of mine"})
    assert _clean("a secret of mine", 12) == "REDACTED RED […]"
    assert _clean("say: a secret of mine", 14).startswith("say: REDACTED")


@pytest.mark.parametrize("text", [*HOSTILE, "a | b |\n|---|\n", "![x](http://e.vil/p.png)", "<img src=x>", "&lt;b&gt;"])
def test_a_completion_in_a_table_is_shown_and_nothing_else(text):
    rows = f"| completion | end |\n|---|---:|\n| {inert(printable(text))} | cut |"
    page = markdown_to_safe_html(rows)
    cells = re.findall(r"<td[^>]*>(.*?)</td>", page, re.DOTALL)
    assert len(cells) == 2, page
    assert cells[1] == "cut"
    assert not re.findall(r"<(?!br\b)", cells[0])
    shown = html.unescape(re.sub(r"<br ?/?>", "\n", cells[0]))
    assert shown.split() == printable(text).split()


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
    shown = columns(settings, words, choices, ["algorithm", "reward", "policy", "data"])
    assert list(shown.items()) == [
        ("loss.kl_coef", 0.5),
        ("policy.stop", "['a']"),
        ("algorithm", "dapo"),
        ("policy.share", True),
        ("reward", "accuracy+format"),
        ("policy", "tiny"),
    ]


@provocation("`callbacks.export.directory=` a directory of one's own", "refused by its key before the first step")
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
        with pytest.raises(ValueError, match=rf"callbacks.export.directory={place}: allowed is a directory that"):
            small_run(tmp_path / f"refused_{place.name}", f"callbacks.export.directory={place}")
    assert (home / "README.md").read_text() == "my own model"
    assert (home / "config.json").exists()
    mine = tmp_path / "run" / "export" / "mine.txt"
    mine.parent.mkdir(parents=True)
    mine.write_text("mine")
    with pytest.raises(ValueError, match=r"hydra.run.dir/export=.*export: allowed is a directory that does not exist"):
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


@provocation(
    "a callback that ends a run before its last step, such as Lightning's `EarlyStopping`",
    "status stopped, which a line says; the last step is saved and continues; a sweep leaves the job alone",
)
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
    assert is_done(record, 6)
    assert list(compare([record]).others) == []
    small_run(tmp_path / "run", "steps=6", "validation.every=1", "checkpoint=last")
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["status"], summary["steps"]) == ("finished", 6)


class Diary(Callback):
    """A callback of the user's own with a state."""

    page = "diary.txt"

    def state_dict(self):
        return {"page": self.page}

    def load_state_dict(self, state):
        self.page = state["page"]


class Hooked(Callback):
    """One that keeps its state by hooks instead."""

    page = "diary.txt"

    def on_save_checkpoint(self, trainer, module, checkpoint):
        checkpoint["diary"] = {"page": self.page}

    def on_load_checkpoint(self, trainer, module, checkpoint):
        self.page = checkpoint["diary"]["page"]


class Rows(PromptData):
    """Data of the user's own with a state."""

    def state_dict(self):
        return {"page": "../.bashrc.d/x"}

    def load_state_dict(self, state):
        self.page = state["page"]


@provocation(
    "a stranger's checkpoint, and a callback or data of the user's own that take a state of it, such as the name of a "
    "file that they write, also by a hook, and without `callbacks.checkpoint`",
    "refused before anything is loaded; `trusted=[…]` takes it, and so does `checkpoint=last`",
)
@pytest.mark.slow
@pytest.mark.parametrize("kind", [Diary, Hooked])
def test_states_of_the_users_callbacks_come_from_the_run_itself(kind, tmp_path):
    own = [word for word in SMALL if not word.startswith(("reward", "trusted", "steps"))] + ["reward=[format]"]

    def page(place, *words, page="diary.txt"):
        diary = kind()
        diary.page = page
        run = grpo.compose(*own, *words, callbacks=diary, run_dir=tmp_path / place)
        run.validate() if "mode=validate" in words else run.fit()
        return diary.page

    page("theirs", "steps=1", page="../.bashrc.d/x")
    theirs = f"checkpoint={tmp_path}/theirs/checkpoints/last.ckpt"
    told = r"last\.ckpt: is of another run, and may be a stranger's; what it says would be given to (Diary|Hooked) of "
    for words in (("steps=2",), ("steps=2", "~callbacks.checkpoint"), ("mode=validate",)):
        with pytest.raises(ValueError, match=rf"{told}tests\.test_callbacks.*; allowed is trusted=\[tests\] if you"):
            page("own", theirs, *words)
    assert page("trusted", theirs, "steps=2", "trusted=[tests]") == "../.bashrc.d/x"
    assert page("theirs", "checkpoint=last", "steps=2") == "../.bashrc.d/x"


class Loader:
    """A loader of the user's own with a state, as torchdata's."""

    taken: list = []  # noqa: RUF012

    def __init__(self, batches):
        self._batches = batches

    def __iter__(self):
        return iter(self._batches)

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        self.taken.append(state)


class Loading(PromptData):
    def train_dataloader(self):
        return Loader(super().train_dataloader())


@provocation(
    "a stranger's checkpoint with the state of a loader of the user's own, where Lightning keeps its progress",
    "the loader is given nothing; this project's checkpoints hold none",
)
@pytest.mark.slow
@pytest.mark.parametrize("pops", [True, False])
def test_nor_do_loaders(pops, tmp_path, monkeypatch):
    own = [word for word in SMALL if not word.startswith(("reward", "trusted", "steps"))] + ["reward=[format]"]
    monkeypatch.setattr(Loader, "taken", [])

    def made(place, *words):
        run = grpo.compose(*own, *words, run_dir=tmp_path / place)
        run.data.__class__ = Loading
        return run

    run = made("theirs", "steps=1")
    run.fit()
    loops = run.trainer._checkpoint_connector._get_loops_state_dict()
    loops["fit_loop"]["state_dict"] = {"combined_loader": [{"page": "../.bashrc.d/x"}]}
    loops["fit_loop"]["epoch_progress"]["current"] |= {"ready": 1, "started": 1, "processed": 0}
    file = tmp_path / "theirs" / "checkpoints" / "last.ckpt"
    checkpoint = torch.load(file, weights_only=True)
    known = checkpoint["step"]["metrics"]
    checkpoint["step"]["metrics"] = known | {
        "val/page": "../.bashrc.d/x"
    }  # nor is a text a metric, which callbacks read
    torch.save(checkpoint | {"loops": loops}, file)
    if not pops:  # Lightning would
        taken = GRPOLightningModule.on_load_checkpoint
        monkeypatch.setattr(GRPOLightningModule, "on_load_checkpoint", lambda m, held: taken(m, dict(held)))
    with suppress(Exception) if not pops else nullcontext():
        run = made("own", f"checkpoint={file}", "steps=2")
        run.fit()
        assert "val/page" not in run.metrics
        assert run.metrics.keys() >= {"val/pass@1", "reward/total"}
    assert Loader.taken == ([] if pops else [{"page": "../.bashrc.d/x"}])


def test_nor_do_layers_take_weights_that_are_no_tensors():
    module = SimpleNamespace(continues=False)
    checkpoint = {"state_dict": {"policy.a": torch.zeros(2), "policy.log": "../.bashrc.d/x"}}
    with pytest.raises(ValueError, match=r"is of another run, and its weight policy\.log is no tensor"):
        check_weights(module, checkpoint)
    check_weights(SimpleNamespace(continues=True), checkpoint)
    del checkpoint["state_dict"]["policy.log"]
    check_weights(module, checkpoint)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["export", "preflight"])
def test_nor_before_an_export_or_a_preflight(mode, tmp_path, monkeypatch):
    small_run(tmp_path / "theirs", "steps=1")
    file = tmp_path / "theirs" / "checkpoints" / "last.ckpt"
    held = torch.load(file, weights_only=True)
    held["state_dict"]["policy.log"] = "../.bashrc.d/x"
    torch.save(held, file)
    monkeypatch.setattr(GRPOLightningModule, "load_state_dict", lambda *_, **__: pytest.fail("it was given a text"))
    with pytest.raises(ValueError, match=r"is of another run, and its weight policy\.log is no tensor"):
        small_run(tmp_path / "own", f"mode={mode}", f"checkpoint={file}")


def test_nor_what_the_head_of_a_sharded_checkpoint_says(tmp_path):
    head = {"step": {"completed": 1}, "state_dict": {"policy.weight": torch.zeros(2)}}
    torch.save(head, tmp_path / "meta.pt")
    assert read(tmp_path) == {"step": {"completed": 1}}
    assert read(tmp_path / "meta.pt").keys() == head.keys()


def went_on(trainer, module, checkpoint):
    raise AssertionError("it was given a checkpoint")


@pytest.mark.parametrize("function", [went_on, partial(went_on)])
def test_nor_do_functions_of_a_lambda_callback(function, tmp_path):
    trainer = SimpleNamespace(
        precision_plugin=None, strategy=None, callbacks=[LambdaCallback(on_load_checkpoint=function)]
    )
    run = SimpleNamespace(
        module=SimpleNamespace(modules=list), data=None, directory=tmp_path, config={}, trainer=trainer
    )
    with pytest.raises(ValueError, match=r"given to LambdaCallback of tests\.test_callbacks \(on_load_checkpoint\)"):
        check(tmp_path / "theirs.ckpt", run, "fit")
    run.config = {"trusted": ["tests"]}
    check(tmp_path / "theirs.ckpt", run, "fit")


class Mended(SpikeDetection):
    """A callback of Lightning's that overwrites a file which a checkpoint names, as a user may have made it work."""


class Tuning(BackboneFinetuning):
    """One that makes groups of the optimizer of what a checkpoint says."""


@pytest.mark.parametrize("callback", [Mended(warmup=1), Tuning()])
def test_nor_do_those_that_obey_it(callback, tmp_path):
    trainer = SimpleNamespace(precision_plugin=None, strategy=None, callbacks=[callback])
    module = SimpleNamespace(modules=list)
    run = SimpleNamespace(module=module, data=None, directory=tmp_path, config={}, trainer=trainer)
    with pytest.raises(ValueError, match=r"given to \w+ of tests\.test_callbacks \(load_state_dict\); allowed is"):
        check(tmp_path / "theirs.ckpt", run, "fit")


@provocation(
    "a stranger's checkpoint whose state of Lightning's ModelCheckpoint names a directory of the user's "
    "(`local:///home/me/thesis`), which that removes with the first newer checkpoint",
    "that state is left out, with a warning; it stays where it names files beside the checkpoint",
)
@pytest.mark.parametrize("key", ["best_model_path", "last_model_path", "best_k_models"])
@pytest.mark.parametrize("where", ["local://{}/mine", "{}/mine/x", "file::local://{}/mine", "{}/theirs/a.ckpt", ""])
def test_nothing_is_removed_on_the_word_of_a_checkpoint(key, where, tmp_path, caplog):
    keeper = ModelCheckpoint()
    state = keeper.state_dict() | {
        key: {where.format(tmp_path): 1.0} if key == "best_k_models" else where.format(tmp_path)
    }
    trainer = SimpleNamespace(callbacks=[keeper], ckpt_path=f"{tmp_path}/theirs/last.ckpt")
    for continues in (False, True):
        held = {"loops": {}, "callbacks": {keeper.state_key: dict(state), "Other": {"a": 1}}}
        leave_out(SimpleNamespace(continues=continues, _trainer=trainer), held)
        is_kept = where in ("", "{}/theirs/a.ckpt") or (continues and ":" not in where)
        assert held == {"callbacks": {"Other": {"a": 1}} | ({keeper.state_key: state} if is_kept else {})}
    odd = f"{tmp_path}/local:/{tmp_path}/theirs"  # a directory called as an address
    os.makedirs(odd)
    trainer.ckpt_path = f"{odd}/last.ckpt"
    held = {"callbacks": {keeper.state_key: keeper.state_dict() | {"best_model_path": f"{odd}/mine"}}}
    leave_out(SimpleNamespace(continues=False, _trainer=trainer), held)
    assert not held["callbacks"]
    caplog.clear() if where in ("", "{}/theirs/a.ckpt") else None
    assert ("of files elsewhere is left out" in caplog.text) == (where not in ("", "{}/theirs/a.ckpt"))


class Device(SingleDeviceStrategy):
    """A strategy of the user's own that looks at what it loads."""

    def load_optimizer_state_dict(self, checkpoint):
        super().load_optimizer_state_dict(checkpoint)


def test_nor_do_strategies(tmp_path):
    module = SimpleNamespace(modules=list)
    trainer = SimpleNamespace(precision_plugin=None, callbacks=[], strategy=Device())
    run = SimpleNamespace(module=module, data=None, directory=tmp_path, config={}, trainer=trainer)
    with pytest.raises(
        ValueError, match=r"given to Device of tests\.test_callbacks \(load_optimizer_state_dict\); allow"
    ):
        check(tmp_path / "theirs.ckpt", run, "fit")
    check(tmp_path / "theirs.ckpt", run, "export")
    trainer.strategy = SingleDeviceStrategy()
    check(tmp_path / "theirs.ckpt", run, "fit")


class Scaled(nn.Linear):
    """A layer with a state that is no weight, which some libraries unpickle."""

    kept = b"own"

    def get_extra_state(self):
        return torch.frombuffer(bytearray(self.kept), dtype=torch.uint8)

    def set_extra_state(self, state):
        self.kept = bytes(state.tolist())


class Shifted(nn.Linear):
    """A layer that reads its weights in a way of its own."""

    def _load_from_state_dict(self, *args):
        super()._load_from_state_dict(*args)


def given_weights(*args):
    raise AssertionError("it was given weights")


def hooked(when):
    layer = nn.Linear(2, 2)
    getattr(layer, f"register_load_state_dict_{when}_hook")(given_weights)
    return nn.Sequential(layer)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(16, 8), Scaled(8, 16)

    def forward(self, ids):
        return self.head(self.embed(ids).cumsum(1))


@provocation(
    "a stranger's checkpoint, and a model of the user's own with layers that take a state which is no weight "
    "(`set_extra_state`), as those of transformer_engine, which unpickle it",
    "refused before anything is loaded; `trusted=[…]` takes it",
)
@pytest.mark.slow
def test_nor_does_a_model_of_the_users_take_an_extra_state(tmp_path):
    words = ["data.prompts_per_step=2", "rollout.group_size=2", "rollout.max_new_tokens=6", "trainer=cpu"]

    def run(place, *more):
        model = Model()
        rows = [{"prompt": [1, 2, number]} for number in range(12)]
        run = grpo.compose(*words, *more, policy=model, reward=len_of, data=rows, run_dir=tmp_path / place)
        model.head.kept = b"bad" if place == "theirs" else b"own"
        run.fit()
        return model.head.kept

    run("theirs", "steps=1")
    theirs = f"checkpoint={tmp_path}/theirs/checkpoints/last.ckpt"
    with pytest.raises(ValueError, match=r"given to Scaled of tests\.test_callbacks \(set_extra_state\); allowed is"):
        run("own", theirs, "steps=2")
    assert run("trusted", theirs, "steps=2", "trusted=[tests]") == b"bad"


class Taking(nn.Linear):
    def load_state_dict(self, state, *args, **options):
        return super().load_state_dict(state, *args, **options)


@pytest.mark.parametrize(
    ("place", "trusted", "network", "is_taken"),
    [
        ("theirs.ckpt", [], Taking(2, 2), False),
        ("theirs.ckpt", ["tests"], Taking(2, 2), True),
        ("theirs.ckpt", [], Scaled(2, 2), False),
        ("theirs.ckpt", ["tests"], Scaled(2, 2), True),
        ("theirs.ckpt", [], Shifted(2, 2), False),
        ("theirs.ckpt", ["tests"], Shifted(2, 2), True),
        ("theirs.ckpt", [], hooked("pre"), False),
        ("theirs.ckpt", [], hooked("post"), False),
        ("theirs.ckpt", ["tests"], hooked("pre"), True),
        ("theirs.ckpt", [], bitsandbytes.nn.Linear8bitLt(2, 2), True),
        ("theirs.ckpt", [], nn.Linear(2, 2), True),
        ("run/checkpoints/last.ckpt", [], Scaled(2, 2), True),
        ("run/last.ckpt", [], Scaled(2, 2), False),
        ("fast/last.ckpt", [], Scaled(2, 2), True),
    ],
)
def test_nor_does_a_reward_model_of_the_users(place, trusted, network, is_taken, tmp_path):
    config = {"trusted": trusted, "callbacks": {"checkpoint": {"directory": str(tmp_path / "fast")}}}
    trainer = SimpleNamespace(ckpt_path=str(tmp_path / place))
    module = SimpleNamespace(modules=list, trainer=trainer, settings=config)
    run = SimpleNamespace(module=module, data=None, directory=tmp_path / "run", config=config)
    check(tmp_path / place, run, "export")
    assert module.continues == place.startswith(("run/checkpoints", "fast"))
    with nullcontext() if is_taken else pytest.raises(ValueError, match=r"would be given to \w+ of tests\.test_cal"):
        check_network(network, {}, module)


def len_of(completions):
    return [float(len(one) % 3) for one in completions]


@pytest.mark.slow
def test_nor_does_data_of_the_users_take_a_state(tmp_path):
    own = [word for word in SMALL if not word.startswith(("reward", "trusted", "steps", "data"))] + ["reward=[format]"]
    given = {"train": lambda: Inline([*"abcdefgh"]), "validation": None, "validation_size": 4, "validate_every": None}
    given |= {
        "prompts_per_step": 2,
        "steps": 2,
        "validation_batch_size": 4,
        "max_prompt_length": None,
        "seed": 0,
        "verifier": None,
    }

    def run(place, *words):
        rows = Rows(**given)
        grpo.compose(*own, *words, data=rows, run_dir=tmp_path / place).fit()
        return getattr(rows, "page", None)

    run("theirs", "steps=1")
    theirs = f"checkpoint={tmp_path}/theirs/checkpoints/last.ckpt"
    with pytest.raises(ValueError, match=r"given to Rows of tests\.test_callbacks \(load_state_dict\); allowed is"):
        run("own", theirs, "steps=2")
    assert run("trusted", theirs, "steps=2", "trusted=[tests]") == "../.bashrc.d/x"
