"""Small tensors: threads cost more than they save."""

import gc
import os
from collections import Counter

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # also of the processes that tests start

import pytest
import torch

from grpo_lightning.output import redaction
from tests.support.provocations import sections

PROVOKED = pytest.StashKey[dict[str, str]]()
COLLECTED = pytest.StashKey[set[str]]()
torch.set_num_threads(1)


def pytest_collection_finish():
    gc.freeze()  # a run collects garbage at its end, and need not look at all that was imported


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    config.stash[PROVOKED] = sections(items)  # before slow tests are left out
    config.stash[COLLECTED] = {item.path.name for item in items}
    _thin_out(items)


def _thin_out(items):
    """Leave every seventh case of a grid among the fast tests: few grids have a side of seven, so that all vary."""
    cases = Counter()
    for item in items:
        if item.get_closest_marker("grid"):
            name = item.nodeid.partition("[")[0]
            if cases[name] % 7:
                item.add_marker("slow")
            cases[name] += 1


@pytest.fixture(autouse=True)
def secrets_of_this_test_alone():
    """No word is hidden in messages any more that was a secret to a test before this one, itself or by its key."""
    remembered = (redaction._known, redaction._keys)
    before = [{*known} for known in remembered]
    yield
    for known, own in zip(remembered, before, strict=True):
        known.clear()
        known.update(own)
