"""The order of training prompts, streams of rows, and mixtures of sources."""

from collections import Counter

import datasets
import pytest
import torch
import torch.utils.data

import grpo_lightning as grpo
from grpo_lightning.data.datamodule import run_order
from grpo_lightning.data.files import Inline, file_prompts
from grpo_lightning.data.stream import Stream
from grpo_lightning.reward.accuracy import of_source
from grpo_lightning.rollout.collector import sampled_metrics
from grpo_lightning.types import Prompts
from tests.support import running
from tests.test_data import settings, write

SMALL = [word for word in running.SMALL if "train_size" not in word]
MIXED = (
    "data.sources={words: {task: spell_backward, weight: 2, order: sequential, rewards: [custom]}, "
    "sums: {path: %s, streaming: true}}"
)


@pytest.fixture
def sums(tmp_path) -> str:
    return write(tmp_path / "sums.jsonl", *({"prompt": f"{n} + 1 =", "answer": n + 1} for n in range(60)))


def test_orders_by_hand():
    source = Inline([{"prompt": str(n), "level": level} for n, level in enumerate((3, 1, 2, 1))])
    assert [run_order(source, "sequential", 7)(i) for i in range(6)] == [0, 1, 2, 3, 0, 1]
    assert [run_order(source, "level", 7)(i) for i in range(6)] == [1, 3, 2, 0, 1, 3]  # equal ones as they come
    with pytest.raises(ValueError, match=r"data.order=hard: expected shuffled, sequential or a column: level"):
        run_order(source, "hard", 0)
    with pytest.raises(ValueError, match=r"data.order=level: the values of this column have no order: .*NoneType"):
        run_order(Inline([{"prompt": "a", "level": 1}, {"prompt": "b", "level": None}]), "level", 0)


def test_a_stream_has_every_row_once_per_epoch_and_reads_no_more_than_it_needs():
    opened = []

    def read():
        for number in range(50):
            opened.append(number)
            yield f"row {number}", (str(number), {})

    stream = Stream(read, 8, 0)
    first = [stream[i][0] for i in range(10)]
    assert len(opened) == 8 + 9
    assert all(int(text) < 8 + i for i, text in enumerate(first))
    assert first != sorted(first, key=int)
    epochs = [[stream[i][0] for i in range(start, start + 50)] for start in (0, 50)]
    assert sorted(epochs[0], key=int) == sorted(epochs[1], key=int) == list(map(str, range(50)))
    assert epochs[0] != epochs[1]
    assert stream.origin(63) == f"row {epochs[1][13]}"
    again = Stream(read, 8, 0)  # as a continued run, which begins in the middle
    assert [again[i][0] for i in range(70, 80)] == epochs[1][20:30]
    assert [again[i][0] for i in range(10)] == first
    assert [Stream(read, 8, 1)[i][0] for i in range(10)] != first
    even, _ = stream.keep(lambda prompts: [int(text) % 2 == 0 for text in prompts])
    assert sorted(int(even[i][0]) for i in range(25)) == list(range(0, 50, 2))
    with pytest.raises(ValueError, match="no prompt is left"):
        stream.keep(lambda prompts: [False])[0][0]


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "hub", "iterable", "torch"])
def test_streams_of_files_and_data_sets(kind, tmp_path):
    rows = [{"question": f"q{n % 30}", "n": n} for n in range(40)]  # the held-out ones come again
    path, words = str(tmp_path / f"rows.{kind}"), ["data.streaming=true", "data.order=sequential"]

    class Own(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter(rows)

    parts = {}
    if kind in ("parquet", "hub"):
        datasets.Dataset.from_list(rows).to_parquet(path := str(tmp_path / "rows.parquet"))
    if kind in ("iterable", "torch"):
        stream = Own() if kind == "torch" else datasets.Dataset.from_list(rows).to_iterable_dataset()
        words, parts = words[1:], {"data": stream}
    else:
        write(tmp_path / "rows.jsonl", *rows)
        words += [f"data={'hub' if kind == 'hub' else 'jsonl'}", f"data.path={path}"]
    words += ["data.prompt_column=question", "data.validation_size=4", "data.prompts_per_step=3", "reward=[custom]"]
    target = "reward.custom.function._target_=tests.support.rewards.vowels"
    data = grpo.compose(*words, target, run_dir=tmp_path / "run", **parts).data
    assert [data.validation[i] for i in range(len(data.validation))] == [(f"q{n}", {"n": n}) for n in range(4)]
    assert [data.train[i][1]["n"] for i in range(33)] == [*range(4, 30), *range(34, 40), 4]
    data.fingerprint()


def test_bad_streams(sums, tmp_path):
    def load(path=sums, **changed):
        selection = {"prompt_column": "prompt", "columns": None, "filter": None, "map_row": None, "streaming": True}
        fixed = settings(validation_size=4) | {"order": "shuffled"} | changed
        return file_prompts(path=path, validation_path=None, **selection, **fixed).load()

    assert len(load()[1]) == 4
    for changed, problem in [
        ({"order": "answer"}, "data.order=answer: a stream is shuffled or sequential"),
        ({"shuffle_buffer": 0}, "data.shuffle_buffer=0: expected 1"),
        ({"path": write(tmp_path / "a.csv", "prompt", "a")}, r"data.path=.*a.csv: data.streaming reads JSON lines"),
        ({"path": write(tmp_path / "b.jsonl", {"prompt": "a"}, "{")}, r"b.jsonl, line 2: no JSON"),
        ({"path": write(tmp_path / "c.jsonl", {"prompt": "a"})}, "no prompt is left to train on"),
    ]:
        with pytest.raises(ValueError, match=problem):
            load(**changed)


def test_a_mixture_keeps_its_quotas_and_rewards(sums, tmp_path):
    words = ["data=mixture", MIXED % sums, "data.prompts_per_step=4", "data.validation_size=9", "steps=2"]
    run = grpo.compose(*SMALL, *words, run_dir=tmp_path / "run")
    drawn = [run.data.train[i] for step in range(30) for i in run.data.batch(4 * step, 4)]
    assert Counter(row["data_source"] for _, row in drawn) == {"words": 80, "sums": 40}
    for start in range(0, 120, 3):  # a block has two words and a sum
        assert Counter(row["data_source"] for _, row in drawn[start : start + 3]) == {"words": 2, "sums": 1}
    assert [run.data.train[i][0] for i in range(8)] == [
        text for text, row in drawn[:12] if row["data_source"] == "words"
    ]
    asked = Counter(prompt for prompt, row in drawn if row["data_source"] == "sums")
    assert set(asked.values()) == {1}  # 57 are not held out
    words = Counter(row["data_source"] for _, row in (run.data.validation[i] for i in range(9)))
    assert words == {"words": 6, "sums": 3}
    run.fit()
    names = {"reward/words/total", "reward/sums/total", "val/words/pass@1", "val/sums/pass@1"}
    assert names <= set(run.metrics)
    scored = run.module.collect(
        Prompts.collate(drawn[:12]), run.module.rollout, run.module.context("rollout", 5)
    ).scored
    is_word = torch.tensor([name == "words" for name in scored.prompts.columns["data_source"] for _ in range(4)])
    assert torch.equal(scored.rewards["format"].isnan(), is_word)
    assert torch.equal(scored.rewards["total"][is_word], scored.rewards["custom"][is_word])
    metrics = sampled_metrics(scored)
    for name, rows in {"words": is_word, "sums": ~is_word}.items():
        assert metrics[f"reward/{name}/total"] == pytest.approx(float(scored.rewards["total"][rows].mean()))


def test_each_source_has_its_verifier():
    completions = ["<answer>cba</answer>", "4.0", "4.0"]
    columns = {
        "answer": ["cba", 4, "4"],
        "task": ["spell_backward", None, None],
        "metadata": [{"word": "abc"}, None, None],
    }
    assert of_source(completions, ["reasoning_gym", "numeric", "exact"], **columns) == [1.0, 1.0, 0.0]


@pytest.mark.slow
def test_a_mixture_continues_exactly(sums, tmp_path):
    words = [*SMALL, "data=mixture", MIXED % sums, "data.prompts_per_step=4", "data.num_workers=2"]
    whole = grpo.compose(*words, "steps=4", run_dir=tmp_path / "whole").fit()
    grpo.compose(*words, "steps=2", run_dir=tmp_path / "broken").fit()
    broken = grpo.compose("checkpoint=last", "steps=4", run_dir=tmp_path / "broken").fit()
    for (name, one), other in zip(whole.module.state_dict().items(), broken.module.state_dict().values(), strict=True):
        assert torch.equal(one, other), name


@pytest.mark.parametrize(
    ("sources", "problem"),
    [
        ("{a: {task: spell_backward}}", "name two or more"),
        ("{a: {task: spell_backward}, b: {answer: 3}}", "data.sources.b: expected one of task, path, hub, got answer"),
        (
            "{a: {task: spell_backward, weight: 0.5}, b: {path: x}}",
            "data.sources.a.weight=0.5: expected a whole number",
        ),
        ("{a: {task: spell_backward}, b: {path: x, promptcolumn: q}}", "data.sources.b.promptcolumn: no setting of"),
        ("{a: {task: spell_backward, rewards: [acuracy]}, b: {task: x}}", "data.sources.a.rewards: there is no reward"),
        ("{a: {task: spell_backward, verifier: eval}, b: {task: x}}", "data.sources.a.verifier=eval: expected one of"),
    ],
)
def test_bad_mixtures(sources, problem, tmp_path):
    with pytest.raises(ValueError, match=problem):
        grpo.compose("data=mixture", f"data.sources={sources}", run_dir=tmp_path).data  # noqa: B018
