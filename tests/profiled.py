"""Profiles to show: records and breakdowns with planted parts, and files of other tools in miniature."""

from __future__ import annotations

import itertools
import json
import pathlib
from collections.abc import Sequence
from typing import Any

import pytest

from penstock.profiling.breakdown import Breakdown, Moving, Share
from penstock.profiling.readers import load
from penstock.profiling.record import Event, Header, Interval, Operation, Readings, Record, Sample, Span, Step, Wait

MS = 1_000_000


def share(rank: int, *, slow: bool = False, late: int | None = None) -> Share:
    """A step of 212 ms. A slow rank computes longer, and the others wait for it."""
    wait = 0.0 if slow else 17 * MS
    work = {
        "loading": 3.0 * MS,
        "forward": (44 + 6 * slow) * MS,
        "backward": (70 + 11 * slow) * MS,
        "clip": 2.0 * MS,
        "optimizer": 8.0 * MS,
        "other": (212 - 3 - 44 - 70 - 10 - 17 - 61) * MS,
    }
    sync = Moving(61.0 * MS, wait, 9.0 * MS, 4.0 * MS, 43e6, 7, {late: wait + 4 * MS} if late is not None else {})
    tensor = Moving(0.0, 0.0, 2.0 * MS, 0.0, 1e6, 3)
    return Share(rank, 40, 3, 212.0 * MS, work, {"data-parallel sync": sync, "tensor": tensor})


def breakdown(ranks: int, late: int | None = 3) -> Breakdown:
    shares = tuple(share(rank, slow=rank == late, late=None if rank == late else late) for rank in range(ranks))
    offsets = {"a": (0.0, 0.0), "b": (1.25e6, 4e4)}
    return Breakdown(shares, offsets, ("rank-1.jsonl ends within a line: its rank was stopped, or the disk was full",))


def record(rank: int, world: int, *, late: int | None = 3, steps: int = 4) -> Record:
    """Its last steps are sampled; the backward pass overlaps with two of three all-reduces and waits for the third, and a marked
    wait follows. Its host's counters are read every 20 ms."""
    host = "ab"[rank % 2]
    found = Record(
        Header(rank, world, host, 100 + rank, 0, 10**18, {"command": "torchrun train.py", "backend": "gloo"})
    )
    late_ns = 17 * MS if rank == late else 0
    shift = -1_250_000 if host == "b" else 0
    for number in range(steps):
        start = 5_000 * MS + number * 212 * MS + shift
        forward = start + 3 * MS, start + 47 * MS + late_ns
        backward = forward[1], start + 195 * MS
        step = Step(
            number,
            start,
            start + 212 * MS,
            (
                Span("loading", start, forward[0]),
                Span("forward", *forward),
                Span("backward", *backward),
                Span("optimizer", start + 202 * MS, start + 210 * MS),
            ),
            (Wait(start + 195 * MS, start + 200 * MS, "all_reduce", "dp"),),
        )
        found.steps.append(step)
        operations = tuple(
            Operation("all_reduce", "dp", i, begin + late_ns, end, 1 << 23, world, None, "data-parallel sync")
            for i, (begin, end) in enumerate(
                (
                    (start + 70 * MS, start + 98 * MS),
                    (start + 90 * MS, start + 160 * MS),
                    (start + 117 * MS, start + 195 * MS),
                )
            )
        )
        moments = range(forward[0], start + 120 * MS + late_ns, MS)
        busy: tuple[Interval, ...] = tuple((at, at + MS - 20_000) for at in moments)
        if number >= steps - 3:
            found.samples.append(Sample(number, busy, operations))
    sent = 0.0
    for at in range(5_000, 5_000 + steps * 212, 20):
        sent += 2.4e6 if 70 < (at - 5_000) % 212 < 195 else 1e4
        values = {
            "nic.eth0.rx_bytes": 0.9 * sent,
            "nic.eth0.tx_bytes": sent,
            "nic.lo.rx_bytes": 5.0,
            "nic.lo.tx_bytes": 5.0,
        }
        found.readings.append(Readings(at * MS + shift, values))
    return found


def resources(at_ms: int, ranks: Sequence[int]) -> dict[str, float]:
    """Counters of a host with these ranks, two disks and three streams. Each rank uses a tenth of a processor more than the one
    before and 100 MiB more, which grow; disk ``vda`` is written to at 50 MB/s, and ``vdb`` does nothing; stream N moves N + 1
    MB/s, and has a window of N + 1 times 100 KiB and a round trip of N + 1 ms, of which stream 2 has one of 40 ms at 5.4 s."""
    seconds = at_ms / 1e3
    values = {
        "cpu.processors": 8.0,
        "cpu.busy_s": 4 * seconds,
        "memory.available_bytes": float((8 << 30) - at_ms * 1000),
        "disk.vda.written_bytes": 50e6 * seconds,
        "disk.vda.read_bytes": 0.0,
        "disk.vdb.written_bytes": 7.0,
        "gpu.0.busy_share": 0.0,
        "gpu.0.memory_bytes": float(1 << 30),
    }
    for rank in ranks:
        key = f"pid.{100 + rank}."
        values[f"{key}cpu_s"] = (rank + 1) / 10 * seconds
        values[f"{key}thread.{100 + rank}.python.cpu_s"] = (rank + 1) / 20 * seconds
        values[f"{key}thread.{2000 + rank}.penstock.cpu_s"] = (rank + 1) / 40 * seconds
        values[f"{key}memory_bytes"] = (rank + 1) * (100 << 20) + 1e4 * at_ms
    for number in range(3):
        key = f"stream.{number}."
        values[f"{key}tx_bytes"] = values[f"{key}rx_bytes"] = (number + 1) * 1e6 * seconds
        values[f"{key}rtt_us"] = 40e3 if number == 2 and at_ms == 5400 else (number + 1) * 1e3
        values[f"{key}cwnd_bytes"] = float((number + 1) * (100 << 10))
        values[f"{key}delivery_bytes_per_s"] = (number + 1) * 1.5e6
        values[f"{key}retransmits"] = 10 * seconds if number == 1 else 0.0
    return values


def records(ranks: int) -> list[Record]:
    """Their hosts' readings also have `resources`, and their streams are told of."""
    found = [record(rank, ranks) for rank in range(ranks)]
    for each in found:
        of_host, is_first = range(each.header.rank % 2, ranks, 2), each.header.host == "a"
        for at, reading in zip(itertools.count(5_000, 20), each.readings, strict=False):
            reading.values.update(resources(at, of_host))
        ends = ("10.0.0.1:400", "10.0.0.2:500") if is_first else ("10.0.0.2:500", "10.0.0.1:400")
        each.events += [
            Event(0, "stream", f"{number} {100 + of_host[0]} eth0 {ends[0]}{number} {ends[1]}{number}")
            for number in range(3)
        ]
    return found


def event(
    name: str, start: float, length: float, category: str = "cpu_op", tid: Any = 1, **args: Any
) -> dict[str, Any]:
    """A complete event of Kineto; times in us."""
    return {
        "ph": "X",
        "cat": category,
        "name": name,
        "pid": 7,
        "tid": tid,
        "ts": start,
        "dur": length,
        "args": {key.replace("_", " ") if key != "correlation" else key: value for key, value in args.items()},
    }


def cuda_trace(rank: int = 0) -> dict[str, Any]:
    """Two steps of 100 ms on a device, in us. In each: loading 10 (the device stands still), forward 20, backward 40 during which
    one all-reduce of 10 is hidden, an all-reduce of 15 of which 5 are hidden, optimizer 5; the rest is idle."""
    events: list[dict[str, Any]] = []
    correlation = 0

    def kernel(name: str, launched: float, tid: int, start: float, length: float, **args: Any) -> None:
        nonlocal correlation
        correlation += 1
        events.append(event("cudaLaunchKernel", launched, 2, "cuda_runtime", tid, correlation=correlation))
        events.append(event(name, start, length, "kernel", 7, correlation=correlation, **args))

    for step in range(2):
        at = 100_000.0 * step
        events.append(event(f"ProfilerStep#{step + 5}", at, 100_000, "user_annotation"))
        events.append(event("enumerate(DataLoader)#_It.__next__", at + 1_000, 10_000, "user_annotation"))
        events.append(event("DistributedDataParallel.forward", at + 11_500, 3_000, "user_annotation"))
        events.append(event("autograd::engine::evaluate_function: MmBackward0", at + 15_000, 4_000, tid=2))
        events.append(event("Optimizer.step#SGD.step", at + 20_000, 1_000, "user_annotation"))
        kernel("fill", at + 500, 1, at + 1_000, 100)
        kernel("gemm_forward", at + 12_000, 1, at + 15_000, 20_000)
        kernel("gemm_backward", at + 15_500, 2, at + 35_000, 40_000)
        reduced = {
            "Collective_name": "allreduce",
            "In_msg_nelems": 1000,
            "dtype": "Float",
            "Process_Group_Name": "0",
            "Process_Group_Description": "default_pg",
            "Process_Group_Ranks": "[0, 1]",
        }
        kernel("ncclDevKernel_AllReduce_Sum_f32_RING_LL", at + 16_000, 2, at + 50_000, 10_000, **reduced)
        kernel("ncclDevKernel_AllReduce_Sum_f32_RING_LL", at + 17_000, 2, at + 70_000, 15_000, **reduced)
        kernel("sgd", at + 20_500, 1, at + 85_000, 5_000)
    return {
        "schemaVersion": 1,
        "distributedInfo": {
            "backend": "nccl",
            "rank": rank,
            "world_size": 2,
            "pg_config": [{"pg_name": "0", "pg_desc": "default_pg", "ranks": [0, 1]}],
        },
        "traceEvents": events,
        "host_name": "node",
        "baseTimeNanoseconds": 1_700_000_000_000_000_000,
    }


def inspector_lines(ranks: Sequence[int] = (0, 1)) -> str:
    lines = []
    for rank in ranks:
        for number in range(5):
            for coll, size, time_us, bus in (("AllReduce", 1 << 30, 4000.0, 470.0), ("AllGather", 1 << 20, 50.0, 20.0)):
                lines.append(
                    json.dumps(
                        {
                            "header": {"id": "0x9e7a", "rank": rank, "n_ranks": len(ranks), "nnodes": 1},
                            "metadata": {
                                "inspector_output_format_version": "v4.0",
                                "hostname": "node",
                                "pid": 40 + rank,
                            },
                            "coll_perf": {
                                "coll": coll,
                                "coll_sn": number,
                                "coll_msg_size_bytes": size,
                                "coll_exec_time_us": time_us,
                                "coll_timing_source": "kernel_gpu",
                                "coll_algobw_gbs": bus / 2,
                                "coll_busbw_gbs": bus,
                            },
                        }
                    )
                )
    return "\n".join(lines) + "\n"


def loaded(path: pathlib.Path) -> list[Record]:
    found = load(path)
    assert isinstance(found, list)
    return found


def summed(path: pathlib.Path, **options: Any) -> Breakdown:
    found = load(path, **options)
    assert isinstance(found, Breakdown)
    return found


def written(path: pathlib.Path, trace: Any) -> pathlib.Path:
    path.write_text(json.dumps(trace))
    return path


def check_sums(shares: tuple[Share, ...]) -> None:
    for each in shares:
        parts = sum(each.work.values()) + sum(moved.exposed_ns for moved in each.communication.values())
        assert parts == pytest.approx(each.step_ns, rel=1e-9)


LOG = pathlib.Path(__file__).parent / "recordings" / "megatron-pp16.log"

NEWER = """\
  pipeline_model_parallel_size .................... 4
  global_batch_size ............................... 8
  micro_batch_size ................................ 1
  data_parallel_size .............................. 1
  world_size ...................................... 4
 [2026-01-01] iteration {number}/ 100 | elapsed time per iteration (ms): 220.0 | global batch size: 8 | lm loss: 1.0 |
{head} time across ranks (ms):
    forward-backward ...............................: {least}190.00{end}
    forward-compute ................................: {least}40.00{end}
    backward-compute ...............................: {least}80.00{end}
    forward-recv ...................................: {least}16.00{end}
    forward-send ...................................: {least}2.00{end}
    backward-recv ..................................: {least}33.00{end}
    embedding-grads-all-reduce .....................: {least}31.00{end}
    all-grads-sync .................................: {least}12.00{end}
    optimizer-clip-main-grad .......................: {least}3.00{end}
    optimizer ......................................: {least}20.00{end}
"""
