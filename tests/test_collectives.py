"""Proves that every collective gives right results: all ranks, sizes, dtypes, operations and roots of a grid.

The programs are in ``tests/collectives``; TEST_BACKENDS selects the backends (see ``tests/backends.py``).
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import ranks
from backends import ALL, BACKENDS, Backend
from collectives import layouts, programs
from penstock.torch import sparse

# Programs that gloo cannot run, and why. Of the others' grids it runs the part that it knows.
NOT_WITH_GLOO = {
    programs.extremes_of_special_values: "its MIN and MAX of NaN depend on the order of ranks",
    programs.all_reduce_refuses: "it does not refuse all that is undefined",
    programs.all_gather_stacked: "it wants an output of the input's shape",
    programs.all_gather_uneven: "it wants tensors of one size",
    programs.all_to_all: "torch 2.11's gloo does not know it, and newer ones want tensors of one size",
}

PROGRAMS = [
    programs.all_reduce,
    programs.sums_of_special_values,
    programs.extremes_of_special_values,
    programs.all_reduce_refuses,
    programs.all_reduce_coalesced,
    programs.reduce,
    programs.reduce_scatter,
    programs.reduce_scatter_uneven,
    programs.all_gather,
    programs.all_gather_stacked,
    programs.all_gather_uneven,
    programs.broadcast,
    programs.gather,
    programs.scatter,
    programs.all_to_all_single,
    programs.all_to_all,
    programs.send_and_recv,
]

GRID = [
    (program, count, backend)
    for backend in BACKENDS
    for program in PROGRAMS
    for count in (1, 2, 3, 4)
    if not (backend.name == "gloo" and program in NOT_WITH_GLOO)
    and not (count == 1 and backend.env)  # a rank that is alone has no transport to choose
]


@pytest.mark.parametrize(
    ("program", "count", "backend"),
    GRID,
    ids=[f"{backend.label}-{program.__name__}-{count}" for program, count, backend in GRID],
)
def test_collective(program: Callable[[str], object], count: int, backend: Backend) -> None:
    """Every result of the grid is right, and the results that all ranks get have the same bits everywhere."""
    _run(program, count, backend, (backend.name,))


@pytest.mark.parametrize("backend", BACKENDS, ids=str)
@pytest.mark.parametrize("seed", range(4))
def test_sequence(seed: int, backend: Backend) -> None:
    """Random sequences of collectives, many in flight, give right results; the seed is in the test's name."""
    _run(programs.sequence, 2 + seed % 3, backend, (backend.name, seed))


@pytest.mark.parametrize("backend", [one for one in BACKENDS if one.name == "penstock"], ids=str)
def test_layouts(backend: Backend) -> None:
    """Tensors that lie in memory in any way give right results or are refused by all ranks, and then nothing was sent."""
    _run(layouts.any_layout, 3, backend, (backend.name, 0, 300))


@pytest.mark.parametrize("backend", [one for one in BACKENDS if one.name == "penstock"], ids=str)
def test_different_layouts(backend: Backend) -> None:
    """Tensors that lie in memory otherwise on other ranks give right results, or a mismatch on all ranks."""
    _run(layouts.different_layouts, 3, backend, (backend.name, 0, 60))


@pytest.mark.parametrize("backend", BACKENDS, ids=str)
def test_shared_memory(backend: Backend) -> None:
    """Inputs and outputs of a call may be views of one tensor, in any places."""
    _run(layouts.shared_memory, 3, backend, (backend.name, 5, 60))


def test_lazy_views() -> None:
    """Lazy conjugates and negatives are read as such or refused, by every call and in inference mode too."""
    ranks.run(layouts.lazy_views, count=2, args=("penstock",))


def test_refused_together() -> None:
    """A call with several tensors, one of which cannot be sent, sends none of them."""
    _run(layouts.refused_together, 2, ALL["penstock"], ("penstock",))


def test_memory_of_the_call() -> None:
    """A batch sends from and receives into the memory that its calls have checked, whatever their tensors refer to since."""
    ranks.run(layouts.memory_of_the_call, count=2, args=("penstock",))


def test_arrays_in_any_order() -> None:
    """What goes through NumPy's arrays is numbers, in whatever order their bytes are; objects are refused."""
    ranks.run(layouts.arrays_in_any_order, count=2)


@pytest.mark.parametrize("ranks_there", [2, 128, 256, 300])
@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int64, torch.float32])
def test_sparse_averages(dtype: torch.dtype, ranks_there: int) -> None:
    """Integers truncate towards zero, also where their dtype has no such number of ranks."""
    sums = torch.tensor([100, 1, -100 if dtype.is_signed else 200], dtype=dtype)
    total = torch.sparse_coo_tensor(torch.tensor([[0, 2, 5]]), sums, (6,)).coalesce()
    exact = sums.double() / ranks_there
    wanted = exact.to(dtype) if dtype.is_floating_point else exact.trunc().to(dtype)
    found = sparse._divided(total, ranks_there)
    assert found.dtype is dtype and torch.equal(found.values(), wanted)


def _run(program: Callable[..., object], count: int, backend: Backend, args: tuple[object, ...]) -> None:
    values = ranks.run(program, count=count, args=args, env=backend.env, timeout_s=120)
    assert all(value == values[0] for value in values), "ranks hold different bits"
