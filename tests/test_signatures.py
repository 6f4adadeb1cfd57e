"""What is read from source is what Python itself says of the imported object."""

import inspect
import re
import subprocess
import sys
import textwrap
from typing import Any

import pytest

from grpo_lightning.settings import built
from grpo_lightning.settings.find import find
from grpo_lightning.settings.signatures import signature
from grpo_lightning.settings.source import Absent, NoCallable, Unreadable, spec_of
from grpo_lightning.settings.targets import _fits
from tests.support.composed import CONF, ROOT

NAMED = sorted(
    {
        name
        for path in CONF.rglob("*.yaml")
        for line in path.read_text().splitlines()
        for name in re.findall(r"(?:_target_|verifier): ([a-z]\w*(?:\.\w+)+)", line.split("#")[0])
        if "composition" not in name  # what Hydra itself calls
    }
)
"""Every target of conf/ that makes a part of a run."""
OTHERS = [
    "bitsandbytes.optim.AdEMAMix",
    "bitsandbytes.optim.Lion",
    "datasets.load_dataset",
    "grpo_lightning.varying.Cosine",
    "grpo_lightning.varying.Piecewise",
    "grpo_lightning.varying.Proportional",
    "lightning.pytorch.callbacks.EarlyStopping",
    "lightning.pytorch.callbacks.LearningRateMonitor",
    "lightning.pytorch.callbacks.ModelCheckpoint",
    "lightning.pytorch.loggers.WandbLogger",
    "lightning.pytorch.strategies.DDPStrategy",
    "peft.LoraConfig",
    "tests.support.killing.Kill",
    "tests.support.processes.Record",
    "tests.support.rewards.vowels",
    "torch.optim.Adafactor",
    "torch.optim.SGD",
    "torch.optim.lr_scheduler.LambdaLR",
]
WITHOUT_HINTS = {"lightning.pytorch.loggers.WandbLogger", "peft.LoraConfig", "torch.optim.lr_scheduler.LambdaLR"}
"""Python cannot evaluate their annotations: they name what is imported for type checkers only."""


def imported(path):
    """The signature of an imported object, of a package that is trusted for it."""
    return built.imported(path, [path.split(".")[0]])


def shape(found: inspect.Signature) -> list[tuple[str, Any, bool]]:
    return [(one.name, one.kind, one.default is one.empty) for one in found.parameters.values()]


@pytest.mark.parametrize("name", [*NAMED, *OTHERS])
def test_a_signature_read_from_source_is_that_of_the_object(name):
    read, true = signature(name), imported(name)
    assert shape(read) == shape(true)
    for one in read.parameters.values():
        for value in (1, 1.5, "text", True, None):
            if name not in WITHOUT_HINTS:
                assert _fits(value, one.annotation) == _fits(value, true.parameters[one.name].annotation), one.name


def test_the_names_are_those_of_the_settings():
    assert {"lightning.Trainer", "torch.optim.AdamW", "bitsandbytes.optim.PagedAdamW8bit"} < set(NAMED)
    assert len(NAMED) > 70


@pytest.mark.slow
def test_reading_imports_nothing():
    code = f"""
    import sys
    from grpo_lightning.settings.signatures import signature
    for name in {[*NAMED, *OTHERS]!r}:
        signature(name)
    heavy = {{"torch", "lightning", "transformers", "datasets", "numpy", "peft", "bitsandbytes", "tests"}}
    assert not heavy & {{name.split(".")[0] for name in sys.modules}}
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.fixture
def write(tmp_path, monkeypatch):
    """A function that writes the modules of a new package, by name; reading them must not run them."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def written(**modules: str) -> str:
        package = tmp_path / f"written_{tmp_path.name}"
        package.mkdir()
        for name, text in {"__init__": "", **modules}.items():
            (package / f"{name}.py").write_text(textwrap.dedent(text))
        return package.name

    return written


def test_a_module_is_found_in_folders_without_init(tmp_path, monkeypatch):
    (tmp_path / "outer" / "inner" / "own").mkdir(parents=True)
    (tmp_path / "outer" / "inner" / "own" / "code.py").write_text("raise SystemExit")
    monkeypatch.syspath_prepend(str(tmp_path))
    found = spec_of("outer.inner.own.code")
    assert found is not None
    assert found.origin == str(tmp_path / "outer" / "inner" / "own" / "code.py")
    assert spec_of("outer.inner.own.other") is None
    assert "outer" not in sys.modules


CASES = {
    "plain": "def f(a, /, b: int, *args, c: float | None = None, **rest): ...",
    "alias": "def g(x: str): ...\nf = g",
    "last_one_counts": "def f(a): ...\ndef f(b): ...",
    "relative": "from .other import base as f",
    "relative_module": "from . import other\nf = other.base",
    "star": "from .other import *\nf = base",
    "optional": "from typing import *\ndef f(a: Optional[int], b: 'Union[int, str]', c: list[int] = []): ...",
    "own_init": "class f:\n    def __init__(self, a: bool, *, b=1): ...",
    "inherited": "from .other import Base\nclass f(Base): ...",
    "no_init": "class f: ...",
    "new_first": "class f:\n    def __new__(cls, a): ...\n    def __init__(self, b): ...",
    "diamond": """
        class A:
            def __init__(self, a): ...
        class B(A): ...
        class C(A):
            def __init__(self, c): ...
        class f(B, C): ...
    """,
    "dataclass": """
        from dataclasses import KW_ONLY, dataclass, field
        from typing import ClassVar
        @dataclass
        class Below:
            a: int
            b: float = 1.0
            shared: ClassVar[int] = 3
            made: str = field(init=False)
        @dataclass(order=True)
        class f(Below):
            _: KW_ONLY
            c: str
            b: int = 2
            d: list = field(default_factory=list)
    """,
    "dataclass_by_keyword": """
        from dataclasses import dataclass
        @dataclass(kw_only=True)
        class f:
            b: int = 1
            a: str
    """,
    "dataclass_with_init": """
        from dataclasses import dataclass
        @dataclass
        class f:
            a: int
            def __init__(self, z): ...
    """,
    "plain_class_of_a_dataclass": "from .other import Data\nclass f(Data):\n    late: int = 3",
    "wrapped": """
        import functools
        def loud(function):
            @functools.wraps(function)
            def inner(*args, **kwargs):
                return function(*args, **kwargs)
            return inner
        @loud
        def f(a, *, b): ...
    """,
    "marked": "def mark(g):\n    g.x = 1\n    return g\n@mark\ndef f(a): ...",
    "tried": "try:\n    from nowhere_at_all import f\nexcept ImportError:\n    def f(a): ...",
    "type_checking": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from .other import base as f\n"
    "def __getattr__(name):\n    from .other import base\n    return base",
}
OTHER = """
from dataclasses import dataclass
def base(x: int = 3): ...
class Base:
    def __init__(self, first, *, second: str = "x"): ...
@dataclass
class Data:
    early: int
"""


@pytest.mark.parametrize("case", CASES)
def test_python_code_of_many_kinds(write, case):
    package = write(other=OTHER, mine=CASES[case])
    read = signature(f"{package}.mine.f")
    assert package not in sys.modules
    true = imported(f"{package}.mine.f")
    assert shape(read) == shape(true)
    for one in read.parameters.values():
        for value in (1, 1.5, "text", True, None):
            assert _fits(value, one.annotation) == _fits(value, true.parameters[one.name].annotation), one.name


@pytest.mark.parametrize(
    "text",
    [
        "f = print",
        "from functools import partial\nf = partial(print, 1)",
        "def deco(g):\n    return lambda z: g(1, 2)\n@deco\ndef f(a, b): ...",
        "class M(type):\n    def __call__(cls, z): ...\nclass f(metaclass=M):\n    def __init__(self, a): ...",
        "import enum\nclass f(enum.Enum):\n    A = 1",
        "from typing import NamedTuple\nclass f(NamedTuple):\n    a: int",
        "from collections import OrderedDict\nclass f(OrderedDict): ...\nf.__init__ = 3",
        "import sys\nif sys.argv:\n    def f(a): ...\nelse:\n    def f(b): ...",
        "globals()['f'] = print",
        "for name in ('f', 'g'):\n    exec(name + ' = print')",
        "def __getattr__(name):\n    return print",
        "from .mine import f",
        "f = g\ng = f",
        "def f(:",
        "class f:\n    def method(self): ...\nf.__signature__ = 3\nf = f()",
    ],
)
def test_what_source_does_not_say_is_left_to_the_object(write, text):
    with pytest.raises(Unreadable) as error:
        signature(f"{write(mine=text)}.mine.f")
    assert not isinstance(error.value, NoCallable)


@pytest.mark.parametrize("text", ["f = 3", "f = [print]", "f: str = 'x'", "f = {}"])
def test_plain_values_are_no_callables(write, text):
    path = f"{write(mine=text)}.mine.f"
    for read in (signature, imported):
        with pytest.raises(NoCallable):
            read(path)


def test_what_is_not_there(write):
    package = write(mine="def f(): ...")
    for path in (f"{package}.mine.g", f"{package}.yours.f", "no_such_package_at_all.f"):
        for read in (signature, imported):
            with pytest.raises(Absent):
                read(path)
    with pytest.raises(NoCallable, match="module"):
        signature(f"{package}.mine")


def test_a_file_that_fails_when_it_is_imported_is_absent_in_the_end(write):
    path = write(mine="def f(): ...\n1 / 0") + ".mine.f"
    assert shape(signature(path)) == []
    with pytest.raises(Absent, match="ZeroDivisionError"):
        imported(path)


def test_a_path_leads_to_the_place_of_definition():
    assert find("torch.optim.AdamW").home == "torch.optim.adamw.AdamW"
    assert find("grpo_lightning.GRPOLightningModule").home == "grpo_lightning.module.grpo.GRPOLightningModule"
    assert find("lightning.pytorch.Trainer.fit").home == "lightning.pytorch.trainer.trainer.Trainer.fit"
    with pytest.raises(Unreadable):
        find("torch.os.system")  # built into the interpreter
