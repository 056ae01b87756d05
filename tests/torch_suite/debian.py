"""torch's tests from Debian's source package of pytorch, on gloo and on Penstock, compared test by test.

    python -m tests.torch_suite --debian                             every test that makes a group of gloo
    python -m tests.torch_suite --debian --only 'checkpoint/.*save'  those whose FILE::CLASS.TEST match a regular expression

torch's wheel holds few of torch's tests. Debian's source package has them all, and apt checks its signature. The package's
release is older than the torch that is installed, so some tests fail with gloo, too: what passes on gloo must pass on Penstock.
Nothing of torch's code is copied or changed; `debian_file` gives each test Penstock where it names gloo.
"""

from __future__ import annotations

import json
import os
import pathlib
import queue
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch_suite import HERE, MARK, TIMEOUT_S, Outcome, Outcomes

FOLDER = HERE.parent.parent / "target" / "debian-pytorch"


class Unavailable(Exception):
    """The package cannot be fetched here; the message says why."""


def compare(
    tests: pathlib.Path, only: str = "", say: Callable[[str], object] = print, jobs: int | None = None
) -> tuple[Outcomes, Outcomes]:
    """Run the tests of PARTS on gloo, and then on Penstock those that gloo passes with a group of its own.

    Args:
        tests: the folder that `fetch` returns.
        only: a regular expression; it is searched in FILE::CLASS.TEST.
        jobs: files at a time. What then fails on Penstock runs again by itself, and only that counts.

    Returns: the outcomes with gloo and with Penstock, by name. Tests that make no group of gloo are left out.
    """
    files: queue.SimpleQueue[str] = queue.SimpleQueue()
    for file in sorted({path for part in PARTS for path in tests.glob(part)}, key=lambda path: -path.stat().st_size):
        files.put(str(file.relative_to(tests)))
    gloo: Outcomes = {}
    penstock: Outcomes = {}

    def work() -> None:
        with Runner("gloo", tests, only, say) as on_gloo, Runner("penstock", tests, only, say) as on_penstock:
            while not files.empty():
                try:
                    file = files.get_nowait()
                except queue.Empty:
                    return
                found = {name: outcome for name, outcome in on_gloo.run(file).items() if outcome.used}
                gloo.update(found)
                passed = [name for name, outcome in found.items() if outcome.how == "passed"]
                penstock.update(on_penstock.run(file, passed) if passed else {})

    threads = [threading.Thread(target=work) for _ in range(jobs or os.cpu_count() or 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    again = [name for name, outcome in penstock.items() if outcome.how != "passed"]
    with Runner("penstock", tests, only, say) as alone:
        for name in again:
            penstock.update(alone.run(name.partition("::")[0], [name]))
    return gloo, penstock


class Runner:
    """A process that has imported torch, and runs files of tests on one backend in forks of itself."""

    def __init__(self, backend: str, tests: pathlib.Path, only: str, say: Callable[[str], object]) -> None:
        self._backend, self._say = backend, say
        self._scratch = tempfile.TemporaryDirectory()
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join([str(HERE.parent), *filter(None, [os.environ.get("PYTHONPATH")])]),
            "PYTHONDONTWRITEBYTECODE": "1",
            "DISTRIBUTED_TESTS_DEFAULT_TIMEOUT": str(TIMEOUT_S),
            "OMP_NUM_THREADS": "1",
            # Compiled code, and whatever tests leave behind.
            "TORCHINDUCTOR_CACHE_DIR": os.path.join(self._scratch.name, "inductor"),
            "TMPDIR": self._scratch.name,
        }
        command = [sys.executable, "-m", "torch_suite.debian_file", backend, str(tests), only]
        self._process = subprocess.Popen(
            command,
            env=environment,
            cwd=self._scratch.name,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def __enter__(self) -> Runner:
        return self

    def __exit__(self, *_: object) -> None:
        with self._process as process:
            assert process.stdin is not None
            process.stdin.close()
            process.wait()
        self._scratch.cleanup()

    def run(self, file: str, names: Iterable[str] = ()) -> Outcomes:
        """Run a file's tests, or only those with the given names. Blocks until they have ended."""
        assert self._process.stdin is not None
        print(json.dumps([file, *names]), file=self._process.stdin, flush=True)
        outcomes: Outcomes = {}
        for name, *rest in self._lines():
            outcomes[name] = outcome = Outcome(*rest)
            if outcome.used:
                self._say(f"{self._backend:8} {outcome.how:7} {outcome.seconds:6.1f} s  {name}")
        return outcomes

    def _lines(self) -> Iterator[list[Any]]:
        """What the process says of one file."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(MARK):
                told = json.loads(line.removeprefix(MARK))
                if not told:
                    return
                yield told
        raise RuntimeError(f"the runner on {self._backend} has ended with code {self._process.wait()}")


def fetch(folder: pathlib.Path = FOLDER) -> pathlib.Path:
    """torch's folder test/distributed from Debian's source package: fetched into ``folder`` unless it is there.

    apt reads a list of sources and writes to folders of this call's own, so that the machine's stay as they are.

    Raises: Unavailable.
    """
    if folder.exists():
        return folder
    if shutil.which("apt-get") is None:
        raise Unavailable("Debian's source packages are fetched with apt-get, which is not here")
    reasons = []
    for mirror in mirrors():
        with tempfile.TemporaryDirectory() as scratch:
            try:
                source = download(mirror, pathlib.Path(scratch))
            except Unavailable as reason:
                reasons.append(str(reason))
                continue
            unpack(source, folder)
            return folder
    raise Unavailable("; ".join(reasons) or "apt's sources name no mirror of Debian")


def mirrors() -> list[str]:
    """The addresses of Debian's archive in apt's own sources. An origin is unknown before the first `apt-get update`."""
    command = ["apt-get", "indextargets", "--format", "$(REPO_URI) $(RELEASE) $(ORIGIN)", "Created-By: Packages"]
    told = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    lines = [line.split() for line in told.splitlines()]
    # The parts of a release that have a dash in their names are updates, and those for security lie elsewhere.
    found = [uri for uri, release, *origin in lines if "-" not in release and origin in ([], ["Debian"])]
    return list(dict.fromkeys(found))


def download(mirror: str, scratch: pathlib.Path) -> pathlib.Path:
    """The archive of upstream's sources."""
    for name in ("lists/partial", "cache/archives/partial", "source"):
        (scratch / name).mkdir(parents=True)
    signed = f"[signed-by={KEYRING}] " if KEYRING.exists() else ""
    (scratch / "sources.list").write_text(f"deb-src {signed}{mirror} {RELEASE} main\n")
    settings = {
        "Dir::Etc::sourcelist": scratch / "sources.list",
        "Dir::Etc::sourceparts": "/dev/null",
        "Dir::State::lists": scratch / "lists",
        "Dir::Cache": scratch / "cache",
        # Root's apt would become a user who may not write here.
        "APT::Sandbox::User": "root",
        "Acquire::Retries": 1,
        "Acquire::http::Timeout": 20,
        "Acquire::https::Timeout": 20,
    }
    options = [part for name, value in settings.items() for part in ("-o", f"{name}={value}")]
    for command in (["update"], ["source", "--download-only", "pytorch"]):
        done = subprocess.run(
            ["apt-get", "-q", *options, *command], cwd=scratch / "source", capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise Unavailable(f"`apt-get {' '.join(command)}` failed: {' '.join(done.stderr.split())}")
    return next((scratch / "source").glob("pytorch_*.orig.tar.*"))


def unpack(archive: pathlib.Path, folder: pathlib.Path) -> None:
    """Write the Python files of test/distributed to ``folder``, all or none of them."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = pathlib.Path(tempfile.mkdtemp(dir=folder.parent))
    partial.chmod(0o755)
    with tarfile.open(archive) as tar:
        for member in tar:
            match = re.fullmatch(r"[^/]+/test/distributed/((?:\w+/)*\w+\.py)", member.name)
            file = tar.extractfile(member) if match else None
            if match and file:
                path = partial / match.group(1)
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(file.read())
    partial.rename(folder)


RELEASE = "trixie"
"""The release of Debian whose pytorch is 2.6."""
KEYRING = pathlib.Path("/usr/share/keyrings/debian-archive-keyring.gpg")
PARTS = (
    "_composable/test_replicate.py",
    "_tensor/**/test_*.py",
    "algorithms/test_join.py",
    "checkpoint/**/test_*.py",
    "optim/test_zero_redundancy_optimizer.py",
    "pipelining/test_*.py",
    "tensor/parallel/test_*.py",
    "test_c10d_object_collectives.py",
    "test_c10d_spawn_gloo.py",
    "test_collective_utils.py",
    "test_device_mesh.py",
    "test_functional_api.py",
)
"""Functional and object collectives, device meshes, DTensor, replicated modules, checkpoints and pipelining. The files of FSDP2
make no group of gloo on a machine without a GPU."""
