"""The native sampler: the same completions for any batch and any pace, and a step as a GPU needs it."""

import itertools
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing import assert_close

from grpo_lightning.memory import COPIED, GiB, Shape
from grpo_lightning.sampler.native import fused_decode
from grpo_lightning.sampler.native.attention import attend, attend_written_out
from grpo_lightning.sampler.native.decode_batch import DecodeBatch
from grpo_lightning.sampler.native.kv_cache import rows_within
from grpo_lightning.sampler.native.multi_turn import MultiTurnBatch
from grpo_lightning.sampler.native.sampler import CUDAGraphStep, decode
from grpo_lightning.sampler.native.shared_prompt_cache import Buffers
from grpo_lightning.sampler.native.token_sampling import uniforms
from grpo_lightning.sampler.text import StopStrings
from grpo_lightning.types import Sampling
from tests.support.checkpoints import ARCHITECTURES, write_checkpoint
from tests.support.composed import composed
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


def decoded(policy, *, group_size=4, options=PLAIN, like_gpu=False, **pace):
    """What `NativeSampler.generate` does, with the pace chosen here; ``like_gpu`` takes every turn that a GPU would."""
    sampling = Sampling(**PLAIN | dict(options))
    tokens = policy.tokenize(PROMPTS)
    cache = policy.kv_cache(tokens, group_size, longest=max(map(len, tokens)) + sampling.max_new_tokens)
    if like_gpu:
        cache._on_cpu = False
    rows = [(prompt, member) for prompt in range(len(tokens)) for member in range(group_size)]
    with policy.eval_mode():
        return decode(
            cache,
            uniforms(5, rows, sampling.max_new_tokens),
            sampling=sampling,
            end_ids=policy.end_ids,
            pad_id=policy.pad_id,
            stops=StopStrings(policy.tokenizer, sampling.stop) if sampling.stop else None,
            **pace,
        )


@pytest.mark.parametrize(
    ("policy", "kind"),
    [
        *(("llama", "plain"), ("gpt2", "truncated"), slow("llama", "stop"), slow("qwen2", "temperature")),
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
            assert bool(found.finished[row]) == (len(ids) < LENGTH or ids[-1] in ENDS)
            assert (found.support is not None) == (kind == "truncated")
            if found.support is not None:
                assert found.support.flat.lists()[row * len(mask) : row * len(mask) + len(ids)] == sets
                assert found.support.sizes[row][~mask].count_nonzero() == 0


@pytest.mark.slow
@pytest.mark.parametrize(  # a prompt's keys once per group, copied later, copied at first
    ("policy", "copied"),
    [("llama", 0), ("llama", 8000), ("gpt2", 1 << 20), ("qwen2", 8000), ("qwen3", 0), ("gemma", 1 << 20)],
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


@pytest.mark.slow
def test_a_model_without_a_shared_path_is_sampled_in_blocks(llama):
    expected = decoded(llama)
    llama.share_prompts = False
    for max_concurrent in (None, 1, 5):
        assert torch.equal(decoded(llama, max_concurrent=max_concurrent).ids, expected.ids)


# --- a step ----------------------------------------------------------------------------------------------------------


@contextmanager
def in_the_middle(policy, monkeypatch, *, kind="plain", copied=0, tokens=64, size=6):
    """A batch with some tokens sampled and room for more, as between two looks on a GPU; with replies in multi-turn."""
    monkeypatch.setattr(fused_decode, "packs", lambda *_: False)  # what oneDNN has packed cannot be traced
    monkeypatch.setitem(COPIED, "cpu", copied)
    sampling = Sampling(**PLAIN | {"max_new_tokens": 100} | OPTIONS[kind])
    prompts = policy.tokenize(PROMPTS)
    cache = policy.kv_cache(prompts, 2, longest=max(map(len, prompts)) + 100)
    cache._on_cpu = False
    rows = [(prompt, member) for prompt in range(3) for member in range(2)]
    of = MultiTurnBatch if kind == "multi_turn" else DecodeBatch
    batch = of(cache, uniforms(5, rows, 100), sampling=sampling, end_ids=ENDS, steps=64)
    if kind == "multi_turn":
        batch._forced[:, 4:7] = torch.tensor([ENDS[0], 30, 31])
    with policy.eval_mode(), torch.no_grad():
        batch.open(range(size))
        cache.reserve(3)
        for _ in range(3):
            batch.step()
        batch.sync(None)
        cache.reserve(tokens)
        yield batch, cache


def tensors(batch, cache) -> list[torch.Tensor]:
    """Everything that a step reads and writes, but for weights."""
    holders = (batch, batch.support, cache)
    found = [value for one in holders for value in vars(one).values() if isinstance(value, torch.Tensor)]
    pairs = [*cache._buffers._layers.values(), *cache._shared.values()]
    found += [tensor for pair in pairs for tensor in pair]
    if cache._grouping is not None:
        found += [t for t in (cache._grouping._slots, cache._grouping._places) if t is not None]
    return found


STEPS = pytest.mark.parametrize(
    ("policy", "copied", "kind"),
    [
        *(("llama", 0, "plain"), ("gpt2", 1 << 20, "truncated")),
        *(slow("qwen3", 0, "multi_turn"), slow("mistral", 1 << 20, "plain"), slow("gemma", 0, "truncated")),
        *(slow("qwen2", 1 << 20, "greedy"), slow("llama", 1 << 20, "multi_turn"), slow("gpt2", 0, "greedy")),
    ],
    indirect=["policy"],
)
"""All kinds of sampling with prompts once per group and copied, over all architectures."""


@STEPS
def test_a_step_looks_at_no_value(policy, monkeypatch, copied, kind):
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    with in_the_middle(policy, monkeypatch, copied=copied, kind=kind) as (batch, _), fake:
        batch.step()
        with pytest.raises(DataDependentOutputException):
            batch.sync(None)  # which shows that a look is noticed


@STEPS
def test_a_recorded_step_repeated_equals_as_many_steps(policy, monkeypatch, copied, kind):
    with in_the_middle(policy, monkeypatch, copied=copied, kind=kind) as (batch, _):
        for _ in range(12):
            batch.step()
        expected = batch.ids.clone(), batch.logprobs.clone(), batch._count.clone()
        sets = None if batch.support.recent is None else batch.support.recent.clone()
    with in_the_middle(policy, monkeypatch, copied=copied, kind=kind) as (batch, _):

        def step(unused):
            batch.step()
            return unused

        recorded = make_fx(step)(torch.zeros(1))  # which makes the first of the steps
        for _ in range(11):
            recorded(torch.zeros(1))
        assert torch.equal(batch.ids, expected[0])
        assert_close(batch.logprobs, expected[1], rtol=0, atol=1e-6)
        assert torch.equal(batch._count, expected[2])
        assert sets is batch.support.recent is None or torch.equal(batch.support.recent, sets)
        assert (sets is not None) == (kind in ("truncated", "multi_turn"))
    assert int(expected[2].max()) > 5


@STEPS
def test_nothing_moves_between_two_looks(policy, monkeypatch, copied, kind):
    with in_the_middle(policy, monkeypatch, copied=copied, kind=kind, size=4) as (batch, cache):
        version, before = cache.version, [(t.data_ptr(), t.shape) for t in tensors(batch, cache)]
        assert len(before) > 12
        for step in range(40):
            batch.step()
            if step == 20:  # a completion takes the place of another
                batch.fill([1, 3], [4, 5])
        assert [(t.data_ptr(), t.shape) for t in tensors(batch, cache)] == before
        assert cache.version == version


def test_attention_written_out_is_the_kernels():
    for dtype, masked, tolerance in (
        (torch.float32, True, 1e-5),
        (torch.float32, False, 1e-5),
        (torch.bfloat16, True, 2e-2),
    ):
        torch.manual_seed(0)
        query, key, value = torch.randn(3, 2, 4, 8), torch.randn(3, 2, 11, 8), torch.randn(3, 2, 11, 8)
        query, key, value = (tensor.to(dtype) for tensor in (query, key, value))
        bias = torch.zeros(3, 1, 1, 11, dtype=dtype) if masked else None
        if masked:
            bias[1, ..., 7:], bias[2, ..., 1:] = -torch.inf, -torch.inf
        found, expected = (attention(query, key, value, bias, 0.3) for attention in (attend_written_out, attend))
        for one, other in zip(found, expected, strict=True):
            assert_close(one.float(), other.float(), rtol=0, atol=tolerance)


class FakeCuda:
    """What of torch.cuda a recording takes; a graph knows the steps that were made while it was recorded."""

    def __init__(self) -> None:
        self.recording: list | None = None
        self.graphs = 0

    def CUDAGraph(self):  # noqa: N802
        self.graphs += 1
        made = SimpleNamespace(steps=[])
        made.replay = lambda: [step() for step in made.steps]
        return made

    @contextmanager
    def graph(self, graph):
        self.recording = graph.steps
        yield
        self.recording = None

    @contextmanager
    def stream(self, _):
        yield

    def Stream(self, _):  # noqa: N802
        return SimpleNamespace(wait_stream=lambda _: None)

    def current_stream(self, _):
        return SimpleNamespace(wait_stream=lambda _: None)


def test_every_step_is_made_once_whether_recorded_or_not(monkeypatch):
    cuda, made = FakeCuda(), []
    monkeypatch.setattr(torch, "cuda", cuda)

    def step() -> None:
        if cuda.recording is None:
            made.append(1)
        else:
            cuda.recording.append(lambda: made.append(1))

    repeat = CUDAGraphStep(step, torch.device("cuda"))
    total = 0
    for times, version in ((16, 1), (16, 1), (1, 2), (1, 2), (16, 2), (5, 3), (1, 4)):
        repeat(times, version)
        total += times
        assert len(made) == total
    assert cuda.graphs == 3  # of versions 1, 2 and 3; the steps of the fourth were too few


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="oneDNN packs weights on x86 CPUs")
def test_what_is_added_to_a_packed_layer_has_its_shape():
    packed, x = fused_decode.PackedLinear(torch.randn(16, 8), None), torch.randn(4, 8)
    assert packed.plus(x, torch.zeros(4, 16)).shape == (4, 16)
    for other in (torch.zeros(4, 8), torch.zeros(2, 16), torch.zeros(16)):  # which oneDNN would read beyond
        with pytest.raises(ValueError, match="is added to 16 features of"):
            packed.plus(x, other)


# --- a budget for keys and values ------------------------------------------------------------------------------------


def within(tokens: float, **more) -> int:
    shape = Shape(trained=0, frozen=0, body=0, hidden=64, layers=10, intermediate=1, vocabulary=9, keys=32)
    token = 2 * 4 * 32 * 10  # bytes of keys and values in float32
    given = {"number_bytes": 4, "prompts": 3, "prompt_tokens": 50, "completion_tokens": 100, "shares_prompts": True}
    return rows_within(tokens * token / GiB, shape, **given | more)


def test_rows_within_a_budget_by_hand():
    assert within(150 + 400) == 4  # three prompts of 50 tokens once, and four completions
    assert within(150 + 399) == 3
    assert within(150 + 450, copies_below=1 << 30) == 3  # each with a copy of its prompt
    assert within(600, shares_prompts=False) == 4
    assert within(600, shares_prompts=False, number_bytes=2) == 8
    with pytest.raises(ValueError, match=r"rollout\.kv_cache_gib=.* must be at least 0\.0008: 3 prompts of up to 50"):
        within(249)
    assert composed("rollout.kv_cache_gib=0.5")["validation"]["kv_cache_gib"] == 0.5


@pytest.mark.parametrize(("copied", "share_prompts"), [(4 << 20, True), (0, False)])
def test_completions_beyond_a_budget_wait_and_are_the_same(llama, monkeypatch, copied, share_prompts):
    monkeypatch.setitem(COPIED, "cpu", copied)
    llama.share_prompts = share_prompts
    options = PLAIN | {"max_new_tokens": 60}
    expected = generate(llama, PROMPTS, group_size=6, sampling=Sampling(**options), seed=2)
    held, grow = [], Buffers.grow

    def watched(self, tokens: int, capacity: int) -> bool:
        held.append((len(self[0][0]), capacity))
        return grow(self, tokens, capacity)

    monkeypatch.setattr(Buffers, "grow", watched)
    shape, longest = llama.shape(), max(map(len, llama.tokenize(PROMPTS)))
    token = 2 * 4 * shape.keys * shape.layers
    gib = (4 * 60 + 3 * longest + 4 * longest) * token / GiB
    found = generate(llama, PROMPTS, group_size=6, sampling=Sampling(**options, kv_cache_gib=gib), seed=2)
    assert found.texts == expected.texts
    assert torch.equal(found.ids, expected.ids)
    if share_prompts:
        assert 4 <= max(rows for rows, _ in held) <= 5
        assert max(rows * capacity * token for rows, capacity in held) <= gib * GiB
