"""Prompts from JSON lines, parquet, the config or memory; every row is checked once, when it is read."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from grpo_lightning.data.datamodule import PromptData
from grpo_lightning.data.sources import Row
from grpo_lightning.types import Prompt

_JSON, _PARQUET = (".jsonl", ".json-lines", ".ndjson"), ".parquet"
_RESERVED = ("prompts", "completions", "completion_ids", "self")  # arguments of reward functions and methods
_MIN_HOLD_OUT = 5  # rows; of fewer in memory all serve for training and validation


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
        rows: One mapping per row, all with the same keys.
        prompt_column: The key of the prompt; the other keys are the columns rewards see.
        place: Number of a row -> where the row comes from, for messages.

    Raises:
        ValueError: There is no row, or one lacks a column that others have, or its prompt is malformed.
    """

    def __init__(self, rows: Sequence[Mapping[str, Any]], prompt_column: str, place: Callable[[int], str]) -> None:
        if not rows:
            raise ValueError(f"{place(0)}: there is no row")
        names = [name for name in rows[0] if name != prompt_column]
        if prompt_column not in rows[0]:
            raise ValueError(f"{place(0)}, column {prompt_column!r}: missing; the columns are {sorted(names)}")
        if reserved := [name for name in names if name in _RESERVED]:
            raise ValueError(f"{place(0)}, column {reserved[0]!r}: an argument of reward functions; rename the column")
        self.place = place
        self._rows: list[Row] = []
        for i, row in enumerate(rows):
            if different := row.keys() ^ rows[0].keys():
                raise ValueError(f"{place(i)}, column {min(different)!r}: only one of this row and {place(0)} has it")
            prompt = check_prompt(row[prompt_column], f"{place(i)}, column {prompt_column!r}")
            self._rows.append((prompt, {name: row[name] for name in names}))

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Row:
        return self._rows[index]


class JsonLines(Rows):
    """Rows of JSON lines or parquet files.

    Args:
        path: One file or several, ending in .jsonl, .json-lines, .ndjson or .parquet. Blank lines do not count.
        prompt_column: Name of the column with text or a list of chat messages.

    Raises:
        ValueError: A file is absent or of another kind, or a row is malformed; names file, line and column.
    """

    def __init__(self, path: str | Sequence[str], prompt_column: str = "prompt") -> None:
        paths = [path] if isinstance(path, str | Path) else list(path)
        rows = [row for name in paths for row in _read(Path(name).expanduser())]
        super().__init__(
            [row for _, row in rows], prompt_column, lambda i: rows[i][0] if rows else ", ".join(map(str, paths))
        )


def _read(path: Path) -> list[tuple[str, Mapping[str, Any]]]:
    """Read the rows of a file, each with its place: the file, and the number of the line or row."""
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
        super().__init__(rows, "prompt", lambda i: f"{name}, item {i + 1}")


def prompts(
    *, path: str | Sequence[str], validation_path: str | Sequence[str] | None, prompt_column: str, **settings: Any
) -> PromptData:
    """Data module of `JsonLines`; without a ``validation_path`` rows of the training files are held out."""
    return PromptData(
        train=partial(JsonLines, path, prompt_column),
        validation=partial(JsonLines, validation_path, prompt_column) if validation_path else None,
        **settings,
    )


def memory_prompts(*, train: Any, validation: Any, **settings: Any) -> PromptData:
    """Data module of rows in memory; without ``validation`` some are held out, or all of them where they are few."""
    rows = Inline(train, "data")
    if validation is not None:
        return PromptData(train=rows, validation=Inline(validation, "data, validation"), **settings)
    held_out = min(settings["validation_size"], len(rows) // 5)
    few = len(rows) < _MIN_HOLD_OUT or len(rows) - held_out < settings["prompts_per_step"]
    return PromptData(train=rows, validation=rows if few else None, **settings)
