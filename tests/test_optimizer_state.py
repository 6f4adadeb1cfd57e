"""A checkpoint's state of the optimizer is taken over only where it fits the weights."""

import codecs
import copy
import os
import zipfile
from collections import Counter, OrderedDict

import bitsandbytes as bnb
import pytest
import torch
from torch.distributed.tensor import DTensor

from grpo_lightning.checkpoint.io import read
from grpo_lightning.checkpoint.optimizer_state import check_when_loaded
from grpo_lightning.distributed.plain import not_plain
from tests.support.provocations import provocation
from tests.support.running import small_run

ADAMW = torch.optim.AdamW, {"fused": True}
OTHER = "other objects than tensors and plain values"
AVERAGES = {"betas": (0.9, 0.999, 0.9999)}


def stepped(kind, options, *shapes):
    """An optimizer of some weights that has made two steps."""
    weights = [torch.nn.Parameter(torch.ones(shape)) for shape in shapes]
    optimizer = kind(weights, lr=0.1, **options)
    for _ in range(2):
        for weight in weights:
            weight.grad = torch.ones_like(weight)
        optimizer.step()
    check_when_loaded(optimizer)
    return optimizer


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ADAMW,
        (torch.optim.AdamW, {"amsgrad": True}),
        (torch.optim.SGD, {"momentum": 0.9, "fused": True}),
        (torch.optim.Adagrad, {}),
        (torch.optim.Adafactor, {}),
        (bnb.optim.AdamW8bit, {}),
        (bnb.optim.AdEMAMix, AVERAGES),
        (bnb.optim.AdEMAMix8bit, AVERAGES),
        (bnb.optim.Lion8bit, {}),
    ],
)
def test_its_own_state_is_taken_over(kind, options):
    first, second = (stepped(kind, options, (64, 128), (3,)) for _ in range(2))
    first.step()
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    for mine, theirs in zip(first.param_groups[0]["params"], second.param_groups[0]["params"], strict=True):
        for name, value in first.state[mine].items():
            other = second.state[theirs][name]
            assert torch.equal(value, other) if isinstance(value, torch.Tensor) else value == other


@provocation(
    "a checkpoint whose state of the optimizer is smaller than the weights, of another layout or type, which a fused "
    "step would read and write beyond its end",
    "refused in one sentence",
)
@pytest.mark.parametrize(
    ("kind", "options", "name", "value"),
    [
        (*ADAMW, "exp_avg", torch.zeros(16)),
        (*ADAMW, "exp_avg_sq", torch.zeros(1).expand(64, 128)),
        (*ADAMW, "exp_avg", torch.zeros(128, 64).T),
        (*ADAMW, "exp_avg", torch.tensor(0.0)),
        (*ADAMW, "step", torch.zeros(0)),
        (*ADAMW, "exp_avg", torch.zeros(64, 128).to_sparse()),
        (*ADAMW, "exp_avg", torch.zeros(64, 128, dtype=torch.uint8)[:32]),
        (torch.optim.SGD, {"momentum": 0.9, "fused": True}, "momentum_buffer", torch.zeros(1)),
        (bnb.optim.AdamW8bit, {}, "state1", torch.zeros(16, dtype=torch.uint8)),
        (bnb.optim.AdamW8bit, {}, "state2", torch.zeros(64, 128)),
        (bnb.optim.AdamW8bit, {}, "state1", torch.zeros(64, 128, dtype=torch.int16)),
        (bnb.optim.AdamW8bit, {}, "absmax1", torch.zeros(31)),
        (bnb.optim.AdamW8bit, {}, "qmap2", torch.zeros(255)),
        (bnb.optim.AdamW8bit, {}, "absmax2", torch.zeros(32, dtype=torch.float16)),
        (bnb.optim.AdEMAMix, AVERAGES, "state1", torch.zeros(64, 128)),
        (bnb.optim.AdEMAMix, AVERAGES, "state2", torch.zeros(2, 64, 128)),
        (bnb.optim.AdEMAMix8bit, AVERAGES, "absmax1", torch.zeros(63)),
        (bnb.optim.AdEMAMix8bit, AVERAGES, "absmax2", torch.zeros(31)),
    ],
)
def test_state_of_another_size_is_refused(kind, options, name, value):
    optimizer = stepped(kind, options, (64, 128))
    state = copy.deepcopy(optimizer.state_dict())
    parts = state["state"][0]
    parts = parts if name in parts else next(part for part in parts.values() if isinstance(part, dict))
    assert name in parts
    parts[name] = value
    with pytest.raises(ValueError, match=rf"the optimizer does not fit the weights: ({name}|state2) of the 0th"):
        optimizer.load_state_dict(state)


@provocation(
    "a checkpoint in which an 8-bit optimizer's state stands twice, where bitsandbytes keeps it and where it takes it "
    "from, of two types, so that a kernel would take bytes for floats",
    "refused in one sentence",
)
@pytest.mark.parametrize("place", ["within", "beside"])
def test_state_is_of_one_type_wherever_it_stands(place):
    optimizer = stepped(bnb.optim.AdamW8bit, {}, (64, 128))
    state = copy.deepcopy(optimizer.state_dict())
    parts = state["state"][0]
    [within] = [part for part in parts.values() if isinstance(part, dict)]
    within["state1"], parts["state2"] = torch.zeros(64, 128), within["state2"]
    if place == "beside":
        del within["state2"]
    assert parts["state2"].dtype == torch.uint8
    with pytest.raises(ValueError, match=r"does not fit the weights: state2 of the 0th, \(64, 128\), is torch.uint8"):
        optimizer.load_state_dict(state)


@provocation(
    "a checkpoint whose weights' numbers in the state of the optimizer are a set, a copy of which has another order, "
    "or stand in the other order, so that the state of one weight is that of another",
    "refused in one sentence",
)
@pytest.mark.parametrize("kind", [ADAMW, (bnb.optim.AdamW8bit, {})])
def test_state_is_that_of_its_weight(kind):
    swapped = {7, 15}
    assert list(copy.deepcopy(swapped)) == list(swapped)[::-1]
    for numbers, order in (([1, 0], [1, 0]), (swapped, list(swapped)[::-1])):
        optimizer = stepped(*kind, (64, 128), (128, 128))
        state = copy.deepcopy(optimizer.state_dict())
        state["param_groups"][0]["params"] = numbers
        state["state"] = {order[1]: state["state"][0], order[0]: state["state"][1]}
        with pytest.raises(ValueError, match=r"does not fit the weights: (exp_avg|state1) of the 0th"):
            optimizer.load_state_dict(state)


@pytest.mark.slow
def test_a_run_does_not_go_on_with_such_state(tmp_path):
    small_run(tmp_path)
    file = tmp_path / "checkpoints" / "last.ckpt"
    content = torch.load(file, weights_only=True)
    content["optimizer_states"][0]["state"][0]["exp_avg"] = torch.zeros(2)
    torch.save(content, file)
    with pytest.raises(ValueError, match="does not fit the weights: exp_avg of the 0th"):
        small_run(tmp_path, "steps=2", "checkpoint=last")


def _tensor_of(kind):
    """A tensor of bytes as one of other numbers."""
    bytes_ = torch.zeros(8, dtype=torch.uint8).untyped_storage()
    return Disguised(torch._utils._rebuild_tensor_v3, bytes_, 0, (8,), (1,), False, OrderedDict(), kind)


def _bytes_of(encoding):
    return Disguised(codecs.encode, "abc", encoding)


class Disguised:
    """Pickled as an object of another class, with attributes."""

    def __init__(self, kind, *arguments, **attributes):
        self.reduced = kind, arguments, attributes

    def __reduce__(self):
        return self.reduced if self.reduced[2] else self.reduced[:2]


@provocation(
    "a checkpoint with objects that have attributes of their own, such as an `OrderedDict` whose `values` is a class "
    "that torch reads, so that whoever asks it finds nothing in it; or other objects than plain values",
    "refused in one sentence",
)
@pytest.mark.parametrize(
    ("made", "told"),
    [
        (Disguised(OrderedDict, values=OrderedDict), "an object of OrderedDict with attributes of its own"),
        (Disguised(OrderedDict, _metadata=torch.zeros(2)), "other metadata of a state than versions"),
        (
            Disguised(OrderedDict, _metadata={"": {"version": 1, "assign_to_params_buffers": True}}),
            "other metadata of a state than versions",
        ),
        (
            Disguised(OrderedDict, _metadata={"": {"version": torch.zeros(1).expand(2)}}),
            "other metadata of a state than versions",
        ),
        (Disguised(OrderedDict, _metadata={"": {"version": "1"}}), "other metadata of a state than versions"),
        (Disguised(Counter, _metadata={"": {"version": 1}}), "an object of Counter with attributes of its own"),
        (
            Disguised(OrderedDict, _metadata=Disguised(OrderedDict, items=OrderedDict)),
            "an object of OrderedDict with attributes",
        ),
        (torch.zeros(2, device="meta"), "other objects than"),
        (torch.strided, "other objects than"),
        (OrderedDict, "an object of type"),
        (_bytes_of("rot13"), "other objects than"),
        (_tensor_of(torch.qint8), "other objects than"),
        (_tensor_of(torch.quint4x2), "other objects than"),
    ],
)
def test_a_checkpoint_is_what_it_seems(made, told, tmp_path):
    torch.save({"step": {"completed": 1}, "others": [made]}, tmp_path / "last.ckpt")
    with pytest.raises(ValueError, match=rf"last\.ckpt' holds {told}"):
        read(tmp_path / "last.ckpt")


@provocation(
    "a checkpoint with a tensor of torch.distributed's, which has no memory of its own, as content of a weight: its "
    "numbers would lie at an address that the file says",
    "refused in one sentence",
)
def test_no_tensor_lies_where_a_file_says(tmp_path):
    address = 0x133700000000
    about = DTensor, torch.float32, (4, 4), (4, 1), address // 4, torch.strided, torch.device("cpu"), False
    elsewhere = Disguised(torch._utils._rebuild_wrapper_subclass, *about)
    weight = Disguised(torch._utils._rebuild_parameter, torch.zeros(1), False, OrderedDict())
    state = (elsewhere, None, OrderedDict(), False, None)
    weight.reduced = torch._utils._rebuild_parameter, (torch.zeros(1), False, OrderedDict()), state
    file = tmp_path / "last.ckpt"
    torch.save({"step": {"completed": 1}, "others": [weight]}, file)
    place = torch.load(file, weights_only=True)["others"][0].storage_offset()
    assert place == address // 4
    with pytest.raises(ValueError, match=r"last\.ckpt' holds other objects than tensors and plain values"):
        read(file)
    assert len(torch.load(file, weights_only=True)["others"]) == 1  # what torch may call is as it was


@provocation(
    "a checkpoint whose archive says that another kind of machine has written it (`byteorder`: big), which torch would "
    "turn around also where a tensor has no memory",
    "refused in one sentence",
)
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_bytes_are_not_turned_around(device, tmp_path):
    torch.save({"step": {"completed": 1}, "w": torch.arange(4.0)}, tmp_path / "last.ckpt")
    with zipfile.ZipFile(tmp_path / "last.ckpt") as own, zipfile.ZipFile(tmp_path / "big.ckpt", "w") as other:
        for name in own.namelist():
            other.writestr(name, b"big" if name.endswith("/byteorder") else own.read(name))
    with pytest.raises(ValueError, match=r"big\.ckpt' is damaged"):
        read(tmp_path / "big.ckpt", map_location=device)
    assert torch.load(tmp_path / "big.ckpt", weights_only=True)["w"].tolist() != [0, 1, 2, 3]  # torch is as it was


def test_whatever_torch_writes_of_plain_values_is_read(tmp_path):
    kinds = (torch.bfloat16, torch.float8_e4m3fn, torch.uint16, torch.bool, torch.complex64, torch.int8)
    content = {
        "step": {"completed": 1},
        "tensors": [torch.ones(3).to(kind) for kind in kinds],
        "weight": torch.nn.Parameter(torch.ones(2)),
        "values": [b"\xff\x00", bytearray(b"1"), {1, 2}, 2**70, 1j, None, torch.float32, torch.Size([1]), ("a", 1.5)],
        "counted": Counter("aab"),
        "ordered": OrderedDict(a=1),
    }
    torch.save(content, tmp_path / "last.ckpt")
    found = read(tmp_path / "last.ckpt")
    for one, other in zip(
        [*content.pop("tensors"), content.pop("weight")], [*found.pop("tensors"), found.pop("weight")]
    ):
        assert (type(one), one.dtype) == (type(other), other.dtype)
        assert torch.equal(one.float(), other.float())
    assert found == content


def test_a_tensor_lies_in_its_storage():
    outside = torch.nn.Parameter(torch.zeros(1), requires_grad=False)
    outside.data = torch._utils._rebuild_wrapper_subclass(
        DTensor, torch.float32, (4, 4), (4, 1), 1000, torch.strided, torch.device("cpu"), False
    )
    assert not_plain([outside]) == "a tensor that is outside of its storage, which could lead beyond its memory"
    shorter = torch.zeros(8)[2:].view(2, 3).T
    assert not_plain([shorter, torch.zeros(0), torch.zeros(()), torch.zeros(4, device="meta")]) is None
    shorter.untyped_storage().resize_(31)
    assert not_plain([shorter]) == "a tensor that is outside of its storage, which could lead beyond its memory"


def test_a_tensor_has_no_hooks():
    weight = torch.nn.Parameter(torch.zeros(2))
    assert not_plain([weight]) is None
    weight.register_hook(lambda gradient: gradient)
    assert not_plain([weight]) == "a tensor that is one with hooks, which could lead beyond its memory"


def test_a_tensor_answers_as_tensors_do(tmp_path):
    tensor = torch.zeros(1).expand(3)
    tensor.is_contiguous = OrderedDict
    torch.save({"step": {"completed": 1}, "others": [tensor]}, tmp_path / "last.ckpt")
    with pytest.raises(ValueError, match=r"last\.ckpt' holds other objects than tensors and plain values"):
        read(tmp_path / "last.ckpt")


@provocation("a pipe in place of a checkpoint, to which nobody writes", "refused in one sentence")
def test_a_pipe_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "last.ckpt")
    with pytest.raises(ValueError, match=r"last\.ckpt' is no file"):
        read(tmp_path / "last.ckpt")


@provocation(
    "a checkpoint with sparse, nested or quantized tensors, whose indices torch does not look at, or with tensors "
    "whose numbers share memory: as a number of the optimizer's, `eps`, one would have a step write anywhere in memory",
    "refused in one sentence",
)
@pytest.mark.parametrize("mmap", [False, True])
@pytest.mark.parametrize("place", ["eps", "key", "deep"])
@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (torch.sparse_coo_tensor(torch.tensor([[9]]), torch.ones(1), (2,), check_invariants=False), OTHER),
        (torch.zeros(2, 2).to_sparse_csr(), OTHER),
        (torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)]), OTHER),
        (torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)], layout=torch.jagged), OTHER),
        (torch.quantize_per_tensor(torch.zeros(2), 0.1, 0, torch.qint8), OTHER),
        (torch.zeros(1).expand(3), "a tensor that is overlapping itself"),
        (torch.zeros(8).as_strided((3, 4), (2, 1)), "a tensor that is overlapping itself"),
    ],
    ids=["coo", "csr", "nested", "jagged", "quantized", "expanded", "overlapping"],
)
def test_tensors_of_a_checkpoint_are_dense(value, kind, place, mmap, tmp_path):
    recursive = [torch.zeros(2)]
    recursive.append(recursive)
    dense = [
        torch.ones(3, 4).T,
        torch.ones(3, 1, 4).transpose(0, 2),
        torch.ones(0, 3),
        torch.ones(6)[::2],
        torch.ones(()),
    ]
    content = {"step": {"completed": 1}, "again": recursive, "dense": dense}
    torch.save(content, tmp_path / "last.ckpt")
    assert read(tmp_path / "last.ckpt", mmap=mmap)["step"] == {"completed": 1}
    others = {"eps": {"param_groups": [{"eps": value}]}, "key": {value: 1}, "deep": ({"a": OrderedDict(x=value)},)}
    torch.save(content | {"others": others[place]}, tmp_path / "last.ckpt")
    with pytest.raises(ValueError, match=rf"last\.ckpt' holds {kind}"):
        read(tmp_path / "last.ckpt", mmap=mmap)


class Traced(torch.optim.SGD):
    """An optimizer of the user's own, which writes to a file that it is told of."""

    def __init__(self, weights, lr, trace=None):
        super().__init__(weights, lr=lr)
        for group in self.param_groups:
            group["trace"] = trace


@provocation(
    "a stranger's checkpoint whose optimizer has a group with a text or a switch that is not the optimizer's, such as "
    "the name of a file for one of the user's own",
    "refused in one sentence: torch would put it in place of the user's",
)
@pytest.mark.parametrize(
    ("kind", "options"), [ADAMW, (Traced, {}), (Traced, {"trace": "own.txt"}), (bnb.optim.AdamW8bit, {})]
)
def test_groups_of_weights_have_numbers_of_their_own_alone(kind, options):
    optimizer = stepped(kind, options, (4, 3))
    own = optimizer.state_dict()
    optimizer.load_state_dict(own)  # the same, with another learning rate, and what a schedule adds
    numbers = own | {"param_groups": [own["param_groups"][0] | {"lr": 0.5, "initial_lr": 0.5}]}
    optimizer.load_state_dict(numbers)
    assert optimizer.param_groups[0]["lr"] == 0.5
    for key, value in (("trace", "../.bashrc.d/x"), ("name", "x"), ("run", True), ("lr", "x"), ("more", [{"a": 1}])):
        theirs = own | {"param_groups": [own["param_groups"][0] | {key: value}]}
        told = rf"does not fit the weights: {key} of a group of weights is not the optimizer's; allowed is a checkpoint"
        with pytest.raises(ValueError, match=told):
            optimizer.load_state_dict(theirs)


class Averaging(torch.optim.SGD):
    """One of the user's that is in one of two states, as schedule-free optimizers are."""

    def __init__(self, weights, lr):
        super().__init__(weights, lr=lr)
        self.param_groups[0]["train_mode"] = True


def test_switches_of_the_users_own_optimizers_are_part_of_their_state():
    optimizer = stepped(Averaging, {}, (4, 3))
    state = optimizer.state_dict()
    state["param_groups"][0]["train_mode"] = False
    optimizer.load_state_dict(state)
    assert optimizer.param_groups[0]["train_mode"] is False


@pytest.mark.parametrize(
    "kind", [torch.optim.AdamW, bnb.optim.AdamW8bit, torch.optim.SGD, torch.optim.RMSprop, torch.optim.NAdam]
)
def test_how_an_optimizer_computes_is_not_said_by_a_checkpoint(kind):
    optimizer = stepped(kind, {}, (4, 3))
    own = optimizer.state_dict()
    (group,) = own["param_groups"]
    before = {key: value for key, value in group.items() if isinstance(value, bool | None)}
    assert before
    theirs = group | {key: value is not True for key, value in before.items()} | {"lr": 0.5}
    optimizer.load_state_dict(own | {"param_groups": [theirs]})
    (after,) = optimizer.param_groups
    assert {key: after[key] for key in before} == before
    assert after["lr"] == 0.5
    with pytest.raises(ValueError, match="parameter group"):
        optimizer.load_state_dict(own | {"param_groups": [theirs, theirs]})


class Diary(Traced):
    """One that loads its state in its own way, which asks no hooks."""

    def load_state_dict(self, state_dict):
        self.loaded = state_dict


@provocation(
    "a stranger's checkpoint with a text among the states that the optimizer keeps for weights, such as the name of a "
    "file for one of the user's own",
    "refused in one sentence",
)
@pytest.mark.parametrize(("kind", "options"), [ADAMW, (Traced, {}), (Diary, {}), (bnb.optim.AdamW8bit, {})])
def test_states_of_weights_are_no_texts(kind, options):
    optimizer = stepped(kind, options, (4, 3))
    own = optimizer.state_dict()
    optimizer.load_state_dict(own)
    optimizer.load_state_dict(
        own | {"named": {"policy.model.layers.0.weight": torch.zeros(1)}}
    )  # as of sharded weights
    for page in ("../.bashrc.d/x", b"x", [1, ["x"]], {"a": {"b": "x"}}, {"open('x', 'w')": 1}, {(1, 2): 1}):
        first = {**own["state"].get(0, {}), "page": page}
        with pytest.raises(
            ValueError, match=r"does not fit the weights: it has texts; allowed is a checkpoint of this"
        ):
            optimizer.load_state_dict(own | {"state": {0: first}})
    groups = [own["param_groups"][0] | {"trace": "x"}]
    with pytest.raises(ValueError, match=r"trace of a group of weights is not the optimizer's"):
        optimizer.load_state_dict(own | {"param_groups": groups})
    with pytest.raises(ValueError, match=r"it has texts"):
        optimizer.load_state_dict(own | {"page": "../.bashrc.d/x"})
    with pytest.raises(ValueError, match=r"its groups are no list"):
        optimizer.load_state_dict(own | {"param_groups": tuple(groups)})
