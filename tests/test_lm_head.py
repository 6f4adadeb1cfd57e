"""The chunked LM head against all logits at once, and the kernels below it."""

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

from grpo_lightning.transformer import kernels
from grpo_lightning.transformer.lm_head import LMHead, token_logprobs
from grpo_lightning.types import SamplingSupport

SIZE, WIDTH, VOCABULARY = 7, 6, 11


def made(*, bias=False, scale=1.0, softcap=None, dtype=torch.float32):
    torch.manual_seed(0)
    weight = (torch.randn(VOCABULARY, WIDTH) * 0.8).to(dtype).requires_grad_()
    bias = torch.randn(VOCABULARY).to(dtype).requires_grad_() if bias else None
    hidden = torch.randn(SIZE, WIDTH).to(dtype).requires_grad_()
    return LMHead(weight, bias, scale, softcap), hidden, torch.randint(VOCABULARY, (SIZE,))


def plain(head, hidden, ids, temperature, support=None):
    logits = torch.nn.functional.linear(hidden, head.weight, head.bias) * head.scale
    if head.softcap is not None:
        logits = head.softcap * torch.tanh(logits / head.softcap)
    return token_logprobs(logits, ids, temperature, entropy_gradient=True, support=support)


def leaves(head, hidden):
    return [t for t in (hidden, head.weight, head.bias) if t is not None]


def test_token_logprobs_by_hand():
    # logits (0, log 3) / 0.5 = (0, log 9): probabilities 1/10 and 9/10
    logits = torch.tensor([[0.0, 3.0]]).log().nan_to_num(neginf=0.0)
    logits[0, 0] = 0.0
    logprobs, entropy = token_logprobs(logits, torch.tensor([1]), 0.5)
    assert_close(logprobs, torch.tensor([0.9]).log())
    assert_close(entropy, -(0.1 * torch.tensor([0.1]).log() + 0.9 * torch.tensor([0.9]).log()))


CASES = pytest.mark.parametrize(
    "bias, scale, softcap, temperature",
    [(False, 1.0, None, 1.0), (True, 0.25, None, 0.7), (False, 0.25, 1.5, 0.7), (True, 1.0, 1.5, 1.0)],
)


@CASES
def test_values_and_gradients_are_those_of_all_logits(bias, scale, softcap, temperature):
    head, hidden, ids = made(bias=bias, scale=scale, softcap=softcap)
    expected = plain(head, hidden, ids, temperature)
    slopes = torch.randn(SIZE), torch.randn(SIZE)
    gradients = torch.autograd.grad(expected, leaves(head, hidden), slopes)
    for chunk in (1, 3 * VOCABULARY, 10_000):  # one token, three tokens, all
        found = head(hidden, ids, temperature=temperature, entropy=True, chunk=chunk)
        for one, other in zip(found, expected):
            assert_close(one, other, rtol=1e-5, atol=1e-6)
        for one, other in zip(torch.autograd.grad(found, leaves(head, hidden), slopes), gradients):
            assert_close(one, other, rtol=1e-4, atol=2e-6)


@CASES
def test_a_gradient_known_beforehand_changes_no_result(bias, scale, softcap, temperature):
    head, hidden, ids = made(bias=bias, scale=scale, softcap=softcap)
    slopes, asked = (torch.randn(SIZE), torch.randn(SIZE)), []

    def right(logprobs, part):
        asked.append(part)
        return slopes[0][part]

    def wrong(logprobs, part):
        asked.append(part)
        return torch.ones(len(logprobs))

    # Another gradient may arrive than the one that is known, and an entropy bonus comes on top.
    for known, bonus in ((right, False), (wrong, False), (right, True)):
        asked.clear()
        options = {"temperature": temperature, "entropy": bonus, "loss_gradient": known}
        found = head(hidden, ids, **options, chunk=3 * VOCABULARY)[: 1 + bonus]
        expected = plain(head, hidden, ids, temperature)[: 1 + bonus]
        assert_close(found, expected, rtol=1e-5, atol=1e-6)
        assert asked == ([] if bonus else [slice(0, 3), slice(3, 6), slice(6, 9)])
        for one, other in zip(
            torch.autograd.grad(found, leaves(head, hidden), slopes[: 1 + bonus]),
            torch.autograd.grad(expected, leaves(head, hidden), slopes[: 1 + bonus]),
        ):
            assert_close(one, other, rtol=1e-4, atol=2e-6)


SETS = [[0, 3, 10], [], [7], [1, 2, 3, 4, 5, 6], list(range(11)), [2, 9], []]
"""What each of the seven tokens was drawn from; nothing stands for the whole vocabulary."""


@CASES
def test_outside_of_a_set_there_is_neither_probability_nor_gradient(bias, scale, softcap, temperature):
    head, hidden, ids = made(bias=bias, scale=scale, softcap=softcap)
    ids = torch.tensor([one[len(one) // 2] if one else int(drawn) for one, drawn in zip(SETS, ids)])
    sizes, tokens = torch.tensor([len(one) for one in SETS]), torch.tensor([t for one in SETS for t in one])
    support = SamplingSupport(sizes.int(), tokens.int())
    with torch.no_grad():
        logits = torch.nn.functional.linear(hidden, head.weight, head.bias) * scale
        logits = (logits if softcap is None else softcap * torch.tanh(logits / softcap)) / temperature
    expected = plain(head, hidden, ids, temperature, support)
    for token, one in enumerate(SETS):
        by_hand = (logits[token, one] if one else logits[token]).log_softmax(-1)
        assert_close(expected[0][token], by_hand[one.index(int(ids[token])) if one else ids[token]])
        assert_close(expected[1][token], -(by_hand.exp() * by_hand).sum())
    slopes = torch.randn(SIZE), torch.randn(SIZE)
    for bonus, chunk in ((False, 1), (True, 3 * VOCABULARY), (False, 10_000)):
        options = {"temperature": temperature, "entropy": bonus, "support": support, "chunk": chunk}
        found = head(hidden, ids, **options, loss_gradient=lambda _, part: slopes[0][part])[: 1 + bonus]
        assert_close(found, expected[: 1 + bonus], rtol=1e-5, atol=1e-6)
        for one, other in zip(
            torch.autograd.grad(found, leaves(head, hidden), slopes[: 1 + bonus]),
            torch.autograd.grad(expected[: 1 + bonus], leaves(head, hidden), slopes[: 1 + bonus], retain_graph=True),
        ):
            assert_close(one, other, rtol=1e-4, atol=2e-6)
    only, three = (torch.autograd.grad(expected[0][n], head.weight, retain_graph=True)[0] for n in (2, 0))
    assert only.count_nonzero() == 0  # of a single token nothing can be learned
    assert three.any(-1).nonzero().flatten().tolist() == [0, 3, 10]


def test_with_the_right_gradient_the_logits_are_made_once(monkeypatch):
    head, hidden, ids = made()
    calls = []
    monkeypatch.setattr(LMHead, "scaled", lambda self, logits, temperature: calls.append(1) or logits)
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
    logprobs, entropy = LMHead(weight, None)(torch.ones(1, 1), torch.tensor([1]), temperature=1.0, entropy=True)
    assert_close(logprobs, torch.tensor([0.75]).log())
    assert_close(entropy, torch.tensor([0.5623351]))  # -(.25 log .25 + .75 log .75)
    entropy.sum().backward()
    # dH/dz = -p (log p + H): -.25 (-1.3862944 + .5623351), -.75 (-.2876821 + .5623351)
    assert_close(weight.grad, torch.tensor([[0.2059898], [-0.2059898], [0.0]]))


def test_half_precision_sums_in_float32():
    head, hidden, ids = made(dtype=torch.bfloat16)
    exact = LMHead(head.weight.detach().float().requires_grad_(), None), hidden.detach().float().requires_grad_()
    found = head(hidden, ids, temperature=1.0, entropy=False, chunk=VOCABULARY)[0]
    expected = exact[0](exact[1], ids, temperature=1.0, entropy=False)[0]
    assert found.dtype == torch.float32
    assert_close(found, expected, rtol=0, atol=0.05)
    found.sum().backward()
    expected.sum().backward()
    assert head.weight.grad.dtype == torch.bfloat16
    assert_close(head.weight.grad.float(), exact[0].weight.grad, rtol=0.02, atol=0.02)


def test_under_autocast_products_alone_are_rounded():
    head, hidden, ids = made(bias=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logprobs, entropy = head(hidden, ids, temperature=0.7, entropy=True, chunk=VOCABULARY)
        logits = head.logits(hidden, head.weight, head.bias, 0.7)
    assert logprobs.dtype == entropy.dtype == logits.dtype == torch.float32
    exact = torch.distributions.Categorical(logits=logits.double())
    assert_close(entropy.double(), exact.entropy(), rtol=0, atol=1e-5)
    assert_close(logprobs.double(), exact.log_prob(ids), rtol=0, atol=1e-5)


SMALL = {
    **{"vocab_size": 50, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2},
    **{"num_key_value_heads": 1, "head_dim": 8, "bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0},
}


@pytest.mark.parametrize(
    "model",
    [
        lambda: LlamaForCausalLM(LlamaConfig(**SMALL, tie_word_embeddings=False)),
        lambda: Gemma2ForCausalLM(Gemma2Config(**SMALL, final_logit_softcapping=0.05)),
        lambda: CohereForCausalLM(CohereConfig(**SMALL, logit_scale=0.3)),
        lambda: GraniteForCausalLM(GraniteConfig(**SMALL, logits_scaling=5.0)),
    ],
    ids=["untied", "soft-cap", "scale", "divisor"],
)
def test_the_models_own_logits(model):
    torch.manual_seed(0)
    model = model()
    head = LMHead.of(model)
    ids = torch.randint(50, (1, 6))
    hidden = model.get_decoder()(ids).last_hidden_state[0]
    assert_close(head.logits(hidden, head.weight, head.bias, 1.0), model(ids).logits[0], rtol=1e-5, atol=1e-6)


def test_a_head_that_is_more_than_a_layer_is_not_taken_for_one():
    model = LlamaForCausalLM(LlamaConfig(**SMALL))
    model.lm_head = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Linear(16, 50))
    assert LMHead.of(model) is None


HALF, CPU = torch.bfloat16, torch.device("cpu")


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
    monkeypatch.setattr(kernels, "keeps_sums", lambda device, dtype: dtype == HALF)
    yield called
    library._destroy()


def test_on_a_gpu_logits_are_not_rounded_and_gradients_add_up_in_float32(like_gpu):
    torch.manual_seed(0)
    values = [torch.randn(9, 32), torch.randn(50, 32) * 0.3, torch.randn(50)]  # hidden states, weight, bias
    ids, slopes = torch.randint(50, (9,)), torch.randn(9)
    exact = [each.to(HALF).double().requires_grad_() for each in values]  # what autocast rounds them to
    expected = (torch.nn.functional.linear(*exact) / 0.8).log_softmax(-1).gather(-1, ids[:, None])[:, 0]
    gradients = torch.autograd.grad(expected, exact, slopes.double())
    for chunk in (2 * 50, 10_000):  # two tokens, all
        inputs = [each.clone().requires_grad_() for each in values]
        with torch.autocast("cpu", dtype=HALF):
            found, _ = LMHead(*inputs[1:])(inputs[0], ids, temperature=0.8, entropy=False, chunk=chunk)
            logits = kernels.linear(*values)
            found_gradients = torch.autograd.grad(found, inputs, slopes)
        # On a CPU, where logits are rounded to 8 bits, log-probabilities are off by up to 0.01.
        assert_close(found.double(), expected, rtol=0, atol=2e-6)
        assert_close(logits.double(), torch.nn.functional.linear(*exact), rtol=0, atol=2e-6)
        for one, other in zip(found_gradients, gradients):
            assert one.dtype == torch.float32
            assert_close(one.double(), other, rtol=0.01, atol=0.01 * float(other.abs().max()))
    assert set(like_gpu) == {"mm", "addmm"}
    like_gpu.clear()
    LMHead(*values[1:])(values[0], ids, temperature=0.8, entropy=False)
    assert not like_gpu  # nothing of the kind in float32


def test_sums_over_chunks_do_not_round_each():
    # 1 + 2^-10 needs 11 bits, of which bfloat16 has 8
    total = torch.ones(1, 1)
    kernels.add_product(total, torch.tensor([[2.0**-5]], dtype=HALF), torch.tensor([[2.0**-5]], dtype=HALF))
    assert total.item() == 1 + 2.0**-10
    kernels.add_product(total, torch.tensor([[3.0]]), torch.tensor([[1 / 4]]))
    assert total.item() == 1.75 + 2.0**-10
    assert not kernels.keeps_sums(CPU, HALF)
    assert not kernels.keeps_sums(torch.device("cuda"), torch.float32)
