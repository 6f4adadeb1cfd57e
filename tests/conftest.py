"""Small tensors: threads cost more than they save."""

import gc
import os

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # also of the processes that tests start

import torch

torch.set_num_threads(1)


def pytest_collection_finish():
    gc.freeze()  # a run collects garbage at its end, and need not look at all that was imported
