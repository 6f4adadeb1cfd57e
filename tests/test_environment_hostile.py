"""10,000 hostile turns: each gets a reply of bounded length or ends its episode, and no reply speaks for others."""

import time
from collections import Counter

import pytest

from grpo_lightning.environment import BadCall
from grpo_lightning.environment.base import StepResult
from grpo_lightning.environment.builtin import Retry
from grpo_lightning.environment.gymnasium import Gymnasium
from grpo_lightning.environment.python import _cell
from grpo_lightning.environment.tools import Tools
from grpo_lightning.policy.chat import special_ids
from grpo_lightning.reward.accuracy import exact
from tests.support import toolbox
from tests.support.hostile_turns import turns
from tests.test_replies import made

NUMBER = 10_000
LONGEST = 9 * (2000 + 100)  # eight results, and the word on further calls


@pytest.fixture(scope="module")
def hostile():
    return turns(NUMBER, seed=0)


@pytest.fixture(scope="module")
def replies(hostile):
    """What tools reply to each, and the time that the slowest took."""
    tools = Tools([toolbox.add, toolbox.echo, toolbox.now, toolbox.paint, toolbox.misbehave])

    def seconds(turn):
        began = time.thread_time()
        tools(turns=[turn])
        return time.thread_time() - began

    found, slow = [], []
    for turn in hostile:
        began = time.thread_time()
        found.append(tools(turns=[turn]))
        if time.thread_time() - began > 0.1:
            slow.append(turn)
    # A turn that takes long does so again; a collection of this process's garbage does not.
    return found, max((min(seconds(turn) for _ in range(3)) for turn in slow), default=0.0)


def test_none_escapes_hangs_or_raises(replies):
    found, slowest = replies
    kinds = Counter(type(reply) for reply in found)
    assert set(kinds) == {str, BadCall, type(None)}
    assert min(kinds.values()) > 500  # all of the three are tried
    for reply in found:
        if reply is not None:
            assert len(reply) <= LONGEST
            reply.encode()
            assert StepResult.of(reply).is_bad_call is isinstance(reply, BadCall)
            assert "Traceback" not in reply
            assert "site-packages" not in reply
    assert slowest < 0.5


@pytest.mark.parametrize("role", ["tool", "user"])
def test_no_reply_speaks_for_others(replies, role):
    template = made("qwen2_5")
    tokenizer = template._tokenizer
    special = special_ids(tokenizer)

    def specials(text):
        return [one for one in template.ids(text, role=role, after=None) if one in special]

    frame = specials("3")
    assert len(frame) == 4  # the end of the model's turn, a begin and an end, and the begin of its next turn
    for reply in {reply for reply in replies[0] if reply is not None}:
        assert specials(reply) == frame


@pytest.mark.slow
def test_other_environments_take_them_too(hostile):
    game, retry = Gymnasium("FrozenLake-v1"), Retry(exact, max_turns=2, discount=1.0, reply="no")
    for turn in hostile[:2000]:
        assert isinstance(game(turns=[turn], seed=0), BadCall)
        assert retry(turns=[turn], answer="7") == "no"
        assert _cell(turn) is None or isinstance(_cell(turn), str)
