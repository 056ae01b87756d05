"""What holds for every Python test: settings of the machine that runs the tests do not leak into them."""

from __future__ import annotations

import compileall
import contextlib
import faulthandler
import os
import pathlib
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

import corpus  # noqa: F401  (reads PENSTOCK_CORPUS, which is no setting of Penstock, before it is removed with those)

ROOT = pathlib.Path(__file__).resolve().parent.parent


@pytest.fixture
def root() -> pathlib.Path:
    """The checkout."""
    return ROOT


@pytest.fixture
def forks(monkeypatch: pytest.MonkeyPatch) -> None:
    """What tools start with this interpreter in this process, on a testbed's hosts as well, are forks (`forked`)."""
    # Not above: they import Penstock, which reads the environment that `pytest_configure` cleans first.
    import forked
    import ranks

    ranks.fork_server()  # as in `_fork_server`, also for a file that does not import `ranks`
    monkeypatch.setattr(subprocess, "Popen", forked.Popen)


@pytest.fixture(scope="module")
def window() -> Iterator[Any]:
    """A real browser."""
    import browser

    program = browser.program()
    if program is None:
        pytest.skip(f"no browser here to draw pages with (looked for {', '.join(browser.NAMES)})")
    window = browser.Browser(program)
    yield window
    window.close()


@pytest.fixture(autouse=True, scope="session")
def _fork_server() -> None:
    """The server of forks starts before a test enters an emulated host: with that host its keeper would end the server, too."""
    if "ranks" in sys.modules:
        sys.modules["ranks"].fork_server()


def pytest_configure() -> None:
    # Before any test imports torch or Penstock, and inherited by every rank: a user's own settings, or the job that a
    # scheduler started this session in, would decide interfaces, world sizes and time limits here.
    for name in list(os.environ):
        if name.startswith("PENSTOCK_") or name in _LAUNCHER or name.endswith("_SOCKET_IFNAME"):
            del os.environ[name]
    os.environ["MPLBACKEND"] = "Agg"
    # Threads of OpenMP spin when they have nothing to do, and take the processors from the tests beside them.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    # torch's store looks up the name of every client's address, ::ffff:127.0.0.1 too, while all other clients wait: where no name
    # server answers, glibc waits 5 s, twice. (1 of 23 groups took 5 s to make here.)
    os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")
    # Where PYTHONDONTWRITEBYTECODE is set, each process that runs tests would take 4 s of processor time to rewrite the tests'
    # asserts (pytest keeps what it has written), and every rank and command half of its start to compile our modules.
    sys.dont_write_bytecode = False
    if "PYTEST_XDIST_WORKER" not in os.environ:
        for folder in ("python", "tests"):
            compileall.compile_dir(ROOT / folder, quiet=2)


def pytest_ignore_collect(collection_path: pathlib.Path, config: pytest.Config) -> bool | None:
    """A file without a test of those that are asked for is not imported to find that out: it took each process seconds, in the
    stage of timed tests and in `./dev test quick`."""
    wanted = config.getoption("markexpr")
    if "not slow" in wanted and collection_path.stem in _SLOW:
        return True
    if (
        wanted.startswith("timed")
        and collection_path.suffix == ".py"
        and "mark.timed" not in collection_path.read_text()
    ):
        return True
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.stem in _SLOW:
            item.add_marker(pytest.mark.slow)


@pytest.hookimpl(trylast=True)
def pytest_exception_interact(node: pytest.Item | pytest.Collector) -> None:
    """A test that has failed has no time limit any more, as if somebody looked at it in a debugger: give its clean-up one."""
    if isinstance(node, pytest.Item) and not node.config.getoption("usepdb"):
        faulthandler.dump_traceback_later(_CLEAN_UP_S, exit=True, file=sys.__stderr__)


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call() -> Iterator[object]:
    with _skipped_without_hosts():
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup() -> Iterator[object]:
    with _skipped_without_hosts():
        return (yield)


@contextlib.contextmanager
def _skipped_without_hosts() -> Iterator[None]:
    """A test that needs emulated hosts is skipped, with the reason, where there can be none."""
    # Not above: importing Penstock reads the environment, which `pytest_configure` cleans first.
    from penstock.tools.testbed import TestbedUnavailable

    try:
        yield
    except TestbedUnavailable as reason:
        pytest.skip(f"no emulated hosts here: {reason}")


_CLEAN_UP_S = 60

# Whole jobs, commands and testbeds: `./dev test quick` leaves these files out. Each took 25 s or more on two cores.
_SLOW = {
    "test_aggregated",
    "test_aggregated_faults",
    "test_bench",
    "test_bench_aggregated",
    "test_collectives",
    "test_compression",
    "test_convert",
    "test_deferral",
    "test_demo",
    "test_diagnosis",
    "test_elastic",
    "test_endpoint",
    "test_endpoint_server",
    "test_fault_matrix",
    "test_faults",
    "test_flight",
    "test_frameworks",
    "test_horovod",
    "test_links",
    "test_live",
    "test_p4_live",
    "test_planning_changes",
    "test_planning_networks",
    "test_planning_watch",
    "test_point_to_point",
    "test_random_programs",
    "test_reports",
    "test_testbed",
    "test_testbed_racks",
    "test_testbed_routes",
    "test_torch_suite",
    "test_torch_uses",
    "test_tune",
    "test_tuning",
    "test_wheel",
}

# What torchrun exports to a rank.
_LAUNCHER = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "GROUP_RANK"}
