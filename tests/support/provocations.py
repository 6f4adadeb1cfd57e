"""What the tests provoke, and what happens then: the rows of docs/reliability.md.

python -m tests.support.provocations writes that file anew.
"""

from collections.abc import Iterable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "reliability.md"
START = "<!-- rows: python -m tests.support.provocations -->"


def provocation(what: str, then: str):
    """Mark a test as the proof of one row of docs/reliability.md."""
    return pytest.mark.provocation(what=what, then=then)


def sections(items: Iterable[pytest.Item]) -> dict[str, str]:
    """Name of a test file -> its section of the page: a heading, and a row for each thing that is provoked."""
    rows: dict[str, list[str]] = {}
    titles = {}
    for item in items:
        for mark in item.iter_markers("provocation"):
            name = item.path.name
            titles[name] = (item.module.__doc__ or name).strip().splitlines()[0].rstrip(".")
            cells = (" ".join(text.split()).replace("|", "\\|") for text in (mark.kwargs["what"], mark.kwargs["then"]))
            row = "| " + " | ".join(cells) + " |"
            if row not in rows.setdefault(name, []):
                rows[name].append(row)
    return {
        name: f"## {titles[name]}\n\n`tests/{name}`\n\n| what is done | what happens |\n|---|---|\n" + "\n".join(found)
        for name, found in sorted(rows.items())
    }


def written(text: str) -> dict[str, str]:
    """Name of a test file -> its section, as the page has it."""
    parts = text.partition(START)[2].split("\n## ")[1:]
    return {part.split("`tests/")[1].split("`")[0]: "## " + part.strip() for part in parts}


class _Collected:
    def __init__(self) -> None:
        self.sections: dict[str, str] = {}

    def pytest_collection_modifyitems(self, items):
        self.sections = sections(items)


def main() -> None:
    collected = _Collected()
    pytest.main(["--collect-only", "-qq", "-n0", "-m", "", str(ROOT / "tests")], plugins=[collected])
    above = PAGE.read_text(encoding="utf-8").partition(START)[0]
    page = above + START + "\n\n" + "\n\n".join(collected.sections.values()) + "\n"
    PAGE.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
