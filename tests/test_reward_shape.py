import json
import logging
import re
import time

import pytest

from grpo_lightning.reward import format as shape
from grpo_lightning.reward.accuracy import exact
from grpo_lightning.reward.format import json_schema, keyword, reasoning_steps
from grpo_lightning.reward.format import pattern as pattern_reward
from grpo_lightning.reward.length import cosine_length, repetition, soft_overlong

# --- steps


@pytest.mark.parametrize(
    ("text", "markers"),
    [
        ("", 0),
        ("Step 1: a Step 22: b", 2),
        ("Step: a, Step one: b, Step 1 c, step 1: d", 0),
        ("1. a\n2. b\n  10. c\n1.5 d", 3),
        ("- a\n* b\n• c\n-d\n--", 3),
        ("First, a. Second, b. Next, c. Finally, d.", 4),
        ("first, a. Second b. Nextly, c. AFirst, d", 0),
        ("1. First, a", 2),  # Open R1 counts both too
    ],
)
def test_reasoning_steps(text, markers):
    assert reasoning_steps([text], target=8) == [markers / 8]


def test_enough_steps_are_enough():
    assert reasoning_steps(["First, ", "First, Next, ", "First, Next, Second, "], target=2) == [0.5, 1.0, 1.0]
    with pytest.raises(ValueError, match="target: expected at least 1 marker, got 0"):
        reasoning_steps(["a"], target=0)


# --- length


def by_cosine(tokens, right=(1.0, 0.5), wrong=(-1.0, -0.5), max_length=12, answers=("1", "2")):
    completions = ["1"] * len(answers)
    ids = [[7] * n for n in tokens]
    settings = {"outcome": exact, "max_length": max_length, "right": right, "wrong": wrong}
    return cosine_length(completions, ids, **settings, prompts=["p"] * len(answers), answer=list(answers))


def test_cosine_length_rewards_short_right_and_long_wrong_completions():
    assert by_cosine([0, 0]) == pytest.approx([1.0, -1.0])
    assert by_cosine([12, 12]) == pytest.approx([0.5, -0.5])
    assert by_cosine([6, 6]) == pytest.approx([0.75, -0.75])  # halfway: cos(pi / 2) = 0
    # cos(pi / 3) = 0.5, (1 + 0.5) / 2 = 0.75:  0.5 + 0.5 * 0.75 and -0.5 - 0.5 * 0.75
    assert by_cosine([4, 4]) == pytest.approx([0.875, -0.875])
    # cos(2 pi / 3) = -0.5, (1 - 0.5) / 2 = 0.25:  3 + (2 - 3) * 0.25 and 7 + (-1 - 7) * 0.25
    assert by_cosine([8, 8], right=[2, 3], wrong=[-1, 7]) == pytest.approx([2.75, 5.0])
    assert by_cosine([13, 24]) == pytest.approx([0.5, -0.5])  # beyond: as at max_length


def test_right_is_a_score_of_at_least_one():
    scores = [1.0, 0.99, 2.0, None, ((1, 1.0), (2, 0.0)), ()]
    settings = {"max_length": 4, "right": [1.0, 0.5], "wrong": [-1.0, -0.5]}
    found = cosine_length(["ab"] * 6, [[]] * 6, outcome=lambda completions: scores, **settings)
    assert found == [1.0, -1.0, 1.0, None, -1.0, None]  # of steps the mean, 0.5


def test_soft_overlong_falls_over_the_buffer():
    ids = [[1] * n for n in (0, 80, 85, 90, 100, 120)]  # 100 - 20 = 80;  (80 - 85) / 20 = -0.25
    assert soft_overlong(ids, max_length=100, buffer=0.2) == [0.0, 0.0, -0.25, -0.5, -1.0, -1.0]
    assert soft_overlong([[1] * 25], max_length=100, buffer=1.0) == [-0.25]
    for settings in ({"max_length": 0, "buffer": 0.2}, {"max_length": 9, "buffer": 0.0}):
        with pytest.raises(ValueError, match="max_length"):
            soft_overlong(ids, **settings)


# --- words


@pytest.mark.parametrize(
    ("text", "n", "penalty"),
    [
        ("a b c", 3, 0.0),
        ("a b", 3, 0.0),
        ("", 1, 0.0),
        ("a a A a", 1, -1.5),  # 1 of 4 is distinct: (1 - 1/4) * -2
        ("a b a b a", 2, -1.0),  # ab ba ab ba: (1 - 2/4) * -2
        ("a b a b a", 3, -2 / 3),  # aba bab aba: (1 - 2/3) * -2
        ("a\tb \n a  b", 2, -2 / 3),  # ab ba ab
    ],
)
def test_repetition(text, n, penalty):
    assert repetition([text], n=n, max_penalty=-2.0) == pytest.approx([penalty])


def test_keyword():
    texts = ["Because it is, THEREFORE", "because", "thereforebecause", "the re", ""]
    assert keyword(texts, words=["because", "Therefore", "so it is", "it is"]) == [0.75, 0.25, 0.5, 0.0, 0.0]
    assert keyword(["STRASSE"], words=["straße"]) == [1.0]


def test_pattern():
    assert pattern_reward(["a1", "1b", "b22", ""], expression=r"[ab]\d+$", seconds=1.0) == [1.0, 0.0, 1.0, 0.0]
    assert pattern_reward(["x\nABC"], expression=r"(?im)^abc", seconds=1.0) == [1.0]


def test_a_search_without_end_scores_zero_and_is_logged_once(caplog):
    shape.timed_out.clear()
    began = time.perf_counter()
    with caplog.at_level(logging.WARNING):
        texts = ["a" * 100 + "b", "a" * 100 + "b", "aa"]
        assert pattern_reward(texts, expression=r"^(a|aa|aaa)+$", seconds=0.05) == [0.0, 0.0, 1.0]
    assert time.perf_counter() - began < 2
    assert len(caplog.records) == 1
    assert "more than 0.05 s" in caplog.text
    assert dict(shape.timed_out) == {"^(a|aa|aaa)+$": 2}


# --- JSON

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer", "minimum": 0}},
    "required": ["name"],
}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"name": "a", "age": 3}', 1.0),
        ('<think>{}</think><answer>{"name": "a"}</answer>', 1.0),
        ('```json\n{"name": "a"}\n```', 1.0),
        ('{"name": "a", "age": -1}', 0.0),
        ('{"age": 3}', 0.0),
        ('{"name": "a"} and', 0.0),
        ("{'name': 'a'}", 0.0),
        ('{"name": "a", "x": NaN}', 0.0),
        ('{"name": "a", "age": 1e999}', 0.0),
        ('{"name": "a", "age": 1' + "0" * 5_000 + "}", 0.0),
        ('{"name": "' + "a" * 20_000 + '"}', 0.0),
        ("", 0.0),
        ("[]", 0.0),
    ],
)
def test_json_schema(text, expected):
    assert json_schema([text], schema=SCHEMA) == [expected]


def test_a_schema_may_be_a_file(tmp_path):
    path = tmp_path / "schema.json"
    path.write_text(json.dumps(SCHEMA))
    assert json_schema(['{"name": "a"}', "{}"], schema=str(path)) == [1.0, 0.0]
    path.write_text("[1]")
    with pytest.raises(ValueError, match="schema: expected a mapping or the path of a JSON file that holds one"):
        json_schema(["{}"], schema=str(path))
    path.write_text("{")
    with pytest.raises(ValueError, match="schema: expected a mapping or the path of a JSON file, got .*schema.json"):
        json_schema(["{}"], schema=str(path))
    with pytest.raises(ValueError, match="schema: .*none.json"):
        json_schema(["{}"], schema=str(tmp_path / "none.json"))


@pytest.mark.parametrize("schema", [{"type": "text"}, {"required": 3}, {"pattern": "("}, None, [1]])
def test_a_broken_schema_is_named(schema):
    with pytest.raises(ValueError, match="schema: .* got " + re.escape(repr(schema))):
        json_schema(['"a"'], schema=schema)


def test_nothing_is_fetched(monkeypatch):
    monkeypatch.setattr("urllib.request.urlopen", lambda *_: pytest.fail("a request"))
    with pytest.raises(ValueError, match="schema: a .ref or pattern in it is broken"):
        json_schema(["{}"], schema={"$ref": "http://example.invalid/schema.json"})


def test_a_recursive_schema_and_deep_text():
    schema = {"type": "array", "items": {"$ref": "#"}}
    assert json_schema(["[[[]]]", "[[1]]", "[" * 900 + "]" * 900], schema=schema) == [1.0, 0.0, 0.0]
    # How deep Python reads JSON depends on its version; what it does not read is not valid.
    assert json_schema(['{"name": "a", "x": ' + "[" * 5_000 + "]" * 5_000 + "}"], schema=SCHEMA) in ([0.0], [1.0])
    multiple = {"multipleOf": 0.1}
    assert json_schema(["1e308", "1e999", "-1e400", "9" * 4_000], schema=multiple)[1:] == [0.0, 0.0, 0.0]
