"""The native sampler: the same completions for any batch and any pace, and a step as a GPU needs it."""

import itertools
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing import assert_close

from grpo_lightning.memory import COPIED, GiB, Shape
from grpo_lightning.sampler import Completions, Conversation, GenerationRequest, Sampler, StopStrings, fused_decode
from grpo_lightning.sampler.kv_cache import attend, attend_written_out, rows_within
from grpo_lightning.sampler.native import CUDAGraphStep, DecodeBatch, decode
from grpo_lightning.types import Sampling
from tests.support.checkpoints import ARCHITECTURES, write_checkpoint
from tests.support.composed import composed
from tests.support.episodes import FakeResponder, chatty
from tests.support.oracle import sampled_alone
from tests.support.sampling import ENDS, LENGTH, OPTIONS, PLAIN, PROMPTS, generate, opened


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    root = tmp_path_factory.mktemp("checkpoints")
    return {name: write_checkpoint(root / name, name, chat=False) for name in ARCHITECTURES}


@pytest.fixture
def policy(request, checkpoints):
    return opened(checkpoints[request.param])


@pytest.fixture
def llama(checkpoints):
    return opened(checkpoints["llama"])


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


def begun(policy, *, group_size, sampling, responder=None):
    """The KV cache and the request of `NativeSampler.generate`."""
    prompts = policy.tokenize(PROMPTS)
    request = GenerationRequest(
        prompts=prompts,
        places=[(prompt, member) for prompt in range(len(prompts)) for member in range(group_size)],
        longest=max(map(len, prompts)) + sampling.max_new_tokens,
        sampling=sampling,
        seed=5,
        end_ids=policy.end_ids,
        pad_id=policy.pad_id,
        stops=StopStrings(policy.tokenizer, sampling.stop) if sampling.stop else None,
        conversation=responder and Conversation(responder, policy),
    )
    return policy.kv_cache(prompts, group_size, longest=request.longest), request


def decoded(policy, *, group_size=4, options=PLAIN, like_gpu=False, **pace):
    """What it decodes, with the pace chosen here; ``like_gpu`` takes every turn that a GPU would."""
    cache, request = begun(policy, group_size=group_size, sampling=Sampling(**PLAIN | dict(options)))
    if like_gpu:
        cache._on_cpu = False
    with policy.eval_mode():
        return decode(cache, request, **pace)


@pytest.mark.parametrize(
    ("policy", "kind"),
    [
        *(("llama", "plain"), ("gpt2", "truncated"), ("llama", "stop"), slow("qwen2", "temperature")),
        *(slow("qwen3", "stop"), slow("gemma", "plain"), slow("mistral", "truncated"), slow("gpt2", "stop")),
    ],
    indirect=["policy"],
)
def test_completions_are_those_of_one_row_alone_without_a_cache(policy, kind):
    sampling = Sampling(**PLAIN | OPTIONS[kind])
    expected = sampled_alone(policy, PROMPTS, group_size=3, sampling=sampling, seed=5)
    assert len({len(ids) for ids, *_ in expected}) > 3
    for copied, pace in ((0, {}), (1 << 20, {"sync_every": 16}), (0, {"max_concurrent": 2, "sync_every": 5})):
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(COPIED, "cpu", copied)
            found = decoded(policy, group_size=3, options=OPTIONS[kind], **pace)
        for row, (ids, logprobs, entropies, sets) in enumerate(expected):
            mask = found.mask[row]
            assert found.ids[row][mask].tolist() == ids
            assert_close(found.logprobs[row][mask], torch.tensor(logprobs), rtol=0, atol=1e-4)
            assert_close(found.entropies[row][mask], torch.tensor(entropies), rtol=0, atol=1e-4)
            assert found.ids[row][~mask].eq(policy.pad_id).all()
            text = policy.tokenizer.decode(ids, clean_up_tokenization_spaces=False)
            stopped = ids[-1] in ENDS or any(stop in text for stop in sampling.stop)
            assert bool(found.finished[row]) == (len(ids) < LENGTH or stopped)
            assert (found.support is not None) == sampling.truncated
            if found.support is not None:
                assert found.support.flat.lists()[row * len(mask) : row * len(mask) + len(ids)] == sets
                assert found.support.sizes[row][~mask].count_nonzero() == 0


@pytest.mark.slow
@pytest.mark.parametrize(  # a prompt's keys once per group, copied later, copied at first
    ("policy", "copied"),
    [("llama", 8000), ("gpt2", 1 << 20), ("qwen3", 0)],
    indirect=["policy"],
)
def test_neither_the_pace_nor_the_places_change_a_completion(policy, monkeypatch, copied):
    monkeypatch.setitem(COPIED, "cpu", copied)
    expected = decoded(policy)
    assert len(set(expected.mask.sum(-1).tolist())) > 4
    # any two of the three in each of their ways together
    for number, (sync_every, max_concurrent) in enumerate(itertools.product((1, 16), (None, 1, 5))):
        found = decoded(policy, sync_every=sync_every, max_concurrent=max_concurrent, like_gpu=number % 2 == 0)
        assert torch.equal(found.ids, expected.ids)
        assert torch.equal(found.finished, expected.finished)
        assert_close(found.logprobs, expected.logprobs, rtol=0, atol=1e-4)


# --- a step ----------------------------------------------------------------------------------------------------------


@contextmanager
def in_the_middle(policy, monkeypatch, *, kind="plain", copied=0):
    """A batch with some tokens sampled and room for more, as between two looks on a GPU; with replies in multi-turn."""
    monkeypatch.setattr(fused_decode, "has_onednn", lambda *_: False)  # what oneDNN has packed cannot be traced
    monkeypatch.setitem(COPIED, "cpu", copied)
    sampling = Sampling(**PLAIN | {"max_new_tokens": 100} | OPTIONS[kind])
    responder = FakeResponder(chatty) if kind == "multi_turn" else None
    cache, request = begun(policy, group_size=2, sampling=sampling, responder=responder)
    cache._on_cpu = False
    batch = DecodeBatch(cache, request, steps=64)
    if responder:
        batch._forced[:, 4:7] = torch.tensor([ENDS[0], 30, 31])
    with policy.eval_mode(), torch.no_grad():
        batch.open(range(6))
        cache.reserve(3)
        for _ in range(3):
            batch.step()
        batch.sync()
        cache.reserve(64)
        yield batch, cache


def tensors(batch, cache) -> list[torch.Tensor]:
    """Everything that a step finds there, but for weights."""
    fields = [*vars(batch).items(), *vars(batch.support).items(), *vars(cache).items()]
    found = [value for name, value in fields if isinstance(value, torch.Tensor) and name != "_mask"]
    pairs = [*cache._own.values(), *cache._shared.values()]
    found += [tensor for pair in pairs for tensor in pair]
    if cache._grouping is not None:
        found += [t for t in (cache._grouping._slots, cache._grouping._places) if t is not None]
    return found


@pytest.mark.parametrize(
    ("policy", "copied", "kind"),
    [
        *(("llama", 0, "plain"), ("gpt2", 1 << 20, "truncated"), slow("qwen3", 0, "multi_turn")),
        *(slow("mistral", 1 << 20, "multi_turn"), slow("gemma", 0, "truncated"), slow("qwen2", 1 << 20, "greedy")),
    ],
    indirect=["policy"],
)
def test_a_step_can_be_recorded_and_repeated(policy, monkeypatch, copied, kind):
    options = {"copied": copied, "kind": kind}
    with in_the_middle(policy, monkeypatch, **options) as (batch, _), FakeTensorMode(allow_non_fake_inputs=True):
        batch.step()  # looks at no value
        with pytest.raises(DataDependentOutputException):
            batch.sync()  # which shows that a look is noticed
    with in_the_middle(policy, monkeypatch, **options) as (batch, cache):
        version, before = cache.version, [(t.data_ptr(), t.shape) for t in tensors(batch, cache)]
        assert len(before) > 12
        for _ in range(12):
            batch.step()
        assert [(t.data_ptr(), t.shape) for t in tensors(batch, cache)] == before
        assert cache.version == version
        expected, sets = batch, batch.support.recent
    with in_the_middle(policy, monkeypatch, **options) as (batch, _):

        def step(unused):
            batch.step()
            return unused

        recorded = make_fx(step)(torch.zeros(1))  # which makes the first of the steps
        for _ in range(11):
            recorded(torch.zeros(1))
        assert torch.equal(batch.ids, expected.ids)
        assert_close(batch.logprobs, expected.logprobs, rtol=0, atol=1e-6)
        assert torch.equal(batch._count, expected._count)
        assert sets is batch.support.recent is None or torch.equal(batch.support.recent, sets)
        assert (sets is not None) == (kind in ("truncated", "multi_turn"))
    assert int(batch._count.max()) > 5


def test_attention_written_out_is_the_kernels():
    torch.manual_seed(0)
    query, key, value = torch.randn(3, 2, 4, 8), torch.randn(3, 2, 11, 8), torch.randn(3, 2, 11, 8)
    masked = torch.zeros(3, 1, 1, 11)
    masked[1, ..., 7:], masked[2, ..., 1:] = -torch.inf, -torch.inf
    for bias in (None, masked):
        found, expected = (attention(query, key, value, bias, 0.3) for attention in (attend_written_out, attend))
        assert_close(found, expected, rtol=0, atol=1e-5)


def test_every_step_is_made_once_whether_recorded_or_not(monkeypatch):
    made, graphs, recording = [], [], []

    @contextmanager
    def record(graph):
        recording.append(graph)
        yield
        recording.clear()

    def new_graph():
        graphs.append(SimpleNamespace(replay=lambda: made.append(1)))
        return graphs[-1]

    stream = MagicMock()
    fake = SimpleNamespace(CUDAGraph=new_graph, graph=record, stream=stream, Stream=stream, current_stream=stream)
    monkeypatch.setattr(torch, "cuda", fake)

    def step() -> None:
        if not recording:
            made.append(1)

    repeat = CUDAGraphStep(step, torch.device("cuda"))
    total = 0
    for times, version in ((16, 1), (16, 1), (1, 2), (1, 2), (16, 2), (5, 3), (1, 4)):
        repeat(times, version)
        total += times
        assert len(made) == total
    assert len(graphs) == 3  # of versions 1, 2 and 3; the steps of the fourth were too few


# --- a budget for keys and values ------------------------------------------------------------------------------------


def test_a_budget_by_hand():
    shape = Shape(trained=0, frozen=0, body=0, hidden=64, layers=10, intermediate=1, vocabulary=9, keys=32)
    token = 2 * 4 * 32 * 10 / GiB  # of keys and values in float32
    assert rows_within(600 * token, shape, number_bytes=4, longest=150) == 4
    assert rows_within(599 * token, shape, number_bytes=4, longest=150) == 3
    assert rows_within(600 * token, shape, number_bytes=2, longest=150) == 8
    with pytest.raises(ValueError, match=r"rollout\.kv_cache_gib=.* must be at least 0\.0004: .* up to 150 tokens"):
        rows_within(149 * token, shape, number_bytes=4, longest=150)
    assert composed("rollout.kv_cache_gib=0.5")["validation"]["kv_cache_gib"] == 0.5


@pytest.mark.parametrize("share_prompts", [True, False])
def test_completions_beyond_a_budget_wait_and_are_the_same(llama, monkeypatch, share_prompts):
    llama.share_prompts = share_prompts
    expected = generate(llama, PROMPTS, group_size=6, sampling=Sampling(**PLAIN), seed=2)
    opened_rows, plain = [], DecodeBatch.open
    monkeypatch.setattr(DecodeBatch, "open", lambda self, rows: opened_rows.append(list(rows)) or plain(self, rows))
    shape, longest = llama.shape(), max(map(len, llama.tokenize(PROMPTS))) + LENGTH
    gib = 7.5 * longest * 2 * 4 * shape.keys * shape.layers / GiB
    found = generate(llama, PROMPTS, group_size=6, sampling=Sampling(**PLAIN, kv_cache_gib=gib), seed=2)
    assert opened_rows == [list(range(7)), list(range(7, 14)), list(range(14, 18))]
    assert found.texts == expected.texts
    assert torch.equal(found.ids, expected.ids)


class Scripted(Sampler):
    """A user's own sampler: completions of the token 99, with some fields changed."""

    def __init__(self, **changed):
        self.changed = changed

    def sample(self, policy, request):
        ids = torch.full((len(request.places), request.sampling.max_new_tokens), 99)
        mask, zeros = torch.ones_like(ids, dtype=torch.bool), torch.zeros(ids.shape)
        return replace(Completions(ids, mask, mask, zeros, zeros, mask[:, 0]), **self.changed)


def test_what_a_sampler_of_ones_own_returns_is_checked(llama):
    def sample(responder=None, filters=PLAIN, **changed):
        sampling = Sampling(**filters | {"max_new_tokens": 3})
        return Scripted(**changed).generate(
            llama, PROMPTS[:2], group_size=2, sampling=sampling, seed=0, responder=responder
        )

    assert sample().ids[:, -3:].tolist() == [[99] * 3] * 4
    size = llama.num_embeddings
    for problem, given in (
        ("rows of 1 to rollout.max_new_tokens=3", {"ids": torch.full((4, 4), 99)}),
        ("needs 4 rows", {"ids": torch.full((2, 3), 99)}),
        (f"the token {size}: the model has {size}", {"ids": torch.full((4, 3), size)}),
        ("the token -1", {"ids": torch.full((4, 3), -1)}),
        ("support=None .* is_engine = True", {"filters": PLAIN | {"top_p": 0.9}}),
        (r"request.conversation.step\(0, ids\)", {"responder": SimpleNamespace(is_slow=False, role=None)}),
    ):
        with pytest.raises(ValueError, match=f"Scripted.sample returned .*{problem}"):
            sample(**given)
