"""Demonstrations for the supervised stage: files of one's own, or those that taught the shipped policy."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from grpo_lightning.config.rules import messages_problem
from grpo_lightning.data import PromptData, Row, Source
from grpo_lightning.data.jsonl import JsonLines, checked_prompt


class OwnDemonstrations:
    """Prompts with the completions to imitate, of JSON lines or parquet files.

    A row has a prompt and a completion, each as text or chat messages, and any further columns. Of several turns the
    completion is a list of messages: the assistant's, each but the last followed by one of the user or a tool. Or one
    column has a whole conversation, of which everything from the assistant's first message on is the completion.

    Args:
        path: One file or several, as in `JsonLines`.
        prompt_column: Name of the column with the prompt, or with the conversation.
        completion_column: Name of the column with the completion.

    Raises:
        ValueError: A row is malformed; names its number and column.
    """

    def __init__(self, path: str | Sequence[str], prompt_column: str, completion_column: str) -> None:
        rows = JsonLines(path, prompt_column)
        self.place = rows.place
        self._rows = [
            _demonstration(rows[i], f"data.path={path}, row {i + 1}", completion_column) for i in range(len(rows))
        ]

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Row:
        return self._rows[index]


def _demonstration(row: Row, where: str, column: str) -> Row:
    prompt, columns = row
    others = {name: value for name, value in columns.items() if name != column}
    completion = columns.get(column)
    if completion is None and isinstance(prompt, list) and len(prompt) > 1 and isinstance(prompt[-1], dict):
        first = next((n for n, message in enumerate(prompt) if n and message["role"] == "assistant"), len(prompt) - 1)
        prompt, completion = prompt[:first], prompt[first:]
    place = f"{where}, column {column!r}"
    allowed = (
        "allowed: text, one message of the assistant, or several in turn with replies; or a conversation in the "
        "prompt's column that the assistant ends"
    )
    if isinstance(completion, list) and completion and all(isinstance(message, dict) for message in completion):
        messages: Any = checked_prompt(completion, place)
        if fault := messages_problem(messages):
            raise ValueError(f"{place}: {fault}; {allowed}")
        completion = messages if len(messages) > 1 else messages[0]["content"]
    elif not isinstance(completion, str) or not completion:
        raise ValueError(f"{place}: {completion!r:.80}; {allowed}")
    return prompt, {**others, "completion": completion}


def prompts(
    *,
    path: str | Sequence[str] | None,
    validation_path: str | Sequence[str] | None,
    prompt_column: str,
    completion_column: str,
    train: Callable[[], Source],
    validation: Callable[[], Source],
    **settings: Any,
) -> PromptData:
    """Data of demonstrations.

    Args:
        path: Training file or files; None takes ``train`` and ``validation``.
        validation_path: File or files with held-out demonstrations; None holds out rows of the training files.
        prompt_column: As in `OwnDemonstrations`.
        completion_column: As in `OwnDemonstrations`.
        train: Opens the demonstrations that taught the shipped policy.
        validation: Opens those that measured it.
        settings: Everything else that ``PromptData`` needs.
    """
    if path is None:
        return PromptData(train=train, validation=validation, **settings)
    own = partial(OwnDemonstrations, prompt_column=prompt_column, completion_column=completion_column)
    return PromptData(
        train=partial(own, path), validation=partial(own, validation_path) if validation_path else None, **settings
    )
