"""Files of the user's where a run writes: none is lost."""

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from grpo_lightning.output.links import followed, leads_out, linked_part
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.utils.tensorboard import SummaryWriter

import grpo_lightning as grpo
from grpo_lightning.callbacks.export import check_replaceable
from grpo_lightning.checkpoint import leftovers, tensorboard
from grpo_lightning.checkpoint.io import AtomicCheckpointIO
from grpo_lightning.checkpoint.lock import Locked, held
from grpo_lightning.distributed.strategies import FullyShardedStrategy
from grpo_lightning.output.files import replace
from grpo_lightning.settings import ConfigError, check
from grpo_lightning.settings.places import link_problem, place_problems
from grpo_lightning.settings.reach import is_in, reach_problems
from tests.support.composed import NOWHERE, composed
from tests.support.provocations import provocation
from tests.support.running import SMALL, small_run
from tests.support.too_long import STEPS, led_away
from tests.test_callbacks import scalars
from tests.test_damaged import contents


@pytest.mark.slow
@provocation(
    '`callbacks.export.directory=` a project whose README.md says "trained with grpo-lightning", or an export with a '
    "file of one's own",
    "refused before the first step; every file stays",
)
@pytest.mark.parametrize("own", [".git/HEAD", "notes.txt", "train.py", "link"])
def test_a_directory_with_more_than_an_export_is_not_replaced(own, tmp_path):
    project = tmp_path / "project"
    small_run(tmp_path / "first", f"callbacks.export.directory={project}")
    (project / own).parent.mkdir(exist_ok=True)
    if own == "link":
        (project / own).symlink_to(tmp_path)
    else:
        (project / own).write_text("mine")
    before = contents(project)
    with pytest.raises(ValueError, match=rf"callbacks.export.directory=.*nothing else, such as {Path(own).parts[0]}"):
        small_run(tmp_path / "second", f"callbacks.export.directory={project}")
    assert contents(project) == before
    assert not (tmp_path / "second" / "checkpoints").exists()


@provocation("a directory `.NAME.partial` of one's own beside the export", "stays; one of a killed export is removed")
@pytest.mark.slow
def test_a_hidden_directory_beside_an_export_stays(tmp_path):
    own, cut = tmp_path / ".mine.partial", tmp_path / ".other.partial"
    for directory, name in ((own, "notes.txt"), (cut, "model.safetensors")):
        directory.mkdir()
        (directory / name).write_text("mine")
    small_run(tmp_path / "run", f"callbacks.export.directory={tmp_path}/mine")
    small_run(tmp_path / "run2", f"callbacks.export.directory={tmp_path}/other")
    assert (own / "notes.txt").read_text() == "mine"
    assert {path.name for path in tmp_path.iterdir()} == {"run", "run2", "mine", "other", own.name}


def logged(directory: Path, step: int, suffix: str = "") -> Path:
    before = set(directory.rglob("*"))
    writer = SummaryWriter(str(directory), filename_suffix=suffix)
    writer.add_scalar("x", 1.0, step)
    writer.close()
    return next(path for path in directory.rglob("events*") if path not in before)


def of_2001(log: Path) -> Path:
    return log.rename(log.with_name(re.sub(r"tfevents\.\d+", "tfevents.1000000000", log.name)))


@provocation(
    "links in a stranger's tensorboard/ with the names of event files that are still to be begun", "refused by name"
)
@pytest.mark.parametrize("later", [-5, 0, 1, 10**6])
def test_event_files_are_begun_through_no_link(later, tmp_path, monkeypatch):
    now = 1_795_387_768.9
    monkeypatch.setattr("grpo_lightning.settings.places.time.time", lambda: now)
    name = f"events.out.tfevents.{int(now) + later}.host.123.0{tensorboard.SUFFIX}"
    (tmp_path / "run" / "tensorboard").mkdir(parents=True)
    (tmp_path / "run" / "tensorboard" / name).symlink_to(tmp_path / "mine")
    told = link_problem(tmp_path / "run")
    assert told is None if later < 0 else f"tensorboard/{name} in it is a link to" in str(told)


@provocation("`hydra.run.dir=.` where tensorboard/ holds logs of one's own", "they stay, also beyond links")
def test_a_new_run_removes_no_foreign_logs(tmp_path):
    run, logs = tmp_path / "run", tmp_path / "run" / "tensorboard"
    elsewhere = of_2001(logged(tmp_path / "elsewhere", 1, tensorboard.SUFFIX))
    foreign = [logged(logs, 1), logged(logs / "exp1", 1), logged(logs / "exp2", 1, tensorboard.SUFFIX), elsewhere]
    (logs / elsewhere.name).symlink_to(elsewhere)
    killed = logged(logs, 7, tensorboard.SUFFIX)  # of a run that was killed before its first checkpoint
    before = {path: path.read_bytes() for path in foreign}
    small_run(run, "steps=1")
    assert {path: path.read_bytes() for path in before} == before
    assert not killed.exists()
    assert [path for path in logs.glob(f"*{tensorboard.SUFFIX}") if not path.is_symlink()]
    linked = tmp_path / "linked"
    linked.symlink_to(tmp_path / "elsewhere")
    assert tensorboard.rewind(linked, {elsewhere.name: 5}) == 0
    assert tensorboard.rewind(linked, {}, continues=False) == 0
    assert tensorboard.position(linked) == {}
    assert elsewhere.read_bytes() == before[elsewhere]


@provocation(
    "a checkpoint that says a file of the user's is among its event files", "only files of the run's own are cut back"
)
def test_a_checkpoint_shortens_no_foreign_file(tmp_path):
    logs = tmp_path / "tensorboard"
    own = logged(logs, 1, tensorboard.SUFFIX)
    others = [logged(logs, 1), logged(logs / "below", 1, tensorboard.SUFFIX)]
    before = [path.read_bytes() for path in others]
    listed = {str(path.relative_to(logs)): 5 for path in (own, *others)}
    assert tensorboard.rewind(logs, listed) > 0
    assert own.stat().st_size == 5
    assert [path.read_bytes() for path in others] == before


WRITTEN = [
    *("train.log", "summary.json", ".summary.json.77", "health.json", ".hydra", ".hydra/config.yaml"),
    *(".hydra/.config.yaml", "checkpoints", "checkpoints/.last.ckpt.77", "tensorboard", "tensorboard/hparams.yaml"),
    *("csv", "csv/metrics.csv", "export", "rollouts", ".wandb_id", ".mlflow_id", "preflight.json"),
]


@provocation(
    "a run directory in which train.log, summary.json, .hydra/, checkpoints/, tensorboard/ or another of a run's own "
    "files is a link that leads out of it",
    "refused in one sentence before anything is written; the file that it leads to is as before",
)
@pytest.mark.parametrize("name", WRITTEN)
@pytest.mark.grid
def test_a_run_writes_through_no_link(name, tmp_path):
    run, mine = tmp_path / "run", tmp_path / "mine"
    mine.write_text("mine")
    (run / name).parent.mkdir(parents=True)
    (run / name).symlink_to(mine)
    with pytest.raises(ConfigError, match=rf"hydra.run.dir={run}: {name} in it is a link to {mine}, through which"):
        check(composed(f"run_dir={run}"))
    (run / name).unlink()
    (run / name).symlink_to(tmp_path / "nothing")
    assert link_problem(run) is not None
    (run / name).unlink()
    (run / name).hardlink_to(mine)
    with pytest.raises(ConfigError, match=rf"hydra.run.dir={run}: {name} in it is a hard link, another name of some "):
        check(composed(f"run_dir={run}"))
    assert {path.name for path in tmp_path.iterdir()} == {"run", "mine"}


@provocation(
    "`hydra.run.dir=.` with a stranger's folder `csv/` in which a link leads to a file of the user's beside it, or a "
    "link to a further name of such a file",
    "refused in one sentence",
)
def test_a_folder_s_links_stay_in_it(tmp_path):
    (tmp_path / "mine").write_text("mine")
    for name in ("csv", "wandb/run-1/files"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "own").write_text("")
        (tmp_path / name / "link").symlink_to("own")
        told = link_problem(tmp_path)
        assert told is None if name != "csv" else ": csv/link in it is a link to own, through" in told
        (tmp_path / name / "link").unlink()
        (tmp_path / name / "link").symlink_to(tmp_path / "mine")
        assert f": {name}/link in it is a link to {tmp_path}/mine" in str(link_problem(tmp_path))
        (tmp_path / name / "link").unlink()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "z").hardlink_to(tmp_path / "mine")
    (tmp_path / "run" / "train.log").symlink_to("z")
    assert ": train.log in it is a link to z" in str(link_problem(tmp_path / "run"))


@provocation(
    "a run directory in which train.log, or another of a run's own files, is a link through a folder so deep that "
    "Python does not see a link at its end, which the operating system follows",
    "refused in one sentence",
)
@pytest.mark.parametrize("name", ["train.log", ".hydra", "tensorboard", "csv/metrics.csv"])
def test_links_are_found_however_deep_they_lie(name, tmp_path):
    (tmp_path / "mine").write_text("mine")
    link = tmp_path / "run" / name
    link.parent.mkdir(parents=True)
    link.symlink_to(f"{led_away(link.parent, Path('/'))}{'/..' * STEPS}{tmp_path}/mine")
    assert link.read_text() == "mine"
    assert Path(os.path.realpath(link)).is_relative_to(link.parent)  # what is not to be believed
    assert leads_out(link, tmp_path / "run")
    assert re.search(rf": ({name}|csv/begin) in it is a link to ", str(link_problem(tmp_path / "run")))


def test_a_link_leads_where_python_takes_it_to_as_well(tmp_path):
    (tmp_path / "mine").write_text("mine")
    own, steps = tmp_path / "run" / "own", STEPS + len(tmp_path.parts) + 2
    (own / "/".join("e" * steps)).mkdir(parents=True)
    there = own / str(tmp_path / "mine").lstrip("/")
    there.parent.mkdir(parents=True)
    there.write_text("own")
    link = tmp_path / "run" / "train.log"
    link.symlink_to(f"{led_away(link.parent, own / '/'.join('e' * steps))}{'/..' * steps}{tmp_path}/mine")
    assert link.read_text() == "own"
    assert Path(os.path.realpath(link)).read_text() == "mine"
    assert ": train.log in it is a link to begin/" in str(link_problem(tmp_path / "run"))


@provocation(
    "a run directory in which csv/ or tensorboard/ is a link by way of a folder that the run only makes later, such as "
    "`.hydra/../more`, where links are",
    "refused in one sentence",
)
@pytest.mark.parametrize("name", ["csv", "tensorboard"])
@pytest.mark.parametrize("target", [".hydra/../more", "more/../more/../.hydra/../more", "health.json/../more"])
def test_links_lead_by_way_of_what_is_there(name, target, tmp_path):
    (tmp_path / "run" / "more").mkdir(parents=True)
    (tmp_path / "run" / "health.json").write_text("{}")
    (tmp_path / "run" / "more" / "hparams.yaml").symlink_to(tmp_path / "mine")
    (tmp_path / "run" / name).symlink_to(target)
    assert leads_out(tmp_path / "run" / name, tmp_path / "run")
    assert f": {name} in it is a link to {target}, through" in str(link_problem(tmp_path / "run"))


@provocation(
    "a run directory in which a folder is a link by way of a link that the run, or W&B, puts elsewhere while it runs: "
    "`csv -> checkpoints/last.ckpt/../../more`, `checkpoints -> wandb/latest-run/../../more`",
    "refused in one sentence",
)
@pytest.mark.parametrize("name", ["csv", "checkpoints", "wandb/run-1", "mine"])
@pytest.mark.parametrize("target", ["last/../../more", "by", "RUN/more", "more/../more"])
def test_links_lead_where_they_will_lead_later(name, target, tmp_path, monkeypatch):
    """What they lead to lies in the run directory while it is looked at."""
    monkeypatch.chdir(tmp_path)
    run, link = tmp_path / "run", tmp_path / "run" / name
    for folder in ("x/y/parts", "x/more", "more", "checkpoints", "wandb/more"):
        (run / folder).mkdir(parents=True, exist_ok=True)
    if name == "checkpoints":
        link.rmdir()
    home = link.parent
    (home / "more").mkdir(exist_ok=True)
    (home / "last").symlink_to(os.path.relpath(run / "x/y/parts", home))
    (home / "by").symlink_to("last/../../more")
    link.symlink_to(target.replace("RUN", str(home)))
    assert link.resolve().is_relative_to(run)
    assert leads_out(link, home)
    assert not is_in(link, run)
    assert not is_in(Path("run", name), Path("run"))
    assert f"/{name} is a link to " in str(link_problem(link))
    assert re.search(rf": ({name}|wandb/by) in it is a link to ", str(link_problem(run, "mine")))
    (home / "plain").symlink_to("more")
    assert not leads_out(home / "plain", home)
    assert is_in(home / "plain", run)


@provocation(
    "`callbacks.export.directory=theirs/run/final/model`, or a judge's `cache=theirs/final/answers.jsonl`, where "
    "`final` is a link of a stranger's to a directory of the user's, also by way of a link `.export1.partial`, which "
    "is removed as what a killed process has left",
    "refused by its key; nothing is removed",
)
def test_no_directory_of_a_callback_lies_behind_a_strangers_link(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    home, run = tmp_path / "work" / "model", tmp_path / "theirs" / "run"
    for folder in (home, run / "x" / "foo", run / "checkpoints"):
        folder.mkdir(parents=True)
    (home / "thesis.txt").write_text("mine")
    (run / "foo").symlink_to("../../work")
    (run / "x" / "y").mkdir()
    (run / ".export1.partial").symlink_to("x/y")
    (run / "final").symlink_to(".export1.partial/../foo")
    (run / "own").symlink_to("x")
    (tmp_path / "mine").symlink_to("work")  # the user's own
    key, kind = "callbacks.export.directory", {"_target_": "grpo_lightning.callbacks.export.Export"}
    for place, told in (
        ("theirs/run/foo/model", "/theirs/run/foo is a link to ../../work, through which"),
        (f"{run}/foo/model", f"{run}/foo is a link to ../../work, through which is not written"),
        ("theirs/run/final/model", "theirs/run/final is a link to .export1.partial/../foo, through which is"),
        ("theirs/run/own/model", None),
        ("mine/other", None),
    ):
        found = list(reach_problems({"run_dir": "theirs/run", "callbacks": {"export": kind | {"directory": place}}}))
        assert len(found) == (told is not None)
        assert not found or (found[0].startswith(f"{key}={place}: ") and told in found[0])
    judge = {"_target_": "grpo_lightning.reward.judge.ChatJudge"}
    monkeypatch.setenv("HOME", str(tmp_path))
    for place in ("theirs/run/foo/answers.jsonl", "~/theirs/run/foo/answers.jsonl"):
        own = judge | {"_target_": "mine.Judge", "cache": place}
        assert len(list(reach_problems({"run_dir": "runs/x", "reward": {"mine": {"function": own}}}))) == 1
        server = {"_target_": "mine.Server", "directory": place}
        assert len(list(reach_problems({"run_dir": "runs/x", "sampler": server}))) == 1
        found = list(reach_problems({"run_dir": "runs/x", "reward": {"mine": {"function": judge | {"cache": place}}}}))
        assert [text.partition(": ")[0] for text in found] == [f"reward.mine.function.cache={place}"]
    linked = {"run_dir": "theirs/run/foo", "callbacks": {"export": kind | {"directory": "theirs/run/foo/export"}}}
    assert list(reach_problems(linked)) == []  # it is said of run_dir
    (tmp_path / "away").symlink_to(tmp_path.parent)  # the user's own; but where a run goes on it may be a stranger's
    for place, count in (("runs/x", 0), (".", 1)):
        here = {"run_dir": place, "callbacks": {"export": kind | {"directory": "away/other"}}}
        assert len(list(reach_problems(here))) == count
    monkeypatch.chdir(home)  # where nothing of the run lies
    exported = {"callbacks": {"export": kind | {"directory": f"{run}/foo/model"}}}  # as in a replay
    assert len(list(reach_problems(exported))) == 1
    outside = {"run_dir": str(run), "callbacks": {"export": kind | {"directory": f"{run}/foo/model"}}}
    assert len(list(reach_problems(outside))) == 1
    assert leftovers.sweep(run) == []
    assert (run / ".export1.partial").is_symlink()
    (run / ".export1.partial").unlink()
    (run / "gone").symlink_to("nothing")
    for place in ("final/new", "gone"):
        with pytest.raises(ValueError, match=rf"callbacks.export.directory=\S+{place}: allowed is a directory that"):
            check_replaceable(run / place)
    with pytest.raises(ValueError, match=r"callbacks.export.directory=\S+final/model: allowed is a directory that"):
        check_replaceable(run / "final" / "model")
    with pytest.raises(
        ValueError, match=r"callbacks.export.directory=\S+none/../foo/model: allowed is a directory that"
    ):
        check_replaceable(run / "none" / ".." / "foo" / "model")
    with pytest.raises(ValueError, match=r"callbacks.export.directory=\S+foo/model: allowed is a directory that"):
        check_replaceable(run / "foo" / "model")
    assert check_replaceable(run / "own" / "model") == run / "x" / "model"
    assert (home / "thesis.txt").exists()


def test_the_directory_of_the_run_may_be_named_in_any_way(tmp_path, monkeypatch):
    (tmp_path / "run" / "wandb" / "run-1").mkdir(parents=True)
    (tmp_path / "run" / "wandb" / "latest-run").symlink_to("run-1")
    (tmp_path / "run" / "own").symlink_to("wandb")
    monkeypatch.chdir(tmp_path / "run")
    for name in (".", "../run", tmp_path / "run"):
        assert is_in(Path(name, "kept"), Path(name))
        assert link_problem(Path(name)) is None
        assert not leads_out(Path(name, "own"), Path(name))


@provocation("a run directory in which `wandb` is a link to another folder of it", "refused in one sentence")
def test_links_in_the_folder_of_wandb_are_its_own(tmp_path):
    logs = tmp_path / "wandb" / "run-1" / "logs"
    logs.mkdir(parents=True)
    (logs / "debug.log").write_text("")
    (tmp_path / "wandb" / "latest-run").symlink_to("run-1")
    (tmp_path / "wandb" / "debug.log").symlink_to("run-1/logs/debug.log")
    assert link_problem(tmp_path) is None
    (tmp_path / "wandb").rename(tmp_path / "more")
    (tmp_path / "wandb").symlink_to("more")
    assert ": wandb in it is a link to more, through" in str(link_problem(tmp_path))


def test_folders_that_lie_too_deep_are_refused(tmp_path):
    (tmp_path / "wandb").mkdir()
    led_away(tmp_path / "wandb", tmp_path)
    assert re.search(r"^hydra.run.dir=\S+: /\S+ cannot be looked at: File name too long", link_problem(tmp_path))


def test_a_place_is_found_however_deep_it_lies(tmp_path, monkeypatch):
    run, home = tmp_path / "theirs" / "run", tmp_path / "home"
    for folder in (run, home / "csv"):
        folder.mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    away = led_away(run, home)
    for link in (run / "mine", tmp_path / "theirs" / "other"):
        link.symlink_to(away if link.parent == run else f"run/{away}")
        assert link.samefile(home)
        assert not is_in(link, link.parent)
    (home / "run").mkdir()
    monkeypatch.chdir(home)
    told = f"{tmp_path}/theirs/other is a link to run/begin"
    assert told in str(link_problem(tmp_path / "theirs" / "other" / "run"))
    monkeypatch.chdir(tmp_path)
    assert f"{tmp_path}/theirs/other is a link to run/begin" in str(link_problem(tmp_path / "theirs" / "other"))
    assert f"{tmp_path}/theirs/run/mine is a link to begin" in str(link_problem(tmp_path / "theirs" / "run" / "mine"))


@pytest.mark.parametrize(
    ("links", "place", "led_to"),
    [
        ({}, "a/../c", "c"),
        ({}, "a/none/../c", None),
        ({"x": "//HERE//a/"}, "x/./c", "a/c"),
        ({"x": "a"}, "x/../c", "c"),
        ({"x": "a/d", "a/d": "../e/f"}, "x/../g", "e/g"),
        ({"x": "y", "y": "x"}, "x/c", None),
        ({"x": "z/../a"}, "x", None),
        ({"x": "file/../a"}, "x", None),
        ({"x": "y/z"}, "x/c", "y/z/c"),
        ({"x": "a/../b/./c"}, "x//d/", "b/c/d"),
        ({"x": "/", "a/d": "HERE/b"}, "xHERE/a/d/c", "b/c"),
        ({"x": "file/z"}, "x", "file/z"),
        ({f"x{number}": f"x{number + 1}" for number in range(40)}, "x0", "x40"),
        ({f"x{number}": f"x{number + 1}" for number in range(41)}, "x0", None),
    ],
)
def test_links_are_followed_as_the_operating_system_does(links, place, led_to, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for folder in ("a", "b", "e/f"):
        Path(folder).mkdir(parents=True)
    Path("file").write_text("")
    for link, target in links.items():
        Path(link).symlink_to(target.replace("HERE", str(tmp_path)))
    assert followed(Path(place.replace("HERE", str(tmp_path)))) == (led_to and tmp_path / led_to)


@provocation(
    "a stranger's run directory with a link `Train.LOG`, where the file system tells no upper from lower case",
    "refused in one sentence",
)
@pytest.mark.parametrize(
    "name",
    [
        *("Train.LOG", "журнал.log", "HEALTH.json", "\uff54rain.log", "tr\u200cain.log", "\u017fummary.json"),
        *("train.log\ufe0f", "t\u034frain.log", "health.js\u2065on", "wan\U000e0100db", "judge.json\u180bl"),
        *(
            "TensorBoard",
            "CSV/metrics.csv",
            "TENSORBOARD/events.new",
            "Checkpoints/.staged",
            "WANDB/run/Files/x",
            "Mine",
        ),
    ],
)
def test_links_are_found_by_whatever_name_a_file_system_takes(name, tmp_path):
    link = tmp_path / "run" / name
    link.parent.mkdir(parents=True)
    link.symlink_to(tmp_path / "mine")
    told = link_problem(tmp_path / "run", "minE")
    assert f" in it is a link to {tmp_path}/mine" in str(told)
    link.unlink()
    assert link_problem(tmp_path / "run", "mine") is None


@provocation(
    "a run directory, or a folder in it, whose files can be used and not be listed (mode 0300), so that links among "
    "them are not seen",
    "refused in one sentence",
)
@pytest.mark.parametrize("name", ["", "csv", "wandb/run-1/files", "tensorboard"])
def test_a_run_writes_into_no_hidden_folder(name, tmp_path, monkeypatch):
    run = tmp_path / "run"
    (run / name).mkdir(parents=True)
    assert link_problem(run) is None
    real = os.access
    monkeypatch.setattr(
        os, "access", lambda path, mode: (Path(path) != run / name or not mode & os.R_OK) and real(path, mode)
    )
    told = f"{name} in it" if name else "itself"
    assert f": {told} is a directory whose files cannot be listed" in str(link_problem(run))


def test_a_log_that_a_backup_shares_is_cut_alone(tmp_path):
    own = logged(tmp_path / "tensorboard", 1, tensorboard.SUFFIX)
    backup = tmp_path / "backup"
    backup.hardlink_to(own)
    before = own.read_bytes()
    assert tensorboard.rewind(own.parent, {own.name: 5}) == len(before) - 5
    assert own.read_bytes() == before[:5]
    assert backup.read_bytes() == before
    assert [path.name for path in own.parent.iterdir()] == [own.name]


@provocation(
    "a run directory or a job's of a sweep that is itself a link, in a folder of the directory of the start",
    "refused in one sentence before anything is written; links in the directory of the start itself are the user's",
)
def test_a_folder_s_links_are_no_run_directories(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bundle" / "sweep").mkdir(parents=True)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "bundle" / "run").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "bundle" / "sweep" / "seed=0").symlink_to("../../elsewhere")
    (tmp_path / "runs").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "bundle" / "inside").symlink_to("sweep")
    for place in ("bundle/run", "bundle/run/deeper", "bundle/sweep/seed=0"):
        assert "allowed is" in str(link_problem(Path(place)))
        assert "through which is not written where a stranger" in str(link_problem(tmp_path / place))
    for place in ("runs", "runs/deeper", "bundle/inside", "bundle/new", "."):
        assert link_problem(Path(place)) is None
    home = tmp_path.with_name(f"{tmp_path.name}_home")
    home.symlink_to(tmp_path)
    for place in ("bundle/run", "bundle/sweep/seed=0/x"):  # the working directory by another name
        assert "through which is not written where a stranger" in str(link_problem(home / place))
    assert link_problem(home / "runs") is None


@provocation(
    "a run directory that is a link in the directory of the start, to a folder of other files, such as the home "
    "directory, or to a hidden one (`~/.bashrc.d`), also an empty one",
    "refused in one sentence before anything is written; one to an empty folder or to a run's is allowed",
)
def test_a_run_directory_is_no_link_to_other_files(tmp_path, monkeypatch):
    others, run = tmp_path / "others", tmp_path / "here" / "0"
    run.parent.mkdir()
    monkeypatch.chdir(run.parent)
    others.mkdir()
    run.symlink_to(others)
    assert link_problem(run) is None
    for name in ("aliases", "nohup.log", "wandb"):  # as there may be in a home directory
        (others / "aliases").touch()
        (others / "aliases").rename(others / name)
        assert link_problem(run) is not None
    told = f"it is a link to {others}; allowed is that directory by its own name, or a link in the directory of the"
    for name in (run, Path("0")):
        assert str(link_problem(name)).startswith(f"hydra.run.dir={name}: {told}")
    assert link_problem(others) is None
    assert link_problem(run / "deeper") is None
    (others / ".hydra").mkdir()
    assert link_problem(run) is None
    (tmp_path / ".others").mkdir()
    Path("1").symlink_to(tmp_path / ".others")
    told = f"{tmp_path}/here/1 is a link to {tmp_path}/.others, through which is not written where a stranger may have"
    assert str(link_problem(Path("1"))).startswith(f"hydra.run.dir=1: {told}")
    recipes, shell = tmp_path / ".config" / "recipes", tmp_path / ".config" / "bash"
    for place in (recipes, shell):
        place.mkdir(parents=True)
    monkeypatch.chdir(recipes)
    (recipes / "inside").mkdir()
    for name, leads, below, is_allowed in (
        *(("out", "../bash", "", False), ("runs", "../../.config", "bash", False), ("2", "inside", "", True)),
        *(("3", str(others), "", True), ("4", str(others), "new", True), ("5", "..", "bash", False)),
    ):
        Path(name).symlink_to(leads)
        assert (link_problem(Path(name, below)) is None) == is_allowed, name


@provocation(
    "`compose(run_dir=DIR)` with a hidden directory that holds files of others, which a shell may run",
    "refused, as on the command line; a new one in it is allowed",
)
def test_a_program_writes_into_no_directory_of_programs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".config" / "bash").mkdir(parents=True)
    (tmp_path / ".config" / "bash" / "aliases").touch()
    found = list(place_problems({"run_dir": ".config/bash"}))
    assert found[0].startswith("hydra.run.dir=.config/bash: a hidden directory with files that are no run's, or of")
    assert list(place_problems({"run_dir": ".config/bash/new"})) == []
    (tmp_path / ".config" / "bash" / "train.log").touch()  # a run has begun
    assert list(place_problems({"run_dir": ".config/bash"})) == []


@provocation(
    "a run directory or a job's of a sweep elsewhere that is a link to a folder beyond its own, also to an empty one",
    "refused in one sentence before anything is written",
)
def test_a_run_directory_elsewhere_is_no_link(tmp_path, monkeypatch):
    home, theirs = tmp_path / "home", tmp_path / "theirs"
    for place in (home / ".bashrc.d", home / "project", theirs / "other", tmp_path / "files"):
        place.mkdir(parents=True)
    monkeypatch.chdir(home / "project")
    for name in ("run", "runs"):
        (theirs / name).symlink_to("../home/.bashrc.d")
    (home / "own").symlink_to("../files")
    (theirs / "beside").symlink_to("other")
    for filled in (False, True):
        if filled:
            (home / ".bashrc.d" / "train.log").write_text("")
        for place, name in ((theirs / "run", "run"), (theirs / "runs" / "new", "runs")):
            told = (
                f"hydra.run.dir={place}: {theirs}/{name} is a link to ../home/.bashrc.d, through which is not written"
            )
            assert str(link_problem(place)).startswith(told)
        told = f"hydra.run.dir={home}/own: it is a link to ../files; allowed is that directory by its own name, or a "
        assert str(link_problem(home / "own")).startswith(told)
    assert link_problem(theirs / "beside") is None
    assert link_problem(home / "own" / "run") is None  # a link of the user's, in what the start lies in
    monkeypatch.chdir(theirs)
    monkeypatch.setenv("HOME", str(home))
    (home / "scratch").symlink_to("../theirs")
    assert link_problem(home / "scratch" / "new") is None
    monkeypatch.setenv("HOME", str(theirs))
    assert link_problem(home / "scratch" / "new") is not None


@provocation(
    "a callback's `directory` or a judge's `cache` that is no text but what a function of the user's makes of one",
    "refused by its key",
)
@pytest.mark.parametrize(
    ("key", "node"),
    [
        (
            "callbacks.export",
            {"_target_": "grpo_lightning.callbacks.export.Export", "directory": {"_target_": "mine.f"}},
        ),
        ("callbacks.doctor", {"_target_": "grpo_lightning.callbacks.doctor.Doctor", "directory": ["a"]}),
        ("reward.a.function", {"_target_": "grpo_lightning.reward.judge.ChatJudge", "cache": {"_target_": "mine.f"}}),
    ],
)
def test_places_are_texts(key, node):
    name = [*node][-1]
    first, *others = key.split(".")
    config: dict[str, Any] = {first: {others[0]: {"function": node} if others[1:] else node}}
    [told] = reach_problems(config)
    assert told == f"{key}.{name}={node[name]}: allowed is text"
    node = node | {name: None}
    assert list(reach_problems({first: {others[0]: {"function": node} if others[1:] else node}})) == []


@provocation(
    "a link of the user's own that leads to a link of a stranger's (`data` to `~/Downloads/theirs/latest`, which leads "
    "to `~/.bashrc.d`), on the way to a run directory, a callback's directory, a judge's cache or the report's picture",
    "refused in one sentence that names the stranger's link",
)
def test_ones_own_links_lead_through_no_link_of_a_stranger(tmp_path, monkeypatch):
    home, theirs = tmp_path / "home", tmp_path / "home" / "Downloads" / "theirs"
    for place in (home / ".bashrc.d", home / "project", theirs / "files", home / "Music"):
        place.mkdir(parents=True)
    (theirs / "latest").symlink_to("../../.bashrc.d")
    (theirs / "inside").symlink_to("files")
    (home / "music").symlink_to("Music")
    for name, target in {
        "data": theirs / "latest",
        "twice": "data",
        "by": "../music/../Downloads/theirs/new/../latest/../Music",
        "files": theirs / "inside",
    }.items():
        (home / "project" / name).symlink_to(target)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(home / "project")
    for name in ("data", "data/x", "twice/x", "by", "by/x"):
        for place in (Path(name), home / "project" / name):
            assert linked_part(place) == theirs / "latest"
            told = f"hydra.run.dir={place}: {theirs}/latest is a link to ../../.bashrc.d, through which is not written"
            assert str(link_problem(place)).startswith(told)
    for name in ("files", "files/x", "../music/x", "nothing/../files", "files/nothing/../x"):
        assert linked_part(Path(name)) is None
        assert link_problem(Path(name)) is None
    assert linked_part(Path("new/../data")) == theirs / "latest"
    node = {"_target_": "grpo_lightning.callbacks.Doctor", "directory": "data/x"}
    told = f"callbacks.doctor.directory=data/x: {theirs}/latest is a link to ../../.bashrc.d, through which"
    assert told in "".join(reach_problems({"run_dir": "runs/1", "callbacks": {"doctor": node}}))


def test_links_that_nobody_can_follow_to_their_end_are_refused(tmp_path, monkeypatch):
    home, theirs = tmp_path / "home", tmp_path / "theirs"
    for place in (home, theirs):
        place.mkdir()
    monkeypatch.chdir(home)
    (theirs / "a").symlink_to("b")
    (theirs / "b").symlink_to("a")
    assert linked_part(theirs / "a" / "x") == theirs / "a"
    (home / "own").symlink_to(theirs / "a")
    assert str(link_problem(home / "own" / "run")).startswith(f"hydra.run.dir={home}/own/run: {theirs}/a is a link")
    (home / "long").symlink_to(theirs / "/".join(["deep" * 50] * 19))
    (theirs / ("x" * 200)).symlink_to(f"{'y' * 200}/../" * 10 + "z")
    (home / "over").symlink_to(theirs / ("x" * 200))
    assert linked_part(home / "long" / ("end" * 90)) == home / "long"
    (home / "theirs").symlink_to(theirs)
    assert linked_part(home / "theirs" / "x") is None
    assert linked_part(home / "theirs" / "x", theirs / "a") == home / "theirs"  # a run that is nobody knows where
    for number in range(41):
        (home / f"link{number}").symlink_to(f"link{number + 1}")
    assert linked_part(home / "link0") is not None
    assert linked_part(home / "link20") is None


def test_links_of_the_administrator_are_followed(tmp_path, monkeypatch):
    home, scratch = tmp_path / "home", tmp_path / "scratch"
    for place in (home, scratch, tmp_path / "disk3"):
        place.mkdir()
    (scratch / "me").symlink_to("../disk3")
    monkeypatch.chdir(home)
    for owner, user, is_followed in ((0, 1000, True), (0, 0, False), (1000, 1000, False), (1001, 1000, False)):
        os.lchown(scratch / "me", owner, owner)
        monkeypatch.setattr(os, "geteuid", lambda user=user: user)
        assert (linked_part(scratch / "me" / "runs") is None) == is_followed


def test_links_that_lead_nowhere_else_are_allowed(tmp_path, monkeypatch):
    run = tmp_path / "run"
    (run / "checkpoints" / "last_1_0.ckpt").mkdir(parents=True)
    (run / "checkpoints" / "last.ckpt").symlink_to("last_1_0.ckpt")
    (run / "checkpoints" / "best.ckpt").symlink_to(tmp_path / "elsewhere.ckpt")
    (run / "checkpoints" / "step.ckpt").write_text("")
    (run / "checkpoints" / ".last.ckpt.77").hardlink_to(run / "checkpoints" / "step.ckpt")  # of a run that was killed
    (run / "data").symlink_to(tmp_path)
    (tmp_path / "name").symlink_to(run)
    monkeypatch.chdir(tmp_path)
    assert link_problem(run) is None
    assert link_problem(tmp_path / "name") is None
    assert link_problem(tmp_path / "nothing") is None
    assert link_problem(run, "data") is not None
    (run / "summary_fit.json").symlink_to("summary.json")
    assert link_problem(run) is not None


def test_a_file_is_replaced_without_following_links(tmp_path):
    mine, file = tmp_path / "mine", tmp_path / "summary.json"
    mine.write_text("mine")
    for name in ("summary.json", f".summary.json.{os.getpid()}", "staged", f".last.ckpt.{os.getpid()}"):
        (tmp_path / name).symlink_to(mine)
    replace(file, "{}")
    replace(tmp_path / "other", "text", by="staged")
    AtomicCheckpointIO().save_checkpoint({"w": 1}, tmp_path / "last.ckpt")
    assert mine.read_text() == "mine"
    assert (file.read_text(), (tmp_path / "other").read_text()) == ("{}", "text")
    assert {path.name for path in tmp_path.iterdir()} == {"mine", "summary.json", "other", "last.ckpt"}
    assert not any(path.is_symlink() for path in tmp_path.iterdir())


RUN = NOWHERE.as_posix()
OUTSIDE = [
    ("logger=csv logger.csv.save_dir=/elsewhere", "logger.csv.save_dir=/elsewhere: allowed is a directory in run_dir="),
    ("logger=csv logger.csv.save_dir=RUN/../vic", "logger.csv.save_dir=RUN/../vic: allowed is a directory in run_dir="),
    (
        "logger=csv logger.csv.save_dir='reference::data:x'",
        "logger.csv.save_dir=reference::data:x: allowed is a directory in run_dir=",
    ),
    (
        "logger=csv logger.csv.save_dir='RUN/reference::x'",
        "logger.csv.save_dir=RUN/reference::x: allowed is a directory in run_dir=",
    ),
    ("logger=csv logger.csv.save_dir=false", "logger.csv.save_dir=False: allowed is text"),
    ("logger=csv logger.csv.version=true", "logger.csv.version=True: allowed is text"),
    ("logger=tensorboard +logger.tensorboard.sub_dir=7", "logger.tensorboard.sub_dir=7: allowed is text"),
    (
        "+trainer.profiler={_target_: lightning.pytorch.profilers.AdvancedProfiler, dirpath: false, filename: x}",
        "trainer.profiler.dirpath=False: allowed is text",
    ),
    (
        "logger=csv logger.csv.save_dir='memory://x'",
        "logger.csv.save_dir=memory://x: allowed is a directory in run_dir=",
    ),
    ("logger=csv logger.csv.save_dir=file:RUN/x", "logger.csv.save_dir=file:RUN/x: allowed is a directory in run_dir="),
    (
        "run_dir=. logger=csv logger.csv.save_dir=local:x",
        "logger.csv.save_dir=local:x: allowed is a directory in run_d",
    ),
    (
        "run_dir=. logger=csv logger.csv.save_dir='' logger.csv.name=x",
        "logger.csv.save_dir=: allowed is a directory in run_dir=.",
    ),
    ("logger=csv logger.csv.name='~/vic'", "logger.csv.name=~/vic: allowed is a name without '..'"),
    (
        "run_dir=. +trainer.profiler={_target_: lightning.pytorch.profilers.SimpleProfiler, dirpath: 'file:x'}",
        "trainer.profiler.dirpath=file:x: allowed is a directory in run_dir=.",
    ),
    *(
        (f"logger=csv logger.csv.{part}={value} logger.csv.save_dir=RUN/mine", f"logger.csv.{part}={said}: allowed is")
        for part, value, said in (("name", "false", "False"), ("name", "0", "0"), ("version", "true", "True"))
    ),
    ("logger=csv logger.csv.version=.bashrc.d", "logger.csv.version=.bashrc.d: allowed is a name without '..'"),
    ("logger=csv logger.csv.name=a/.b/c", "logger.csv.name=a/.b/c: allowed is a name without '..'"),
    ("logger=csv logger.csv.save_dir=RUN/.b", "logger.csv.save_dir=RUN/.b: allowed is a directory in run_dir"),
    ("logger=csv logger.csv.version=../vic", "logger.csv.version=../vic: allowed is a name without '..'"),
    ("logger=csv logger.csv.name=/vic", "logger.csv.name=/vic: allowed is a name without '..'"),
    (
        "logger.tensorboard.filename_suffix=/../../x",
        "logger.tensorboard.filename_suffix=/../../x: allowed is a name without '..'",
    ),
    *(
        (
            f"logger.tensorboard.filename_suffix={value}",
            f"logger.tensorboard.filename_suffix={value}: allowed is a text without '.', but for .grpo at its end",
        )
        for value in (".vim", ".grpo.vim", "a.pth")
    ),
    (
        "+callbacks.a={_target_: lightning.pytorch.callbacks.ModelCheckpoint, dirpath: vic}",
        "callbacks.a.dirpath=vic: allowed is a directory in run_dir=",
    ),
    (
        "+callbacks.a={_target_: lightning.pytorch.callbacks.ModelCheckpoint, filename: ../x}",
        "callbacks.a.filename=../x: allowed is a name without '..'",
    ),
    *(
        (f"+callbacks.a={{_target_: lightning.pytorch.callbacks.ModelCheckpoint, dirpath: RUN/mine, {name}}}", message)
        for name, message in (
            ("filename: '{step].__class__.__init__.__doc__[15}x'", "callbacks.a.filename={step].__class__."),
            ("filename: '{step:{0.x}}'", "callbacks.a.filename={step:{0.x}}: allowed is a name without '/', in which"),
            ("filename: '..{step:c}x'", "callbacks.a.filename=..{step:c}x: allowed is a name without '/', in which"),
            ("filename: '{step!r}'", "callbacks.a.filename={step!r}: allowed is a name without '/', in which"),
            ("filename: 'sub.ckpt/last'", "callbacks.a.filename=sub.ckpt/last: allowed is a name without '/', in"),
            ("filename: '{val/pass@1}'", "callbacks.a.filename={val/pass@1}: allowed is a name without '/', in which"),
            ("filename: 'a/{step}', auto_insert_metric_name: false", "callbacks.a.filename=a/{step}: allowed is a"),
        )
    ),
    (
        "+callbacks.a={_target_: lightning.pytorch.callbacks.ModelCheckpoint, filename: x}",
        "callbacks.a.dirpath=null: allowed is a directory in run_dir=",
    ),
    (
        "+trainer.profiler={_target_: lightning.pytorch.profilers.SimpleProfiler, dirpath: vic, filename: x}",
        "trainer.profiler.dirpath=vic: allowed is a directory in run_dir=",
    ),
    ("trainer.default_root_dir=.", "trainer.default_root_dir=.: allowed is run_dir=RUN itself"),
    ("trainer.default_root_dir=RUN/x", "trainer.default_root_dir=RUN/x: allowed is run_dir=RUN itself"),
    (
        "+trainer.profiler={_target_: lightning.pytorch.profilers.AdvancedProfiler, filename: x}",
        "trainer.profiler.dirpath=null: allowed is a directory in run_dir=",
    ),
    (
        "+trainer.profiler={_target_: lightning.pytorch.profilers.PyTorchProfiler}",
        "trainer.profiler.dirpath=null: allowed is a directory in run_dir=",
    ),
    ("logger=wandb logger.wandb.save_dir=RUN/x", "logger.wandb.save_dir=RUN/x: allowed is run_dir=RUN itself"),
    ("logger=wandb logger.wandb.project=../x", "logger.wandb.project=../x: allowed is a name without '/'"),
    ("trainer.default_root_dir=null", "trainer.default_root_dir=null: allowed is run_dir=RUN itself"),
    ("run_dir='memory://x'", "run_dir=memory://x: allowed is a directory of this machine"),
    ("callbacks.checkpoint.directory='a::b'", "callbacks.checkpoint.directory=a::b: allowed is a directory of this"),
]


def words_of(text: str) -> list[str]:
    text = text.replace("RUN", RUN)
    first, _, rest = text.partition(" +") if "{" in text else ("", "", "")
    return [first, f"+{rest}"] if rest else [text] if "{" in text else text.split()


@pytest.mark.grid
@pytest.mark.parametrize(
    ("words", "message"),
    [pytest.param(*one, marks=provocation(f"`{one[0]}`", "refused by its key")) for one in OUTSIDE],
)
def test_settings_write_into_the_run_directory_only(words, message):
    with pytest.raises(ConfigError, match=re.escape(message.replace("RUN", RUN))):
        check(composed(*words_of(words)))


@pytest.mark.parametrize(
    "words",
    [
        "logger=csv logger.csv.save_dir=RUN/mine logger.csv.version=3",
        "logger=csv logger.csv.name=a/b",
        "trainer.default_root_dir=RUN/./",
        "+trainer.profiler={_target_: lightning.pytorch.profilers.SimpleProfiler}",
        *(
            f"+callbacks.a={{_target_: lightning.pytorch.callbacks.ModelCheckpoint, dirpath: RUN/mine, {name}}}"
            for name in (
                "filename: x",
                "filename: '{step:03d}-{a.b}'",
                "filename: 'x-{val/pass@1:.2f}', auto_insert_metric_name: false",
            )
        ),
        "callbacks.checkpoint.directory=elsewhere",
        "+a={_target_: lightning.pytorch.loggers.MLFlowLogger, save_dir: mlruns}",
    ],
)
def test_settings_may_name_places_in_the_run_directory(words):
    assert list(reach_problems(composed(*words_of(words)))) == []


@provocation("`callbacks.x.dirpath=RUN/a/../../x` in a run directory where `a` is a link", "refused by its key")
def test_a_place_lies_in_the_run_directory_by_its_name_too(tmp_path):
    (tmp_path / "run" / "b" / "c").mkdir(parents=True)
    (tmp_path / "run" / "a").symlink_to("b/c")
    place = f"{tmp_path}/run/a/../../x"
    assert is_in(Path(place).parent, tmp_path / "run") is False
    words = f"+callbacks.x={{_target_: lightning.pytorch.callbacks.ModelCheckpoint, dirpath: {place}}}"
    assert Path(place).resolve() == tmp_path / "run" / "x"
    [told] = reach_problems(composed(words, f"run_dir={tmp_path}/run"))
    assert told.startswith(f"callbacks.x.dirpath={place}: allowed is a directory in run_dir=")


@provocation("`trainer.default_root_dir=link/../../RUN`, which is another place by its name", "refused by its key")
def test_a_place_is_the_run_directory_with_links_followed_too(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "theirs" / "a" / "b").mkdir(parents=True)
    (tmp_path / "theirs" / "link").symlink_to("a/b")
    for place, count in ((f"{tmp_path}/theirs/link/../../run", 1), (f"{tmp_path}/theirs/a/../../run", 0)):
        config = composed(f"trainer.default_root_dir={place}", f"run_dir={tmp_path}/run")
        assert len(list(reach_problems(config))) == count


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "found"),
    [
        (["~callbacks.checkpoint"], set()),
        (
            [
                "~callbacks.checkpoint",
                "+callbacks.a={_target_: lightning.pytorch.callbacks.ModelCheckpoint, dirpath: DIR/a}",
            ],
            {"a/epoch=0-step=1.ckpt"},
        ),
        ([], {"checkpoints/last.ckpt", "checkpoints/best.ckpt"}),
    ],
)
def test_lightning_keeps_no_checkpoints_of_its_own(words, found, tmp_path):
    given = [word.replace("DIR", str(tmp_path / "run")) for word in words]
    grpo.compose(*SMALL, "steps=1", *given, run_dir=tmp_path / "run").fit()
    assert {str(path.relative_to(tmp_path / "run")) for path in tmp_path.rglob("*.ckpt")} == found


@pytest.mark.slow
def test_a_run_from_another_one_s_checkpoint_removes_no_foreign_logs(tmp_path):
    small_run(tmp_path / "one", "steps=1")
    foreign = logged(tmp_path / "two" / "tensorboard", 1)
    small_run(tmp_path / "two", "steps=2", f"checkpoint={tmp_path}/one/checkpoints/last.ckpt")
    assert foreign.exists()
    small_run(tmp_path / "one", "steps=2", "checkpoint=last")
    steps = [step for step, _ in scalars(tmp_path / "one" / "tensorboard")["reward/total"]]
    assert sorted(steps) == [1, 2]  # files of the same second are read in any order


@provocation(
    "two runs with the same `callbacks.checkpoint.directory`", "the second is refused; the first's checkpoints stay"
)
@pytest.mark.slow
def test_the_checkpoints_of_another_run_are_not_overwritten(tmp_path):
    shared = tmp_path / "shared"
    given = f"callbacks.checkpoint.directory={shared}"
    small_run(tmp_path / "one", given, "steps=1")
    before = contents(shared)
    with pytest.raises(ValueError, match=rf"{given}: holds the checkpoints of a run; allowed is a directory without"):
        small_run(tmp_path / "two", given, "steps=1")
    small_run(tmp_path / "three", "steps=1")
    for run, checkpoint in (("two", tmp_path / "three/checkpoints/last.ckpt"), ("one", "last"), ("three", "last")):
        with pytest.raises(ValueError, match=rf"{given}: holds the checkpoints of a run"):
            small_run(tmp_path / run, given, "steps=2", f"checkpoint={checkpoint}")
    assert contents(shared) == before
    small_run(tmp_path / "one", given, "steps=2", f"checkpoint={shared}/last.ckpt")
    assert contents(shared) != before


@provocation(
    "a checkpoint in which Lightning's `ModelCheckpoint` has saved a file of the user's, by way of `..` or a link",
    "the file is not removed",
)
@pytest.mark.parametrize("way", ["../..", "link"])
def test_lightning_s_lists_of_checkpoints_remove_nothing_elsewhere(way, tmp_path):
    mine, victim = tmp_path / "run" / "mine", tmp_path / "victim"
    victim.write_text("")
    mine.mkdir(parents=True)
    (mine / "link").symlink_to(tmp_path)
    kept = f"+callbacks.kept={{_target_: lightning.pytorch.callbacks.ModelCheckpoint, dirpath: {mine}}}"
    last = tmp_path / "run" / "checkpoints" / "last.ckpt"
    small_run(tmp_path / "run", kept, "steps=1")
    checkpoint = torch.load(last)
    [state] = [one for name, one in checkpoint["callbacks"].items() if name.startswith("ModelCheckpoint")]
    state["best_model_path"] = f"{mine}/{way}/victim"
    torch.save(checkpoint, last)
    before = contents(mine)
    small_run(tmp_path / "run", kept, "steps=2", "checkpoint=last")
    assert contents(mine) != before
    assert victim.exists()


@provocation("`checkpoints/last_good.ckpt`, a copy of one's own, beside sharded checkpoints; a link to nothing", "stay")
def test_sharded_checkpoints_remove_only_their_own(tmp_path, monkeypatch):
    def write(self, checkpoint, target, storage_options=None):
        Path(target).mkdir()

    monkeypatch.setattr(ModelParallelStrategy, "save_checkpoint", write)
    monkeypatch.setattr(FullyShardedStrategy, "broadcast", lambda self, name: name)
    monkeypatch.setattr(FullyShardedStrategy, "barrier", lambda self: None)
    monkeypatch.setattr(FullyShardedStrategy, "is_global_zero", True)
    for name in ("last_good.ckpt", "last_1_good.ckpt", "last_1_0.ckpt.old"):
        (tmp_path / name).mkdir()
    (tmp_path / "last_2_0.ckpt").symlink_to(tmp_path / "nothing")
    kept = {path.name for path in tmp_path.iterdir()}
    strategy = FullyShardedStrategy(timeout=1, sharded_checkpoints=True)
    for step in (1, 2):
        strategy.save_checkpoint({"step": {"completed": step}}, tmp_path / "last.ckpt")
    assert {path.name for path in tmp_path.iterdir()} == kept | {"last.ckpt", "last_2_1.ckpt"}


@provocation("`.lock` in the run directory is a link to a file", "refused; the file is as before")
def test_a_lock_that_is_a_link_is_not_followed(tmp_path):
    mine = tmp_path / "mine"
    mine.write_text("mine")
    for target in (mine, tmp_path / "nothing"):
        run = tmp_path / f"run_{target.name}"
        run.mkdir()
        (run / ".lock").symlink_to(target)
        with pytest.raises(Locked, match=r"\.lock in it is a link, which is not written to; allowed is"), held(run):
            pass
        assert os.readlink(run / ".lock") == str(target)
    (run / ".lock").unlink()
    (run / ".lock").hardlink_to(mine)
    with pytest.raises(Locked, match=r"\.lock in it is a link, which is not written to; allowed is"), held(run):
        pass
    assert mine.read_text() == "mine"
    assert not (tmp_path / "nothing").exists()


@provocation("`checkpoint=last` on a finished run whose summary.json lacks its metrics", "says that the run has ended")
def test_a_summary_without_metrics_is_taken(tmp_path):
    small_run(tmp_path, "steps=1")
    summary = json.loads((tmp_path / "summary.json").read_text())
    del summary["metrics"]
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    assert small_run(tmp_path, "steps=1", "checkpoint=last").metrics == {}
