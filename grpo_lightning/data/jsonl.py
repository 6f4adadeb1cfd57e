"""Prompts from JSON lines, parquet, the config or memory; every row is checked once, when it is read."""

import functools
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

from grpo_lightning.data import PromptData, Row
from grpo_lightning.types import Prompt

_JSON, _PARQUET = (".jsonl", ".json-lines", ".ndjson"), ".parquet"
_RESERVED = ("prompts", "completions", "completion_ids", "self")
"""A reward's own arguments, ``self`` being that of objects with a ``__call__`` and of methods."""


def checked_prompt(value: Any, where: str) -> Prompt:
    """The prompt of one row.

    Args:
        value: What the row has in the column of the prompt.
        where: Which file, line and column that is, for messages.

    Returns:
        Text, chat messages with the keys "role" and "content" only, or token ids.

    Raises:
        ValueError: If it is none of these, or says nothing.
    """
    if isinstance(value, str):
        if not value.strip():
            raise ValueError(f"{where}: empty; allowed: text or a list of chat messages")
        return value
    if not isinstance(value, list):
        raise ValueError(f"{where}: {_kind(value)}; allowed: text or a list of chat messages")
    if value and all(isinstance(one, int) and not isinstance(one, bool) and one >= 0 for one in value):
        return value  # token ids
    messages = [_message(message, f"{where}, message {number}") for number, message in enumerate(value, 1)]
    if not any(message["content"].strip() for message in messages):
        raise ValueError(f"{where}: empty; allowed: text or a list of chat messages")
    return messages


def _message(value: Any, where: str) -> dict[str, str]:
    allowed = 'allowed: an object with the texts "role" and "content"'
    if not isinstance(value, Mapping):
        raise ValueError(f"{where}: {_kind(value)}; {allowed}")
    given = {key: text for key, text in value.items() if text is not None}  # parquet fills absent keys with null
    if set(given) != {"role", "content"}:
        raise ValueError(f"{where}: an object with {sorted(given)}; {allowed}")
    for key, text in given.items():
        if not isinstance(text, str):
            raise ValueError(f"{where}: {key} is {_kind(text)}; {allowed}")
    if not given["role"].strip():
        raise ValueError(f"{where}: role is empty; {allowed}")
    return {"role": given["role"], "content": given["content"]}


def _kind(value: Any) -> str:
    return "null" if value is None else f"{type(value).__name__} {str(value)[:40]!r}"


class Rows:
    """Rows that are held in memory, each checked when it is read.

    Args:
        rows: One mapping per row, all with the same keys.
        prompt_column: The key of the prompt; the other keys are the columns rewards see.
        where: Number of a row -> where the row comes from, for messages.

    Raises:
        ValueError: If there is no row, or one lacks a column others have, or its prompt is malformed.
    """

    place: Callable[[int], str]
    """Number of a row -> where it comes from, for messages."""

    def __init__(self, rows: Sequence[Mapping[str, Any]], prompt_column: str, where: Callable[[int], str]) -> None:
        if not rows:
            raise ValueError(f"{where(0)}: there is no row; allowed: at least 1")
        first_with: dict[str, int] = {}
        for i, row in enumerate(rows):
            for name in row:
                first_with.setdefault(name, i)
        if reserved := [name for name in first_with if name in _RESERVED and name != prompt_column]:
            raise ValueError(
                f"{where(first_with[reserved[0]])}, column {reserved[0]!r}: allowed: any name but "
                f"{', '.join(_RESERVED)}, which are arguments of rewards already: rename it"
            )
        if prompt_column not in first_with:
            raise ValueError(f"{where(0)}, column {prompt_column!r}: missing; the columns are {sorted(first_with)}")
        self.place = where
        self._rows: list[Row] = []
        for i, row in enumerate(rows):
            for name, first in first_with.items():
                if name not in row:
                    raise ValueError(f"{where(i)}, column {name!r}: missing, while {where(first)} has it")
            prompt = checked_prompt(row[prompt_column], f"{where(i)}, column {prompt_column!r}")
            self._rows.append((prompt, {name: row[name] for name in first_with if name != prompt_column}))

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
        ValueError: If a file is absent or of another kind, or a row is malformed; names file, line and column.
    """

    def __init__(self, path: str | Sequence[str], prompt_column: str = "prompt") -> None:
        paths = [path] if isinstance(path, str | Path) else list(path)
        placed: list[tuple[str, Mapping[str, Any]]] = []
        for one in paths:
            placed += _read(Path(one))
        super().__init__(
            [row for _, row in placed], prompt_column, lambda i: placed[i][0] if placed else ", ".join(map(str, paths))
        )


def _read(path: Path) -> list[tuple[str, Mapping[str, Any]]]:
    """The rows of a file, each with its place: the file, and the number of the line or row."""
    path = path.expanduser()
    if path.suffix not in (*_JSON, _PARQUET):
        raise ValueError(f"data.path={path}: allowed: a file ending in {', '.join((*_JSON, _PARQUET))}")
    if not path.is_file():
        raise ValueError(f"data.path={path}: there is no such file")
    if path.suffix == _PARQUET:
        try:
            with path.open("rb") as file:
                rows = pyarrow.parquet.read_table(file).to_pylist()
        except pyarrow.ArrowException as error:
            raise ValueError(f"{path}: not a parquet file, or damaged: {error}") from error
        return [(f"{path}, row {number}", row) for number, row in enumerate(rows, 1)]
    with path.open("rb") as file:  # bytes, as only a newline ends a line of JSON
        return [
            (f"{path}, line {number}", _object(line, f"{path}, line {number}"))
            for number, line in enumerate(file, 1)
            if line.strip()
        ]


def _object(line: bytes, where: str) -> Mapping[str, Any]:
    try:
        row = json.loads(line.decode("utf-8-sig"))
    except ValueError as error:  # of JSON or of UTF-8
        raise ValueError(f"{where}: no JSON: {error}") from error
    if not isinstance(row, dict):
        raise ValueError(f"{where}: {_kind(row)}; allowed: a JSON object")
    return row


class Inline(Rows):
    """Prompts in the config or in memory: texts, chat messages, token ids, or mappings with "prompt" and any columns.

    Args:
        prompts: A list of them, or a data set of the datasets library.
        name: What messages call them.

    Raises:
        ValueError: If there is none, or one is malformed; names its number and column.
    """

    def __init__(self, prompts: Iterable[Any], name: str = "data.train.prompts") -> None:
        rows = [dict(row) if isinstance(row, Mapping) else {"prompt": row} for row in prompts]
        for row in rows:
            prompt: Any = row.get("prompt")
            if hasattr(prompt, "tolist"):
                row["prompt"] = prompt.tolist()
            elif isinstance(prompt, tuple):
                row["prompt"] = list(prompt)
        super().__init__(rows, "prompt", lambda i: f"{name}, item {i + 1}")


def prompts(
    *, path: str | Sequence[str], validation_path: str | Sequence[str] | None, prompt_column: str, **settings: Any
) -> PromptData:
    """The data of a run from JSON lines or parquet files.

    Args:
        path: Training file or files.
        validation_path: File or files with held-out prompts; None holds out rows of the training files.
        prompt_column: Name of the column with the prompt.
        settings: Everything else that ``PromptData`` needs.
    """
    return PromptData(
        train=functools.partial(JsonLines, path, prompt_column),
        validation=functools.partial(JsonLines, validation_path, prompt_column) if validation_path else None,
        **settings,
    )
