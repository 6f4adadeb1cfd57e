"""What the datasets library does for a data set's files: it reads them, and writes where its caches are."""

import encodings
import tarfile
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from datasets import DatasetBuilder, DownloadManager
from datasets.packaged_modules import _PACKAGED_DATASETS_MODULES
from datasets.utils.extract import Extractor
from fsspec.compression import compr
from fsspec.registry import _registry, known_implementations

from grpo_lightning.allowed import ERRORS
from grpo_lightning.data.whole_tables import whole_tables
from grpo_lightning.output.terminal import one_line

_KINDS = ("arrow", "csv", "json", "parquet", "text")
"""Kinds of files that are read, of about 30 that datasets knows: the others have readers and libraries of their own."""
_PREPARED = "cache"
"""What datasets has prepared before of a data set of the hub, where that cannot be asked."""
_OF_DATASETS = "datasets.packaged_modules."
_OTHERS = ("rar", "7z")
_HOMES = ("fsspec", "datasets", "huggingface_hub", "bz2", "gzip", "isal", "lzma", "lz4", "zlib", "zstandard")
"""The modules of what reads places and compressed files."""
_SYSTEMS = ("file", "local", "hf", "http", "https", "zip", "tar", "bz2", "gzip", "lz4", "xz", "zstd")
"""Kinds of places that fsspec reads from; of others some load what lies in the working directory (``libhdfs.so``)."""


@contextmanager
def contained() -> Iterator[None]:
    """Inside, the datasets library writes into its own caches only, whatever a data set's files say.

    It unpacks no archive that holds more than files and folders. By itself it compares texts to see whether a link
    leads out of an archive; the kernel follows links in them, and what is then written to a link goes into any file of
    the user's. And "::" in a name is a further place to read from.

    The name of a configuration and its ``version``, which a README may give, are part of the path of what it prepares.
    It reads from files, the hub and servers, and from no other kind of place that a file's name could ask for; and
    `whole_tables` and texts, no tensors, media or formats of other programs. There are no ``filters``, by which
    parquet's reader would compute with tables before they are validated, and encodings are Python's own.
    """
    extract, cache = DownloadManager.extract, DatasetBuilder._build_cache_dir
    prepare = DatasetBuilder.download_and_prepare

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

    with (
        patch.object(DownloadManager, "extract", checked),
        patch.object(DatasetBuilder, "_build_cache_dir", below),
        patch.object(DatasetBuilder, "download_and_prepare", prepared),
        patch.dict(known_implementations),
        patch.dict(_registry),
        patch.dict(compr),
        patch.dict(_PACKAGED_DATASETS_MODULES),
        patch.object(Extractor, "extractors", _extractors()),
        whole_tables(),
    ):
        kinds: dict[str, Any]
        for kinds in (known_implementations, _registry, compr):
            for name in [*kinds]:
                if (name not in _SYSTEMS and kinds is not compr) or not _is_of_libraries(kinds[name]):
                    del kinds[name]
        for name, (module, _) in [*_PACKAGED_DATASETS_MODULES.items()]:
            if not module.startswith(_OF_DATASETS):  # a program's, which would be given what a README says
                del _PACKAGED_DATASETS_MODULES[name]
        yield


def _is_of_libraries(kind: Any) -> bool:
    """Whether no program has put this in the place of what reads a kind of places, or of compressed files."""
    home = str(kind["class"] if isinstance(kind, Mapping) else getattr(kind, "__module__", ""))
    return home.partition(".")[0] in _HOMES


def _extractors() -> dict[str, Any]:
    """What unpacks archives, without what a program has added, or put in the place of datasets' own."""
    return {name: one for name, one in Extractor.extractors.items() if one.__module__ == Extractor.__module__}


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
