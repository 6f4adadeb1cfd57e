"""What waits in CPU RAM: activations between forward and backward pass, and a reference's weights."""

import gc
import weakref
from contextlib import suppress

import pytest
import torch

from grpo_lightning.config import ConfigError, check_runtime
from grpo_lightning.policy.hf import ActivationOffload
from grpo_lightning.policy.loading import load
from grpo_lightning.reference import frozen_copy
from grpo_lightning.types import Sampling
from tests.support.checkpoints import write_checkpoint
from tests.support.composed import composed
from tests.support.sampling import generate

PROMPTS = ["The meaning of life is", "12 + 34 ="]
SAMPLING = Sampling(temperature=1.0, top_p=1.0, top_k=0, min_p=0.0, max_new_tokens=12)
LORA = {"r": 4, "target_modules": "all-linear", "init_lora_weights": False}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint"), "llama", chat=False)


def opened(path, **arguments):
    return load(str(path), dtype="float32", attn_implementation="sdpa", trust_remote_code=False, **arguments)


def gradients(policy, rows, *, entropy=True, is_half=False):
    policy.zero_grad()
    with torch.autocast("cpu", torch.bfloat16, enabled=is_half, cache_enabled=False):
        logprobs, entropies = policy.logprobs_and_entropy(rows, temperature=0.8, entropy=entropy)
        value = (logprobs * torch.linspace(-1, 2, logprobs.numel()).view_as(logprobs)).sum()
        value = value if entropies is None else value - 0.1 * entropies.sum()
        value.backward()
    return {name: weight.grad.clone() for name, weight in policy.named_parameters() if weight.grad is not None}


@pytest.fixture
def moves(monkeypatch):
    """Every tensor that was moved, with small ones, too."""
    made, plain = [], ActivationOffload.pack

    def pack(self, tensor):
        kept = plain(self, tensor)
        if kept is not tensor and all(kept[0] is not other for other in made):
            made.append(kept[0])
        return kept

    monkeypatch.setattr(ActivationOffload, "pack", pack)
    monkeypatch.setitem(ActivationOffload.__init__.__kwdefaults__, "min_bytes", 1)
    return made


def test_gradients_are_the_same_bit_for_bit_and_no_weight_is_copied(checkpoint, moves):
    for arguments, shared, is_half in (
        ({"gradient_checkpointing": True}, False, True),
        ({"adapter": LORA}, True, False),
    ):
        policy = opened(checkpoint, share_prompts=shared, **arguments)
        rows = generate(policy, PROMPTS, group_size=3, sampling=SAMPLING, seed=1)
        moves.clear()
        expected = gradients(policy, rows, is_half=is_half)
        assert not moves
        policy.activation_offload = True
        found = gradients(policy, rows, is_half=is_half)
        assert expected.keys() == found.keys()
        assert all(torch.equal(expected[name], found[name]) for name in expected)
        weights = {tuple(sorted(weight.shape)) for weight in policy.parameters()}
        assert moves
        assert not weights & {tuple(sorted(tensor.shape)) for tensor in moves}


def test_a_tensor_is_known_by_its_contents():
    away = ActivationOffload([], min_bytes=1)
    whole = torch.arange(12.0).view(3, 4)
    views = [whole, whole.t(), whole[1:], whole[:, ::2], whole.view(4, 3)]
    kept = [away.pack(view) for view in views]
    assert all(torch.equal(away.unpack(one), view) for one, view in zip(kept, views, strict=True))
    assert away.pack(whole.view(3, 4)) is kept[0]
    before = whole.clone()
    whole.add_(1.0)
    assert torch.equal(away.unpack(away.pack(whole)), whole)
    assert torch.equal(away.unpack(kept[0]), before)
    sized = ActivationOffload([torch.empty(300, 1000)], min_bytes=4 * 100_000)
    for stays in (torch.ones(99_999), torch.ones(300, 1000), torch.ones(1000, 300), torch.ones(300, 1000).bfloat16()):
        assert sized.pack(stays) is stays  # small, or as large as a weight
    assert isinstance(sized.pack(torch.ones(100_000)), tuple)


def test_nothing_is_left_after_the_backward_pass(moves):
    value = torch.randn(50, requires_grad=True)
    with ActivationOffload([]):
        result = (value.exp() * value.sin()).sum()
    assert len(moves) == 3  # the value once, its exponential and its sine
    alive = [weakref.ref(tensor) for tensor in moves]
    moves.clear()
    result.backward()
    gc.collect()
    assert not any(one() is not None for one in alive)


def test_on_a_cpu_it_is_refused(monkeypatch):
    with pytest.raises(ConfigError, match=r"policy.activation_offload=true: activations on a CPU are in CPU RAM"):
        check_runtime(composed("policy.activation_offload=true", "trainer=cpu"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    check_runtime(composed("policy.activation_offload=true", "trainer=auto"))


def test_an_offloaded_reference_goes_to_the_device_and_is_not_copied_back(checkpoint, monkeypatch):
    policy = opened(checkpoint)
    rows = generate(policy, PROMPTS, group_size=3, sampling=SAMPLING, seed=1)
    reference = frozen_copy(policy, offload=True)
    expected = reference.logprobs(rows, temperature=1.0)
    before = [(weight, weight.data_ptr()) for weight in reference.parameters()]
    calls = []

    def move(device, **_):
        calls.append(device)
        if str(device) == "elsewhere":  # a device has memory of its own
            for weight in reference.parameters():
                weight.data = weight.data.clone()

    monkeypatch.setattr(reference, "to", move)
    with suppress(InterruptedError), reference.on_device("elsewhere"):
        assert torch.equal(reference.logprobs(rows, temperature=1.0), expected)
        for weight, place in before:
            assert weight.data_ptr() != place
            weight.data.fill_(torch.nan)  # would be seen if it came back
        raise InterruptedError
    assert [weight.data_ptr() for weight in reference.parameters()] == [place for _, place in before]
    assert calls == ["elsewhere", torch.device("cpu")]
    assert torch.equal(reference.logprobs(rows, temperature=1.0), expected)
    with pytest.raises(ValueError, match=r"needs frozen weights; model\.model\.embed_tokens\.weight is trained"):
        policy.offload()
