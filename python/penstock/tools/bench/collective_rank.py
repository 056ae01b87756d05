"""A rank that runs collectives: through torch.distributed, or through MPI.

Every operation works on tensors of its own, filled before the clock starts and checked after it stops, so each measured
operation is a checked one.
"""

from __future__ import annotations

import datetime
import functools
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from penstock.tools.bench.collectives import COLLECTIVES, ROOT, Layout
from penstock.tools.bench.machine import process_memory
from penstock.tools.bench.pattern import Pattern
from penstock.tools.bench.task import Task


class CollectiveRunner:
    """The part that torch.distributed and MPI share. Subclasses give `barrier` and `operation`."""

    rank: int
    ranks: int
    device = "cpu"
    """Where the tensors are."""

    def __init__(self, ranks: int):
        self.ranks = ranks
        self._operations: list[Callable[[], None]] = []
        self._tensors: list[Tensors] = []
        self._turn = 0
        self._resident = process_memory()

    def operation(self, name: str, tensors: Tensors) -> Callable[[], None]:
        """A call that runs collective ``name`` on ``tensors`` once and returns when this rank's part is done."""
        raise NotImplementedError

    def barrier(self) -> None:
        raise NotImplementedError

    def _empty(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """A tensor to measure on."""
        return torch.empty(count, dtype=dtype, device=self.device)

    def prepare(self, task: Task) -> None:
        self.release()
        self._name = task.collective
        self._pattern = Pattern(task.dtype, self.ranks, self.device)
        dtype = self._pattern.dtype
        elements = COLLECTIVES[task.collective].elements(task.nbytes, self.ranks, dtype.itemsize)
        layout = COLLECTIVES[task.collective].layout(self.rank, self.ranks, elements)
        self._tensors = [Tensors(layout, dtype, self._empty) for _ in range(task.slots)]
        self._operations = [self.operation(task.collective, tensors) for tensors in self._tensors]

    def fill(self) -> None:
        for turn, tensors in enumerate(self._tensors, self._turn):
            tensors.fill(self._pattern, turn)

    def operate(self) -> None:
        for operation in self._operations:
            operation()

    def finish(self) -> None:
        for turn, tensors in enumerate(self._tensors, self._turn):
            tensors.check(self._pattern, turn, f"{self._name} on rank {self.rank}, operation {turn}")
        self._turn += len(self._tensors)

    def release(self) -> None:
        self._operations, self._tensors = [], []

    def memory(self) -> dict[str, int]:
        own = sum(tensors.nbytes for tensors in self._tensors)
        return {"grown": process_memory() - self._resident - own}


class Tensors:
    """The tensors of one operation on one rank, after a `Layout`. ``source_N`` and ``result_N`` are one where it is in place."""

    def __init__(self, layout: Layout, dtype: torch.dtype, empty: Callable[[int, torch.dtype], torch.Tensor]):
        self.layout = layout
        self.source_N = empty(layout.source.count, dtype) if layout.source else None
        results = sum(run.count for run in layout.result or ())
        if layout.in_place:
            self.result_N = self.source_N
        else:
            self.result_N = empty(results, dtype) if layout.result else None

    @property
    def nbytes(self) -> int:
        return sum(
            tensor.nbytes
            for tensor in (self.source_N, None if self.layout.in_place else self.result_N)
            if tensor is not None
        )

    def fill(self, pattern: Pattern, turn: int) -> None:
        if self.result_N is not None and not self.layout.in_place:
            self.result_N.fill_(0)  # no value of the pattern
        if self.source_N is not None and self.layout.source is not None:
            pattern.fill(self.source_N, self.layout.source, turn)

    def check(self, pattern: Pattern, turn: int, what: str) -> None:
        if self.result_N is not None and self.layout.result is not None:
            pattern.check(self.result_N, self.layout.result, turn, what)
        if self.source_N is not None and self.layout.source is not None and not self.layout.in_place:
            pattern.check(
                self.source_N, (self.layout.source,), turn, f"the input, which only the user may change, of {what}"
            )


class TorchRunner(CollectiveRunner):
    """torch.distributed with one backend. The store lives in rank 0; its port reaches the others through the coordinator."""

    def __init__(self, backend: str, rank: int, ranks: int, host: str, timeout_s: float):
        self._timeout = datetime.timedelta(seconds=timeout_s)
        torch.set_num_threads(1)
        self.rank = rank
        self._backend = backend
        self._store = None
        super().__init__(ranks)
        if rank == ROOT:
            self._store = dist.TCPStore(host, 0, ranks, is_master=True, wait_for_workers=False, timeout=self._timeout)
        self._host = host

    def hello(self) -> dict[str, Any]:
        return {"host": self._host, "port": self._store.port if self._store else None}

    def connect(self, peers: list[dict[str, Any]]) -> None:
        host, port = peers[ROOT]["host"], peers[ROOT]["port"]
        os.environ.update(MASTER_ADDR=host, MASTER_PORT=str(port), RANK=str(self.rank), WORLD_SIZE=str(self.ranks))
        store = self._store or dist.TCPStore(host, port, self.ranks, is_master=False, timeout=self._timeout)
        dist.init_process_group(
            self._backend, store=store, rank=self.rank, world_size=self.ranks, timeout=self._timeout
        )
        self.barrier()

    def barrier(self) -> None:
        dist.barrier()

    def operation(self, name: str, tensors: Tensors) -> Callable[[], None]:
        source_N, result_N, ranks, root = tensors.source_N, tensors.result_N, self.ranks, self.rank == ROOT
        if name == "all-reduce":
            return lambda: dist.all_reduce(source_N)
        if name == "reduce-scatter":
            return lambda: dist.reduce_scatter_tensor(result_N, source_N)
        if name == "all-gather":
            return lambda: dist.all_gather_into_tensor(result_N, source_N)
        if name == "broadcast":
            return lambda: dist.broadcast(source_N, ROOT)
        if name == "reduce":
            return lambda: dist.reduce(source_N, ROOT)
        if name == "gather":
            parts = list(result_N.chunk(ranks)) if result_N is not None and root else None
            return lambda: dist.gather(source_N, parts, ROOT)
        if name == "scatter":
            parts = list(source_N.chunk(ranks)) if source_N is not None and root else None
            return lambda: dist.scatter(result_N, parts, ROOT)
        if name == "all-to-all":
            return lambda: dist.all_to_all_single(result_N, source_N)
        if name == "send-recv":
            after, before = (self.rank + 1) % ranks, (self.rank - 1) % ranks

            def send_recv() -> None:
                receive = dist.irecv(result_N, before)
                send = dist.isend(source_N, after)
                send.wait()
                receive.wait()

            return send_recv
        return dist.barrier

    def leave(self) -> None:
        dist.destroy_process_group()

    def memory(self) -> dict[str, int]:
        memory = super().memory()
        if self._backend == "penstock":
            from penstock.torch import stats

            memory["engine"] = int(stats()["memory_bytes"])
        return memory


class SharedRunner(TorchRunner):
    """The same on tensors that the ranks of a host read directly."""

    def _empty(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        from penstock.torch import empty

        return empty(count, dtype=dtype)


class CudaRunner(TorchRunner):
    """The same on tensors of a GPU: ranks share GPUs where there are fewer. An operation ends with its result on the device."""

    def __init__(self, backend: str, rank: int, ranks: int, host: str, timeout_s: float):
        super().__init__(backend, rank, ranks, host, timeout_s)
        self.device = f"cuda:{rank % torch.cuda.device_count()}"
        torch.cuda.set_device(self.device)

    def fill(self) -> None:
        super().fill()
        torch.cuda.synchronize()

    def operate(self) -> None:
        super().operate()
        torch.cuda.synchronize()


class EngineRunner(TorchRunner):
    """All-reduce by the engine's own calls: what is left when torch's part, and the backend's, is taken away."""

    def operation(self, name: str, tensors: Tensors) -> Callable[[], None]:
        tensor = tensors.source_N
        if name != "all-reduce" or tensor is None:
            raise ValueError(f"the engine alone is measured with all-reduce, not with {name}")
        backend = dist.distributed_c10d._get_default_group()._get_backend(torch.device("cpu"))
        start = functools.partial(
            backend._member.group.start,
            "all_reduce",
            dtype=str(tensor.dtype).removeprefix("torch."),
            elements=tensor.numel(),
            bytes=tensor.nbytes,
            input=0,
            output=tensor.data_ptr(),
            op="sum",
            timeout_s=self._timeout.total_seconds(),
            keep=tensor,
        )
        return lambda: start().wait()


class MpiRunner(CollectiveRunner):
    """MPI through mpi4py, on the memory of torch tensors. ``mpirun`` started this process and numbers it."""

    def __init__(self, ranks: int):
        from mpi4py import MPI

        torch.set_num_threads(1)
        self._mpi = MPI
        self._comm = MPI.COMM_WORLD
        self.rank = self._comm.rank
        if self._comm.size != ranks:
            raise RuntimeError(
                f"mpirun started {self._comm.size} ranks, {ranks} were asked for: mpi4py and mpirun do not belong together"
            )
        super().__init__(ranks)

    def hello(self) -> dict[str, Any]:
        return {"library": self._mpi.Get_library_version().splitlines()[0].strip()}

    def connect(self, peers: list[dict[str, Any]]) -> None:
        self.barrier()

    def barrier(self) -> None:
        self._comm.Barrier()

    def operation(self, name: str, tensors: Tensors) -> Callable[[], None]:
        comm, root = self._comm, self.rank == ROOT
        source_N = None if tensors.source_N is None else tensors.source_N.numpy()
        result_N = None if tensors.result_N is None else tensors.result_N.numpy()
        if name == "all-reduce":
            return lambda: comm.Allreduce(self._mpi.IN_PLACE, source_N)
        if name == "reduce-scatter":
            return lambda: comm.Reduce_scatter_block(source_N, result_N)
        if name == "all-gather":
            return lambda: comm.Allgather(source_N, result_N)
        if name == "broadcast":
            return lambda: comm.Bcast(source_N, ROOT)
        if name == "reduce":
            if root:
                return lambda: comm.Reduce(self._mpi.IN_PLACE, source_N, root=ROOT)
            return lambda: comm.Reduce(source_N, None, root=ROOT)
        if name == "gather":
            return lambda: comm.Gather(source_N, result_N, ROOT)
        if name == "scatter":
            return lambda: comm.Scatter(source_N, result_N, ROOT)
        if name == "all-to-all":
            return lambda: comm.Alltoall(source_N, result_N)
        if name == "send-recv":
            after, before = (self.rank + 1) % self.ranks, (self.rank - 1) % self.ranks
            return lambda: comm.Sendrecv(source_N, after, recvbuf=result_N, source=before)
        return comm.Barrier

    def leave(self) -> None:
        self._mpi.Finalize()
