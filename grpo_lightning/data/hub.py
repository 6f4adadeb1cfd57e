"""Prompts from a data set of the Hugging Face hub, or from a local copy of one."""

import functools
import json
import logging
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import datasets
import yaml
from datasets.exceptions import DatasetGenerationError
from datasets.packaged_modules import _PACKAGED_DATASETS_MODULES
from huggingface_hub import DatasetCard

from grpo_lightning.allowed import local_or_hub
from grpo_lightning.data import PromptData
from grpo_lightning.data.archives import check_inside, contained, texts
from grpo_lightning.data.jsonl import Rows
from grpo_lightning.output.plain_yaml import standard_tags
from grpo_lightning.output.terminal import one_line, show_printable

log = logging.getLogger(__name__)

_KINDS = {".json": "json", ".jsonl": "json", ".csv": "csv", ".parquet": "parquet", ".arrow": "arrow"}
_SAVED = ("dataset_dict.json", "state.json")  # what save_to_disk leaves behind
_FORMATS = (None, "arrow", "jax", "numpy", "pandas", "polars", "python", "tensorflow", "torch")
_DECODED = ("Json",)  # types of datasets' that only take a text apart

RowMap = Callable[[dict[str, Any]], Mapping[str, Any]]


def gsm8k_answer(text: str) -> str:
    """The final answer of a GSM8K solution: what follows the last "####", without thousands separators.

    Args:
        text: A worked solution.

    Raises:
        ValueError: If nothing follows such a mark.
    """
    _, _, answer = text.rpartition("####")
    answer = answer.replace(",", "").strip()
    if "####" not in text or not answer:
        raise ValueError(f"no answer after '####' in {text[-60:]!r}")
    return answer


def gsm8k_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """A GSM8K row with its bare answer in place of the worked solution; raises as ``gsm8k_answer``."""
    return {**row, "answer": gsm8k_answer(row["answer"])}


def has_answer(row: Mapping[str, Any]) -> bool:
    """Whether there is a right answer to compare with: a filter for data sets where some rows have none."""
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
        ValueError: If the data set, its split or a column does not exist, or a row is malformed.
    """

    def __init__(
        self,
        path: str,
        split: str,
        name: str | None = None,
        revision: str | None = None,
        columns: Mapping[str, str] | None = None,
        filter: Callable[[dict[str, Any]], bool] | None = None,
        map_row: RowMap | None = None,
    ) -> None:
        table = _without_media(_load(path, split, name, revision), path)
        if columns and not (filter or map_row):
            _check_columns(columns, table.column_names, path)
            table = table.select_columns(sorted(set(columns.values())))
        rows: list[Mapping[str, Any]] = []
        numbers: list[int] = []
        for number, row in enumerate(_rows(table, f"{path} ({split})"), 1):
            try:
                if filter and not filter(row):
                    continue
                mapped = map_row(row) if map_row else row
            except Exception as error:
                raise ValueError(f"{path} ({split}), row {number}: data.filter or data.map_row: {error!r}") from error
            if columns:
                _check_columns(columns, list(mapped), path)
                mapped = {new: mapped[old] for new, old in columns.items()}
            rows.append(mapped)
            numbers.append(number)
        source = f"{path} ({split})"
        super().__init__(rows, "prompt", lambda i: f"{source}, row {numbers[i]}" if numbers else source)


def _rows(table: datasets.Dataset, where: str) -> Iterator[dict[str, Any]]:
    """The rows of a table, whose values may not be what their types say."""
    rows = iter(table)
    for number in range(1, len(table) + 1):
        try:
            yield next(rows)
        except Exception as error:  # of pyarrow or of a feature of the library
            told = one_line(" ".join(str(error).split()))
            raise ValueError(f"{where}, row {number}: cannot be read: {type(error).__name__}: {told}") from error


def _check_columns(columns: Mapping[str, str], there: list[str], path: str) -> None:
    absent = sorted(set(columns.values()) - set(there))
    if absent or "prompt" not in columns:
        what = f"{', '.join(absent)} not in {path}" if absent else "nothing is mapped to prompt"
        raise ValueError(f"data.columns={dict(columns)}: {what}; allowed: new name -> one of {sorted(there)}")


def _load(path: str, split: str, name: str | None, revision: str | None) -> datasets.Dataset:
    if "://" in path or "::" in path:
        raise ValueError(
            f"data.path={path!r}: allowed is NAME or ORG/NAME of the hub, or a path without '://' and '::'"
        )
    if path in _PACKAGED_DATASETS_MODULES:
        raise ValueError(
            f"data.path={path!r}: names a format, in which all files of the working directory would be read; allowed "
            f"is a file or a directory, such as ./{path}, or ORG/NAME of the hub"
        )
    path = local_or_hub(path, "data.path")
    local = Path(path)
    show_printable()
    try:
        if any((local / file).is_file() for file in _SAVED):
            with contained():
                _check_saved(local)
                return _of_saved(datasets.load_from_disk(path), path, split)
        if local.is_file():
            if local.suffix not in _KINDS:
                raise ValueError(f"allowed: a file ending in {', '.join(_KINDS)}")
            with contained():
                return datasets.load_dataset(_KINDS[local.suffix], data_files={split.split("[")[0]: path}, split=split)
        cache = None
        if local.is_dir():
            with standard_tags():
                _check_stays_inside(local)
            cache = str(Path(datasets.config.HF_DATASETS_CACHE) / "folders")  # not where one of the hub is looked for
        with contained():
            return datasets.load_dataset(path, name, split=split, revision=revision, cache_dir=cache)
    except UnpicklingError as error:
        raise ValueError(
            f"data.path={path!r}, data.split={split!r}: a pickle that could run code when it is read; allowed are "
            "JSON, CSV, parquet and arrow"
        ) from error
    except Exception as error:  # of the network, of a format, or of YAML
        cause = error.__cause__ if isinstance(error, DatasetGenerationError) else None  # which says what went wrong
        told = one_line(
            " ".join(str(cause or error).split()).partition(" Example of usage")[0]
        )  # Python of a stranger's words
        raise ValueError(f"data.path={path!r}, data.split={split!r}: {told}") from error


def _check_stays_inside(directory: Path) -> None:
    """Refuse a local data set whose README, ``.huggingface.yaml`` or a file's name leads elsewhere."""
    card, settings = directory / "README.md", directory / ".huggingface.yaml"
    found: list[tuple[Path, Any]] = []
    if card.is_file():
        found.append((card, DatasetCard.load(card).data.to_dict()))
    if settings.exists():
        found.append((settings, yaml.safe_load(settings.read_text(encoding="utf-8"))))
    for path in directory.rglob("*::*"):
        raise ValueError(
            f"{str(path.relative_to(directory))!r}: names a place to read from; allowed are names without '::'"
        )
    for file, content in found:
        if not isinstance(content, Mapping | None):
            raise ValueError(f"{file.name}: allowed is a mapping")  # the library would make one of pairs
        configs = content.get("configs") if content else None
        for config in configs if isinstance(configs, list) else ():
            for key in ("data_files", "data_dir"):
                for text in texts(config.get(key) if isinstance(config, Mapping) else None):
                    check_inside(text, f"{file.name}: {key}")


def _check_saved(directory: Path) -> None:
    """Refuse what ``save_to_disk`` is said to have written where it names files of other directories or of the net."""
    splits, parts = directory / _SAVED[0], [directory]
    if splits.is_file():
        named = json.loads(splits.read_text(encoding="utf-8")).get("splits")
        if not isinstance(named, list) or not all(isinstance(name, str) for name in named):
            raise ValueError(f"{splits.name}: splits: allowed is a list of names")
        for name in named:
            check_inside(name, f"{splits.name}: splits")
        parts += [directory / name for name in named]
    for part in parts:
        if (state := part / _SAVED[1]).is_file():
            said = json.loads(state.read_text(encoding="utf-8"))
            if said.get("_format_type") not in _FORMATS or said.get("_format_kwargs"):
                told = one_line(repr([said.get("_format_type"), said.get("_format_kwargs")])[:200])
                raise ValueError(f"{state.relative_to(directory)}: the format {told}; allowed are those of datasets")
            for file in said.get("_data_files") or ():
                for name in texts(file):
                    check_inside(name, where := f"{state.relative_to(directory)}: _data_files")
                    if not name.endswith(".arrow"):  # read into memory, a .gz would be unpacked
                        raise ValueError(f"{where}: {name!r}: allowed are names that end in .arrow")


def _without_media(table: datasets.Dataset, path: str) -> datasets.Dataset:
    """Without the columns of images, sounds and the like: to read one is to open whatever place it names."""
    media = [name for name, feature in table.features.items() if _is_media(feature)]
    if media:
        log.warning(
            "%s: the columns %s are left out: they hold images, sounds or other media, which are not read",
            one_line(path),
            one_line(", ".join(media)),
        )
    return table.remove_columns(media) if media else table


def _is_media(feature: Any) -> bool:
    """Whether a column's type, or one inside of it, is decoded by code of its own."""
    if isinstance(feature, Mapping | list | tuple):
        return any(_is_media(one) for one in (feature.values() if isinstance(feature, Mapping) else feature))
    if hasattr(feature, "feature"):  # of a list
        return _is_media(feature.feature)
    return hasattr(feature, "decode_example") and type(feature).__name__ not in _DECODED


def _of_saved(saved: datasets.Dataset | datasets.DatasetDict, path: str, split: str) -> datasets.Dataset:
    if not isinstance(saved, datasets.Dataset):
        if split not in saved:
            raise ValueError(f"no such split in {path}; allowed: {sorted(saved)}")
        saved = saved[split]
    return saved.with_format(None)  # it may have been saved with one that makes tables or tensors of rows


def prompts(
    *,
    path: str,
    split: str,
    validation_split: str | None,
    name: str | None,
    revision: str | None,
    columns: Mapping[str, str] | None,
    filter: Callable[[dict[str, Any]], bool] | None,
    map_row: RowMap | None,
    **settings: Any,
) -> PromptData:
    """The data of a run from a data set of the hub or a local copy; most arguments go to ``Hub``.

    Args:
        path: Name on the hub, or a local folder or file.
        split: The training split.
        validation_split: The split with held-out prompts; None holds out rows of the training split.
        name: Configuration of the data set.
        revision: Branch, tag or commit on the hub.
        columns: New name -> name in the data set.
        filter: Which rows to use.
        map_row: Changes a row.
        settings: Everything else that ``PromptData`` needs.
    """
    source = functools.partial(Hub, path, name=name, revision=revision, columns=columns, filter=filter, map_row=map_row)
    return PromptData(
        train=functools.partial(source, split=split),
        validation=functools.partial(source, split=validation_split) if validation_split else None,
        **settings,
    )
