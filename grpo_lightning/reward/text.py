"""Reading the model's text. It is untrusted: only `str.find` and its kin, whose time grows linearly with the text."""

from collections.abc import Collection

FENCE = "```"
"""Begins and ends a block of code."""


def tag(text: str, name: str) -> str | None:
    """The stripped content of the last complete ``<name>…</name>``, of nested ones the innermost, or None."""
    opening, closing = f"<{name}>", f"</{name}>"
    start = text.rfind(opening, 0, max(text.rfind(closing), 0))
    if start < 0:
        return None
    start += len(opening)
    return text[start : text.find(closing, start)].strip()


def answer_text(completion: str) -> str:
    """What the model answers: the last complete ``<answer>…</answer>``, else all but its thoughts; stripped.

    Thoughts are ``<think>…</think>``, and also a part whose ``<think>`` stands in the prompt or whose ``</think>`` was
    cut off by the length limit: a number that the model was still thinking about is no answer.
    """
    answer = tag(completion, "answer")
    return without_thoughts(completion) if answer is None else answer


def without_thoughts(text: str) -> str:
    """All but the thoughts of a text, stripped, see `answer_text`."""
    kept, position = [], 0
    while position >= 0:
        start = text.find("<think>", position)
        kept.append(text[position:start] if start >= 0 else text[position:])
        end = text.find("</think>", start) if start >= 0 else -1
        position = end + len("</think>") if end >= 0 else -1
    return "".join(kept).rpartition("</think>")[2].strip()


def fenced_blocks(text: str, languages: Collection[str]) -> list[str]:
    """The contents of the complete code blocks in some languages: "" is that of a fence without a language."""
    blocks: list[str] = []
    lines: list[str] | None = None
    is_wanted = False
    for line in text.split("\n"):
        mark = line.strip()
        if lines is None and mark.startswith(FENCE):
            lines, is_wanted = [], mark[len(FENCE) :].strip().lower() in languages
        elif lines is not None and mark == FENCE:
            blocks += ["\n".join(lines) + "\n"] if is_wanted else []
            lines = None
        elif lines is not None:
            lines.append(line)
    return blocks
