"""A Hugging Face sequence-classification model, or a module of one's own, as a reward: its logit is the score."""

import copy
import logging
import math
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NoReturn
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification, AutoTokenizer, BitsAndBytesConfig
from transformers.utils.import_utils import is_accelerate_available
from transformers.utils.logging import disable_progress_bar

from grpo_lightning.config.rules import choice, integer, local_or_hub, problems
from grpo_lightning.policy.loading import read_model, readable_errors
from grpo_lightning.transformer.attention import use_grouped

if TYPE_CHECKING:
    from grpo_lightning.types import Prompt

log = logging.getLogger(__name__)

_RULES = {
    **dict.fromkeys(("batch_tokens", "max_length"), integer(1)),
    "label": integer(0),
    "dtype": choice("float32", "bfloat16", "float16"),
    "quantization": choice("8bit", "4bit", null=True),
}
_HEADS = ["score", "classifier", "classification_head"]
"""What transformers calls the layers that give the logits; by itself it spares them only if they have no bias."""


class RewardModel:
    """Scores a completion by one logit of a sequence-classification model, as reward models are published.

    What the model reads is its own chat template of the messages and the completion as the assistant's; without a
    template, the prompt's text and the completion, one after the other. Weights are loaded at the first call. Objects
    with the same settings of the weights (path, dtype, device, quantization, trust_remote_code) have one copy of them,
    trained or not, which goes with the last of these objects. `of` makes one of weights that a program has.

    Args:
        path: Hub name or directory.
        dtype: Of the weights: float32, bfloat16 or float16; the run's precision has no influence.
        device: Where they lie, such as cuda:1; null: this rank's GPU, the CPU where there is none.
        batch_tokens: Most tokens, padding included, in one forward pass: memory, never results.
        max_length: Tokens that the model reads; of a longer text the last ones.
        quantization: 8bit or 4bit (bitsandbytes) to load the weights so; null: as they are.
        label: Index of the logit.
        trust_remote_code: Whether code that comes with the weights may run.

    Raises:
        ValueError: On construction, if a setting is out of range or quantization lacks the package accelerate; at the
            first call, if there is no such model, it has no head for classification, or its head or context is smaller
            than ``label`` or ``max_length``.
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
        _check(dtype=dtype, quantization=quantization)
        if quantization and not is_accelerate_available():
            raise unsound("quantization", quantization, "null without the package accelerate")
        self._limit(batch_tokens, max_length, label)
        self._is_padded = True
        self.path = local_or_hub(path, "reward.model.function.path")
        self.dtype = dtype
        self._device = torch.device(device or _own_device())
        self.quantization = quantization
        self.trust_remote_code = trust_remote_code
        key = (path, dtype, str(self._device), quantization, trust_remote_code)
        self._holder = _holders.setdefault(key, _Holder())

    def _limit(self, batch_tokens: int, max_length: int, label: int) -> None:
        _check(batch_tokens=batch_tokens, max_length=max_length, label=label)
        self.batch_tokens = batch_tokens
        self.max_length = max_length
        self.label = label
        self._warned = False

    @staticmethod
    def of(
        network: nn.Module,
        tokenizer: Any,
        *,
        batch_tokens: int = 16384,
        max_length: int | None = None,
        label: int = 0,
    ) -> "RewardModel":
        """A reward model of what a program has: ``compose(reward={"model": RewardModel.of(network, tokenizer)})``.

        Nothing is loaded, copied or moved. The network is put into evaluation mode whenever it scores.

        Args:
            network: A sequence-classification model of transformers; or any module whose ``network(ids [B, N])`` is one
                value per row, [B] or [B, 1], or several labels, [B, L]. Such a module gets rows of equal length
                together and needs to know nothing of padding.
            tokenizer: Of transformers, or any object with ``encode(text) -> ids``.
            batch_tokens: As in the class, like the errors.
            max_length: As in the class; None: the context that the network's configuration names, without one all.
            label: As in the class.
        """
        return _Given(network, tokenizer, batch_tokens=batch_tokens, max_length=max_length, label=label)

    @property
    def device(self) -> torch.device:
        """Where the weights lie, or will once they are loaded."""
        return self._device

    def __call__(self, prompts: "Sequence[Prompt]", completions: Sequence[str], **_: Any) -> list[float]:
        """The logit of every completion.

        Args:
            prompts: [B] texts or chat messages.
            completions: [B]

        Returns:
            [B] any finite numbers.

        Raises:
            ValueError: A logit is not finite, or a text has no tokens; besides, see the class.
        """
        rows = self.encode(prompts, completions)
        scores = [0.0] * len(rows)
        with self.isolated(), torch.no_grad():
            for index in self.batches(rows):
                for row, value in zip(index, self.logits([rows[row] for row in index]).tolist(), strict=True):
                    if not math.isfinite(value):
                        raise ValueError(f"the reward model {self.path!r} gave {value} for row {row}")
                    scores[row] = value
        return scores

    @property
    def network(self) -> Any:
        """The model, in evaluation mode: loaded now if it was not."""
        return self._loaded[0]

    def encode(self, prompts: "Sequence[Prompt]", completions: Sequence[str]) -> list[list[int]]:
        """Token ids of every text that the model reads, cut to their last ``max_length``.

        Raises:
            ValueError: A text has no tokens.
        """
        tokenizer, most = self._loaded[1], self.max_length
        texts = [_text(tokenizer, prompt, text) for prompt, text in zip(prompts, completions, strict=True)]
        rows = _encoded(tokenizer, texts) if texts else []
        if long := sum(len(row) > most for row in rows):
            whole = callable(tokenizer)  # then the special tokens at its ends stay
            cut = {"truncation": True, "max_length": most}
            rows = _encoded(tokenizer, texts, **cut) if whole else [row[-most:] for row in rows]
        if long and not self._warned:
            log.warning(
                "%d of %d texts are longer than reward.model.function.max_length=%d tokens: the reward model reads "
                "their end; further ones are not reported",
                *(long, len(rows), most),
            )
            self._warned = True
        if not all(rows):
            raise ValueError(f"a prompt and its completion have no tokens: {texts[rows.index([])]!r}")
        return rows

    def batches(self, rows: Sequence[Sequence[int]]) -> Iterator[list[int]]:
        """Indices of ``rows`` that go through the model together, longest first; a row above the budget goes alone."""
        order = sorted(range(len(rows)), key=lambda row: -len(rows[row]))
        while order:
            longest = len(rows[order[0]])
            chosen = order[: max(1, self.batch_tokens // longest)]
            if not self._is_padded:
                chosen = [row for row in chosen if len(rows[row]) == longest]
            yield chosen
            order = order[len(chosen) :]

    def logits(self, rows: Sequence[Sequence[int]]) -> Tensor:
        """[B] in float32, with a gradient where one is recorded, from the token ids of some texts."""
        network = self.network
        width, pad = max(map(len, rows)), network.config.get_text_config().pad_token_id
        # On the right, where neither absolute positions nor causal attention notice it.
        ids = torch.tensor([[*row, *[pad] * (width - len(row))] for row in rows], device=self.device)
        mask = torch.tensor([[t < len(row) for t in range(width)] for row in rows], device=self.device)
        return self._labelled(network(input_ids=ids, attention_mask=mask.long()).logits)

    def _labelled(self, logits: Tensor) -> Tensor:
        """[B, L] values of several labels -> [B] float32 of this object's."""
        if not self.label < logits.shape[-1]:
            raise unsound("label", self.label, f"0 to {logits.shape[-1] - 1}, the logits of {self.path!r}")
        return logits[:, self.label].float()

    def reset(self) -> None:
        """Forget the weights, so that the next call loads those of ``path``."""
        self._holder.loaded = None

    def shares_weights(self, other: object) -> bool:
        """Whether training this one changes what ``other`` says."""
        return isinstance(other, RewardModel) and other._holder is self._holder

    @contextmanager
    def isolated(self) -> Iterator[None]:
        """Outside inference mode, whose tensors could not be trained later, and outside the run's autocast."""
        with torch.inference_mode(False), torch.autocast(self.device.type, enabled=False):
            yield

    @property
    def _loaded(self) -> tuple[Any, Any]:
        """The model and its tokenizer."""
        if self._holder.loaded is None:
            with self.isolated():
                self._holder.loaded = self._load()
        context = context_of(self._holder.loaded[0])
        if context is not None and context < self.max_length:  # each object has a length of its own
            raise unsound("max_length", self.max_length, f"at most {context}, the context of {self.path!r}")
        return self._holder.loaded

    def _load(self) -> tuple[Any, Any]:
        quantized = self.quantization and BitsAndBytesConfig(
            load_in_8bit=self.quantization == "8bit",
            load_in_4bit=self.quantization == "4bit",
            bnb_4bit_compute_dtype=getattr(torch, self.dtype),
            llm_int8_skip_modules=_HEADS,
        )
        disable_progress_bar()
        with readable_errors("reward.model.function.path", self.path):
            tokenizer = AutoTokenizer.from_pretrained(
                self.path, truncation_side="left", trust_remote_code=self.trust_remote_code
            )
            network = read_model(
                AutoModelForSequenceClassification,
                self.path,
                dtype=getattr(torch, self.dtype),
                trust_remote_code=self.trust_remote_code,
                **({"quantization_config": quantized, "device_map": {"": self.device}} if quantized else {}),
            )
        prepare(network, tokenizer)
        use_grouped(network)
        return (network if quantized else network.to(self.device)).eval(), tokenizer

    def __reduce__(self) -> NoReturn:
        raise TypeError("a reward model scores in the trainer's process: set reward.model.timeout=null")


class _Given(RewardModel):
    """A reward model around a network that a program has, see `RewardModel.of`."""

    def __init__(
        self, network: nn.Module, tokenizer: Any, *, batch_tokens: int, max_length: int | None, label: int
    ) -> None:
        self._is_padded = hasattr(getattr(network, "config", None), "get_text_config")  # transformers' own mask padding
        context = (context_of(network) if self._is_padded else None) or sys.maxsize
        if max_length is not None and max_length > context:
            raise unsound("max_length", max_length, f"at most {context}, the context of {type(network).__name__}")
        self._limit(batch_tokens, context if max_length is None else max_length, label)
        if self._is_padded:
            prepare(network, tokenizer)
        self._network, self._tokenizer = network, cutting_left(tokenizer)
        self.path = type(network).__name__
        others = {weights.dtype for weights in network.parameters()} - {torch.float32}
        self.dtype = str(min(others, key=str, default=torch.float32)).removeprefix("torch.")
        self.quantization = None
        self._holder = _Holder()

    @property
    def device(self) -> torch.device:
        weights = next(self._network.parameters(), None)
        return torch.device("cpu") if weights is None else weights.device

    @property
    def _loaded(self) -> tuple[Any, Any]:
        return self._network.eval(), self._tokenizer

    def logits(self, rows: Sequence[Sequence[int]]) -> Tensor:
        if self._is_padded:
            return super().logits(rows)
        output = self.network(torch.tensor(rows, device=self.device))
        values: Tensor = getattr(output, "logits", output)
        if values.dim() > 2 or values.numel() % len(rows) or (values.dim() and len(values) != len(rows)):
            raise ValueError(
                f"{self.path} gave {tuple(values.shape)} for token ids {(len(rows), len(rows[0]))}: allowed are "
                f"({len(rows)},) and ({len(rows)}, labels)"
            )
        return self._labelled(values.reshape(len(rows), -1))

    def reset(self) -> None:
        """Nothing: the program's network stays as it is."""

    def shares_weights(self, other: object) -> bool:
        return isinstance(other, _Given) and other._network is self._network


class _Holder:
    """The one copy of the weights that objects of equal settings use."""

    loaded: tuple[Any, Any] | None = None


_holders: WeakValueDictionary[tuple[Any, ...], _Holder] = WeakValueDictionary()


def _check(**settings: Any) -> None:
    if wrong := problems(_RULES, settings, prefix="reward.model.function."):
        raise ValueError("; ".join(wrong))


def _own_device() -> str:
    return f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if torch.cuda.is_available() else "cpu"


def _encoded(tokenizer: Any, texts: Sequence[str], **cut: Any) -> list[list[int]]:
    if not callable(tokenizer):
        return [[int(one) for one in tokenizer.encode(text)] for text in texts]
    templated = bool(getattr(tokenizer, "chat_template", None))  # a template brings its own special tokens
    ids: list[list[int]] = tokenizer(texts, add_special_tokens=not templated, verbose=False, **cut)["input_ids"]
    return ids


def _text(tokenizer: Any, prompt: "Prompt", completion: str) -> str:
    if not isinstance(prompt, str) and not isinstance(prompt[0], Mapping):
        prompt = tokenizer.decode(prompt)
    messages: list[Any] = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [*prompt]
    if not getattr(tokenizer, "chat_template", None):
        return "\n\n".join(message["content"] for message in messages) + completion
    said = [*copy.deepcopy(messages), {"role": "assistant", "content": completion}]  # a template may change them
    text: str = tokenizer.apply_chat_template(said, tokenize=False)
    return text


def prepare(network: Any, tokenizer: Any) -> None:
    """Name a padding token where a model of transformers needs one, and keep no cache."""
    config = network.config.get_text_config()
    # Models that judge by the last token find it by this id, so the model's own word goes first. A text can end with
    # its end-of-sequence token, and is taken to end before it where that is the only one left to pad with.
    ids = (config.pad_token_id, *(getattr(tokenizer, f"{n}_token_id", None) for n in ("pad", "unk", "bos", "eos")))
    network.config.pad_token_id = config.pad_token_id = next((i for i in ids if i is not None and i >= 0), 0)
    network.config.use_cache = config.use_cache = False


def cutting_left(tokenizer: Any) -> Any:
    """A tokenizer that keeps the end of long texts: a copy, as whoever has the other may cut as before."""
    if not hasattr(tokenizer, "truncation_side"):
        return tokenizer
    copied = copy.deepcopy(tokenizer)
    copied.truncation_side = "left"
    return copied


def context_of(network: Any) -> int | None:
    """Most tokens that a model of transformers reads, if it says."""
    return getattr(network.config.get_text_config(), "max_position_embeddings", None)


def unsound(setting: str, value: Any, allowed: str) -> ValueError:
    """The error of a setting in conf/reward/model.yaml."""
    return ValueError(f"reward.model.function.{setting}={value}: allowed is {allowed}")
