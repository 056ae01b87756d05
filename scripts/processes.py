"""How ./dev runs programs, and what it says meanwhile.

Like ./dev, this needs the standard library only, and has no syntax newer than Python 3.6.
"""

import hashlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
BEGAN_S = time.monotonic()


class Problem(Exception):
    """Something that the user can mend; the message says what it is and how."""


def say(text):
    print(f"dev: {text}", flush=True)


def say_stage(text):
    """With the minutes and seconds since the start."""
    seconds = int(time.monotonic() - BEGAN_S)
    say(f"{text} [{seconds // 60}:{seconds % 60:02}]")


def run(command, each_line=None, **options):
    """Run `command` to its end with .venv first on PATH; `each_line` also reads what it prints.

    However this ends, the child has ended before. A Ctrl-C reaches it from the terminal; where only we were told to
    end, it is told the same. Then it gets some seconds to clean up.
    """
    if each_line is not None:
        options.update(stdout=subprocess.PIPE, text=True, errors="replace")
    try:
        child = subprocess.Popen([str(part) for part in command], env=environment(), **options)
    except FileNotFoundError:
        raise Problem(f"`{command[0]}` is not there. `./dev setup` makes .venv anew after `rm -r .venv`.") from None
    try:
        if each_line is not None:
            for line in child.stdout:
                sys.stdout.write(line)
                sys.stdout.flush()
                each_line(line)
        child.wait()
    except BaseException as reason:
        if not isinstance(reason, KeyboardInterrupt):
            child.send_signal(signal.SIGINT)
        try:
            child.wait(timeout=GRACE_S)
        except (subprocess.TimeoutExpired, KeyboardInterrupt):
            child.kill()
            child.wait()
        raise
    return child


# How long a child may clean up after Ctrl-C; the testbed removes its namespaces in well under a second.
GRACE_S = 5


def environment():
    """The environment of every child: .venv active, cargo on PATH; one for all, so that cargo finds its work done."""
    env = dict(os.environ, VIRTUAL_ENV=str(VENV), PYO3_PYTHON=str(venv_python()))
    rust = [str(Path(cargo()).parent)] if cargo() else []
    env["PATH"] = os.pathsep.join([str(VENV / "bin"), env.get("PATH", os.defpath), *rust])
    # PYTHONDONTWRITEBYTECODE: each process would compile our modules and tests anew; what is written lands in this checkout.
    for name in ("PYTHONPATH", "PYTHONHOME", "CONDA_PREFIX", "PYTHONDONTWRITEBYTECODE"):
        env.pop(name, None)
    return env


def venv_python():
    return VENV / "bin" / "python"


def cargo():
    return shutil.which("cargo") or shutil.which("cargo", path=os.path.expanduser("~/.cargo/bin"))


def digest(paths):
    return hashlib.sha256(b"\0".join(path.read_bytes() for path in paths)).hexdigest()


def numbers(version):
    """The leading numbers of a version: "2.15.0+cu132" is (2, 15, 0)."""
    return tuple(int(part) for part in re.match(r"\d+(\.\d+)*", version).group().split("."))
