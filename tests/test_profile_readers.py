"""Files of other profilers: what a reader makes of them. tests/test_profile_hostile.py breaks them."""

from __future__ import annotations

import gzip
import json
import pathlib
import sys

import pytest

import forked
import profiled
from penstock.errors import Config
from penstock.profiling import record
from penstock.profiling.intervals import clipped
from penstock.profiling.matching import canonical
from penstock.profiling.readers import load, megatron
from penstock.profiling.record import Header, Readings, Step
from penstock.tools.profile import report
from profiled import LOG, NEWER, check_sums, loaded, summed, written


def spent_ms(step: Step) -> dict[str, float]:
    found: dict[str, float] = {}
    for span in step.spans:
        found[span.phase] = found.get(span.phase, 0.0) + (span.end_ns - span.start_ns) / 1e6
    return found


def waited_ms(step: Step) -> float:
    return sum(each.end_ns - each.start_ns for each in step.waits) / 1e6


# ------------------------------------------------------------------------------------------------- traces of torch.profiler

TRAINING = """
import os, sys, time, torch, torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, schedule
import penstock

rank, folder = int(sys.argv[1]), sys.argv[2]
os.environ.update(MASTER_ADDR="127.0.0.1")
torch.set_num_threads(1)
for backend in ("gloo", "penstock"):
    store = dist.FileStore(f"{folder}/store-{backend}", 2)
    dist.init_process_group(backend, store=store, rank=rank, world_size=2)
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 8)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = torch.utils.data.DataLoader([(torch.randn(64), 0) for _ in range(40)], batch_size=8)
    out = f"{folder}/{backend}/{'ab'[rank]}.json"  # the names say nothing
    os.makedirs(os.path.dirname(out), exist_ok=True)
    with profile(
        activities=[ProfilerActivity.CPU],
        schedule=schedule(wait=1, warmup=1, active=3),
        on_trace_ready=lambda p: p.export_chrome_trace(out),
        record_shapes=True,
    ) as p:
        for x, y in loader:
            if rank == 1:
                time.sleep(0.08)
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            if rank == 0:
                time.sleep(0.04)
                dist.send(torch.ones(250), 1)
            else:
                dist.recv(torch.ones(250), 0)
            p.step()
    dist.barrier()
    dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Of two ranks with each backend. Rank 1 is 80 ms late to the all-reduces, rank 0 then 40 ms late to send."""
    folder = tmp_path_factory.mktemp("traces")
    script = folder / "training.py"
    script.write_text(TRAINING)
    ranks = [forked.Popen([sys.executable, script, str(rank), str(folder)]) for rank in range(2)]
    assert [each.wait(120) for each in ranks] == [0, 0]
    return folder


@pytest.mark.parametrize("backend", ["gloo", "penstock"])
def test_a_trace_of_the_processor_has_steps_phases_and_operations(traces: pathlib.Path, backend: str) -> None:
    """Two ranks train: each waits for the other's planted delay and no longer; operations of both ranks have the same names."""
    records = loaded(traces / backend)
    assert [each.header.rank for each in records] == [0, 1] and {each.header.world for each in records} == {2}
    assert len({each.header.host for each in records}) == 1 and not any(each.problems for each in records)
    first, second = records
    assert [step.number for step in first.steps] == [step.number for step in second.steps] == [2, 3, 4]
    for record_of in records:
        assert record_of.header.about["backend"] == backend
        for step, sample in zip(record_of.steps, record_of.samples, strict=True):
            assert sample.step == step.number
            assert {"loading", "forward", "backward", "optimizer"} <= spent_ms(step).keys()
            (reduced,) = (each for each in sample.operations if each.name == "all_reduce")
            assert (reduced.purpose, reduced.bytes) == ("data-parallel sync", 4 * (64 * 64 + 64 + 64 * 8 + 8))
            (told,) = (each for each in sample.operations if each.name in ("send", "recv"))
            is_first = record_of is first
            assert (told.name, told.peer, told.bytes) == ("send" if is_first else "recv", int(is_first), 1000)
            assert told.purpose == ("pipeline send" if is_first else "pipeline forward recv")
    # How late a rank was says the clock that both share; a busy machine adds to what was planted, and to the other's work.
    lateness = []
    for number in range(3):
        samples = [one.samples[number] for one in records]
        reduced, its = (next(each for each in sample.operations if each.name == "all_reduce") for sample in samples)
        received = next(each for each in samples[1].operations if each.name == "recv")
        lateness.append((its.issued_ns - reduced.issued_ns) / 1e6)
        lasted = [(each.ended_ns - each.issued_ns) / 1e6 for each in (reduced, its, received)]
        waited = [waited_ms(one.steps[number]) for one in records]
        meanwhile = clipped([(*each, None) for each in samples[0].busy], reduced.issued_ns, its.issued_ns)
        alone = lateness[-1] - sum(end - start for start, end, _ in meanwhile) / 1e6
        assert alone - 5 < waited[0] < sum(lasted) + 5, "rank 0 waits for the all-reduce"
        assert lasted[2] - 5 < waited[1] < lasted[1] + lasted[2] + 5, "rank 1 waits for what is sent"
    assert max(lateness) > 60
    keys = [
        {(sample.step, each.name, each.group, each.number) for sample in one.samples for each in sample.operations}
        for one in records
    ]
    assert {key for key in keys[0] if key[1] == "all_reduce"} == {key for key in keys[1] if key[1] == "all_reduce"}


def test_one_trace_is_read_by_its_content(traces: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """Packed or not, whatever its name is; and the same comes out."""
    plain = traces / "gloo" / "b.json"
    strange = tmp_path / "some.log"
    strange.write_bytes(gzip.compress(plain.read_bytes()))
    (one,), (other,) = loaded(plain), loaded(strange)
    assert one.header.rank == 1 and one.steps == other.steps and one.samples == other.samples


def test_a_device_is_divided_on_its_own_timeline(tmp_path: pathlib.Path) -> None:
    """Kernels have the phase of their launch, a collective is waited for where no other kernel runs, and a device that stands
    still while the host loads is loading: all as planted."""
    (found,) = loaded(written(tmp_path / "t.json", profiled.cuda_trace()))
    assert [step.number for step in found.steps] == [5, 6]
    first, second = found.steps
    assert first.end_ns == second.start_ns and first.end_ns - first.start_ns == 100_000_000
    assert first.start_ns == 1_700_000_000_000_000_000 + 1_000_000
    # After the last step the first kernel of the next one is missing: it ends with the host's step, 1 ms early.
    for step, other in zip(found.steps, (25.1, 24.1), strict=True):
        assert spent_ms(step) == pytest.approx(
            {"loading": 9.9, "forward": 20, "backward": 40, "optimizer": 5, "other": other}
        )
        assert waited_ms(step) == pytest.approx(10)
    for sample in found.samples:
        assert [(each.name, each.group, each.number, each.bytes, each.ranks) for each in sample.operations] == [
            ("all_reduce", "0", 0, 4000, 2),
            ("all_reduce", "0", 1, 4000, 2),
        ]
        assert {each.purpose for each in sample.operations} == {"data-parallel sync"}
        assert sum(end - start for start, end in sample.busy) == 65_100_000


def test_kernels_of_old_traces_are_told_by_what_launched_them(tmp_path: pathlib.Path) -> None:
    """Before torch 2.4 kernels had no arguments of their collective: the annotation around their launch has its name and size."""
    trace = profiled.cuda_trace()
    for each in trace["traceEvents"]:
        if each["name"].startswith("nccl"):
            each["name"] = "ncclKernel_AllGather_RING_LL_Sum_int8_t(ncclWorkElem)"
            each["args"] = {"correlation": each["args"]["correlation"]}
    trace["traceEvents"].append(
        profiled.event(
            "nccl:_all_gather_base", 15_900, 200, "user_annotation", 2, Input_Dims=[[50, 2]], Input_type=["float"]
        )
    )
    (found,) = loaded(written(tmp_path / "t.json", trace))
    assert [(each.name, each.bytes) for each in found.samples[0].operations] == [("all_gather", 400), ("all_gather", 0)]


def test_a_device_waits_for_backends_of_the_host(tmp_path: pathlib.Path) -> None:
    """gloo and penstock reduce a GPU's tensors on the host: the device is blocked where they run and it does not."""
    trace = profiled.cuda_trace()
    trace["traceEvents"] = [each for each in trace["traceEvents"] if not each["name"].startswith("nccl")]
    trace["traceEvents"].append(
        profiled.event(
            "penstock:all_reduce", 70_000, 14_000, "user_annotation", 2, Input_Dims=[[10]], Input_type=["float"]
        )
    )
    first, second = loaded(written(tmp_path / "t.json", trace))[0].steps
    assert (waited_ms(first), waited_ms(second)) == (pytest.approx(9), 0)


@pytest.mark.parametrize(("sign", "steps", "how"), [("Optimizer.step#", 2, "Optimizer.step"), (None, 1, "whole")])
def test_steps_without_the_profilers_own_marks(tmp_path: pathlib.Path, sign: str | None, steps: int, how: str) -> None:
    """They end with an optimizer's step; without any, the trace is one step, and that is said."""
    trace = profiled.cuda_trace()
    trace["traceEvents"] = [
        each
        for each in trace["traceEvents"]
        if not each["name"].startswith("ProfilerStep") and (sign or not each["name"].startswith("Optimizer.step"))
    ]
    (found,) = loaded(written(tmp_path / "t.json", trace))
    assert len(found.steps) == steps and found.header.about["steps"] == how
    assert any("all of it is one step" in each for each in found.problems) == (how == "whole")


def test_files_without_a_rank_count_in_their_order(tmp_path: pathlib.Path) -> None:
    """And that is said; a second file of one rank is left out unless it continues the first."""
    for name in ("x", "y"):
        trace = profiled.cuda_trace()
        del trace["distributedInfo"]["rank"]
        written(tmp_path / f"{name}.json", trace)
    records = loaded(tmp_path)
    assert [each.header.rank for each in records] == [0, 1]
    assert "y.json does not say its rank: files count in their order" in records[1].problems
    for folder, first in (("again", 5), ("later", 7)):
        (tmp_path / folder).mkdir()
        written(tmp_path / folder / "a.json", profiled.cuda_trace())
        trace = profiled.cuda_trace()
        for number, each in enumerate(one for one in trace["traceEvents"] if one["name"].startswith("ProfilerStep")):
            each["name"] = f"ProfilerStep#{first + number}"
        written(tmp_path / folder / "b.json", trace)
    (again,), (later,) = loaded(tmp_path / "again"), loaded(tmp_path / "later")
    assert any("b.json says that it is of rank 0" in each for each in again.problems) and len(again.steps) == 2
    assert [step.number for step in later.steps] == [5, 6, 7, 8] and not later.problems


def test_the_order_of_files_is_that_of_the_numbers_in_their_names(tmp_path: pathlib.Path) -> None:
    """Of traces that do not say their rank: rank2 comes before rank10, and what has no number in that place before or behind as
    texts do."""
    names = ["1", "rank-1-of-12", "rank-2-of-12", "rank-10-of-12", "rank-11-of-12", "rank-x", "t²"]
    for name in sorted(names, reverse=True):
        trace = profiled.cuda_trace()
        del trace["distributedInfo"]["rank"]
        written(tmp_path / f"{name}.json", trace)
    records = loaded(tmp_path)
    assert [each.header.about["file"] for each in records] == [f"{name}.json" for name in names]
    assert [each.header.rank for each in records] == list(range(7))


@pytest.mark.parametrize(
    ("name", "want"),
    [
        ("allreduce", "all_reduce"),
        ("_allgather_base", "all_gather"),
        ("ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "reduce_scatter"),
        ("all_to_allv", "all_to_all"),
        ("reduce_scatter_tensor_coalesced", "reduce_scatter"),
        ("recv_anysource", "recv"),
        ("monitored_barrier", "barrier"),
        ("gather_into_tensor", "gather"),
        ("_weird_", "weird"),
    ],
)
def test_collectives_have_one_name(name: str, want: str) -> None:
    """Whatever torch, NCCL or gloo call them."""
    from penstock.profiling.readers import collectives

    assert (collectives.from_kernel(name) if name.startswith("nccl") else canonical(name)) == want


@pytest.mark.parametrize(
    ("about", "kind", "peer", "phase", "want"),
    [
        ("TENSOR_MODEL_PARALLEL_GROUP", "all_reduce", None, "forward", "tensor"),
        ("DATA_PARALLEL_GROUP_WITH_CP", "reduce_scatter", None, "", "data-parallel sync"),
        ("PIPELINE_MODEL_PARALLEL_GROUP", "recv", 2, "", "pipeline forward recv"),
        ("PIPELINE_MODEL_PARALLEL_GROUP", "recv", 4, "", "pipeline backward recv"),
        ("EMBEDDING_GROUP", "all_reduce", None, "", "embedding sync"),
        ("EXPERT_MODEL_PARALLEL_GROUP", "all_to_all", None, "", "expert"),
        ("EXPERT_DATA_PARALLEL_GROUP", "all_reduce", None, "", "data-parallel sync"),
        ("default_pg", "broadcast", None, "forward", "data-parallel sync"),
        ("default_pg", "all_to_all", None, "forward", ""),
        ("mesh_tp", "all_gather", None, "", "tensor"),
        ("default_pg", "all_reduce", None, "backward", "data-parallel sync"),
        ("default_pg", "all_reduce", None, "", ""),
    ],
)
def test_a_groups_description_tells_what_it_is_for(
    about: str, kind: str, peer: int | None, phase: str, want: str
) -> None:
    """Megatron's and DeviceMesh's names; of a receive, whether the sender stands before or behind rank 3."""
    from penstock.profiling.readers import collectives

    assert collectives.purpose(collectives.Described(kind, "", 0, 0, peer, about), 3, phase) == want


# -------------------------------------------------------------------------------------------------------- logs of Megatron


def test_a_log_tells_the_bubble() -> None:
    """Of BigScience's run with 16 stages: medians, and the fill and drain of the pipeline beside the timers that hold them."""
    log = megatron.read(LOG)
    bubble = log.bubble()
    assert bubble is not None and (log.stages(), log.micro_batches, log.iterations) == (16, 4, 8)
    rounded = [
        round(each) for each in (log.step_ms, bubble.received_ms, bubble.embedding_ms, bubble.fill_ms, bubble.drain_ms)
    ]
    assert rounded == [2740, 509, 1547, 555, 1551]
    assert bubble.measured == pytest.approx(0.750, abs=0.001) and bubble.explained == pytest.approx(0.750, abs=0.001)
    assert 0.85 < bubble.received_ms / bubble.fill_ms < 1.08 and 0.85 < bubble.embedding_ms / bubble.drain_ms < 1.08
    found = summed(LOG)
    (share,) = found.shares
    assert (share.rank, share.steps, share.sampled) == (63, 8, 0)
    check_sums(found.shares)
    moved = share.communication["pipeline forward recv"]
    assert moved.exposed_wait_ns == pytest.approx(508.8e6) and moved.exposed_wire_ns == pytest.approx(6.65e6)
    assert any("The bubble is 75.0% of an iteration" in note for note in found.notes)
    assert report.text(found, []).startswith("Rank 63 stands still for 76% of a step of 2.74 s: 75% wait")


def test_a_log_without_arguments_needs_the_number_of_stages(tmp_path: pathlib.Path) -> None:
    """Then all that is received counts as wire; with the number, and a batch, the bubble is told."""
    lines = LOG.read_text().splitlines()
    (tmp_path / "log").write_text("\n".join(each for each in lines if "......" not in each))
    found = summed(tmp_path / "log")
    assert any("--pipeline-stages" in note for note in found.notes)
    assert not any(moved.exposed_wait_ns for moved in found.shares[0].communication.values())
    (tmp_path / "log").write_text(
        LOG.read_text().replace("data_parallel_size .............................. 1", "data_parallel_size .. 0")
    )
    assert summed(tmp_path / "log").shares == summed(LOG).shares, "an argument without sense is none"
    (tmp_path / "log").write_text("\n".join(each for each in lines if "pipeline_model" not in each))
    assert summed(tmp_path / "log", pipeline_stages=16).shares[0].communication == summed(LOG).shares[0].communication


@pytest.mark.parametrize(("head", "least", "end"), [("(min, max)", "(1.00, ", ")"), ("max", "", "")])
def test_the_newer_table_of_timers(tmp_path: pathlib.Path, head: str, least: str, end: str) -> None:
    """The most of all ranks; timers of other stages are left out, and it is said."""
    text = "".join(NEWER.format(number=number, head=head, least=least, end=end) for number in (10, 20, 30))
    (tmp_path / "log").write_text(text)
    found = summed(tmp_path / "log")
    check_sums(found.shares)
    (share,) = found.shares
    assert (share.rank, share.steps, share.step_ns) == (3, 2, 220e6)
    assert share.work == pytest.approx(
        {"loading": 0, "forward": 40e6, "backward": 80e6, "inf check": 0, "clip": 3e6, "optimizer": 17e6, "other": 21e6}
    )
    moved = share.communication
    assert moved.keys() == {"pipeline forward recv", "embedding sync", "data-parallel sync"}
    assert (moved["pipeline forward recv"].exposed_wait_ns, moved["pipeline forward recv"].exposed_wire_ns) == (
        15e6,
        1e6,
    )
    assert (moved["embedding sync"].exposed_wait_ns, moved["embedding sync"].exposed_wire_ns) == (30e6, 1e6)
    assert any("most of all ranks" in note for note in found.notes)


# ----------------------------------------------------------------------------------------------- NCCL's inspector, and ours


def test_the_inspectors_files_have_sums_only(tmp_path: pathlib.Path) -> None:
    """By process and collective, without a step; the table and the notes say so."""
    for rank in (0, 1):
        (tmp_path / f"node-pid{40 + rank}.log").write_text(
            profiled.inspector_lines((rank,)).replace('"n_ranks": 1', '"n_ranks": 2')
        )
    found = summed(tmp_path)
    assert [(each.rank, each.steps, each.step_ns) for each in found.shares] == [(0, 0, 0.0), (1, 0, 0.0)]
    moved = found.shares[1].communication["all_reduce"]
    assert (moved.operations, moved.bytes, moved.hidden_wire_ns) == (5, 5 << 30, 20e6)
    assert any("all_reduce: bus bandwidth 470.0 GB/s" in note for note in found.notes)
    assert "have no steps" in report.text(found, []) and "268.44 GB/s" in report.text(found, [])
    check_sums(found.shares)


def test_the_inspectors_newer_files_say_once_whose_they_are(tmp_path: pathlib.Path) -> None:
    """Version 4.3: a line with counts has the header of those that follow. What it lost is told; details of proxies are no
    operations."""
    old = [json.loads(line) for line in profiled.inspector_lines((1,)).splitlines()]
    marker = {key: old[0][key] for key in ("header", "metadata")}
    lost = {"coll_records": 10, "coll_dropped_since_last_dump": 7, "coll_dropped_total": 70}
    sent = {"p2p_perf": {"p2p": "Send", "p2p_sn": 1, "p2p_peer": 0, "p2p_msg_size_bytes": 8, "p2p_exec_time_us": 5}}
    lines = [
        {**marker, "dump_stats": lost},
        *({"coll_perf": each["coll_perf"]} for each in old),
        sent,
        {"proxy_trace": {}},
    ]
    (tmp_path / "new").write_text("\n".join(map(json.dumps, lines)))
    (tmp_path / "old").write_text("\n".join(map(json.dumps, old)))
    new, before = summed(tmp_path / "new"), summed(tmp_path / "old")
    assert new.problems == ("new: the inspector lost 7 operations, which are in no sum",) and not before.problems
    moved = dict(new.shares[0].communication)
    assert (moved.pop("send").operations, moved) == (1, before.shares[0].communication)


def test_a_folder_of_ours_has_its_hosts_counters(tmp_path: pathlib.Path) -> None:
    """Readings go to the ranks of their host; those of a host without ranks are named."""
    for rank in range(2):
        one = profiled.record(rank, 2)
        kept = [*one.steps, *one.samples]
        (tmp_path / f"rank-{rank}.jsonl").write_text("".join(map(record.line, [one.header, *kept])))
    for host in "ac":
        header = Header(0, 2, host, 9, 0, 0, {"counters": True})
        readings = [Readings(at, {"nic.eth0.rx_bytes": at / 3}) for at in range(3)]
        (tmp_path / f"host-{host}.jsonl").write_text("".join(map(record.line, [header, *readings])))
    (tmp_path / "notes.txt").write_text("mine")
    written(tmp_path / "perfetto.json", profiled.cuda_trace())
    first, second = loaded(tmp_path)
    assert [len(first.readings), len(second.readings), len(first.steps), len(first.samples)] == [3, 0, 4, 3]
    assert any("host c belong to no rank" in each for each in first.problems)
    assert any("perfetto.json, notes.txt, which was not read" in each for each in first.problems)
    with pytest.raises(Config, match="no rank: give the folder"):
        load(tmp_path / "host-a.jsonl")


def test_a_folder_holds_one_kind(tmp_path: pathlib.Path) -> None:
    """Otherwise both kinds are named, each with a file."""
    written(tmp_path / "t.json", profiled.cuda_trace())
    (tmp_path / "i.log").write_text(profiled.inspector_lines())
    with pytest.raises(Config, match=r"NCCL's inspector \(i.log\), traces of torch.profiler \(t.json\)"):
        load(tmp_path)
