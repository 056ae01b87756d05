"""Proves that what people do with torch.distributed works, and gives right numbers, on each backend.

The programs are in ``tests/torch_uses``. By default they run with "penstock"; TEST_BACKENDS=gloo,penstock runs them
with gloo too, which shows that a failing program, and not Penstock, would be to blame.
"""

from __future__ import annotations

import pytest
import torch

import ranks
import torch_uses
from backends import BACKENDS, Backend

USES = torch_uses.all_uses()
# What torch builds on the operations that the other modules and test_collectives.py use, and asks nothing else of a backend: one
# transport of each backend carries it as any other does.
ABOVE = {"dtensors", "functional", "state", "frameworks"}
ONE_OF_EACH = list({backend.name: backend for backend in reversed(BACKENDS)}.values())
COLLECTED = [
    (use, backend)
    for backend in BACKENDS
    for use in USES
    if use.obstacle(backend.name) is None
    and (backend in ONE_OF_EACH or use.program.__module__.rpartition(".")[2] not in ABOVE)
]
NOT_COLLECTED = [
    (use, backend, use.obstacle(backend.name)) for backend in BACKENDS for use in USES if use.obstacle(backend.name)
]

# Torch's own gloo cannot run two of these: DDP under DETAIL crashes in torch's logger (SIGSEGV, torch 2.11 and 2.15), and
# under the wrapper it has no coalesced all-gather (torch 2.11).
DETAIL = [
    (use, backend)
    for use, backend in COLLECTED
    if backend in ONE_OF_EACH
    and use.name
    in {
        "basics.all_reduce",
        "basics.in_flight_out_of_order",
        "basics.objects",
        "basics.destroy_and_start_again",
        "data_parallel.plain",
        "sharded.training",
        "groups.mesh_of_two_dimensions",
        "point_to_point.batch",
    }
    and not (backend.name == "gloo" and use.name in {"data_parallel.plain", "sharded.training"})
]


@pytest.fixture(scope="module", autouse=True)
def _say_what_is_not_collected(request: pytest.FixtureRequest) -> None:
    reporter = request.config.pluginmanager.get_plugin("terminalreporter")
    for use, backend, reason in NOT_COLLECTED:
        reporter.write_line(f"not collected with torch {torch.__version__} and {backend.label}: {use.name}: {reason}")


@pytest.mark.parametrize(
    ("use", "backend"), COLLECTED, ids=[f"{backend.label}-{use.name}" for use, backend in COLLECTED]
)
def test_use(use: torch_uses.Use, backend: Backend, tmp_path: object) -> None:
    """The program's own checks hold on every rank, and all ranks return the same."""
    values = ranks.run(
        use.program,
        count=use.ranks,
        args=(backend.name,),
        env={**backend.env, **use.env, "SHARED_FOLDER": str(tmp_path)},
        timeout_s=use.timeout_s,
    )
    assert all(value == values[0] for value in values), f"ranks returned different results: {values}"


@pytest.mark.parametrize(("use", "backend"), DETAIL, ids=[f"{backend.label}-{use.name}" for use, backend in DETAIL])
def test_use_in_detail_mode(use: torch_uses.Use, backend: Backend, tmp_path: object) -> None:
    """TORCH_DISTRIBUTED_DEBUG=DETAIL wraps the group in torch's own checks; the programs work there too."""
    values = ranks.run(
        use.program,
        count=use.ranks,
        args=(backend.name,),
        env={**backend.env, **use.env, "SHARED_FOLDER": str(tmp_path), "TORCH_DISTRIBUTED_DEBUG": "DETAIL"},
        timeout_s=use.timeout_s,
    )
    assert all(value == values[0] for value in values), f"ranks returned different results: {values}"
