"""What a reward model reads: a prompt and its completion as token ids, and which of them go together. No torch here."""

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from grpo_lightning.batch import Prompt


def token_ids(
    tokenizer: Any, prompts: "Sequence[Prompt]", completions: Sequence[str], *, most: int
) -> tuple[list[list[int]], int]:
    """Token ids of every prompt with its completion, cut to their last ``most``.

    Args:
        tokenizer: Of transformers, which cuts on its left; an object with ``encode(text) -> ids``; or None, where texts
            are token ids, as numbers with spaces between.
        prompts: [B] texts, chat messages or token ids.
        completions: [B]
        most: Tokens of a row.

    Returns:
        [B] rows, and how many were cut.

    Raises:
        ValueError: A row has no tokens, or without a tokenizer a text is none.
    """
    if not completions:
        return [], 0
    if tokenizer is None:
        pairs = zip(prompts, completions, strict=True)
        rows = [[*(_numbers(p) if isinstance(p, str) else p), *_numbers(text)] for p, text in pairs]
        texts = [" ".join(map(str, row)) for row in rows]
    else:
        texts = [_text(tokenizer, prompt, text) for prompt, text in zip(prompts, completions, strict=True)]
        rows = _encoded(tokenizer, texts)
    if long := sum(len(row) > most for row in rows):
        whole = callable(tokenizer)  # then the special tokens at its ends stay
        rows = _encoded(tokenizer, texts, truncation=True, max_length=most) if whole else [row[-most:] for row in rows]
    for row, text in zip(rows, texts, strict=True):
        if not row:
            raise ValueError(f"a prompt and its completion have no tokens: {text!r}")
    return rows, long


def batches(rows: Sequence[Sequence[int]], tokens: int, *, padded: bool) -> Iterator[list[int]]:
    """Indices of ``rows`` that go through a model together, longest first; a row above the budget goes alone.

    Args:
        rows: Token ids.
        tokens: Most of them in one batch, padding included.
        padded: Whether rows may be padded; else all of a batch are of equal length.
    """
    order = sorted(range(len(rows)), key=lambda row: -len(rows[row]))
    while order:
        longest = len(rows[order[0]])
        chosen = order[: max(1, tokens // longest)]
        if not padded:
            chosen = [row for row in chosen if len(rows[row]) == longest]
        yield chosen
        order = order[len(chosen) :]


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


def _numbers(text: str) -> list[int]:
    try:
        return [int(word) for word in text.split()]
    except ValueError as error:
        raise ValueError(
            f"{text[:80]!r}: a reward model without a tokenizer reads token ids; allowed is RewardModel.of(network, "
            "tokenizer)"
        ) from error


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
