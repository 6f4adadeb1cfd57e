"""What the datasets library does for a data set's files: it reads them, and writes where its caches are."""

import encodings
import re
import tarfile
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pyarrow.json
from datasets import DatasetBuilder, DownloadManager
from datasets import table as arrow_files
from datasets.features import features
from datasets.packaged_modules.arrow.arrow import Arrow
from datasets.packaged_modules.parquet.parquet import Parquet
from datasets.utils.extract import Extractor
from fsspec.registry import _registry, known_implementations
from pyarrow import ipc, parquet

from grpo_lightning.allowed import ERRORS
from grpo_lightning.data.columns import DIGITS, check_arrow, check_columns, check_length, parquet_schema
from grpo_lightning.data.json_tables import read_in_one_block
from grpo_lightning.output.plain_yaml import standard_tags
from grpo_lightning.output.terminal import one_line

_KINDS = ("arrow", "csv", "json", "parquet", "text")
"""Kinds of files that are read, of about 30 that datasets knows: the others have readers and libraries of their own."""
_PREPARED = "cache"
"""What datasets has prepared before of a data set of the hub, where that cannot be asked."""
_OTHERS = ("rar", "7z")
_SYSTEMS = ("file", "local", "hf", "http", "https", "zip", "tar", "bz2", "gzip", "lz4", "xz", "zstd")
"""Kinds of places that fsspec reads from; of others some load what lies in the working directory (``libhdfs.so``)."""
_KINDS_OF_PLACES: tuple[dict[str, Any], ...] = (known_implementations, _registry)
_TYPE = re.compile(
    r"null|uuid|bool[_8]?|u?int(8|16|32|64)|float(16|32|64)|date(32|64)|month_day_nano_interval|((large_)?(string|utf8|binary)"
    r"|(string|binary)_view)|\w+[(\[].*",
    re.ASCII | re.DOTALL,
)
"""Of what stands before a bracket datasets knows the few that there are; any other name is a function of pyarrow's."""

_DECIMAL = re.compile(r"decimal(128|256)\(\d+, ?(\d+)\)", re.ASCII)


@contextmanager
def contained() -> Iterator[None]:
    """Inside, the datasets library writes into its own caches only, whatever a data set's files say.

    It unpacks no archive that holds more than files and folders. By itself it compares texts to see whether a link
    leads out of an archive; the kernel follows links in them, and what is then written to a link goes into any file of
    the user's. And "::" in a name is a further place to read from.

    The name of a configuration and its ``version``, which a README may give, are part of the path of what it prepares.
    And of the types of columns, which files name, it calls all that pyarrow has a function for. It reads from files,
    the hub and servers, and from no other kind of place that a file's name could ask for; and tables and texts, no
    tensors, media or formats of other programs, nor types of columns that a program has registered. Lists have no type
    that makes them longer than pyarrow can count, lines of JSON are read in one block, and tables of arrow are
    validated, also those that datasets has prepared before, as pyarrow trusts their offsets. There are no ``filters``,
    by which parquet's reader would compute with tables before they are validated. Encodings are Python's own.
    """
    extract, cache, arrow = DownloadManager.extract, DatasetBuilder._build_cache_dir, features.string_to_arrow
    prepare, casts = DatasetBuilder.download_and_prepare, {kind: kind._cast_table for kind in (Arrow, Parquet)}
    nested, lines, tables = features.get_nested_type, pyarrow.json.read_json, Parquet._generate_tables
    opened, read_schema = (ipc.open_stream, ipc.open_file), parquet.read_schema
    held = arrow_files._memory_mapped_arrow_table_from_file, arrow_files._in_memory_arrow_table_from_file
    known_features = dict(features._FEATURE_TYPES)

    def checked(manager: DownloadManager, path_or_paths: Any) -> Any:
        for path in texts(path_or_paths):
            _check(Path(path))
        return extract(manager, path_or_paths)

    def below(builder: DatasetBuilder) -> str:
        place, root = str(cache(builder)), Path(builder._cache_dir_root)
        if ".." in Path(place).parts or root not in Path(place).parents:
            raise ValueError(f"its configuration would be written to {place!r}: allowed are names without '/' and '..'")
        return place

    def prepared(builder: DatasetBuilder, *args: Any, **options: Any) -> None:
        kind = type(builder).__module__.rpartition(".")[2]
        if kind not in (*_KINDS, _PREPARED):
            raise ValueError(f"its files are of the kind {kind}; allowed are {', '.join(_KINDS)}")
        if getattr(builder.config, "filters", None) is not None:
            raise ValueError("its README says filters; allowed are rows that are all read, as data.filter chooses some")
        _check_encoding(builder.config)
        prepare(builder, *args, **options)

    def known(name: str) -> Any:
        if not _TYPE.fullmatch(name):
            raise ValueError(
                f"a column of the type {one_line(repr(name))}: allowed are types of pyarrow's, like string"
            )
        if name.startswith("decimal"):
            decimal = _DECIMAL.fullmatch(name)
            if not decimal or int(decimal[2]) > DIGITS[int(decimal[1])]:
                allowed = " and ".join(f"decimal{bits}(DIGITS, SCALE), 0 to {DIGITS[bits]}" for bits in (128, 256))
                raise ValueError(f"a column of the type {one_line(repr(name))}: allowed are {allowed}")
        return arrow(name)

    def bounded(feature: Any) -> Any:
        check_length(kind := nested(feature))
        return kind

    def cast(builder: Any, table: Any) -> Any:
        check_columns(table.schema)
        table.validate(full=True)  # parquet's reader takes numbers of words of a dictionary as they are
        return casts[Arrow if isinstance(builder, Arrow) else Parquet](builder, table)

    def typed(builder: Any, files: Iterable[str], *others: Any, **options: Any) -> Iterator[Any]:
        """Types are looked at before rows, whose lists are made as long as a file says."""
        for file in (files := [*files]):
            with open(file, "rb") as opened, suppress(pyarrow.ArrowException):  # a damaged one is told when it is read
                check_columns(parquet_schema(opened))
        yield from tables(builder, files, *others, **options)

    def looked_at(opened: Callable[..., Any]) -> Callable[..., Any]:
        def checked(source: Any, *args: Any, **options: Any) -> Any:
            if isinstance(name := getattr(source, "name", None), str) and Path(name).is_file():
                check_arrow(Path(name))
            return opened(source, *args, **options)

        return checked

    def whole(read: Callable[[str], Any]) -> Callable[[str], Any]:
        def validated(filename: str) -> Any:
            check_arrow(Path(filename))
            with pyarrow.memory_map(filename) as mapped, opened[0](mapped) as stream:
                check_columns(stream.schema)
                for batch in stream:
                    batch.validate(full=True)
            return read(filename)

        return validated

    DownloadManager.extract, DatasetBuilder._build_cache_dir = checked, below
    arrow_files._memory_mapped_arrow_table_from_file, arrow_files._in_memory_arrow_table_from_file = map(whole, held)
    DatasetBuilder.download_and_prepare, features.string_to_arrow = prepared, known
    features.get_nested_type, pyarrow.json.read_json = bounded, read_in_one_block
    Arrow._cast_table = Parquet._cast_table = cast
    Parquet._generate_tables, parquet.read_schema = typed, parquet_schema
    ipc.open_stream, ipc.open_file = map(looked_at, opened)
    for name, made in known_features.items():
        if not made.__module__.startswith("datasets."):  # a program's own, which would be given what files say
            del features._FEATURE_TYPES[name]
    others = [(kinds, {name: kinds[name] for name in kinds if name not in _SYSTEMS}) for kinds in _KINDS_OF_PLACES]
    for kinds, left_out in others:
        for name in left_out:
            del kinds[name]
    try:
        with standard_tags():  # of READMEs
            yield
    finally:
        for kinds, left_out in others:
            kinds.update(left_out)
        DownloadManager.extract, DatasetBuilder._build_cache_dir = extract, cache
        DatasetBuilder.download_and_prepare, features.string_to_arrow = prepare, arrow
        features.get_nested_type, pyarrow.json.read_json = nested, lines
        Arrow._cast_table, Parquet._cast_table = casts[Arrow], casts[Parquet]
        Parquet._generate_tables, parquet.read_schema = tables, read_schema
        ipc.open_stream, ipc.open_file = opened
        arrow_files._memory_mapped_arrow_table_from_file, arrow_files._in_memory_arrow_table_from_file = held
        features._FEATURE_TYPES.update(known_features)


def _check_encoding(config: Any) -> None:
    """Refuse an encoding, or what is done with its errors, by the name of a function that a program has registered."""
    encoding, errors = getattr(config, "encoding", None), getattr(config, "encoding_errors", None)
    if encoding is not None and not (isinstance(encoding, str) and encodings.search_function(encoding)):
        raise ValueError(f"its README says encoding {one_line(repr(encoding)[:80])}; allowed are those of Python's own")
    if errors is not None and errors not in ERRORS:
        told = one_line(repr(errors)[:80])
        raise ValueError(f"its README says encoding_errors {told}; allowed are {', '.join(ERRORS)}")


def check_inside(text: str, where: str) -> None:
    """Refuse the name of a file that leads out of the directory, or the archive, of the data set that names it.

    Raises:
        ValueError: It does; names it, and ``where`` it stands.
    """
    # A colon is what URLs and fsspec's chains of files have.
    if ":" in text or Path(text).is_absolute() or ".." in Path(text).parts:
        raise ValueError(f"{where}: {text!r} is not in this directory; allowed are relative paths without '..' and ':'")


def texts(node: Any) -> Iterator[str]:
    """All texts in lists and mappings, and everything else as text."""
    if isinstance(node, Mapping | list | tuple):
        for one in node.values() if isinstance(node, Mapping) else node:
            yield from texts(one)
    elif node is not None:
        yield str(node)


def _check(path: Path) -> None:
    """Refuse an archive with links, devices, or names that lead out of it; a file may be archives of several kinds."""
    if not path.is_file():
        return
    if tarfile.is_tarfile(path):
        with tarfile.open(path) as archive:
            for member in archive:
                if not (member.isfile() or member.isdir()):
                    raise ValueError(
                        f"{path.name}: {member.name!r} in this archive is a link or a device; allowed are plain files"
                    )
                check_inside(member.name, path.name)
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            for name in archive.namelist():
                check_inside(name, path.name)
    if (kind := Extractor.infer_extractor_format(path)) in _OTHERS:
        raise ValueError(f"{path.name}: an archive of the kind {kind}; allowed are tar, zip, and plain files")
