"""Environments as settings and as objects: what composes, what is refused, and what the policy is told."""

import pytest
import torch

import grpo_lightning as grpo
from grpo_lightning.environment import GeneratorEnvironment
from tests.support.checkpoints import write_checkpoint
from tests.support.composed import build

SMALL = ("steps=2", "data.prompts_per_step=2", "rollout.group_size=4", "rollout.max_new_tokens=8", "trainer=cpu")
GUESS = "environment=custom environment.function._target_=tests.support.environments.guess"
ROWS = [{"prompt": f"Guess {number}", "number": number} for number in range(6)]


def letters(completions, **columns):
    return [float(len(set(text))) for text in completions]


def test_training_and_validation_have_the_same_environment():
    words = [*GUESS.split(), "environment.max_turns=3", "environment.timeout=2", "environment.role=tool"]
    rollout, validation = build(*words)("rollout"), build(*words)("validation")
    assert rollout.scorer.environment is rollout.environment
    for one in (rollout.environment, validation.scorer.environment):
        assert (one.max_turns, one.timeout, one.max_failed, one.failed_score) == (3, 2, 0.5, None)
        assert (one.max_reply, one.reply_role, one.name) == (10_000, "tool", "tests.support.environments.guess")
    shop = build("environment=custom", "environment.function._target_=tests.support.environments.shop")("environment")
    assert isinstance(shop.function, GeneratorEnvironment)


def welcome(turns):
    """A reply to the first turn, and 1 for a second one."""
    return 1.0 if len(turns) > 1 else ("more", 0.0)


@pytest.mark.slow
def test_a_supervised_stage_is_validated_in_the_environment(tmp_path):
    """Its weights are those of a stage without one, and what it could do there is seen."""
    words = ("module=sft", "policy=tiny", "seed=3", "validation.every=2", "schedule.warmup_steps=0", *SMALL)
    words = (*words, "rollout.max_new_tokens=100", "data.validation_size=6")
    rows = [{"prompt": f"Guess {number}", "completion": "7"} for number in range(12)]
    runs = [
        grpo.compose(*words, data=rows, reward=letters, run_dir=tmp_path / "alone"),
        grpo.compose(*words, "reward=[environment]", data=rows, environment=welcome, run_dir=tmp_path / "told"),
    ]
    for run in runs:
        run.fit()
    alone, told = (run.module.policy.state_dict() for run in runs)
    assert all(torch.equal(alone[name], told[name]) for name in alone)
    assert runs[1].metrics["val/pass@1"] == 1.0


TOOL = (
    "environment=custom",
    "environment.function._target_=tests.support.environments.Tool",
    "environment.function._partial_=false",
    "+environment.function.most=2",
)


def with_tools(path, *words):
    return grpo.compose(*SMALL, "policy=hf", f"policy.path={path}", *TOOL, *words, reward=letters, data=ROWS)


TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool.function.name }}: {{ tool.function.description }}\n{% endfor %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.mark.slow
def test_the_chat_template_is_given_the_tools_or_the_run_refused(tmp_path):
    path = write_checkpoint(tmp_path / "policy", "qwen2", chat=True)
    with pytest.raises(ValueError, match="the chat template .*does not show the tools add"):
        _ = with_tools(path).module
    with pytest.raises(ValueError, match=r"tools \(add\) need a policy with a chat template"):
        _ = with_tools(path, "policy.plain_text=true").module
    (path / "chat_template.jinja").write_text(TEMPLATE)
    policy = with_tools(path).module.policy
    assert policy.render("How much?").startswith("add: Sums up ${a} and ${b}.\n<|im_start|>user\nHow much?<|im_end|>")
    assert policy.chat.reply_role == "tool"
    assert "<|im_start|>tool\nmore" in policy.tokenizer.decode(policy.reply_ids("more", after=None))
    assert with_tools(path, "environment.role=user").module.policy.chat.reply_role == "user"
