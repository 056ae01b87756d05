"""The environments that ./dev makes: .venv with its torch, those of some tests and of the docs, and the package in them.

Like ./dev, this needs the standard library only, and has no syntax newer than Python 3.6.
"""

import importlib.util
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import system_tools
from processes import ROOT, VENV, Problem, cargo, digest, environment, numbers, run, say, venv_python

TORCH_MIN = (2, 11)
TORCH_PIN = "2.15.0"

LOCK = ROOT / "requirements" / "lock.txt"
STAMP = VENV / "penstock-setup.json"
FRONTS_VENV = ROOT / ".venv-fronts"
FRONTS_LOCK = ROOT / "requirements" / "fronts.txt"
FRAMEWORKS_VENV = ROOT / ".venv-frameworks"
FRAMEWORKS_LOCK = ROOT / "requirements" / "frameworks.txt"
DOCS_VENV = ROOT / ".venv-docs"
DOCS_LOCK = ROOT / "requirements" / "docs.txt"


def setup(choose_anew=False, build=True):
    """Bring .venv and the native module up to date.

    An existing .venv is kept while the lock file and the place of the checkout are those that it was made from,
    whichever interpreter runs this. With `choose_anew` (`./dev setup`) the interpreter and its torch count as well.
    """
    check_tools()
    inside = Path(sys.prefix).resolve() == VENV
    have = read_stamp()
    want = {"lock": digest([LOCK]), "root": str(ROOT), "torch_pin": TORCH_PIN}
    fresh = have is not None and all(have.get(key) == value for key, value in want.items())
    if fresh and choose_anew and not inside:
        fresh = have.get("made_by") == made_by()
    if not fresh:
        if inside:
            raise Problem("the environment must be made anew, but runs this very program: `deactivate`, then again.")
        make_venv(dict(want, made_by=made_by()))
    if build:
        build_penstock()


def made_by():
    """The interpreter and the torch that an environment made now would use."""
    torch = find_torch()
    return [sys.prefix, platform.python_version(), None if torch is None else torch["version"]]


def check_tools():
    if not sys.platform.startswith("linux"):
        raise Problem("Penstock runs on Linux (epoll, abstract UNIX sockets, network namespaces).")
    # All that is missing is said at once.
    problems = [*filter(None, [system_tools.install(say), rust_problem()])]
    if problems:
        raise Problem("\n     ".join(problems))


def rust_problem():
    """What is wrong with the Rust toolchain, and the remedy; None if it serves."""
    wanted = re.search(r'rust-version = "([\d.]+)"', (ROOT / "Cargo.toml").read_text()).group(1)
    remedy = f"Install Rust {wanted} or newer with rustup, or `apt-get install cargo` where that is new enough."
    if cargo() is None:
        return f"`cargo` is not on PATH and not in ~/.cargo/bin. {remedy}"
    found = subprocess.run([cargo(), "--version"], stdout=subprocess.PIPE, text=True, env=environment())
    version = re.match(r"cargo (\d+\.\d+)", found.stdout)
    if version is None:
        return f"`{cargo()} --version` does not answer with a version. {remedy}"
    if numbers(version.group(1)) < numbers(wanted):
        return f"`{cargo()}` is {version.group(1)}, which is too old. {remedy}"
    return None


def make_venv(stamp):
    torch = find_torch()
    say(f"making .venv with Python {platform.python_version()} ({sys.executable})")
    STAMP.exists() and STAMP.unlink()
    create_venv()
    say("installing the pinned dependencies (requirements/lock.txt, checked by hash)")
    # --no-deps: the lock is complete but for torch, which is chosen below.
    pip_install("--quiet", "--no-deps", "--require-hashes", "-r", str(LOCK))
    if torch is not None and torch["numbers"] < TORCH_MIN:
        say(f"torch {torch['version']} in {torch['where']} is older than Penstock needs: leaving it alone")
        torch = None
    if torch is not None:
        borrow_torch(torch)
        if torch_imports():
            say(f"using torch {torch['version']} from {torch['where']}")
        else:
            say(f"torch {torch['version']} in {torch['where']} cannot be imported (see above): leaving it alone")
            borrowed_path().unlink()
            torch = None
    if torch is None:
        say(f"installing torch {TORCH_PIN} (this is the long one)")
        pip_install(f"torch=={TORCH_PIN}")
        if not torch_imports():
            raise Problem(f"torch {TORCH_PIN} was installed but cannot be imported (see above).")
    STAMP.write_text(json.dumps(stamp, indent=1))


def make_fronts_venv():
    """An environment with JAX and TensorFlow that also sees all of .venv."""
    make_side_venv(FRONTS_VENV, FRONTS_LOCK, "JAX and TensorFlow", over_venv=True)


def make_frameworks_venv():
    """An environment with the training frameworks of the guide that .venv has no room for; it also sees all of .venv."""
    make_side_venv(FRAMEWORKS_VENV, FRAMEWORKS_LOCK, "transformers and Lightning", over_venv=True)


def make_docs_venv():
    """An environment with what builds the docs site."""
    make_side_venv(DOCS_VENV, DOCS_LOCK, "Sphinx", over_venv=False)


def make_side_venv(folder, lock, what, over_venv):
    stamp = folder / "penstock-setup.json"
    want = {"lock": digest([lock]), "root": str(ROOT), "venv": digest([LOCK]) if over_venv else None}
    if stamp.exists() and stamp.read_text() == json.dumps(want):
        return
    say(f"making {folder.name} with {what} (requirements/{lock.name}, checked by hash)")
    if folder.exists():
        shutil.rmtree(str(folder))
    if run([venv_python(), "-m", "venv", "--without-pip", folder]).returncode != 0:
        raise Problem(f"`{venv_python()} -m venv {folder}` failed (see above).")
    own = next(folder.glob("lib/python*/site-packages"))
    pip_install("--quiet", "--no-deps", "--require-hashes", "--target", str(own), "-r", str(lock))
    if over_venv:
        # addsitedir, not a bare path: .venv has such files of its own, for the package in place and for a borrowed torch.
        packages = next(VENV.glob("lib/python*/site-packages"))
        (own / "venv.pth").write_text(f"import site; site.addsitedir({str(packages)!r})\n")
    stamp.write_text(json.dumps(want))


def create_venv():
    """An empty .venv with a pip that installs into it."""
    if VENV.exists():
        shutil.rmtree(str(VENV))
    bootstrap = importlib.util.find_spec("ensurepip") is not None
    if importlib.util.find_spec("venv") is None or not (bootstrap or importlib.util.find_spec("pip")):
        minor = "{}.{}".format(*sys.version_info[:2])
        raise Problem(
            f"this Python ({sys.executable}) has no `venv` with `ensurepip`, as Debian and Ubuntu split it off: "
            f"`apt-get install python3-venv` (or python{minor}-venv), or run ./dev with another Python."
        )
    command = [sys.executable, "-m", "venv", *([] if bootstrap else ["--without-pip"]), str(VENV)]
    if run(command).returncode != 0:
        raise Problem(f"`{' '.join(command)}` failed (see above).")


def pip(*arguments):
    """Run pip on .venv: its own, or this interpreter's where Debian left `ensurepip` out."""
    if next(VENV.glob("lib/python*/site-packages/pip"), None) is not None:
        command = [venv_python(), "-m", "pip"]
    else:
        command = [sys.executable, "-m", "pip", "--python", str(VENV)]
    command += ["--disable-pip-version-check", "--no-input", *arguments]
    return run(command).returncode == 0


def pip_install(*arguments):
    if not pip("install", *arguments):
        raise Problem(
            "pip could not install (see above). It needs a way to the packages: a network, or a mirror or folder of "
            "wheels that pip's own configuration names."
        )


def find_torch():
    """The torch that this interpreter would import, without importing it: version, numbers, where; or None."""
    from importlib import metadata  # Python 3.8; an older one must get as far as being told that it is too old

    try:
        version = metadata.version("torch")
        origin = importlib.util.find_spec("torch").origin
    except (metadata.PackageNotFoundError, AttributeError):
        return None
    return {"version": version, "numbers": numbers(version), "where": str(Path(origin).parent.parent)}


def borrow_torch(torch):
    """Let .venv see the packages of this interpreter, behind its own: torch, and what torch imports.

    All of its package directories, because torch's dependencies need not lie beside it (user site, Debian's
    dist-packages). Behind, so that what the lock pins wins.
    """
    known = ("site-packages", "dist-packages")
    others = [
        path for path in sys.path if os.path.basename(path) in known or os.path.isdir(os.path.join(path, "torch"))
    ]
    borrowed_path().write_text("".join(f"{path}\n" for path in others))


def borrowed_path():
    return next(VENV.glob("lib/python*/site-packages")) / "borrowed-torch.pth"


def torch_imports():
    return run([venv_python(), "-c", "import torch"]).returncode == 0


def build_penstock():
    """Build the native module in release mode and let .venv see the package in place.

    pip writes the metadata (the `penstock` script, torch's entry point), so it runs only when that may have changed;
    cargo decides what else there is to do.
    """
    sources = [ROOT / name for name in ("pyproject.toml", "Cargo.toml", "crates/penstock-py/Cargo.toml")]
    stamp = read_stamp()
    metadata = digest(sources)
    start = time.monotonic()
    if stamp.get("metadata") != metadata:
        say("building penstock (release); the first time takes a minute or two")
        built = pip("install", "--quiet", "--no-deps", "--no-build-isolation", "--editable", str(ROOT))
    else:
        say("building penstock (release): only what changed")
        command = [venv_python(), "-m", "maturin", "develop", "--release", "--skip-install", "--quiet"]
        built = run(command).returncode == 0
    if not built:
        raise Problem("penstock does not build (see above).")
    STAMP.write_text(json.dumps(dict(stamp, metadata=metadata), indent=1))
    say(f"built in {time.monotonic() - start:.1f} s")


def build_wheel(folder):
    """Build the wheel that users install, and return its path.

    It holds the native module that `build_penstock` has built: cargo finds nothing to do. auditwheel takes out the debug
    information, which developers keep, and names the oldest manylinux policy whose symbols the module keeps to. To serve
    older systems, build where manylinux_2_28's glibc is. *Why not maturin's own check, which knows the same policies?* It
    strips by compiling everything again, for a minute.
    """
    with tempfile.TemporaryDirectory() as built, tempfile.TemporaryDirectory() as repaired:
        maturin = ["-m", "maturin", "build", "--release", "--locked", "--auditwheel=skip", "--quiet", "--out", built]
        if run([venv_python(), *maturin]).returncode != 0:
            raise Problem("the wheel does not build (see above).")
        [wheel] = Path(built).glob("*.whl")
        auditwheel = ["-m", "auditwheel", "repair", "--strip", "--wheel-dir", repaired, wheel]
        if run([venv_python(), *auditwheel]).returncode != 0:
            raise Problem("auditwheel cannot make a wheel for other machines of it (see above).")
        [wheel] = Path(repaired).glob("*.whl")
        folder.mkdir(parents=True, exist_ok=True)
        return Path(shutil.copy(str(wheel), str(folder)))


def read_stamp():
    """What .venv was made from; None when there is none that works."""
    if not venv_python().exists():
        return None
    try:
        return json.loads(STAMP.read_text())
    except (OSError, ValueError):
        return None
