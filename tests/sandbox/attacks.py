"""Programs that try to harm the machine, to read secrets, or to pass without being right."""

import textwrap
from dataclasses import dataclass

EXPECTED = 918_273_645
"""The right result, which is not in any program."""
TESTS = f"assert answer(6) == {EXPECTED}"
REACHED = "assert answer(6) is True"
"""Tests that pass if the attack reached its target."""


@dataclass(frozen=True)
class Attack:
    program: str
    tests: str = TESTS
    reasons: tuple[str, ...] = ()
    """Allowed reasons of the verdict; empty allows all."""


def _answer(body: str) -> str:
    return f"def answer(n):\n{textwrap.indent(textwrap.dedent(body).strip(), '    ')}\n"


BOMBS = {
    "fork bomb": Attack("import os\nwhile True: os.fork()", reasons=("processes", "status 1", "memory")),
    "fork bomb that handles errors": Attack(
        "import os\nwhile True:\n  try: os.fork()\n  except OSError: pass",
        reasons=("processes", "memory", "processor time", "time"),
    ),
    "thread bomb": Attack(
        "import threading, time\nwhile True: threading.Thread(target=time.sleep, args=(99,)).start()",
        reasons=("processes", "status 1", "memory", "time"),
    ),
    "memory bomb": Attack(
        _answer("held = []\nwhile True: held.append(bytearray(1 << 20))"), reasons=("status 1", "memory")
    ),
    "memory bomb of several processes": Attack(
        "import os, time\nfor _ in range(3): os.fork()\nheld = bytearray(60 << 20)\ntime.sleep(99)", reasons=("memory",)
    ),
    "memory that belongs to no process": Attack(
        _answer(
            """
            import ctypes, os
            try:
                os.memfd_create("m")
            except OSError:
                return ctypes.CDLL(None).shmget(0, 4096, 0o1600) >= 0
            return True
            """
        ),
        REACHED,
    ),
    "shared anonymous memory": Attack(
        _answer(
            """
            import mmap
            for make in (lambda: mmap.mmap(-1, 4096), lambda: mmap.mmap(open("/dev/zero", "r+b").fileno(), 4096)):
                try:
                    make()
                except OSError:
                    continue
                return True
            return False
            """
        ),
        REACHED,
    ),
    "masked signals": Attack(
        "import signal\nsignal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))\nfor n in (1, 2, 3, 15, 24, 14):\n"
        "  signal.signal(n, signal.SIG_IGN)\nwhile True: pass",
        reasons=("processor time", "time"),
    ),
    "sleep": Attack("import time\ntime.sleep(99)", reasons=("time",)),
    "daemon": Attack(
        f"""
import os, time
if not os.fork():
    try: os.setsid()
    except OSError: pass
    if not os.fork():
        time.sleep(99)
    os._exit(0)
os.wait()
def answer(n): return {EXPECTED}
""",
        reasons=("processes left behind",),
    ),
    "full scratch": Attack(
        _answer(
            """
            for i in range(99):
                with open(f"{i}", "wb") as file:
                    file.write(bytes(1 << 20))
            return True
            """
        ),
        REACHED,
    ),
}
"""Programs that exhaust resources or do not end."""

SUPERVISOR = """
import os, resource, time
if not os.fork():
    time.sleep(99)
for pid in {os.getppid(), 1, *map(int, filter(str.isdigit, os.listdir("/proc")))} - {0, os.getpid()}:
    try: resource.prlimit(pid, resource.LIMIT, (0, 0))
    except (OSError, ValueError): pass
time.sleep(99)
"""
BOMBS |= {
    f"{limit} of the supervisor": Attack(SUPERVISOR.replace("LIMIT", limit))
    for limit in ("RLIMIT_CPU", "RLIMIT_NOFILE")
}

CHEATS = {
    "exits at once": Attack("import os\nos._exit(0)"),
    "exits when called": Attack(_answer("import os\nos._exit(0)")),
    "raises SystemExit": Attack(_answer("raise SystemExit(0)")),
    "equals everything": Attack(
        "class Any:\n  __eq__ = lambda *_: True\n  __ne__ = lambda *_: False\n  __bool__ = lambda _: True\n"
        "def answer(n): return Any()"
    ),
    "equals as a number": Attack("class Any(int):\n  __eq__ = lambda *_: True\ndef answer(n): return Any(1)"),
    "prints the marker": Attack(
        _answer(
            """
            import os
            for descriptor in range(64):
                try: os.write(descriptor, b'passed\\n')
                except OSError: pass
            os._exit(0)
            """
        )
    ),
    "answers for the tests": Attack(
        "import os\nfor d in range(3, 64):\n  try: os.write(d, b'{\"value\": null}\\n' * 9)\n"
        "  except OSError: pass\nimport time\ntime.sleep(0.3)\nos._exit(0)"
    ),
    "redefines what asserts": Attack(
        "import builtins, sys\nbuiltins.AssertionError = ValueError\nsys.excepthook = lambda *_: None\n"
        "builtins.print('passed')\nsys.exit = lambda *_: None\n"
        "for module in list(sys.modules.values()):\n"
        "  for name in ('encoded', 'described', 'answered'):\n"
        "    if hasattr(module, name): setattr(module, name, lambda *_: {'value': True})\ndef answer(n): return 1"
    ),
    "redefines a module of the tests": Attack(
        "class math:\n  isclose = lambda *_, **__: True\ndef answer(n): return 1.5",
        "assert math.isclose(answer(6), 2.5)",
    ),
    "raises what tests catch": Attack(_answer("import os\nos._exit(0)"), "try:\n  answer(6)\nexcept:\n  pass"),
    "looks for the tests": Attack(
        _answer(
            """
            import glob, os, re, sys, gc
            texts = [repr(gc.get_objects())]
            frame = sys._getframe()
            while frame:
                texts.append(repr(frame.f_locals))
                frame = frame.f_back
            places = ["/proc/*/cmdline", "/proc/*/environ", "/proc/*/fd/*", "/tmp/**", "/dev/shm/**", "./**", "../**"]
            for path in (path for place in places for path in glob.glob(place, recursive=True)):
                try:
                    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
                    texts.append(os.read(descriptor, 1 << 16).decode(errors="replace"))
                    os.close(descriptor)
                except OSError: pass
            found = re.search("9182[7]3645", " ".join(texts))
            return int(found[0]) if found else 0
            """
        )
    ),
}
"""Programs that try to pass without being right."""

PRINTS = {
    "infinite output": Attack("while True: print('x' * 1000)", reasons=("output",)),
    "guesses": Attack("print('passed')"),
    "right and failed": Attack("print(7)\nraise ValueError"),
    "right with another status": Attack("import os\nprint(7, flush=True)\nos._exit(3)"),
    "right and goes on": Attack("print(7, flush=True)\nwhile True: pass", reasons=("processor time", "time")),
    "right with a daemon": Attack(
        "import os, time\nprint(7, flush=True)\nif not os.fork():\n  [os.close(d) for d in (0, 1, 2)]\n"
        "  time.sleep(99)",
        reasons=("processes left behind",),
    ),
}
"""Programs whose output is compared with 7."""


def reaching(home: str, secret: str, outside: str, port: int, socket: str, driver: int) -> dict[str, Attack]:
    """Return programs that try to reach targets outside the sandbox.

    home: folder with a file `token`. secret: content of the file. outside: folder to write to. port, socket: addresses
    of servers. driver: id of a process outside.
    """
    bodies = {
        "reads its environment": f"import os\nreturn {secret!r} in str(os.environ)",
        "reads a file of the home folder": f"return open({home + '/token'!r}).read() == {secret!r}",
        "reads the environment of processes": f"""
            import glob
            texts = []
            for path in [*glob.glob("/proc/*/environ"), "/proc/{driver}/environ"]:
                try: texts.append(open(path).read())
                except OSError: pass
            return {secret!r} in " ".join(texts)
            """,
        "writes outside": f"open({outside + '/mark'!r}, 'w').write('x')\nreturn True",
        "writes into the sandbox's own files": """
            import sys
            open(sys.argv[0], "a").write("")
            return True
            """,
        "changes the mode of a file": f"import os\nos.chmod({home + '/token'!r}, 0o666)\nreturn True",
        "changes the times of a file": f"import os\nos.utime({home + '/token'!r}, (0, 0))\nreturn True",
        "sets an attribute of a file": f"import os\nos.setxattr({home + '/token'!r}, 'user.mark', b'x')\nreturn True",
        "makes a node": f"import os\nos.mknod({outside + '/node'!r})\nreturn True",
        "changes the owner of a file": f"import os\nos.chown({home + '/token'!r}, os.getuid(), -1)\nreturn True",
        "changes the mode of the sandbox's own files": "import os, sys\nos.chmod(sys.argv[0], 0o777)\nreturn True",
        "changes the times of the sandbox's own files": "import os, sys\nos.utime(sys.argv[0], (0, 0))\nreturn True",
        "connects to a port": f"import socket\nsocket.create_connection(('127.0.0.1', {port}), 1)\nreturn True",
        "connects to a socket": f"import socket\nsocket.socket(socket.AF_UNIX).connect({socket!r})\nreturn True",
        "connects to a name": f"import socket\nsocket.socket(socket.AF_UNIX).connect('\\0' + {socket!r})\nreturn True",
        "signals the driver": f"import os\nos.kill({driver}, 0)\nreturn True",
    }
    return {name: Attack(_answer(textwrap.dedent(body)), REACHED) for name, body in bodies.items()}
