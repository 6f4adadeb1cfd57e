"""Archives in a stranger's data set write and read nothing but files of their own."""

import gzip
import io
import tarfile
import zipfile

import datasets
import pytest

from grpo_lightning.data.hub import Hub
from tests.support.provocations import provocation

ROWS = b'{"prompt": "a"}\n{"prompt": "b"}\n'
MINE = "def mine():\n    return 1\n"
UP = 4  # folders from where an archive is unpacked to the user's


@pytest.fixture
def mine(tmp_path, monkeypatch):
    """A file of the user's, at a known place beside the cache of the datasets library; it stays as it is."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(datasets.config, "DOWNLOADED_DATASETS_PATH", tmp_path / "cache" / "downloads")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(MINE)
    (tmp_path / "data").mkdir()
    yield tmp_path / "mine.py"
    assert (tmp_path / "mine.py").read_text() == MINE


def tarred(path, *members, mode="w"):
    """A tar archive of (name, content) and (name, kind of link, where it leads)."""
    with tarfile.open(path, mode) as archive:
        for name, *what in members:
            member = tarfile.TarInfo(name)
            if len(what) == 2:
                member.type, member.linkname = what
                archive.addfile(member)
            else:
                member.size = len(what[0])
                archive.addfile(member, io.BytesIO(what[0]))


OVERWRITING = (
    ("rows.jsonl", ROWS),
    ("s", tarfile.SYMTYPE, "."),
    # As text it leads to d/mine.py; the kernel goes to the same folder again and again, and then up.
    ("d/x.jsonl", tarfile.LNKTYPE, "s/" * UP + "../" * UP + "mine.py"),
    ("d/x.jsonl", b"raise SystemExit\n"),
    ("d/x.jsonl", tarfile.SYMTYPE, "../rows.jsonl"),
)


@provocation(
    "a data set's file, whatever it is called, that is a tar archive with a link that leads to a file of the user's, "
    "and then writes to it",
    "refused in one sentence; nothing is unpacked",
)
@pytest.mark.parametrize("mode", ["w", "w:gz"])
@pytest.mark.parametrize(
    "name, path",
    [
        ("rows.jsonl", "data/rows.jsonl"),
        ("rows.csv", "data/rows.csv"),
        ("rows.jsonl", "data"),
        ("rows.txt", "data"),
        ("rows.tsv", "data"),
    ],
)
def test_an_archive_writes_to_no_other_file(name, path, mode, mine):
    tarred(f"data/{name}", *OVERWRITING, mode=mode)
    with pytest.raises(ValueError, match=rf"{name}: 's' in this archive is a link or a device; allowed are plain"):
        Hub(path, "train")
    assert not list(mine.parent.glob("cache/**/rows.jsonl"))


@pytest.mark.parametrize(
    "member, fault",
    [
        (("d/x.jsonl", tarfile.LNKTYPE, "rows.jsonl"), "'d/x.jsonl' in this archive is a link or a device; allowed"),
        (("x.jsonl", tarfile.CHRTYPE, ""), "'x.jsonl' in this archive is a link or a device; allowed"),
        (("../x.jsonl", ROWS), "'../x.jsonl' is not in this directory"),
        (("/x.jsonl", ROWS), "'/x.jsonl' is not in this directory"),
    ],
)
def test_an_archive_holds_plain_files(member, fault, mine):
    tarred("data/rows.jsonl", ("rows.jsonl", ROWS), member)
    with pytest.raises(ValueError, match=rf"^data.path='data/rows.jsonl', data.split='train': rows.jsonl: {fault}"):
        Hub("data/rows.jsonl", "train")


@provocation(
    "a data set with a zip archive in which a file is called `x::reference::FILE/y.jsonl`, as fsspec chains places",
    "refused in one sentence; no other place is asked",
)
@pytest.mark.parametrize("name", ["x::reference::mine.py/y.jsonl", "x::memory/y.jsonl"])
def test_names_in_an_archive_lead_nowhere_else(name, mine, monkeypatch):
    def made(*_, **__):
        raise AssertionError("a file system of another kind was asked for")

    for kind in ("reference.ReferenceFileSystem", "memory.MemoryFileSystem"):
        monkeypatch.setattr(f"fsspec.implementations.{kind}.__init__", made)
    with zipfile.ZipFile("data/rows.zip", "w") as archive:
        archive.writestr("rows.jsonl", ROWS)
        archive.writestr(name, ROWS)
    with pytest.raises(ValueError, match=r"rows.zip: '.*' is not in this directory; allowed are relative paths") as e:
        Hub("data", "train")
    assert "\n" not in str(e.value)


@pytest.mark.parametrize("kind, begin", [("rar", b"Rar!\x1a\x07\x00"), ("7z", b"7z\xbc\xaf\x27\x1c")])
def test_archives_of_other_kinds_are_not_unpacked(kind, begin, mine):
    (mine.parent / "data" / "rows.jsonl").write_bytes(begin + ROWS)
    with pytest.raises(ValueError, match=rf"rows.jsonl: an archive of the kind {kind}; allowed are tar, zip"):
        Hub("data/rows.jsonl", "train")


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.zip", "rows.jsonl.gz"])
def test_plain_files_are_unpacked(name, mine):
    if name == "rows.zip":
        with zipfile.ZipFile(f"data/{name}", "w") as archive:
            archive.writestr("a/rows.jsonl", ROWS)
    elif name == "rows.jsonl":
        tarred(f"data/{name}", ("a/rows.jsonl", ROWS))
    else:
        with gzip.open(f"data/{name}", "wb") as file:
            file.write(ROWS)
    rows = Hub("data", "train")
    assert [rows[number] for number in range(len(rows))] == [("a", {}), ("b", {})]
