"""The shipped policy is what the README says: small, in Hugging Face format, and right less often than it could be."""

import string

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from grpo_lightning.policy.loading import load, resolve
from grpo_lightning.rollout.scoring import StepContext
from grpo_lightning.types import Prompts
from grpo_lightning.validation import Validation
from tests.support.composed import ROOT, build, composed

PATH = resolve("pkg://grpo_lightning/policy/tiny")
TAUGHT = sorted(composed()["taught"])


def test_it_is_small_and_loads_like_any_model():
    directory = ROOT / "grpo_lightning" / "policy" / "tiny"
    assert sum(path.stat().st_size for path in directory.iterdir()) < 5_000_000
    model = AutoModelForCausalLM.from_pretrained(PATH)
    assert 0.5e6 < sum(p.numel() for p in model.parameters()) < 1.2e6
    assert {p.dtype for p in model.parameters()} == {torch.float32}


def test_its_tokenizer_reads_and_writes_all_of_printable_ascii():
    tokenizer = AutoTokenizer.from_pretrained(PATH)
    text = "\n" + "".join(c for c in string.printable if c.isprintable())
    assert len(text) == 96
    ids = tokenizer(text)["input_ids"]
    assert len(ids) == len(set(ids)) == 96
    assert tokenizer.decode(ids, skip_special_tokens=True) == text
    tagged = "<think>1 + 2</think><answer>3</answer>"
    assert len(tokenizer(tagged)["input_ids"]) == 4 + len("1 + 2") + 1
    assert tokenizer.decode(tokenizer(tagged)["input_ids"], skip_special_tokens=True) == tagged
    assert tokenizer.eos_token_id not in tokenizer("an <eos> in a prompt ends nothing")["input_ids"]
    assert tokenizer.decode(tokenizer("ümlaut")["input_ids"]) == "<unk>mlaut"


def test_it_was_taught_three_tasks():
    assert len(TAUGHT) >= 3


@pytest.mark.slow
@pytest.mark.parametrize("task", TAUGHT)
def test_its_samples_are_often_wrong_while_its_likeliest_answer_mostly_is_right(task):
    parts = build(f"data.task={task}", "data.validation_size=100")
    data = parts("data")
    data.load()
    prompts = Prompts.collate([data.validation[i] for i in range(100)])
    policy = load(PATH, dtype="float32", attn_implementation="sdpa", trust_remote_code=False)
    found = {}
    for temperature in (0.0, 1.0):
        validation = Validation(
            parts("reward"),
            "accuracy",
            1.0,
            every=1,
            samples_per_prompt=2,
            ks=[1],
            temperature=temperature,
            top_p=1.0,
            top_k=0,
            min_p=0.0,
            max_new_tokens=36,
            stop=[],
        )
        validation.step(policy, prompts, completed_steps=0, context=StepContext(seed=1))
        found[temperature] = validation.compute()
    assert found[0.0]["val/pass@1"] > 0.6
    assert 0.1 < found[1.0]["val/pass@1"] < 0.85
    assert found[0.0]["val/pass@1"] > found[1.0]["val/pass@1"] + 0.1
    assert found[1.0]["val/reward/format"] > 0.95
