"""The chunked LM head against all logits at once, and the products below it."""

import pytest
import torch
from torch.testing import assert_close
from transformers import (
    CohereConfig,
    CohereForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
)

from grpo_lightning.transformer import lm_head
from grpo_lightning.transformer.lm_head import LMHead, token_logprobs
from grpo_lightning.types import SamplingSupport

SIZE, WIDTH, VOCABULARY = 7, 6, 11
HALF, CPU = torch.bfloat16, torch.device("cpu")


def made(*, dtype=torch.float32):
    torch.manual_seed(0)
    weight = (torch.randn(VOCABULARY, WIDTH) * 0.8).to(dtype).requires_grad_()
    hidden = torch.randn(SIZE, WIDTH).to(dtype).requires_grad_()
    return LMHead(weight), hidden, torch.randint(VOCABULARY, (SIZE,))


def plain(head, hidden, ids, temperature, support=None):
    logits = torch.nn.functional.linear(hidden, head.weight)
    return token_logprobs(logits, ids, temperature, entropy_gradient=True, support=support)


def test_token_logprobs_by_hand():
    # logits (0, log 3) / 0.5 = (0, log 9): probabilities 1/10 and 9/10
    logits = torch.tensor([[1.0, 3.0]]).log()
    logprobs, entropy = token_logprobs(logits, torch.tensor([1]), 0.5)
    assert_close(logprobs, torch.tensor([0.9]).log())
    assert_close(entropy, -(0.1 * torch.tensor([0.1]).log() + 0.9 * torch.tensor([0.9]).log()))


SETS = [[0, 3, 10], [], [7], [1, 2, 3, 4, 5, 6], list(range(11)), [2, 9], []]
"""What each of the seven tokens was drawn from; nothing stands for the whole vocabulary."""


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_values_and_gradients_are_those_of_all_logits(temperature):
    head, hidden, ids = made()
    within = torch.tensor([one[len(one) // 2] if one else int(drawn) for one, drawn in zip(SETS, ids)])
    sizes, tokens = torch.tensor([len(one) for one in SETS]), torch.tensor([t for one in SETS for t in one])
    sets = SamplingSupport(sizes.int(), tokens.int())
    slopes = torch.randn(SIZE), torch.randn(SIZE)

    def right(_, part):
        return slopes[0][part]

    def wrong(logprobs, _):
        return torch.ones(len(logprobs))

    for chosen, support in ((ids, None), (within, sets)):
        for bonus in (False, True):
            expected = plain(head, hidden, chosen, temperature, support)[: 1 + bonus]
            gradients = torch.autograd.grad(expected, [hidden, head.weight], slopes[: 1 + bonus])
            # One token, three tokens, all; and another gradient may arrive than the one that is known beforehand.
            for chunk, known in ((1, None), (3 * VOCABULARY, right), (10_000, wrong)):
                options = {"temperature": temperature, "entropy": bonus, "support": support, "chunk": chunk}
                found = head(hidden, chosen, **options, loss_gradient=known)[: 1 + bonus]
                assert_close(found, expected, rtol=1e-5, atol=1e-6)
                found_gradients = torch.autograd.grad(found, [hidden, head.weight], slopes[: 1 + bonus])
                assert_close(found_gradients, gradients, rtol=1e-4, atol=2e-6)


def test_with_the_right_gradient_the_logits_are_made_once(monkeypatch):
    head, hidden, ids = made()
    calls = []
    linear = lm_head.linear
    monkeypatch.setattr(lm_head, "linear", lambda *factors: calls.append(1) or linear(*factors))
    slopes = torch.randn(SIZE)
    for slope, count in ((lambda _, part: slopes[part], 1), (lambda _, part: 2 * slopes[part], 2), (None, 2)):
        calls.clear()
        head(hidden, ids, temperature=1.0, entropy=False, loss_gradient=slope)[0].backward(slopes)
        assert len(calls) == count


def test_impossible_tokens_have_no_entropy():
    # logits 0, log 3, -inf: probabilities 1/4, 3/4, 0
    weight = torch.tensor([[1.0], [3.0], [1.0]]).log()
    weight[2] = -torch.inf
    weight.requires_grad_()
    logprobs, entropy = LMHead(weight)(torch.ones(1, 1), torch.tensor([1]), temperature=1.0, entropy=True)
    assert_close(logprobs, torch.tensor([0.75]).log())
    assert_close(entropy, torch.tensor([0.5623351]))  # -(.25 log .25 + .75 log .75)
    entropy.sum().backward()
    # dH/dz = -p (log p + H): -.25 (-1.3862944 + .5623351), -.75 (-.2876821 + .5623351)
    assert_close(weight.grad, torch.tensor([[0.2059898], [-0.2059898], [0.0]]))


def test_half_precision_sums_in_float32():
    head, hidden, ids = made(dtype=HALF)
    exact = LMHead(head.weight.detach().float().requires_grad_()), hidden.detach().float().requires_grad_()
    found = head(hidden, ids, temperature=1.0, entropy=False, chunk=VOCABULARY)[0]
    expected = exact[0](exact[1], ids, temperature=1.0, entropy=False)[0]
    assert found.dtype == torch.float32
    assert_close(found, expected, rtol=0, atol=0.05)
    found.sum().backward()
    expected.sum().backward()
    assert head.weight.grad.dtype == HALF
    assert_close(head.weight.grad.float(), exact[0].weight.grad, rtol=0.02, atol=0.02)
    # 1 + 2^-10 needs 11 bits, of which bfloat16 has 8
    total = torch.ones(1, 1)
    lm_head.add_product(total, torch.tensor([[2.0**-5]], dtype=HALF), torch.tensor([[2.0**-5]], dtype=HALF))
    assert total.item() == 1 + 2.0**-10


def test_under_autocast_products_alone_are_rounded():
    head, hidden, ids = made()
    with torch.autocast("cpu", dtype=HALF):
        logprobs, entropy = head(hidden, ids, temperature=0.7, entropy=True, chunk=VOCABULARY)
        logits = head.logits(hidden, head.weight, 0.7)
    assert logprobs.dtype == entropy.dtype == logits.dtype == torch.float32
    exact = torch.distributions.Categorical(logits=logits.double())
    assert_close(entropy.double(), exact.entropy(), rtol=0, atol=1e-5)
    assert_close(logprobs.double(), exact.log_prob(ids), rtol=0, atol=1e-5)


SMALL = {
    **{"vocab_size": 50, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2},
    **{"num_key_value_heads": 1, "head_dim": 8, "bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0},
}


def test_a_head_that_is_more_than_a_matrix_is_not_taken_for_one():
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SMALL, tie_word_embeddings=False))
    head, ids = LMHead.from_model(model), torch.randint(50, (1, 6))
    hidden = model.get_decoder()(ids).last_hidden_state[0]
    assert_close(head.logits(hidden, head.weight, 1.0), model(ids).logits[0], rtol=1e-5, atol=1e-6)
    for layer in (torch.nn.Linear(16, 50), torch.nn.Sequential(torch.nn.Linear(16, 50, bias=False))):
        model.lm_head = layer
        assert LMHead.from_model(model) is None
    for other in (
        Gemma2ForCausalLM(Gemma2Config(**SMALL, final_logit_softcapping=30.0)),
        CohereForCausalLM(CohereConfig(**SMALL, logit_scale=0.3)),
        GraniteForCausalLM(GraniteConfig(**SMALL, logits_scaling=5.0)),
    ):
        assert LMHead.from_model(other) is None


@pytest.fixture
def like_gpu(monkeypatch):
    """PyTorch's products of 16-bit matrices in float32, which it has on GPUs only; the names of those called."""
    called = []

    def mm(one, other, out_dtype):
        called.append("mm")
        assert one.dtype == other.dtype == HALF
        assert out_dtype == torch.float32
        return one.float() @ other.float()

    def addmm(total, one, other, out_dtype, *, beta=1, alpha=1, out):
        called.append("addmm")
        assert total.dtype == out.dtype == torch.float32
        assert beta == alpha == 1
        return out.copy_(total + one.float() @ other.float())

    library = torch.library.Library("aten", "IMPL")
    library.impl("mm.dtype", mm, "CPU")
    library.impl("addmm.dtype_out", addmm, "CPU")
    monkeypatch.setattr(lm_head, "keeps_sums", lambda device, dtype: dtype == HALF)
    yield called
    library._destroy()


def test_on_a_gpu_logits_are_not_rounded_and_gradients_add_up_in_float32(like_gpu):
    torch.manual_seed(0)
    values = [torch.randn(9, 32), torch.randn(50, 32) * 0.3]  # hidden states, weight
    ids, slopes = torch.randint(50, (9,)), torch.randn(9)
    exact = [each.to(HALF).double().requires_grad_() for each in values]  # what autocast rounds them to
    expected = (torch.nn.functional.linear(*exact) / 0.8).log_softmax(-1).gather(-1, ids[:, None])[:, 0]
    gradients = torch.autograd.grad(expected, exact, slopes.double())
    for chunk in (2 * 50, 10_000):  # two tokens, all
        inputs = [each.clone().requires_grad_() for each in values]
        with torch.autocast("cpu", dtype=HALF):
            found, _ = LMHead(inputs[1])(inputs[0], ids, temperature=0.8, entropy=False, chunk=chunk)
            found_gradients = torch.autograd.grad(found, inputs, slopes)
        # On a CPU, where logits are rounded to 8 bits, log-probabilities are off by up to 0.01.
        assert_close(found.double(), expected, rtol=0, atol=2e-6)
        for one, other in zip(found_gradients, gradients):
            assert one.dtype == torch.float32
            assert_close(one.double(), other, rtol=0.01, atol=0.01 * float(other.abs().max()))
    assert set(like_gpu) == {"mm", "addmm"}
    like_gpu.clear()
    LMHead(values[1])(values[0], ids, temperature=0.8, entropy=False)
    assert not like_gpu  # nothing of the kind in float32
