"""Text that nobody would write but a model under training does: no reward raises on it or takes long."""

import functools
import random
import time

import pytest
from hydra.utils import instantiate

from grpo_lightning.reward import Scoring
from tests.support.composed import CONF, settings
from tests.support.workers import limited

NEEDS = [
    "reward.keyword.function.words=[because,therefore]",
    'reward.pattern.function.expression="^(a|aa)+$"',  # takes exponential time on "aaaa…!"
    "reward.pattern.function.seconds=0.02",
    "reward.math.timeout=1",
    "reward.json_schema.function.schema={type:object,required:[name],properties:{name:{type:string}}}",
]
NAMES = sorted(
    {path.stem for path in (CONF / "reward").glob("*.yaml")}
    - {"base", "custom", "custom_per_completion", "judge", "live", "model"}
)
ROWS = 3_000
LONG = 100_000  # characters
SECONDS = 120  # what takes more than linear time takes many minutes; all took 45 s on a busy machine

ATOMS = [
    *("<think>", "</think>", "<answer>", "</answer>", "<answer", "<think><think>", "\\boxed{", "}", "{", "$", "$$"),
    *("\\frac{1}{", "\\sqrt{", "\\left(", "\\begin{pmatrix}", "\\\\", "\\text{", "^", "_", "\\(", "\\]", "\\sin "),
    *("\x00", "\x1b[31m", "\r", "\u2028", "\ud800", "\u202e", "\U0001f600", "e\u0301" * 3, "|x|", "x_", "1:2"),
    *("9**9**9", "10^{10^{10}}", "1e999999999", "99999!", "9" * 5_000, "1/0", "0x" + "f" * 99, "²³", "٣", "#### 7"),
    *("((((", "]]]]", "[[[[", '{"a":', '"', "'", "```json\n", "```", "NaN", "Infinity", "1,234", "72", "1/2", "x^2"),
    *("a" * 40 + "!", "aaa aaa ", "1. ", "\n- ", "First,", " " * 30, "\n\n", "because ", "+", "=", "(x+1)(y-2)"),
]
LONG_TEXTS = [
    *(atom * (LONG // len(atom)) for atom in ATOMS),
    *(f"<answer>{atom * (290 // len(atom))}1</answer>" for atom in ATOMS),  # below the bound of a formula
    *(f"<answer>{atom * (990 // len(atom))}1</answer>" for atom in ATOMS),
    " " * 20_000,
    "<answer>" + " " * 20_000 + "</answer",
    "<answer>" * 5_000 + "</answer>" * 5_000,
    "<think>" * 5_000 + "7" + "</think>" * 5_000,
    "(" * 50_000 + ")" * 50_000,
    "<answer>" + '{"a":' * 3_000 + "1" + "}" * 3_000 + "</answer>",
    "\\boxed{" * 10_000 + "7" + "}" * 10_000,
    "<answer>" + "(" * 400 + "1" + ")" * 400 + "</answer>",
    "1." * 50_000,
    "1,111," * 16_000,
]


@functools.lru_cache(maxsize=1)
def completions():
    """Every long text, and short ones drawn from the pieces: the same at every run."""
    dice = random.Random(0)
    texts = list(LONG_TEXTS)
    while len(texts) < ROWS:
        inner = "".join(dice.choices(ATOMS, k=dice.randint(1, 12)))
        texts.append(f"<think>{inner[:50]}</think><answer>{inner}</answer>" if dice.random() < 0.5 else inner)
    return texts


def rewards(names):
    config = settings(f"reward=[{','.join(names)}]", *[need for need in NEEDS if need.split(".")[1] in names])
    return {name: instantiate(config.reward[name], _convert_="all") for name in names}


def scores(names):
    texts = completions()
    rows = len(texts)
    columns = {
        "answer": (["72", "\\frac{1}{2}", "7" if "numeric" in names else "x^2 + 1", 7] * rows)[:rows],
        "numbers": [[1, 2, 3]] * rows,
        "target": [6] * rows,
        "task": ["basic_arithmetic"] * rows,
        "metadata": [{}] * rows,
        "tests": [[{"input": "72", "output": "72"}]] * rows,
        "turn_scores": [((0, 0.5), (1, -1.0))] * rows,
    }
    ids = [list(range(len(text) % 700)) for text in texts]
    return Scoring(rewards(names), ["p"] * rows, columns).finish(texts, ids)


@pytest.fixture(scope="module", autouse=True)
def two_workers():
    with limited(2):
        yield


@pytest.mark.slow
def test_every_reward_takes_thousands_of_hostile_completions():
    assert len(completions()) == ROWS
    assert sum(len(text) >= LONG - 5_000 for text in completions()) > 50
    took = {}
    for name in NAMES:
        began = time.perf_counter()
        found = scores([name])
        took[name] = time.perf_counter() - began
        assert len(found.values[name]) == ROWS
        assert found.failed.get(name, 0.0) < 0.02, name  # some formulas keep sympy busy until its worker is ended
    print({name: round(seconds, 2) for name, seconds in took.items()})
    # What starts a process for each program that it finds is no function of text; tests/test_sandbox.py has its rate.
    assert sum(seconds for name, seconds in took.items() if name != "code") < SECONDS, took
