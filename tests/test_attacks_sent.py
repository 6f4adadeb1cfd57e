"""What settings of a stranger's would have sent away: keys, prompts, weights, and variables of the environment."""

import os
import shlex

import pytest
from hydra.errors import ConfigCompositionException
from omegaconf import OmegaConf

import grpo_lightning as grpo
from grpo_lightning.composition.environment import drawn
from grpo_lightning.composition.recalled import recalled
from grpo_lightning.output.shell import typed
from grpo_lightning.sampler.vllm.server import Connection
from grpo_lightning.settings import ConfigError, given
from tests.support.composed import composed, settings
from tests.support.judges import Reply, serving
from tests.support.provocations import provocation
from tests.support.running import SMALL
from tests.test_attacks import start
from tests.test_engine_server import server  # noqa: F401 (a fixture)

REFUSED = "refused by its key; on the command line it is allowed"
TOKEN = "hf_abcdefghijklmnopqrstuv"
SHORT = "ab/cd12"
"""A secret that neither looks like one nor is hidden for its length."""
JUDGED = ("reward=[judge]", "reward.judge.function.model=m", "reward.judge.function.api_key_env=null")
NEAR = (*JUDGED, "reward.judge.function.base_url=http://127.0.0.1:1/v1")


def refused(config, words=(), **more):
    """The keys that a settings file may not say, with their values."""
    return [text.partition(" stands in a file; ")[0] for text in given.ungiven(config, list(words), **more)]


def from_environment(*words):
    """Settings, and what of them comes from the environment."""
    cfg = settings("trusted=[]", "run_dir=runs/x", *words)
    config = OmegaConf.to_container(cfg, resolve=True)
    return config, drawn(cfg, config)


@pytest.mark.slow
@provocation(
    "a settings file with a judge of its own (`api_key_env: null`) and `rubric: ${oc.env:HF_TOKEN}`",
    "refused by its key; nothing is sent",
)
def test_a_settings_file_sends_nothing_of_the_environment_to_a_judge(tmp_path):
    (tmp_path / "conf" / "experiment").mkdir(parents=True)
    file = tmp_path / "conf" / "experiment" / "evil.yaml"
    with serving(Reply(text="SCORE: 5")) as served:
        file.write_text(
            "# @package _global_\ndefaults:\n  - override /reward: [judge]\nreward:\n  judge:\n    function:\n"
            f"      base_url: {served.url}\n      model: m\n      api_key_env: null\n"
            "      rubric: ${oc.env:HF_TOKEN}\n      request: {user: '${reward.judge.function.rubric}'}\n"
        )
        words = [word for word in SMALL if "reward" not in word and "trusted" not in word]
        done = start(tmp_path, "--config-dir", "conf", "experiment=evil", *words, HF_TOKEN=TOKEN)
        assert done.returncode == 1
        for key in (f"base_url={served.url}", 'rubric="$…{oc.env:HF_TOKEN}"', "request.user="):
            assert f"reward.judge.function.{key}" in done.stderr
        assert TOKEN not in done.stdout + done.stderr
        assert served.asked == []
        mine = ["reward.judge.function.rubric=good", "reward.judge.function.request.user=me", "trusted_settings=true"]
        done = start(tmp_path, "--config-dir", "conf", "experiment=evil", *words, *mine, HF_TOKEN=TOKEN)
        assert done.returncode == 0
        assert len(served.asked) > 0
        assert TOKEN not in str(served.asked)


@provocation("`${oc.env:HF_TOKEN}` in a settings file's W&B or MLflow logger, judge or server, by any detour", REFUSED)
@pytest.mark.parametrize(
    ("words", "key"),
    [
        ((*NEAR, "reward.judge.function.rubric='is it ${oc.env:HF_TOKEN}?'"), "reward.judge.function.rubric"),
        ((*NEAR, "+a=${oc.env:HF_TOKEN}", "reward.judge.function.model=${a}"), "reward.judge.function.model"),
        ((*NEAR, "+e=oc.env", "reward.judge.function.rubric='${${e}:HF_TOKEN}'"), "reward.judge.function.rubric"),
        (
            (*NEAR, "+reward.judge.function.request.x={k: [1, '${oc.env:HF_TOKEN}']}"),
            "reward.judge.function.request.x.k.1",
        ),
        ((*NEAR, "+m.no=1", "reward.judge.function.rubric='${oc.select:m.${oc.env:HF_TOKEN},x}'"), None),
        (("logger=mlflow", "+logger.mlflow.tags.a=${oc.env:HF_TOKEN}"), "logger.mlflow.tags.a"),
        (("logger=mlflow", "logger.mlflow.run_name='${oc.decode:${oc.env:HF_TOKEN}}'"), "logger.mlflow.run_name"),
        (("logger=wandb", "logger.wandb.name=${oc.env:HF_TOKEN}"), "logger.wandb.name"),
        (("logger=wandb", "logger.wandb.name=${oc.env:USER}"), None),
        (("logger=wandb", "logger.wandb.name=${oc.env:NOT_THERE,x}"), None),
        (("logger=csv", "+logger.csv.prefix=${oc.env:HF_TOKEN}"), None),
    ],
)
@pytest.mark.grid
def test_what_of_the_environment_is_sent_only_the_user_says(words, key, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setenv("USER", "me")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    config, keys = from_environment(*words)
    assert refused(config, drawn=keys) == ([f"{key}=${{oc.env:…}}"] if key else [])
    assert refused(config, words, drawn=keys) == []


def test_whoever_gives_a_list_gives_what_stands_in_it_and_no_mapping_s_numbers(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    file = (*NEAR, "+reward.judge.function.request={0: '${oc.env:HF_TOKEN}', stop: ['${oc.env:HF_TOKEN}']}")
    config, keys = from_environment(*file)
    numbered, listed = (f"reward.judge.function.request.{key}=${{oc.env:…}}" for key in ("0", "stop.0"))
    assert refused(config, ["reward.judge.function.request={b: 1}"], drawn=keys) == [numbered, listed]
    assert refused(config, ["reward.judge.function.request={stop: [x]}"], drawn=keys) == [numbered]
    assert refused(config, ["reward.judge.function.request.stop=[x]"], drawn=keys) == [numbered]


def test_what_the_environment_chooses_comes_from_it_as_a_whole(monkeypatch):
    monkeypatch.setenv("KIND", "one")
    config, keys = from_environment(*NEAR, "+m.one=x", "reward.judge.function.rubric='${m.${oc.env:KIND}}'")
    assert "reward.judge.function.rubric" in keys
    assert not any(key.startswith(("policy.", "logger.")) for key in keys)
    assert os.environ["KIND"] == "one"
    assert config["reward"]["judge"]["function"]["rubric"] == "x"


@provocation(
    "`policy.system_prompt=${oc.env:HF_TOKEN}`, `data.train.prompts=[…]` or a checkpoint's `filename` of it: rollouts "
    "hold the tokens of prompts, and names of files cannot be redacted",
    "refused by its key",
)
@pytest.mark.parametrize(
    ("words", "key"),
    [
        (("policy.system_prompt=${oc.env:HF_TOKEN}",), "policy.system_prompt"),
        (("+policy.template_kwargs={a: '${oc.env:HF_TOKEN}'}",), "policy.template_kwargs.a"),
        (
            ("data=inline", "data.prompts_per_step=1", "data.train.prompts=['x ${oc.env:HF_TOKEN}']"),
            "data.train.prompts.0",
        ),
        (("+callbacks.own={filename: '${oc.env:HF_TOKEN}'}",), "callbacks.own.filename"),
        (("environment=retry", "environment.function.reply='no ${oc.env:HF_TOKEN}'"), "environment.function.reply"),
        (
            (
                "environment=gymnasium",
                "environment.function.id=x",
                "environment.function.actions={a: '${oc.env:HF_TOKEN}'}",
            ),
            "environment.function.actions.a",
        ),
    ],
)
def test_no_prompt_and_no_name_of_a_file_holds_a_secret(words, key, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    config, keys = from_environment(*words)
    told = f"{key}=${{oc.env:…}}: would stand in tokens of prompts, or in names of files; allowed is text"
    assert told in given.ungiven(config, list(words), drawn=keys)


def test_mlflows_own_variable_is_for_its_address_only(monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "https://me:word@host:1")
    config, keys = from_environment("logger=mlflow")
    assert keys == {"logger.mlflow.tracking_uri", "trainer.logger.0.tracking_uri"}
    assert refused(config, drawn=keys) == []
    config, keys = from_environment("logger=mlflow", "logger.mlflow.tracking_uri='${oc.env:MLFLOW_TRACKING_URI}/x'")
    assert "logger.mlflow.tracking_uri=${oc.env:…}" in refused(config, drawn=keys)
    config, keys = from_environment("logger=mlflow", "logger.mlflow.run_name=${oc.env:MLFLOW_TRACKING_URI}")
    assert refused(config, drawn=keys) == ["logger.mlflow.run_name=${oc.env:…}"]


@provocation(
    "a variable of the environment by a resolver whose name is put together, `${${x}:NAME}`", "refused by its key"
)
def test_a_resolver_whose_name_is_put_together_is_refused():
    told = r"wandb.x=\$\{oc.\$\{wandb.e\}:MINE\}: makes parts of a text; allowed in "
    with pytest.raises(ConfigCompositionException, match=told):
        grpo.compose("+wandb.e=env", "+wandb.x='${oc.${wandb.e}:MINE}'")


@provocation("a settings file that names another machine as `base_url`, `tracking_uri`, or W&B's `entity`", REFUSED)
@pytest.mark.parametrize(
    ("words", "found"),
    [
        ((*JUDGED, "reward.judge.function.base_url=https://x.org/v1"), "reward.judge.function.base_url"),
        ((*JUDGED, "reward.judge.function.base_url=http://localhost.x.org"), "reward.judge.function.base_url"),
        (NEAR, None),
        ((*NEAR[:-2], NEAR[-1], "reward.judge.function.api_key_env=HF_TOKEN"), "reward.judge.function.base_url"),
        (("logger=mlflow", "logger.mlflow.tracking_uri=https://x.org"), "logger.mlflow.tracking_uri=https://x.org"),
        (("logger=mlflow", "logger.mlflow.tracking_uri=http://127.0.0.1:5000"), None),
        (
            ("logger=mlflow", "logger.mlflow.tracking_uri='http://127.0.0.1:5000/x?'"),
            "logger.mlflow.tracking_uri=http://127.0.0.1:5000/x?",
        ),
        (
            ("logger=mlflow", "logger.mlflow.tracking_uri=http://127.0.0.1@x.org"),
            "logger.mlflow.tracking_uri=http://127.0.0.1@x.org",
        ),
        (("logger=wandb", "+logger.wandb.entity=stranger"), "logger.wandb.entity=stranger"),
    ],
)
def test_where_results_are_sent_only_the_user_says(words, found, monkeypatch):
    for name in ("MLFLOW_TRACKING_URI", "WANDB_ENTITY"):
        monkeypatch.delenv(name, raising=False)
    config = composed("trusted=[]", "run_dir=runs/x", *words)
    assert refused(config) == ([typed(*found.split("=", 1)) if "=" in found else found] if found else [])
    assert refused(config, words) == []
    monkeypatch.setenv("WANDB_ENTITY", "stranger")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "https://x.org")
    if words[0].startswith("logger=") and "127" not in words[1]:
        assert refused(config) == []


@provocation("a settings file with `module.sampler={_target_: …VLLMServer, url: …}` beside `sampler=own`", REFUSED)
@pytest.mark.slow
def test_a_server_is_found_wherever_it_stands():
    node = "{_target_: grpo_lightning.sampler.vllm.server.VLLMServer, url: 'http://x:1', directory: /shared}"
    words = [f"module.sampler={node}"]
    config = composed("trusted=[]", "run_dir=runs/x", *words)
    assert refused(config) == ["module.sampler.url=http://x:1", "module.sampler.directory=/shared"]
    assert refused(config, words) == []
    with pytest.raises(ConfigError, match=r"module\.sampler: allowed is what sampler says, such as sampler=NAME"):
        grpo.settings.check(composed(*words))
    config = composed("sampler=vllm_server", "sampler.url=http://x:1", "sampler.directory=/shared", "rollout.top_p=1")
    grpo.settings.check(config)


@provocation("a settings file with `trainer.callbacks=[{_target_: …Export, directory: …}]` elsewhere", REFUSED)
@pytest.mark.parametrize("name", ["export.Export", "rollouts.RecordRollouts"])
def test_callbacks_write_into_the_run_directory_wherever_they_stand(name):
    words = [f"trainer.callbacks=[{{_target_: grpo_lightning.callbacks.{name}, directory: /shared}}]"]
    config = composed("trusted=[]", "run_dir=runs/x", *words)
    assert refused(config) == ["trainer.callbacks.0.directory=/shared"]


@provocation("a settings file with `reward.judge.function.cache=` a file outside of the run directory", REFUSED)
@pytest.mark.parametrize("place", ["/shared/x.jsonl", "~/x.jsonl", "../x.jsonl", "runs/x/../y.jsonl"])
def test_a_judges_answers_are_kept_where_the_user_says(place):
    words = [*NEAR, f"reward.judge.function.cache='{place}'"]
    config = composed("trusted=[]", "run_dir=.", *words) if "~" in place else composed("run_dir=runs/x", *words)
    assert refused(config | {"trusted": []}) == [typed("reward.judge.function.cache", place)]
    assert refused(config | {"trusted": []}, words) == []


@provocation(
    "a stranger's run directory is replayed whose overrides send a variable of the environment", "refused by its key"
)
def test_a_replay_sends_nothing_of_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    (tmp_path / ".hydra").mkdir()
    more = ["reward.judge.function.rubric=${oc.env:HF_TOKEN}", "reward.judge.function.cache=/shared/x.jsonl"]
    lines = "".join(f"- {shlex.quote(word)}\n" for word in [*NEAR, *more])
    (tmp_path / ".hydra" / "overrides.yaml").write_text(lines)
    with pytest.raises(ConfigError) as told:
        recalled(tmp_path, [], ("reward", "advantage", "loss", "rollout"))
    said = {text.partition("=")[0] for text in told.value.problems}
    assert {"reward.judge.function.rubric", "reward.judge.function.cache"} <= said


@pytest.mark.slow
@provocation(
    "a key in `VLLM_API_KEY` with the line end of a file, or a server that repeats the key in its answer",
    "the key is sent without it, and stands in no file of the run and not on the terminal",
)
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_a_servers_key_is_shown_nowhere(end, server, tmp_path):  # noqa: F811
    key = "secret-of-some-server"
    server.answers["/v1/models"] = (401, {"error": f"no such key: Bearer {key}"})
    own = ["sampler=vllm_server", f"sampler.url={server.url}", f"sampler.directory={tmp_path / 'weights'}"]
    words = [word for word in SMALL if "reward" not in word and "trusted" not in word]
    done = start(tmp_path, *words, *own, "hydra.run.dir=run", VLLM_API_KEY=f"{key}{end}")
    assert done.returncode == 1
    assert "/v1/models: status 401: " in done.stderr
    assert server.keys == [f"Bearer {key}"]
    assert key not in done.stdout + done.stderr
    assert [
        path for path in (tmp_path / "run").rglob("*") if path.is_file() and key.encode() in path.read_bytes()
    ] == []


def test_a_key_that_is_none_is_not_shown(server, tmp_path, monkeypatch):  # noqa: F811
    for value in ("two\nlines-of-it", "key-with-\u2019"):
        monkeypatch.setenv("VLLM_API_KEY", value)
        with pytest.raises(ValueError, match="^VLLM_API_KEY: the variable's value cannot be a key") as told:
            Connection(server.url, timeout=1, key_name="VLLM_API_KEY").get("/v1/models")
        assert value not in str(told.value)
    assert server.log == []
