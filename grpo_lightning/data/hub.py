"""Prompts from a data set of the Hugging Face hub, or from a local copy of one."""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from grpo_lightning.config.rules import local_or_hub
from grpo_lightning.console import single_line
from grpo_lightning.data.datamodule import PromptData
from grpo_lightning.data.files import Rows

_KINDS = {".json": "json", ".jsonl": "json", ".csv": "csv", ".parquet": "parquet", ".arrow": "arrow"}
_SAVED = ("dataset_dict.json", "state.json")  # what save_to_disk leaves behind

RowFilter = Callable[[dict[str, Any]], bool]
RowMap = Callable[[dict[str, Any]], Mapping[str, Any]]


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


class Hub(Rows):
    """Rows of one split, in memory. Code that comes with a data set is never run.

    Args:
        path: Name on the hub, a folder written by ``save_to_disk``, or a folder or file of arrow, csv, json, parquet or
            text, as ``load_dataset`` reads it.
        split: Which split, such as "train" or "train[:1000]".
        name: Configuration of the data set, if it has several.
        revision: Branch, tag or commit on the hub.
        columns: New name -> name in the data set; only these are read. None reads all, under their names.
        filter: Which rows, as published, to use; None uses all.
        map_row: Row as published -> row whose columns are then selected and renamed; None leaves it as it is.

    Raises:
        ValueError: The data set, its split or a column does not exist, or a row is malformed.
    """

    def __init__(
        self,
        path: str,
        split: str,
        name: str | None = None,
        revision: str | None = None,
        columns: Mapping[str, str] | None = None,
        filter: RowFilter | None = None,
        map_row: RowMap | None = None,
    ) -> None:
        table, source = _load(path, split, name, revision), f"{path} ({split})"
        if columns and not map_row and (absent := set(columns.values()) - set(table.column_names)):
            raise ValueError(f"data.columns: {', '.join(absent)} not in {source}, which has {table.column_names}")
        rows: dict[int, Mapping[str, Any]] = {}
        for number, row in enumerate(table, 1):
            try:
                if filter and not filter(row):
                    continue
                mapped = dict(map_row(row)) if map_row else row
                rows[number] = {new: mapped[old] for new, old in columns.items()} if columns else mapped
            except Exception as error:
                raise ValueError(f"{source}, row {number}: data.filter or data.map_row: {error!r}") from error
        numbers = list(rows)
        super().__init__(list(rows.values()), "prompt", lambda i: f"{source}, row {numbers[i]}" if numbers else source)


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


def prompts(
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
    """Data module of a `Hub` data set; without a ``validation_split`` rows of the training split are held out."""
    source = partial(Hub, path, name=name, revision=revision, columns=columns, filter=filter, map_row=map_row)
    return PromptData(
        train=partial(source, split=split),
        validation=partial(source, split=validation_split) if validation_split else None,
        **settings,
    )
