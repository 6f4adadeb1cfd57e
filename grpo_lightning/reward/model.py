"""A Hugging Face sequence-classification model as a reward: its logit is the score."""

import logging
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NoReturn
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from transformers import AutoModelForSequenceClassification, AutoTokenizer, BitsAndBytesConfig
from transformers.utils.import_utils import is_accelerate_available
from transformers.utils.logging import disable_progress_bar

if TYPE_CHECKING:
    from grpo_lightning.batch import Prompt

log = logging.getLogger(__name__)

_DTYPES = ("float32", "bfloat16", "float16")
_QUANTIZATIONS = (None, "8bit", "4bit")
_HEADS = ["score", "classifier", "classification_head"]
"""What transformers calls the layers that give the logits; by itself it spares them only if they have no bias."""


class RewardModel:
    """Scores a completion by one logit of a sequence-classification model, as reward models are published.

    What the model reads is its own chat template of the messages and the completion as the assistant's; without a
    template, the prompt's text and the completion, one after the other. Weights are loaded at the first call. Objects
    with the same settings of the weights (path, dtype, device, quantization, trust_remote_code) share one copy of them,
    trained or not, which goes with the last of these objects.

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
        if dtype not in _DTYPES:
            raise _unsound("dtype", dtype, "one of " + ", ".join(_DTYPES))
        if quantization not in _QUANTIZATIONS:
            raise _unsound("quantization", quantization, "8bit, 4bit or null")
        if quantization and not is_accelerate_available():
            raise _unsound("quantization", quantization, "null without the package accelerate")
        for name, value, least in (
            ("batch_tokens", batch_tokens, 1),
            ("max_length", max_length, 1),
            ("label", label, 0),
        ):
            if value < least:
                raise _unsound(name, value, f"an integer >= {least}")
        self.path = path
        self.dtype = dtype
        self.device = torch.device(device or _own_device())
        self.batch_tokens = batch_tokens
        self.max_length = max_length
        self.quantization = quantization
        self.label = label
        self.trust_remote_code = trust_remote_code
        key = (path, dtype, str(self.device), quantization, trust_remote_code)
        self._holder = _holders.setdefault(key, _Holder())
        self._warned = False

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
        """Token ids of every text that the model reads, cut to their last ``max_length``."""
        tokenizer = self._loaded[1]
        templated = bool(getattr(tokenizer, "chat_template", None))
        texts = [_text(tokenizer, prompt, text) for prompt, text in zip(prompts, completions, strict=True)]
        if not texts:
            return []

        def tokens(**cut: Any) -> list[list[int]]:  # a template brings its own special tokens
            ids: list[list[int]] = tokenizer(texts, add_special_tokens=not templated, verbose=False, **cut)["input_ids"]
            return ids

        rows = tokens()
        if long := sum(len(row) > self.max_length for row in rows):
            if not self._warned:
                log.warning(
                    "%d of %d texts are longer than reward.model.function.max_length=%d tokens: the reward model reads "
                    "their end; further ones are not reported",
                    *(long, len(rows), self.max_length),
                )
                self._warned = True
            rows = tokens(truncation=True, max_length=self.max_length)
        for row, text in zip(rows, texts, strict=True):
            if not row:
                raise ValueError(f"a prompt and its completion have no tokens: {text!r}")
        return rows

    def batches(self, rows: Sequence[Sequence[int]]) -> Iterator[list[int]]:
        """Indices of ``rows`` that go through the model together, longest first; a row above the budget goes alone."""
        order = sorted(range(len(rows)), key=lambda row: -len(rows[row]))
        while order:
            size = max(1, self.batch_tokens // len(rows[order[0]]))
            yield order[:size]
            order = order[size:]

    def logits(self, rows: Sequence[Sequence[int]]) -> Tensor:
        """[B] in float32, with a gradient where one is recorded, from the token ids of some texts."""
        network = self.network
        width, pad = max(map(len, rows)), network.config.get_text_config().pad_token_id
        # On the right, where neither absolute positions nor causal attention notice it.
        ids = torch.tensor([[*row, *[pad] * (width - len(row))] for row in rows], device=self.device)
        mask = torch.tensor([[t < len(row) for t in range(width)] for row in rows], device=self.device)
        logits: Tensor = network(input_ids=ids, attention_mask=mask.long()).logits
        if not self.label < logits.shape[-1]:
            raise _unsound("label", self.label, f"0 to {logits.shape[-1] - 1}, the logits of {self.path!r}")
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
        config = self._holder.loaded[0].config.get_text_config()
        context = getattr(config, "max_position_embeddings", None)
        if context is not None and context < self.max_length:  # each object has a length of its own
            raise _unsound("max_length", self.max_length, f"at most {context}, the context of {self.path!r}")
        return self._holder.loaded

    def _load(self) -> tuple[Any, Any]:
        quantized = self.quantization and BitsAndBytesConfig(
            load_in_8bit=self.quantization == "8bit",
            load_in_4bit=self.quantization == "4bit",
            bnb_4bit_compute_dtype=getattr(torch, self.dtype),
            llm_int8_skip_modules=_HEADS,
        )
        disable_progress_bar()
        try:
            tokenizer = AutoTokenizer.from_pretrained(
                self.path, truncation_side="left", trust_remote_code=self.trust_remote_code
            )
            network, found = AutoModelForSequenceClassification.from_pretrained(
                self.path,
                dtype=getattr(torch, self.dtype),
                trust_remote_code=self.trust_remote_code,
                output_loading_info=True,
                **({"quantization_config": quantized, "device_map": {"": self.device}} if quantized else {}),
            )
        except (OSError, ValueError) as error:
            raise ValueError(
                f"reward.model.function.path={self.path!r}: neither a directory with a sequence-classification model "
                f"in Hugging Face format nor one that the hub can be asked for from here: {error}"
            ) from error
        if missing := sorted(found["missing_keys"]):
            raise ValueError(
                f"reward.model.function.path={self.path!r}: no reward model, its weights lack {', '.join(missing[:3])}"
            )
        config = network.config.get_text_config()
        # Models that judge by the last token find it by this id, so the model's own word goes first. A text can end
        # with its end-of-sequence token, and is taken to end before it where that is the only one left to pad with.
        ids = (config.pad_token_id, *(getattr(tokenizer, f"{n}_token_id") for n in ("pad", "unk", "bos", "eos")))
        network.config.pad_token_id = config.pad_token_id = next((i for i in ids if i is not None and i >= 0), 0)
        network.config.use_cache = config.use_cache = False
        return (network if quantized else network.to(self.device)).eval(), tokenizer

    def __reduce__(self) -> NoReturn:
        raise TypeError("a reward model scores in the trainer's process: set reward.model.timeout=null")


class _Holder:
    """The weights that equal settings share."""

    loaded: tuple[Any, Any] | None = None


_holders: WeakValueDictionary[tuple[Any, ...], _Holder] = WeakValueDictionary()


def _text(tokenizer: Any, prompt: "Prompt", completion: str) -> str:
    messages: list[Mapping[str, Any]] = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [*prompt]
    if not getattr(tokenizer, "chat_template", None):
        return "\n\n".join(message["content"] for message in messages) + completion
    text: str = tokenizer.apply_chat_template([*messages, {"role": "assistant", "content": completion}], tokenize=False)
    return text


def _own_device() -> str:
    return f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if torch.cuda.is_available() else "cpu"


def _unsound(setting: str, value: Any, allowed: str) -> ValueError:
    return ValueError(f"reward.model.function.{setting}={value}: allowed is {allowed}")
