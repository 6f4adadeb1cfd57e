"""What the files of a tokenizer may say, which may be a stranger's: its tokens, and no other files."""

import json
import os
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from transformers import PreTrainedTokenizerBase, TokenizersBackend
from transformers.models.auto import tokenization_auto
from transformers.utils.import_utils import DummyObject

from grpo_lightning.allowed import ERRORS
from grpo_lightning.output.terminal import one_line
from grpo_lightning.transformer.directory import is_beside

_OF_PROGRAMS = "BertJapaneseTokenizer"
"""The one class of transformers that hands what stands in tokenizer_config.json to MeCab, Sudachi or Juman++."""
_OF_LOADING = ("cache_dir", "force_download", "proxies", "revision", "subfolder", "token")
"""Of where files are loaded from and where they are kept: no words of a tokenizer's files."""
_TOKENS = ("extra_special_tokens", "model_specific_special_tokens")


@contextmanager
def tokenizers_only() -> Iterator[None]:
    """Inside, what a model's files name as ``tokenizer_class`` is a tokenizer that hands their values to nobody.

    By itself transformers loads whatever class of its own has that name, such as a model, with the adapter beside it.
    And a tokenizer loads a further file (``gguf_file``) of the place, and into the place, that its files name, or takes
    a file from anywhere for its vocabulary, of which an export would hold a copy.
    """
    by_name, begin = tokenization_auto.tokenizer_class_from_name, TokenizersBackend.__init__
    from_files = PreTrainedTokenizerBase._from_pretrained

    def checked(class_name: str) -> type[Any] | None:
        found = by_name(class_name)
        if any(base.__name__ == _OF_PROGRAMS for base in getattr(found, "__mro__", ())):  # it has several names
            raise ValueError(
                f"tokenizer_class={class_name}: hands its settings to other programs, which load libraries"
            )
        # A dummy stands for a class of which a package is absent, and says so.
        if found is None or (isinstance(found, type) and issubclass(found, PreTrainedTokenizerBase)):
            return found
        if isinstance(found, DummyObject):
            return found
        raise ValueError(f"tokenizer_class={one_line(repr(class_name)[:80])}: allowed are tokenizers")

    def begun(tokenizer: TokenizersBackend, *args: Any, **settings: Any) -> None:
        if (file := settings.get("gguf_file")) is not None:
            raise ValueError(
                f"gguf_file={one_line(repr(file)[:80])} in its tokenizer's files; allowed are those of a tokenizer"
            )
        for name in _TOKENS:  # an export would hand other names on, as keys of its own
            if isinstance(tokens := settings.get(name), Mapping):
                settings[name] = {one: token for one, token in tokens.items() if one.endswith("_token")}
        begin(tokenizer, *args, **{name: value for name, value in settings.items() if name not in _OF_LOADING})

    def loaded(kind: type[Any], files: dict[str, Any], *args: Any, **options: Any) -> Any:
        _check_model(files.get("tokenizer_file"))
        _check_special_tokens(files.get("special_tokens_map_file"))
        _check_settings(files.get("tokenizer_config_file"), {*kind.vocab_files_names, *_TEXTS_OF_OTHERS})
        return from_files.__func__(kind, files, *args, **options)  # type: ignore[attr-defined]

    with (
        patch.object(PreTrainedTokenizerBase, "_from_pretrained", classmethod(loaded)),
        patch.object(tokenization_auto, "tokenizer_class_from_name", checked),
        patch.object(TokenizersBackend, "__init__", begun),
    ):
        yield


_TEXTS_OF_OTHERS = ("merges_file", "vocab_file", "vocab", "merges")
"""What some class takes for a file, whether its own files have that name or not."""


def _check_settings(file: str | None, files: Collection[str]) -> None:
    """Refuse a ``tokenizer_config.json`` that names a file elsewhere, whose lines would become the vocabulary.

    Args:
        file: Where it is, None for none.
        files: The keys whose texts name files.

    Raises:
        ValueError: It does, or gives arguments without names.
    """
    if file is None:
        return
    content: Any = json.loads(Path(file).read_text(encoding="utf-8"))
    if not isinstance(content, Mapping):
        return
    if content.get("init_inputs"):
        raise ValueError("tokenizer_config.json: init_inputs: allowed is []")
    if (errors := content.get("errors")) is not None and errors not in ERRORS:
        told = one_line(repr(errors)[:80])
        raise ValueError(f"tokenizer_config.json: errors={told}: allowed are {', '.join(ERRORS)}")
    chosen = content.get("fast_tokenizer_files") or []
    if not isinstance(chosen, list) or not all(map(is_beside, chosen)):
        told = one_line(repr(chosen)[:200])
        raise ValueError(f"tokenizer_config.json: fast_tokenizer_files={told}: allowed are names of files beside it")
    home = Path(file).absolute().parent
    for name in sorted({*files} & {*content}):
        named = content[name]
        is_file = isinstance(named, str) and os.path.lexists(named)
        if is_file and (Path(named).absolute().parent != home or os.path.islink(named)):
            raise ValueError(
                f"tokenizer_config.json: {one_line(name[:80])}={one_line(repr(named)[:200])} is a file in another "
                "place; allowed are those beside it"
            )


def _check_model(file: str | None) -> None:
    """Refuse a ``tokenizer.json`` with a text for its vocabulary or merges, which some classes take for a file."""
    if file is None or not Path(file).is_file():
        return
    content: Any = json.loads(Path(file).read_text(encoding="utf-8"))
    model = content.get("model") if isinstance(content, Mapping) else None
    for name in ("vocab", "merges"):
        if isinstance(model, Mapping) and isinstance(text := model.get(name), str):
            raise ValueError(
                f"tokenizer.json: model.{name}={one_line(repr(text)[:200])} names a file, of which an export would "
                "hold a copy; allowed are the tokens themselves"
            )


def _check_special_tokens(file: str | None) -> None:
    """Refuse a ``special_tokens_map.json`` that says more than tokens: transformers takes it for arguments."""
    if file is None:
        return
    content: Any = json.loads(Path(file).read_text(encoding="utf-8"))
    for name in content if isinstance(content, Mapping) else ():
        if not name.endswith(("_token", "_tokens")):
            raise ValueError(f"special_tokens_map.json: {one_line(repr(name)[:80])} is no token; allowed are tokens")
