"""The directory in which the command line was started, and the user's modules that lie in it.

It is not on Python's path: libraries import what may be installed, such as ``triton`` or ``pynvml``, or what a folder
``evil.dist-info`` names, and would run any file of that name. Settings and files of the user's find modules there.
"""

import contextlib
import dis
import functools
import importlib.util
import json
import os
import sys
import sysconfig
from collections.abc import Collection, Iterable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader, all_suffixes
from pathlib import Path
from types import CodeType, ModuleType

START: Path | None = None
"""The directory in which the command line was started; None in a program, which has its own path."""

_PLACES, _WORDS = "GRPO_LIGHTNING_SETTINGS_FROM", "GRPO_LIGHTNING_GIVEN"
_BEGUN = "GRPO_LIGHTNING_BEGUN"
_CHECKOUT = Path(__file__).resolve().parents[1]
_IMPORTING = ("<frozen importlib", str(Path(importlib.__file__).parent))
"""How the files of functions begin that import on behalf of others."""


class _Source(SourceFileLoader):
    """Runs a file as it stands: the bytecode beside it may be a stranger's, and Python would not always compare."""

    def get_code(self, fullname: str) -> CodeType:
        path = self.get_filename(fullname)
        code: CodeType = self.source_to_code(self.get_data(path), path)
        return code


class _Finder(MetaPathFinder):
    """Finds modules in the directory of the start for those who may have them."""

    def __init__(self) -> None:
        self.named: set[str] = set()
        """Modules that settings name."""
        self.found: set[str] = set()
        """Modules that were found here."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if path is not None or START is None:
            return None
        if fullname not in self.named and not _asked_by_the_user(START, self.named | self.found):
            return None
        spec = _the_only_one(PathFinder.find_spec(fullname, [str(START)]))
        if spec is not None and spec.submodule_search_locations and fullname not in self.named:
            raise ModuleNotFoundError(
                f"{fullname} is a folder that no setting names, and may be a stranger's, such as a data set; if you "
                f"know it, allowed is trusted=[{fullname}] on the command line",
                name=fullname,
            )
        if spec is not None:
            self.found.add(fullname)
        return _from_source(spec, START) or spec


class _SourceFinder(MetaPathFinder):
    """Finds the parts of the user's packages, and modules of the user that are on Python's path anyway, as source."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        known = _finder.named | _finder.found
        if START is None or (
            fullname.partition(".")[0] not in known and (path or not _asked_by_the_user(START, known))
        ):
            return None
        found = PathFinder.find_spec(fullname, path)
        spec = _from_source(_the_only_one(found), START)
        if spec is not None and path is None:
            _finder.found.add(fullname)
        return spec


_finder = _Finder()
_source_finder = _SourceFinder()


def pass_by_settings() -> None:
    """Let matplotlib and MPI, which libraries import, read no settings of the working directory.

    Up to version 3.10 matplotlib evaluates what stands in a file ``matplotlibrc`` there, which could run code. UCX, by
    which MPI sends, loads the libraries that ``ucx.conf`` names; Lightning, which asks MPI how many processes there
    are, is told that there is none.
    """
    if os.path.lexists("ucx.conf"):
        sys.modules.setdefault("mpi4py", None)  # type: ignore[arg-type]
    if os.path.lexists("matplotlibrc") and "matplotlib" not in sys.modules:
        with contextlib.chdir(sys.prefix), contextlib.suppress(ImportError):
            importlib.import_module("matplotlib")


def note_settings_from(places: Iterable[str]) -> None:
    """Take note of directories of settings that the command brings along, for this process and those it starts."""
    os.environ[_PLACES] = json.dumps(sorted({*settings_from(), *places}))


def settings_from() -> list[str]:
    """The directories that were noted."""
    return list(json.loads(os.environ.get(_PLACES) or "[]"))


def forget_settings_from() -> None:
    """Begin to compose settings anew."""
    os.environ.pop(_PLACES, None)


def note_words(words: Sequence[str]) -> None:
    """Take note of the overrides of the command line, without secrets, for this process and those that it starts."""
    os.environ[_WORDS] = json.dumps(list(words))


def words() -> list[str]:
    """The overrides that were noted: what the user says, and no file."""
    return list(json.loads(os.environ.get(_WORDS) or "[]"))


def note_begun(options: Sequence[str]) -> None:
    """Take note of how the command line begins, for this process and those that it starts.

    Jobs of a launcher are other programs, and what a program is called is not what has started it.

    Args:
        options: Where settings are found, as the user has said it.
    """
    os.environ.pop(_BEGUN, None)
    name = Path(sys.argv[0]).name
    own = [name] if name == "grpo-lightning" else ["python", sys.argv[0]] if name.endswith(".py") else begun()
    os.environ[_BEGUN] = json.dumps([*own, *options])


def begun() -> list[str]:
    """How the command line begins that messages offer: as the user has begun it.

    A program has none, and in its directory a ``train.py`` may be somebody else's: this package's own is named.
    """
    if told := os.environ.get(_BEGUN):
        return list(json.loads(told))
    return ["python", str(_CHECKOUT / "train.py")] if (_CHECKOUT / "train.py").is_file() else ["grpo-lightning"]


def program() -> list[str]:
    """The words of `begun` that name the program, without options."""
    words = begun()
    return words[: 1 + (words[0] == "python")]


def file_of_checkout(name: str) -> Path | None:
    """A file beside this package, in a checkout; None if there is none, as where it is installed."""
    return _CHECKOUT / name if (_CHECKOUT / name).is_file() else None


def place() -> Path:
    """The directory below which Python files are the user's."""
    return START or Path.cwd().resolve()


def spec_of(top: str) -> ModuleSpec | None:
    """Where a module without a package is: on Python's path or else in the directory of the start.

    Nothing is imported.
    """
    try:
        found = importlib.util.find_spec(top)
    except (ImportError, ValueError, AttributeError):
        found = None
    return PathFinder.find_spec(top, [str(START)]) if found is None and START is not None else found


def make_importable(*tops: str) -> None:
    """Let modules be imported that settings name, also if they lie in the directory of the start, and what they import.

    A module that is on Python's path is found there.
    """
    _finder.named.update(tops)
    if START is not None and _finder not in sys.meta_path:
        sys.meta_path.append(_finder)
        sys.meta_path.insert(0, _source_finder)


def enter(directory: str, tops: Iterable[str]) -> None:
    """Let another process of this program import the same modules; see `importable`."""
    global START
    START = Path(directory)
    make_importable(*tops)


def importable() -> tuple[str, list[str]] | None:
    """The arguments of `enter` for a process that this one starts: what settings name, and what came with it."""
    if START is None or _finder not in sys.meta_path:
        return None
    return str(START), sorted(_finder.named | _finder.found)


def is_own(path: Path, here: Path) -> bool:
    """Whether a file or directory below ``here`` is the user's, and no part of Python, its library or its packages."""
    if here not in path.parents or {"site-packages", "dist-packages"} & set(path.parts):
        return False
    return not any(place in path.parents and place not in (here, *here.parents) for place in _installed())


def _the_only_one(spec: ModuleSpec | None) -> ModuleSpec | None:
    """The same; what else in its folder has its name may have been unpacked there, and be what Python takes.

    That is a package or a file of machine code, which comes before a file of source, or a file, which comes before a
    folder without ``__init__.py``. Folders with other files, such as those of a data set, are passed by.

    Raises:
        ImportError: There is another.
    """
    if spec is None or not spec.origin or START is None:
        return spec
    file = Path(spec.origin).absolute()  # it may be a link
    if not (is_own(file, START) or is_own(file.resolve(), START)):
        return spec
    folder = (file.parent if spec.submodule_search_locations else file).with_name(spec.name.rpartition(".")[2])
    files = [folder.with_name(f"{folder.name}{suffix}") for suffix in all_suffixes()]
    found = [place for place in files if place.is_file()]
    if folder.is_dir() and any(path.suffix in all_suffixes() for path in folder.rglob("*")):
        found.insert(0, folder)
    if len(found) > 1:
        told = f"{' and '.join(map(str, found))} have the same name; allowed is one of them, so rename the other"
        raise ImportError(told, name=spec.name)
    return spec


def _from_source(spec: ModuleSpec | None, here: Path) -> ModuleSpec | None:
    """The same, to be run from its source; None if it is no source file of the user's."""
    if spec is None or type(spec.loader) is not SourceFileLoader or not is_own(Path(spec.loader.path).resolve(), here):
        return None
    spec.loader, spec.cached = _Source(spec.name, spec.loader.path), None
    return spec


def _asked_by_the_user(here: Path, known: Collection[str]) -> bool:
    """Whether the code that is importing now stands in a file of the user's.

    What else lies below the directory of the start may be a library that is installed from where its source is.

    Args:
        here: The directory of the start.
        known: The user's modules so far.
    """
    frame, asked = sys._getframe(2), ""  # of what has called find_spec
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_IMPORTING):
        asked, frame = frame.f_code.co_name, frame.f_back
    code = frame.f_code
    file = code.co_filename
    if str(frame.f_globals.get("__name__")).partition(".")[0] not in known:
        return False
    # Libraries that are no Python have no frame: what is asked in the course of a call to one is theirs.
    says_so = dis.opname[code.co_code[frame.f_lasti]] == "IMPORT_NAME" or "__import__" in code.co_names
    if not (says_so or asked == importlib.import_module.__name__):
        return False
    return file.startswith(str(here)) and is_own(Path(file).resolve(), here)


@functools.cache
def _installed() -> frozenset[Path]:
    """Where Python, its library and its packages are; what lies in there is no file of the user's."""
    named = {sys.prefix, sys.base_prefix, sys.exec_prefix, *sysconfig.get_paths().values()}
    return frozenset(Path(name).resolve() for name in named if name)
