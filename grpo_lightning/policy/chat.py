"""Chat templates in multi-turn rollouts: replies and demonstrations as token ids behind those that were sampled.

What was sampled is never tokenized again: the chat template renders a short probe conversation in which a mark stands
for the model's turn, and what it puts behind the mark is the reply.
"""

import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from grpo_lightning.config.rules import REPLY_ROLES, messages_problem
from grpo_lightning.types import Message

log = logging.getLogger(__name__)

# Texts of the probe: letters only, so that no template trims, cuts or escapes them; none is part of another.
_PROMPT, _TURN, _NEXT_TURN, _THOUGHT = "qzpromptqz", "qzturnqz", "qzfurtherqz", "qzthoughtqz"
_REPLY, _NEXT_REPLY = 'qzreply\n"1 < 2"\nqz', "qzlaterqz"
_THOUGHTS = re.compile(r"<think>.*?(?:</think>\s*|\Z)", re.DOTALL)
_MARKER = re.compile(r"<[^<>\s]+>|\[/?[A-Z_]+\]")
"""How templates mark roles where that is no special token: ``<|user|>``, ``</tool_response>``, ``[/INST]``."""


@dataclass(frozen=True)
class _Frame:
    """What the chat template puts around the replies of a role."""

    head: str
    tail: str
    forbidden: re.Pattern[str] | None
    """Special tokens' texts and the template's markers of roles, which no reply may hold."""
    special: tuple[int, ...]
    """The special token ids of head and tail, in their order."""


class ChatReplies:
    """Replies of environments and tools as token ids.

    Args:
        tokenizer: Of transformers, or anything that behaves like one.
        uses_chat_template: Whether prompts go through its chat template; else texts are joined by an empty line.
        template_kwargs: Further arguments of the chat template.
        system_prompt: System message of all prompts; replies do not repeat it.
        end_ids: Token ids that end the model's turn.
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

    def ids(self, text: str, *, role: str = "user", after: int | None) -> list[int]:
        """The tokens of a reply and of what follows it, up to where the model goes on.

        Args:
            text: The reply. A space takes the place of special tokens and role markers that it names.
            role: Role of the reply, user or tool.
            after: The model's last token; where it is the end of turn that the template writes, it is not repeated.

        Raises:
            ValueError: The chat template does not show such replies, see `check`.
        """
        frame = self.check(role)
        text = text.encode(errors="replace").decode()  # halves of surrogate pairs
        text = frame.forbidden.sub(" ", text) if frame.forbidden else text
        ids = self._encode(self._after_turn(text, role))
        if tuple(one for one in ids if one in self._special_ids) != frame.special:
            # The tokenizer finds special tokens in another spelling, such as in other Unicode characters.
            reply = [one for one in self._encode(text) if one not in self._special_ids]
            ids = [*self._encode(frame.head), *reply, *self._encode(frame.tail)]
        # The reply's own first token is kept even if the model said the same; and the model cannot go on from nothing.
        is_repeated = len(ids) > 1 and ids[0] == after and self._encode(frame.head)[:1] == [after]
        return ids[1:] if is_repeated else ids

    def demonstration(self, completion: str | list[Message], *, end: int) -> tuple[list[int], list[bool]]:
        """A demonstration as token ids, each turn tokenized by itself and ended as the template, or ``end``, ends it.

        Args:
            completion: A text, or messages in which those of the assistant take turns with replies, and end it.
            end: The end of sequence.

        Returns:
            The token ids, and which of them the model is to generate.

        Raises:
            ValueError: The messages do not take turns, or the chat template does not show replies.
        """
        if isinstance(completion, str):
            completion = [_message("assistant", completion)]
        elif problem := messages_problem(completion):
            raise ValueError(f"column 'completion': {problem}")
        if len(completion) > 1:
            # Turns end as the template ends them if that ends sampling, too; otherwise by the end of sequence.
            first = self.ids("", role=completion[1]["role"], after=None)[:1]
            end = first[0] if first and first[0] in self._end_ids else end
        ids, is_model = list[int](), list[bool]()
        for number, message in enumerate(completion):
            if is_turn := number % 2 == 0:
                added = [*self._tokenize(message["content"]), end]
            else:
                added = self.ids(message["content"], role=message["role"], after=end)
            ids += added
            is_model += [is_turn] * len(added)
        return ids, is_model

    def check(self, role: str) -> "_Frame":
        """Check that the chat template shows such replies, and leaves everything before them unchanged.

        Thoughts (``<think>``) of earlier turns are an exception: many templates drop them, while they stay in what is
        sampled and trained. A warning says so.

        Raises:
            ValueError: The role is unknown, or the template does not; names its fault.
        """
        if role not in self._frames:
            self._frames[role] = self._probe(role)
        return self._frames[role]

    def _probe(self, role: str) -> _Frame:
        if role not in REPLY_ROLES:
            raise ValueError(f"the role of a reply {role!r}: needs one of {', '.join(REPLY_ROLES)}")
        tools = [str((tool.get("function") or tool).get("name")) for tool in self._kwargs.get("tools") or ()]
        if not self._uses_chat_template:
            if tools:
                raise ValueError(
                    f"tools ({', '.join(tools)}) need a policy with a chat template that shows them, and "
                    "policy.plain_text=false; or an environment whose prompts describe them"
                )
            return _Frame("\n\n", "", _any_of(special_texts(self._tokenizer)), ())
        try:
            prompt = self._render()
            once = self._render(_TURN, (role, _REPLY))
            twice = self._render(_TURN, (role, _REPLY), _NEXT_TURN, (role, _NEXT_REPLY))
            thinking = self._render(f"<think>\n{_THOUGHT}\n</think>\n\n{_TURN}", (role, _REPLY)).partition(_TURN)[0]
        except Exception as error:  # a template may raise anything
            raise _unsuitable(role, f"refuses such a conversation: {error}") from error
        before, _, behind = once.partition(_TURN)
        head, _, tail = behind.partition(_REPLY)
        start, _, rest = twice.partition(_TURN)
        between, _, end = rest.partition(_NEXT_TURN)
        unseen = [name for name in tools if name not in prompt]
        for is_fine, problem in (
            (once.count(_TURN) == 1, "drops or repeats the model's turn"),
            (behind.count(_REPLY) == 1, "drops replies, or does not show them as they are"),
            # A space before the model's turn is one that the model has to generate itself.
            (_same(prompt, before), "changes the prompt once there is a reply (a system prompt or tools may move)"),
            (
                twice.count(_TURN) == twice.count(_NEXT_TURN) == 1
                and start == before
                and _same(between, behind)
                and end == head + _NEXT_REPLY + tail,
                "drops or changes earlier turns once there are further ones",
            ),
            (not unseen, f"does not show the tools {', '.join(unseen)}"),
        ):
            if not is_fine:
                raise _unsuitable(role, problem)
        if _THOUGHT not in thinking or prompt.rstrip() != before.rstrip():
            log.warning(
                "the chat template drops thoughts (<think>) of earlier turns; here they stay, as they were sampled"
            )
        markers = _MARKER.findall("\n".join((prompt.partition(_PROMPT)[2], head, tail)))
        special = [one for text in (head, tail) for one in self._encode(text) if one in self._special_ids]
        return _Frame(head, tail, _any_of((*special_texts(self._tokenizer), *markers)), tuple(special))

    def _after_turn(self, text: str, role: str) -> str:
        """What follows the model's turn: its end, the reply, and the beginning of the model's next turn."""
        if not self._uses_chat_template:
            return f"\n\n{text}"
        return self._render(_TURN, (role, text)).partition(_TURN)[2]  # of several marks the first is not the reply's

    def _render(self, *turns: str | tuple[str, str]) -> str:
        """A conversation: the prompt, the model's turns (texts), and replies (role and text)."""
        messages = [_message("assistant", turn) if isinstance(turn, str) else _message(*turn) for turn in turns]
        text: str = self._tokenizer.apply_chat_template(
            [*self._opening, _message("user", _PROMPT), *messages],
            tokenize=False,
            add_generation_prompt=True,
            **self._kwargs,
        )
        return text

    def _encode(self, text: str) -> list[int]:
        """Token ids of a text that stands behind another: some tokenizers put a space before a text that begins."""
        if isinstance(self._tokenizer, PreTrainedTokenizerBase):
            mark, ids = self._tokenize(_TURN), self._tokenize(_TURN + text)
            if ids[: len(mark)] == mark:
                return ids[len(mark) :]
        return self._tokenize(text)

    def _tokenize(self, text: str) -> list[int]:
        [ids] = self._tokenizer([text], add_special_tokens=False)["input_ids"]
        return [int(one) for one in ids]


def _unsuitable(role: str, problem: str) -> ValueError:
    return ValueError(
        f"replies of the role {role}: the chat template {problem}; use one that shows every turn as it was, another of "
        "the roles user and tool, or policy.plain_text=true, which needs no template"
    )


def special_texts(tokenizer: Any) -> set[str]:
    """The texts that a tokenizer reads as special tokens."""
    added = getattr(tokenizer, "added_tokens_decoder", {}).values()
    return {str(token) for token in added if token.special} | set(getattr(tokenizer, "all_special_tokens", ()))


def special_ids(tokenizer: Any) -> frozenset[int]:
    """The ids of a tokenizer's special tokens, without the one for unknown text, which any text may hold."""
    added = getattr(tokenizer, "added_tokens_decoder", {}).items()
    ids = {number for number, token in added if token.special} | set(getattr(tokenizer, "all_special_ids", ()))
    named = {tokenizer.eos_token_id, tokenizer.pad_token_id}
    return frozenset(one for one in ids | named if one is not None) - {getattr(tokenizer, "unk_token_id", None)}


def _any_of(texts: Iterable[str]) -> re.Pattern[str] | None:
    """Finds any of some texts, the longest first; None without any."""
    longest_first = sorted({text for text in texts if text}, key=lambda text: (-len(text), text))
    return re.compile("|".join(map(re.escape, longest_first))) if longest_first else None


def _same(one: str, other: str) -> bool:
    """Whether two texts are equal up to thoughts, which templates may drop, and space at their ends."""
    return _THOUGHTS.sub("", one).rstrip() == _THOUGHTS.sub("", other).rstrip()


def _message(role: str, content: str) -> Message:
    return {"role": role, "content": content}
