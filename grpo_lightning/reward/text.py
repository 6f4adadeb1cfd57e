"""Reading the model's text. It is untrusted: only `str.find` and its kin, whose time grows linearly with the text."""


def tag(text: str, name: str) -> str | None:
    """The stripped content of the last complete ``<name>…</name>``, or None if there is none.

    Of nested tags it is the innermost, so the content holds neither tag.

    Args:
        text: What the model wrote.
        name: The tag without brackets.
    """
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
    if answer is not None:
        return answer
    kept, position = [], 0
    while position >= 0:
        start = completion.find("<think>", position)
        kept.append(completion[position:start] if start >= 0 else completion[position:])
        end = completion.find("</think>", start) if start >= 0 else -1
        position = end + len("</think>") if end >= 0 else -1
    return "".join(kept).rpartition("</think>")[2].strip()
