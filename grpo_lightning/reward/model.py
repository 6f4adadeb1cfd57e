"""Reward model: a sequence-classification model whose logit is the score."""

import copy
import logging
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NoReturn
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from transformers import AutoModelForSequenceClassification, AutoTokenizer
from transformers.utils.logging import disable_progress_bar

from grpo_lightning.config.rules import choice, local_or_hub
from grpo_lightning.policy.loading import read_model, readable_errors
from grpo_lightning.transformer.attention import use_grouped

if TYPE_CHECKING:
    from grpo_lightning.types import Prompt

log = logging.getLogger(__name__)

_KEY = "reward.model.function"


class RewardModel:
    """Scores a completion by one logit of a sequence-classification model, as reward models are published.

    The model reads the messages and the completion by its own chat template; without a template, the prompt's text and
    the completion, one after the other. Weights are loaded at the first call; objects with the same settings of the
    weights, such as those of rollouts and of validation, share one copy.

    Args:
        path: Hub name or directory.
        dtype: Of the weights: float32, bfloat16 or float16; the run's precision has no influence.
        device: Where they lie, such as cuda:1; null: this rank's GPU, the CPU where there is none.
        batch_tokens: Most tokens, padding included, in one forward pass: memory, never results.
        max_length: Tokens that the model reads; of a longer text the last ones.
        label: Index of the logit.
        trust_remote_code: Whether code that comes with the weights may run.

    Raises:
        ValueError: A setting is out of range; at the first call, there is no such model, it has no head for
            classification, or its head or context is smaller than ``label`` or ``max_length``.
    """

    def __init__(
        self,
        *,
        path: str,
        dtype: str,
        device: str | None,
        batch_tokens: int,
        max_length: int,
        label: int,
        trust_remote_code: bool,
    ) -> None:
        if wrong := choice("float32", "bfloat16", "float16").problem(f"{_KEY}.dtype", dtype):
            raise ValueError(wrong)
        self.path, self.dtype, self.trust_remote_code = local_or_hub(path, f"{_KEY}.path"), dtype, trust_remote_code
        self.batch_tokens, self.max_length, self.label, self._is_warned = batch_tokens, max_length, label, False
        rank_device = f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if torch.cuda.is_available() else "cpu"
        self.device = torch.device(device or rank_device)
        key = (path, dtype, str(self.device), trust_remote_code)
        self._weights = _shared.setdefault(key, _Weights())

    @property
    def network(self) -> Any:
        """The model in evaluation mode, loaded on first use."""
        return self._load()[0]

    def __call__(self, prompts: "Sequence[Prompt]", completions: Sequence[str], **_: Any) -> list[float]:
        """[B] the logit of every completion, for [B] texts or chat messages as prompts."""
        rows = self.encode(prompts, completions)
        scores = [0.0] * len(rows)
        with self.without_autocast(), torch.no_grad():
            for index in self.batches(rows):
                for row, value in zip(index, self.logits([rows[row] for row in index]).tolist(), strict=True):
                    scores[row] = value
        return scores

    def encode(self, prompts: "Sequence[Prompt]", completions: Sequence[str]) -> list[list[int]]:
        """Token ids of every text that the model reads, cut to their last ``max_length``."""
        tokenizer, limit = self._load()[1], self.max_length
        texts = [_text(tokenizer, prompt, text) for prompt, text in zip(prompts, completions, strict=True)]
        if not texts:
            return []
        templated = bool(getattr(tokenizer, "chat_template", None))  # a template brings its own special tokens
        options = {"add_special_tokens": not templated, "verbose": False}
        rows: list[list[int]] = tokenizer(texts, **options)["input_ids"]
        if num_long := sum(len(row) > limit for row in rows):
            rows = tokenizer(texts, truncation=True, max_length=limit, **options)["input_ids"]
            if not self._is_warned:
                message = "%d of %d texts are longer than %s.max_length=%d tokens: their end is read (logged once)"
                log.warning(message, num_long, len(rows), _KEY, limit)
            self._is_warned = True
        if not all(rows):
            raise ValueError(f"a prompt and its completion have no tokens: {texts[rows.index([])]!r}")
        return rows

    def batches(self, rows: Sequence[Sequence[int]]) -> Iterator[list[int]]:
        """Indices of ``rows`` that go through the model together, longest first; a row above the budget goes alone."""
        order = sorted(range(len(rows)), key=lambda row: -len(rows[row]))
        while order:
            longest = len(rows[order[0]])
            size = max(1, self.batch_tokens // longest)
            yield order[:size]
            order = order[size:]

    def logits(self, rows: Sequence[Sequence[int]]) -> Tensor:
        """[B] in float32, with a gradient where one is recorded, from the token ids of some texts."""
        network, width = self.network, max(map(len, rows))
        pad = network.config.get_text_config().pad_token_id
        # On the right, where neither absolute positions nor causal attention notice it.
        ids = torch.tensor([[*row, *[pad] * (width - len(row))] for row in rows], device=self.device)  # [B, N]
        mask = torch.tensor([[t < len(row) for t in range(width)] for row in rows], device=self.device)
        logits: Tensor = network(input_ids=ids, attention_mask=mask.long()).logits  # [B, L]
        if not self.label < logits.shape[-1]:
            largest = logits.shape[-1] - 1
            raise ValueError(f"{_KEY}.label={self.label}: expected 0 to {largest}, the logits of {self.path}")
        return logits[:, self.label].float()

    def reset(self) -> None:
        """Drop the weights: the next call loads those of ``path`` again."""
        self._weights.loaded = None

    @contextmanager
    def without_autocast(self) -> Iterator[None]:
        """Context without autocast and without inference mode, whose tensors could not be trained later."""
        with torch.inference_mode(False), torch.autocast(self.device.type, enabled=False):
            yield

    def _load(self) -> tuple[Any, Any]:
        if self._weights.loaded is None:
            with self.without_autocast():
                self._weights.loaded = self._read()
        network, tokenizer = self._weights.loaded
        context = getattr(network.config.get_text_config(), "max_position_embeddings", None) or sys.maxsize
        if self.max_length > context:  # each object has a length of its own
            raise ValueError(f"{_KEY}.max_length={self.max_length}: expected at most {context}, the model's context")
        return network, tokenizer

    def _read(self) -> tuple[Any, Any]:
        disable_progress_bar()
        trusted = {"trust_remote_code": self.trust_remote_code}
        with readable_errors(f"{_KEY}.path", self.path):
            tokenizer = AutoTokenizer.from_pretrained(self.path, truncation_side="left", **trusted)
            dtype = getattr(torch, self.dtype)
            network = read_model(AutoModelForSequenceClassification, self.path, dtype=dtype, **trusted)
        config = network.config.get_text_config()
        # Models that judge by the last token find it by this id, so the model's own comes first. A text can end with
        # its end-of-sequence token, and is taken to end before it where that is the only one left to pad with.
        ids = (config.pad_token_id, *(getattr(tokenizer, f"{n}_token_id", None) for n in ("pad", "unk", "bos", "eos")))
        network.config.pad_token_id = config.pad_token_id = next((i for i in ids if i is not None and i >= 0), 0)
        network.config.use_cache = config.use_cache = False
        use_grouped(network)
        return network.to(self.device).eval(), tokenizer

    def __reduce__(self) -> NoReturn:
        raise TypeError("a reward model scores in the trainer's process: set reward.model.timeout=null")


class _Weights:
    """A model and its tokenizer, once they are loaded."""

    loaded: tuple[Any, Any] | None = None


_shared: WeakValueDictionary[tuple[Any, ...], _Weights] = WeakValueDictionary()


def _text(tokenizer: Any, prompt: "Prompt", completion: str) -> str:
    if not isinstance(prompt, str) and not isinstance(prompt[0], Mapping):
        prompt = tokenizer.decode(prompt)
    messages: list[Any] = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [*prompt]
    if not getattr(tokenizer, "chat_template", None):
        return "\n\n".join(message["content"] for message in messages) + completion
    conversation = [*copy.deepcopy(messages), {"role": "assistant", "content": completion}]  # a template may change it
    text: str = tokenizer.apply_chat_template(conversation, tokenize=False)
    return text
