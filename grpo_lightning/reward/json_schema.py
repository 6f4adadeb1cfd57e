"""A reward for answers in JSON. Odd text of the model scores 0; a broken schema raises."""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jsonschema import SchemaError
from jsonschema.validators import Draft202012Validator, validator_for
from referencing import Registry
from referencing.exceptions import Unresolvable

from grpo_lightning.reward.text import answer_text

_LONGEST = 20_000  # characters of an answer


def json_schema(completions: Sequence[str], *, schema: Mapping[str, Any] | str, **_: Any) -> list[float | None]:
    """1.0 if the answer text is JSON that is valid under the schema, else 0.0.

    A fence of ```json … ``` around all of it is ignored. NaN and Infinity are no JSON, and neither is what has more
    than 20,000 characters, is nested too deeply for Python or has an integer of more than 4,300 digits.
    JSON Schema, json-schema.org, of the draft that ``$schema`` names, else the newest; nothing is fetched for a $ref.

    Args:
        completions: [B]
        schema: The schema, or the path of a JSON file that holds it.

    Returns:
        [B] 0.0 or 1.0

    Raises:
        ValueError: ``schema`` is no schema, its file cannot be read, or a $ref or pattern in it is broken.
    """
    validator = _validator(schema)
    return [float(_is_valid(validator, answer_text(completion), schema)) for completion in completions]


def _validator(schema: Mapping[str, Any] | str) -> Any:
    loaded: Any = schema
    if isinstance(schema, str):
        try:
            loaded = json.loads(Path(schema).read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise ValueError(
                f"schema: expected a mapping or the path of a JSON file, got {schema!r}: {error}"
            ) from error
    if not isinstance(loaded, Mapping):
        raise ValueError(f"schema: expected a mapping or the path of a JSON file that holds one, got {schema!r:.80}")
    kind = validator_for(loaded, default=Draft202012Validator)
    try:
        kind.check_schema(loaded)
    except SchemaError as error:
        raise ValueError(f"schema: expected a JSON schema, got {schema!r:.80}: {error.message:.200}") from error
    return kind(loaded, registry=Registry())


def _is_valid(validator: Any, text: str, schema: Any) -> bool:
    if len(text) > _LONGEST:
        return False
    try:
        value = json.loads(_unfenced(text), parse_constant=_refuse)
        return bool(validator.is_valid(value))
    except (Unresolvable, re.error) as error:
        raise ValueError(f"schema: a $ref or pattern in it is broken, got {schema!r:.80}: {error}") from error
    except (ValueError, ArithmeticError, RecursionError):
        return False


def _unfenced(text: str) -> str:
    if not (text.startswith("```") and text.endswith("```")):
        return text
    language, newline, rest = text[3:-3].partition("\n")
    return rest if newline and language.strip().lower() in ("json", "") else text[3:-3]


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")
