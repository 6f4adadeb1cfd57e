"""Files of the working directory that nobody names, called like modules: none is run, by no process of a run."""

import importlib.util
import json
import marshal
import os
import pickle
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from grpo_lightning import start as place_of_start
from grpo_lightning.distributed import fresh
from grpo_lightning.settings.loggers import logger_problems
from tests.support.composed import ROOT
from tests.support.provocations import provocation
from tests.support.running import SMALL
from tests.test_attacks import Touch, begun, start

pytestmark = pytest.mark.slow
PYTHONS = ("socket", "pickle", "random", "signal", "threading", "selectors", "json", "base64", "queue")
OPTIONAL = ("triton", "pynvml", "opt_einsum", "torch_npu", "tensorflow", "gmpy2", "numexpr", "flash_attn", "cupy")
"""What libraries import if it is there."""
TINY = (*SMALL[:11], "trainer=cpu", "steps=1")

MINE = """
import json, multiprocessing, os, subprocess, sys
import mine_helper  # lies beside this file

def starts_a_program(completions, **columns):
    from mine_package.late import NUMBER
    assert mine_helper.double(1.5) == NUMBER
    if not multiprocessing.current_process().daemon:
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            assert pool.map(mine_helper.double, [4]) == [8]
    told = subprocess.run([sys.executable, "other/program.py"], capture_output=True, text=True, check=True).stdout
    with open("told.txt", "a") as file:
        file.write(told)
    return [float(len(text) % 3) for text in completions]
"""
PROGRAM = """
import json, os, sys
import beside  # in the program's own directory
print(json.dumps([sys.flags.safe_path, os.environ.get("PYTHONSAFEPATH"), os.environ.get("PYTHONPATH")]))
"""


def marked(place: Path, *names: str) -> Path:
    """Files that leave a mark when they are imported; returns the mark."""
    for name in names:
        (place / f"{name}.py").write_text(f"open({str(place / 'HIT')!r}, 'a').write({name!r})\n")
    return place / "HIT"


def own(place: Path) -> None:
    (place / "mine.py").write_text(MINE)
    (place / "mine_helper.py").write_text("def double(value):\n    return 2 * value\n")
    (place / "mine_package").mkdir()
    (place / "mine_package" / "late.py").write_text("NUMBER = 3\n")
    (place / "other").mkdir()
    (place / "other" / "program.py").write_text(PROGRAM)
    (place / "other" / "beside.py").write_text("")


def named_by_metadata(place: Path) -> None:
    """A package, as it seems, that says which of its modules other packages are to import."""
    (place / "evil-1.0.dist-info").mkdir()
    (place / "evil-1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: evil\nVersion: 1.0\n")
    groups = ("torch.backends", "lightning.pytorch.callbacks_factory", "fsspec.specs", "tensorboard_plugins")
    text = "".join(f"[{group}]\nx = flash_attn:f\n" for group in groups)
    (place / "evil-1.0.dist-info" / "entry_points.txt").write_text(text)


def told(place: Path) -> set[str]:
    return set((place / "told.txt").read_text().splitlines())


@provocation("files named like what libraries import if it is there, `triton.py` or `pynvml.py`", "they are not run")
def test_files_named_like_optional_packages_are_not_run(tmp_path):
    mark = marked(tmp_path, *OPTIONAL)
    named_by_metadata(tmp_path)
    done = start(tmp_path, *TINY, "reward=[format,math]")
    assert done.returncode == 0, done.stderr[-2000:]
    assert not mark.exists()


@provocation(
    "files named like Python's modules, `socket.py` or `pickle.py`, and workers of rewards", "they are not run"
)
def test_files_named_like_pythons_modules_are_not_run_by_workers(tmp_path):
    mark = marked(tmp_path, *PYTHONS)
    done = start(tmp_path, *TINY, "reward=[format]", "reward.format.timeout=30")
    assert done.returncode == 0, done.stderr[-2000:]
    assert not mark.exists()


@provocation(
    "a file `matplotlibrc`, which versions of matplotlib up to 3.10 evaluate when a library imports them",
    "it is not read",
)
@pytest.mark.parametrize("timeout", ["null", "30"], ids=["run", "worker"])
def test_settings_of_matplotlib_in_the_directory_are_not_read(timeout, tmp_path):
    (tmp_path / "matplotlibrc").write_text("lines.linewidth: 77\n")
    (tmp_path / "drawing.py").write_text(
        "def width(completions, **columns):\n    import matplotlib\n"
        "    open('told.txt', 'w').write(str(matplotlib.rcParams['lines.linewidth']))\n"
        "    return [0.0 for _ in completions]\n"
    )
    words = ("reward=[custom]", "reward.custom.function._target_=drawing.width", f"reward.custom.timeout={timeout}")
    done = start(tmp_path, *TINY, *words, "reward.custom.max_failed=0")
    assert done.returncode == 0, done.stderr[-2000:]
    assert told(tmp_path) == {"1.5"}


@provocation(
    "a file `ucx.conf`, which names libraries that MPI would load, as Lightning asks it for processes where mpi4py is "
    "installed",
    "MPI is not asked",
)
@pytest.mark.parametrize("is_there", [False, True])
def test_settings_of_mpi_in_the_directory_are_not_read(is_there, tmp_path):
    package = tmp_path / "installed" / "mpi4py"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    lines = "open('HIT', 'w').close()\nclass COMM_WORLD:\n    Get_size = staticmethod(lambda: 1)\n"
    (package / "MPI.py").write_text(lines)
    if is_there:
        (tmp_path / "ucx.conf").write_text("UCX_MODULE_DIR=./mods\n")
    done = start(tmp_path, *TINY, "reward=[format]", PYTHONPATH=f"{ROOT}:{tmp_path}/installed")
    assert done.returncode == 0, done.stderr[-2000:]
    assert (tmp_path / "HIT").exists() is not is_there


def plant(place: Path, name: str, mark: Path) -> None:
    """Bytecode for a file, of which Python would not ask whether it fits."""
    file = place / f"{name}.py"
    code = compile(f"open({str(mark)!r}, 'a').write({name!r})\n" + file.read_text(), str(file), "exec")
    kept = Path(importlib.util.cache_from_source(str(file)))
    kept.parent.mkdir(exist_ok=True)
    header = importlib.util.MAGIC_NUMBER + (1).to_bytes(4, "little") + bytes(8)  # "unchecked", PEP 552
    kept.write_bytes(header + marshal.dumps(code))


@provocation(
    "bytecode in `__pycache__` beside the user's own reward, what it imports, and a package of the user's", "is not run"
)
@pytest.mark.parametrize("timeout", ["null", "30"], ids=["run", "worker"])
@pytest.mark.parametrize("on_path", [False, True], ids=["start", "path"])
def test_bytecode_beside_the_users_files_is_not_run(on_path, timeout, tmp_path):
    own(tmp_path)
    (tmp_path / "mine_package" / "__init__.py").write_text("")
    for place, name in ((".", "mine"), (".", "mine_helper"), ("mine_package", "__init__"), ("mine_package", "late")):
        plant(tmp_path / place, name, tmp_path / "HIT")
    words = ("reward=[custom]", "reward.custom.function._target_=mine.starts_a_program", "trusted=[mine_package]")
    more = {"PYTHONPATH": f"{ROOT}:{tmp_path}"} if on_path else {}
    done = begun(tmp_path, *TINY, *words, f"reward.custom.timeout={timeout}", "reward.custom.max_failed=0", **more)
    assert done.returncode == 0, done.stderr[-2000:]
    assert not (tmp_path / "HIT").exists(), (tmp_path / "HIT").read_text()


@pytest.mark.parametrize("timeout", ["null", "30"])
def test_a_trusted_reward_finds_the_files_beside_it_and_so_does_a_program_that_it_starts(timeout, tmp_path):
    own(tmp_path)
    named_by_metadata(tmp_path)
    mark = marked(tmp_path, *PYTHONS, *OPTIONAL)
    words = ("reward=[custom]", "reward.custom.function._target_=mine.starts_a_program", "trusted=[mine_package]")
    done = begun(tmp_path, *TINY, *words, f"reward.custom.timeout={timeout}", "reward.custom.max_failed=0")
    assert done.returncode == 0, done.stderr[-2000:]
    assert told(tmp_path) == {json.dumps([False, None, str(ROOT)])}
    assert not mark.exists()


@provocation(
    "folders with `__init__.py` that are unpacked in a checkout, such as `datasets/`, `triton/`, `json/`, and "
    "`hydra_plugins/x.py`, at `python train.py` with rewards in workers",
    "they are not run",
)
@pytest.mark.parametrize("kind", ["plain", "editable"])
def test_folders_in_a_checkout_are_not_run(kind, tmp_path):
    place = tmp_path / "checkout"
    for part in ("conf", "grpo_lightning"):
        shutil.copytree(ROOT / part, place / part, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "train.py", place)
    mark = tmp_path / "HIT"
    for name in ("datasets", "triton", "pynvml", "json", "typing", "hydra_plugins/mine", "nt", "org", *OPTIONAL):
        (place / name).mkdir(parents=True, exist_ok=True)
        (place / name / "__init__.py").write_text(f"open({str(mark)!r}, 'a').write({name!r} + ' ')\n")
    (place / "mine.py").write_text("def score(completions):\n    return [float(len(text)) for text in completions]\n")
    rows = [{"prompt": f"{row}?", "tests": [{"input": "1", "output": "1"}]} for row in range(20)]
    (place / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    words = ["reward.custom.function._target_=mine.score", "reward.custom.timeout=30"]
    words += [word for word in TINY if not word.startswith("data.")]
    words += [
        "data.prompts_per_step=2",
        "data=jsonl",
        "data.path=rows.jsonl",
        "reward=[code,custom]",
    ]  # whose sandbox is another process
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    python = sys.executable if kind == "plain" else with_path(tmp_path / "environment", place)
    script = ("-P", "-c", "from grpo_lightning.composition import main; main()")  # of `grpo-lightning`
    starts = [("train.py",), ("-P", "train.py"), *[script] * (kind == "editable")]
    for number, options in enumerate(starts):
        command = [python, *options, *words, f"hydra.run.dir=run{number}"]
        done = subprocess.run(command, cwd=place, env=environment, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr[-2000:]
        assert not mark.exists(), mark.read_text()
        assert json.loads((place / f"run{number}" / "summary.json").read_text())["status"] == "finished"
        (place / f"run{number}" / "triton").mkdir()
    telling = f"import sys; sys.path.insert(0, {str(place / 'grpo_lightning/distributed/alone')!r})\n"
    telling += "import grpo_lightning_alone, pathlib; from grpo_lightning.report.command import told_command\n"
    telling += f"print(told_command(pathlib.Path({str(place / 'run0')!r})))"
    for name in ("yaml", "rich", "csv"):
        (place / name).mkdir()
        (place / name / "__init__.py").write_text(f"open({str(mark)!r}, 'a').write({name!r} + ' ')\n")
    told = subprocess.run([python, "-P", "-c", telling], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert told.stdout.startswith(f"PYTHONPATH={place}/"), told.stderr
    command = told.stdout.replace(" python ", f" {python} ")  # which is no other one's here
    done = subprocess.run(command, shell=True, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert "reward/total" in done.stdout, done.stderr[-2000:]
    assert not mark.exists(), mark.read_text()
    if kind == "editable":
        for command in (["replay", "run0"], ["report", "run0", "run1"]):
            command = [python, "-P", "-m", f"grpo_lightning.{command[0]}", *command[1:]]
            subprocess.run(command, cwd=place, env=environment, capture_output=True, text=True, timeout=300)
            assert not mark.exists(), mark.read_text()


@provocation(
    "folders such as `datasets/` and `triton/` that are unpacked in a checkout, at `python -m pytest` with rewards in "
    "workers, `python -m benchmarks report` and `python -m tests.kills`",
    "they are not run",
)
@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        "pytest -n 2 tests/test_strangers_data.py tests/test_reward_pool.py -k media or values_come",
        "benchmarks report",
        "tests.kills --count 1 --seed 0",
        "benchmarks.gpu.apart tests.support.gpu_stage found.json 60 reduced",
    ],
    ids=lambda words: words.split()[0],
)
def test_nor_are_they_by_tests_and_benchmarks(words, tmp_path):
    place = tmp_path / "checkout"
    for part in ("benchmarks", "conf", "docs", "grpo_lightning", "tests"):
        shutil.copytree(ROOT / part, place / part, ignore=shutil.ignore_patterns("__pycache__"))
    for part in ("README.md", "pyproject.toml", "train.py"):
        shutil.copy(ROOT / part, place)
    mark = marked(place, *OPTIONAL)
    for name in ("datasets", "triton", "pynvml", "hydra_plugins/mine", "sklearn"):
        (place / name).mkdir(parents=True, exist_ok=True)
        (place / name / "__init__.py").write_text(f"open({str(mark)!r}, 'a').write({name!r} + ' ')\n")
    module, *rest = words.split(" -k ")[0].split()
    command = [sys.executable, "-m", module, *rest, *(["-k", words.split(" -k ")[1]] if " -k " in words else [])]
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHONPATH", "PYTEST"))}
    environment["STAGE"] = "passes"
    done = subprocess.run(command, cwd=place, env=environment, capture_output=True, text=True, timeout=300)
    assert not mark.exists(), mark.read_text()
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]


def with_path(directory: Path, checkout: Path) -> str:
    """A Python for which ``pip install -e`` has put a checkout on the path, behind the packages of this one."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(directory)], check=True)
    (packages,) = directory.glob("lib/python*/site-packages")
    (packages / "_editable.pth").write_text(f"{sysconfig.get_path('purelib')}\n{checkout}\n")
    return str(directory / "bin" / "python")


def test_python_that_libraries_start_does_not_look_into_an_editable_checkout(tmp_path):
    checkout = tmp_path / "checkout"
    shutil.copytree(ROOT / "grpo_lightning", checkout / "grpo_lightning")
    (checkout / "train.py").touch()
    (checkout / "conf").mkdir()
    marked(checkout, "cupy")
    python = with_path(tmp_path / "environment", checkout)
    probe = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import cupy'])"
    begin = "from grpo_lightning.distributed.alone.grpo_lightning_path import leave_here as l; l()"
    library = f"{begin}; from grpo_lightning import start as s; s.START = s.Path.cwd(); from grpo_lightning.distributed"
    for code in (probe, f"{library} import fresh; fresh.protect_processes(); {probe}"):
        mark = checkout / "HIT"
        subprocess.run([python, "-P", "-c", code], cwd=tmp_path, capture_output=True, check=True)
        assert mark.exists() == (code == probe)
        mark.unlink(missing_ok=True)


@provocation("the same files in a sweep with `hydra/launcher=joblib` or `submitit_local`", "they are not run")
@pytest.mark.parametrize("launcher", ["joblib", "submitit_local"])
def test_files_are_not_run_by_launchers(launcher, tmp_path):
    own(tmp_path)
    mark = marked(tmp_path, *PYTHONS, *OPTIONAL)
    words = ("reward=[custom]", "reward.custom.function._target_=mine.starts_a_program", "reward.custom.timeout=30")
    words += ("trusted=[mine_package]",)
    done = start(tmp_path, "-m", f"hydra/launcher={launcher}", "hydra.sweep.dir=sweep", *TINY, *words)
    assert done.returncode == 0, done.stderr[-2000:]
    states = [json.loads(path.read_text())["status"] for path in (tmp_path / "sweep").glob("*/summary.json")]
    assert states == ["finished"]
    assert told(tmp_path) == {json.dumps([False, None, str(ROOT)])}
    assert not mark.exists()


@provocation(
    "pickles that lie where `hydra/launcher=submitit_local` expects the results of its jobs, in a folder that is "
    "named (`hydra.launcher.submitit_folder`) or in a sweep's directory",
    "they are not read",
)
@pytest.mark.parametrize("given", [True, False], ids=["folder", "sweep"])
def test_what_lies_in_place_of_a_launcher_s_results_is_not_read(given, tmp_path):
    (tmp_path / "conf" / "experiment").mkdir(parents=True)
    (tmp_path / "conf" / "experiment" / "evil.yaml").write_text(
        "# @package _global_\ndefaults:\n  - override /hydra/launcher: submitit_local\n"
        "hydra: {mode: MULTIRUN, sweeper: {params: {seed: 0}}}\n"
    )
    result = pickle.dumps(("success", Touch(tmp_path / "HIT")))
    for number in range(os.getpid(), os.getpid() + 2000):  # a job is named by its process
        place = tmp_path / "there" if given else tmp_path / "sweep" / ".submitit" / str(number)
        place.mkdir(parents=True, exist_ok=True)
        (place / f"{number}_0_result.pkl").write_bytes(result)
        (place / f"{number}_0_result.pkl.save_tmp").touch()  # with which a job cannot write its own
    words = ["experiment=evil", "hydra.sweep.dir=sweep", *["hydra.launcher.submitit_folder=there"] * given]
    done = begun(tmp_path, "--config-dir", "conf", *words, *TINY, "reward=[format]")
    assert not (tmp_path / "HIT").exists()
    assert done.returncode == 0, done.stderr[-2000:]


@provocation(
    "a sweep whose jobs' directory holds a link `x.log` to ~/.bashrc, and a handler of Hydra's own logger with that "
    "name: the first job is refused, and the line of the second would be written through the link",
    "each is refused; nothing is written",
)
@pytest.mark.slow
def test_no_line_is_written_where_a_job_was_refused(tmp_path):
    mine = tmp_path / "mine"
    mine.write_text("mine")
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "x.log").symlink_to(mine)
    handler = (
        '{class: logging.FileHandler, filename: "${hydra.runtime.output_dir}/x.log", delay: true, formatter: simple}'
    )
    words = [
        f"+hydra.job_logging.handlers.f2={handler}",
        "hydra.sweep.dir=sweep",
        f"hydra.sweep.subdir={tmp_path}/theirs",
    ]
    words += ["+hydra.job_logging.loggers.hydra={level: INFO, handlers: [f2]}", "seed=0,1"]
    done = begun(tmp_path, "-m", *words, *TINY)
    assert done.returncode == 1
    assert "x.log in it is a link to" in " ".join(done.stderr.split())
    assert mine.read_text() == "mine"


@provocation(
    "`hydra.sweep.subdir` of a hidden directory of the home, or `hydra.run.dir=~/.bashrc.d/checkpoints/..`, "
    "which Hydra makes",
    "refused before it is made",
)
@pytest.mark.slow
def test_hydra_makes_no_directory_that_is_refused(tmp_path):
    home = tmp_path / "home"
    home.mkdir()
    for words in (
        ("-m", "hydra.sweep.dir=sweep", f"hydra.sweep.subdir={home}/.bashrc.d", "seed=0,1"),
        (f"hydra.run.dir={home}/.bashrc.d/checkpoints/..",),
        (f"hydra.run.dir={home}/.bashrc.d",),
    ):
        done = begun(tmp_path, *words, *TINY, HOME=str(home))
        assert done.returncode == 1
        assert "programs may run what is put there" in " ".join(done.stderr.split())
        assert not [*home.iterdir()]


@provocation(
    "`hydra.launcher.submitit_folder=theirs/folder`, or a `tracking_uri` of MLflow's, that is a stranger's link to "
    "a directory or database of the user's",
    "refused in one sentence",
)
def test_launchers_and_stores_write_through_no_link(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "theirs").mkdir()
    (tmp_path / "mine").mkdir()
    (tmp_path / "theirs" / "folder").symlink_to(tmp_path / "mine")
    (tmp_path / "theirs" / "m.db").symlink_to(tmp_path / "mine" / "notes.db")
    words = ["hydra/launcher=submitit_local", "seed=0,1", "hydra.launcher.submitit_folder=theirs/folder"]
    done = begun(tmp_path, "-m", "hydra.sweep.dir=sweep", *words, *TINY)
    assert "submitit_folder=theirs/folder: " in done.stderr
    assert "theirs/folder is a link; allowed is a place without" in " ".join(done.stderr.split())
    assert not [*(tmp_path / "mine").iterdir()]
    for store, is_refused in (("theirs/m.db", True), ("theirs/folder/x.db", True), ("theirs/n.db", False)):
        logger = {"_target_": "grpo_lightning.logger.MLFlowLogger", "tracking_uri": f"sqlite:///{store}"}
        told = [one for one in logger_problems({"logger": {"mlflow": logger}}) if "is a link" in one]
        assert len(told) == is_refused, store
        place = {"_target_": "grpo_lightning.logger.MLFlowLogger", "artifact_location": f"file:{store}"}
        told = [one for one in logger_problems({"logger": {"mlflow": place}}) if "is a link" in one]
        assert len(told) == is_refused, store


@pytest.mark.parametrize("launcher", ["joblib", "submitit_local"])
def test_jobs_find_a_checkout_from_which_they_are_started(launcher, tmp_path):
    """As in ``python tests/../train.py -m``, where only the path of train.py says where the package is."""
    words = ["-m", f"hydra/launcher={launcher}", f"hydra.sweep.dir={tmp_path}", *TINY, "reward=[format]"]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    program = "tests/../train.py" if launcher == "joblib" else "train.py"
    done = subprocess.run([sys.executable, program, *words], cwd=ROOT, env=environment, capture_output=True)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize("forked", [False, True], ids=["forkserver", "spawn"])
def test_workers_of_a_program_run_none_either(forked, tmp_path):
    """Of a program in another directory; in a forked process workers are started afresh, each by itself."""
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "here").mkdir()
    mark = marked(tmp_path / "here", *PYTHONS)
    (tmp_path / "elsewhere" / "program.py").write_text(
        "import operator\nfrom grpo_lightning.reward.engine import pool\n"
        "if __name__ == '__main__':\n"
        f"    pool._is_forked = {forked}\n    pool.configure(1)\n"
        "    print(pool.submit(operator.truth, [], seconds=9).result())\n"
        "    from tests.support import hostile\n"
        "    print(pool.submit(hostile.double, [{'value': 4}], seconds=9).result())\n"
    )
    command = [sys.executable, str(tmp_path / "elsewhere" / "program.py")]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path / "here", env=environment, capture_output=True, text=True, timeout=60)
    assert done.stdout.split("\n")[:2] == ["[]", "[8]"], done.stderr[-2000:]
    assert not mark.exists()


def test_only_settings_and_the_users_files_find_modules_there(tmp_path):
    for place in ("start", "start/.venv/lib/site-packages", "start/source", "elsewhere"):
        (tmp_path / place).mkdir(parents=True)
    (tmp_path / "start" / "mine.py").write_text(
        "import importlib\nimport mine_helper\nimportlib.import_module('mine_second')\n__import__('mine_third')\n"
    )
    (tmp_path / "start" / "mine_helper.py").write_text(  # a library in C, which is no file of the user's
        "import pickle\ntry:\n    pickle.loads(b'ctriton\\nname\\n.')\nexcept ImportError:\n    print('C')\n"
    )
    (tmp_path / "start" / "mine_second.py").write_text("")
    (tmp_path / "start" / "mine_third.py").write_text("")
    mark = marked(tmp_path / "start", "triton")
    (tmp_path / "elsewhere" / "library.py").write_text("import triton\n")
    (tmp_path / "start" / ".venv" / "lib" / "site-packages" / "installed.py").write_text("import triton\n")
    (tmp_path / "start" / "source" / "editable.py").write_text("import triton\n")  # a library that is worked on
    code = (
        "import importlib, sys; from pathlib import Path; from grpo_lightning import start\n"
        f"start.START = Path({str(tmp_path / 'start')!r})\n"
        f"sys.path += [{str(tmp_path / 'elsewhere')!r}, {str(tmp_path / 'start/.venv/lib/site-packages')!r}]\n"
        f"sys.path += [{str(tmp_path / 'start' / 'source')!r}]\n"
        "start.make_importable('mine')\n"
        "import mine\n"
        "for name in ('library', 'installed', 'editable', 'triton'):\n"
        "    try:\n        importlib.import_module(name)\n"
        "    except ModuleNotFoundError as error:\n        print(error.name)\n"
        "print(start.importable())\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    found = (str(tmp_path / "start"), ["mine", "mine_helper", "mine_second", "mine_third"])
    assert done.stdout == "C\n" + "triton\n" * 4 + f"{found}\n", done.stderr
    assert not mark.exists()


@provocation(
    "a stranger's folder `my_rewards/` beside the user's own `my_rewards.py`, of which Python would take the folder",
    "refused in one sentence, nothing ran",
)
@pytest.mark.parametrize("on_path", [False, True])
def test_a_folder_beside_a_file_of_its_name_is_not_run(on_path, tmp_path):
    mark = tmp_path / "HIT"
    for name in ("mine", "mine_helper"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(f"open({str(mark)!r}, 'w')\n")
        (tmp_path / f"{name}.py").write_text("def score(completions):\n    return [0.5] * len(completions)\n")
    more = {"PYTHONPATH": f"{ROOT}:{tmp_path}"} if on_path else {}
    words = (*TINY, "reward=[custom]", "reward.custom.function._target_=mine.score")
    assert begun(tmp_path, *words, **more).returncode == 1
    shutil.rmtree(tmp_path / "mine")
    (tmp_path / "mine").mkdir()  # without a file of Python it is no package
    assert begun(tmp_path, *words, **more).returncode == 0
    (tmp_path / "mine.py").write_text("import mine_helper\n" + (tmp_path / "mine.py").read_text())
    done = begun(tmp_path, *words, **more)
    assert done.returncode == 1
    assert f"{tmp_path}/mine_helper and {tmp_path}/mine_helper.py have the same name; allowed is one of" in done.stderr
    assert not mark.exists()


@provocation(
    "a stranger's file beside the user's own of which Python would take it: `my_rewards.so` or `my_package/rewards.so` "
    "beside a file of source, `my_package.py` beside a folder without `__init__.py`",
    "refused in one sentence, nothing ran",
)
@pytest.mark.parametrize("on_path", [False, True])
@pytest.mark.parametrize(
    "theirs",
    [
        *("mine.abi3.so", "mine_helper.so", "package/rewards.so", "package/rewards/__init__.py", "package.py"),
        *("deep.py", "elsewhere/mine.so"),
    ],
)
def test_a_file_beside_one_of_its_name_is_not_run(theirs, on_path, tmp_path):
    (tmp_path / "package").mkdir()
    (tmp_path / "deep" / "sub").mkdir(parents=True)
    own = ("mine_helper", "package/rewards", "deep/sub/rewards")
    for name, begin in (("mine", "import mine_helper\n"), *((name, "") for name in own)):
        (tmp_path / f"{name}.py").write_text(f"{begin}def score(completions):\n    return [0.5] * len(completions)\n")
    more = {"PYTHONPATH": f"{ROOT}:{tmp_path}"} if on_path else {}
    target = {"package": "package.rewards", "deep.py": "deep.sub.rewards"}.get(theirs[:7], "mine")
    words = (*TINY, "reward=[custom]", f"reward.custom.function._target_={target}.score")
    if theirs in ("mine.abi3.so", "package.py"):
        assert begun(tmp_path, *words, **more).returncode == 0
    (tmp_path / theirs).parent.mkdir(exist_ok=True)
    (tmp_path / theirs).write_text(
        "import importlib, pathlib\nopen('HIT', 'w')\n__path__ = [pathlib.Path(__file__).with_name('package')]\n"
        "def __getattr__(name):\n    return importlib.import_module('package.' + name)\n"
    )
    if theirs.startswith("elsewhere/"):  # from where a link leads to it
        (tmp_path / (link := theirs.removeprefix("elsewhere/"))).symlink_to(theirs)
        theirs = link
    done = begun(tmp_path, *words, **more)
    assert done.returncode == 1
    assert "have the same name; allowed is one of them, so rename the other" in done.stderr
    assert f"{tmp_path}/{theirs.removesuffix('/__init__.py')}" in done.stderr
    assert not (tmp_path / "HIT").exists()


@provocation(
    "a folder `ctypes/` in the working directory, when torch or vLLM start Python there with a question (`python -c`, "
    "`python -m`)",
    "it is not run; what a file of the user's starts is started as it says",
)
def test_what_libraries_ask_of_python_is_not_asked_here(tmp_path):
    mark = tmp_path / "HIT"
    for name in ("ctypes", "json"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(f"open({str(mark)!r}, 'a').write({name!r} + ' ')\n")
    starts = "subprocess.run([sys.executable, '-c', 'import json'])\n"
    (tmp_path / "mine.py").write_text(f"import subprocess, sys\ndef ask():\n    {starts}")
    (tmp_path / "library.py").write_text("")
    code = (
        "import subprocess, sys; from pathlib import Path; from grpo_lightning import start\n"
        "from grpo_lightning.distributed import fresh\n"
        f"start.START = Path({str(tmp_path)!r})\nstart.make_importable('mine')\nfresh.protect_processes()\n"
        f"{starts}from torch._inductor.cpu_vec_isa import supported_vec_isa_list\nprint(any(supported_vec_isa_list))\n"
        f"print(Path({str(mark)!r}).exists(), flush=True)\nimport mine\nmine.ask()\n"
    )
    more = {"PYTHONPATH": str(ROOT), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], cwd=tmp_path, env=os.environ | more, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[-1] == "False", mark.read_text()
    assert done.stdout.split()[-2] == "True"
    assert mark.read_text() == "json "


@provocation(
    "a folder `ctypes/` in the working directory of a program of the user's own that lies elsewhere, or is started "
    "with `python -P`, when torch starts Python with a question",
    "it is not run; what the program itself starts is started as it says",
)
@pytest.mark.parametrize("option", [(), ("-P",)], ids=["", "-P"])
def test_what_libraries_ask_of_python_is_not_asked_of_the_folder_of_a_program(option, tmp_path):
    here, mark = tmp_path / "here", tmp_path / "HIT"
    for name in ("ctypes", "json"):
        (here / name).mkdir(parents=True)
        (here / name / "__init__.py").write_text(f"open({str(mark)!r}, 'a').write({name!r} + ' ')\n")
    code = (
        "import subprocess, sys\nfrom pathlib import Path\nimport grpo_lightning as grpo\n"
        "grpo.compose('steps=1')\nfrom torch._inductor.cpu_vec_isa import supported_vec_isa_list\n"
        f"assert any(supported_vec_isa_list)\nassert not Path({str(mark)!r}).exists()\n"
        "subprocess.run([sys.executable, '-c', 'import json'])\n"
    )
    (tmp_path / "program.py").write_text(code)
    more = {"PYTHONPATH": str(ROOT), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
    command = [sys.executable, *option, str(tmp_path / "program.py")]
    done = subprocess.run(command, cwd=here, env=os.environ | more, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert mark.read_text() == "json "


@pytest.fixture
def nothing_named(monkeypatch):
    """Whatever other tests have named in this process, such as ``tests``, whose code would be the user's."""
    monkeypatch.setattr(place_of_start._finder, "named", set())
    monkeypatch.setattr(place_of_start._finder, "found", set())


def test_python_that_libraries_start_gets_the_variables_that_it_is_given(tmp_path, monkeypatch, nothing_named):
    fresh.protect_processes()
    monkeypatch.setattr(place_of_start, "START", tmp_path)
    monkeypatch.setattr(sys, "path", [place for place in sys.path if Path(place).resolve() != ROOT])
    monkeypatch.setenv("MINE", "1")
    monkeypatch.setenv("PYTHONPATH", "/there")
    code = "import json, os; print(json.dumps([os.environ.get('MINE'), os.environ.get('PYTHONPATH')]))"
    alone = str(ROOT / "grpo_lightning" / "distributed" / "alone")
    for env, mine, path in (
        (None, "1", f"{alone}:/there"),
        ({}, None, alone),
        ({"MINE": "2", "PYTHONPATH": "/x"}, "2", f"{alone}:/x"),
    ):
        told = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True).stdout
        assert json.loads(told) == [mine, path]
    for place, path in (("site-packages", alone), ("mine", None)):
        (tmp_path / place).mkdir()
        (tmp_path / place / "code.py").write_text(code)
        command = [sys.executable, tmp_path / place / "code.py"]
        assert json.loads(subprocess.run(command, env={}, capture_output=True).stdout) == [None, path]


@provocation(
    "`x86_64/libdl.so.2` in the working directory, once opencv has set `LD_LIBRARY_PATH=…:`, whose empty element means "
    "that directory",
    "programs that are started do not look there",
)
def test_shared_libraries_do_not_come_from_here(monkeypatch):
    fresh.protect_processes()
    for value, expected in (("/a:", "/a"), (":/a::/b;", "/a:/b"), (":", ""), ("/a:/b", "/a:/b"), ("", "")):
        asked = ["sh", "-c", "echo $LD_LIBRARY_PATH"]
        monkeypatch.setenv("LD_LIBRARY_PATH", "/c")
        done = subprocess.run(asked, env=os.environ | {"LD_LIBRARY_PATH": value}, capture_output=True, text=True)
        assert (done.stdout, os.environ["LD_LIBRARY_PATH"]) == (f"{expected}\n", "/c")
        monkeypatch.setenv("LD_LIBRARY_PATH", value)
        assert subprocess.run(asked, capture_output=True, text=True).stdout == f"{expected}\n"
    monkeypatch.delenv("LD_LIBRARY_PATH")
    subprocess.run(["true"])
    assert "LD_LIBRARY_PATH" not in os.environ


@provocation(
    "`PATH=$PATH:`, whose empty element means the working directory, in which a data set has a program that libraries "
    "ask for and few have (`neuron-monitor`, by W&B)",
    "it is not found",
)
@pytest.mark.parametrize("named", ["{}:", ":{}", "{}::"])
def test_programs_do_not_come_from_here(named, tmp_path, monkeypatch):
    (tmp_path / "neuron-monitor").write_text("#!/bin/sh\ntouch HIT\n")
    (tmp_path / "neuron-monitor").chmod(0o755)
    before = os.environ["PATH"]
    slip = named.format(before)
    slips = f"import os, shutil; os.environ['PATH'] = {slip!r}"  # not given by this process, which drops it
    ask = "print(shutil.which('neuron-monitor'), os.environ['PATH']); os.system('neuron-monitor')"
    begin = "from grpo_lightning.distributed.alone.grpo_lightning_path import leave_here as l; l()"
    for code, is_found in ((f"{slips}; {ask}", True), (f"{slips}; {begin}; {ask}", False)):
        command = [sys.executable, "-c", code]
        done = subprocess.run(command, env={"PYTHONPATH": str(ROOT)}, cwd=tmp_path, capture_output=True)
        assert (done.stdout.decode() == f"None {before}\n") is not is_found
        assert (tmp_path / "HIT").exists() is is_found
        (tmp_path / "HIT").unlink(missing_ok=True)
    fresh.protect_processes()
    monkeypatch.chdir(tmp_path)
    asked = ["sh", "-c", "neuron-monitor; echo $PATH"]
    assert subprocess.run(asked, env={"PATH": slip}, capture_output=True, text=True).stdout == f"{before}\n"
    monkeypatch.setenv("PATH", slip)
    assert subprocess.run(asked, capture_output=True, text=True).stdout == f"{before}\n"
    assert not (tmp_path / "HIT").exists()


@provocation(
    "a `libgcc_s.so.1` in the working directory, which a linker finds there when Triton has kernels compiled",
    "compilers are run elsewhere, where they are given no relative paths",
)
def test_compilers_do_not_look_here(tmp_path, monkeypatch, nothing_named):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    (tmp_path / "gcc").write_text(f"#!/bin/sh\npwd > {tmp_path}/where\n")
    (tmp_path / "gcc").chmod(0o755)
    fresh.protect_processes()
    library = ["/a.c", "-O3", "-shared", "-o", "/b.so", "-lcuda", "-L/c", "-I/d", "-I"]
    for started, words, moved in ((None, library, False), (tmp_path, library, True), (tmp_path, ["a.c"], False)):
        monkeypatch.setattr(place_of_start, "START", started)
        subprocess.check_call([tmp_path / "gcc", *words])
        assert (tmp_path / "where").read_text() == f"{sys.prefix if moved else tmp_path / 'here'}\n"
    subprocess.check_call([tmp_path / "gcc", *library], cwd=tmp_path)
    assert (tmp_path / "where").read_text() == f"{tmp_path}\n"


@pytest.mark.parametrize(
    ("command", "is_one"),
    [
        (["gcc", "-c", "/a.c"], True),
        ([b"/usr/bin/x86_64-linux-gnu-g++-13", b"/a.c"], True),
        (["/opt/cuda/bin/nvcc", "--version"], True),
        (["ld", "-t", "-o", "/dev/null", "-lc"], True),
        (["gcc", "a.c"], False),
        (["gcc", "/a.c", "-o", "b.so"], False),
        (["gcc", "/a.c", "-ob.so"], False),
        (["gcc", "/a.c", "-Iinclude"], False),
        (["gcc", "/a.c", "-L."], False),
        (["bin/gcc", "/a.c"], False),
        (["git", "status"], False),
        (["ninja"], False),
        ("gcc /a.c", False),
        ([], False),
    ],
)
def test_a_compiler_without_relative_paths_can_be_run_anywhere(command, is_one):
    assert fresh.is_compiler(command) is is_one


@provocation(
    "folders `triton/`, `signal/` in the working directory, and `PYTHONPATH=:/tools`, whose empty element means that "
    "directory",
    "they are not found; `PYTHONPATH=.` says so",
)
@pytest.mark.parametrize(("named", "is_found"), [(f":{ROOT}", False), (f"{ROOT}::", False), (f"{ROOT}:.", True)])
def test_an_empty_element_of_pythonpath_names_no_directory(named, is_found, tmp_path):
    for name in ("triton", *PYTHONS, "contextlib", "functools", "re", "importlib", "types", "warnings"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("open('HIT', 'a').close()\n")
    done = start(tmp_path, *TINY, "reward=[format]", PYTHONPATH=named)
    assert (tmp_path / "HIT").exists() is is_found
    assert is_found or done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("command", "is_changed"),
    [
        (["/usr/bin/python3.11", "-c", "x", "a.py"], True),
        (["python", "-m", "x"], True),
        (("python3", "-Im", "x"), True),
        (["python", "-X", "utf8", "-W", "error", "-uc", "x"], True),
        (["python"], True),
        (["python3.13t", "-c", "x"], True),
        ([sys.executable, "-c", "x"], True),
        (["python", "-u", "-"], True),
        (["/bin/python", b"-mx"], True),
        (["python", "a.py", "-c", "x"], False),
        (["python", "-X", "c", "-Wm", "--check-hash-based-pycs", "always", "a.py", "-m"], False),
        (["python-config", "-c"], False),
        ([b"gcc", "-c", "x"], False),
        ("python -c x", False),
        ([], False),
    ],
)
def test_python_on_a_file_finds_what_lies_beside_it(command, is_changed):
    expected = [command[0], "-P", *command[1:]] if is_changed else command
    assert fresh.without_here(command) == expected


def test_a_library_that_settings_may_name_is_no_file_of_the_directory(tmp_path, monkeypatch):
    mark = marked(tmp_path, "bitsandbytes", "transformers")
    code = (
        f"import sys; sys.path.insert(0, {str(ROOT)!r})\nfrom pathlib import Path\n"
        "from grpo_lightning import start\nfrom grpo_lightning.settings import trust\n"
        f"start.START = Path({str(tmp_path)!r})\n"
        "sys.path[:] = [place for place in sys.path if 'site-packages' not in place]\n"
        "for name in ('bitsandbytes.optim.AdamW8bit', 'transformers.Adafactor'):\n"
        "    try:\n        trust.resolved(name)\n    except ImportError:\n        print('absent')\n"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout == "absent\nabsent\n", done.stderr
    assert not mark.exists()


def test_variables_for_launchers_are_taken_back(monkeypatch):
    for before in ({}, {"PYTHONPATH": "/a:/b"}, {"PYTHONSAFEPATH": "1", "PYTHONPATH": "/a"}, {"PYTHONSAFEPATH": ""}):
        for name in ("PYTHONPATH", "PYTHONSAFEPATH"):
            monkeypatch.delenv(name, raising=False)
        for name, value in before.items():
            monkeypatch.setenv(name, value)
        fresh.protect_jobs()
        fresh.protect_jobs()
        assert os.environ["PYTHONSAFEPATH"]
        known = [f"{ROOT}/grpo_lightning/distributed/alone", *filter(None, [before.get("PYTHONPATH")])]
        assert os.environ["PYTHONPATH"] == ":".join(known)
        fresh.forget()
        fresh.forget()
        after = {name: os.environ.get(name, "") for name in ("PYTHONPATH", "PYTHONSAFEPATH")}
        assert after == {"PYTHONPATH": "", "PYTHONSAFEPATH": ""} | before


def test_a_command_is_told_where_to_look(monkeypatch):
    alone = f"sys.path.insert(0, '{ROOT}/grpo_lightning/distributed/alone'); import grpo_lightning_alone; "
    monkeypatch.setattr(sys, "path", ["/a"])
    loads = "grpo_lightning_alone.load('tests'); "  # which this process was started in
    monkeypatch.delitem(sys.modules, "benchmarks", raising=False)
    assert fresh.safe(["python", "-c", "x()"])[-1] == f"import sys; sys.path[:] = ['/a']; {alone}{loads}x()"
    monkeypatch.setattr(sys, "path", ["/a", "/b'", str(ROOT)])
    assert fresh.safe(["python", "-O", "-c", "x()", "--more"]) == [
        *("python", "-O", "-P", "-c"),
        f"import sys; sys.path[:] = ['/a', \"/b'\", {str(ROOT)!r}]; x()",
        "--more",
    ]
    assert fresh.safe(["python", "-m", "x"]) == ["python", "-m", "x"]
