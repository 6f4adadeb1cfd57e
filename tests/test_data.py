"""Order, sources and the data module, on small real files, and the look at prompts before the first step."""

import functools
import gzip
import json
import random
from types import SimpleNamespace

import datasets
import numpy
import pyarrow
import pyarrow.parquet
import pytest
import torch
from torch.utils.data import DataLoader

import grpo_lightning as grpo
from grpo_lightning.config.rules import local_or_hub
from grpo_lightning.data import PromptData
from grpo_lightning.data.datamodule import even_batches, keep, permutation, run_order
from grpo_lightning.data.files import Hub, Inline, JsonLines, file_prompts, gsm8k_row, hub_prompts
from grpo_lightning.data.reasoning_gym import _TRAIN_SEED, ReasoningGym
from grpo_lightning.data.reasoning_gym import prompts as gym_prompts
from tests.support.running import SMALL

SUM = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}  # 100 sums and 100 differences
CHAT = [{"role": "system", "content": ""}, {"role": "user", "content": "hi"}]
UNSELECTED = {"prompt_column": "prompt", "columns": None, "filter": None, "map_row": None}


@pytest.fixture(autouse=True)
def _private_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    datasets.disable_progress_bars()


def write(path, *lines) -> str:
    """A file with one line per value; text is written as it is."""
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return str(path)


def settings(**changed):
    fixed = {"prompts_per_step": 2, "steps": 10, "validate_every": 4, "validation_size": 3, "validation_batch_size": 2}
    return fixed | {"max_prompt_length": None, "seed": 0, "verifier": "x.y"} | changed


def inline(count, **changed) -> PromptData:
    """Prompts "p0", "p1", … for training, "v0" … "v3" held out."""
    held_out = [f"v{i}" for i in range(4)]
    train = Inline([{"prompt": f"p{i}", "answer": i} for i in range(count)])
    return PromptData(train=train, validation=functools.partial(Inline, held_out), **settings(**changed))


def attach(data, completed_steps=0, world_size=1) -> PromptData:
    """The data module in the hands of a trainer."""
    module = SimpleNamespace(completed_steps=completed_steps)
    data.trainer = SimpleNamespace(lightning_module=module, world_size=world_size)
    return data


def rows_of(source) -> list:
    return [source[i] for i in range(len(source))]


def texts(loader) -> list[tuple]:
    return [batch.texts for batch in loader]


# Order


def test_every_epoch_is_another_permutation_and_steps_consume_them_whatever_the_start():
    orders = [run_order(range(7), "shuffled", seed) for seed in (0, 1, 2**32)]
    epochs = [[order(e * 7 + i) for i in range(7)] for order in orders for e in range(3)]
    assert all(sorted(epoch) == list(range(7)) for epoch in epochs)
    assert len(set(map(tuple, epochs))) == 9
    assert permutation(0, 0, 5).tolist() == [1, 3, 2, 4, 0]  # pinned, because a resumed run relies on it
    run = [permutation(5, i // 10, 10).tolist()[i % 10] for i in range(24)]  # crosses two epoch borders
    data = inline(10, seed=5)
    assert [data.batch(first, 4) for first in (0, 8, 20)] == [run[0:4], run[8:12], run[20:24]]


def test_validation_batches_by_hand():
    for size, batch_size, processes, expected in [
        (5, 2, 1, [[0], [1, 2], [3, 4]]),  # ceil(5 / 2) = 3 batches
        (7, 2, 2, [[0, 1, 2], [3, 4, 5, 6]]),  # ceil(7 / 4) = 2 batches
        (5, 1, 2, [[0, 1], [2, 3, 4]]),  # three batches of at most 2 would leave a process with none
    ]:
        assert even_batches(size, batch_size, processes) == expected
    with pytest.raises(ValueError, match=r"data.prompts_per_step=2: expected at least the number of processes, 3"):
        attach(inline(5), world_size=3).setup("fit")
    with pytest.raises(ValueError, match=r"data.validation_size=3: expected at least the number of processes, 4"):
        even_batches(3, 2, 4)


# Files


def test_rows_of_files_are_text_or_messages_and_the_rest_are_columns(tmp_path):
    one = write(tmp_path / "a.jsonl", "\ufeff" + json.dumps({"prompt": "a\u2028b", "answer": 1}), "", "  ")
    two = write(tmp_path / "b.ndjson", {"answer": None, "prompt": CHAT})
    rows = JsonLines([one, two])
    assert rows_of(rows) == [("a\u2028b", {"answer": 1}), (CHAT, {"answer": None})]
    assert [rows.origin(i) for i in range(2)] == [f"{one}, line 1", f"{two}, line 1"]
    path = write(tmp_path / "c.jsonl", {"q": "x", "prompt": "y"})
    assert JsonLines(path, prompt_column="q")[0] == ("x", {"prompt": "y"})
    row = {"output": 1, "_target_": "os.system", "log_file": ["y", 2, None, {"z": [None, 9]}]}
    path = write(tmp_path / "d.jsonl", {"prompt": "p", **row}, {"prompt": "p", **row, "output": "mixed"})
    for source in (JsonLines(path), Hub(path, "train")):
        assert rows_of(source) == [("p", row), ("p", {**row, "output": "mixed"})]
    messages = [{**message, "name": None} for message in CHAT]
    table = pyarrow.table({"prompt": [CHAT, messages], "answer": ["1", "2"], "info": [{"k": 1}, {"k": 2}]})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    assert rows_of(JsonLines(str(tmp_path / "a.parquet"))) == [
        (CHAT, {"answer": "1", "info": {"k": 1}}),
        (CHAT, {"answer": "2", "info": {"k": 2}}),
    ]
    columns = {"prompt": "prompt", "answer": "info.k"}
    for source in (JsonLines, functools.partial(Hub, split="train")):
        assert source(str(tmp_path / "a.parquet"), columns=columns)[1] == (CHAT, {"answer": 2})


def test_a_malformed_row_is_named_by_file_line_and_column(tmp_path):
    good = {"prompt": "p", "answer": "1"}
    for bad, words in [
        ('{"prompt": "p"', r"line 3: no JSON: Expecting"),
        (
            {"question": "q"},
            r"line 3, column 'prompt': missing; .*: set data.prompt_column=question \(or, .*data.map_row",
        ),
        ({"Old Question": "", "Question": "q"}, r"line 3, .*: missing; .* data.prompt_column=Question \("),
        ({**good, "prompt": " \n"}, r"line 3, column 'prompt': expected text or a list of chat messages, not empty"),
        ({**good, "prompt": None}, r"line 3, column 'prompt': expected text .*, got None"),
        (
            {**good, "prompt": [*CHAT, "hi"]},
            r"line 3, column 'prompt', message 3: expected an object with the texts .*, got 'hi'",
        ),
    ]:
        path = write(tmp_path / "a.jsonl", good, "", bad, good)
        with pytest.raises(ValueError, match=r"a\.jsonl, " + words):
            JsonLines(path)


def test_a_missing_prompt_names_the_likely_column(tmp_path):
    for column in ("question", "problem", "instruction", "query", "messages", "text"):
        path = write(tmp_path / f"{column}.jsonl", {"id": "1", column: "2 + 2?"})
        for source in (JsonLines, functools.partial(Hub, split="train")):
            with pytest.raises(ValueError, match=f": set data.prompt_column={column} "):
                source(path)
            assert source(path, prompt_column=column)[0] == ("2 + 2?", {"id": "1"})


def test_held_out_rows_of_a_file_are_never_trained_on(tmp_path, caplog):
    rows = [{"prompt": f"p{i % 20}", "i": i} for i in range(40)]  # every prompt twice
    path = write(tmp_path / "a.jsonl", *rows)
    build = functools.partial(file_prompts, path=path, validation_path=None, **UNSELECTED)
    data = [build(**settings(validation_size=8, seed=seed)) for seed in (0, 1)]
    first, second = (rows_of(one.validation) for one in data)
    train = rows_of(data[0].train)
    assert first == second
    assert len(first) == 8
    assert not {prompt for prompt, _ in first} & {prompt for prompt, _ in train}
    numbers = [columns["i"] for _, columns in first]
    assert numbers == sorted(numbers) != list(range(32, 40))
    both = [n % 20 for n in numbers]  # a prompt held out once leaves one repeat behind
    assert len(train) == 40 - 8 - sum(both.count(n) == 1 for n in both)
    assert "training rows that repeat a held-out prompt" in caplog.text


def test_files_of_other_kinds_are_the_same_rows(tmp_path):
    """A column is of numbers if all its values are; an empty cell and NaN are missing."""
    rows = [{"prompt": "a, b", "answer": "21", "level": 1}, {"prompt": "c", "answer": "1.50", "level": None}]
    text = 'prompt,answer,level\n"a, b",21,1\nc,1.50,\n'
    (tmp_path / "a.csv").write_text("\ufeff" + text)
    (tmp_path / "a.tsv").write_text("prompt\tanswer\tlevel\na, b\t21\t1\r\n\nc\t1.50\t\n")
    (tmp_path / "d.csv").write_text('prompt; answer; level\n"a, b"; 21; 1\nc; 1.50; \n')  # as some spreadsheets write
    (tmp_path / "d.jsonl").write_text(json.dumps(rows, indent=1))
    (tmp_path / "a.json").write_text(json.dumps(rows, indent=1))
    (tmp_path / "c.json").write_text(json.dumps({"data": rows}, indent=1))
    (tmp_path / "two.json").write_text(json.dumps({"train": rows, "test": rows}))
    write(tmp_path / "b.json", *rows)
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress("\n".join(map(json.dumps, rows)).encode()))
    (tmp_path / "c.csv.gz").write_bytes(gzip.compress(text.encode()))
    expected = [(row.pop("prompt"), row) for row in rows]
    for name in ("a.csv", "a.tsv", "a.json", "b.json", "c.json", "a.jsonl.gz", "c.csv.gz", "d.csv", "d.jsonl"):
        assert rows_of(JsonLines(str(tmp_path / name))) == expected, name
    assert JsonLines(str(tmp_path / "a.csv")).origin(1) == f"{tmp_path}/a.csv, row 2"
    assert rows_of(Hub(str(tmp_path / "a.csv"), "train", columns={"prompt": "prompt", "level": "level"})) == [
        ("a, b", {"level": 1.0}),
        ("c", {"level": None}),  # NaN of pandas
    ]
    (tmp_path / "a.csv").write_text("prompt,answer\na,b,c\n")
    (tmp_path / "twice.csv").write_text("prompt,answer,answer\na,b,c\n")
    for name in ("empty.csv", "a.txt"):
        (tmp_path / name).write_text("")
    (tmp_path / "long.csv").write_text(f"prompt\n{'x' * 200_000}\n")
    for name in ("gbk.csv", "gbk.jsonl"):
        (tmp_path / name).write_text('{"prompt": "倒写"}\n', encoding="gbk")
    for name, message in [
        ("a.csv", r"a.csv, row 1: 3 values for the 2 columns \['prompt', 'answer'\]"),
        ("twice.csv", r"twice.csv: several columns are called answer"),
        ("empty.csv", r"empty.csv: there is no row"),
        ("long.csv", r"long.csv: field larger than field limit .*; JSON lines or parquet hold any text"),
        ("gbk.csv", r"gbk.csv: not in UTF-8 \(.* in position 12: .*\); save the file in that encoding"),
        ("two.json", r"two.json, which may hold one list, train: no JSON"),
        ("gbk.jsonl", r"gbk.jsonl, line 1: not in UTF-8 "),
        ("a.txt", r"data.path=.*a.txt: expected a file ending in .jsonl, .*; data=hub data.path=.*a.txt reads folders"),
    ]:
        with pytest.raises(ValueError, match=message):
            JsonLines(str(tmp_path / name))


def test_prompts_that_other_trainers_would_read_otherwise(tmp_path, caplog):
    rows = [{"prompt": "half \ud83d", "images": None}, {"prompt": [{"role": "user", "content": "\ude00"}], "tools": []}]
    for number, row in enumerate(rows):
        write(tmp_path / f"{number}.jsonl", row)
    found = JsonLines(str(tmp_path / "*.jsonl"))
    assert [row[0] for row in rows_of(found)] == ["half ?", [{"role": "user", "content": "?"}]]
    assert caplog.messages == [f"{tmp_path}/*.jsonl: rewards see the columns tools, and the model does not"]
    for text in (json.dumps(rows[1]["prompt"]), str(rows[1]["prompt"])):
        with pytest.raises(ValueError, match=r"a.jsonl, line 1, column 'prompt': chat messages as text; make a list"):
            JsonLines(write(tmp_path / "a.jsonl", {"prompt": text}))
    with pytest.raises(ValueError, match=r"data.path=.*/b\*.jsonl: there is no such file"):
        JsonLines(str(tmp_path / "b*.jsonl"))


def test_what_a_row_lacks_is_none_and_fields_in_columns_have_dotted_names(tmp_path):
    content = [{"type": "text", "text": "hi"}]
    rows = [
        {
            "prompt": [{"role": "user", "content": content}],
            "reward_model": {"ground_truth": "1"},
            "answer": float("nan"),
        },
        {"prompt": "p", "tests": ["x"]},
    ]
    path = write(tmp_path / "a.jsonl", *rows)
    hi = [{"role": "user", "content": "hi"}]
    assert rows_of(JsonLines(path)) == [
        (hi, {"reward_model": {"ground_truth": "1"}, "answer": None, "tests": None}),
        ("p", {"reward_model": None, "answer": None, "tests": ["x"]}),
    ]
    columns = {"prompt": "prompt", "answer": "reward_model.ground_truth"}
    assert rows_of(JsonLines(path, columns=columns)) == [(hi, {"answer": "1"}), ("p", {"answer": None})]
    named = {"prompt_column": "tests", "columns": {"answer": "answer"}}  # the prompt's own column stays
    assert JsonLines(write(tmp_path / "c.jsonl", {"tests": "t", "answer": 1}), **named)[0] == ("t", {"answer": 1})
    with pytest.raises(
        ValueError, match=r"data.columns: no row of .* has reward_model.truth; there are prompt, .*map_row"
    ):
        JsonLines(path, columns={**columns, "answer": "reward_model.truth"})
    with pytest.raises(ValueError, match="message 1: expected an object with the texts"):
        JsonLines(write(tmp_path / "b.jsonl", {"prompt": [{"role": "user", "content": [{"type": "image"}]}]}))


# The hub

COLUMNS = {"prompt": "question", "answer": "answer"}


def saved() -> datasets.DatasetDict:
    rows = {"question": ["one?", "two?", "three?"], "answer": ["so #### 1", "#### 2,000", "#### 3"], "level": [1, 2, 3]}
    test = {name: values[::-1] for name, values in rows.items()}
    return datasets.DatasetDict(train=datasets.Dataset.from_dict(rows), test=datasets.Dataset.from_dict(test))


def test_a_saved_data_set_with_filter_map_and_columns(tmp_path):
    saved().save_to_disk(tmp_path / "d")
    path = str(tmp_path / "d")
    assert gsm8k_row({"answer": "3 #### 4\n#### -1,234.5 "}) == {"answer": "-1234.5"}
    source = Hub(path, "train", columns=COLUMNS, filter=lambda row: row["level"] > 1, map_row=gsm8k_row)
    assert rows_of(source) == [("two?", {"answer": "2000"}), ("three?", {"answer": "3"})]
    assert source.origin(1) == f"{path} (train), row 3"
    saved()["test"].with_format("pandas").save_to_disk(tmp_path / "one")
    assert Hub(str(tmp_path / "one"), "anything", columns={"prompt": "question"})[2] == ("one?", {})
    unused = {**UNSELECTED, "name": None, "revision": None, "columns": COLUMNS}
    build = functools.partial(hub_prompts, path=path, split="train", **unused)
    both, one = (build(validation_split=split, **settings()) for split in ("test", None))
    assert (len(both.train), len(both.validation), both.columns) == (3, 3, ("answer",))
    assert (both.train[0][0], both.validation[0][0]) == ("one?", "three?")
    assert (len(one.train), len(one.validation)) == (2, 1)
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "x.txt").write_text("one\ntwo\n")
    assert rows_of(Hub(str(tmp_path / "texts"), "train[1:]", columns={"prompt": "text"})) == [("two", {})]


def test_what_is_wrong_with_a_hub_data_set_is_named(tmp_path, monkeypatch):
    saved().save_to_disk(tmp_path / "d")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    for path, given, message in [
        (
            str(tmp_path / "d"),
            {"columns": {"prompt": "nope"}},
            r"data.columns: no row of .* \(train\) has nope; there are",
        ),
        (str(tmp_path / "d"), {}, r"\(train\), row 1, column 'prompt': missing; the columns are \['answer'"),
        (str(tmp_path / "d"), {"filter": lambda row: 1 / (row["level"] - 1)}, r"row 1: data.filter or data.map_row: Z"),
        (str(tmp_path / "d"), {"split": "dev"}, r"data.split='dev': "),
        ("no/such", {}, "data.path='no/such', data.split='train': "),
        ("./date", {}, r"^data.path='./date': no such file"),
        ("json", {}, r"data.path='json' names a format"),
    ]:
        with pytest.raises(ValueError, match=message):
            Hub(path, **{"split": "train"} | given)


def test_names_of_the_hub_and_directories_pass_and_other_paths_are_errors(tmp_path, monkeypatch):
    (tmp_path / "model").mkdir()
    monkeypatch.chdir(tmp_path)
    for path in ("gpt2", "Qwen/Qwen3-0.6B", "./model", str(tmp_path)):
        assert local_or_hub(path, "policy.path") == path
    for path in ("./nothing", "~/no-such-model", "a/b/c", "model/none", "none/"):
        with pytest.raises(ValueError, match=rf"^policy.path='{path}': no such file or directory"):
            local_or_hub(path, "policy.path")


# reasoning_gym


def test_entries_are_the_same_whenever_they_are_asked_for():
    for task in ("chain_sum", "boxnet"):  # the latter draws from global generators
        source, again = (ReasoningGym(task, {}, size=12, seed=10) for _ in range(2))
        rows = rows_of(source)
        random.seed(0)
        numpy.random.seed(0)
        before = random.getstate(), numpy.random.get_state()[1].tolist()
        assert [again[i] for i in reversed(range(12))] == rows[::-1]
        assert (random.getstate(), numpy.random.get_state()[1].tolist()) == before
        assert all(isinstance(prompt, str) and prompt and isinstance(row["answer"], str) for prompt, row in rows)
        assert all(list(row) == ["answer", "task", "metadata", "task_config"] for _, row in rows)


def test_settings_reach_the_task_and_go_before_its_level():
    build = functools.partial(gym_prompts, task="chain_sum", train_size=9, **settings())
    levels = {"chain_sum": {**SUM, "min_terms": 4, "max_terms": 4}}
    assert build(task_config=None, levels=levels).train[0][1]["metadata"]["num_terms"] == 4
    row = build(task_config={"max_terms": 3, "min_terms": 3}, levels=levels).train[0][1]
    assert row["metadata"]["num_terms"] == 3
    assert row["task_config"] == {**SUM, "min_terms": 3, "max_terms": 3}
    spec = {"name": "chain_sum", "weight": 1, "config": SUM}
    assert ReasoningGym("composite", {"datasets": [spec]}, 3, 0)[0][1]["metadata"]["source_dataset"] == "chain_sum"
    with pytest.raises(
        ValueError, match="data.task=chainsum: reasoning_gym has no such task; the nearest is chain_sum"
    ):
        ReasoningGym("chainsum", {}, 3, 0)


def test_unfit_entries_are_replaced_the_same_way_every_time():
    longest = len("State the final answer to the following arithmetic problem: 1 - 1 =")

    def fits(prompts):
        return [len(prompt) <= longest for prompt in prompts]

    source = ReasoningGym("chain_sum", {**SUM, "max_digits": 2}, 40, 5)
    kept, lost = keep(source, fits)
    rows = rows_of(kept)
    stay = [fits([source[i][0]])[0] for i in range(40)]
    assert lost == 0
    assert 0 < stay.count(False) < 40
    assert all(fits([prompt])[0] for prompt, _ in rows)
    assert [rows[i] == source[i] for i in range(40)] == stay
    assert [keep(source, fits)[0][i] for i in reversed(range(40))] == rows[::-1]


def test_training_never_meets_a_held_out_question_while_there_are_others():
    config = {"task": "chain_sum", "task_config": SUM, "levels": {}, "train_size": 300}
    data = gym_prompts(**config, **settings(validation_size=100))
    held_out = {data.validation[i][0] for i in range(100)}
    plain = ReasoningGym("chain_sum", SUM, 300, _TRAIN_SEED)
    assert held_out & {plain[i][0] for i in range(300)}
    assert not held_out & {data.train[i][0] for i in range(300)}
    few = gym_prompts(**config, **settings(validation_size=900))  # 200 questions, so that most are held out
    assert {few.train[i][0] for i in range(50)} & {few.validation[i][0] for i in range(900)}
    # what is known of the held-out questions before a limit no longer holds after it
    data = gym_prompts(**config, **settings(validation_size=40, max_prompt_length=1))
    assert data.train[0]
    data.limit_prompts(lambda prompts: [1 if "+" in prompt else 2 for prompt in prompts])
    held_out, train = ([prompt for prompt, _ in rows_of(source)] for source in (data.validation, data.train))
    assert (len(held_out), len(train)) == (40, 300)
    assert all("+" in prompt for prompt in held_out + train)
    assert not set(held_out) & set(train)


# The data module


def test_an_epoch_lasts_to_the_next_validation():
    """Also of a run that is resumed in the middle of a stretch; it has 10 steps in all."""

    order = run_order(range(5), "shuffled", 3)

    def prompts(steps):
        return [tuple(f"p{order(2 * step + j)}" for j in range(2)) for step in steps]

    for every, completed, num_steps in [(4, 0, 4), (4, 3, 1), (4, 8, 2), (4, 10, 0), (None, 3, 7), (0, 0, 10)]:
        data = attach(inline(5, validate_every=every, seed=3), completed)
        loader = data.train_dataloader()
        assert texts(loader) == prompts(range(completed, completed + num_steps))
        data.trainer.lightning_module.completed_steps = 1  # the same loader goes on where the steps are by then
        assert texts(loader) == prompts(range(1, every or 10))
        data.follow(lambda completed=completed: completed)
        assert texts(loader) == prompts(range(completed, completed + num_steps))


def test_a_batch_carries_the_columns_and_origins_of_its_prompts():
    data = attach(inline(5, seed=3))
    batch = next(iter(data.train_dataloader()))
    assert [f"p{answer}" for answer in batch.columns["answer"]] == list(batch.texts)
    assert [f"data.train.prompts, item {answer + 1}" for answer in batch.columns["answer"]] == list(batch.origins)
    assert batch[[1]].origins == batch.origins[1:]
    for loader in (data.train_dataloader(), data.val_dataloader()):
        assert not isinstance(loader, DataLoader)  # a trainer would replace its sampler
    with pytest.raises(TypeError):  # an epoch may be shorter than the one before
        len(data.train_dataloader())
    assert len(data.val_dataloader()) == len(texts(data.val_dataloader()))
    assert texts(data.val_dataloader()) == [("v0",), ("v1", "v2")]  # 3 of the 4 there are
    assert texts(attach(data, world_size=2).val_dataloader()) == [("v0", "v1", "v2")]


def test_long_prompts_are_dropped_with_a_count(caplog):
    data = inline(1500, max_prompt_length=3, validation_size=4)  # more than are measured at once
    data.load()
    asked = []

    def lengths(prompts):
        asked.append(len(prompts))
        return [9 if prompt == "v1" else len(prompt) for prompt in prompts]  # p0 to p99 stay

    data.limit_prompts(lengths)
    assert sorted(asked) == [4, 476, 1024]
    assert [prompt for prompt, _ in rows_of(data.train)] == [f"p{i}" for i in range(100)]
    assert [prompt for prompt, _ in rows_of(data.validation)] == ["v0", "v2", "v3"]
    assert "dropped 1400 of 1500 prompts longer than data.max_prompt_length=3 (first: data.train.pro" in caplog.text


def test_too_few_prompts_are_refused_before_and_after_the_limit():
    with pytest.raises(ValueError, match=r"data.prompts_per_step=6 is more than the 5 training prompts: set it to 5"):
        inline(5, prompts_per_step=6).load()
    data = inline(5, max_prompt_length=7)
    data.load()
    with pytest.raises(ValueError, match=r"data.prompts_per_step=2 is more than the 1 training prompts"):
        data.limit_prompts(lambda prompts: [7 if prompt in ("p3", "v0") else 8 for prompt in prompts])
    with pytest.raises(
        ValueError,
        match=r"all 5 prompts have more than data.max_prompt_length=7 tokens, the shortest 15,077 \(first: data.train",
    ):
        data.limit_prompts(lambda prompts: [15_077 + int(prompt[1]) for prompt in prompts])
    assert len(data.train) == 5  # a limit that failed changed nothing
    with pytest.raises(ValueError, match=r"data.prompts_per_step=0: must be .*\ndata.steps=-1: must be"):
        inline(5, prompts_per_step=0, steps=-1)


def test_a_step_has_at_most_the_prompts_that_there_are(caplog):
    data = inline(5, prompts_per_step=6, tries=3, max_prompt_length=7)
    data.load(clamp=True)
    assert (data.prompts_per_step, data.prompts_per_batch) == (5, 15)
    data.limit_prompts(lambda prompts: [8 if prompt == "p3" else 1 for prompt in prompts])
    assert (data.prompts_per_step, data.prompts_per_batch) == (4, 12)
    assert "data.prompts_per_step=6 is more than the 5 training prompts: a step has 5" in caplog.text
    same = PromptData(train=Inline(["a"] * 5), validation=Inline([{"prompt": "b", "answer": 1}]), **settings())
    same.load()
    assert "only one of the training and held-out prompts have the columns: answer" in caplog.text
    assert "all of the first 5 prompts are the same: 'a'" in caplog.text


def test_training_prompts_are_opened_only_where_they_are_needed():
    data = PromptData(train=lambda: pytest.fail("opened"), validation=lambda: Inline(["v"]), **settings())
    assert data.load(training=False)[0][0] == data.validation[0] == ("v", {})
    assert data.columns == ()
    with pytest.raises(ValueError, match="data.path: there are no prompts"):
        PromptData(train=None, validation=Inline(["v"]), **settings()).load()


def test_workers_prepare_the_same_prompts():
    build = functools.partial(gym_prompts, task="gcd", task_config=None, levels={}, train_size=9)
    data, alone = (build(**settings(num_workers=number, steps=2)) for number in (1, 0))
    torch.set_num_threads(1)
    assert texts(attach(data).train_dataloader()) == texts(attach(alone).train_dataloader())


# Before the first step

TASK = [word for word in SMALL if not word.startswith(("data.train_size", "reward"))]


def small_run(directory, train, held_out, *overrides, **columns):
    """A run on files with these prompts; held_out is in "held_out.jsonl"."""
    paths = {"path": directory / "my.jsonl", "validation_path": directory / "held_out.jsonl"}
    for path, prompts in zip(paths.values(), (train, held_out), strict=True):
        write(path, *({"prompt": prompt, **columns} for prompt in prompts))
    words = ["data=jsonl", *(f"data.{key}={path}" for key, path in paths.items())]
    words += ["reward=[custom]", "reward.custom.function._target_=tests.support.rewards.vowels", *overrides]
    return grpo.compose(*TASK, *words, run_dir=directory / f"run{len(list(directory.iterdir()))}").fit()


def test_a_prompt_beyond_the_context_is_named_by_its_line(tmp_path, monkeypatch):
    monkeypatch.setattr("grpo_lightning.rollout.Collector.collect", lambda *_, **__: pytest.fail("a rollout began"))
    prompts = [f"number {i}" for i in range(40)]
    prompts[30] = "x" * 507
    with pytest.raises(ValueError, match="line 31") as error:
        small_run(tmp_path, prompts, ["a", "b"])
    assert str(error.value) == (
        f"{tmp_path}/my.jsonl, line 31: the prompt has 508 tokens, which with rollout.max_new_tokens=10 are more "
        "than the model's context of 512; set data.max_prompt_length=502, which leaves out longer prompts, or a "
        "lower rollout.max_new_tokens"
    )
    held_out = ["a", "x" * 420]
    with pytest.raises(ValueError, match=r"held_out.jsonl, line 2: .* 421 tokens, .* validation.max_new_tokens=100 "):
        small_run(tmp_path, ["a", "b", "c"], held_out, "validation.max_new_tokens=100")


def test_defaults_fall_to_what_prompts_and_context_allow(tmp_path, caplog):
    """Here 16 prompts of a step, and 512 tokens of a completion: the longest prompt has 11, the context 512."""
    write(tmp_path / "five.jsonl", *({"prompt": f"{i} vowels?", "answer": None} for i in range(5)))
    policy = tmp_path / "policy"
    grpo.compose("mode=export", run_dir=tmp_path / "shipped").export().rename(policy)
    words = [
        "policy=hf",
        f"policy.path={policy}",
        "algorithm=dr_grpo",
        "data=jsonl",
        f"data.path={tmp_path}/five.jsonl",
    ]
    words += [f"data.validation_path={tmp_path}/five.jsonl", "reward=[custom]", "trainer=cpu"]
    words += ["reward.custom.function._target_=tests.support.rewards.vowels"]
    run = grpo.compose(*words, run_dir=tmp_path / "run")
    longest = max(run.module.policy.count_tokens([prompt for prompt, _ in run.data.train]))
    assert run.data.prompts_per_step == run.config["data"]["prompts_per_step"] == 5
    new = 512 - longest
    assert run.module.rollout.max_new_tokens == run.config["validation"]["max_new_tokens"] == new
    assert run.config["loss"]["weights"]["length"] == new  # what refers to it follows
    assert (
        f"rollout.max_new_tokens=512 becomes {new}: the context has 512 tokens, and the longest prompt" in caplog.text
    )
    for word in ("data.prompts_per_step=16", "rollout.max_new_tokens=512"):
        with pytest.raises(ValueError, match=word):
            _ = grpo.compose(*words, word, run_dir=tmp_path / "other").module


def test_rows_of_ones_own_code_are_named_on_the_command_line(tmp_path):
    words = ["data=custom", "data.train._target_=tests.support.rewards.questions", "+data.train.size=6"]
    data = grpo.compose(*TASK, *words, "reward=[exact]", run_dir=tmp_path).data
    assert ("Spell 5", {"answer": "5"}) in [data.train[i] for i in range(len(data.train))] + [data.validation[0]]


def test_validation_needs_no_training_prompts(tmp_path):
    path = write(tmp_path / "held_out.jsonl", *({"prompt": prompt} for prompt in ("a", "b")))
    words = [*TASK, "mode=validate", "reward=[custom]", "reward.custom.function._target_=tests.support.rewards.vowels"]
    run = grpo.compose(*words, "data=jsonl", f"data.validation_path={path}", run_dir=tmp_path / "run")
    assert "val/reward/total" in run.validate()
    run = grpo.compose(*words, run_dir=tmp_path / "other", data={"test": ["a", "b"]})
    assert len(run.data.validation) == 2
    with pytest.raises(ValueError, match=r"rows by index, or an IterableDataset"):
        grpo.compose(*words, data=iter(["a"]))
