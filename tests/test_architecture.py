"""The rules a reader relies on: imports point one way, no file is long, nothing asserts, one word per part."""

import ast
import sys

import pytest

from tests.composed import CONF, ROOT

PACKAGE = ROOT / "grpo_lightning"
FILES = sorted(PACKAGE.rglob("*.py"))
ORDER = [
    *("clock", "schedule", "varying", "metric", "memory", "ranks", "batch", "reward", "advantage", "loss", "policy"),
    *(
        "reference",
        "data",
        "group",
        "judge",
        "rollout",
        "selfcheck",
        "validation",
        "trained_part",
        "strategy",
        "step",
        "update",
    ),
    *("module", "sft", "callbacks", "config", "resume", "run"),
    "report",
]
ANY = {"torch"}
OUTSIDE = {
    "clock": set(),
    "schedule": set(),
    "varying": set(),
    "config": set(),
    "metric": ANY | {"torchmetrics"},
    "memory": set(),
    "strategy": ANY | {"lightning"},
    "reward": {"reasoning_gym", "regex", "pebble", "math_verify", "jsonschema", "referencing"},
    "policy": ANY | {"transformers", "tokenizers", "peft", "numpy"},
    "reference": ANY | {"peft"},
    "data": ANY | {"lightning", "datasets", "pyarrow", "reasoning_gym", "numpy"},
    "validation": ANY | {"torchmetrics"},
    "step": ANY | {"lightning"},
    "callbacks": ANY | {"lightning", "rich"},
    "resume": {"lightning"},
    "run": ANY | {"lightning", "rich"},
    "report": {"rich", "tensorboard", "matplotlib"},
}
OUTSIDE_OF_FILE = {"reward/model.py": ANY | {"transformers"}}  # only who chooses this reward imports it


def imports(path) -> set[str]:
    """Dotted names of everything ``path`` imports at run time."""
    nodes = list(ast.walk(ast.parse(path.read_text())))
    skipped = {
        id(child)
        for node in nodes
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for child in ast.walk(node)
    }
    nodes = [node for node in nodes if id(node) not in skipped]
    froms = {n.module for n in nodes if isinstance(n, ast.ImportFrom)}
    return froms | {alias.name for n in nodes if isinstance(n, ast.Import) for alias in n.names}


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_point_one_way(path):
    part = path.relative_to(PACKAGE).with_suffix("").parts[0]
    if part == "__init__":
        assert not imports(path)
        return
    outside = OUTSIDE_OF_FILE.get(path.relative_to(PACKAGE).as_posix(), OUTSIDE.get(part, ANY))
    for name in imports(path):
        top, *rest = name.split(".")
        if top == "grpo_lightning":
            assert not rest or rest[0] == part or ORDER.index(rest[0]) < ORDER.index(part), f"{part} imports {name}"
        else:
            assert top in sys.stdlib_module_names or top in outside, f"{part} may not import {top}"


def test_only_train_py_knows_hydra():
    assert {"hydra", "omegaconf"} <= {name.split(".")[0] for name in imports(ROOT / "train.py")}
    for path in FILES:
        assert not {"hydra", "omegaconf"} & {name.split(".")[0] for name in imports(path)}, path
    assert len((ROOT / "train.py").read_text().splitlines()) < 40


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_no_file_is_long_and_nothing_is_asserted(path):
    limit = 150 if path.name == "module.py" else 300
    assert len(path.read_text().splitlines()) <= limit
    assert not any(isinstance(node, ast.Assert) for node in ast.walk(ast.parse(path.read_text())))


def test_every_part_of_the_config_has_a_module_of_its_name():
    parts = {p.name for p in CONF.iterdir() if p.is_dir()}
    without = {
        "algorithm": "chooses other parts",
        "experiment": "chooses other parts",
        "sweep": "chooses other parts",
        "optimizer": "torch's",
        "trainer": "Lightning's",
        "logger": "Lightning's",
    }
    for part in parts - without.keys():
        assert (PACKAGE / part).is_dir() or (PACKAGE / f"{part}.py").exists(), part
