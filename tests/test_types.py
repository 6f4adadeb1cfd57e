from collections import Counter

import pytest
import torch

from grpo_lightning.types import Prompts, Sampled
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
    again = list(many(6).minibatches(size=4, epochs=3, generator=seeded()))
    assert all(torch.equal(one.ids, other.ids) for one, other in zip(batches, again, strict=True))
    assert [len(batch) for batch in batches] == [4, 2] * 3
    assert Counter(a for b in batches for a in b.advantages[:, 0].tolist()) == dict.fromkeys(map(float, range(6)), 3)
    for batch in batches:
        assert batch.ids[:, 0].tolist() == batch.advantages[:, 0].tolist()
    orders = [torch.cat([b.ids[:, 0] for b in batches[i : i + 2]]).tolist() for i in (0, 2, 4)]
    assert orders[0] != orders[1] or orders[1] != orders[2]


def test_a_minibatch_of_everything_keeps_the_order():
    (batch, again) = many(5).minibatches(size=5, epochs=2, generator=seeded())
    assert batch.ids[:, 0].tolist() == again.ids[:, 0].tolist() == [0, 1, 2, 3, 4]


def test_a_misshapen_field_is_refused_by_name():
    for field, value, message in (
        ("old_logprobs", torch.zeros(2, 4), r"old_logprobs: expected \(2, 3\), got \(2, 4\)"),
        ("advantages", torch.zeros(2), r"advantages: expected \(2, 3\), got \(2,\)"),
        ("ids", torch.zeros(2, 3), r"ids: expected \(2, 4\), got \(2, 3\)"),
        ("attention_mask", torch.ones(2, 6), r"attention_mask: expected \(2, 5\), got \(2, 6\)"),
        ("mask", torch.ones(2, 3), r"mask: expected bool \[B, T\], got torch.float32"),
    ):
        with pytest.raises(ValueError, match=message):
            rollout(**{field: value})


def test_samples_of_several_parts_are_padded_on_both_sides():
    def sampled(ids, prompt, text):
        length = len(ids) - prompt
        return Sampled(
            ids=torch.tensor([ids]),
            attention_mask=torch.ones(1, len(ids), dtype=torch.bool),
            mask=torch.ones(1, length, dtype=torch.bool),
            logprobs=torch.full((1, length), -0.5),
            entropy=torch.ones(1, length),
            texts=(text,),
            finished=(True,),
        )

    found = Sampled.concatenate([sampled([5, 6, 7], 2, "a"), sampled([8, 9, 3, 4], 1, "b")])
    assert found.ids.tolist() == [[5, 6, 7, 0, 0], [0, 8, 9, 3, 4]]
    assert found.attention_mask.int().tolist() == [[1, 1, 1, 0, 0], [0, 1, 1, 1, 1]]
    assert found.mask.int().tolist() == [[1, 0, 0], [1, 1, 1]]
    assert found.logprobs.tolist() == [[-0.5, 0.0, 0.0], [-0.5] * 3]
    assert (found.texts, found.finished, found.turns, found.support) == (("a", "b"), (True, True), None, None)


def test_prompts_collate_by_column():
    prompts = Prompts.collate(
        [("a", {"answer": 1, "kind": "x"}), ([{"role": "user", "content": "b"}], {"answer": 2, "kind": "y"})]
    )
    assert prompts.texts == ("a", [{"role": "user", "content": "b"}])
    assert prompts.columns == {"answer": (1, 2), "kind": ("x", "y")}
    assert prompts.to("cpu") is prompts
    with pytest.raises(ValueError, match="column 'answer': expected 2 values, got 1"):
        Prompts(("a", "b"), {"answer": (1,)})
