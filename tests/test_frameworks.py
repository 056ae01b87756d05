"""Proves that the scripts of docs/guide/frameworks.md run as they stand there, each where its framework is installed: some in
.venv, all in .venv-frameworks, which `./dev test all` makes."""

from __future__ import annotations

import importlib.util
import os
import pathlib
import re

import pytest

import forked

PAGE = pathlib.Path(__file__).parent.parent / "docs" / "guide" / "frameworks.md"
# What a block is called is the package that it needs; the Trainer's is of another name.
SCRIPTS = re.findall(r"^```python (\w+)\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
PACKAGES = {"trainer": ["transformers", "accelerate"]}
# The page names a file for each, in the order of the scripts.
FILES = re.findall(r"^torchrun --nproc-per-node 2 (\S+\.py)$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)


@pytest.mark.parametrize(("name", "script"), SCRIPTS, ids=[name for name, _ in SCRIPTS])
def test_the_script_of_the_page_trains(name: str, script: str, tmp_path: pathlib.Path) -> None:
    """Two ranks under torchrun, over Penstock, to the end. What the script asserts of its backend holds."""
    for package in PACKAGES.get(name, [name]):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed: `./dev test all` runs this script, in .venv-frameworks")
    path = tmp_path / FILES[[name for name, _ in SCRIPTS].index(name)]
    path.write_text(script, encoding="utf-8")
    command = [*forked.TORCHRUN, "--nproc-per-node=2", str(path)]
    env = {**os.environ, "PENSTOCK_LOG": "info", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = forked.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("final loss") == 2, done.stdout
    assert re.search(r"group \S+: 2 ranks on 1 host name", done.stderr), done.stderr


def test_the_page_has_a_script_for_each_framework() -> None:
    assert [name for name, _ in SCRIPTS] == ["trainer", "accelerate", "lightning", "lightning_fabric", "torch"]
    assert len(FILES) == len(SCRIPTS)


def test_transformers_refuses_the_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the page says of ``ddp_backend`` holds of the release that is installed."""
    transformers = pytest.importorskip("transformers", reason="`./dev test all` has it, in .venv-frameworks")
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match="penstock is not available"):
        transformers.TrainingArguments(output_dir="out", use_cpu=True, ddp_backend="penstock")
