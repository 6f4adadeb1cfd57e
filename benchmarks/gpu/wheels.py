"""The packages that a machine without network needs, beside an image that holds PyTorch, transformers and their like.

python -m benchmarks.gpu.wheels                   the list
python -m benchmarks.gpu.wheels --download DIR    for Python 3.12 on Linux, x86-64

There: pip install --no-index --no-deps --no-build-isolation --target /tmp/site DIR/*
and then: export PYTHONPATH=/tmp/site
"""

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from importlib.metadata import requires, version
from pathlib import Path

from packaging.requirements import Requirement

ROOTS = (
    *("datasets", "fsspec", "httpx2", "hydra-core", "jsonschema", "math-verify[antlr4_9_3]"),
    *("pebble", "peft", "reasoning-gym", "transformers", "trl"),
)
"""What requirements.txt names and common images lack, or hold in versions that are too old.

bitsandbytes is left out: 8-bit optimizers are not measured.
"""
PRESENT = """
accelerate aiohttp anyio attrs filelock httpx huggingface-hub idna jinja2 lightning matplotlib mpmath numpy packaging
pandas psutil pyarrow pytest pytest-xdist pyyaml regex requests rich safetensors scipy setuptools six sympy
tabulate tensorboard torch torchmetrics tqdm triton typer typing-extensions wheel xxhash
"""
"""What the image holds, in whatever version."""
_TARGET = {
    "extra": "",
    "implementation_name": "cpython",
    "os_name": "posix",
    "platform_machine": "x86_64",
    "platform_python_implementation": "CPython",
    "platform_system": "Linux",
    "python_full_version": "3.12.0",
    "python_version": "3.12",
    "sys_platform": "linux",
}
_PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")


def needed(roots: Iterable[str] = ROOTS, present: Iterable[str] = tuple(PRESENT.split())) -> dict[str, str]:
    """Name -> version, as installed here, of the roots and all that they need and the image does not hold."""
    present = set(present)
    found: dict[str, str] = {}
    waiting = [Requirement(root) for root in roots]
    while waiting:
        one = waiting.pop()
        name = re.sub(r"[-_.]+", "-", one.name).lower()
        if name in present or (name in found and not one.extras):
            continue
        found[name] = version(name)
        for text in requires(name) or ():
            other = Requirement(text)
            settings = [_TARGET | {"extra": extra} for extra in ("", *one.extras)]
            if other.marker is None or any(other.marker.evaluate(setting) for setting in settings):
                waiting.append(other)
    return dict(sorted(found.items()))


def pip(python: str, *arguments: str) -> str:
    """What pip says when it fails; nothing if it did what it was asked."""
    command = [python, "-P", "-m", "pip", *arguments, "--quiet", "--disable-pip-version-check", "--no-deps"]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    return (done.stdout.strip() or "it failed") if done.returncode else ""


def fetch(pinned: str, directory: Path, *, python: str) -> str:
    """Get a wheel; where there is none, let ``python`` make it, or if that one is not for 3.12 get the source instead.

    Returns:
        "wheel", "built" or "source".

    Raises:
        SystemExit: None of them is to be had.
    """
    target = [part for platform in _PLATFORMS for part in ("--platform", platform)]
    only = ["--only-binary=:all:", "--python-version", "3.12", "--implementation", "cp", *target]
    if not pip(sys.executable, "download", *only, "--dest", str(directory), pinned):
        return "wheel"
    with tempfile.TemporaryDirectory() as apart:
        pip(python, "wheel", "--wheel-dir", apart, pinned)
        made = [path for path in Path(apart).iterdir() if path.name.endswith("-none-any.whl") or "-cp312-" in path.name]
        for path in made:
            shutil.copy(path, directory)
    if made:
        return "built"
    if said := pip(sys.executable, "download", "--no-binary=:all:", "--dest", str(directory), pinned):
        raise SystemExit(f"{pinned}: neither a wheel nor its source could be had: {said[-500:]}")
    return "source"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--download", type=Path, metavar="DIR")
    parser.add_argument(
        "--python", default=sys.executable, help="makes wheels; compiled code needs one of version 3.12"
    )
    given = parser.parse_args()
    directory = given.download
    for name, number in needed().items():
        pinned = f"{name}=={number}"
        if directory is None:
            print(pinned)
            continue
        directory.mkdir(parents=True, exist_ok=True)
        print(f"{pinned:40} {fetch(pinned, directory, python=given.python)}", flush=True)
    if directory is not None:
        sizes = [path.stat().st_size for path in directory.iterdir()]
        print(f"{len(sizes)} files, {sum(sizes) / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
