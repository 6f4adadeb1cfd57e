"""MLflow, which goes on with a run where the run's directory says so."""

import os
import re
import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from lightning.pytorch import loggers
from lightning.pytorch.utilities import rank_zero_only

from grpo_lightning.logger.known import STORE, keep, known
from grpo_lightning.output.links import followed
from grpo_lightning.output.terminal import one_line

_DATABASE = STORE.removeprefix("sqlite:///")
_NAMES_ANOTHER = bytes.fromhex("d9d505f920a163d7")
"""How a journal ends that names one more file, which SQLite then removes; one of a single database names none."""
_SAY_WHERE = re.compile(r"runs|experiments", re.IGNORECASE)
"""The tables that say where files of runs are."""
_WORD = re.compile(r"""'(?:[^']|'')*'|"(?:[^"]|"")*"|\w+|\S""")
_NO_CALLS = {"VARCHAR", "KEY", "CHECK", "IN", "UNIQUE", "AS", "RAISE"}
"""What stands before a bracket in MLflow's tables, indexes and triggers, beside names of tables."""
_CALLS = {"LIKE", "GLOB", "REGEXP", "MATCH", "COLLATE", "VIRTUAL"}
"""Words that call a function, or order by one, without a bracket."""
_OTHER_SIGNS = ("`", "[", "$", "#", "@", "--", "/*", "->")
"""Other ways to write a name, to hide one, and to call a function."""


class MLFlowLogger(loggers.MLFlowLogger):
    """Logs to an MLflow server or database.

    A run has the same identifier there after a restart. Steps that are made again appear there twice, with the same
    values but for times; settings stay those of its first start.

    Args:
        directory: The run's, where the identifier is.
        options: The arguments of Lightning's logger of this name.
    """

    def __init__(self, directory: str, **options: Any) -> None:
        self._file = Path(directory) / ".mlflow_id"
        self._given_place: str | None = options.get("artifact_location")
        self._continues = known(self._file) is not None
        self._checked: str | None = None
        if options.get("tracking_uri") == STORE:
            _check_files()
            if Path(_DATABASE).exists():
                _check_tables()
        super().__init__(run_id=known(self._file), **options)

    @property
    def experiment(self) -> Any:
        """The client of the mlflow library."""
        is_new = not self._initialized
        if is_new and self._tracking_uri == STORE and Path(_DATABASE).exists():
            _check_tables()  # before what they say is run
        with _without_git():
            client = super().experiment
        if self._initialized:
            self._check_place(client)
        if is_new and self._initialized:
            keep(self._file, str(self._run_id))
            client.update_run(self._run_id, status="RUNNING")
        return client

    def _check_place(self, client: Any) -> None:
        """Refuse a database of this directory that has files of the run written or sent elsewhere.

        It says itself where, anew at every time, and may have come with other files; some places are opened by code
        that lies beside it.
        """
        if self._tracking_uri != STORE:
            return  # the user has named it
        _check_tables()
        self._check_one(str(client.get_run(self._run_id).info.artifact_uri), is_new=self._checked is None)
        # What stands in the database may change with every line; this is kept, and used for all files of the run.
        kept = str(client._tracking_client._get_artifact_repo(self._run_id).artifact_uri)
        self._check_one(kept, is_new=kept != self._checked)
        self._checked = kept

    def _check_one(self, place: str, *, is_new: bool) -> None:
        """Refuse a place other than one without links below ``mlruns`` in this directory, or the one that was given."""
        from mlflow.utils.file_utils import local_file_uri_to_path

        own, address = Path.cwd().resolve() / "mlruns", urlsplit(place)
        path = followed(Path(local_file_uri_to_path(place)))  # of which "FILE:" is part, not its scheme
        is_given = self._given_place is not None and place.startswith(self._given_place) and ".." not in place
        is_local = address.netloc == "" and (not address.scheme or place.startswith("file:"))
        is_below = path is not None and path != own and path.is_relative_to(own)
        if not is_given and not (is_local and is_below and path and not (is_new and _has_links(path))):
            raise ValueError(
                one_line(
                    f"logger.mlflow.tracking_uri={STORE}: this database has files of the run written to {place}; "
                    f"allowed is {own}, so move mlflow.db away, or choose another logger.mlflow.experiment_name"
                )
            )

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Write scalars; ``val/pass@1`` is ``val/pass_at_1`` there, where no name has that sign."""
        super().log_metrics({name.replace("@", "_at_"): value for name, value in metrics.items()}, step)

    @rank_zero_only
    def log_hyperparams(self, params: Any) -> None:
        """Write the settings, once: MLflow refuses others later."""
        if not self._continues:
            super().log_hyperparams(params)


def _has_links(directory: Path) -> bool:
    """Whether something in a directory is a link, of which MLflow makes none, or cannot be looked at."""

    def refuse(error: OSError) -> None:
        raise error

    try:
        for place, folders, files in os.walk(directory, onerror=refuse):
            if any(Path(place, name).is_symlink() for name in (*folders, *files)):
                return True
    except FileNotFoundError:
        return directory.exists()
    except OSError:
        return True
    return False


def _check_files() -> None:
    """Refuse files of a database in this directory through which SQLite would write to others, or remove one."""
    journal = Path(f"{_DATABASE}-journal")
    for file in (Path(_DATABASE), journal, *(Path(f"{_DATABASE}-{part}") for part in ("wal", "shm"))):
        if file.is_symlink() or (file.exists() and file.stat().st_nlink > 1):
            raise ValueError(
                f"logger.mlflow.tracking_uri={STORE}: {file} is a link, or another name of some file; allowed are "
                "files of their own, or sqlite:///PATH of a database elsewhere"
            )
    if journal.exists() and journal.read_bytes().endswith(_NAMES_ANOTHER):
        raise ValueError(
            f"logger.mlflow.tracking_uri={STORE}: {journal} names another file, which SQLite would remove; allowed is "
            "one of this database alone, so move both away"
        )


def _check_tables() -> None:
    """Refuse a database of this directory that has an answer of its own to every question where files are.

    Or that calls functions where lines are written: a program may have given its own to all connections.
    """
    with closing(sqlite3.connect(_DATABASE)) as database:
        # Not by their types, which SQLite does not look at: it runs what the text says.
        made = "SELECT name, CAST(sql AS TEXT) FROM sqlite_master WHERE sql IS NOT NULL"
        try:
            found = [(name, text) for name, text in database.execute(made) if not _is_plain(text)]
        except sqlite3.DatabaseError as error:
            raise ValueError(f"logger.mlflow.tracking_uri={STORE}: {error}; allowed is one of MLflow's") from None
    for name, text in found:
        raise ValueError(
            one_line(
                f"logger.mlflow.tracking_uri={STORE}: this database has {name} ({text[:40]} …), which may call a "
                "function, or say anew at every time where files of the run are; allowed is one that MLflow has made, "
                "so move mlflow.db away"
            )
        )


@cache
def _is_plain(text: str) -> bool:
    """Whether a line of SQL makes what MLflow does: tables, indexes, and triggers that do not say where files are."""
    words = _WORD.findall(text)
    upper = [word.upper().strip('"') for word in words]
    kind = "INDEX" if upper[1:3] == ["UNIQUE", "INDEX"] else upper[1]
    if kind not in ("TABLE", "INDEX", "TRIGGER") or (kind == "TRIGGER" and _SAY_WHERE.search(text)):
        return False
    if not text.isascii() or any(sign in text for sign in _OTHER_SIGNS) or not _CALLS.isdisjoint(upper):
        return False
    of_columns = {"TABLE": 3, "INDEX": upper.index("ON") + 2 if kind == "INDEX" else 0}.get(kind)
    calls = (n for n, word in enumerate(words) if word == "(" and re.match(r'[\w"]', words[n - 1]))
    return all(n == of_columns or upper[n - 1] in _NO_CALLS or words[n - 2].upper() == "REFERENCES" for n in calls)


@contextmanager
def _without_git() -> Iterator[None]:
    """Inside, MLflow does not ask git of which commit the program is.

    It would ask in the program's directory and in those above, where a stranger's ``.git/config`` may name commands.
    """
    from mlflow.tracking.context.git_context import GitRunContext

    asks: Any = GitRunContext
    before = asks.in_context
    asks.in_context = lambda _: False
    try:
        yield
    finally:
        asks.in_context = before
