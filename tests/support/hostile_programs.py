"""Programs that try to get out of the sandbox, or to take all there is.

Each attack prints ESCAPED with what it did if it could; what it did is looked at from outside as well. None would hurt
the machine of a sandbox that failed: signals to many are signal 0, and what is changed is a test's own.
"""

HEADER = '''
import os, sys, time, socket, threading, ctypes, errno
SECRET, VICTIM, TCP = {targets!r}
def escaped(what, *more):
    print("ESCAPED", what, *more, flush=True)
def call(number, *given):
    """A system call past everything that Python knows: x86_64's number."""
    if os.uname().machine != "x86_64": raise OSError("other numbers")
    libc = ctypes.CDLL(None, use_errno=True)
    found = libc.syscall(ctypes.c_long(number), *(ctypes.c_long(v) if isinstance(v, int) else v for v in given))
    if found < 0: raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return found
'''

ATTACKS = {
    # files
    "reads a file": "escaped('read', open(SECRET).read())",
    "lists directories": "escaped('listed', os.listdir('/etc'), os.listdir('/'), os.listdir('/proc'))",
    "truncates with neither": "os.open(SECRET, 3 | os.O_TRUNC); escaped('truncated')",
    "removes a file": "os.unlink(SECRET); escaped('removed')",
    "makes a symlink": "os.symlink(SECRET, 'link'); escaped('linked', open('link').read())",
    "mounts": "call(165, b'none', os.path.dirname(SECRET).encode(), b'tmpfs', 0, 0); escaped('mounted')",
    # processes
    "reads its parent's environment": "escaped('read', open(f'/proc/{os.getppid()}/environ').read())",
    "ends its victim": "os.kill(VICTIM, 9); escaped('killed')",
    "has a signal sent": """
import fcntl, signal
r, w = os.pipe()
fcntl.fcntl(r, fcntl.F_SETOWN, VICTIM); fcntl.fcntl(r, 10, 9)
fcntl.fcntl(r, fcntl.F_SETFL, os.O_ASYNC); os.write(w, b'x'); escaped('sent')""",
    "forks": "os.fork() or time.sleep(60); escaped('forked')",
    "forks by clone3": "call(435, (ctypes.c_ulong * 8)(0, 0, 0, 0, 17), 64); escaped('forked')",
    "becomes a program": "os.execv('/bin/cat', ['cat', SECRET]); escaped('ran')",
    # network and kernel
    "connects": "socket.create_connection(('127.0.0.1', TCP), 1).send(b'x'); escaped('connected')",
    "uses a ring": "call(425, 8, bytes(256)); escaped('has a ring')",
    "uses the old interface": "call(0x40000000 + 57); escaped('forked')",
    # what it can find in its own process
    "reads the environment": "assert not os.environ, escaped(os.environ)",
    "finds open files": """
for number in range(3, 2000):
    try:
        os.fstat(number); escaped('file', number)
    except OSError:
        pass""",
    "finds the expected output": """
import gc
frame, found = sys._getframe(), []
while frame:
    found.append(repr(frame.f_locals)); frame = frame.f_back
found += [repr(o)[:200] for o in gc.get_objects() if isinstance(o, (dict, list, tuple))]
wanted = bytes(map(ord, reversed('DETCEPXE'))).decode()
if any(wanted in one for one in found): escaped('found')""",
    "finds other packages": """
import torch, numpy
escaped('imported')""",
}
"""What an attack does -> its text."""

GREEDY = {
    "computes for ever": "while True: pass",
    "computes and hears no signals": """
import signal
signal.signal(signal.SIGXCPU, signal.SIG_IGN); signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 64))
while True: pass""",
    "stops itself": "import signal; os.kill(os.getpid(), signal.SIGSTOP)",
    "reads what never comes": "r, w = os.pipe(); os.read(r, 1)",
    "takes 10 GB": "x = bytearray(10 * 2**30); escaped('has memory')",
    "prints on both": "while True: os.write(1, b'x' * 10**5); os.write(2, b'x' * 10**5)",
    "fills a file": "f = open('x', 'wb')\nwhile True: f.write(bytes(2**20))",
    "has threads": """
threading.stack_size(2**15)
while True:
    try: threading.Thread(target=time.sleep, args=(60,)).start()
    except RuntimeError: time.sleep(.01)""",
    "crashes": "ctypes.string_at(0)",
    "replaces the exit": "os._exit = lambda code: None; sys.exit = os._exit; raise SystemExit(0)",
}
"""What a program takes or breaks -> its text."""


SILENT = ("uses the old interface", "reads the environment", "finds open files", "finds the expected output")
"""Attacks that end without an exception, or are killed."""


def escapes(targets):
    """Name -> text of each attack."""
    header = HEADER.replace("{targets!r}", repr(targets))
    return {name: f"{header}\n{text}" for name, text in ATTACKS.items()}


def greedy(targets):
    """Name -> text of each program that takes all there is."""
    header = HEADER.replace("{targets!r}", repr(targets))
    return {name: f"{header}\n{text}" for name, text in GREEDY.items()}
