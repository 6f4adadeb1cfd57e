"""Programs as a model in training writes them when it means well, with what they print."""

SORT = "print(*sorted(map(int, input().split())))"
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
import asyncio, bisect, csv, dataclasses, datetime, decimal, enum, fractions, hashlib, io, itertools, json, math
import random, sqlite3, statistics, string, subprocess, typing, unicodedata, uuid, zlib, concurrent.futures
@dataclasses.dataclass
class Point:
    x: int
    y: int = 2
async def later(value):
    await asyncio.sleep(0.001)
    return value * 2
async def main():
    return await asyncio.gather(later(1), later(2))
print(Point(1), fractions.Fraction(1, 3) + 1, decimal.Decimal("0.1") * 3, math.comb(5, 2))
print(hashlib.sha256(b"a").hexdigest()[:8], zlib.crc32(b"a"), asyncio.run(main()))
print(sqlite3.connect(":memory:").execute("select 1 + 1").fetchone(), statistics.median([3, 1, 2]))
with concurrent.futures.ThreadPoolExecutor(4) as pool:
    print(list(pool.map(str.upper, "abc")), list(csv.reader(io.StringIO("a,b"))))
print(datetime.date(2024, 2, 28) + datetime.timedelta(2), unicodedata.name("é"), random.randint(1, 6) < 7)
"""
LIBRARY_PRINTS = """Point(x=1, y=2) 4/3 0.3 10
ca978112 3904355907 [2, 4]
(2,) 2
['A', 'B', 'C'] [['a', 'b']]
2024-03-01 LATIN SMALL LETTER E WITH ACUTE True
"""

PROGRAMS = [
    (SORT, "4 3 11 1\n", "1 3 4 11\n"),
    *[(RECURSION, str(n), f"{n}\n") for n in (1, 20_000)],
    *[(FILES, text, f"{text[::-1]} ['notes.txt']\nabc []\n") for text in ("abc", "äöü", "x" * 50_000)],
    (LIBRARY, "", LIBRARY_PRINTS),
    ("import sys\nprint('done')\nsys.exit(0)", "", "done\n"),
    ("import sys\nfor line in sys.stdin:\n    print(line.strip()[::-1])", "abc\ndef\n", "cba\nfed\n"),
    ("import sys\nsys.stdout.write(sys.stdin.buffer.read().decode().upper())", "straße", "STRASSE"),
    ("import sys\nprint(sum(map(int, sys.stdin.read().split())))", "1 " * 200_000, "200000\n"),
    ("print('x' * 500_000)", "", "x" * 500_000 + "\n"),
    ("try:\n    1 / 0\nexcept ZeroDivisionError as error:\n    print(error)", "", "division by zero\n"),
    ("try:\n    input()\nexcept EOFError:\n    print('nothing')", "", "nothing\n"),
    ("print(__name__, len(bytearray(100 * 2**20)))", "", "__main__ 104857600\n"),  # 100 MiB
    ("import atexit\natexit.register(print, 'end')\nprint('begin')", "", "begin\nend\n"),
    ("import pathlib\npathlib.Path('a').write_text('7')\nprint(pathlib.Path('a').read_text())", "", "7\n"),
    ("import signal\nsignal.alarm(0)\nprint(signal.getsignal(signal.SIGTERM) is signal.SIG_DFL)", "", "True\n"),
    ("import time\nbegan = time.time()\ntime.sleep(0.01)\nprint(time.time() > began)", "", "True\n"),
]
"""Text, stdin, stdout."""
