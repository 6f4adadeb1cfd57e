"""Programs that try to leave the sandbox, take all there is or mean well"""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from grpo_lightning.sandbox import client
from grpo_lightning.sandbox.client import Limits, Outcome, SandboxUnavailable, check, run
from tests.support.composed import ROOT
from tests.support.hostile_programs import SILENT, escapes, greedy

SMALL = Limits(seconds=1.5, cpu_seconds=1, memory_mb=256)
LIMITS = Limits(seconds=20.0, cpu_seconds=10, memory_mb=512)
TOKEN = "a-secret-of-the-test"


class World:
    """What programs attack, and whether it is as it was."""

    def __init__(self, place: Path):
        self.place = place
        self.secret = place / "secret.txt"
        self.secret.write_text(TOKEN)
        self.secret.chmod(0o666)
        self.victim = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"])
        self.listening = socket.socket()
        self.listening.bind(("127.0.0.1", 0))
        self.listening.listen()
        self.listening.setblocking(False)
        self.targets = (str(self.secret), self.victim.pid, self.listening.getsockname()[1])
        self.before = self._files()

    def _files(self):
        found = self.secret.stat()
        return self.secret.read_text(), found.st_mode, found.st_mtime_ns, sorted(os.listdir(self.place))

    def is_as_it_was(self):
        assert self._files() == self.before
        assert self.victim.poll() is None
        with pytest.raises(BlockingIOError):
            self.listening.accept()
        if client._server is not None:
            assert below(client._server.process.pid) == []

    def end(self):
        self.victim.kill()
        self.victim.wait()
        self.listening.close()


def below(process):
    """The processes that a process has started and that have not ended."""
    return Path(f"/proc/{process}/task/{process}/children").read_text().split()


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    world = World(tmp_path_factory.mktemp("world"))
    os.environ["SANDBOX_TEST"] = TOKEN
    expected = "EXPECTED of a test"  # what a program must not find, in a frame of the caller
    yield world
    del os.environ["SANDBOX_TEST"]
    world.end()
    assert expected


def test_a_program_that_raises_says_where():
    outcome = run("def f():\n    return 1 / 0\nprint('so far')\nf()\n", "", LIMITS)
    assert (outcome.stdout, outcome.ended, outcome.code, outcome.is_well) == ("so far\n", "exit", 1, False)
    assert outcome.stderr.startswith('Traceback (most recent call last):\n  File "program.py", line 4, in <module>\n')
    assert "    return 1 / 0\n" in outcome.stderr
    assert outcome.stderr.endswith("ZeroDivisionError: division by zero\n")
    assert "grpo_lightning" not in outcome.stderr


def test_the_same_program_prints_the_same():
    text = "import random; print(random.random(), hash('a'), {*'abcdefgh'})"
    first = run(text, "", LIMITS).stdout
    client.close()
    assert run(text, "", LIMITS).stdout == first != ""


def test_output_ends_at_its_limit():
    limits = Limits(seconds=20.0, cpu_seconds=10, memory_mb=256, output_bytes=1000)
    assert run("print('x' * 999)", "", limits) == Outcome("x" * 999 + "\n", "", "exit", 0)
    longer = run("import sys\nprint('x' * 1000, flush=True)\nwhile True: pass", "", limits)
    assert (longer.stdout, longer.ended) == ("x" * 1000, "output")
    ended = run("print('x' * 1000)", "", limits)
    assert (ended.stdout, ended.ended, ended.is_well) == ("x" * 1000, "output", False)


@pytest.mark.slow
def test_a_program_is_ended_at_its_limits():
    for text, ended, least, most in (
        ("import time; time.sleep(60)", "time", 1.5, 4.0),
        ("while True: pass", "time", 0.9, 4.0),
        (
            "import threading, time\nthreading.stack_size(2**16)\n"
            "for _ in range(99): threading.Thread(target=time.sleep, args=(9,)).start()",
            *("threads", 0, 3),
        ),
        ("for n in range(99): open(str(n), 'w').close()\nwhile True: pass", "files", 0, 3),
        ("for n in range(9):\n  with open(str(n), 'w') as f: f.write('x' * 2**22)\nwhile True: pass", "files", 0, 3),
    ):
        began = time.monotonic()
        outcome = run(text, "", SMALL)
        assert (outcome.ended, outcome.is_well) == (ended, False)
        assert least < time.monotonic() - began < most


def test_a_program_meets_its_limits_as_exceptions():
    for text, error in (
        ("x = bytearray(10 * 2**30)", "MemoryError"),
        ("open('x', 'wb').write(bytes(17 * 2**20))", "OSError: [Errno 27] File too large"),
        ("x = [open(__import__('os').devnull) for _ in range(99)]", "OSError: [Errno 24] Too many open files"),
        ("import torch", "ModuleNotFoundError: No module named 'torch'"),
        ("import grpo_lightning", "ModuleNotFoundError: No module named 'grpo_lightning'"),
    ):
        outcome = run(text, "", SMALL)
        assert (outcome.ended, outcome.code) == ("exit", 1)
        assert error in outcome.stderr


def attacked(world, name, text):
    """Run a program, which ends in time, has nothing and changes nothing."""
    began = time.monotonic()
    outcome = run(text, "x\n", SMALL)
    assert not any(word in outcome.stdout + outcome.stderr for word in ("ESCAPED", TOKEN)), name
    assert len(outcome.stdout) <= 2**20, name
    assert time.monotonic() - began < 8.0, name
    world.is_as_it_was()
    return outcome


def test_attacks_fail_because_they_are_refused(world):
    """An attack that fails of a mistake of its own would prove nothing."""
    refused = ("Permission denied", "Operation not permitted", "Function not implemented", "No module named 'torch'")
    for name, text in escapes(world.targets).items():
        outcome = attacked(world, name, text)
        if name in SILENT:
            assert (outcome.stdout, outcome.ended in ("exit", "crash")) == ("", True), name
        else:
            error = (outcome.stderr.splitlines() or [""])[-1]
            assert any(word in error for word in refused), (name, error)


@pytest.mark.slow
def test_no_greedy_program_hangs_and_none_leaves_anything(world, monkeypatch, tmp_path):
    client.close()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # where the sandbox has its directory
    for name, text in greedy(world.targets).items():
        attacked(world, name, text)
    assert run("print(1)", "", SMALL) == Outcome("1\n", "", "exit", 0)
    assert [list(path.iterdir()) for path in tmp_path.iterdir()] == [[]]
    client.close()
    assert list(tmp_path.iterdir()) == []


# --- honest programs

RECURSION = """
import sys, threading
sys.setrecursionlimit(10**6)
threading.stack_size(64 * 2**20)
def depth(n):
    return 0 if n == 0 else 1 + depth(n - 1)
def main():
    print(depth(int(input())))
thread = threading.Thread(target=main)
thread.start()
thread.join()
"""
FILES = """
import os, tempfile
with open("notes.txt", "w") as file:
    file.write(input())
with open("notes.txt") as file:
    print(file.read()[::-1], os.listdir("."))
os.rename("notes.txt", "old.txt")
os.remove("old.txt")
with tempfile.TemporaryFile(dir=".") as file:
    file.write(b"abc")
    file.seek(0)
    print(file.read().decode(), os.listdir("."))
"""
LIBRARY = """
import asyncio, concurrent.futures, csv, dataclasses, decimal, fractions, hashlib, io, sqlite3, subprocess, unicodedata
@dataclasses.dataclass
class Point:
    x: int
    y: int = 2
async def later(value):
    await asyncio.sleep(0.001)
    return value * 2
print(Point(1), fractions.Fraction(1, 3) + 1, decimal.Decimal("0.1") * 3, hashlib.sha256(b"a").hexdigest()[:8])
print(sqlite3.connect(":memory:").execute("select 1 + 1").fetchone(), asyncio.run(later(2)), unicodedata.name("é"))
with concurrent.futures.ThreadPoolExecutor(4) as pool:
    print(list(pool.map(str.upper, "abc")), list(csv.reader(io.StringIO("a,b"))))
"""
LIBRARY_PRINTS = """Point(x=1, y=2) 4/3 0.3 ca978112
(2,) 4 LATIN SMALL LETTER E WITH ACUTE
['A', 'B', 'C'] [['a', 'b']]
"""

PROGRAMS = [
    (RECURSION, "20000", "20000\n"),
    (FILES, "äöü", "üöä ['notes.txt']\nabc []\n"),
    (LIBRARY, "", LIBRARY_PRINTS),
    ("import sys\nsys.stdout.write(sys.stdin.buffer.read().decode().upper())", "straße", "STRASSE"),
    ("import sys\nprint(sum(map(int, sys.stdin.read().split())))", "1 " * 200_000, "200000\n"),
    ("try:\n    input()\nexcept EOFError:\n    print('nothing')", "", "nothing\n"),
    ("print(__name__, len(bytearray(100 * 2**20)))", "", "__main__ 104857600\n"),  # 100 MiB
    ("import atexit\natexit.register(print, 'end')\nprint('begin')", "", "begin\nend\n"),
]
"""Text, stdin, stdout."""


def test_limits_that_make_no_sense_are_refused():
    for limits in ({"cpu_seconds": 0}, {"seconds": -1.0}, {"memory_mb": 0.5}, {"seconds": float("nan")}):
        with pytest.raises(ValueError, match=f"{next(iter(limits))}=.*: must be a .*number above 0"):
            Limits(**({"seconds": 1.0, "cpu_seconds": 1, "memory_mb": 99} | limits))


def test_honest_programs_run():
    for text, stdin, stdout in PROGRAMS:
        assert run(text, stdin, LIMITS) == Outcome(stdout, "", "exit", 0)


def test_the_server_hears_no_signals_of_the_trainer():
    run("", "", LIMITS)
    server = client._server.process.pid
    assert os.getsid(server) == server != os.getsid(0)  # so that a terminal's are not sent to it
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        os.kill(server, number)
    assert run("print(1)", "", LIMITS).stdout == "1\n"
    assert client._server.process.pid == server


@pytest.mark.slow
def test_a_program_ends_with_the_trainer(tmp_path):
    script = (
        "from grpo_lightning.sandbox import client; from grpo_lightning.sandbox.client import Limits\n"
        "run = lambda text: client.run(text, '', Limits(seconds=99.0, cpu_seconds=99, memory_mb=99))\n"
        "run(''), print(client._server.process.pid, flush=True), run('while True: pass')\n"
    )
    own = os.environ | {"TMPDIR": str(tmp_path)}
    trainer = subprocess.Popen([sys.executable, "-c", script], cwd=ROOT, env=own, stdout=subprocess.PIPE, text=True)
    server = int(trainer.stdout.readline())
    while not below(server):
        time.sleep(0.01)
    program = int(below(server)[0])
    rights = Path(f"/proc/{program}/status")
    while "Seccomp:\t2" not in (text := rights.read_text()):  # the last right to be given up
        time.sleep(0.01)
    assert "CapPrm:\t0000000000000000\nCapEff:\t0000000000000000\n" in text
    assert "NoNewPrivs:\t1\n" in text
    trainer.kill()
    trainer.wait()
    trainer.stdout.close()
    late = time.monotonic() + 10
    while (Path(f"/proc/{server}").exists() or Path(f"/proc/{program}").exists()) and time.monotonic() < late:
        time.sleep(0.02)
    assert not Path(f"/proc/{server}").exists()
    assert not Path(f"/proc/{program}").exists()
    assert list(tmp_path.iterdir()) == []


def test_a_forked_process_has_a_server_of_its_own():
    run("", "", LIMITS)
    own = os.fork()
    if own == 0:
        os._exit(7 if run("print(3)", "", LIMITS).stdout == "3\n" and client.close() is None else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(own, 0)[1]) == 7
    assert run("print(4)", "", LIMITS).stdout == "4\n"


def test_what_a_program_in_it_could_is_named(monkeypatch):
    client.close()
    monkeypatch.setattr(client, "_ATTEMPTS", "import OUTSIDE".replace("OUTSIDE", "os\nprint('fork', sep=', ')#"))
    with pytest.raises(SandboxUnavailable, match="does not hold on this machine; a program in it did: fork"):
        check()
    with pytest.raises(SandboxUnavailable, match="does not hold on this machine"):
        run("import os; os.write(1, b'ran')", "", LIMITS)
    monkeypatch.undo()
    assert run("print(7)", "", LIMITS).stdout == "7\n"


BROKEN = """
import sys
sys.path.append(sys.argv[2])
from grpo_lightning.sandbox import isolation, server
{}
server.main(int(sys.argv[1]), sys.argv[3])
"""


def test_nothing_runs_without_all_of_it(monkeypatch):
    for change, message in (
        ("isolation._CREATE_RULESET = 5000", r"it needs Landlock of Linux 5\.13"),
        ("isolation._PR_SET_SECCOMP = 5000", "it needs seccomp filters, CONFIG_SECCOMP_FILTER of the ker"),
        ("isolation.platform.machine = lambda: 'riscv64'", r"it needs x86_64 or aarch64 \(this is riscv64"),
        ("isolation._RESTRICT_SELF = 5000", "cannot start: OSError"),
        ("raise SystemExit(3)", "server died"),
    ):
        client.close()
        monkeypatch.setattr(client, "_START", BROKEN.format(change))
        with pytest.raises(SandboxUnavailable, match=message):
            run("import os; os.write(1, b'ran')", "", LIMITS)
        client.close()
