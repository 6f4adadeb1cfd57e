"""A tokenizer with its chat template: prompts, replies of environments and demonstrations as token ids.

In rollouts of several turns nothing that was sampled is tokenized again: the chat template renders a short probe
conversation in which a mark stands for the model's turn, and what it puts behind the mark is the reply.
"""

import json
import logging
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from transformers import PreTrainedTokenizerBase

from grpo_lightning.config.rules import REPLY_ROLES, messages_problem
from grpo_lightning.config.settings import nearest
from grpo_lightning.types import Message, Prompt

log = logging.getLogger(__name__)

# Texts of the probe: letters only, so that no template trims, cuts or escapes them; none is part of another.
_PROMPT, _TURN, _NEXT_TURN, _THOUGHT = "qzpromptqz", "qzturnqz", "qzfurtherqz", "qzthoughtqz"
_REPLY, _NEXT_REPLY = 'qzreply\n"1 < 2"\nqz', "qzlaterqz"
_THOUGHTS = re.compile(r"<think>.*?(?:</think>\s*|\Z)", re.DOTALL)
_MARKER = re.compile(r"<[^<>\s]+>|\[/?[A-Z_]+\]")
"""How templates mark roles where that is no special token: ``<|user|>``, ``</tool_response>``, ``[/INST]``."""
_OPENED = re.compile(r"<(\w+)>\s*(</\1>\s*)?\Z")
"""A tag that a prompt opens for the model, and may close at once: ``<think>``."""
_ROLES = {"human": "user", "gpt": "assistant", "model": "assistant", "bot": "assistant"}
"""Roles of other formats, such as ShareGPT's -> those that chat templates know."""


@dataclass(frozen=True)
class _Frame:
    """What the chat template puts around the replies of a role."""

    head: str
    tail: str
    forbidden: re.Pattern[str] | None
    """Special tokens' texts and the template's markers of roles, which no reply may hold."""


class ChatTokenizer:
    """A tokenizer and its chat template, which needs no weights.

    Args:
        tokenizer: Of transformers, or anything that behaves like one.
        end_ids: Token ids that end the model's turn.
        system_prompt: Put before every prompt that has no system message; replies do not repeat it.
        plain_text: Join texts by an empty line, although there is a chat template.
        template_kwargs: Further arguments of the chat template, such as ``enable_thinking``.
        reply_role: Role of an environment's replies unless it names one itself, user or tool; None: user. Unless it is
            None, the chat template must show such replies.

    Raises:
        ValueError: The chat template shows no replies of ``reply_role``, or never reads one of ``template_kwargs``.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        end_ids: Sequence[int] = (),
        system_prompt: str | None = None,
        plain_text: bool = False,
        template_kwargs: Mapping[str, Any] | None = None,
        reply_role: str | None = None,
    ) -> None:
        self.uses_template = bool(getattr(tokenizer, "chat_template", None)) and not plain_text
        self._is_plain, self._is_standard = plain_text, isinstance(tokenizer, PreTrainedTokenizerBase)
        self._tokenizer, self.template_kwargs = tokenizer, dict(template_kwargs or {})
        self._opening = [_message("system", system_prompt)] if system_prompt else []
        self._end_ids = frozenset(end_ids)
        self._special = _any_of(special_texts(tokenizer))
        self._frames: dict[str, _Frame] = {}
        self.reply_role = reply_role or "user"
        if reply_role is not None:
            self.check_replies(reply_role)
        words = set(re.findall(r"\w+", str(tokenizer.chat_template))) if self.uses_template else set()
        for name in set(self.template_kwargs) - words:
            near = nearest(name, words)
            hint = f"; it reads {near}" if near else ""
            raise ValueError(f"policy.template_kwargs.{name}: the chat template never reads it{hint}")

    def render(self, prompt: str | list[Message]) -> str:
        """The text that the model continues: the chat template's, or the messages' own text where there is none.

        A last message of the assistant is not closed: the model continues it.

        Raises:
            ValueError: The chat template refuses the messages or drops one; or they are several without a template.
        """
        messages = self._messages(prompt)
        if not self.uses_template:
            if not (isinstance(prompt, str) or len(prompt) == 1 or self._is_plain):
                raise ValueError(
                    f"the prompt has {len(prompt)} messages and the tokenizer no chat template to tell their roles: "
                    "policy.chat_template=FILE gives it one, policy.plain_text=true joins the messages by empty lines"
                )
            return "\n\n".join(message["content"] for message in messages)
        try:
            text: str = self._apply(messages)
        except Exception as error:  # a template may raise anything
            raise ValueError(f"the chat template refuses the prompt: {error}{self._cause(messages)}") from error
        for number, message in enumerate(messages, 1):
            role, content = message["role"], message["content"].strip()
            if role in _ROLES and not re.search(f"['\"]{role}['\"]", str(self._tokenizer.chat_template)):
                raise ValueError(f"message {number} has the role {role!r}; chat templates call it {_ROLES[role]!r}")
            if role == "assistant":  # whose thoughts many templates drop
                content = _THOUGHTS.sub("", content).rpartition("</think>")[2].strip()
            if not (_shows(text, content) or _shows(text, json.dumps(content, ensure_ascii=False)[1:-1])):
                whose = "policy.system_prompt" if message in self._opening else f"message {number} of the role {role!r}"
                raise ValueError(f"the chat template drops {whose}: {content[:80]!r}")
        return text

    def opening(self, prompt: Prompt) -> str:
        """What a prompt has already written of the model's turn.

        That is a last message of the assistant, or tags that the prompt ends with, such as ``<think>``. Completions
        begin behind it.
        """
        if _is_ids(prompt):
            return ""
        messages = self._messages(cast(Any, prompt))
        if self.uses_template and messages[-1]["role"] == "assistant":
            return messages[-1]["content"]
        found = _OPENED.search(self.render(cast(Any, prompt)))
        return found[0] if found and not (self._special and self._special.search(found[0])) else ""

    def check_prompts(self, prompts: Iterable[Prompt], origin: Callable[[int], str]) -> None:
        """Check that every prompt can be read, and warn of special tokens where texts cannot be told from the template.

        Args:
            prompts: All prompts.
            origin: The number of a prompt -> where it comes from, such as a file and a line.

        Raises:
            ValueError: As `render`; says of how many prompts, and where the first comes from.
        """
        problems, special, continued, total = list[str](), list[str](), list[str](), 0
        for total, prompt in enumerate(prompts, 1):
            try:
                if not _is_ids(prompt):
                    self.render(cast(Any, prompt))
            except ValueError as error:
                problems.append(str(error) if problems else f"{origin(total - 1)}: {error}")
            if not self.uses_template and (found := self.special_text(prompt)):
                special.append(found if special else f"{origin(total - 1)} holds {found!r}")
            if isinstance(last := prompt[-1], Mapping) and last["role"] == "assistant":
                continued.append("" if continued else f"{origin(total - 1)}: {last['content']!r:.60}")
        if problems:
            others = f" (the first of {len(problems)} such prompts of {total})" if len(problems) > 1 else ""
            raise ValueError(problems[0] + others)
        if special:
            log.warning("special tokens in plain text are read as such: %s, the first of %d", special[0], len(special))
        if continued:
            text = "completions continue the last message of the assistant, such as in %s, the first of %d prompts"
            log.warning(text, continued[0], len(continued))

    def special_text(self, prompt: Prompt) -> str | None:
        """The first special token that a prompt's own text holds and the tokenizer would read as such, or None."""
        if self._special is None or _is_ids(prompt) or getattr(self._tokenizer, "split_special_tokens", False):
            return None
        texts = [prompt] if isinstance(prompt, str) else [message["content"] for message in cast(Any, prompt)]
        return next((found[0] for found in map(self._special.search, texts) if found), None)

    def tokenize(self, prompts: Sequence[Prompt]) -> list[list[int]]:
        """Token ids of every prompt; those that are token ids already stay as they are.

        A chat template brings its own special tokens, and those that a prompt's text names are read as text; plain text
        gets the tokenizer's, but no end of sequence behind it.

        Raises:
            ValueError: A prompt has no tokens; or as `render`.
        """
        texts = ["" if _is_ids(prompt) else self.render(cast(Any, prompt)) for prompt in prompts]
        encoded = self._tokenizer(texts, add_special_tokens=not self.uses_template)["input_ids"]
        tokens = list[list[int]]()
        for prompt, text, ids in zip(prompts, texts, encoded, strict=True):
            if _is_ids(prompt):
                ids = list(map(int, cast(Any, prompt)))
            elif not self.uses_template:
                ids = self._without_end(text, ids)
            elif self.special_text(prompt) and self._is_standard:
                ids = self._apply(
                    self._messages(cast(Any, prompt)), tokenize=True, return_dict=False, sanitize_control_tokens=True
                )
            if not ids:
                raise ValueError(f"a prompt has no tokens: {str(prompt)[:80]!r}")
            tokens.append(ids)
        return tokens

    def _messages(self, prompt: str | list[Message]) -> list[Message]:
        messages = [_message("user", prompt)] if isinstance(prompt, str) else list(map(dict, prompt))
        has_system = any(message["role"] == "system" for message in messages)
        return messages if has_system else self._opening + messages

    def _apply(self, messages: list[Message], *, tokenize: bool = False, **options: Any) -> Any:
        """The text of messages, or its token ids, up to where the model goes on."""
        continues = messages[-1]["role"] == "assistant"
        options |= {"continue_final_message": True} if continues else {"add_generation_prompt": True}
        return self._tokenizer.apply_chat_template(messages, tokenize=tokenize, **options, **self.template_kwargs)

    def _cause(self, messages: list[Message]) -> str:
        """The setting that makes the chat template refuse messages, as part of a sentence."""
        if not self._opening or messages[: len(self._opening)] != self._opening:
            return ""
        try:
            self._apply(messages[len(self._opening) :])
        except Exception:
            return ""
        return "; policy.system_prompt=null leaves the system message out"

    def _without_end(self, text: str, ids: list[int]) -> list[int]:
        """Token ids without an end of sequence that the tokenizer puts behind every text."""
        end, name = self._tokenizer.eos_token_id, getattr(self._tokenizer, "eos_token", None)
        is_written = name is not None and text.endswith(name)
        is_added = len(ids) > 1 and ids[-1] == end and (not is_written or ids[-2] == end)
        return ids[:-1] if is_added else ids

    def reply(self, text: str, *, role: str | None = None, after: int | None) -> list[int]:
        """The tokens of a reply and of what follows it, up to where the model goes on.

        Args:
            text: The reply. A space takes the place of special tokens and role markers that it names.
            role: Role of the reply, user or tool; None: ``reply_role``.
            after: The model's last token; where it is the end of turn that the template writes, it is not repeated.

        Raises:
            ValueError: The chat template does not show such replies, see `check_replies`.
        """
        role = role or self.reply_role
        frame = self.check_replies(role)
        text = text.encode(errors="replace").decode()  # halves of surrogate pairs
        text = frame.forbidden.sub(" ", text) if frame.forbidden else text
        ids = self._encode(self._after_turn(text, role))
        # The reply's own first token is kept even if the model said the same; and the model cannot go on from nothing.
        is_repeated = len(ids) > 1 and ids[0] == after and self._encode(frame.head)[:1] == [after]
        return ids[1:] if is_repeated else ids

    def demonstration(
        self, prompt: Prompt, completion: str | list[Message], *, end: int
    ) -> tuple[list[int], list[bool]]:
        """A demonstration as token ids, each turn tokenized by itself and ended as the template, or ``end``, ends it.

        Args:
            prompt: What the completion answers.
            completion: A text, or messages in which those of the assistant take turns with replies, and end it. With a
                chat template, special tokens that mark its turns are text, but for the end of a turn at its end.
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
            first = self.reply("", role=completion[1]["role"], after=None)[:1]
            end = first[0] if first and first[0] in self._end_ids else end
        ids, is_model, opening = list[int](), list[bool](), self.opening(prompt)
        marks, end_text = set[str](), self._tokenizer.decode([end])
        if self.uses_template and self._is_standard and self._special and not _is_ids(prompt):
            marks = {end_text, *self._special.findall(self.render(cast(Any, prompt)))}
        for number, message in enumerate(completion):
            if is_turn := number % 2 == 0:
                text = message["content"] if number else _continuation(opening, message["content"])
                text = text.removesuffix(end_text) if marks else text
                writes_turns = any(mark in text for mark in marks)
                added = [*self._tokenize(text, **({"split_special_tokens": True} if writes_turns else {})), end]
            else:
                added = self.reply(message["content"], role=message["role"], after=end)
            ids += added
            is_model += [is_turn] * len(added)
        return ids, is_model

    def check_replies(self, role: str) -> _Frame:
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
        tools = [str((tool.get("function") or tool).get("name")) for tool in self.template_kwargs.get("tools") or ()]
        if not self.uses_template:
            if tools:
                raise ValueError(
                    f"tools ({', '.join(tools)}) need a policy with a chat template that shows them, and "
                    "policy.plain_text=false; or an environment whose prompts describe them"
                )
            return _Frame("\n\n", "", self._special)
        try:
            prompt = self._dialogue()
            once = self._dialogue(_TURN, (role, _REPLY))
            twice = self._dialogue(_TURN, (role, _REPLY), _NEXT_TURN, (role, _NEXT_REPLY))
            thinking = self._dialogue(f"<think>\n{_THOUGHT}\n</think>\n\n{_TURN}", (role, _REPLY)).partition(_TURN)[0]
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
            (_is_equal(prompt, before), "changes the prompt once there is a reply (a system prompt or tools may move)"),
            (
                twice.count(_TURN) == twice.count(_NEXT_TURN) == 1
                and start == before
                and _is_equal(between, behind)
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
        return _Frame(head, tail, _any_of((*special_texts(self._tokenizer), *markers)))

    def _after_turn(self, text: str, role: str) -> str:
        """What follows the model's turn: its end, the reply, and the beginning of the model's next turn."""
        if not self.uses_template:
            return f"\n\n{text}"
        return self._dialogue(_TURN, (role, text)).partition(_TURN)[2]  # of several marks the first is not the reply's

    def _dialogue(self, *turns: str | tuple[str, str]) -> str:
        """A conversation: the prompt, the model's turns (texts), and replies (role and text)."""
        messages = [_message("assistant", turn) if isinstance(turn, str) else _message(*turn) for turn in turns]
        text: str = self._apply([*self._opening, _message("user", _PROMPT), *messages])
        return text

    def _encode(self, text: str) -> list[int]:
        """Token ids of a text that stands behind another: some tokenizers put a space before a text that begins."""
        if self._is_standard:
            mark, ids = self._tokenize(_TURN), self._tokenize(_TURN + text)
            if ids[: len(mark)] == mark:
                return ids[len(mark) :]
        return self._tokenize(text)

    def _tokenize(self, text: str, **options: bool) -> list[int]:
        [ids] = self._tokenizer([text], add_special_tokens=False, **options)["input_ids"]
        return self._without_end(text, [int(one) for one in ids])


def _unsuitable(role: str, problem: str) -> ValueError:
    return ValueError(
        f"replies of the role {role}: the chat template {problem}; use one that shows every turn as it was, another of "
        "the roles user and tool, or policy.plain_text=true, which needs no template"
    )


def special_texts(tokenizer: Any) -> set[str]:
    """The texts that a tokenizer reads as special tokens."""
    added = getattr(tokenizer, "added_tokens_decoder", {}).values()
    return {str(token) for token in added if token.special} | set(getattr(tokenizer, "all_special_tokens", ()))


def _any_of(texts: Iterable[str]) -> re.Pattern[str] | None:
    """Finds any of some texts, the longest first; None without any."""
    longest_first = sorted({text for text in texts if text}, key=lambda text: (-len(text), text))
    return re.compile("|".join(map(re.escape, longest_first))) if longest_first else None


def _is_equal(one: str, other: str) -> bool:
    """Whether two texts are equal without thoughts, which templates may drop, and white space at their ends."""
    return _THOUGHTS.sub("", one).rstrip() == _THOUGHTS.sub("", other).rstrip()


def _shows(text: str, content: str) -> bool:
    """Whether a text holds a message, or half of it: templates cut switches such as ``/no_think`` off."""
    half = len(content) // 2 if len(content) > 8 else len(content)
    return content[:half] in text or content[len(content) - half :] in text


def _is_ids(prompt: Prompt) -> bool:
    return not isinstance(prompt, str) and all(isinstance(one, int) for one in prompt)


def _continuation(opening: str, text: str) -> str:
    """A text without what a prompt has already written of it."""
    if not opening.strip() or not text.lstrip().startswith(opening.strip()):
        return text
    return text.lstrip()[len(opening.strip()) :].removeprefix(opening[len(opening.rstrip()) :])


def _message(role: str, content: str) -> Message:
    return {"role": role, "content": content}
