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
    "stubborn": """
for _ in range(20):
    try:
        attack()
    except BaseException:
        pass
""",
    "in a thread": "t = threading.Thread(target=attack)\nt.start()\nt.join()",
    "at exit": "import atexit\natexit.register(attack)",
}

ATTACKS = {
    # files
    "reads a file": "escaped('read', open(SECRET).read())",
    "reads accounts": "escaped('read', open('/etc/passwd').read(), open('/etc/shadow').read())",
    "reads by os.open": "escaped('read', os.read(os.open(SECRET, os.O_RDONLY), 99))",
    "reads by a relative path": "escaped('read', open('../' * 20 + SECRET.lstrip('/')).read())",
    "reads by a directory": "d = os.open(os.path.dirname(SECRET), os.O_RDONLY); escaped('listed', os.listdir(d))",
    "reads through O_PATH": """
d = os.open(os.path.dirname(SECRET), os.O_PATH)
escaped('read', os.read(os.open(os.path.basename(SECRET), os.O_RDONLY, dir_fd=d), 99))""",
    "lists directories": "escaped('listed', os.listdir('/etc'), os.listdir('/'), os.listdir('/proc'))",
    "lists the home": "escaped('listed', os.listdir('/root'))",
    "reads devices": """
for name in ('full', 'mem', 'kmsg', 'tty', 'sda', 'vda', 'loop0', 'nvme0n1', 'kvm', 'fuse'):
    try:
        open('/dev/' + name, 'rb'); escaped('opened', name)
    except FileNotFoundError:
        pass
    except PermissionError as error:
        refused = error
raise refused""",
    "reads the kernel": "escaped('read', open('/sys/kernel/notes', 'rb').read(1), open('/proc/version').read())",
    "overwrites a file": "open(SECRET, 'w').write('x'); escaped('wrote')",
    "appends to a file": "open(SECRET, 'a').write('x'); escaped('wrote')",
    "truncates a file": "os.truncate(SECRET, 0); escaped('truncated')",
    "truncates while reading": "os.open(SECRET, os.O_RDONLY | os.O_TRUNC); escaped('truncated')",
    "truncates with neither": "os.open(SECRET, 3 | os.O_TRUNC); escaped('truncated')",
    "removes a file": "os.unlink(SECRET); escaped('removed')",
    "renames a file": "os.rename(SECRET, SECRET + '2'); escaped('renamed')",
    "takes a file": "os.rename(SECRET, 'mine'); escaped('renamed')",
    "replaces a file": "open('mine', 'w').write('x'); os.replace('mine', SECRET); escaped('replaced')",
    "writes beside": "open(os.path.dirname(SECRET) + '/escaped', 'w').write('x'); escaped('wrote')",
    "writes above": "open('../escaped', 'w').write('x'); escaped('wrote')",
    "writes to /tmp": "open('/tmp/escaped', 'w').write('x'); escaped('wrote')",
    "writes to shared memory": "open('/dev/shm/escaped', 'w').write('x'); escaped('wrote')",
    "makes a directory": "os.mkdir('inner'); escaped('made')",
    "makes a symlink": "os.symlink(SECRET, 'link'); escaped('linked', open('link').read())",
    "makes a hard link": "os.link(SECRET, 'link'); escaped('linked', open('link').read())",
    "makes a pipe": "os.mkfifo('pipe'); escaped('made')",
    "makes a device": "os.mknod('disk', 0o60600, os.makedev(8, 0)); escaped('made')",
    "makes a temporary file elsewhere": "os.open(os.path.dirname(SECRET), os.O_TMPFILE | os.O_RDWR); escaped('made')",
    "changes modes": "os.chmod(SECRET, 0o777); escaped('changed')",
    "changes owners": "os.chown(SECRET, 1, 1); escaped('changed')",
    "changes times": "os.utime(SECRET, (1, 1)); escaped('changed')",
    "changes attributes": "os.setxattr(SECRET, 'user.x', b'x'); escaped('changed')",
    "closes its directory": "os.chmod('.', 0); escaped('changed')",
    "removes its directory": "d = os.getcwd(); os.chdir('/'); os.rmdir(d); escaped('removed')",
    "moves its directory": "d = os.getcwd(); os.chdir('/'); os.rename(d, d + '2'); escaped('renamed')",
    "changes its root": "os.chroot('/'); escaped('changed')",
    "mounts": "call(165, b'none', os.path.dirname(SECRET).encode(), b'tmpfs', 0, 0); escaped('mounted')",
    "opens by handle": "call(304, -100, 0, 0); escaped('opened')",
    "opens in another way": "call(437, -100, SECRET.encode(), (ctypes.c_long * 3)(), 24); escaped('opened')",
    # processes
    "reads its parent's environment": "escaped('read', open(f'/proc/{os.getppid()}/environ').read())",
    "reads the trainer's environment": "escaped('read', open(f'/proc/{PARENT}/environ').read())",
    "reads init": "escaped('read', open('/proc/1/environ').read(), open('/proc/1/cmdline').read())",
    "reads a command line": "escaped('read', open(f'/proc/{PARENT}/cmdline').read())",
    "reads another's memory": "escaped('read', open(f'/proc/{os.getppid()}/mem', 'rb'))",
    "follows another's directory": "escaped('read', os.readlink(f'/proc/{PARENT}/cwd'))",
    "takes another's files": "escaped('read', os.listdir(f'/proc/{PARENT}/fd'))",
    "ends its victim": "os.kill(VICTIM, 9); escaped('killed')",
    "ends the trainer": "os.kill(PARENT, 0); escaped('may signal')",
    "ends its parent": "os.kill(os.getppid(), 0); escaped('may signal')",
    "ends all": "os.kill(-1, 0); escaped('may signal')",
    "ends its group": "os.killpg(0, 0); escaped('may signal')",
    "ends a thread": "call(200, VICTIM, 9); escaped('killed')",
    "queues a signal": "call(129, VICTIM, 9, bytes(128)); escaped('killed')",
    "ends by a handle": "import signal; f = os.pidfd_open(VICTIM); signal.pidfd_send_signal(f, 9); escaped('killed')",
    "has a signal sent": """
import fcntl, signal
r, w = os.pipe()
fcntl.fcntl(r, fcntl.F_SETOWN, VICTIM); fcntl.fcntl(r, 10, 9)
fcntl.fcntl(r, fcntl.F_SETFL, os.O_ASYNC); os.write(w, b'x'); escaped('sent')""",
    "forks": "os.fork() or time.sleep(60); escaped('forked')",
    "forks by vfork": "call(58); escaped('forked')",
    "forks by clone": "call(56, 17, 0, 0, 0, 0); escaped('forked')",
    "forks by clone with memory": "call(56, 0x100 | 17, 0, 0, 0, 0); escaped('forked')",
    "forks by clone3": "call(435, (ctypes.c_ulong * 8)(0, 0, 0, 0, 17), 64); escaped('forked')",
    "forks by multiprocessing": "import multiprocessing as m; m.Process(target=int).start(); escaped('forked')",
    "starts a program": "import subprocess; escaped('ran', subprocess.check_output(['/bin/id']))",
    "becomes a program": "os.execv('/bin/cat', ['cat', SECRET]); escaped('ran')",
    "becomes itself": "os.execv(sys.executable or '/proc/self/exe', ['python']); escaped('ran')",
    "becomes what it wrote": """
open('x', 'wb').write(b'#!/bin/sh\\necho ESCAPED')
os.execv('/lib64/ld-linux-x86-64.so.2', ['ld', './x']); escaped('ran')""",
    "runs out of memory files": "f = os.memfd_create('x'); escaped('made'); os.execve(f, ['x'], {})",
    "uses a shell": "assert os.system('touch escaped') == 0; escaped('ran')",
    "uses posix_spawn": "os.posix_spawn('/bin/id', ['id'], {}); escaped('ran')",
    "traces": "call(101, 16, os.getppid(), 0, 0); escaped('traced')",
    "lets itself be traced": "call(101, 0, 0, 0, 0); escaped('traced')",
    "reads memory by a call": "call(310, VICTIM, 0, 0, 0, 0, 0); escaped('read')",
    "takes a file of another": "call(438, os.open('/dev/null', 0), 0, 0); escaped('took')",
    "leaves its session": "os.setsid(); escaped('left')",
    "leaves its group": "os.setpgid(0, 0); escaped('left')",
    "survives its parent": "call(157, 1, 0, 0, 0, 0); escaped('survives')",
    "becomes another user": "os.setuid(1); escaped('changed')",
    "limits its victim": "call(302, VICTIM, 7, (ctypes.c_ulong * 2)(0, 0), 0); escaped('limited')",
    "raises its limits": """
import resource
for kind in (resource.RLIMIT_AS, resource.RLIMIT_CPU, resource.RLIMIT_FSIZE, resource.RLIMIT_NOFILE):
    try:
        resource.setrlimit(kind, (resource.RLIM_INFINITY, resource.RLIM_INFINITY)); escaped('raised', kind)
    except ValueError:
        pass""",
    "takes a priority": "os.setpriority(os.PRIO_PROCESS, VICTIM, 19); escaped('changed')",
    "schedules": "os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1)); escaped('changed')",
    "pins its victim": "os.sched_setaffinity(VICTIM, {0}); escaped('changed')",
    # network and kernel
    "connects": "socket.create_connection(('127.0.0.1', TCP), 1).send(b'x'); escaped('connected')",
    "connects by a call": "call(41, 2, 1, 0); escaped('opened')",
    "listens": "s = socket.socket(); s.bind(('127.0.0.1', 0)); s.listen(); escaped('bound')",
    "sends a packet": "socket.socket(type=socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', UDP)); escaped('sent')",
    "sends by IPv6": "socket.socket(socket.AF_INET6, socket.SOCK_DGRAM).sendto(b'x', ('::1', UDP)); escaped('sent')",
    "connects to a file": "socket.socket(socket.AF_UNIX).connect(UNIX); escaped('connected')",
    "connects to a name": "socket.socket(socket.AF_UNIX).connect(ABSTRACT); escaped('connected')",
    "sends to a file": """
a, b = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
a.sendto(b'x', DATAGRAM); escaped('sent')""",
    "sends from a pair": "a, b = socket.socketpair(); a.sendto(b'x', DATAGRAM); escaped('sent')",
    "looks up a name": "socket.getaddrinfo('example.com', 80); escaped('asked')",
    "opens a raw socket": "socket.socket(socket.AF_PACKET, socket.SOCK_RAW); escaped('opened')",
    "talks to the kernel": "socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0); escaped('opened')",
    "uses a virtual machine's": "socket.socket(40, socket.SOCK_STREAM); escaped('opened')",
    "watches files": "call(294, 0); escaped('watches')",
    "keeps keys": "call(248, b'user', b'x', b'y', 1, -3); escaped('kept')",
    "loads a filter": "call(321, 0, bytes(128), 128); escaped('loaded')",
    "measures": "call(298, bytes(128), 0, -1, -1, 0); escaped('measures')",
    "uses a ring": "call(425, 8, bytes(256)); escaped('has a ring')",
    "handles faults": "call(323, 0); escaped('handles')",
    "shares memory": "call(29, SHARED, 4096, 0o1666); escaped('shares')",
    "queues messages": "call(68, SHARED, 0o1666); escaped('queues')",
    "has a named semaphore": "import _multiprocessing as m; m.SemLock(1, 1, 1, '/escaped', False); escaped('made')",
    "enters a namespace": "call(272, 0x10000000); escaped('entered')",
    "sets the clock": "time.clock_settime(time.CLOCK_REALTIME, time.time()); escaped('set')",
    "names the machine": "socket.sethostname(socket.gethostname()); escaped('named')",
    "types into the terminal": "import fcntl; fcntl.ioctl(0, 0x5412, b'x'); escaped('typed')",
    "uses the old interface": "call(0x40000000 + 57); escaped('forked')",
    "takes off the filter": "call(317, 1, 0, bytes(16)); escaped('filtered')",
    "adds rules": "call(444, None, 0, 1); escaped('knows')",
    # what it can find in its own process
    "reads the environment": "assert not os.environ, escaped(os.environ)",
    "reads its own environment": "escaped('read', open('/proc/self/environ').read())",
    "changes its input": "os.write(0, b'x'); escaped('wrote')",
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
    "reads packages beside Python": """
place = os.path.dirname(os.__file__) + '/site-packages'
if not os.path.isdir(place): raise PermissionError('Permission denied: there are none')
name = next(os.path.join(at, name) for at, _, names in os.walk(place) for name in names)
escaped('read', open(name, 'rb').read(1))""",
    "reads other packages": "escaped('read', open(PACKAGE).read(9))",
}
"""What an attack does -> its text."""

GREEDY = {
    "computes for ever": "while True: pass",
    "computes in C for ever": "max(range(10**13))",
    "computes and hears no signals": """
import signal
signal.signal(signal.SIGXCPU, signal.SIG_IGN); signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 64))
while True: pass""",
    "matches for ever": "import re; re.match('(a|aa)+$', 'a' * 100 + '!')",
    "has large numbers": "9 ** 9 ** 9",
    "sleeps": "time.sleep(1000)",
    "stops itself": "import signal; os.kill(os.getpid(), signal.SIGSTOP)",
    "waits for a lock": "l = threading.Lock(); l.acquire(); l.acquire()",
    "reads what never comes": "r, w = os.pipe(); os.read(r, 1)",
    "takes 10 GB": "x = bytearray(10 * 2**30); escaped('has memory')",
    "takes memory bit by bit": "x = []\nwhile True: x.append(bytes(2**20))",
    "keeps taking memory": """
x = []
while True:
    try: x.append(bytearray(2**20))
    except MemoryError: pass""",
    "maps memory": "import mmap; x = [mmap.mmap(-1, 2**30) for _ in range(10)]; escaped('has memory')",
    "unpacks a bomb": """
import zlib
z = zlib.compress(bytes(2**27)); x = [zlib.decompress(z) for _ in range(80)]; escaped("has memory")""",
    "grows a text": "x = 'x'\nwhile True: x += x",
    "prints for ever": "while True: print('x' * 10**5)",
    "prints errors for ever": "while True: print('x' * 10**5, file=sys.stderr)",
    "prints on both": "while True: os.write(1, b'x' * 10**5); os.write(2, b'x' * 10**5)",
    "fills a file": "f = open('x', 'wb')\nwhile True: f.write(bytes(2**20))",
    "fills files": """
for n in range(10**6):
    with open(f'x{n}', 'wb') as f: f.write(bytes(2**20))
time.sleep(9)""",
    "makes files": "for n in range(10**7): open(f'x{n}', 'w').close()",
    "keeps files that it removed": """
kept = []
while True:
    f = open('x', 'wb'); os.unlink('x'); kept.append(f)
    try: f.write(bytes(2**24)); f.flush()
    except OSError: pass""",
    "has threads": """
threading.stack_size(2**15)
while True:
    try: threading.Thread(target=time.sleep, args=(60,)).start()
    except RuntimeError: time.sleep(.01)""",
    "has computing threads": """
def loop():
    while True: pass
for _ in range(20): threading.Thread(target=loop).start()""",
    "keeps a thread": "threading.Thread(target=time.sleep, args=(60,)).start()",
    "forks for ever": """
while True:
    try: own = os.fork()
    except OSError: continue
    escaped('forked'); break""",
    "nests deeply": "sys.setrecursionlimit(10**8)\ndef f(n): return f(n + 1) + 1\nf(0)",
    "nests in C": """
x = []
for _ in range(10**6): x = [x]
import copy; sys.setrecursionlimit(10**8); copy.deepcopy(x)""",
    "compiles deeply": "eval('(' * 10**5 + ')' * 10**5)",
    "crashes": "ctypes.string_at(0)",
    "aborts": "os.abort()",
    "leaves at once": "os._exit(0)",
    "leaves in a thread": "threading.Thread(target=os._exit, args=(0,)).start(); time.sleep(9)",
    "does not leave": "import atexit; atexit.register(time.sleep, 1000)",
    "replaces the exit": "os._exit = lambda code: None; sys.exit = os._exit; raise SystemExit(0)",
    "replaces printing": "sys.stdout = sys.stderr = None; import traceback; traceback.print_exception = 1; 1 / 0",
    "closes everything": "os.closerange(0, 99); print('x')",
    "has a result that fails": "class X(Exception):\n    def __str__(self): raise self\nraise X",
    "breaks the garbage": "class X:\n    def __del__(self):\n        while True: pass\nx = X()\ndel x",
    "names its process": "call(157, 15, b'a) R 1 (b')\nwhile True: pass",
    "is not text": "\x00",
    "is no Python": "def (",
}
"""What a program takes or breaks -> its text."""


OTHERWISE = {
    "removes its directory": "Operation not permitted",
    "sends from a pair": "Transport endpoint is already connected",
    "looks up a name": "Temporary failure in name resolution",
    "finds other packages": "No module named 'torch'",
}
"""How attacks fail that the kernel does not refuse by themselves."""
SILENT = ("raises its limits", "uses the old interface", "reads the environment", "finds open files", "uses a shell")
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
