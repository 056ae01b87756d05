"""Proves that the wheel is what a user needs and no more: stripped, for any Python and most distributions, complete where no Rust
is, and clear about what an extra would bring."""

from __future__ import annotations

import importlib.util
import io
import os
import pathlib
import platform
import re
import shutil
import subprocess
import sys
import zipfile
from importlib import metadata

import pytest
from elftools.elf.elffile import ELFFile
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import penstock
import test_house
from conftest import ROOT

# ------------------------------------------------------------------------------------------------------- what is in it


def test_wheel_holds_what_users_need_and_no_more(wheel: pathlib.Path) -> None:
    """One module for every Python from 3.10 on, types, licence, the demo's text; no tests, no sources of Rust, no caches."""
    assert re.fullmatch(rf"penstock-[\d.]+-cp310-abi3-manylinux_2_\d+_{platform.machine()}\.whl", wheel.name)
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if not name.endswith("/")}
    tracked = test_house.tracked_names(ROOT, "python")
    assert {name.removeprefix("python/") for name in tracked} <= names
    assert "penstock/cluster/cluster.schema.json" in names  # the documents send editors there
    others = {name for name in names - {name.removeprefix("python/") for name in tracked} if ".dist-info/" not in name}
    assert others == {"penstock/_core.abi3.so"}
    assert [name for name in names if name.endswith(".dist-info/licenses/LICENSE")]


def test_module_is_stripped(wheel: pathlib.Path) -> None:
    """Debug information and the table of symbols were most of the module; what the loader needs is left."""
    with zipfile.ZipFile(wheel) as archive:
        module = ELFFile(io.BytesIO(archive.read("penstock/_core.abi3.so")))
    sections = {section.name for section in module.iter_sections()}
    assert ".dynsym" in sections
    assert not {name for name in sections if name.startswith(".debug") or name == ".symtab"}


@pytest.mark.parametrize(
    "line", re.findall(r"^pip install .*?(?=  +#|$)", (ROOT / "README.md").read_text(), re.MULTILINE)
)
def test_lines_of_the_readme_install_the_wheel(
    line: str, wheel: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a clone that ./dev has set up, which leaves an editable wheel, and that has built a wheel of an older version."""
    dev = test_house.load_dev(ROOT)
    monkeypatch.setattr(dev, "WHEELS", tmp_path / dev.WHEELS.relative_to(ROOT))
    monkeypatch.setattr(dev, "setup", lambda: None)
    monkeypatch.setattr(dev, "build_wheel", lambda folder: pathlib.Path(shutil.copy(wheel, folder)))
    name = f"penstock-{penstock.__version__}-cp310-abi3-linux_{platform.machine()}.whl"
    editable = tmp_path / "target" / "wheels" / name
    for left in (editable, dev.WHEELS / wheel.name.replace(penstock.__version__, "0.0.9")):
        left.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(wheel, left)
    assert dev.command_wheel([]) == 0

    programs = tmp_path / "programs"
    programs.mkdir()
    (programs / "pip").write_text(f'#!/bin/sh\nexec {with_pip()} -m pip "$@"\n')
    (programs / "pip").chmod(0o755)
    env = dict(os.environ, PATH=f"{programs}:{os.environ['PATH']}", PIP_DISABLE_PIP_VERSION_CHECK="1")
    env |= {"PIP_DRY_RUN": "1", "PIP_NO_DEPS": "1", "PIP_NO_INDEX": "1", "PIP_FORCE_REINSTALL": "1"}
    done = subprocess.run(["sh", "-c", line], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"Would install penstock-{penstock.__version__}" in done.stdout


# ------------------------------------------------------------------------------------- where nothing else is installed


def test_trains_where_only_what_it_declares_is_installed(environment: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """Two ranks train under torchrun, with no compiler on PATH and no extra installed; the tuner, which lacks scipy, says so on
    every rank."""
    script = tmp_path / "train.py"
    script.write_text(TRAIN)
    done = execute(environment, tmp_path, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", script)
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(line for line in done.stdout.splitlines() if line.startswith("rank")) == [
        f"rank {rank}: {told}"
        for rank in range(2)
        for told in (
            "tune: a tuner needs scipy: pip install 'penstock[tune]'",
            "weights agree: True, the loss fell: True",
        )
    ]


TRAIN = """
import importlib.util, os, pathlib, shutil, sys
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
import penstock.torch
from penstock.errors import Config

assert pathlib.Path(penstock.__file__).is_relative_to(sys.prefix)
assert not any(map(importlib.util.find_spec, ("libcst", "matplotlib", "scipy")))
assert not any(map(shutil.which, ("cargo", "rustc", "cc")))
dist.init_process_group("penstock")
rank = dist.get_rank()

def tell(text):
    os.write(1, f"rank {rank}: {text}\\n".encode())  # one write: print may make two of it, and the other rank's come between

torch.manual_seed(rank)
model = DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x = torch.randn(64, 4)
losses = []
for _ in range(10):
    optimizer.zero_grad()
    loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
weights = [torch.empty_like(model.module.weight) for _ in range(2)]
dist.all_gather(weights, model.module.weight.detach())
tell(f"weights agree: {torch.equal(*weights)}, the loss fell: {losses[-1] < losses[0]}")
os.environ["PENSTOCK_TUNE"] = "1"
try:
    penstock.torch.ddp_hook(model)
except Config as error:
    tell(error)
dist.destroy_process_group()
"""


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ("convert train.py", "penstock convert needs libcst: pip install 'penstock[convert]'"),
        ("run train.py", "penstock run needs libcst: pip install 'penstock[convert]'"),
        ("demo", "penstock demo needs matplotlib and scipy: pip install 'penstock[report,tune]'"),
        ("demo --backends gloo", "penstock demo needs matplotlib: pip install 'penstock[report]'"),
        ("bench all-reduce --plot out.svg", "penstock bench --plot needs matplotlib: pip install 'penstock[report]'"),
        (
            "profile --html page.html train.py",
            "penstock profile --html needs matplotlib: pip install 'penstock[report]'",
        ),
        (
            "characterize --html page.html train.py",
            "penstock characterize --html needs matplotlib: pip install 'penstock[report]'",
        ),
        (
            "plan explain --report page.html deployment.yaml",
            "penstock plan explain --report needs matplotlib: pip install 'penstock[report]'",
        ),
        ("bench tuner", "penstock bench tuner needs scipy: pip install 'penstock[tune]'"),
    ],
)
def test_command_names_the_extra_that_it_lacks(
    environment: pathlib.Path, tmp_path: pathlib.Path, arguments: str, told: str
) -> None:
    """One line and exit code 2, before anything is done."""
    (tmp_path / "train.py").write_text("print(1)\n")
    done = execute(environment, tmp_path, "-m", "penstock", *arguments.split())
    assert (done.returncode, done.stdout, done.stderr) == (2, "", f"{told}\n")
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]


def test_help_and_info_need_no_extra(environment: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """What a command would do can be read before its extra is installed, and `penstock info` lists what is there."""
    for verb in ("convert", "run", "demo", "bench"):
        done = execute(environment, tmp_path, "-m", "penstock", verb, "--help")
        assert done.returncode == 0 and not done.stderr, done.stderr
    done = execute(environment, tmp_path, "-m", "penstock", "info")
    assert done.returncode == 0, done.stderr
    assert re.search(r"^ *extras +none; not installed: convert, report, tune *$", done.stdout, re.MULTILINE), (
        done.stdout
    )


# ----------------------------------------------------------------------------------------------------------- helpers


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """The wheel of ./dev wheel, made of the native module that ./dev has built for this session."""
    return test_house.load_dev(ROOT).build_wheel(tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="session")
def environment(wheel: pathlib.Path, tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """An environment with the wheel and, by links to the packages of this one, what it declares: nothing is downloaded, and what
    is not declared is not there."""
    folder = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    install = ["install", "--quiet", "--no-deps", "--no-index", "--no-cache-dir", "--disable-pip-version-check"]
    subprocess.run([with_pip(), "-m", "pip", "--python", folder / "bin" / "python", *install, wheel], check=True)
    packages = next(folder.glob("lib/python*/site-packages"))
    [penstock] = metadata.distributions(path=[str(packages)])
    for distribution in needed(penstock):
        for name in {file.parts[0] for file in distribution.files or []} - {"..", "__pycache__"}:
            if not (packages / name).exists():
                (packages / name).symlink_to(distribution.locate_file(name))
    return folder


def with_pip() -> str:
    """An interpreter that has pip. Where Debian split ensurepip off, ./dev installs with that behind .venv, and so do these."""
    return sys.executable if importlib.util.find_spec("pip") else sys._base_executable


def needed(distribution: metadata.Distribution) -> list[metadata.Distribution]:
    """What `pip install` would bring with a distribution: its requirements without extras, and theirs."""
    found: dict[str, metadata.Distribution] = {}
    todo = [(Requirement(line), {""}) for line in distribution.requires or []]
    while todo:
        requirement, extras = todo.pop()
        name = canonicalize_name(requirement.name)
        if name in found or not any(
            requirement.marker is None or requirement.marker.evaluate({"extra": extra}) for extra in extras
        ):
            continue
        found[name] = metadata.distribution(name)
        todo += [(Requirement(line), {"", *requirement.extras}) for line in found[name].requires or []]
    return list(found.values())


def execute(
    environment: pathlib.Path, folder: pathlib.Path, *arguments: str | pathlib.Path
) -> subprocess.CompletedProcess[str]:
    """Run the environment's Python in `folder`, where nothing of the checkout or of this session can be found."""
    env = {"PATH": str(environment / "bin"), "HOME": str(folder), "PYTHONNOUSERSITE": "1", "OMP_NUM_THREADS": "1"}
    env["PYTHONDONTWRITEBYTECODE"] = "1"
    return subprocess.run(
        [environment / "bin" / "python", *arguments], cwd=folder, env=env, capture_output=True, text=True, timeout=120
    )
