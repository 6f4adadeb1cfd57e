"""Prompts from files, the Hugging Face hub, the config or memory; every row is checked once, when it is read."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from grpo_lightning.config.rules import local_or_hub
from grpo_lightning.console import single_line
from grpo_lightning.data.datamodule import PromptData, Row, Source
from grpo_lightning.types import Prompt

_JSON, _PARQUET = (".jsonl", ".json-lines", ".ndjson"), ".parquet"
_KINDS = {".json": "json", ".jsonl": "json", ".csv": "csv", ".parquet": "parquet", ".arrow": "arrow"}
_SAVED = ("dataset_dict.json", "state.json")  # what save_to_disk leaves behind
_RESERVED = ("prompts", "completions", "completion_ids", "self")  # arguments of reward functions and methods
_MIN_HOLD_OUT = 5  # rows; of fewer in memory all serve for training and validation

Placed: TypeAlias = tuple[str, Mapping[str, Any]]
"""Where a row comes from, for messages, and its values by column."""
RowFilter: TypeAlias = Callable[[Mapping[str, Any]], bool]
RowMap: TypeAlias = Callable[[Mapping[str, Any]], Mapping[str, Any]]


def check_prompt(value: Any, where: str) -> Prompt:
    """The prompt of a row: text, chat messages with "role" and "content" only, or token ids; ValueError otherwise."""
    if isinstance(value, str) and value.strip():
        return value
    if isinstance(value, list) and value:
        if all(isinstance(token, int) and not isinstance(token, bool) and token >= 0 for token in value):
            return value
        messages = [_message(message, f"{where}, message {number}") for number, message in enumerate(value, 1)]
        if any(message["content"].strip() for message in messages):
            return messages
    raise ValueError(f"{where}: expected text or a list of chat messages, not empty, got {value!r:.80}")


def _message(value: Any, where: str) -> dict[str, str]:
    # parquet fills absent keys with null
    message = {key: text for key, text in value.items() if text is not None} if isinstance(value, Mapping) else {}
    if set(message) != {"role", "content"} or not all(isinstance(text, str) for text in message.values()):
        raise ValueError(f'{where}: expected an object with the texts "role" and "content", got {value!r:.80}')
    return {"role": message["role"], "content": message["content"]}


class Rows:
    """Rows in memory.

    Args:
        rows: Where each comes from, for messages, and its values; all have the same keys.
        source: What messages call all of them.
        prompt_column: The key of the prompt; the other keys are the columns rewards see.
        columns: New name -> name in the rows; only these are kept. None keeps all, under their names.
        filter: Which rows to use; None uses all.
        map_row: Row -> row whose columns are then selected and renamed; None leaves it as it is.

    Raises:
        ValueError: There is no row, or one lacks a column that others have, or its prompt is malformed.
    """

    def __init__(
        self,
        rows: Iterable[Placed],
        source: str,
        prompt_column: str = "prompt",
        *,
        columns: Mapping[str, str] | None = None,
        filter: RowFilter | None = None,
        map_row: RowMap | None = None,
    ) -> None:
        self._origins: list[str] = []
        self._rows: list[Row] = []
        for place, row in rows:
            try:
                if filter and not filter(row):
                    continue
                row = map_row(row) if map_row else row
            except Exception as error:
                raise ValueError(f"{place}: data.filter or data.map_row: {error!r}") from error
            if columns and (absent := set(columns.values()) - set(row)):
                raise ValueError(f"data.columns: {', '.join(absent)} not in {place}, which has {list(row)}")
            row = {new: row[old] for new, old in columns.items()} if columns else row
            names = [name for name in row if name != prompt_column]
            if prompt_column not in row:
                raise ValueError(f"{place}, column {prompt_column!r}: missing; the columns are {sorted(names)}")
            if reserved := [name for name in names if name in _RESERVED]:
                raise ValueError(f"{place}, column {reserved[0]!r}: an argument of reward functions; rename the column")
            if self._rows and (different := {*names} ^ self._rows[0][1].keys()):
                first = self._origins[0]
                raise ValueError(f"{place}, column {min(different)!r}: only one of this row and {first} has it")
            prompt = check_prompt(row[prompt_column], f"{place}, column {prompt_column!r}")
            self._rows.append((prompt, {name: row[name] for name in names}))
            self._origins.append(place)
        if not self._rows:
            raise ValueError(f"{source}: there is no row")

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Row:
        return self._rows[index]

    def origin(self, index: int) -> str:
        """The file and line, or the like, of a row."""
        return self._origins[index]


class JsonLines(Rows):
    """Rows of JSON lines or parquet files.

    Args:
        path: One file or several, ending in .jsonl, .json-lines, .ndjson or .parquet. Blank lines do not count.
        selection: ``prompt_column``, ``columns``, ``filter`` and ``map_row``, as in `Rows`.

    Raises:
        ValueError: A file is absent or of another kind, or a row is malformed; names file, line and column.
    """

    def __init__(self, path: str | Sequence[str], **selection: Any) -> None:
        paths = [path] if isinstance(path, str | Path) else list(path)
        rows = [row for name in paths for row in _read(Path(name).expanduser())]
        super().__init__(rows, ", ".join(map(str, paths)), **selection)


def _read(path: Path) -> list[Placed]:
    """Read the rows of a file."""
    if path.suffix not in (*_JSON, _PARQUET):
        raise ValueError(f"data.path={path}: expected a file ending in {', '.join((*_JSON, _PARQUET))}")
    if path.suffix == _PARQUET:
        import pyarrow.parquet

        rows = pyarrow.parquet.read_table(str(path)).to_pylist()
        return [(f"{path}, row {number}", row) for number, row in enumerate(rows, 1)]
    with path.open("rb") as file:  # bytes, as only a newline ends a line of JSON
        places = [(f"{path}, line {number}", line) for number, line in enumerate(file, 1) if line.strip()]
    return [(place, _object(line, place)) for place, line in places]


def _object(line: bytes, where: str) -> Mapping[str, Any]:
    try:
        row = json.loads(line.decode("utf-8-sig"))
    except ValueError as error:  # of JSON or of UTF-8
        raise ValueError(f"{where}: no JSON: {error}") from error
    if not isinstance(row, dict):
        raise ValueError(f"{where}: expected a JSON object, got {row!r:.80}")
    return row


class Hub(Rows):
    """Rows of one split of a data set of the Hugging Face hub, or of a local copy. Code that comes with it never runs.

    Args:
        path: Name on the hub, a folder written by ``save_to_disk``, or a folder or file of arrow, csv, json, parquet or
            text, as ``load_dataset`` reads it.
        split: Which split, such as "train" or "train[:1000]".
        name: Configuration of the data set, if it has several.
        revision: Branch, tag or commit on the hub.
        selection: ``columns``, ``filter`` and ``map_row``, as in `Rows`.

    Raises:
        ValueError: The data set, its split or a column does not exist, or a row is malformed.
    """

    def __init__(
        self, path: str, split: str, name: str | None = None, revision: str | None = None, **selection: Any
    ) -> None:
        source = f"{path} ({split})"
        table = _load(path, split, name, revision)
        super().__init__(((f"{source}, row {n}", row) for n, row in enumerate(table, 1)), source, **selection)


def _load(path: str, split: str, name: str | None, revision: str | None) -> Any:
    """Load a ``datasets.Dataset``."""
    import datasets

    path = local_or_hub(path, "data.path")
    local = Path(path)
    try:
        if any((local / file).is_file() for file in _SAVED):
            saved = datasets.load_from_disk(path)
            saved = saved[split] if isinstance(saved, datasets.DatasetDict) else saved
            return saved.with_format(None)  # it may have been saved with one that makes tables or tensors of rows
        if local.is_file():
            kind = _KINDS.get(local.suffix, "text")
            return datasets.load_dataset(kind, data_files={split.split("[")[0]: path}, split=split)
        place = str(local.absolute()) if local.is_dir() else path  # a folder may be called json, as a format is
        return datasets.load_dataset(place, name, split=split, revision=revision)
    except Exception as error:  # of the network, of a format, or of YAML
        message = single_line(" ".join(f"{error!r} {error.__cause__ or ''}".split()))
        raise ValueError(f"data.path={path!r}, data.split={split!r}: {message}") from error


class Inline(Rows):
    """Prompts in the config or in memory: texts, chat messages, token ids, or mappings with "prompt" and any columns.

    Args:
        prompts: A list of them, or a data set of the datasets library.
        name: What messages call them.

    Raises:
        ValueError: There is none, or one is malformed.
    """

    def __init__(self, prompts: Iterable[Any], name: str = "data.train.prompts") -> None:
        rows = [dict(row) if isinstance(row, Mapping) else {"prompt": row} for row in prompts]
        for row in rows:
            prompt: Any = row.get("prompt")
            if isinstance(prompt, tuple) or hasattr(prompt, "tolist"):
                row["prompt"] = prompt.tolist() if hasattr(prompt, "tolist") else list(prompt)
        super().__init__([(f"{name}, item {number}", row) for number, row in enumerate(rows, 1)], name)


def gsm8k_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """A GSM8K row with its bare answer, what follows the last "####", in place of the worked solution."""
    _, mark, answer = row["answer"].rpartition("####")
    answer = answer.replace(",", "").strip()
    if not mark or not answer:
        raise ValueError(f"no answer after '####' in {row['answer'][-60:]!r}")
    return {**row, "answer": answer}


def has_answer(row: Mapping[str, Any]) -> bool:
    """Whether a row has a right answer, for ``data.filter``."""
    return bool(str(row.get("answer") or "").strip())


def data_module(source: Callable[[Any], Source], train: Any, validation: Any, settings: dict[str, Any]) -> PromptData:
    """Data module of what a source reads; without ``validation`` some rows of ``train`` are held out."""
    held_out = partial(source, validation) if validation else None
    return PromptData(train=partial(source, train), validation=held_out, **settings)


def file_prompts(
    *,
    path: str | Sequence[str],
    validation_path: str | Sequence[str] | None,
    prompt_column: str,
    columns: Mapping[str, str] | None,
    filter: RowFilter | None,
    map_row: RowMap | None,
    **settings: Any,
) -> PromptData:
    """Data module of `JsonLines`."""
    source = partial(JsonLines, prompt_column=prompt_column, columns=columns, filter=filter, map_row=map_row)
    return data_module(source, path, validation_path, settings)


def hub_prompts(
    *,
    path: str,
    split: str,
    validation_split: str | None,
    name: str | None,
    revision: str | None,
    columns: Mapping[str, str] | None,
    filter: RowFilter | None,
    map_row: RowMap | None,
    **settings: Any,
) -> PromptData:
    """Data module of a `Hub` data set."""
    source = partial(Hub, path, name=name, revision=revision, columns=columns, filter=filter, map_row=map_row)
    return data_module(source, split, validation_split, settings)


def memory_prompts(*, train: Any, validation: Any, **settings: Any) -> PromptData:
    """Data module of rows in memory; without ``validation`` some are held out, or all of them where they are few."""
    rows = Inline(train, "data")
    if validation is not None:
        return PromptData(train=rows, validation=Inline(validation, "data, validation"), **settings)
    held_out = min(settings["validation_size"], len(rows) // 5)
    few = len(rows) < _MIN_HOLD_OUT or len(rows) - held_out < settings["prompts_per_step"]
    return PromptData(train=rows, validation=rows if few else None, **settings)
