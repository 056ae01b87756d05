"""What people do with torch.distributed, as small programs that a backend must carry.

Each program is a function that runs on every rank of a fresh job, calls ``init_process_group(backend)`` like any script,
checks its numbers against a result computed without communication, and returns what must be the same on all ranks (bits of
parameters, gathered objects); ``tests/test_torch_uses.py`` holds these returns against each other. The programs take the
backend's name, so "gloo" shows that a program is right and "penstock" that Penstock is.

Which torch and which backend a program needs stands in its decorator; what is not collected for that reason is printed at
the start of the run, and ``python -m torch_uses`` (in ``tests/``) prints the whole list. In short: everything from torch 2.11
on, but monitored_barrier on a backend written in Python from 2.14, and split_group and get_backend_impl from 2.15.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import hashlib
import importlib
import os
import pathlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist

MODULES = [
    "basics",
    "point_to_point",
    "groups",
    "data_parallel",
    "sharded",
    "dtensors",
    "functional",
    "state",
    "frameworks",
]


@dataclasses.dataclass(frozen=True)
class Use:
    """A program, and where it can run."""

    program: Callable[[str], Any]
    ranks: int
    since: tuple[int, int]
    without: Mapping[str, str]
    env: Mapping[str, str]
    timeout_s: float

    @property
    def name(self) -> str:
        return f"{self.program.__module__.rpartition('.')[2]}.{self.program.__name__}"

    @property
    def purpose(self) -> str:
        return (self.program.__doc__ or "").strip().splitlines()[0]

    def obstacle(self, backend: str) -> str | None:
        """Why this program cannot run with this torch and `backend`; None if it can."""
        if _torch_version() < self.since:
            return "needs torch {}.{} or newer".format(*self.since)
        return self.without.get(backend)


def use(
    *,
    ranks: int = 2,
    since: tuple[int, int] = (2, 11),
    without: Mapping[str, str] | None = None,
    env: Mapping[str, str] | None = None,
    timeout_s: float = 60,
) -> Callable[[Callable[[str], Any]], Callable[[str], Any]]:
    """Enter a program into the list.

    Args:
        since: the oldest torch release that can run it.
        without: for a backend that cannot run it, why not.
    """

    def enter(program: Callable[[str], Any]) -> Callable[[str], Any]:
        _uses.append(Use(program, ranks, since, without or {}, env or {}, timeout_s))
        return program

    return enter


def all_uses() -> list[Use]:
    for module in MODULES:
        importlib.import_module(f"torch_uses.{module}")
    return list(_uses)


# ---------------------------------------------------------------------------------------------------------------------
# What the programs share.


@contextlib.contextmanager
def world(backend: str, **options: Any) -> Iterator[tuple[int, int]]:
    """Hold the default group while the block runs; yields (rank, world size).

    After an error the group is left as it is: tearing it down could hang and hide the error.
    """
    know(backend)
    dist.init_process_group(backend, timeout=TIMEOUT, **options)
    yield dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()


def know(backend: str) -> None:
    """Make the word "penstock" known also where the package is not installed but only on the path."""
    if "penstock" in backend:
        importlib.import_module("penstock")


def shared_folder() -> pathlib.Path:
    """A folder that all ranks see and that starts empty."""
    return pathlib.Path(os.environ["SHARED_FOLDER"])


def bits(*values: Any) -> str:
    """A digest of the exact bits (and shapes and dtypes) of tensors, so that ranks can be compared bit by bit."""
    digest = hashlib.sha256()
    for tensor in values:
        tensor = tensor.detach().cpu().contiguous()
        digest.update(f"{tuple(tensor.shape)} {tensor.dtype};".encode())
        if tensor.numel():
            digest.update(tensor.view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def same(got: torch.Tensor, expected: torch.Tensor | float, what: str = "") -> None:
    """Assert exact equality of values, shape and dtype."""
    if not isinstance(expected, torch.Tensor):
        expected = torch.full_like(got, expected)
    torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True, msg=lambda text: f"{what}: {text}")


def close(got: torch.Tensor, expected: torch.Tensor, *, rtol: float = 1e-5, atol: float = 1e-6, what: str = "") -> None:
    torch.testing.assert_close(got, expected, rtol=rtol, atol=atol, msg=lambda text: f"{what}: {text}")


def integers(*shape: int, seed: int, low: int = -2, high: int = 2, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Small whole numbers. Their sums and halves are exact in every float type, so that results can be compared exactly."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(low, high + 1, shape, generator=generator).to(dtype)


def noise(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def regression(model: torch.nn.Module, x_BF: torch.Tensor, y_BO: torch.Tensor) -> torch.Tensor:
    """The loss that the training programs use: a mean, so that the mean of ranks is the mean of the joined batch."""
    return torch.nn.functional.mse_loss(model(x_BF), y_BO)


def perceptron(seed: int = 7) -> torch.nn.Sequential:
    """A model of 16 inputs and 4 outputs that starts alike wherever it is built."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return torch.nn.Sequential(
            torch.nn.Linear(16, 32), torch.nn.GELU(), torch.nn.Linear(32, 32), torch.nn.GELU(), torch.nn.Linear(32, 4)
        )


def batch(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What `rank` sees in `step`: 8 rows."""
    return noise(8, 16, seed=1000 * step + rank), noise(8, 4, seed=1000 * step + rank + 500)


def joined_batch(step: int, world_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    parts = [batch(step, rank) for rank in range(world_size)]
    return torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts])


def trained_alone(
    steps: int, world_size: int, *, lr: float = 0.1, optimizer: type = torch.optim.SGD
) -> torch.nn.Module:
    """The oracle of data-parallel training: the same model, trained here and now on all ranks' rows together."""
    model = perceptron()
    stepper = optimizer(model.parameters(), lr=lr)
    for step in range(steps):
        stepper.zero_grad()
        regression(model, *joined_batch(step, world_size)).backward()
        stepper.step()
    return model


def close_parameters(
    got: Mapping[str, torch.Tensor], expected: torch.nn.Module, *, rtol: float = 1e-4, atol: float = 1e-5
) -> None:
    expected_by_name = dict(expected.named_parameters())
    assert set(got) == set(expected_by_name), f"{sorted(got)} instead of {sorted(expected_by_name)}"
    for name, parameter in expected_by_name.items():
        close(got[name].detach().float(), parameter.detach(), rtol=rtol, atol=atol, what=name)


def _torch_version() -> tuple[int, int]:
    major, minor = torch.__version__.split(".")[:2]
    return int(major), int(minor)


_uses: list[Use] = []

# Far above what any program needs here (a second), below what the launcher allows, so that a hang is torch's own error.
TIMEOUT = datetime.timedelta(seconds=30)
