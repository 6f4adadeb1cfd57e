"""A reward model says what its own logits say, whatever it is batched with, and is loaded once."""

import gc
import logging
import weakref

import pytest
import torch
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForSequenceClassification, AutoTokenizer, BertConfig, BertForSequenceClassification

from grpo_lightning.reward import RewardError, RewardSpec, score
from grpo_lightning.reward.model import RewardModel, _holders
from tests.support.checkpoints import QUANTIZABLE, tokenizer, write_checkpoint, write_reward_model

SETTINGS = {
    "dtype": "float32",
    "device": "cpu",
    "batch_tokens": 200,
    "max_length": 256,
    "quantization": None,
    "label": 0,
    "trust_remote_code": False,
}
MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is 12 + 34?"}]
PROMPTS = ["What is 12 + 34?", MESSAGES, "Corgis are", "State the final answer"]
COMPLETIONS = ["46", "<think>Adding 12 and 34 gives 46.</think><answer>46</answer>", " small dogs.", " " + "pizza " * 9]
# By hand, from tests.support.checkpoints.CHATML.
CHAT_TEXTS = [
    "<|im_start|>user\nWhat is 12 + 34?<|im_end|>\n<|im_start|>assistant\n46<|im_end|>\n",
    "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nWhat is 12 + 34?<|im_end|>\n<|im_start|>assistant\n"
    "<think>Adding 12 and 34 gives 46.</think><answer>46</answer><|im_end|>\n",
]
PLAIN_TEXTS = [
    "What is 12 + 34?46",
    "Be brief.\n\nWhat is 12 + 34?<think>Adding 12 and 34 gives 46.</think><answer>46</answer>",
]


def reward_model(path, **settings) -> RewardModel:
    return RewardModel(path=str(path), **{**SETTINGS, **settings})


def alone(path, text, label=0) -> float:
    """The logit of one text that nothing is padded to, by transformers only."""
    words = AutoTokenizer.from_pretrained(path)
    model = AutoModelForSequenceClassification.from_pretrained(path, dtype=torch.float32)
    ids = words(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        return float(model(input_ids=ids).logits[0, label])


@pytest.fixture(scope="module")
def chat(tmp_path_factory):
    return write_reward_model(tmp_path_factory.mktemp("chat"), "qwen3", chat=True, labels=3)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return write_reward_model(tmp_path_factory.mktemp("plain"), "gpt2", chat=False, pad=False)


@pytest.mark.parametrize("label", [0, 2])
def test_a_score_is_the_logit_of_the_chat(chat, label):
    found = reward_model(chat, label=label)(PROMPTS[:2], COMPLETIONS[:2], answer=["46", "46"])
    assert found == pytest.approx([alone(chat, text, label) for text in CHAT_TEXTS], abs=1e-5)
    assert abs(found[0] - found[1]) > 0.1


def test_without_a_template_a_text_is_prompt_and_completion_also_if_nothing_names_a_padding_token(plain):
    found = reward_model(plain)(PROMPTS[:2], COMPLETIONS[:2])
    assert found == pytest.approx([alone(plain, text) for text in PLAIN_TEXTS], abs=1e-5)


@pytest.mark.parametrize("architecture", ["chat", "plain"])
def test_scores_keep_their_order_and_do_not_depend_on_the_batch(architecture, request):
    path = request.getfixturevalue(architecture)
    single = [reward_model(path)([prompt], [text])[0] for prompt, text in zip(PROMPTS, COMPLETIONS)]
    assert len({round(value, 3) for value in single}) == 4
    for tokens in (1, 70, 10_000):
        assert reward_model(path, batch_tokens=tokens)(PROMPTS, COMPLETIONS) == pytest.approx(single, abs=1e-5), tokens


def test_the_end_of_a_longer_text_is_read_and_said_once(chat, caplog):
    model = reward_model(chat, max_length=8)
    with caplog.at_level(logging.WARNING):
        (long, short) = model.encode(["What is 12 + 34?", "a"], ["46", "b"])
        model.encode(["What is 12 + 34?"], ["46"])
    words = AutoTokenizer.from_pretrained(chat)
    assert long == words(CHAT_TEXTS[0], add_special_tokens=False)["input_ids"][-8:]
    assert len(short) == 8
    warnings = [record.message for record in caplog.records if "max_length" in record.message]
    assert len(warnings) == 1
    assert "2 of 2 texts" in warnings[0]


def bert(directory, *, template=None, **settings):
    """A model that judges by its first token, and a tokenizer that puts one before and one after a text."""
    words = tokenizer(chat=False)
    words.add_special_tokens({"cls_token": "<|im_start|>", "sep_token": "<|im_end|>"})
    ends = [(name, words.convert_tokens_to_ids(name)) for name in ("<|im_start|>", "<|im_end|>")]
    words.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|im_start|> $A <|im_end|>", pair=None, special_tokens=ends
    )
    words.chat_template = template
    words.save_pretrained(directory)
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = BertConfig(vocab_size=len(words), max_position_embeddings=12, num_labels=1, pad_token_id=0, **sizes)
    BertForSequenceClassification(config).save_pretrained(directory)
    return reward_model(directory, max_length=12, **settings), words, [number for _, number in ends]


def test_what_is_cut_keeps_the_tokenizers_own_first_and_last_token(tmp_path):
    model, words, ends = bert(tmp_path)
    (row,) = model.encode(["What is 12 + 34? Corgis are"], [" small dogs, and 46."])
    assert (len(row), row[0], row[-1]) == (12, *ends)
    assert words.decode(row[1:-1]).endswith(" 46.")
    single = [model([prompt], [text])[0] for prompt, text in zip(["a", PROMPTS[0]], ["b", "c"])]
    assert model(["a", PROMPTS[0]], ["b", "c"]) == pytest.approx(single, abs=1e-6)  # in evaluation mode: no dropout


def test_equal_settings_share_one_copy_that_goes_with_the_last_of_them(chat):
    first, second = reward_model(chat), reward_model(chat, label=1)
    assert first.shares_weights(second)
    network = first.network
    assert second.network is network
    other = reward_model(chat, dtype="bfloat16")
    assert not first.shares_weights(other)
    assert other.network is not network
    gone, known = weakref.ref(network), len(_holders)
    del network, first
    gc.collect()
    assert gone() is not None
    del second
    gc.collect()
    assert gone() is None
    assert len(_holders) == known - 1


def test_neither_inference_mode_nor_autocast_nor_the_random_state_takes_part(chat):
    model, expected = reward_model(chat), reward_model(chat)(PROMPTS, COMPLETIONS)
    model.reset()
    state = torch.get_rng_state()
    with torch.inference_mode(), torch.autocast("cpu", dtype=torch.bfloat16):
        assert model(PROMPTS, COMPLETIONS) == expected
    assert torch.equal(torch.get_rng_state(), state)
    assert not any(tensor.is_inference() for tensor in [*model.network.parameters(), *model.network.buffers()])
    model.logits([[1, 2, 3]]).sum().backward()
    assert model.network.score.weight.grad.abs().sum() > 0


@pytest.mark.parametrize("bits, stored", [("8bit", "Linear8bitLt"), ("4bit", "Linear4bit")])
def test_quantized_weights_give_nearly_the_same(bits, stored, tmp_path):
    path = write_reward_model(tmp_path, "qwen3", chat=True, labels=3, seed=1, **QUANTIZABLE)
    model = reward_model(path, quantization=bits)
    assert type(model.network.model.layers[0].mlp.up_proj).__name__ == stored
    assert type(model.network.score).__name__ == "Linear"
    exact = torch.tensor(reward_model(path)(PROMPTS, COMPLETIONS))
    found = torch.tensor(model(PROMPTS, COMPLETIONS))
    assert (found - exact).abs().mean() < 0.5 * exact.std()


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"label": 3}, "label=3: allowed is 0 to 2"),
        ({"max_length": 513}, "max_length=513: allowed is at most 512, the context"),
    ],
)
def test_settings_beyond_the_model_are_refused_at_the_first_call(settings, message, chat):
    with pytest.raises(ValueError, match=f"reward.model.function.{message}"):
        reward_model(chat, **settings)(PROMPTS, COMPLETIONS)


def test_a_wrong_path_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"reward.model.function.path='.*nothing': no such file or directory"):
        reward_model(tmp_path / "nothing")
    model = reward_model(tmp_path)
    with pytest.raises(ValueError, match=rf"reward.model.function.path='{tmp_path}': transformers cannot read a seq"):
        model(["a"], ["b"])
    with pytest.raises(RewardError, match=r"reward 'model' raised ValueError: reward.model.function.path="):
        score({"model": RewardSpec(model, 1.0)}, ["a"], ["b"], {})


def test_a_language_model_is_no_reward_model(tmp_path):
    path = write_checkpoint(tmp_path, "llama", chat=True)
    with pytest.raises(ValueError, match="1 of the model's weights are missing there, such as score.weight"):
        reward_model(path)(["a"], ["b"])


def test_a_logit_that_is_not_finite_is_an_error(chat):
    model = reward_model(chat, device="cpu:0")  # weights of its own
    with torch.no_grad():
        model.network.score.weight.fill_(torch.inf)
    with pytest.raises(ValueError, match=r"gave (nan|inf|-inf) for row \d"):
        model(PROMPTS, COMPLETIONS)
