"""Proves what `penstock profile` makes of a GPU's events, without a GPU: the recorder's way through torch's profiler against the
reader of traces, which HolisticTraceAnalysis agrees with (docs/design/profile-files.md); and what counts a GPU's use."""

from __future__ import annotations

import enum
import importlib
import os
import pathlib
import sys
import time
import types
from typing import Any

import pytest

import profiled
from penstock.profiling import gpus
from penstock.profiling.divide import divide
from penstock.profiling.phases import phases
from penstock.profiling.readers import load
from penstock.profiling.record import Event, Header, Record, Sample, Span, Step, line, read
from penstock.tools.profile.recorder import kineto
from penstock.tools.profile.recorder.kineto import Call, Window

US = 1000
DDP = Call("", "0", 0, ranks=2, purpose="data-parallel sync")


class Device(enum.Enum):
    """As torch's DeviceType."""

    CPU = 0
    CUDA = 1


class Seen:
    """An event of Kineto as torch's profiler gives it."""

    def __init__(self, name: str, start_us: float, length_us: float, **more: Any) -> None:
        self._values = {
            "name": name,
            "start_ns": round(start_us * US),
            "duration_ns": round(length_us * US),
            "start_thread_id": 1,
            "is_async": False,
            "scope": 0,
            "shapes": [],
            "dtypes": [],
            "device_type": Device.CPU,
            "correlation_id": 0,
            "linked_correlation_id": 0,
            "activity_type": "cpu_op",
            "is_user_annotation": False,
            **more,
        }

    def __getattr__(self, name: str) -> Any:
        if name not in self.__dict__["_values"]:
            raise AttributeError(name)
        return lambda: self._values[name]


class Older(Seen):
    """Of a torch that does not tell an event's activity."""

    def __getattr__(self, name: str) -> Any:
        if name == "activity_type":
            raise AttributeError(name)
        return super().__getattr__(name)


def seen(trace: dict[str, Any], kind: type[Seen] = Seen) -> list[Seen]:
    """The events of a trace as the profiler gives them in the process: a device's are linked to what launched them."""
    found = []
    for each in trace["traceEvents"]:
        name, start, length, args = each["name"], each["ts"], each["dur"], each["args"]
        if each["cat"] == "cuda_runtime":
            found.append(
                kind("aten::op", start, length, start_thread_id=each["tid"], correlation_id=args["correlation"])
            )
        elif each["cat"] == "kernel":
            on_device = {
                "device_type": Device.CUDA,
                "linked_correlation_id": args["correlation"],
                "activity_type": "kernel",
            }
            found.append(kind(name, start, length, start_thread_id=0, **on_device))
            if "In msg nelems" in args:
                # NCCL's operation is issued just before its kernel is launched; its annotation is on the device, too.
                launched = next(
                    one["ts"]
                    for one in trace["traceEvents"]
                    if one["cat"] == "cuda_runtime" and one["args"]["correlation"] == args["correlation"]
                )
                about = {"shapes": [[args["In msg nelems"]]], "dtypes": ["float"], "is_async": True}
                found.append(kind("nccl:all_reduce", launched - 1, 1, start_thread_id=each["tid"], **about))
                marked = {
                    "device_type": Device.CUDA,
                    "is_user_annotation": True,
                    "activity_type": "gpu_user_annotation",
                }
                found.append(kind("nccl:all_reduce", start, length, **marked))
        elif name.startswith("autograd::"):
            found.append(kind(name, start, length, start_thread_id=each["tid"]))
            found.append(kind(name.rpartition(" ")[2], start, length, start_thread_id=each["tid"], scope=1))
    return found


def host_step(number: int, at_us: float) -> Step:
    """The marks of a step of `profiled.cuda_trace`."""
    marks = (
        ("loading", 1_000, 11_000),
        ("forward", 11_500, 15_000),
        ("backward", 15_000, 19_000),
        ("optimizer", 20_000, 21_000),
    )
    spans = (Span(phase, round((at_us + start) * US), round((at_us + end) * US)) for phase, start, end in marks)
    return Step(number, round(at_us * US), round((at_us + 100_000) * US), tuple(spans))


def sampled(number: int, kind: type[Seen] = Seen) -> Sample:
    step = host_step(number, 100_000.0 * number)
    [backward] = [(span.start_ns, span.end_ns) for span in step.spans if span.phase == "backward"]
    window = Window(number, step.start_ns, step.end_ns, (), [backward], DDP, (), Call("", "0", 0), phases(step))
    return kineto.sample(seen(profiled.cuda_trace(), kind), window, lambda at: at, 1)


@pytest.mark.parametrize("kind", [Seen, Older])
def test_a_step_on_a_gpu_is_that_of_its_trace(tmp_path: pathlib.Path, kind: type[Seen]) -> None:
    """From the same events: the same spans and waits on the device's timeline, and the same operations, as from the trace that
    torch's profiler writes. The step before launched kernels, too, which are not this one's."""
    [record] = profiled.loaded(profiled.written(tmp_path / "t.json", profiled.cuda_trace()))
    theirs, sample = record.steps[1], record.samples[1]
    base = profiled.cuda_trace()["baseTimeNanoseconds"]
    ours = sampled(1, kind)
    assert ours.device is not None
    assert (ours.device.start_ns + base, ours.device.end_ns + base) == (theirs.start_ns, theirs.end_ns)
    assert [(one.phase, one.start_ns + base, one.end_ns + base) for one in ours.device.spans] == list(theirs.spans)
    assert [(one.start_ns + base, one.end_ns + base) for one in ours.device.waits] == [one[:2] for one in theirs.waits]
    assert [(start + base, end + base) for start, end in ours.busy] == list(sample.busy)

    def about(one: Any, shift: int) -> Any:
        return one.name, one.number, one.issued_ns + shift, one.ended_ns + shift, one.bytes, one.ranks, one.purpose

    assert [about(one, base) for one in ours.operations] == [about(one, 0) for one in sample.operations]


def test_the_division_of_a_gpu_is_that_of_its_sampled_steps(tmp_path: pathlib.Path) -> None:
    """A rank's file, with steps of the host and two samples: the kernels' times, the all-reduce that hides and the 10 ms of it
    that do not; and what all steps took is said. The file reads back whole."""
    path = tmp_path / "rank-0.jsonl"
    header = Header(0, 1, "h", 1, 0, 0, {"backend": "nccl", "device": "cuda"})
    steps = [host_step(number, 100_000.0 * number) for number in range(6)]
    samples = [sampled(0), sampled(1)]
    path.write_text("".join(map(line, [header, *steps, *samples, Event(9, "end")])))
    assert read(path).samples == samples
    [record] = profiled.loaded(tmp_path)
    breakdown = divide([record])
    [share] = breakdown.shares
    profiled.check_sums(breakdown.shares)
    assert (share.steps, share.sampled) == (2, 2)
    assert {phase: share.work[phase] / 1e6 for phase in ("forward", "backward", "optimizer")} == pytest.approx(
        {"forward": 20, "backward": 40, "optimizer": 5}
    )
    sync = share.communication["data-parallel sync"]
    assert sync.exposed_ns / 1e6 == pytest.approx(10) and (
        sync.hidden_wire_ns + sync.hidden_wait_ns
    ) / 1e6 == pytest.approx(15)
    assert sync.bytes == 8000
    assert any("computes on a GPU" in text and "All 4 steps took 100.0 ms" in text for text in breakdown.problems)


def test_kernels_of_calls_from_python() -> None:
    """NCCL sends, receives and gathers with one kernel: the call that launched it says what it was; of a batch all calls have its
    time. Copies are work, and what nothing explains is of no phase."""
    step = Step(0, 0, 1_000 * US, (Span("forward", 0, 500 * US),))
    calls = [
        Call("gather", "g", 10 * US, 20 * US, 4, None, "", 64),
        Call("send", "p", 30 * US, 35 * US, 2, 1, "pipeline send", 128, is_batched=True),
        Call("recv", "p", 36 * US, 40 * US, 2, 1, "pipeline forward recv", 256, is_batched=True),
    ]
    events = []
    for correlation, launched, start, name in (
        (1, 15, 100, "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)"),
        (2, 45, 300, "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)"),
        (3, 60, 200, "Memcpy HtoD (Pinned -> Device)"),
    ):
        kind = "gpu_memcpy" if name.startswith("Mem") else "kernel"
        events.append(Seen("aten::op", launched, 1, correlation_id=correlation))
        on_device = {"device_type": Device.CUDA, "linked_correlation_id": correlation, "activity_type": kind}
        events.append(Seen(name, start, 50, **on_device))
    events.append(Seen("elsewhere", 400, 10, device_type=Device.CUDA, activity_type="kernel"))
    window = Window(0, 0, step.end_ns, calls, timeline=phases(step))
    found = kineto.sample(events, window, lambda at: at, 1)
    assert [
        (one.name, one.group, one.issued_ns // US, one.ended_ns // US, one.bytes, one.peer) for one in found.operations
    ] == [
        ("gather", "g", 100, 150, 64, None),
        ("send", "p", 300, 350, 128, 1),
        ("recv", "p", 300, 350, 256, 1),
    ]
    assert found.device is not None
    worked = [
        (span.phase, span.start_ns // US, span.end_ns // US) for span in found.device.spans if span.phase != "other"
    ]
    assert worked == [("forward", 200, 250)]
    assert [(wait.start_ns // US, wait.end_ns // US) for wait in found.device.waits] == [(100, 150), (300, 350)]


def test_a_step_without_kernels_is_the_hosts() -> None:
    """On a machine with a GPU that this step does not use."""
    assert sampled(7).device is None


@pytest.mark.usefixtures("forks")
def test_the_recorder_asks_for_a_gpus_events(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once the script has started CUDA, and never before: asking would start it. The samples of a script that only says so are
    those of the host."""
    from penstock.tools.profile import run

    monkeypatch.chdir(tmp_path)
    script = tmp_path / "script.py"
    script.write_text(
        "import os, torch\n"
        "from torch.autograd import profiler\n"
        "asked = []\n"
        "init = profiler.profile.__init__\n"
        "def kept(self, *args, **options):\n    asked.append(options.get('use_device'))\n    init(self, *args, **options)\n"
        "profiler.profile.__init__ = kept\n"
        "model = torch.nn.Linear(8, 8)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "for number in range(20):\n"
        "    if number == 5:\n        torch.cuda.is_initialized = lambda: True\n"
        "    model(torch.ones(2, 8)).sum().backward()\n"
        "    optimizer.step()\n"
        "assert asked == [None, 'cuda', 'cuda'], asked\n"
    )
    folder = tmp_path / "profile"
    folder.mkdir()
    assert run.run([sys.executable, str(script)], folder) == 0
    record = read(folder / "rank-0.jsonl")
    assert [sample.step for sample in record.samples] == [4, 9, 15]
    found = load(folder)
    assert isinstance(found, list) and isinstance(found[0], Record) and len(found[0].steps) == 20


# ------------------------------------------------------------------------------------------------------- how busy it is


def test_nvml_tells_how_busy_gpus_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """By its Python module; a GPU that answers no more is left out."""

    def rates(handle: int) -> Any:
        if handle == 2:
            raise RuntimeError("the GPU is lost")
        return types.SimpleNamespace(gpu=25 * handle)

    library = types.ModuleType("pynvml")
    library.nvmlInit = lambda: None  # type: ignore[attr-defined]
    library.nvmlDeviceGetCount = lambda: 3  # type: ignore[attr-defined]
    library.nvmlDeviceGetHandleByIndex = lambda number: number  # type: ignore[attr-defined]
    library.nvmlDeviceGetUtilizationRates = rates  # type: ignore[attr-defined]
    library.nvmlDeviceGetMemoryInfo = lambda handle: types.SimpleNamespace(used=handle << 30)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "pynvml", library)
    monkeypatch.setattr(gpus, "_DRIVER", os.devnull)
    values: dict[str, float] = {}
    read_from = gpus.Gpus()
    read_from.read(values)
    read_from.close()
    assert values == {
        "gpu.0.busy_share": 0.0,
        "gpu.0.memory_bytes": 0.0,
        "gpu.1.busy_share": 0.25,
        "gpu.1.memory_bytes": float(1 << 30),
    }


def test_nvidia_smi_tells_how_busy_gpus_are(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is no `pynvml`: a program that goes on printing, of which the newest lines count, and which ends with us."""
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\nprintf '0, 30, 1024\\n1, [N/A], 5\\n0, 70, 2048\\n1, 5'\nexec sleep 1000\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(gpus, "_DRIVER", os.devnull)

    def absent(name: str) -> Any:
        raise ImportError(name)

    monkeypatch.setattr(importlib, "import_module", absent)
    read_from = gpus.Gpus()
    values: dict[str, float] = {}
    deadline = time.monotonic() + 30
    while not values:
        read_from.read(values)
        assert time.monotonic() < deadline
    process = read_from._tool
    read_from.close()
    assert values == {"gpu.0.busy_share": 0.7, "gpu.0.memory_bytes": float(2048 << 20)}
    assert process is not None and process.returncode is not None
