"""The files of recorded rollouts: what is in them, bit for bit, and what is refused."""

import gzip
import json
import random
import struct
from dataclasses import replace

import pytest
import torch

from grpo_lightning import recording
from grpo_lightning.recording import decode, encode, fingerprint, from_lines, to_lines
from grpo_lightning.types import Prompts, Rollout, Sampled, SamplingSupport, Scored
from tests.support.composed import HEADER

HALF, NAN = 0.5, float("nan")
TRUE, FALSE = True, False
SAMPLED = Sampled(
    # one prompt of the ids 5 6 and one of 4, padded on the left; completions 7 2, 8 9 2, 2 and 3 3 2
    ids=torch.tensor([[5, 6, 7, 2, 0], [5, 6, 8, 9, 2], [0, 4, 2, 0, 0], [0, 4, 3, 3, 2]]),
    attention_mask=torch.tensor([[1, 1, 1, 1, 0], [1, 1, 1, 1, 1], [0, 1, 1, 0, 0], [0, 1, 1, 1, 1]]).bool(),
    mask=torch.tensor([[1, 1, 0], [1, 1, 1], [1, 0, 0], [1, 1, 1]]).bool(),
    logprobs=torch.tensor([[-0.1, -0.2, 0.0], [-0.3, -0.4, -0.5], [-0.6, 0.0, 0.0], [-0.7, -0.8, -0.9]]),
    entropy=torch.tensor([[1.1, 1.2, 0.0], [1.3, 1.4, 1.5], [1.6, 0.0, 0.0], [1.7, 1.8, 1.9]]),
    texts=("a", "b\nc", "", "\u202e\ud800"),
    finished=(TRUE, TRUE, TRUE, FALSE),
)
SCORED = Scored(
    prompts=Prompts(("ask", [{"role": "user", "content": "hi"}]), {"answer": ("1", "2"), "when": ({1: 2}, {3: 4})}),
    sampled=SAMPLED,
    rewards={
        "right": torch.tensor([1.0, 0.0, 0.0, NAN]),
        "short": torch.tensor([0.1, 0.2, 0.3, 0.4]),
        "total": torch.tensor([1.05, 0.1, 0.15, 0.2]),
    },
    right=torch.tensor([True, False, False, False]),
    scores=torch.tensor([[1.0, 0.1], [0.0, 0.2], [0.0, 0.3], [NAN, 0.4]]),
    steps=torch.tensor([[NAN, 1.05, NAN], [0.3, NAN, 0.1], [0.15, NAN, NAN], [NAN, NAN, 0.2]]),
)
ROLLOUT = Rollout(
    ids=SAMPLED.ids,
    attention_mask=SAMPLED.attention_mask,
    mask=SAMPLED.mask,
    old_logprobs=SAMPLED.logprobs,
    ref_logprobs=SAMPLED.logprobs * HALF,
    advantages=torch.tensor([[0.7, 0.7, 0.0], [-0.6, -0.6, -0.3], [0.2, 0.0, 0.0], [0.0, 0.0, 0.0]]),
)
GIVEN = {key: value for key, value in HEADER.items() if key not in ("prompts", "group_size", "rewards")}
GIVEN |= {"reference": True, "weights": [1.0, 0.5]}
TRAINED = {3: [-0.71, -0.81, -0.91], 1: [-0.31, -0.41, -0.51]}


def made():
    return to_lines(GIVEN, SCORED, ROLLOUT, TRAINED)


def test_a_line_says_what_the_tensors_hold():
    first, *rows = made()
    sizes = {"prompts": 2, "group_size": 2, "prompt_tokens": 2, "completion_tokens": 3}
    assert first | sizes | {"rewards": ["right", "short"]} == first
    assert first["columns_left_out"] == ["when"]  # JSON has no mappings from numbers
    assert rows[1] == {
        "group": 0,
        "prompt": "ask",
        "completion": "b\nc",
        "columns": {"answer": "1"},
        "rewards": {"right": 0.0, "short": 0.200000003, "total": 0.100000001},
        "scores": [0.0, 0.200000003],
        "steps": [[0, 0.300000012], [2, 0.100000001]],
        "advantage": -0.5,  # (-.6 - .6 - .3) / 3
        "right": False,
        "finished": True,
        "prompt_ids": [5, 6],
        "ids": [8, 9, 2],
        "old_logprobs": [-0.300000012, -0.400000006, -0.5],
        "entropy": [1.29999995, 1.39999998, 1.5],
        "ref_logprobs": [-0.150000006, -0.200000003, -0.25],
        "logprobs": [-0.31, -0.41, -0.51],
    }
    assert rows[3]["rewards"]["right"] is None
    assert rows[3]["scores"] == [None, 0.400000006]
    assert rows[2]["prompt_ids"] == [4]
    assert "logprobs" not in rows[0]


def read_back(lines, directory):
    path = directory / recording.file_name(1)
    recording.write(path, lines)
    return from_lines(*recording.read(path), torch.device("cpu"))


def assert_same(found, expected):
    for name, value in vars(expected).items():
        back = getattr(found, name)
        assert torch.equal(back, value) if isinstance(value, torch.Tensor) else back == value, name


def test_what_is_read_is_bitwise_what_was_written(tmp_path):
    found = read_back(made(), tmp_path)
    assert_same(found.scored.sampled, SAMPLED)
    for name, value in SCORED.rewards.items():
        torch.testing.assert_close(found.scored.rewards[name], value, rtol=0, atol=0, equal_nan=True)
    for name in ("scores", "steps"):
        torch.testing.assert_close(getattr(found.scored, name), getattr(SCORED, name), rtol=0, atol=0, equal_nan=True)
    assert found.scored.right.tolist() == [True, False, False, False]
    assert found.scored.prompts == Prompts(SCORED.prompts.texts, {"answer": ("1", "2")})
    assert torch.equal(found.ref_logprobs, ROLLOUT.ref_logprobs)
    assert torch.equal(found.logprobs[[0, 2]], SAMPLED.logprobs[[0, 2]])
    assert torch.equal(found.logprobs[[3, 1]], torch.tensor([TRAINED[3], TRAINED[1]]))


def test_episodes_are_read_as_they_were_written_and_secrets_are_not_written(tmp_path):
    # The second completion says 8, is told 9, and says 2; the fourth is told nothing, too.
    episodes = replace(
        SAMPLED,
        mask=torch.tensor([[1, 1, 0], [1, 0, 1], [1, 0, 0], [1, 1, 1]]).bool(),
        entropy=SAMPLED.entropy.clone(),
        turns=(("a",), ("h", ""), ("",), ("\udfff",)),
        replies=((), ("i",), (), ()),
    )
    lines = to_lines(GIVEN, replace(SCORED, sampled=episodes), replace(ROLLOUT, mask=episodes.mask), TRAINED)
    assert [row["spans"] for row in lines[1:]] == [[[0, 2]], [[0, 1], [2, 3]], [[0, 1]], [[0, 3]]]
    assert (lines[2]["ids"], lines[2]["turns"], lines[2]["replies"]) == ([8, 9, 2], ["h", ""], ["i"])
    assert_same(read_back(lines, tmp_path).scored.sampled, episodes)
    assert "turns" not in made()[1]
    secret = replace(SAMPLED, texts=("hf_" + 24 * "a", *SAMPLED.texts[1:]))
    assert to_lines(GIVEN, replace(SCORED, sampled=secret), ROLLOUT, TRAINED)[1]["completion"] == "REDACTED"


def test_the_sets_that_tokens_were_drawn_from_are_read_as_they_were_written(tmp_path):
    sizes, ids = [[2, 0, 0], [1, 1, 3], [1, 0, 0], [0, 0, 0]], [7, 9, 8, 9, 0, 2, 4, 2]
    support = SamplingSupport(torch.tensor(sizes).int(), torch.tensor(ids).int())
    lines = to_lines(GIVEN, replace(SCORED, sampled=replace(SAMPLED, support=support)), ROLLOUT, TRAINED)
    assert [row["kept"] for row in lines[1:]] == [[[7, 9], []], [[8], [9], [0, 2, 4]], [[2]], [[], [], []]]
    assert_same(read_back(lines, tmp_path).scored.sampled.support, support)
    assert "kept" not in made()[1]


def test_every_float32_comes_back_from_nine_digits():
    drawn = random.Random(0)
    bits = [drawn.getrandbits(32) for _ in range(20_000)] + [1, 0x80000001, 0x007FFFFF, 0x7F7FFFFF, 0x80000000]
    values = torch.tensor([struct.unpack("f", struct.pack("I", one))[0] for one in bits], dtype=torch.float32)
    written = json.loads(json.dumps([encode(value) for value in values.tolist()], allow_nan=False))
    back = torch.tensor([decode(one) for one in written], dtype=torch.float32)
    known = ~values.isnan()
    assert torch.equal(back[known].view(torch.int32), values[known].view(torch.int32))
    assert back[~known].isnan().all()
    assert [encode(float("inf")), encode(-float("inf"))] == ["inf", "-inf"]


def test_a_policy_has_another_fingerprint_once_a_bit_of_it_changes():
    torch.manual_seed(0)
    policy = torch.nn.Linear(3, 2)
    before = fingerprint(policy)
    assert fingerprint(policy) == before
    with torch.no_grad():
        policy.weight[1, 2] = torch.nextafter(policy.weight[1, 2], torch.tensor(9.0))
    assert fingerprint(policy) != before
    policy.bias.requires_grad_(False)
    frozen = fingerprint(policy)
    with torch.no_grad():
        policy.bias += 1
    assert fingerprint(policy) == frozen


def test_steps_in_words_and_beyond_a_checkpoint(tmp_path):
    assert recording.format_steps([1, 2, 3, 7, 9, 10]) == "6 from 1 to 10"
    assert recording.format_steps([]) == "none"
    for step in (1, 2, 3, 12):
        (tmp_path / recording.file_name(step)).write_bytes(b"")
    (tmp_path / "000099.jsonl.gz.old").write_bytes(b"")
    assert sorted(path.name for path in recording.rewind(tmp_path, 2)) == ["000003.jsonl.gz", "000012.jsonl.gz"]
    assert list(recording.recorded_steps(tmp_path)) == [1, 2]
    assert recording.rewind(tmp_path / "none", 0) == []


def test_damaged_files_and_missing_directories_are_refused(tmp_path):
    path = tmp_path / recording.file_name(1)
    recording.write(path, made())
    whole = path.read_bytes()
    for data, message in (
        (whole[: len(whole) // 2], "is damaged"),
        (gzip.compress(b"["), "is damaged"),
        (gzip.compress(b'{"format": "else"}'), "is no recorded rollout"),
    ):
        path.write_bytes(data)
        with pytest.raises(ValueError, match=f"^{path} {message}"):
            recording.read(path)
    for place, message in ((tmp_path / "none", "is not there"), (path, "is no directory")):
        with pytest.raises(ValueError, match=message):
            recording.find_directory(place)
