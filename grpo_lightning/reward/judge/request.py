"""What a judge is asked: the message with a completion in it, which cannot pass for anything else."""

import re
from collections.abc import Mapping, Sequence
from string import Formatter
from typing import Any

FENCED = ("prompt", "completion")
"""Fields of a template whose texts stand between fences."""
_OWN = ("rubric", "fence", "lowest", "highest")
"""Fields that are no column."""
_SHORTEST_FENCE = 8
_TURN = re.compile(
    r"<(?=[|\uff5c]|\w{1,40}[|\uff5c]>|/?s>|(?:start|end)_of_turn>|/?(?:bos|eos|pad)>|</?SYS>>)|\[(?=/?[A-Z_]{3,}\])",
    re.IGNORECASE,
)
"""The first character of what servers take for the beginning or the end of a message."""


def columns(template: str) -> list[str]:
    """The fields of a template that columns fill; each field is a plain name in braces.

    Raises:
        ValueError: It has other braces, or no place for the completion.
    """
    try:
        parsed = [(name, spec, conversion) for _, name, spec, conversion in Formatter().parse(template)]
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"template: expected text with fields such as {{prompt}}, got {template!r:.80}: {error}"
        ) from None
    named = [name for name, _, _ in parsed if name is not None]
    if any(spec or conversion for _, spec, conversion in parsed) or not all(name.isidentifier() for name in named):
        raise ValueError(
            f"template: expected fields that are names in braces, and {{{{ and }}}} for braces, got {template!r:.80}"
        )
    if "completion" not in named or {"prompts", "completions", "completion_ids"} & {*named}:
        raise ValueError(f"template: expected a text with {{completion}} and names of columns, got {template!r:.80}")
    return [name for name in dict.fromkeys(named) if name not in (*FENCED, *_OWN)]


def message(template: str, texts: Mapping[str, Any], *, rubric: str, scale: Sequence[float]) -> str:
    """A template with its fields filled.

    Prompt and completion stand between two lines, the fence, that stand nowhere in any of the texts, however they are
    written: as many ~ as it takes. In them, what a server would read as the end of the message is broken up by a space.

    Args:
        template: With {completion}, and with {prompt}, {rubric}, {fence}, {lowest}, {highest} and columns if it likes.
        texts: Field -> a text, chat messages, or what a column holds.
        rubric: What the completion is judged by.
        scale: Lowest and highest score.
    """
    plain = {name: _text(value) for name, value in texts.items()}
    longest = max((len(run) for text in plain.values() for run in re.findall("~+", text)), default=0)
    fence = "~" * max(_SHORTEST_FENCE, longest + 1)
    own = {"rubric": rubric, "fence": fence, "lowest": f"{scale[0]:g}", "highest": f"{scale[1]:g}"}
    filled = {name: f"{fence}\n{text}\n{fence}" if name in FENCED else text for name, text in plain.items()}
    return template.format(**filled, **own)


def _text(value: Any) -> str:
    """A value as text that can be sent: of chat messages, who says what."""
    if isinstance(value, list | tuple) and value and all(isinstance(one, Mapping) for one in value):
        said = [f"{one.get('role', '')}: {one.get('content', '')}" for one in value]
        value = said[0].partition(": ")[2] if len(said) == 1 else "\n\n".join(said)
    text = str(value).encode("utf-8", errors="replace").decode()
    return _TURN.sub(lambda found: f"{found[0]} ", text)
