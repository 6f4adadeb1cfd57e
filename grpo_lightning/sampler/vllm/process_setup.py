"""What vLLM expects of the process that it is built in, and what it must leave as it was."""

import logging
import os
import random
import socket
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
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
CPU_BATCHED_TOKENS = 4096
"""Of prompts in one forward pass on a CPU, at least."""


@contextmanager
def outside_training(device: torch.device) -> Iterator[None]:
    """Inside, no autocast rounds tensors, and no inference mode marks them.

    A validation runs in inference mode, and weights that are made in it could not be written to afterwards.
    """
    with torch.inference_mode(False), torch.no_grad(), torch.autocast(device.type, enabled=False):
        yield


def cpu_arguments(folder: str, max_model_len: int | None) -> dict[str, Any]:
    """Arguments with which an engine on a CPU takes every prompt in one piece.

    Of a part of a prompt it would undo the random numbers, which a CPU's generators do not allow.

    Args:
        folder: With the model's configuration.
        max_model_len: Tokens that a request may have; None: the model's context.

    Raises:
        ValueError: vLLM has no kernels for the size of the model's attention heads, which it does not say itself.
    """
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    config = AutoConfig.from_pretrained(folder).get_text_config()
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if size not in (supported := CPUAttentionBackend.get_supported_head_sizes()):
        raise ValueError(
            f"sampler=vllm: vLLM has no kernels for attention heads of size {size} on a CPU, only of "
            f"{', '.join(map(str, supported))}"
        )
    longest = max_model_len or config.max_position_embeddings
    return {"enable_chunked_prefill": False, "max_num_batched_tokens": max(CPU_BATCHED_TOKENS, longest)}


@contextmanager
def preserved_state() -> Iterator[None]:
    """Inside, a library may seed every random generator and set threads: afterwards all is as before.

    Its warnings of its own dependencies' future are not shown.
    """
    state, numpy_state, set_num_threads = random.getstate(), np.random.get_state(), torch.set_num_threads
    with torch.random.fork_rng(), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        try:
            yield
        finally:
            random.setstate(state)
            np.random.set_state(numpy_state)
            torch.set_num_threads = set_num_threads  # vLLM replaces it on CPUs


@contextmanager
def launcher_environment(ranks: Ranks) -> Iterator[None]:
    """Inside, the environment names this process as a launcher of several would."""
    local = os.environ.get("LOCAL_RANK", os.environ.get("SLURM_LOCALID", "0"))
    variables = ENVIRONMENT | {"RANK": str(ranks.rank), "WORLD_SIZE": str(ranks.size), "LOCAL_RANK": local}
    if not dist.is_initialized():
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        variables |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    # At its own level it logs a hundred lines about what it chooses.
    variables.setdefault("VLLM_LOGGING_LEVEL", os.environ.get("VLLM_LOGGING_LEVEL", "ERROR"))
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextmanager
def loader_warnings() -> Iterator[list[str]]:
    """What vLLM's loader warns of inside: it goes on where weights are missing."""
    messages: list[str] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            messages.append(record.getMessage())

    listener = Listener(logging.WARNING)
    names = ("inplace", "layerwise")
    loaders = [logging.getLogger(f"vllm.model_executor.model_loader.reload.{name}") for name in names]
    before = [(loader.level, loader.propagate) for loader in loaders]
    for loader in loaders:
        loader.addHandler(listener)
        loader.setLevel(logging.WARNING)
        loader.propagate = False
    try:
        yield messages
    finally:
        for loader, (level, propagate) in zip(loaders, before, strict=True):
            loader.removeHandler(listener)
            loader.setLevel(level)
            loader.propagate = propagate
