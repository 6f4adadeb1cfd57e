import random
from collections import Counter

import pytest
import torch

from grpo_lightning.batch import Prompts, Rollout, microbatches, same_prompts
from tests.test_loss import rollout


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def many(rows: int):
    zeros = torch.zeros(rows, 3)
    return rollout(
        ids=torch.arange(rows)[:, None].expand(rows, 5),
        attention_mask=torch.ones(rows, 5, dtype=torch.bool),
        mask=torch.ones(rows, 3, dtype=torch.bool),
        old_logprobs=zeros,
        ref_logprobs=zeros,
        advantages=torch.arange(rows)[:, None].expand(rows, 3).float(),
    )


def test_every_row_is_visited_once_per_epoch_and_keeps_its_fields_together():
    batches = list(many(6).minibatches(size=4, epochs=3, generator=seeded()))
    assert [len(batch) for batch in batches] == [4, 2] * 3
    assert Counter(a for b in batches for a in b.advantages[:, 0].tolist()) == dict.fromkeys(map(float, range(6)), 3)
    for batch in batches:
        assert batch.ids[:, 0].tolist() == batch.advantages[:, 0].tolist()
    orders = [torch.cat([b.ids[:, 0] for b in batches[i : i + 2]]).tolist() for i in (0, 2, 4)]
    assert orders[0] != orders[1] or orders[1] != orders[2]


def test_minibatches_follow_the_generator_only():
    def order(seed):
        batches = many(8).minibatches(size=2, epochs=1, generator=seeded(seed))
        return [i for b in batches for i in b.ids[:, 0].tolist()]

    torch.manual_seed(5)
    first = order(1)
    torch.manual_seed(6)
    assert order(1) == first != order(2)


def test_a_minibatch_of_everything_keeps_the_order():
    (batch, again) = many(5).minibatches(size=5, epochs=2, generator=seeded())
    assert batch.ids[:, 0].tolist() == again.ids[:, 0].tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    "field, value, message",
    [
        ("old_logprobs", torch.zeros(2, 4), r"old_logprobs: expected \(2, 3\), got \(2, 4\)"),
        ("ref_logprobs", torch.zeros(1, 3), r"ref_logprobs: expected \(2, 3\), got \(1, 3\)"),
        ("advantages", torch.zeros(2), r"advantages: expected \(2, 3\), got \(2,\)"),
        ("ids", torch.zeros(2, 3), r"ids: expected \(2, 4\), got \(2, 3\)"),
        ("attention_mask", torch.ones(2, 6), r"attention_mask: expected \(2, 5\), got \(2, 6\)"),
        ("mask", torch.ones(2, 3), r"mask: expected bool \[B, T\], got torch.float32"),
    ],
)
def test_a_misshapen_field_is_refused_by_name(field, value, message):
    with pytest.raises(ValueError, match=message):
        rollout(**{field: value})


def test_prompts_collate_by_column():
    prompts = Prompts.collate(
        [("a", {"answer": 1, "kind": "x"}), ([{"role": "user", "content": "b"}], {"answer": 2, "kind": "y"})]
    )
    assert prompts.texts == ("a", [{"role": "user", "content": "b"}])
    assert prompts.columns == {"answer": (1, 2), "kind": ("x", "y")}
    assert prompts.to("cpu") is prompts
    with pytest.raises(ValueError, match="column 'answer': expected 2 values, got 1"):
        Prompts(("a", "b"), {"answer": (1,)})


def ragged(prompts, completions) -> Rollout:
    """Rows with prompts given as lists of ids and completions by their lengths."""
    width, length = max(map(len, prompts)), max(completions)
    mask = torch.arange(length) < torch.tensor(completions)[:, None]
    ids = torch.tensor([[9] * (width - len(prompt)) + prompt for prompt in prompts])
    real = torch.tensor([[False] * (width - len(prompt)) + [True] * len(prompt) for prompt in prompts])
    zeros = torch.zeros(mask.shape)
    return Rollout(torch.cat([ids, zeros.long()], 1), torch.cat([real, mask], 1), mask, zeros, zeros, zeros)


def test_rows_with_the_same_prompt_are_found():
    # 9 is what shorter prompts are padded with, and a token of the third
    rows = ragged([[1, 2], [2], [9, 2], [1, 2], [2]], [1, 2, 3, 4, 1])
    assert same_prompts(rows) == [[0, 3], [1, 4], [2]]


def test_microbatches_by_hand():
    # prompt + completion:  2+1   2+4   3+4   1+1 ; sorted 7, 6, 3, 2
    rows = ragged([[1, 2], [3, 4], [5, 6, 7], [8]], [1, 4, 4, 1])

    def split(tokens):
        return [rows.tolist() for rows in microbatches(rows, tokens, shared=False)]

    assert split(28) == [[2, 1, 0, 3]]  # 4 rows x (3 + 4)
    assert split(27) == [[2, 1, 0], [3]]
    assert split(14) == [[2, 1], [0, 3]]  # 2 x 7, 2 x (2 + 1)
    assert split(13) == [[2], [1, 0], [3]]  # 2 x 7 is too many; 2 x 6 is not
    assert split(1) == [[2], [1], [0], [3]]  # longer than the budget: alone


def test_microbatches_that_share_prompts_by_hand():
    # groups of 2 + (1 + 4), 3 + (4 + 2), 1 + 1 tokens
    rows = ragged([[1, 2], [5, 6, 7], [1, 2], [8], [5, 6, 7]], [1, 4, 4, 1, 2])

    def split(tokens):
        return [rows.tolist() for rows in microbatches(rows, tokens, shared=True)]

    assert split(18) == [[1, 4, 0, 2, 3]]  # 9 + 7 + 2
    assert split(17) == [[1, 4, 0, 2], [3]]
    assert split(16) == [[1, 4, 0, 2], [3]]
    assert split(15) == [[1, 4], [0, 2, 3]]  # 9 and 7 + 2
    assert split(9) == [[1, 4], [0, 2, 3]]
    assert split(8) == [[1], [4], [0, 2], [3]]  # 3 + 4 | 3 + 2, no room for 7 | 7, no room for 2
    assert split(6) == [[1], [4], [0], [2], [3]]
    assert split(1) == [[1], [4], [0], [2], [3]]


@pytest.mark.parametrize("tokens", [1, 17, 64, 10_000])
@pytest.mark.parametrize("group_size", [1, 3, 8])
def test_microbatches_that_share_prompts_cover_every_row_once_within_the_budget(tokens, group_size):
    chance = random.Random(0)
    prompts = [[number] * chance.randint(1, 20) for number in range(12) for _ in range(group_size)]
    prompts = [prompts[row - row % group_size] for row in range(len(prompts))]
    rows = ragged(prompts, [chance.randint(1, 12) for _ in prompts])
    found = microbatches(rows, tokens, shared=True)
    assert sorted(torch.cat(found).tolist()) == list(range(len(prompts)))
    for batch in found:
        numbers = {tuple(prompts[row]) for row in batch.tolist()}
        assert len(batch) == 1 or int(rows.mask[batch].sum()) + sum(map(len, numbers)) <= tokens


@pytest.mark.parametrize("tokens", [1, 17, 64, 10_000])
def test_microbatches_cover_every_row_once_within_the_budget(tokens):
    torch.manual_seed(0)
    lengths, prompts = torch.randint(1, 12, (40,)), torch.randint(1, 9, (40,))
    found = microbatches(ragged([[1] * n for n in prompts], lengths.tolist()), tokens, shared=False)
    assert sorted(torch.cat(found).tolist()) == list(range(40))
    for rows in found:
        assert len(rows) == 1 or len(rows) * int(lengths[rows].max() + prompts[rows].max()) <= tokens
