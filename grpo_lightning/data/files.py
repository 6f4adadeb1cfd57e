"""Prompts from files, the Hugging Face hub, the config or memory; every row is checked once, when it is read."""

import csv
import functools
import glob
import gzip
import io
import itertools
import json
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from grpo_lightning.config.rules import local_or_hub
from grpo_lightning.config.settings import format_override
from grpo_lightning.console import single_line
from grpo_lightning.data.datamodule import PromptData, Row, Source
from grpo_lightning.data.stream import Stream
from grpo_lightning.types import Prompt

_log = logging.getLogger(__name__)
_LINES, _TABLES = (".jsonl", ".json-lines", ".ndjson"), {".csv": ",", ".tsv": "\t"}
SUFFIXES = (*_LINES, ".json", *_TABLES, ".parquet")
"""Files that `JsonLines` reads; all but the last may also end in .gz."""
_KINDS = {".json": "json", ".jsonl": "json", ".csv": "csv", ".parquet": "parquet", ".arrow": "arrow"}
_SAVED = ("dataset_dict.json", "state.json")  # what save_to_disk leaves behind
_RESERVED = ("prompts", "completions", "completion_ids", "self")  # arguments of reward functions and methods
_BATCH = 1024  # rows of parquet that are in memory at once
_MIN_HOLD_OUT = 5  # rows; of fewer in memory all serve for training and validation
_LIKELY = ("prompt", "question", "problem", "instruction", "query", "messages", "conversations", "text", "input")
"""What other data sets call the column of the prompt."""
_ONE_LIST = re.compile(rb'\{\s*"(\w+)"\s*:\s*(\[\s*\{.*\}\s*\])\s*\}\s*', re.DOTALL)  # {"data": [{…}, …]}
_UNSEEN = ("image", "images", "video", "videos", "audio", "tools", "chat_template_kwargs")
"""Columns that other trainers show to the model."""
_MESSAGES = re.compile(r"""\s*\[\s*\{\s*["'](role|content|from)["']\s*:""")
"""Chat messages that were written as text, as CSV does."""


Placed: TypeAlias = tuple[str, Mapping[str, Any]]
"""Where a row comes from, for messages, and its values by column."""
RowFilter: TypeAlias = Callable[[Mapping[str, Any]], bool]
RowMap: TypeAlias = Callable[[Mapping[str, Any]], Mapping[str, Any]]


def check_prompt(value: Any, where: str) -> Prompt:
    """The prompt of a row: text, chat messages with "role" and "content" only, or token ids; ValueError otherwise."""
    if isinstance(value, str) and value.strip():
        if _MESSAGES.match(value):
            raise ValueError(f"{where}: chat messages as text; make a list of it in data.map_row, got {value!r:.80}")
        return _replace_surrogates(value)
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
    match message.get("content"):
        case [{"type": "text", "text": str() as text}]:
            message["content"] = text
    if set(message) != {"role", "content"} or not all(isinstance(text, str) for text in message.values()):
        raise ValueError(f'{where}: expected an object with the texts "role" and "content", got {value!r:.80}')
    return {"role": message["role"], "content": _replace_surrogates(message["content"])}


def _replace_surrogates(text: str) -> str:
    """A text without halves of surrogate pairs, such as of an emoji that was cut: no tokenizer takes them."""
    return text.encode(errors="replace").decode()


class Rows:
    """Rows in memory. What a row lacks and others have, or is not a number (NaN), is None.

    Args:
        rows: Where each comes from, for messages, and its values.
        source: What messages call all of them.
        prompt_column: The key of the prompt; the other keys are the columns rewards see.
        columns: New name -> name in the rows, dotted for a field in a column; only these are kept. None keeps all.
        filter: Which rows to use; None uses all.
        map_row: Row -> row whose columns are then selected and renamed; None leaves it as it is.
        limit: How many of the rows to read, of those that the filter leaves; None reads all.

    Raises:
        ValueError: There is no row, or none has one of the ``columns``, or a prompt is malformed.
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
        limit: int | None = None,
    ) -> None:
        known: dict[str, None] = {}
        selected = _select(rows, prompt_column, columns, filter, map_row, known)
        kept = list(itertools.islice(selected, limit))
        if not kept:
            raise ValueError(f"{source}: there is no row")
        names = dict.fromkeys(name for _, row in kept for name in row)
        if columns and (absent := [old for new, old in columns.items() if new not in names]):
            raise ValueError(
                f"data.columns: no row of {source} has {', '.join(absent)}; there are {', '.join(known)} (COLUMN.FIELD "
                "is a field in one, and data.map_row a function that makes a row of each)"
            )
        names.pop(prompt_column, None)
        if reserved := [name for name in names if name in _RESERVED]:
            raise ValueError(f"{source}, column {reserved[0]!r}: an argument of reward functions; rename the column")
        if unseen := [name for name in _UNSEEN if any(row.get(name) is not None for _, row in kept)]:
            _log.warning("%s: rewards see the columns %s, and the model does not", source, ", ".join(unseen))
        self._origins = [place for place, _ in kept]
        self._rows: list[Row] = []
        for place, row in kept:
            if prompt_column not in row:
                likely = (name for word in _LIKELY for name in known if name.lower() == word and name != prompt_column)
                raise ValueError(
                    f"{place}, column {prompt_column!r}: missing; the columns are {sorted(known)}: set "
                    f"{format_override('data.prompt_column', next(likely, 'NAME'))} (or, with jsonl and hub, "
                    "data.map_row to a function that makes a row with a prompt of each)"
                )
            prompt = check_prompt(row[prompt_column], f"{place}, column {prompt_column!r}")
            self._rows.append((prompt, {name: row.get(name) for name in names}))

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Row:
        return self._rows[index]

    def origin(self, index: int) -> str:
        """The file and line, or the like, of a row."""
        return self._origins[index]


def _select(
    rows: Iterable[Placed],
    prompt_column: str,
    columns: Mapping[str, str] | None,
    filter: RowFilter | None,
    map_row: RowMap | None,
    known: dict[str, None],
) -> Iterator[tuple[str, dict[str, Any]]]:
    """The rows that the filter leaves, with the chosen columns; ``known`` takes up all columns that there are."""
    chosen = {prompt_column: prompt_column, **columns} if columns else {}
    for place, row in rows:
        try:
            if filter and not filter(row):
                continue
            row = map_row(row) if map_row else row
        except Exception as error:
            raise ValueError(f"{place}: data.filter or data.map_row: {error!r}") from error
        known.update(dict.fromkeys(row))
        if chosen:
            row = {new: found[0] for new, old in chosen.items() if (found := _field(row, old))}
        yield place, {name: None if _is_missing(value) else value for name, value in row.items()}


def _field(row: Mapping[str, Any], name: str) -> list[Any]:
    """The value of a column, or of a field in it (``reward_model.ground_truth``), in a list; empty if there is none."""
    if name in row:
        return [row[name]]
    column, _, field = name.partition(".")
    return _field(row[column], field) if field and isinstance(row.get(column), Mapping) else []


def _is_missing(value: Any) -> bool:
    """Whether a value is NaN, or what pandas has for it."""
    return (isinstance(value, float) and value != value) or type(value).__name__ in ("NAType", "NaTType")


class JsonLines(Rows):
    """Rows of files: JSON lines, JSON, CSV, TSV or parquet.

    Args:
        path: One file or several, ending in one of `SUFFIXES`, or patterns such as ``data/*.parquet``. Blank lines do
            not count. An empty cell of a CSV or TSV is None; its other values are texts, but for columns of numbers
            only.
        selection: ``prompt_column``, ``columns``, ``filter`` and ``map_row``, as in `Rows`.

    Raises:
        ValueError: A file is absent or of another kind, or a row is malformed; names file, line and column.
    """

    def __init__(self, path: str | Sequence[str], **selection: Any) -> None:
        super().__init__([row for file in _match_files(path) for row in _read(file)], _name(path), **selection)


def _name(path: str | Sequence[str]) -> str:
    return str(path) if isinstance(path, str | Path) else ", ".join(map(str, path))


def _match_files(path: str | Sequence[str]) -> list[Path]:
    """The files of names and patterns."""
    files: list[Path] = []
    for name in [path] if isinstance(path, str | Path) else path:
        one = Path(name).expanduser()
        found = [one] if one.exists() else [Path(match) for match in sorted(glob.glob(str(one)))]
        if not found:
            raise ValueError(f"data.path={name}: there is no such file")
        files += found
    return files


def _read(path: Path) -> list[Placed]:
    """Read the rows of a file."""
    is_zipped = path.suffix == ".gz"
    suffix = Path(path.stem).suffix if is_zipped else path.suffix
    if suffix not in SUFFIXES or (is_zipped and suffix == ".parquet"):
        raise ValueError(
            f"data.path={path}: expected a file ending in {', '.join(SUFFIXES)}; data=hub data.path={path} reads "
            "folders and files of arrow and text"
        )
    if suffix == ".parquet":
        return list(_stream(path))
    with gzip.open(path, "rb") if is_zipped else path.open("rb") as file:
        content = file.read()
    if suffix in _TABLES:
        return _number_rows(path, "row", _table(_text(content, str(path)), _TABLES[suffix], path))
    document, name = content.lstrip(b"\xef\xbb\xbf \t\r\n"), str(path)
    if suffix == ".json" and (outer := _ONE_LIST.fullmatch(document)) and outer[1].decode().lower() not in _LIKELY:
        document, name = outer[2], f"{path}, which may hold one list, {outer[1].decode()}"
    if document.startswith(b"["):
        items = _json(document, name)
        return [(place, _object(item, place)) for place, item in _number_rows(path, "item", items)]
    lines = _number_rows(path, "line", content.split(b"\n"))  # bytes, as only a newline ends a line of JSON
    return [(place, _object(_json(line, place), place)) for place, line in lines if line.strip()]


def _stream(path: Path) -> Iterator[Placed]:
    """Read the rows of a file of JSON lines or parquet, one at a time."""
    is_zipped = path.suffix == ".gz"
    if path.suffix == ".parquet":
        from pyarrow.parquet import ParquetFile

        with ParquetFile(path) as table:
            rows = itertools.chain.from_iterable(part.to_pylist() for part in table.iter_batches(_BATCH))
            yield from ((f"{path}, row {number}", row) for number, row in enumerate(rows, 1))
    elif (Path(path.stem).suffix if is_zipped else path.suffix) in _LINES:
        with gzip.open(path, "rb") if is_zipped else path.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                place = f"{path}, line {number}"
                if line.strip():
                    yield place, _object(_json(line, place), place)
    else:
        raise ValueError(f"data.path={path}: data.streaming reads JSON lines ({', '.join(_LINES)}) and parquet")


def _number_rows(path: Path, unit: str, rows: Iterable[Any]) -> list[tuple[str, Any]]:
    return [(f"{path}, {unit} {number}", row) for number, row in enumerate(rows, 1)]


def _text(content: bytes, where: str) -> str:
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{where}: not in UTF-8 ({error}); save the file in that encoding") from error


def _json(content: bytes, where: str) -> Any:
    text = _text(content, where)
    try:
        return json.loads(text)
    except ValueError as error:
        raise ValueError(f"{where}: no JSON: {error}") from error


def _object(row: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(row, dict):
        raise ValueError(f"{where}: expected a JSON object, got {row!r:.80}")
    return row


def _table(text: str, delimiter: str, path: Path) -> list[dict[str, Any]]:
    """The rows of a CSV or TSV; a column is of numbers if all its values are written as Python writes them."""
    header = text.partition("\n")[0]
    if delimiter not in header and ";" in header:  # as spreadsheets write CSV where the comma is a decimal sign
        delimiter = ";"
    try:
        names, *rows = (
            csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, skipinitialspace=True) if text else [[]]
        )
    except csv.Error as error:
        raise ValueError(f"{path}: {error}; JSON lines or parquet hold any text") from error
    names = [name.strip() for name in names]
    if twice := sorted({name for name in names if name and names.count(name) > 1}):
        raise ValueError(f"{path}: several columns are called {', '.join(twice)}")
    for number, row in enumerate(rows, 1):
        if row and len(row) != len(names):
            raise ValueError(f"{path}, row {number}: {len(row)} values for the {len(names)} columns {names}")
    table = [row for row in rows if row]
    columns = [[_number(value) for value in column] for column in zip(*table, strict=True)]
    is_number = [not any(isinstance(value, str) and value for value in column) for column in columns]
    return [
        {
            name: None if not text else columns[column][index] if is_number[column] else text
            for column, (name, text) in enumerate(zip(names, row, strict=True))
        }
        for index, row in enumerate(table)
    ]


def _number(text: str) -> str | int | float:
    try:
        value: Any = json.loads(text)
    except ValueError:
        return text
    return value if isinstance(value, int | float) and repr(value) == text else text


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
        super().__init__(_read_split(path, split, name, revision), f"{path} ({split})", **selection)


def _read_split(path: str, split: str, name: str | None, revision: str | None, **options: Any) -> Iterator[Placed]:
    """Read the rows of a data set."""
    table = _load(path, split, name, revision, **options)
    return ((f"{path} ({split}), row {number}", row) for number, row in enumerate(table, 1))


def _load(path: str, split: str, name: str | None, revision: str | None, **options: Any) -> Any:
    """Load a ``datasets.Dataset``, or an ``IterableDataset`` with ``streaming=True``."""
    import datasets

    if path in {*_KINDS.values(), "text"} and not Path(path).exists():
        # load_dataset would read all files of the working directory
        raise ValueError(f"data.path={path!r} names a format: a file, ./{path} for a folder, or ORG/NAME of the hub")
    path = local_or_hub(path, "data.path")
    local = Path(path)
    try:
        if any((local / file).is_file() for file in _SAVED):
            saved = datasets.load_from_disk(path)
            saved = saved[split] if isinstance(saved, datasets.DatasetDict) else saved
            return saved.with_format(None)  # it may have been saved with one that makes tables or tensors of rows
        if local.is_file():
            kind = _KINDS.get(local.suffix, "text")
            return datasets.load_dataset(kind, data_files={split.split("[")[0]: path}, split=split, **options)
        place = str(local.absolute()) if local.is_dir() else path  # a folder may be called json, as a format is
        return datasets.load_dataset(place, name, split=split, revision=revision, **options)
    except Exception as error:  # of the network, of a format, or of YAML
        message = single_line(" ".join(f"{error!r} {error.__cause__ or ''}".split()))
        raise ValueError(f"data.path={path!r}, data.split={split!r}: {message}") from error


class Inline(Rows):
    """Prompts in the config or in memory: texts, chat messages, token ids, or mappings with "prompt" and any columns.

    Args:
        prompts: A list of them, or a data set of the datasets library.
        name: What messages call them.
        prompt_column: The key of the prompt in mappings.

    Raises:
        ValueError: There is none, or one is malformed.
    """

    def __init__(self, prompts: Iterable[Any], name: str = "data.train.prompts", prompt_column: str = "prompt") -> None:
        super().__init__(_number_items(prompts, name, prompt_column), name, prompt_column)


def _number_items(items: Iterable[Any], name: str, prompt_column: str) -> Iterator[Placed]:
    for number, item in enumerate(items, 1):
        row = dict(item) if isinstance(item, Mapping) else {prompt_column: item}
        prompt: Any = row.get(prompt_column)
        if isinstance(prompt, tuple) or hasattr(prompt, "tolist"):
            row[prompt_column] = prompt.tolist() if hasattr(prompt, "tolist") else list(prompt)
        yield f"{name}, item {number}", row


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
    opened = [partial(source, place) if place else None for place in (train, validation)]
    return PromptData(train=opened[0], validation=opened[1], **settings)


def file_prompts(
    *,
    path: str | Sequence[str] | None,
    validation_path: str | Sequence[str] | None,
    prompt_column: str,
    columns: Mapping[str, str] | None,
    filter: RowFilter | None,
    map_row: RowMap | None,
    streaming: bool = False,
    shuffle_buffer: int = 10_000,
    **settings: Any,
) -> PromptData:
    """Data module of `JsonLines`, or of a `Stream` of such files."""
    selection: Any = {"prompt_column": prompt_column, "columns": columns, "filter": filter, "map_row": map_row}
    if streaming:
        return _stream_module(_stream_files, path, validation_path, selection, shuffle_buffer, settings)
    return data_module(partial(JsonLines, **selection), path, validation_path, settings)


def hub_prompts(
    *,
    path: str,
    split: str,
    validation_split: str | None,
    name: str | None,
    revision: str | None,
    prompt_column: str,
    columns: Mapping[str, str] | None,
    filter: RowFilter | None,
    map_row: RowMap | None,
    streaming: bool = False,
    shuffle_buffer: int = 10_000,
    **settings: Any,
) -> PromptData:
    """Data module of a `Hub` data set, or of a `Stream` of its rows."""
    selection: Any = {"prompt_column": prompt_column, "columns": columns, "filter": filter, "map_row": map_row}
    if streaming:
        read = partial(_read_split, path, name=name, revision=revision, streaming=True)
        return _stream_module(read, split, validation_split, selection, shuffle_buffer, settings)
    source = partial(Hub, path, name=name, revision=revision, **selection)
    return data_module(source, split, validation_split, settings)


def _stream_files(path: str | Sequence[str]) -> Iterator[Placed]:
    return (row for file in _match_files(path) for row in _stream(file))


def _stream_module(
    read: Callable[[Any], Iterable[Placed]],
    train: Any,
    validation: Any,
    selection: Mapping[str, Any],
    shuffle_buffer: int,
    settings: Mapping[str, Any],
) -> PromptData:
    """Data module of a `Stream`, which has the columns of its first rows; without ``validation`` those are held out."""
    order, size = settings["order"], settings["validation_size"]
    if order not in ("shuffled", "sequential"):
        raise ValueError(f"data.order={order}: a stream is shuffled or sequential; data.streaming=false can sort")
    if shuffle_buffer < 1:
        raise ValueError(f"data.shuffle_buffer={shuffle_buffer}: expected 1 or more rows")

    @functools.cache
    def first_rows(of_train: bool) -> Rows:
        rows = read(train if of_train else validation)
        return Rows(rows, "data.path" if of_train else "data, validation", **selection, limit=size)

    def open_train() -> Stream:
        column, first = selection["prompt_column"], first_rows(True)
        names = tuple(first[0][1])
        held_out = set() if validation is not None else {repr(first[i][0]) for i in range(len(first))}

        def draw() -> Iterator[tuple[str, Row]]:
            for place, row in _select(read(train), **selection, known={}):
                prompt = check_prompt(row.get(column), f"{place}, column {column!r}")
                if repr(prompt) not in held_out:
                    yield place, (prompt, {name: row.get(name) for name in names})

        return Stream(draw, shuffle_buffer if order == "shuffled" else 1, settings["seed"])

    return PromptData(
        train=None if train is None else open_train,
        validation=lambda: first_rows(validation is None),
        **settings,
    )


def indexed_rows(rows: Any) -> Any:
    """Rows by index, or a stream as it is; those of a table of pandas as mappings."""
    if hasattr(rows, "to_dict") and hasattr(rows, "iloc"):
        return rows.to_dict("records")
    if hasattr(rows, "__getitem__") and hasattr(rows, "__len__") and not hasattr(rows, "__iter__"):
        return [rows[index] for index in range(len(rows))]  # such as a torch Dataset
    if rows is None or _is_stream(rows):
        return rows
    if hasattr(rows, "__len__") and hasattr(rows, "__getitem__") and not isinstance(rows, str):
        return rows
    raise ValueError(
        f"data={rows!r:.80}: needs rows by index, or an IterableDataset, which can be read again from its first row"
    )


def _is_stream(rows: Any) -> bool:
    """Whether rows can be read from the first on, as often as one likes, but neither counted nor held."""
    return hasattr(rows, "__iter__") and not hasattr(rows, "__len__") and not isinstance(rows, Iterator)


def memory_prompts(
    *, train: Any, validation: Any, prompt_column: str, shuffle_buffer: int = 10_000, **settings: Any
) -> PromptData:
    """Data module of rows in memory; without ``validation`` some are held out, or all of them where they are few."""
    if _is_stream(train):
        selection = {"prompt_column": prompt_column, "columns": None, "filter": None, "map_row": None}
        read = partial(_number_items, name="data", prompt_column=prompt_column)
        return _stream_module(read, train, validation, selection, shuffle_buffer, settings)
    rows = None if train is None else Inline(indexed_rows(train), "data", prompt_column)
    held_out = None if validation is None else Inline(indexed_rows(validation), "data, validation", prompt_column)
    if rows is not None and held_out is None:
        size = min(settings["validation_size"], len(rows) // 5)
        few = len(rows) < _MIN_HOLD_OUT or len(rows) - size < settings["prompts_per_step"]
        held_out = rows if few else None
    return PromptData(train=rows, validation=held_out, **settings)
