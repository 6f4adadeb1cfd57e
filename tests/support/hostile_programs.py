"""Programs that try to get out of the sandbox, or to take all there is.

Each attack prints ESCAPED with what it did if it could; what it did is looked at from outside as well. None would hurt
the machine of a sandbox that failed: signals to many are signal 0, and what is changed is a test's own.
"""

HEADER = '''
import os, sys, time, socket, threading, ctypes, errno
SECRET, VICTIM, PARENT, TCP, UDP, UNIX, DATAGRAM, ABSTRACT, SHARED, PACKAGE = {targets!r}
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

WAYS = {
    "plain": "attack()",
    "in a thread": "t = threading.Thread(target=attack)\nt.start()\nt.join()",
}

ATTACKS = {
    # files
    "reads a file": "escaped('read', open(SECRET).read())",
    "reads through O_PATH": """
d = os.open(os.path.dirname(SECRET), os.O_PATH)
escaped('read', os.read(os.open(os.path.basename(SECRET), os.O_RDONLY, dir_fd=d), 99))""",
    "lists directories": "escaped('listed', os.listdir('/etc'), os.listdir('/'), os.listdir('/proc'))",
    "reads devices": """
for name in ('full', 'mem', 'kmsg', 'tty', 'sda', 'vda', 'loop0', 'nvme0n1', 'kvm', 'fuse'):
    try:
        open('/dev/' + name, 'rb'); escaped('opened', name)
    except FileNotFoundError:
        pass
    except PermissionError as error:
        refused = error
raise refused""",
    "truncates with neither": "os.open(SECRET, 3 | os.O_TRUNC); escaped('truncated')",
    "removes a file": "os.unlink(SECRET); escaped('removed')",
    "takes a file": "os.rename(SECRET, 'mine'); escaped('renamed')",
    "writes above": "open('../escaped', 'w').write('x'); escaped('wrote')",
    "makes a symlink": "os.symlink(SECRET, 'link'); escaped('linked', open('link').read())",
    "makes a hard link": "os.link(SECRET, 'link'); escaped('linked', open('link').read())",
    "makes a device": "os.mknod('disk', 0o60600, os.makedev(8, 0)); escaped('made')",
    "changes modes": "os.chmod(SECRET, 0o777); escaped('changed')",
    "mounts": "call(165, b'none', os.path.dirname(SECRET).encode(), b'tmpfs', 0, 0); escaped('mounted')",
    "opens in another way": "call(437, -100, SECRET.encode(), (ctypes.c_long * 3)(), 24); escaped('opened')",
    # processes
    "reads its parent's environment": "escaped('read', open(f'/proc/{os.getppid()}/environ').read())",
    "reads another's memory": "escaped('read', open(f'/proc/{os.getppid()}/mem', 'rb'))",
    "ends its victim": "os.kill(VICTIM, 9); escaped('killed')",
    "ends all": "os.kill(-1, 0); escaped('may signal')",
    "has a signal sent": """
import fcntl, signal
r, w = os.pipe()
fcntl.fcntl(r, fcntl.F_SETOWN, VICTIM); fcntl.fcntl(r, 10, 9)
fcntl.fcntl(r, fcntl.F_SETFL, os.O_ASYNC); os.write(w, b'x'); escaped('sent')""",
    "forks": "os.fork() or time.sleep(60); escaped('forked')",
    "forks by clone": "call(56, 17, 0, 0, 0, 0); escaped('forked')",
    "forks by clone3": "call(435, (ctypes.c_ulong * 8)(0, 0, 0, 0, 17), 64); escaped('forked')",
    "becomes a program": "os.execv('/bin/cat', ['cat', SECRET]); escaped('ran')",
    "runs out of memory files": "f = os.memfd_create('x'); escaped('made'); os.execve(f, ['x'], {})",
    "uses posix_spawn": "os.posix_spawn('/bin/id', ['id'], {}); escaped('ran')",
    "traces": "call(101, 16, os.getppid(), 0, 0); escaped('traced')",
    "takes a file of another": "call(438, os.open('/dev/null', 0), 0, 0); escaped('took')",
    "limits its victim": "call(302, VICTIM, 7, (ctypes.c_ulong * 2)(0, 0), 0); escaped('limited')",
    "raises its limits": """
import resource
for kind in (resource.RLIMIT_AS, resource.RLIMIT_CPU, resource.RLIMIT_FSIZE, resource.RLIMIT_NOFILE):
    try:
        resource.setrlimit(kind, (resource.RLIM_INFINITY, resource.RLIM_INFINITY)); escaped('raised', kind)
    except ValueError:
        pass""",
    # network and kernel
    "connects": "socket.create_connection(('127.0.0.1', TCP), 1).send(b'x'); escaped('connected')",
    "connects to a name": "socket.socket(socket.AF_UNIX).connect(ABSTRACT); escaped('connected')",
    "sends from a pair": "a, b = socket.socketpair(); a.sendto(b'x', DATAGRAM); escaped('sent')",
    "talks to the kernel": "socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0); escaped('opened')",
    "loads a filter": "call(321, 0, bytes(128), 128); escaped('loaded')",
    "uses a ring": "call(425, 8, bytes(256)); escaped('has a ring')",
    "shares memory": "call(29, SHARED, 4096, 0o1666); escaped('shares')",
    "enters a namespace": "call(272, 0x10000000); escaped('entered')",
    "uses the old interface": "call(0x40000000 + 57); escaped('forked')",
    # what it can find in its own process
    "reads the environment": "assert not os.environ, escaped(os.environ)",
    "shortens its input": "os.ftruncate(0, 0); escaped('shortened')",
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
    "reads other packages": "escaped('read', open(PACKAGE).read(9))",
}
"""What an attack does -> its text."""

GREEDY = {
    "computes for ever": "while True: pass",
    "computes and hears no signals": """
import signal
signal.signal(signal.SIGXCPU, signal.SIG_IGN); signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 64))
while True: pass""",
    "has large numbers": "9 ** 9 ** 9",
    "sleeps": "time.sleep(1000)",
    "stops itself": "import signal; os.kill(os.getpid(), signal.SIGSTOP)",
    "reads what never comes": "r, w = os.pipe(); os.read(r, 1)",
    "takes 10 GB": "x = bytearray(10 * 2**30); escaped('has memory')",
    "keeps taking memory": """
x = []
while True:
    try: x.append(bytearray(2**20))
    except MemoryError: pass""",
    "prints on both": "while True: os.write(1, b'x' * 10**5); os.write(2, b'x' * 10**5)",
    "fills a file": "f = open('x', 'wb')\nwhile True: f.write(bytes(2**20))",
    "makes files": "for n in range(10**7): open(f'x{n}', 'w').close()",
    "has threads": """
threading.stack_size(2**15)
while True:
    try: threading.Thread(target=time.sleep, args=(60,)).start()
    except RuntimeError: time.sleep(.01)""",
    "forks for ever": """
while True:
    try: own = os.fork()
    except OSError: continue
    escaped('forked'); break""",
    "nests in C": """
x = []
for _ in range(10**6): x = [x]
import copy; sys.setrecursionlimit(10**8); copy.deepcopy(x)""",
    "compiles deeply": "eval('(' * 10**5 + ')' * 10**5)",
    "crashes": "ctypes.string_at(0)",
    "does not leave": "import atexit; atexit.register(time.sleep, 1000)",
    "replaces the exit": "os._exit = lambda code: None; sys.exit = os._exit; raise SystemExit(0)",
    "replaces printing": "sys.stdout = sys.stderr = None; import traceback; traceback.print_exception = 1; 1 / 0",
    "closes everything": "os.closerange(0, 99); print('x')",
    "breaks the garbage": "class X:\n    def __del__(self):\n        while True: pass\nx = X()\ndel x",
    "is no Python": "def (",
}
"""What a program takes or breaks -> its text."""


OTHERWISE = {
    "sends from a pair": "Transport endpoint is already connected",
    "finds other packages": "No module named 'torch'",
}
"""How attacks fail that the kernel does not refuse by themselves."""
SILENT = ("raises its limits", "uses the old interface", "reads the environment", "finds open files")
SILENT = (*SILENT, "finds the expected output")
"""Attacks that end without an exception, or are killed."""


def escapes(targets):
    """Name -> text of each attack in each way."""
    header = HEADER.replace("{targets!r}", repr(targets))
    return {
        f"{name}, {way}": f"{header}\ndef attack():\n" + _indented(text) + f"\n{call}"
        for name, text in ATTACKS.items()
        for way, call in WAYS.items()
    }


def greedy(targets):
    """Name -> text of each program that takes all there is."""
    header = HEADER.replace("{targets!r}", repr(targets))
    return {name: f"{header}\n{text}" for name, text in GREEDY.items()}


def _indented(text):
    return "\n".join(f"    {line}" for line in text.strip("\n").split("\n"))
