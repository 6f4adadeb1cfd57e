"""docs/reliability.md has a row for everything that the tests provoke, and no other."""

from tests.conftest import COLLECTED, PROVOKED
from tests.support.provocations import PAGE, written


def test_the_page_has_what_the_tests_provoke(request):
    """Of the test files that were collected, which are all of them unless some were named."""
    expected = request.config.stash[PROVOKED]
    found = written(PAGE.read_text(encoding="utf-8"))
    collected = request.config.stash[COLLECTED]
    assert {name: text for name, text in found.items() if name in collected} == expected
