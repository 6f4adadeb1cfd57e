"""What vLLM expects of the process that it is built in, and what it must leave as it was."""

import logging
import os
import random
import socket
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from transformers import AutoConfig

from grpo_lightning.distributed.ranks import Ranks

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # no process of its own, which could outlive this one
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
}
LOGGING = "VLLM_LOGGING_LEVEL"
TOKENS_AT_ONCE = 4096
"""Of prompts in one forward pass on a CPU, at least."""


@contextmanager
def plain_arithmetic(device: torch.device) -> Iterator[None]:
    """Inside, tensors are what they are outside of training: no autocast rounds them, and no mode marks them.

    A validation runs in inference mode, and weights that are made in it could not be written to afterwards.
    """
    with torch.inference_mode(False), torch.no_grad(), torch.autocast(device.type, enabled=False):
        yield


def for_cpu(folder: str, max_model_len: int | None) -> dict[str, Any]:
    """Arguments with which an engine on a CPU takes every prompt at once.

    Of a part of a prompt it would undo the random numbers, which a CPU's generators do not allow.

    Args:
        folder: With the model's configuration.
        max_model_len: Tokens that a request may have; None: the model's context.
    """
    longest = max_model_len or AutoConfig.from_pretrained(folder).get_text_config().max_position_embeddings
    return {"enable_chunked_prefill": False, "max_num_batched_tokens": max(TOKENS_AT_ONCE, longest)}


def check_heads(folder: str) -> None:
    """Refuse a model of which vLLM's kernels for CPUs cannot compute the attention: they do not say so themselves.

    Args:
        folder: With the model's configuration.

    Raises:
        ValueError: Its heads have another size.
    """
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    config = AutoConfig.from_pretrained(folder).get_text_config()
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if size not in (allowed := CPUAttentionBackend.get_supported_head_sizes()):
        raise ValueError(
            f"sampler=vllm: the model's attention heads have {size} numbers each; allowed on a CPU are "
            f"{', '.join(map(str, allowed))}"
        )


@contextmanager
def undisturbed() -> Iterator[None]:
    """Inside, a library may seed every random generator and set threads as it likes: afterwards all is as before.

    What it says of its own dependencies' future is not said.
    """
    own, numbers, threads = random.getstate(), np.random.get_state(), torch.set_num_threads
    with torch.random.fork_rng(), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        try:
            yield
        finally:
            random.setstate(own)
            np.random.set_state(numbers)
            torch.set_num_threads = threads


@contextmanager
def launched(ranks: Ranks) -> Iterator[None]:
    """Inside, the environment names this process as a launcher of several would.

    Args:
        ranks: The processes of the run.
    """
    told = dict(ENVIRONMENT)
    local = os.environ.get("LOCAL_RANK", os.environ.get("SLURM_LOCALID", "0"))
    told |= {"RANK": str(ranks.rank), "WORLD_SIZE": str(ranks.size), "LOCAL_RANK": local}
    if not dist.is_initialized():
        told |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
    if LOGGING not in os.environ:
        told[LOGGING] = "ERROR"  # it says a hundred lines about what it chooses
    with _environment(told):
        yield


@contextmanager
def complaints() -> Iterator[list[str]]:
    """What vLLM's loader warns of inside: it goes on where weights are missing."""
    told: list[str] = []

    class _Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            told.append(record.getMessage())

    listener = _Listener(logging.WARNING)
    loaders = [
        logging.getLogger(f"vllm.model_executor.model_loader.reload.{name}") for name in ("inplace", "layerwise")
    ]
    before = [(loader.level, loader.propagate) for loader in loaders]
    for loader in loaders:
        loader.addHandler(listener)
        loader.setLevel(logging.WARNING)
        loader.propagate = False
    try:
        yield told
    finally:
        for loader, (level, propagate) in zip(loaders, before, strict=True):
            loader.removeHandler(listener)
            loader.setLevel(level)
            loader.propagate = propagate


@contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    with ExitStack() as stack:
        for name, value in values.items():
            stack.callback(_put, name, os.environ.get(name))
            os.environ[name] = value
        yield


def _put(name: str, value: str | None) -> None:
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port
