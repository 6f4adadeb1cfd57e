"""The command that a message offers is one that the shell and Hydra read as it was meant."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from grpo_lightning import start
from grpo_lightning.checkpoint.command import continue_command, longer_command, say_begun
from grpo_lightning.distributed.strategies import check_processes
from grpo_lightning.output import redaction
from grpo_lightning.output.redaction import hide
from grpo_lightning.output.shell import hydra_text, program, shell_word, typed, typed_key
from grpo_lightning.output.terminal import sentence
from tests.support.composed import ROOT
from tests.support.provocations import provocation

UNTOLD = "the command of this run (not shown, as it holds a secret) and "


@pytest.fixture(autouse=True)
def started(monkeypatch):
    """The command line is begun by ``python train.py``."""
    monkeypatch.setenv("GRPO_LIGHTNING_BEGUN", json.dumps(["python", "train.py"]))


@pytest.mark.parametrize("place", ["/a/b", "/a b/lr=0.1", "/it's", "/é\\'y", "/x\\", "/t(1),[2]{3}:4", '/q"q', "/a;b"])
def test_a_directory_of_any_name_comes_through_shell_and_hydra(place):
    line = continue_command(["steps=3", "data.path='x y'"], Path(place), checkpoint=f"{place}/best.ckpt")
    program, script, *words = shlex.split(line)
    assert (program, script) == ("python", "train.py")
    assert words[:2] == ["steps=3", "data.path='x y'"]
    directory, checkpoint = OverridesParser.create().parse_overrides(words[2:])
    assert (directory.key_or_group, directory.value()) == ("hydra.run.dir", place)
    assert (checkpoint.key_or_group, checkpoint.value()) == ("checkpoint", f"{place}/best.ckpt")


@pytest.mark.parametrize(
    "place", ["/a\nb", "/a\r\nrm -r x", "/it's\\n\n", "/\x1b[2J", "/a\u2028b", "/\x9bm\t", "/\u202eb"]
)
def test_a_command_is_one_line_whatever_a_text_holds(place):
    line = continue_command([f"data.path={place}"], Path("/d"))
    assert line.isprintable()
    read = f"printf '%s\\0' {line}"
    given = os.environ | {"LC_ALL": "C.UTF-8"}
    words = subprocess.run(["bash", "-c", read], capture_output=True, timeout=60, env=given).stdout
    assert words.decode().split("\0")[2] == f"data.path={place}"


@provocation(
    "a stranger's checkpoint or folder with quotes and backslashes in its name, which fish reads otherwise than bash",
    "its name is one word to bash, dash and fish",
)
@pytest.mark.parametrize("shell", ["bash", "dash", "fish"])
@pytest.mark.parametrize(
    "text", ["it's", "\\", "\\'", "'\\'", "a\\\\b", "\\'; touch x #", "''''", "$(touch x)", "`touch x`", 'a"b', "!a~*"]
)
def test_a_word_is_the_same_to_every_shell(shell, text, tmp_path):
    word = shell_word(f"/d/{text}")
    if shutil.which(shell):
        done = subprocess.run([shell, "-c", f"printf %s {word}"], cwd=tmp_path, capture_output=True, timeout=60)
        assert done.stdout.decode() == f"/d/{text}"
        assert not any(tmp_path.iterdir())
    # Between single quotes a backslash is one to bash, and takes away the meaning of a quote behind it to fish.
    assert not any("\\" in part for part in re.findall(r"\"[^\"]*\"|'([^']*)'", word))


@provocation(
    "a stranger's folder with a tabulator in its name, at which a shell completes what is pasted, and ends its quotes",
    "its name holds none where it is offered",
)
def test_a_tabulator_is_no_key_that_is_pressed():
    assert shell_word("a\t; touch x #") == "$'a\\x09; touch x #'"


@provocation(
    "a stranger's folder with `!` in its name, for which csh puts earlier words between single quotes, too",
    "its name holds none between quotes where it is offered",
)
@pytest.mark.parametrize("end", ["", "\t"])
def test_earlier_words_are_in_none_that_is_offered(end):
    word = shell_word(f'a!#:0:s"p"\'; touch x{end}')
    assert not re.findall(r"'[^']*(?<!\\)![^']*'", word)
    assert "!" not in word.replace("'\\!'", "")


@provocation(
    "a checkpoint of a stranger's called `a\\x01'; touch x #.ckpt`, which a message offers to go on from, in a shell "
    "that knows no `$'…'`",
    "the whole name is one word; nothing behind it runs",
)
def test_a_shell_without_escapes_reads_one_word():
    line = continue_command([], Path("/d"), checkpoint="/a\x01'; echo run #\\'b'.ckpt")
    assert shlex.split(line)[-1].startswith("$checkpoint=")  # for which $'…' is no quoting either
    assert subprocess.run(["sh", "-c", f": {line}"], capture_output=True, timeout=60).stdout == b""


@provocation(
    "settings or a checkpoint of a stranger's with a `token` made of quotes, or of words around them, which would be "
    "taken out of the command that a message offers, and a checkpoint of his called `$(touch x).ckpt`",
    "the quotes stay; the whole name is one word",
)
@pytest.mark.parametrize(
    "token",
    ["'\"'\"'", "'checkpoint='\"'\"'/d/", ": python train.py 'check", "'/d/", "$(", "(touch", "REDA", "ACTED 'check"],
)
def test_secrets_take_no_quotes_out_of_a_command(token, tmp_path, monkeypatch):
    whole = continue_command([], tmp_path, checkpoint="/d/$(touch x).ckpt")
    monkeypatch.setattr(redaction, "_known", {token})
    for line in (whole, continue_command([], tmp_path, checkpoint="/d/$(touch x).ckpt")):
        told = sentence(ValueError(f"is continued by: {line}"))
        assert hide(told) == told
        subprocess.run(["bash", "-c", told.rpartition(" by: ")[2]], cwd=tmp_path, capture_output=True, timeout=60)
        assert not any(tmp_path.iterdir())


@provocation(
    "settings of a stranger's with a `token` that begins in one word of the command that a message offers and ends in "
    "another, and one that is part of what stands for secrets",
    "the command is as it was, or none is offered",
)
@pytest.mark.parametrize(
    ("tokens", "told"),
    [
        ({"REDA", "ACTED-", "redacted>", "<redac"}, "all"),
        ({"dir bundle --config-name ", "ACTED>"}, "the directory"),
        ({"n.py"}, "the directory"),
        ({"theirs note.a=pq", "n.py --config-dir"}, "the directory"),
        ({"pq hydra.run"}, "the directory"),
        ({"note.a=pq", "dir=/d"}, "neither"),
        ({"dir=/d checkpoint"}, "neither"),
    ],
)
def test_a_command_is_offered_whole_or_not_at_all(tokens, told, monkeypatch):
    monkeypatch.setattr("sys.argv", ["clone/train.py", "--config-dir", "bundle", "--config-name", "theirs"])
    monkeypatch.setenv("GRPO_LIGHTNING_BEGUN", "")
    say_begun()
    plain = continue_command(["note.a=pq"], Path("/d"))
    assert shlex.split(plain)[:6] == ["python", "clone/train.py", "--config-dir", "bundle", "--config-name", "theirs"]
    monkeypatch.setattr(redaction, "_known", tokens)
    assert (
        continue_command(["note.a=pq"], Path("/d"))
        == {
            "all": plain,
            "the directory": f"{UNTOLD}hydra.run.dir=/d checkpoint=last",
            "neither": f"{UNTOLD.removesuffix(' and ')} and checkpoint=last, in the same hydra.run.dir",
        }[told]
    )


@provocation(
    "settings of a stranger's whose `token` is a package that the user trusts, or a word of the command that a message "
    "offers (`-P -m`), and a folder of his called `REDACTED`",
    "in place of the token stands what nothing can be called, new in each process; no command is offered that would "
    "trust it",
)
def test_no_command_is_offered_with_another_word_in_place_of_a_secret(monkeypatch):
    offered = {
        "my_rewards": "my_rewards.f: allowed is trusted=[trl, my_rewards], if you know it",
        "[my_rewards": "my_rewards.f: allowed is trusted=[my_rewards]",
        "-P -m": "python -P -m grpo_lightning.report sweep",
        "--config-dir": "python train.py --config-dir mine",
        "n.py -m": "torchrun --nproc_per_node=2 train.py -m ...",
    }
    for token, text in offered.items():
        monkeypatch.setattr(redaction, "_known", {token})
        told = hide(text)
        assert token not in told
        assert set(re.findall(r"REDACTED[\w-]*", told)) == {redaction.MASK}
        assert len(shlex.split(told)) == len(shlex.split(text))
    monkeypatch.setattr(redaction, "_known", {"my_package"})
    line = continue_command(["trusted=[my_package]"], Path("/d"))
    assert line == f"{UNTOLD}hydra.run.dir=/d checkpoint=last"
    assert continue_command(["logger.wandb.api_key=REDACTED"], Path("/d")) == line  # hidden already, it is another key


@provocation(
    "settings of a stranger's with `artifact_location: '{_target_: …, trust_remote_code: true}'`, a text that is a "
    "mapping where a message offers it to be typed, or one with a command of a shell in it",
    "what is offered is the text, to Hydra and to a shell",
)
@pytest.mark.parametrize("is_list", [False, True])
@pytest.mark.parametrize(
    "text",
    [
        *("{_target_: grpo_lightning.reward.another_model, trust_remote_code: true}", "[a, b]", "a,b", "f(x)", "a b"),
        *(
            "model`touch HIT`",
            "$(touch x)",
            "it's",
            '"',
            "'\"",
            "\\",
            "a\\'b",
            'a\\"',
            "\\\\",
            "é",
            "~/x",
            "",
            " a",
            "x=y",
            "#",
        ),
        *("http://localhost:80/x?a=b&c", "range(1,3)", "a:b", "+x", "$\\{x}", "a\nb", "a\\\n", "null", "1e5"),
    ],
)
def test_what_a_file_says_is_offered_as_the_same_text(text, is_list):
    (word,) = (
        shlex.split(typed("reference.x", [text, "b"] if is_list else text))
        if "\n" not in text
        else [f"reference.x={'[' * is_list}{hydra_text(text)}{',b]' * is_list}"]
    )
    (override,) = OverridesParser.create().parse_overrides([word])
    assert override.key_or_group == "reference.x"
    plain = {"null": None, "1e5": 1e5}.get(text, text)
    assert override.value() == ([plain, "b"] if is_list else plain)


@provocation(
    "a name of a stranger's file with `${eval:…}` in a command that a message offers, such as of a checkpoint",
    "it stands there as `$…{eval:…}`, the name of nothing",
)
def test_what_would_be_given_a_meaning_is_offered_as_the_name_of_nothing():
    (word,) = shlex.split(typed("checkpoint", 'best${eval:"x"}${a}.ckpt'))
    (override,) = OverridesParser.create().parse_overrides([word])
    assert override.value() == 'best$…{eval:"x"}$…{a}.ckpt'
    assert OmegaConf.create({"a": override.value()}).a == 'best$…{eval:"x"}$…{a}.ckpt'


def test_a_key_of_a_file_is_offered_without_a_value_of_its_own():
    assert typed("policy={_target_: x}.trust", True) == "'policy…_target_…x….trust=True'"
    assert typed_key("a b;c") == "a…b…c"
    assert typed("+reward.a_b-c", ["x", "y.z"]) == "'+reward.a_b-c=[x,y.z]'"


def test_what_named_the_old_run_is_left_out():
    given = ["+checkpoint=x", "steps=3", "checkpoint=last", "hydra.run.dir=q", "run_dir=r", "a.checkpoint=2"]
    assert continue_command(given, Path("/d")) == (
        "python train.py steps=3 a.checkpoint=2 hydra.run.dir=/d checkpoint=last"
    )


def test_the_installed_command_is_offered_to_those_who_used_it(monkeypatch):
    monkeypatch.setattr("sys.argv", ["/usr/bin/grpo-lightning", "steps=3"])
    say_begun()
    assert continue_command(["steps=3"], Path("/d")).startswith("grpo-lightning steps=3 hydra.run.dir=/d")


@provocation(
    "the command that a job of submitit, or a program of the user's own, offers where settings were brought along",
    "it brings them along, so that they are not taken for the user's own",
)
@pytest.mark.parametrize("program", ["train.py", "submitit/core/_submit.py", "wrap.py"])
@pytest.mark.parametrize(
    "options",
    [
        ["--config-dir", "my conf"],
        ["--config-dir=conf", "--config-name=own"],
        ["-cd", "conf", "-cn", "own"],
        ["hydra.searchpath=[file://conf]"],
    ],
)
def test_where_settings_were_found_is_told(options, program, monkeypatch):
    monkeypatch.setenv("GRPO_LIGHTNING_BEGUN", "")
    started = "wrap.py" if program == "wrap.py" else "train.py"
    monkeypatch.setattr("sys.argv", [started, *options, "steps=3", "-m"])
    say_begun()
    monkeypatch.setattr("sys.argv", [program, "/tmp/job"])  # of the process that has something to say
    line = continue_command(["steps=3"], Path("/d"))
    assert shlex.split(line) == ["python", started, *options, "steps=3", "hydra.run.dir=/d", "checkpoint=last"]


@provocation(
    "a program of the user's own, or a command that has been started elsewhere, where a stranger's `train.py` lies",
    "what is offered names this package's own file, or what the user has started",
)
def test_the_program_that_is_offered_is_the_one_that_was_started(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["my_program.py", "--config-dir", "conf"])
    monkeypatch.setenv("GRPO_LIGHTNING_BEGUN", "")
    assert continue_command([], Path("/d")) == f"python {ROOT}/train.py hydra.run.dir=/d checkpoint=last"
    monkeypatch.setattr(start, "_CHECKOUT", tmp_path)
    assert continue_command([], Path("/d")) == "grpo-lightning hydra.run.dir=/d checkpoint=last"
    for words, begun, script in (
        (["-c"], "grpo-lightning", "--no-python grpo-lightning"),
        (["/bin/grpo-lightning"], "grpo-lightning", "--no-python grpo-lightning"),
        (["/a b/train.py"], "python '/a b/train.py'", "'/a b/train.py'"),
    ):
        monkeypatch.setattr("sys.argv", [*words, "--config-dir", "conf"])
        monkeypatch.setenv("GRPO_LIGHTNING_BEGUN", json.dumps(["python", "other.py"]))  # of what has started this one
        say_begun()
        assert program() == begun
        assert continue_command([], Path("/d")).startswith(f"{begun} --config-dir conf hydra.run.dir=/d")
        with pytest.raises(ValueError, match=f"torchrun --nproc_per_node=2 {script} -m "):
            check_processes({"trainer": {"devices": 2, "accelerator": "cpu"}}, directory_given=True, multirun=True)


@pytest.mark.slow
def test_what_is_typed_elsewhere_is_told_with_the_place(tmp_path):
    (tmp_path / "train.py").write_text("open('HIT', 'w')\n")
    for words in (["zzzqq=1"], ["--help"]):
        done = subprocess.run(
            [sys.executable, ROOT / "train.py", *words], cwd=tmp_path, capture_output=True, text=True, timeout=120
        )
        told = re.findall(r"python (\S*train\.py)", done.stdout + done.stderr)
        assert set(told) == {str(ROOT / "train.py")}


@provocation(
    "the command that a job of a sweep offers, where files that the command brings along say what is swept",
    "none is offered but the sweep's own, in which no word is theirs",
)
def test_no_word_of_a_file_stands_in_a_command(monkeypatch):
    monkeypatch.setenv("GRPO_LIGHTNING_SETTINGS_FROM", '["bundle"]')
    start.note_words(["seed=0,1", "+a.b=2", "steps=3"])
    own = ["seed=1", "+a.b=2", "steps=3"]
    assert continue_command(own, Path("/d")).endswith("train.py seed=1 +a.b=2 steps=3 hydra.run.dir=/d checkpoint=last")
    assert longer_command(own, Path("/d"), steps=3).endswith(
        "train.py seed=1 +a.b=2 steps=6 hydra.run.dir=/d checkpoint=last"
    )
    for theirs in ("policy.path=[]", "data.batch=2", "~a.c", "b=1"):
        line = continue_command([theirs, *own], Path("/d"))
        assert line == (
            "the command of this sweep and its hydra.sweep.dir (not shown, as files that it brings along say what is "
            "swept)"
        )
    monkeypatch.delenv("GRPO_LIGHTNING_SETTINGS_FROM")
    assert " policy.revision=x seed=1 " in continue_command(["policy.revision=x", *own], Path("/d"))


def test_a_longer_run_is_of_the_users_words_where_settings_are_brought_along(monkeypatch):
    monkeypatch.setenv("GRPO_LIGHTNING_SETTINGS_FROM", '["bundle"]')
    start.note_words(["seed=1"])
    line = longer_command(["seed=1"], Path("/d"), steps=5)
    assert line == "python train.py seed=1 steps=10 hydra.run.dir=/d checkpoint=last"
