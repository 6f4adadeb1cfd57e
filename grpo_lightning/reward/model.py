"""Reward model: a sequence-classification model, or a module of one's own, whose logit is the score."""

import copy
import logging
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NoReturn
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification, AutoTokenizer, BitsAndBytesConfig
from transformers.utils.logging import disable_progress_bar

from grpo_lightning.config.rules import choice, local_or_hub, problems
from grpo_lightning.policy.loading import read_model, readable_errors
from grpo_lightning.transformer.attention import use_grouped

if TYPE_CHECKING:
    from grpo_lightning.types import Prompt

log = logging.getLogger(__name__)

_KEY = "reward.model.function"
_RULES = {
    "dtype": choice("float32", "bfloat16", "float16"),
    "quantization": choice("8bit", "4bit", null=True),
}
_HEADS = ["score", "classifier", "classification_head"]
"""What transformers calls the layers that give the logits; by itself it spares them only if they have no bias."""


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
        quantization: 8bit or 4bit to load the weights so, by bitsandbytes and accelerate; null: as they are.
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
        quantization: str | None,
        label: int,
        trust_remote_code: bool,
    ) -> None:
        if wrong := problems(_RULES, {"dtype": dtype, "quantization": quantization}, prefix=f"{_KEY}."):
            raise ValueError("; ".join(wrong))
        self._set_limits(batch_tokens, max_length, label)
        self.path = local_or_hub(path, f"{_KEY}.path")
        self.dtype, self.quantization, self.trust_remote_code = dtype, quantization, trust_remote_code
        rank_device = f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if torch.cuda.is_available() else "cpu"
        self._device = torch.device(device or rank_device)
        key = (path, dtype, str(self._device), quantization, trust_remote_code)
        self._weights = _shared.setdefault(key, _Weights())

    def _set_limits(self, batch_tokens: int, max_length: int, label: int) -> None:
        self.batch_tokens, self.max_length, self.label = batch_tokens, max_length, label
        self._takes_padding, self._is_warned = True, False

    @staticmethod
    def of(
        network: nn.Module, tokenizer: Any, *, batch_tokens: int = 16384, max_length: int | None = None, label: int = 0
    ) -> "RewardModel":
        """A reward model of what a program has: ``compose(reward={"model": RewardModel.of(network, tokenizer)})``.

        Nothing is loaded, copied or moved. The network is put into evaluation mode whenever it scores.

        Args:
            network: A sequence-classification model of transformers; or any module whose ``network(ids [B, N])`` is one
                value per row, [B] or [B, 1], or several labels, [B, L], which gets rows of equal length together.
            tokenizer: Of transformers, or any object with ``encode(text) -> ids``.
            batch_tokens: As in the class.
            max_length: As in the class; None: the context that the network's configuration names, without one all.
            label: As in the class.
        """
        return _LiveRewardModel(network, tokenizer, batch_tokens=batch_tokens, max_length=max_length, label=label)

    @property
    def device(self) -> torch.device:
        """Where the weights lie, or will once they are loaded."""
        return self._device

    @property
    def network(self) -> Any:
        """The model, in evaluation mode: loaded now if it was not."""
        return self._load()[0]

    def __call__(self, prompts: "Sequence[Prompt]", completions: Sequence[str], **_: Any) -> list[float]:
        """[B] the logit of every completion, for [B] texts or chat messages as prompts."""
        rows = self.encode(prompts, completions)
        scores = [0.0] * len(rows)
        with self.isolated(), torch.no_grad():
            for index in self.batches(rows):
                for row, value in zip(index, self.logits([rows[row] for row in index]).tolist(), strict=True):
                    scores[row] = value
        return scores

    def encode(self, prompts: "Sequence[Prompt]", completions: Sequence[str]) -> list[list[int]]:
        """Token ids of every text that the model reads, cut to their last ``max_length``."""
        tokenizer, limit = self._load()[1], self.max_length
        texts = [_text(tokenizer, prompt, text) for prompt, text in zip(prompts, completions, strict=True)]
        rows = _encoded(tokenizer, texts) if texts else []
        if num_long := sum(len(row) > limit for row in rows):
            if callable(tokenizer):  # then the special tokens at its ends stay
                rows = _encoded(tokenizer, texts, truncation=True, max_length=limit)
            else:
                rows = [row[-limit:] for row in rows]
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
            batch = order[: max(1, self.batch_tokens // longest)]
            if not self._takes_padding:
                batch = [row for row in batch if len(rows[row]) == longest]
            yield batch
            order = order[len(batch) :]

    def logits(self, rows: Sequence[Sequence[int]]) -> Tensor:
        """[B] in float32, with a gradient where one is recorded, from the token ids of some texts."""
        network = self.network
        width, pad = max(map(len, rows)), network.config.get_text_config().pad_token_id
        # On the right, where neither absolute positions nor causal attention notice it.
        ids = torch.tensor([[*row, *[pad] * (width - len(row))] for row in rows], device=self.device)  # [B, N]
        mask = torch.tensor([[t < len(row) for t in range(width)] for row in rows], device=self.device)
        return self._labelled(network(input_ids=ids, attention_mask=mask.long()).logits)

    def _labelled(self, logits: Tensor) -> Tensor:
        """[B, L] values of several labels -> [B] float32 of this object's."""
        if not self.label < logits.shape[-1]:
            raise _invalid("label", self.label, f"0 to {logits.shape[-1] - 1}, the logits of {self.path!r}")
        return logits[:, self.label].float()

    def reset(self) -> None:
        """Forget the weights: the next call loads those of ``path``."""
        self._weights.loaded = None

    @contextmanager
    def isolated(self) -> Iterator[None]:
        """Outside inference mode, whose tensors could not be trained later, and outside the run's autocast."""
        with torch.inference_mode(False), torch.autocast(self.device.type, enabled=False):
            yield

    def _load(self) -> tuple[Any, Any]:
        if self._weights.loaded is None:
            with self.isolated():
                self._weights.loaded = self._read()
        context = _context(self._weights.loaded[0])
        if self.max_length > context:  # each object has a length of its own
            raise _invalid("max_length", self.max_length, f"at most {context}, the context of {self.path!r}")
        return self._weights.loaded

    def _read(self) -> tuple[Any, Any]:
        disable_progress_bar()
        dtype, trusted = getattr(torch, self.dtype), {"trust_remote_code": self.trust_remote_code}
        options: dict[str, Any] = {}
        if self.quantization:
            options["quantization_config"] = BitsAndBytesConfig(
                load_in_8bit=self.quantization == "8bit",
                load_in_4bit=self.quantization == "4bit",
                bnb_4bit_compute_dtype=dtype,
                llm_int8_skip_modules=_HEADS,
            )
            options["device_map"] = {"": self.device}
        with readable_errors(f"{_KEY}.path", self.path):
            tokenizer = AutoTokenizer.from_pretrained(self.path, truncation_side="left", **trusted)
            network = read_model(AutoModelForSequenceClassification, self.path, dtype=dtype, **trusted, **options)
        _prepare(network, tokenizer)
        use_grouped(network)
        return (network if self.quantization else network.to(self.device)).eval(), tokenizer

    def __reduce__(self) -> NoReturn:
        raise TypeError("a reward model scores in the trainer's process: set reward.model.timeout=null")


class _Weights:
    """A model and its tokenizer, once they are loaded."""

    loaded: tuple[Any, Any] | None = None


_shared: WeakValueDictionary[tuple[Any, ...], _Weights] = WeakValueDictionary()


class _LiveRewardModel(RewardModel):
    """A reward model around a network that a program has, see `RewardModel.of`."""

    def __init__(
        self, network: nn.Module, tokenizer: Any, *, batch_tokens: int, max_length: int | None, label: int
    ) -> None:
        is_transformers = hasattr(getattr(network, "config", None), "get_text_config")
        context = _context(network) if is_transformers else sys.maxsize
        if max_length is not None and max_length > context:
            raise _invalid("max_length", max_length, f"at most {context}, the context of {type(network).__name__}")
        self._set_limits(batch_tokens, context if max_length is None else max_length, label)
        self._takes_padding = is_transformers  # their own mask it
        if is_transformers:
            _prepare(network, tokenizer)
        if hasattr(tokenizer, "truncation_side"):
            tokenizer = copy.deepcopy(tokenizer)  # whoever has the other may cut as before
            tokenizer.truncation_side = "left"
        self._network, self._tokenizer = network, tokenizer
        self.path, self.quantization = type(network).__name__, None
        others = {weights.dtype for weights in network.parameters()} - {torch.float32}
        self.dtype = str(min(others, key=str, default=torch.float32)).removeprefix("torch.")

    @property
    def device(self) -> torch.device:
        weights = next(self._network.parameters(), None)
        return torch.device("cpu") if weights is None else weights.device

    def _load(self) -> tuple[Any, Any]:
        return self._network.eval(), self._tokenizer

    def logits(self, rows: Sequence[Sequence[int]]) -> Tensor:
        if self._takes_padding:
            return super().logits(rows)
        output = self.network(torch.tensor(rows, device=self.device))
        values: Tensor = getattr(output, "logits", output)
        if not 1 <= values.dim() <= 2 or len(values) != len(rows):
            shape, size = tuple(values.shape), len(rows)
            raise ValueError(f"{self.path} gave {shape}: expected ({size},) or ({size}, labels)")
        return self._labelled(values.reshape(len(rows), -1))

    def reset(self) -> None:
        """Nothing: the program's network stays as it is."""


def _invalid(setting: str, value: Any, valid: str) -> ValueError:
    return ValueError(f"{_KEY}.{setting}={value}: expected {valid}")


def _encoded(tokenizer: Any, texts: Sequence[str], **cut: Any) -> list[list[int]]:
    if not callable(tokenizer):
        return [[int(token) for token in tokenizer.encode(text)] for text in texts]
    templated = bool(getattr(tokenizer, "chat_template", None))  # a template brings its own special tokens
    ids: list[list[int]] = tokenizer(texts, add_special_tokens=not templated, verbose=False, **cut)["input_ids"]
    return ids


def _text(tokenizer: Any, prompt: "Prompt", completion: str) -> str:
    if not isinstance(prompt, str) and not isinstance(prompt[0], Mapping):
        prompt = tokenizer.decode(prompt)
    messages: list[Any] = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [*prompt]
    if not getattr(tokenizer, "chat_template", None):
        return "\n\n".join(message["content"] for message in messages) + completion
    conversation = [*copy.deepcopy(messages), {"role": "assistant", "content": completion}]  # a template may change it
    text: str = tokenizer.apply_chat_template(conversation, tokenize=False)
    return text


def _prepare(network: Any, tokenizer: Any) -> None:
    """Name a padding token where a model of transformers needs one, and keep no cache."""
    config = network.config.get_text_config()
    # Models that judge by the last token find it by this id, so the model's own comes first. A text can end with
    # its end-of-sequence token, and is taken to end before it where that is the only one left to pad with.
    ids = (config.pad_token_id, *(getattr(tokenizer, f"{n}_token_id", None) for n in ("pad", "unk", "bos", "eos")))
    network.config.pad_token_id = config.pad_token_id = next((i for i in ids if i is not None and i >= 0), 0)
    network.config.use_cache = config.use_cache = False


def _context(network: Any) -> int:
    """Most tokens that a model of transformers reads, if it says."""
    return getattr(network.config.get_text_config(), "max_position_embeddings", None) or sys.maxsize
