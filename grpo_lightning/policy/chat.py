"""What an environment or a tool says to the model, as token ids that go behind those that were sampled.

What was sampled is never tokenized again: a chat template is asked for a short conversation in which a mark stands for
the model's words, and what it puts behind the mark is the reply.
"""

import logging
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from grpo_lightning.config.rules import REPLY_ROLES, messages_problem
from grpo_lightning.types import Message

log = logging.getLogger(__name__)

# Words of a probe: letters only, so that no template trims, cuts or escapes them, and so that none is part of another.
_QUESTION, _MARK, _FURTHER, _THOUGHT = "qzquestionqz", "qzmarkqz", "qzfurtherqz", "qzthoughtqz"
_REPLY, _LATER = 'qzreply\n"1 < 2"\nqz', "qzlaterqz"
_THOUGHTS = re.compile(r"<think>.*?(?:</think>\s*|\Z)", re.DOTALL)
_MARKER = re.compile(r"<[^<>\s]+>|\[/?[A-Z_]+\]")
"""How templates tell who speaks where that is no special token: ``<|user|>``, ``</tool_response>``, ``[/INST]``."""
_REMEMBERED = 4096


@dataclass(frozen=True)
class _Frame:
    """What stands around the replies of a role."""

    head: str
    tail: str
    strange: tuple[str, ...]
    """What no reply may hold: the texts of special tokens, and those that tell who speaks."""
    special: tuple[int, ...]
    """The special token ids of head and tail, in their order."""


class ChatReplies:
    """Replies as token ids.

    Args:
        tokenizer: Of transformers, or anything that behaves like one.
        uses_chat_template: Whether prompts go through its chat template; else texts are joined by an empty line.
        template_kwargs: Further arguments of the chat template.
        system_prompt: What prompts begin with; it is not said again.
        end_ids: Token ids that end what the model says.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        uses_chat_template: bool,
        template_kwargs: Mapping[str, Any] | None = None,
        system_prompt: str | None = None,
        end_ids: Sequence[int] = (),
    ) -> None:
        self._tokenizer, self._uses_chat_template = tokenizer, uses_chat_template
        self._kwargs = dict(template_kwargs or {})
        self._opening = [_message("system", system_prompt)] if system_prompt else []
        self._end_ids = frozenset(end_ids)
        self._special_ids = special_ids(tokenizer) | self._end_ids
        self._frames: dict[str, _Frame] = {}
        self._known: dict[tuple[str, str], list[int]] = {}
        self._mark_ids: list[int] | None = None

    def ids(self, text: str, *, role: str = "user", after: int | None) -> list[int]:
        """The tokens of a reply and of what follows it, up to where the model goes on.

        Special tokens that the text names are taken out of it.

        Args:
            text: What is said.
            role: Who says it, user or tool.
            after: The model's last token; where it is the end of a turn that the template writes, it is not repeated.

        Raises:
            ValueError: The chat template does not show such replies, see `check`.
        """
        if (role, text) not in self._known:
            if len(self._known) >= _REMEMBERED:
                self._known.clear()
            self._known[role, text] = self._ids(text, role)
        ids = self._known[role, text]
        # What belongs to the reply is said, whatever the model has said before; and it cannot read nothing.
        is_known = len(ids) > 1 and ids[0] == after and self._encoded(self._frame(role).head)[:1] == [after]
        return ids[1:] if is_known else list(ids)

    def end_of_turn(self, role: str, *, otherwise: int) -> int:
        """The id with which the template ends what the model has said; ``otherwise`` where that is no end to sampling.

        Args:
            role: Of the reply that follows.
            otherwise: The end of sequence.
        """
        first = self.ids("", role=role, after=None)[:1]
        return first[0] if first and first[0] in self._end_ids else otherwise

    def check(self, role: str) -> None:
        """Look whether the chat template shows such replies, and leaves all that was said before as it was.

        Thoughts (``<think>``) of earlier turns are an exception: many templates drop them, while they stay in what is
        sampled and trained. That is said in a warning.

        Raises:
            ValueError: The role is unknown, or the template does not; names its fault.
        """
        self._frame(role)

    def _ids(self, text: str, role: str) -> list[int]:
        frame = self._frame(role)
        text = cleaned(text, frame.strange)
        ids = self._encoded(self._behind(text, role))
        if tuple(one for one in ids if one in self._special_ids) == frame.special:
            return ids
        # Special tokens that the tokenizer finds in another spelling, such as with other Unicode characters.
        own = [one for one in self._encoded(text) if one not in self._special_ids]
        return [*self._encoded(frame.head), *own, *self._encoded(frame.tail)]

    def _frame(self, role: str) -> _Frame:
        if role not in self._frames:
            self._frames[role] = self._probed(role)
        return self._frames[role]

    def _probed(self, role: str) -> _Frame:
        if role not in REPLY_ROLES:
            raise ValueError(f"the role of a reply {role!r}: allowed: {', '.join(REPLY_ROLES)}")
        names = special_texts(self._tokenizer)
        tools = self._kwargs.get("tools") or ()
        if not self._uses_chat_template:
            if tools:
                raise ValueError(
                    f"tools ({', '.join(_named(tools))}): the policy has no chat template that would show them, or "
                    "policy.plain_text=true; allowed: a policy with one, or an environment whose prompts describe them"
                )
            return _Frame("\n\n", "", names, ())
        try:
            fault, head, tail, markers = self._fault(role)
            unseen = [name for name in _named(tools) if name not in self._rendered()]
            fault = fault or (f"does not show the tools {', '.join(unseen)}" if unseen else None)
        except Exception as error:  # a template may raise anything
            fault, head, tail, markers = f"refuses such a conversation: {error}", "", "", ()
        if fault:
            raise ValueError(
                f"replies of the role {role}: the chat template {fault}; allowed: one that shows every turn as it was, "
                "another of the roles user and tool, or policy.plain_text=true, which does without"
            )
        special = [one for text in (head, tail) for one in self._encoded(text) if one in self._special_ids]
        strange = sorted({*names, *markers}, key=lambda name: (-len(name), name))
        return _Frame(head, tail, tuple(strange), tuple(special))

    def _fault(self, role: str) -> tuple[str | None, str, str, Iterable[str]]:
        """What is wrong with the template; else what stands before a reply and behind it, and its markers."""
        asked = self._rendered()
        one = self._rendered(_MARK, (role, _REPLY))
        two = self._rendered(_MARK, (role, _REPLY), _FURTHER, (role, _LATER))
        nothing = "", "", ()
        if one.count(_MARK) != 1:
            return f"{'repeats' if _MARK in one else 'drops'} what the model has said before", *nothing
        before, behind = one.split(_MARK)
        if behind.count(_REPLY) != 1:
            return "drops them, or does not show them as they are", *nothing
        # A space before the model's words is one that the model has to say itself.
        if _same(asked).rstrip() != _same(before).rstrip():
            return "shows the prompt otherwise once there is a reply (a system prompt or tools may move)", *nothing
        head, tail = behind.split(_REPLY)
        if two.count(_MARK) != 1 or two.count(_FURTHER) != 1:
            return "drops or repeats earlier turns once there are further ones", *nothing
        start, rest = two.split(_MARK)
        between, end = rest.split(_FURTHER)
        if start != before or _same(between).rstrip() != _same(behind).rstrip() or end != head + _LATER + tail:
            return "shows earlier turns otherwise once there are further ones", *nothing
        thinking = self._rendered(f"<think>\n{_THOUGHT}\n</think>\n\n{_MARK}", (role, _REPLY)).partition(_MARK)[0]
        if _THOUGHT not in thinking or asked.rstrip() != before.rstrip():
            log.warning(
                "the chat template drops thoughts (<think>) of earlier turns; here they stay, as they were sampled"
            )
        return None, head, tail, _MARKER.findall("\n".join((asked.partition(_QUESTION)[2], head, tail)))

    def _behind(self, text: str, role: str) -> str:
        """What stands behind the model's words: the end of its turn, the reply, and the beginning of its next turn."""
        if not self._uses_chat_template:
            return f"\n\n{text}"
        return self._rendered(_MARK, (role, text)).partition(_MARK)[2]  # of several marks the first is not the reply's

    def _rendered(self, *turns: str | tuple[str, str]) -> str:
        """A conversation: a question, what the model says (texts), and the replies (role and text)."""
        said = [_message("assistant", turn) if isinstance(turn, str) else _message(*turn) for turn in turns]
        conversation = [*self._opening, _message("user", _QUESTION), *said]
        text: str = self._tokenizer.apply_chat_template(
            conversation, tokenize=False, add_generation_prompt=True, **self._kwargs
        )
        return text

    def _encoded(self, text: str) -> list[int]:
        """Token ids of a text that stands behind another: some tokenizers put a space before a text that begins."""
        if isinstance(self._tokenizer, PreTrainedTokenizerBase):
            if self._mark_ids is None:
                self._mark_ids = self._tokenized(_MARK)
            ids, start = self._tokenized(_MARK + text), len(self._mark_ids)
            if ids[:start] == self._mark_ids:
                return ids[start:]
        return self._tokenized(text)

    def _tokenized(self, text: str) -> list[int]:
        [ids] = self._tokenizer([text], add_special_tokens=False)["input_ids"]
        return [int(one) for one in ids]


def has_chat_template(tokenizer: Any, *, plain_text: bool) -> bool:
    """Whether prompts go through a chat template."""
    return bool(getattr(tokenizer, "chat_template", None)) and not plain_text


def special_texts(tokenizer: Any) -> tuple[str, ...]:
    """The texts that a tokenizer reads as special tokens."""
    added = getattr(tokenizer, "added_tokens_decoder", {}).values()
    names = {str(token) for token in added if token.special} | set(getattr(tokenizer, "all_special_tokens", ()))
    return tuple(sorted(names - {""}))


def special_ids(tokenizer: Any) -> frozenset[int]:
    """The ids of a tokenizer's special tokens, but for that of what it does not know, which any text may have."""
    added = getattr(tokenizer, "added_tokens_decoder", {}).items()
    ids = {number for number, token in added if token.special} | set(getattr(tokenizer, "all_special_ids", ()))
    named = {tokenizer.eos_token_id, tokenizer.pad_token_id}
    return frozenset(one for one in ids | named if one is not None) - {getattr(tokenizer, "unk_token_id", None)}


def cleaned(text: str, strange: Collection[str]) -> str:
    """A text without others that must not stand in it, nor in what remains when they are taken out.

    It takes time in proportion to the text, however they are nested.

    Args:
        text: Any.
        strange: What is taken out; no empty one.
    """
    text = text.encode(errors="replace").decode()  # halves of surrogate pairs
    if not any(name in text for name in strange):
        return text
    by_end: dict[str, list[str]] = {}
    for name in strange:
        by_end.setdefault(name[-1], []).append(name)
    kept: list[str] = []
    for character in text:
        kept.append(character)
        for name in by_end.get(character, ()):
            if len(kept) >= len(name) and "".join(kept[-len(name) :]) == name:
                del kept[-len(name) :]
                break
    return "".join(kept)


def _named(tools: Iterable[Mapping[str, Any]]) -> list[str]:
    """The names of tools, given as JSON schemas."""
    return [str((tool.get("function") or tool).get("name")) for tool in tools]


def _same(text: str) -> str:
    """A text without thoughts, which templates may drop."""
    return _THOUGHTS.sub("", text)


def _message(role: str, content: str) -> Message:
    return {"role": role, "content": content}


@dataclass(frozen=True)
class Demonstration:
    """A demonstration as token ids."""

    ids: list[int]
    """Every turn with its end, and the replies between them."""
    is_model: list[bool]
    """Which of them the model is to generate."""
    text: str
    """The last turn."""


def tokenize_demonstration(
    tokenizer: Any, replies: ChatReplies, completion: str | list[Message], *, end: int
) -> Demonstration:
    """A demonstration as token ids, each turn tokenized by itself.

    Args:
        tokenizer: Of transformers, or anything that behaves like one.
        replies: Renders the replies between the turns.
        completion: A text, or messages in which those of the assistant take turns with replies, and end it.
        end: The end of sequence, which ends a text; turns end as the chat template ends them.

    Raises:
        ValueError: The messages do not take turns, or the chat template does not show replies.
    """
    if isinstance(completion, str):
        [ids] = tokenizer([completion], add_special_tokens=False)["input_ids"]
        return Demonstration([*ids, end], [True] * (len(ids) + 1), completion)
    if fault := messages_problem(completion):
        raise ValueError(f"column 'completion': {fault}")
    texts = [message["content"] for message in completion[::2]]
    answers = [(message["content"], message["role"]) for message in completion[1::2]]
    if answers:
        end = replies.end_of_turn(answers[0][1], otherwise=end)
    ids, is_model = list[int](), list[bool]()
    for number, turn in enumerate(tokenizer(texts, add_special_tokens=False)["input_ids"]):
        if number:
            text, role = answers[number - 1]
            reply = replies.ids(text, role=role, after=end)
            ids += reply
            is_model += [False] * len(reply)
        ids += [*turn, end]
        is_model += [True] * (len(turn) + 1)
    return Demonstration(ids, is_model, texts[-1])
