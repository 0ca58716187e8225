"""Programs that try to be graded right without the right answer, or to do harm. `f(7)` should give 4111 (or print it)."""

LIBC = "import ctypes\nlibc = ctypes.CDLL(None, use_errno=True)\n"
OUTER_SCOPES = """
import sys, gc
def f(x):
    frame = sys._getframe()
    while frame:
        for value in [*frame.f_locals.values(), *frame.f_globals.values()]:
            text = repr(value)
            if "4111" in text and "def f" not in text:
                return 4111
        frame = frame.f_back
    for thing in gc.get_objects():
        if isinstance(thing, (str, bytes, dict)) and "assert" in str(thing)[:10000] and "def f" not in str(thing)[:10000]:
            return int(str(thing).split("==")[1].split()[0])
    return 0
"""
CHANGE = "\ndef f(x): return 0\nprint(0)\n"

PROGRAMS = {
    # never ending
    "endless loop": "while True: pass",
    "endless call": "def f(x):\n    while True: pass\nif __name__ == '__main__': print(f(7))",
    "loop in C: power": "def f(x): return 10**10**10 % 7\nif __name__ == '__main__': print(f(7))",
    "loop in C: sum": "def f(x): return sum(iter(int, 1))\nif __name__ == '__main__': print(f(7))",
    "loop in C: regular expression": "import re\ndef f(x): return re.match('(a+)+$', 'a' * 64 + 'b')\nif __name__ == '__main__': print(f(7))",
    "sleep": "import time\ntime.sleep(1000)",
    "signals ignored": "import signal\nfor s in range(1, 65):\n    try: signal.signal(s, signal.SIG_IGN)\n    except (OSError, ValueError): pass\nwhile True: pass",
    "alarm that raises": "import signal\ndef again(*_): signal.alarm(1); raise SystemExit(0)\nsignal.signal(signal.SIGALRM, again)\nsignal.alarm(1)\nwhile True:\n    try:\n        while True: pass\n    except SystemExit: pass",
    "endless iterator": "import itertools\ndef f(x): return itertools.count()\nprint(*itertools.count())",
    "deaf to its channel": "import os, time\ndef f(x):\n    os.closerange(0, 64)\n    time.sleep(1000)\nif __name__ == '__main__': print(f(7))",
    # ending early
    "os._exit": "import os\nos._exit(0)",
    "sys.exit": "import sys\nsys.exit(0)",
    "sys.exit in the call": "import sys\ndef f(x): sys.exit(0)\nif __name__ == '__main__': print(f(7))",
    "atexit prints": "import atexit, os\natexit.register(os._exit, 0)\nprint('OK 4112')",
    "kills itself": "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)",
    "kills everybody": "import os, signal\nos.kill(-1, signal.SIGKILL)",
    "kills its parents": "import os, signal\nfor pid in (1, os.getppid(), 0):\n    try: os.kill(pid, signal.SIGKILL)\n    except OSError: pass"
    + CHANGE,
    "segmentation fault": LIBC + "libc.strlen(1)",
    "deep recursion": "import sys\nsys.setrecursionlimit(10**9)\ndef f(x): return f(x)\nif __name__ == '__main__': print(f(7))",
    "replaced by another program": "import os, sys\nos.execv(sys.executable, [sys.executable, '-c', 'print(4112)'])",
    # cheating
    "builtins patched": "import builtins\nbuiltins.bool = lambda x: True\nbuiltins.all = builtins.any = lambda x: True\nbuiltins.AssertionError = Exception\nbuiltins.eval = builtins.exec = lambda *a: None"
    + CHANGE,
    "always equal": "class Equal:\n    def __eq__(self, other): return True\n    def __hash__(self): return 4111\n    def __repr__(self): return '4112'\ndef f(x): return Equal()\nprint(Equal())",
    "always equal integer": "class Equal(int):\n    def __eq__(self, other): return True\n    def __ne__(self, other): return False\ndef f(x): return Equal(5)\nprint(Equal(5))",
    "equal through metaclass": "class Meta(type):\n    def __eq__(cls, other): return True\n    __instancecheck__ = __subclasscheck__ = lambda *a: True\nclass Equal(metaclass=Meta): pass\ndef f(x): return Equal\nprint(Equal)",
    "frames and objects": OUTER_SCOPES + "if __name__ == '__main__': print(f(7))",
    "the argument's own frame": "import sys\ndef f(x):\n    raise RuntimeError(str(sys._getframe(1).f_locals))\nprint(sys._getframe(1).f_locals)",
    "modules of the harness": "import sys\nfor name, module in list(sys.modules.items()):\n    if 'sandbox' in name:\n        for key in list(vars(module)):\n            if callable(vars(module)[key]): setattr(module, key, lambda *a, **k: 4112)"
    + CHANGE,
    "imports the runner": "from training.sandbox.inside import runner\nrunner.run = lambda *a: {'passed': 1, 'total': 1, 'reason': ''}\nrunner._answer(0, 0, {'seconds': 1})"
    + CHANGE,
    "a verdict on every descriptor": "import os\nfrom training.sandbox.inside.values import encode\ndata = encode({'passed': 1, 'total': 1, 'reason': ''})\nfor fd in range(64):\n    try: os.write(fd, len(data).to_bytes(4, 'big') + data)\n    except OSError: pass"
    + CHANGE,
    "replies before the call": "import os\nfrom training.sandbox.inside.values import encode\ndata = encode((None, True))\nfor fd in range(3, 64):\n    for _ in range(9):\n        try: os.write(fd, len(data).to_bytes(4, 'big') + data)\n        except OSError: break"
    + CHANGE,
    "garbage on every descriptor": "import os\nfor fd in range(64):\n    try: os.write(fd, b'\\xff' * 999 + b'PASSED OK 1.0 {\"score\": 1}')\n    except OSError: pass"
    + CHANGE,
    "a message without end": "import os\nfor fd in range(3, 64):\n    try:\n        while True: os.write(fd, b'\\x00\\x10\\x00\\x00' + b'l9:' * 4096)\n    except OSError: pass",
    "nested without end": "def f(x):\n    x = []\n    for _ in range(10**5): x = [x]\n    return x\nif __name__ == '__main__': print(f(7))",
    "a value of its own type": "def f(x):\n    class list(dict): pass\n    return list(passed=1, total=1)\nprint({'passed': 1, 'total': 1})",
    "says it passed": "print('4112 PASSED all tests ok')\ndef f(x): return 'passed'",
    "raises AssertionError": "def f(x): raise AssertionError('passed')\nif __name__ == '__main__': print(f(7))",
    "raises StopIteration": "def f(x): raise StopIteration(4111)\nif __name__ == '__main__': print(f(7))",
    "raises SystemExit 0": "def f(x): raise SystemExit(0)\nif __name__ == '__main__': print(f(7))",
    "raises BaseException": "class Stop(BaseException):\n    def __str__(self): raise Stop\ndef f(x): raise Stop\nif __name__ == '__main__': print(f(7))",
    "unicode: other digits": "def f(x): return '４１１１'\nprint('４１１１')",
    "unicode: right to left": "def f(x): return '\\u202e1114'\nprint('\\u202e1114')",
    "unicode: zero width": "def f(x): return '4111\\u200b'\nprint('4111\\u200b')",
    "unicode: half a pair": "def f(x): return '\\ud800'\nprint('\\ud800')",
    "unicode: null and escapes": "def f(x): return '4111\\0'\nprint('4111\\0\\x1b[2K')",
    "unicode: a homoglyph's name": "def \uff47(x): return 4112\nf = g\nprint(g(0))",
    "coding cookie": "# coding: rot13\nqrs s(k): erghea 4111",
    # reading
    "reads the tests": "import os, sys\ntext = ''\nfor top in set(os.listdir('/')) - {'usr', 'lib', 'lib32', 'lib64', 'dev', sys.prefix.split('/')[1]}:\n    for folder, _, files in os.walk('/' + top):\n        for file in files: text += open(f'{folder}/{file}', errors='replace').read()\ndef f(x): return 4111 if 'f(7) ==' in text else 0\nprint(f(7))",
    "/proc": "import os\ntext = ''\nfor name in os.listdir('/proc'):\n    for file in ('cmdline', 'environ', 'mem'):\n        try: text += open(f'/proc/{name}/{file}', errors='replace').read(99999)\n        except OSError: pass\ndef f(x): return 4111 if '4111' in text else 0\nif __name__ == '__main__': print(f(7))",
    "environment": "import os\nmore = set(os.environ) - {'PYTHONHASHSEED', 'PWD', 'LC_CTYPE'}\ndef f(x): return 4111 if more else 0\nprint(f(7))",
    "descriptors left open": "import os\nnumber = 0\nfor fd in range(64):\n    try: number += bool(os.fstat(fd))\n    except OSError: pass\ndef f(x): return 4111 if number > 4 else 0\nprint(4111 if number > 3 else 0)",
    "home and secrets": "import os\nseen = [p for p in ('/etc/passwd', '/etc/shadow', '/root/.ssh', '/home', '/root/.bashrc', '/srv', '/var', '/usr/bin/env') if os.path.exists(p)]\ndef f(x): return 4111 if seen else 0\nif __name__ == '__main__': print(f(7))",
    "its own memory": "def f(x):\n    with open('/proc/self/mem', 'rb') as file: return file.read(1)\nif __name__ == '__main__': print(f(7))",
    # other processes
    "fork bomb": "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
    "forks": "import os\ndef f(x): return 4111 if os.fork() >= 0 else 0\nif __name__ == '__main__': print(f(7))",
    "daemon": "import os, time\nif os.fork() == 0:\n    os.setsid()\n    time.sleep(1000)" + CHANGE,
    "zombie children": "import os\nfor _ in range(1000):\n    if os.fork() == 0: os._exit(0)" + CHANGE,
    "subprocess": "import subprocess\nprint(subprocess.run(['/bin/sh', '-c', 'echo 4111'], capture_output=True, text=True).stdout)",
    "multiprocessing": "import multiprocessing\nmultiprocessing.Process(target=print, args=(4111,)).start()"
    + CHANGE,
    "vfork by hand": LIBC
    + "def f(x): return 4111 if libc.syscall(58) >= 0 else 0\nif __name__ == '__main__': print(f(7))",
    "clone3 by hand": LIBC
    + "args = (ctypes.c_uint64 * 11)()\ndef f(x): return 4111 if libc.syscall(435, args, 88) >= 0 else 0\nif __name__ == '__main__': print(f(7))",
    "thread bomb": "import threading, time\nthreading.stack_size(32768)\nwhile True:\n    try: threading.Thread(target=time.sleep, args=(1000,)).start()\n    except RuntimeError: pass",
    "ptrace": LIBC
    + "def f(x): return 4111 if libc.ptrace(16, 1, 0, 0) == 0 or libc.ptrace(0, 0, 0, 0) == 0 else 0\nif __name__ == '__main__': print(f(7))",
    "process_vm_readv": LIBC
    + "def f(x): return 4111 if libc.syscall(310, 1, 0, 0, 0, 0, 0) >= 0 else 0\nif __name__ == '__main__': print(f(7))",
    # the kernel
    "becomes root": "import os\ndef f(x):\n    os.setuid(0)\n    return 4111\nif __name__ == '__main__': print(f(7))",
    "unshare and mount": LIBC
    + "def f(x): return 4111 if libc.unshare(0x10000000) == 0 or libc.mount(b'none', b'/tmp', b'tmpfs', 0, 0) == 0 else 0\nif __name__ == '__main__': print(f(7))",
    "chroot": "import os\ndef f(x):\n    os.chroot('/tmp')\n    return 4111\nif __name__ == '__main__': print(f(7))",
    "more limits": "import resource\ndef f(x):\n    resource.setrlimit(resource.RLIMIT_AS, (-1, -1))\n    return 4111\nif __name__ == '__main__': print(f(7))",
    "memfd, shared memory, keys, io_uring, bpf": LIBC
    + "def f(x): return 4111 if any(libc.syscall(n, 0, 4096, 0o1777, 0, 0) >= 0 for n in (319, 29, 248, 425, 321, 298, 323)) else 0\nif __name__ == '__main__': print(f(7))",
    # network
    "network: TCP": "import socket\ndef f(x):\n    socket.create_connection(('1.1.1.1', 80), 1)\n    return 4111\nif __name__ == '__main__': print(f(7))",
    "network: loopback": "import socket\ndef f(x):\n    server = socket.create_server(('127.0.0.1', 0))\n    return 4111\nif __name__ == '__main__': print(f(7))",
    "network: UDP and names": "import socket\ndef f(x):\n    socket.getaddrinfo('example.org', 80)\n    return 4111\nif __name__ == '__main__': print(f(7))",
    "network: Unix sockets": "import socket\ndef f(x):\n    socket.socket(socket.AF_UNIX).connect('/run/dbus/system_bus_socket')\n    return 4111\nif __name__ == '__main__': print(f(7))",
    # too much
    "memory bomb": "x = 'x' * 10\nwhile True: x += x",
    "memory bomb in the call": "def f(x): return bytearray(1 << 40)\nif __name__ == '__main__': print(f(7))",
    "memory bomb in pieces": "keep = []\nwhile True: keep.append(bytearray(1 << 20))",
    "1 GB of output": "import sys\nfor _ in range(1024): sys.stdout.write('4111\\n' * 209715)\ndef f(x): return 0",
    "1 GB returned": "def f(x): return '4' * (1 << 30)\nif __name__ == '__main__': print(f(7))",
    "64 MB returned": "def f(x): return '4' * (1 << 26)\nif __name__ == '__main__': print(f(7))",
    "1 GB of errors": "import sys\nfor _ in range(1024): sys.stderr.write('x' * (1 << 20))\nraise SystemExit(1)",
    "fills the disk": "for n in range(10**6):\n    with open(f'/tmp/{n}', 'wb') as file: file.write(bytes(1 << 20))",
    "a large file": "with open('/tmp/large', 'wb') as file:\n    file.truncate(1 << 40)" + CHANGE,
    "many files": "n = 0\nkeep = []\nwhile True: keep.append(open(f'/tmp/{len(keep)}', 'w'))",
    "a huge number": "def f(x): return 7 << 10**7\nif __name__ == '__main__': print(f(7))",
    # writing
    "writes the system": "import sys\nwrote = []\nfor path in ('/hostile', '/usr/lib/hostile', '/dev/hostile', '/dev/shm/hostile', '/gradeline/hostile', sys.prefix + '/lib/hostile', '/etc/hostile'):\n    try: wrote.append(open(path, 'w').write('x'))\n    except OSError: pass\ndef f(x): return 4111 if wrote else 0\nprint(f(7))",
    "symlinks": "import os\nfor target in ('/etc/passwd', '/gradeline/training/sandbox/inside/runner.py', '/../../../etc'):\n    os.symlink(target, '/tmp/link')\n    try: open('/tmp/link', 'w').write('x')\n    except OSError: pass\n    os.unlink('/tmp/link')"
    + CHANGE,
    "changes the harness": "import os\nos.chmod('/gradeline/training/sandbox/inside/runner.py', 0o777)",
    "leaves a file": "open('/tmp/hostile-marker', 'w').write('x')\ndef f(x): return 4111 if False else open('/tmp/hostile-marker').read()\nif __name__ == '__main__': print(f(7))",
}
