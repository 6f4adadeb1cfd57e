"""What a GPU computes by compiled functions is what the functions compute."""

import pytest
import torch
from torch._dynamo.exc import TorchDynamoException
from torch.testing import assert_close

from grpo_lightning.memory import COPIED
from grpo_lightning.policy.loading import load
from grpo_lightning.sampler import fused_decode, kv_cache
from grpo_lightning.sampler.kv_cache import SharedPromptCache
from grpo_lightning.transformer import lm_head
from grpo_lightning.transformer.lm_head import LMHead
from grpo_lightning.types import Sampling
from tests.support.checkpoints import write_checkpoint
from tests.support.sampling import generate

PLAIN = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "max_new_tokens": 12}


def traced(function, dynamic):
    """As torch traces it, with mutations taken apart, but without the compiler of a device."""
    return torch.compile(function, dynamic=dynamic, backend="aot_eager", fullgraph=True)


@pytest.fixture
def as_if_it_paid(monkeypatch):
    """Everything that a GPU compiles is traced, with keys in one room and masks as a GPU has them."""
    torch._dynamo.reset()
    made = {}
    monkeypatch.setattr(lm_head, "should_compile", lambda tensor: True)
    monkeypatch.setattr(lm_head, "_compile", lambda f, dynamic: made.setdefault(f, traced(f, dynamic)))
    monkeypatch.setattr(fused_decode, "has_onednn", lambda *_: False)
    return made


def like_gpu(monkeypatch, *, copied: int) -> None:
    plain = SharedPromptCache.open

    def opened(self, rows):
        self._on_cpu = False
        return plain(self, rows)

    monkeypatch.setattr(SharedPromptCache, "open", opened)
    monkeypatch.setitem(COPIED, "cpu", copied)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "copied", "half"), [("llama", 0, True), ("qwen3", 4 << 20, False), ("llama", 4 << 20, True)]
)
def test_a_traced_sampler_draws_the_same(tmp_path, monkeypatch, request, name, copied, half):
    path = write_checkpoint(tmp_path / name, name, chat=False)

    def sampled(group_size):
        policy = load(str(path), dtype="float32", attn_implementation="sdpa", trust_remote_code=False)
        policy.end_ids = []
        sampling = Sampling(temperature=0.8, **PLAIN)
        with torch.autocast("cpu", torch.bfloat16, enabled=half, cache_enabled=False):
            return generate(policy, ["12 + 34 =", "Corgis are"], group_size=group_size, sampling=sampling, seed=3)

    monkeypatch.setattr(fused_decode, "has_onednn", lambda *_: False)
    like_gpu(monkeypatch, copied=copied)
    expected = [sampled(size) for size in (3, 4)]
    made = request.getfixturevalue("as_if_it_paid")
    torch._dynamo.utils.counters.clear()
    for other, size in zip(expected, (3, 4), strict=True):
        found = sampled(size)
        assert torch.equal(found.ids, other.ids)
        assert_close(found.logprobs, other.logprobs, rtol=0, atol=1e-5)
        assert_close(found.entropy, other.entropy, rtol=0, atol=1e-5)
    names = {function.__name__ for function in made}
    assert names == {"_qkv", "_mlp", "_from_all", "_logsumexp", "store", "merge_attention"}
    # All layers have a graph in common: one for the first number of rows, one for any other, and those of the trial.
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 4 * len(names)


def flash(query, key, value, queries, firsts, longest, room, *others, scale, seqused_k):
    """The kernel for GPUs as it is documented: row i has keys firsts[i] to firsts[i] + seqused_k[i] of every head."""
    rows = len(query)
    assert (longest, others, queries.tolist()) == (1, (0.0, False, False), list(range(rows + 1)))
    assert {number.dtype for number in (queries, firsts, seqused_k)} == {torch.int32}
    assert key.stride(-1) == value.stride(-1) == 1
    assert int(seqused_k.max()) <= room
    heads = key.shape[1]
    output, sums = torch.empty_like(query), torch.empty(query.shape[1], rows)
    for row, (first, count) in enumerate(zip(firsts.tolist(), seqused_k.tolist(), strict=False)):
        part = slice(first, first + count)
        # [n, Hkv, D] -> [Hkv, n, D], and [Hq, D] -> [Hkv, R, D]
        keys, values = key[part].transpose(0, 1), value[part].transpose(0, 1)
        scores = query[row].unflatten(0, (heads, -1)) @ keys.transpose(1, 2) * scale
        output[row] = (scores.softmax(-1) @ values).flatten(0, 1)
        sums[:, row] = scores.logsumexp(-1).flatten()
    return output, sums, None, None, None


@pytest.mark.parametrize(("copied", "max_concurrent"), [(0, 4), (4 << 20, None)])
def test_a_kernel_that_counts_keys_draws_the_same(tmp_path, monkeypatch, copied, max_concurrent):
    path = write_checkpoint(tmp_path / "llama", "llama", chat=False)

    def sampled():
        policy = load(str(path), dtype="float32", attn_implementation="sdpa", trust_remote_code=False)
        policy.end_ids = list(range(24))
        policy.max_concurrent = lambda *args, **options: max_concurrent
        sampling = Sampling(temperature=0.8, **PLAIN | {"max_new_tokens": 80})
        return generate(policy, ["12 + 34 =", "Corgis are", "a"], group_size=5, sampling=sampling, seed=3)

    expected = sampled()
    like_gpu(monkeypatch, copied=copied)
    calls = []
    monkeypatch.setattr(kv_cache, "counts_keys", lambda layers: True)
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", lambda *a, **k: calls.append(a) or flash(*a, **k))
    found = sampled()
    assert len({call[6] for call in calls}) > 1  # in rooms of several sizes
    assert torch.equal(found.ids, expected.ids)
    assert_close(found.logprobs, expected.logprobs, rtol=0, atol=1e-5)


def test_a_traced_head_has_the_same_gradients(request):
    torch.manual_seed(0)
    weight, hidden = torch.randn(500, 32, requires_grad=True), torch.randn(40, 32, requires_grad=True)
    ids, slopes = torch.randint(500, (40,)), torch.randn(40)

    def computed(early):
        known = (lambda _, part: slopes[part]) if early else None
        logprobs, _ = LMHead(weight)(hidden, ids, temperature=0.8, entropy=False, loss_gradient=known, chunk=16 * 500)
        return [logprobs.detach(), *torch.autograd.grad(logprobs, [hidden, weight], slopes)]

    expected = {early: computed(early) for early in (True, False)}
    made = request.getfixturevalue("as_if_it_paid")
    for early, other in expected.items():
        for one, two in zip(computed(early), other, strict=True):
            assert_close(one, two, rtol=1e-5, atol=1e-5)
    assert {function.__name__ for function in made} == {"_logsumexp", "_softmax_gradient"}


def test_a_traced_head_keeps_small_gradients_in_16_bits(as_if_it_paid):
    # p = 1 - 2^-12 for the chosen token: rounded to 16 bits before 1 is taken away, nothing would be left of it.
    weight = torch.tensor([[0.0], [-8.317522]]).to(torch.bfloat16).requires_grad_()
    hidden = torch.ones(1, 1, dtype=torch.bfloat16, requires_grad=True)
    logprobs, _ = LMHead(weight)(
        hidden, torch.tensor([0]), temperature=1.0, entropy=False, loss_gradient=lambda *_: torch.ones(1)
    )
    logprobs.sum().backward()
    assert weight.grad[0].item() == pytest.approx(2.0**-12, rel=0.02)


def test_without_a_compiler_functions_are_called_as_they_are(monkeypatch, caplog):
    def broken(*_):
        raise TorchDynamoException("no")

    def twice(x):
        return 2 * x

    monkeypatch.setattr(lm_head, "_NOT_COMPILED", set())
    monkeypatch.setattr(lm_head, "_compile", lambda function, dynamic: broken)
    one = lm_head.compile_function(twice)
    assert [one(2), one(3)] == [4, 6]
    assert [record.getMessage()[:31] for record in caplog.records] == ["torch cannot compile here, whic"]

    def full(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(lm_head, "_compile", lambda function, dynamic: full)
    with pytest.raises(torch.OutOfMemoryError):
        lm_head.compile_function(len)("abc")
