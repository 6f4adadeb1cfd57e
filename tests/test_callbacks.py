"""What callbacks write and show: completions, exports, progress lines, a moving reference, seconds of phases."""

import base64
import csv
import json
import math
import os
import subprocess
import sys
import threading
import time
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import pytest
import torch
from lightning import Callback
from tensorboard.plugin_util import markdown_to_safe_html
from torch.testing import assert_close

from grpo_lightning.callbacks.iterative import ReferenceRefresh
from grpo_lightning.callbacks.logs import completions_table, describe_metrics, fence
from grpo_lightning.checkpoint.io import read
from grpo_lightning.console import escape_control
from grpo_lightning.types import Clock, Prompts, Sampled, Scored
from tests.support.board import events, scalars
from tests.support.checkpoints import write_checkpoint
from tests.support.composed import ROOT
from tests.support.running import SMALL, same, small_module, small_run, weights

HOSTILE = [
    "``` breaks out ``` <script>alert(1)</script>",
    "`````\n# heading\n`````",
    "bell \x07 escape \x1b[31m red \x00 override \u202e rtl",
    "a | b |\n|---|\n![x](http://e.vil/p.png) <img src=x> &lt;b&gt;",
    "",
]


def scored_rows() -> Scored:
    """Two prompts, three completions each; the second prompt is a chat."""
    mask = torch.arange(3) < torch.tensor([1, 2, 3, 1, 3, 2])[:, None]
    zeros, ids = torch.zeros(6, 3), torch.zeros(6, 5, dtype=torch.long)
    attention = torch.cat([torch.ones(6, 2, dtype=torch.bool), mask], 1)
    finished = (True, True, False, True, False, True)
    sampled = Sampled(ids, attention, mask, zeros, zeros, ("a", "b", "ab", "", "abc", "q"), finished)
    rewards = {"total": torch.tensor([0.0, 1.0, 2.0, 3.0, 4.0, 5.0]), "format": torch.full((6,), math.nan)}
    chat = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "q?"}]
    right, nothing = torch.zeros(6, dtype=torch.bool), torch.zeros(6, 1)
    prompts = Prompts(("p", chat), {"answer": ("7", "|8|")})
    return Scored(prompts, sampled, rewards, right, scores=nothing, steps=nothing)


def test_a_table_of_completions_has_a_row_for_each():
    table = completions_table(scored_rows(), torch.arange(6) / 8, max_rows=200, max_characters=100)
    assert table.columns == ["prompt", "answer", "completion", "length", "end", "total", "format", "advantage"]
    assert len(table.rows) == 6
    assert table.rows[4] == ["[system] be brief\n\n[user] q?", "|8|", "abc", 3, "cut", 4.0, None, 0.5]
    assert "```text\nprompt: [system] be brief\n\n[user] q?\nanswer: |8|\n\n(1) length=1" in table.page
    assert "(2) length=3  end=cut  total=4  format=None  advantage=0.5\nabc\n" in table.page


def test_a_table_has_whole_groups_and_cuts_texts_but_no_secrets():
    table = completions_table(scored_rows(), max_rows=5, max_characters=100)
    assert [row[0] for row in table.rows] == ["p"] * 3
    assert table.page.endswith("*The first 3 of 6 completions.*")
    assert len(completions_table(scored_rows(), max_rows=2, max_characters=100).rows) == 2
    short = completions_table(scored_rows(), max_rows=3, max_characters=1)
    assert [row[2] for row in short.rows] == ["a", "b", "a […]"]
    secret = replace(scored_rows(), prompts=Prompts(("say hf_" + 24 * "a", "q"), {}))
    assert completions_table(secret, max_rows=3, max_characters=14).rows[0][0] == "say REDACTED"


def test_a_completion_is_shown_and_nothing_else():
    for text in HOSTILE:
        fenced = fence(escape_control(text))
        opening, *body, closing = fenced.split("\n")
        assert opening == f"{closing}text"
        assert set(closing) == {"`"}
        assert closing not in "\n".join(body)
        assert not any((ord(c) < 32 and c not in "\n\t") or c in "\u202e\x1b" for c in fenced)
        page = markdown_to_safe_html(fenced)
        assert page.count("<") == 4  # pre, code, and their ends
        assert page.startswith("<pre><code")


@pytest.mark.slow
def test_an_export_replaces_nothing_but_an_export(tmp_path):
    home = tmp_path / "home"
    home.mkdir()
    before = os.umask(0o002)
    try:
        small_run(tmp_path / "run", f"callbacks.export.directory={home}")
    finally:
        os.umask(before)
    modes = {path.name: path.stat().st_mode & 0o777 for path in home.rglob("*") if path.is_file()}
    assert modes["model.safetensors"] == 0o664
    (home / "README.md").write_text("my own model")
    with pytest.raises(ValueError, match=rf"callbacks.export.directory={home} holds other files than an export"):
        small_run(tmp_path / "refused", f"callbacks.export.directory={home}")
    assert json.loads((tmp_path / "refused" / "summary.json").read_text())["steps"] == 0
    assert (home / "README.md").read_text() == "my own model"


class Hub(BaseHTTPRequestHandler):
    """What huggingface_hub asks of the hub for an upload without Xet."""

    def do_POST(self):
        hub, body = self.server, self.rfile.read(int(self.headers["content-length"]))
        asked = [json.loads(line) for line in body.splitlines()]
        hub.tokens.add(self.headers["authorization"])
        answer = {"errors": [], "warnings": []}  # of the model card
        if self.path == "/api/repos/create":
            hub.created.append((asked[0]["name"], asked[0]["visibility"]))
            answer = {"url": f"{hub.url}/me/{asked[0]['name']}"}
        elif self.path == "/api/models/me/spelling/preupload/main":
            modes = [(f["path"], "lfs" if f["path"].endswith(".safetensors") else "regular") for f in asked[0]["files"]]
            answer = {"files": [{"path": path, "uploadMode": mode, "shouldIgnore": False} for path, mode in modes]}
        elif self.path == "/me/spelling.git/info/lfs/objects/batch":
            files = asked[0]["objects"]
            answer = {"objects": [{**f, "actions": {"upload": {"href": f"{hub.url}/{f['oid']}"}}} for f in files]}
        elif self.path == "/api/models/me/spelling/commit/main":
            for value in [line["value"] for line in asked[1:]]:  # the first is a header
                is_large = "oid" in value
                hub.files[value["path"]] = hub.stored[value["oid"]] if is_large else base64.b64decode(value["content"])
            answer = {"commitUrl": f"{hub.url}/me/spelling/commit/1", "commitOid": "1"}
        self.answer(answer)

    def do_PUT(self):
        self.server.stored[self.path[1:]] = self.rfile.read(int(self.headers["content-length"]))
        self.answer({})

    def answer(self, page):
        self.send_response(self.server.status)
        self.end_headers()
        self.wfile.write(json.dumps(page).encode())

    def log_message(self, *_):
        pass


@pytest.mark.slow
def test_an_export_is_uploaded_to_the_hub_and_a_failure_loses_nothing(tmp_path):
    def train(*words, token="hf_of_a_test"):
        given = {"HF_ENDPOINT": hub.url, "HF_HUB_DISABLE_XET": "1", "HF_HUB_OFFLINE": "0", "HF_HOME": str(tmp_path)}
        command = [*SMALL, f"hydra.run.dir={tmp_path}/run", "callbacks.export.push_to_hub=spelling", *words]
        env = {**os.environ, **given, "HF_TOKEN": token}
        return subprocess.run([sys.executable, "train.py", *command], cwd=ROOT, env=env, capture_output=True, text=True)

    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as hub:
        hub.url, hub.status = f"http://127.0.0.1:{hub.server_port}", 200
        hub.created, hub.tokens, hub.stored, hub.files = [], set(), {}, {}
        threading.Thread(target=hub.serve_forever, daemon=True).start()
        assert "push_to_hub=spelling: there is no token of the hub" in " ".join(train(token="").stderr.split())
        ran = train()
        assert (ran.returncode, hub.created, hub.tokens) == (0, [("spelling", "private")], {"Bearer hf_of_a_test"})
        assert f"uploaded to {hub.url}/me/spelling" in ran.stderr
        export = tmp_path / "run" / "export"
        assert hub.files == {path.name: path.read_bytes() for path in export.iterdir()}
        hub.status = 401
        ran = train("mode=export", "checkpoint=last")
        assert (ran.returncode, len(hub.created)) == (0, 2)
        assert f"to upload it: hf upload spelling {export} --private" in " ".join(ran.stderr.split())
        hub.shutdown()


class Stop(Callback):
    """Ends the training after a step, as a limit on time would."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_end(self, trainer, module, *_):
        trainer.should_stop = module.completed_steps >= self.step


@pytest.mark.slow
def test_a_run_that_a_callback_ends_has_its_last_step_saved_and_continues(tmp_path, caplog):
    def summary():
        content = json.loads((tmp_path / "summary.json").read_text())
        return content["status"], content["steps"]

    small_run(tmp_path, "steps=6", "+callbacks.stop={_target_: tests.test_callbacks.Stop, step: 3}")
    assert read(tmp_path / "checkpoints" / "last.ckpt")["step"]["completed"] == 3
    assert summary() == ("stopped", 3)
    assert "a callback has ended the run after 3 of 6 steps" in caplog.text
    stop = "{_target_: lightning.pytorch.callbacks.EarlyStopping, monitor: val/pass@1, patience: 1, mode: max}"
    given = ("steps=6", "validation.every=1", "optimizer.lr=1e-12", f"+callbacks.stop={stop}")
    small_run(tmp_path, *given, "checkpoint=last")
    assert summary() == ("stopped", 5)  # the first validation is the best, the second no better
    small_run(tmp_path, "steps=6", "checkpoint=last")
    assert summary() == ("finished", 6)
    assert [step for step, _ in scalars(tmp_path / "tensorboard")["reward/total"]] == [1, 2, 3, 4, 5, 6]


def test_a_run_writes_scalars_texts_histograms_settings_and_lines(tmp_path, capsys):
    words = ("steps=4", "validation.every=2", "callbacks.samples.every=3", "callbacks.progress.every=1")
    module = small_run(tmp_path, *words)
    board, written = events(tmp_path / "tensorboard"), scalars(tmp_path / "tensorboard")
    for name in (
        *("reward/total", "reward/custom", "reward/format", "reward/std", "advantage/mean", "advantage/std"),
        *("policy/kl_divergence", "policy/entropy", "policy/clip_fraction", "policy/ratio_mean", "policy/ratio_max"),
        *("loss/total", "loss/policy", "loss/kl", "group/all_right", "group/all_wrong", "group/mixed"),
        *("completion/length_mean", "completion/length_max", "completion/truncated_fraction"),
        *("optim/grad_norm", "optim/lr", "optim/skipped", "perf/tokens_per_second", "perf/peak_memory_gb"),
        *("time/rollout", "time/reward", "time/score", "time/update", "time/step"),
    ):
        assert [step for step, _ in written[name]] == [1, 2, 3, 4], name
    for name in ("val/reward/total", "val/reward/custom", "val/pass@1", "val/pass@4", "val/maj@4"):
        assert [step for step, _ in written[name]] == [0, 2, 4], name
    assert written["reward/total"][-1][1] == pytest.approx(module.metrics["reward/total"])
    names = {f"~histogram/{name}" for name in ("reward_total", "advantage", "completion_length", "policy_ratio")}
    assert set(board.Tags()["histograms"]) == names
    assert [event.step for event in board.Histograms("~histogram/completion_length")] == [1, 3]
    tables = {name: board.Tensors(f"completions/{name}/text_summary") for name in ("train", "validation")}
    assert [event.step for event in tables["train"]] == [1, 3]
    assert [event.step for event in tables["validation"]] == [0, 2, 4]
    page = tables["train"][0].tensor_proto.string_val[0].decode()
    assert (page.count("**Prompt "), page.count(") length=")) == (2, 8)
    assert (tmp_path / "tensorboard" / "hparams.yaml").exists()
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("step ")]
    assert [line.split()[1] for line in lines] == ["0/4", "1/4", "2/4", "3/4", "4/4"]
    assert ["pass@1" in line for line in lines] == [True, False, True, False, True]
    assert all("reward" in line for line in lines[1:])


TRAINING = {
    **{"reward/accuracy": 0.4512, "reward/total": 0.548, "policy/kl_divergence": 0.00812, "reward/format": 0.98},
    **{"advantage/mean": -1e-9, "advantage/std": 0.3219, "perf/tokens_per_second": 812.4},
}


def module(metrics, *, right="accuracy", done=10, validated=0, steps=500):
    scorer = SimpleNamespace(rewards={right: None} if right else {}, outcome_name=right)
    return SimpleNamespace(
        metrics=metrics,
        validation=SimpleNamespace(scorer=scorer, every=20),
        completed_steps=done,
        validated_at=validated,
        steps=steps,
        clock=SimpleNamespace(phase="rollout"),
    )


def test_a_line_shows_what_is_known_the_outcome_first():
    assert describe_metrics(module({}), room=80) == ""
    assert describe_metrics(module({"val/pass@1": 0.2612}, done=0), room=80) == "pass@1 .26"
    line = "accuracy .45  reward .55  kl .0081  format .98  advantage ±.32  tok/s 812"
    for room, expected in (
        *((len(line), line), (len(line) - 1, line.removesuffix("  tok/s 812"))),
        *((12, "accuracy .45"), (10, "accura .45"), (3, ".45"), (2, "")),
    ):
        assert describe_metrics(module(TRAINING), room=room) == expected
    assert describe_metrics(module({"reward/total": 1.0}, right=""), room=80) == "reward 1.00"
    assert describe_metrics(module({"loss/total": 2.31}), room=80) == "loss 2.31"
    metrics = {"reward/accuracy": 0.98, "val/pass@1": 0.26}
    assert describe_metrics(module(metrics), room=80) == "accuracy .98"  # the validation is an old one
    assert describe_metrics(module(metrics), room=80, keep_old=True) == "accuracy .98  pass@1 .26 (step 0)"
    assert describe_metrics(module(metrics, validated=10), room=80) == "accuracy .98  pass@1 .26"


COUNTING = [
    "+callbacks.average={_target_: lightning.pytorch.callbacks.EMAWeightAveraging, decay: 0.5}",
    "+callbacks.rate={_target_: lightning.pytorch.callbacks.LearningRateMonitor, logging_interval: step}",
    "+callbacks.own={_target_: lightning.pytorch.callbacks.ModelCheckpoint, dirpath: '${run_dir}/own', save_top_k: -1}",
    *("steps=5", "validation.every=2", "module.minibatch_size=4", "schedule=linear", "logger=[csv]"),
]


def logged_rates(directory):
    with (directory / "csv" / "metrics.csv").open() as file:
        return [(row["step"], row["lr-AdamW"]) for row in csv.DictReader(file)]


@pytest.mark.slow
@pytest.mark.parametrize("adapter", [False, True])
def test_callbacks_of_lightning_count_on_in_a_continued_run(adapter, tmp_path):
    words = COUNTING
    if adapter:
        model = write_checkpoint(tmp_path / "model", "qwen2", chat=False)
        words = [*words, "policy=hf", f"policy.path={model}", "policy.adapter={r: 2, target_modules: all-linear}"]
    whole = small_run(tmp_path / "whole", *words)
    small_run(tmp_path / "parts", *words, "+callbacks.stop={_target_: tests.test_callbacks.Stop, step: 3}")
    continued = small_run(tmp_path / "parts", *words, "checkpoint=last")
    assert whole.trainer.global_step == continued.trainer.global_step == 10  # two optimizer steps each
    assert whole.trainer.current_epoch == continued.trainer.current_epoch
    assert same(weights(continued), weights(whole))  # of the average
    assert logged_rates(tmp_path / "parts") == logged_rates(tmp_path / "whole")
    names = {path.name for path in (tmp_path / "whole" / "own").iterdir()}
    names.add("epoch=1-step=6.ckpt")  # where the first part ended
    assert names == {path.name for path in (tmp_path / "parts" / "own").iterdir()}
    saved = read(tmp_path / "whole" / "checkpoints" / "last.ckpt")
    assert not adapter or all("lora" in name for name in saved["current_model_state"])


def test_an_average_that_nobody_validates_is_refused(tmp_path):
    swa = "+callbacks.swa={_target_: lightning.pytorch.callbacks.StochasticWeightAveraging, swa_lrs: 0.1}"
    with pytest.raises(ValueError, match="StochasticWeightAveraging replaces the learning-rate schedule"):
        small_run(tmp_path, swa)


REFRESHED = ("callbacks=reference_refresh", "optimizer.lr=0.02", "loss.kl_coef=0.5")


def test_a_reference_moves_towards_the_policy(tmp_path, monkeypatch):
    seen, every, alpha = [], 2, 0.25
    plain = ReferenceRefresh.on_train_batch_end

    def flat(model):
        return torch.cat([p.detach().flatten().clone() for p in model.parameters()])

    def recording(callback, trainer, module, *rest):
        before = flat(module.reference)
        plain(callback, trainer, module, *rest)
        seen.append((flat(module.policy), before, flat(module.reference)))

    monkeypatch.setattr(ReferenceRefresh, "on_train_batch_end", recording)
    settings = (f"callbacks.reference.every={every}", f"callbacks.reference.alpha={alpha}")
    small_run(tmp_path, *REFRESHED, *settings, "steps=4")
    for step, (policy, before, after) in enumerate(seen, 1):
        share = alpha if step % every == 0 else 0.0
        assert_close(after, share * policy + (1 - share) * before, rtol=1e-6, atol=1e-7)
        assert (policy - before).abs().max() > 1e-4


@pytest.mark.slow
def test_a_continued_run_has_the_reference_it_had(tmp_path):
    overrides = (*REFRESHED, "callbacks.reference.every=2", "callbacks.reference.alpha=0.6")
    whole = small_run(tmp_path / "whole", *overrides, "steps=5")
    small_run(tmp_path / "broken", *overrides, "steps=1")
    early = torch.load(tmp_path / "broken" / "checkpoints" / "last.ckpt", weights_only=True)
    assert "ReferenceRefresh" not in early["callbacks"]  # it has not moved yet
    for steps in (3, 5):
        continued = small_run(tmp_path / "broken", *overrides, f"steps={steps}", "checkpoint=last")
    for model in ("policy", "reference"):
        for name, parameter in getattr(whole, model).named_parameters():
            assert torch.equal(dict(getattr(continued, model).named_parameters())[name], parameter), name


def test_a_refresh_that_cannot_be_is_refused():
    with pytest.raises(ValueError, match=r"no reference to refresh; set loss.kl_coef or rollout.kl_penalty"):
        ReferenceRefresh(every=1, alpha=1.0).on_fit_start(None, small_module("loss.kl_coef=0"))


def test_queued_work_counts_towards_the_phase_that_has_queued_it(monkeypatch):
    now = queued = 0.0

    def synchronize():
        nonlocal now, queued
        now, queued = now + queued, 0.0

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    monkeypatch.setattr(time, "perf_counter", lambda: now)
    clock = Clock()
    queued = 100.0  # of the step before
    clock.restart()
    queued += 1.0  # between phases
    with clock("rollout"):
        queued += 2.0
    with clock("update"):
        now += 0.5
        queued += 4.0
    queued += 8.0
    assert clock.read() == {"rollout": 2.0, "update": 4.5, "step": 1.0 + 2.0 + 4.5 + 8.0}
