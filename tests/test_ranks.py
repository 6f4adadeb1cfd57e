"""How processes share work; what several real ones do is in test_processes.py."""

import pytest
import torch

from grpo_lightning.distributed.ranks import SINGLE_PROCESS, Ranks
from grpo_lightning.distributed.signals import Preempted
from grpo_lightning.policy.loading import load
from grpo_lightning.types import Sampling
from tests.support.checkpoints import write_checkpoint
from tests.support.sampling import generate


@pytest.mark.parametrize(("count", "expected"), [(6, [2, 2, 2]), (8, [2, 3, 3]), (3, [1, 1, 1]), (2, [0, 1, 1])])
def test_portions_by_hand(count, expected):
    portions = [Ranks(rank, 3).shard_range(count) for rank in range(3)]
    assert [len(portion) for portion in portions] == expected
    assert [i for portion in portions for i in portion] == list(range(count))


def test_groups_stay_together_and_work_is_even_by_hand():
    groups, sizes = [[0, 1], [2, 3], [4, 5]], [5, 5, 1, 1, 4, 4]
    assert Ranks(0, 2).balance(groups, sizes) == [[0, 1], [2, 3, 4, 5]]  # 10 against 8 + 2
    assert Ranks(1, 2).balance(groups, sizes) == Ranks(0, 2).balance(groups, sizes)
    assert Ranks(0, 2).balance([[0, 1, 2]], [3, 2, 1]) == [[0], [1, 2]]  # one group for two: its rows part


def test_one_process_needs_no_other():
    assert SINGLE_PROCESS.gather("a") == ["a"]
    assert SINGLE_PROCESS.all_or_raise(lambda: 3) == [3]
    assert SINGLE_PROCESS.sum({"x": torch.tensor(2.0)}) == {"x": torch.tensor(2.0)}
    with pytest.raises(Preempted, match="asked to end by SIGTERM: now"):
        SINGLE_PROCESS.all_or_raise(lambda: (_ for _ in ()).throw(Preempted(15, saved="now")))


@pytest.mark.parametrize("processes", [2, 3, 5])
def test_own_microbatches_cover_every_row_once_and_are_as_many_everywhere(policy, rows, processes):
    seen = []
    counts = set()
    for rank in range(processes):
        parts, idle = policy.local_microbatches(rows, 60, Ranks(rank, processes))
        counts.add(len(parts))
        seen += [row for part in parts[: len(parts) - idle] for row in part.tolist()]
        assert all(part.tolist() == [0] for part in parts[len(parts) - idle :])
    assert sorted(seen) == list(range(len(rows)))
    assert len(counts) == 1


def test_a_process_with_fewer_micro_batches_makes_idle_ones(policy, rows):
    few = rows[torch.arange(9)]
    assert sorted(policy.local_microbatches(few, 50, Ranks(rank, 2))[1] for rank in range(2)) == [0, 1]


@pytest.mark.parametrize("processes", [2, 3])
def test_gradients_added_up_over_processes_are_those_of_one(policy, rows, processes):
    weights = torch.rand(rows.mask.shape) * rows.mask

    def gradient(parts, weights):
        policy.zero_grad()
        for index in parts:
            (policy.logprobs(rows[index], temperature=1.0) * weights[index]).sum().backward()
        return torch.cat([p.grad.flatten() for p in policy.parameters()])

    expected = gradient(*[[torch.arange(len(rows))], weights])
    found = torch.zeros_like(expected)
    for rank in range(processes):
        parts, idle = policy.local_microbatches(rows, 60, Ranks(rank, processes))
        found += gradient(parts[: len(parts) - idle], weights)
    assert (found - expected).norm() < 1e-6 * expected.norm()


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    path = write_checkpoint(tmp_path_factory.mktemp("ranks") / "model", "llama", chat=False)
    return load(str(path), dtype="float32", attn_implementation="sdpa", trust_remote_code=False)


@pytest.fixture(scope="module")
def rows(policy):
    return generate(
        policy,
        ["one prompt", "another", "a third and longer prompt", "four"],
        group_size=3,
        sampling=Sampling(temperature=1.0, top_p=1.0, top_k=0, min_p=0.0, max_new_tokens=12, stop=("e", "a")),
        seed=3,
    )
