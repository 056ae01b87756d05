"""Proves what messages from rank to rank promise: they meet by direction, tag and order, however late the receiver is, and
what a sender was told to be sent arrives, in bounded memory. Parts of an all-to-all are such messages too."""

from __future__ import annotations

import contextlib
import datetime
import os
import pathlib
import random
import signal
import time

import pytest
import torch
import torch.distributed as dist

import penstock
import penstock.errors
import penstock.tools.flight
import ranks
from backends import ALL, BACKENDS, Backend

# More than the engine's patience (1 s) before it asks the other side where it is.
LATE_S = 1.3
ROOT_SENDS = ("send", "broadcast", "scatter")


def _pattern(key: object, count: int) -> torch.Tensor:
    seed = random.Random(str(key)).randrange(1 << 20)
    return torch.arange(seed, seed + count, dtype=torch.float32)


def _check(tensor: torch.Tensor, key: object) -> None:
    assert torch.equal(tensor, _pattern(key, tensor.numel())), f"{key}: {tensor.numel()} elements, {tensor[:4]}"


def _ask(rank: int) -> None:
    """Rank 0 asks with a large tensor; rank 1 receives late and answers with a small one of the same tag."""
    answer, question = torch.empty(10), torch.empty(200_000)
    if rank == 0:
        sent = dist.isend(_pattern("question", 200_000), 1)
        dist.recv(answer, 1)
        _check(answer, "answer")
        sent.wait()
    else:
        time.sleep(LATE_S)
        dist.recv(question, 0)
        _check(question, "question")
        dist.send(_pattern("answer", 10), 0)


def _cross(rank: int) -> None:
    """Both send first, by one element unlike, and receive late."""
    counts = [300_000, 300_001]
    sent = dist.isend(_pattern(rank, counts[rank]), 1 - rank)
    time.sleep(LATE_S)
    received = torch.empty(counts[1 - rank])
    dist.recv(received, 1 - rank)
    _check(received, 1 - rank)
    sent.wait()


def _generated(rank: int, seed: int) -> None:
    """Messages in both directions under few tags, sizes from nothing to long, posted in random orders, one side late."""
    shared, own = random.Random(seed), random.Random(f"{seed} {rank}")
    sizes = [0, 1, 10, 2048, 8191, 8192, 8193, 70_000, 200_000]
    messages = [(sender, tag, turn, shared.choice(sizes)) for sender in (0, 1) for tag in range(3) for turn in range(4)]
    lines: dict[tuple[int, int], list[tuple[int, int, int, int]]] = {}
    for message in messages:
        lines.setdefault(message[:2], []).append(message)
    late = shared.randrange(2) == rank
    works, received = [], []
    while any(lines.values()):
        line = own.choice([line for line in lines.values() if line])
        message = line.pop(0)
        sender, tag, _, count = message
        if sender == rank:
            works.append(dist.isend(_pattern(message, count), 1 - rank, tag=tag))
        else:
            if late:
                time.sleep(LATE_S)
                late = False
            received.append((message, torch.empty(count)))
            works.append(dist.irecv(received[-1][1], 1 - rank, tag=tag))
    own.shuffle(works)
    for work in works:
        work.wait()
    for message, tensor in received:
        _check(tensor, message)


def _program(backend: str, part: str, seed: int) -> None:
    dist.init_process_group(backend, timeout=datetime.timedelta(seconds=30))
    rank = dist.get_rank()
    match part:
        case "ask":
            _ask(rank)
        case "cross":
            _cross(rank)
        case _:
            _generated(rank, seed)
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.parametrize("backend", BACKENDS, ids=str)
@pytest.mark.parametrize(("part", "seed"), [("ask", 0), ("cross", 0), *(("generated", seed) for seed in range(4))])
def test_directions(backend: Backend, part: str, seed: int) -> None:
    """The two directions between two ranks have nothing to do with each other, whatever their sizes, under one tag."""
    ranks.run(_program, count=2, args=(backend.name, part, seed), env=backend.env)


def _leaves(backend: str, count: int) -> None:
    """Rank 0 sends more than fits anywhere and leaves; rank 1 receives when an impatient sender would be gone."""
    dist.init_process_group(backend, timeout=datetime.timedelta(seconds=30))
    if dist.get_rank() == 0:
        for turn in range(count):
            dist.send(_pattern(turn, 2048), 1)
    else:
        time.sleep(3)
        received = torch.empty(2048)
        for turn in range(count):
            dist.recv(received, 0)
            _check(received, turn)
    dist.destroy_process_group()


@pytest.mark.parametrize("backend", BACKENDS, ids=str)
def test_what_was_sent_arrives(backend: Backend) -> None:
    """A send that returned is delivered although the sender leaves before the receiver looks."""
    ranks.run(_leaves, count=2, args=(backend.name, 400), env=backend.env)


def _ahead(backend: str, call: str, count: int) -> int:
    """A rank makes its calls ahead of the other, which comes late; returns by how many bytes that made it grow."""
    dist.init_process_group(backend, timeout=datetime.timedelta(seconds=30))
    rank, grown = dist.get_rank(), 0
    # The root of a gather or reduce only receives: there the other rank runs ahead.
    is_ahead = (rank == 0) == (call in ROOT_SENDS)
    sent, received = _pattern("ahead", 2048), torch.empty(2048)

    def issue() -> dist.Work | None:
        match call:
            case "send":
                return dist.isend(sent, 1) if rank == 0 else dist.irecv(received, 0)
            case "broadcast":
                return dist.broadcast(sent if rank == 0 else received, 0, async_op=True)
            case "scatter":
                return dist.scatter(received, [sent, sent] if rank == 0 else None, 0, async_op=True)
            case "gather":
                return dist.gather(sent, [received, received] if rank == 0 else None, 0, async_op=True)
            case _:
                return dist.reduce(received.zero_() if rank == 0 else sent, 0, async_op=True)

    def end(work: dist.Work | None) -> None:
        assert work is not None
        work.wait()
        if rank == int(call in ROOT_SENDS):
            _check(received, "ahead")

    if is_ahead:
        end(issue())
        before = _resident_bytes()
        works = [issue() for _ in range(count)]
        held = penstock.stats()["memory_bytes"]
        grown = _resident_bytes() - before
        assert held < 4 << 20, f"the engine holds {held} bytes"
        for work in works:
            end(work)
    else:
        end(issue())
        time.sleep(LATE_S)
        for _ in range(count):
            end(issue())
    dist.barrier()
    dist.destroy_process_group()
    return grown


def _resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE")


@pytest.mark.parametrize("call", ["send", "broadcast", "scatter", "gather", "reduce"])
@pytest.mark.parametrize("backend", BACKENDS, ids=str)
def test_senders_run_ahead_in_bounded_memory(backend: Backend, call: str) -> None:
    """Messages that nobody has received yet stay in the tensors, also those of collectives: 3,000 of 8 KiB cost neither the
    engine nor the process 24 MB. (Objects of torch and Python for 3,000 operations take 14 to 17 MB.)"""
    grown = ranks.run(_ahead, count=2, args=(backend.name, call, 3000), env=backend.env)[0 if call in ROOT_SENDS else 1]
    # The inputs of a scatter are joined to one tensor, which the operation keeps to its end.
    joined = 3000 * 2 * 8192 if call == "scatter" else 0
    assert grown < joined + 3000 * 8192, f"{grown} bytes"


def _far_ahead(backend: str, who: str, count: int) -> None:
    """Rank 0 or rank 1 starts all of its messages before the other one begins."""
    dist.init_process_group(backend, timeout=datetime.timedelta(seconds=60))
    elements = 2304 if who == "sender" else 8448  # 9 KiB go by reference, 33 KiB need a grant
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    tensor = _pattern("far ahead", elements) if dist.get_rank() == 0 else torch.empty(elements)
    call = dist.isend if dist.get_rank() == 0 else dist.irecv
    if (dist.get_rank() == 0) == (who == "sender"):
        works = [call(tensor, 1 - dist.get_rank(), tag=turn % 3) for turn in range(count)]
        store.set("ahead", "")
        for work in works:
            work.wait()
    else:
        store.wait(["ahead"])
        for first in range(0, count, 100):
            works = [call(tensor, 1 - dist.get_rank(), tag=turn % 3) for turn in range(first, min(first + 100, count))]
            for work in works:
                work.wait()
    _check(tensor, "far ahead")
    if backend == "penstock":
        held = penstock.stats()["memory_bytes"]
        assert held < 4 << 20, f"the engine holds {held} bytes"
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.parametrize(("backend", "who"), [(BACKENDS[0], "sender"), (BACKENDS[-1], "receiver")], ids=str)
def test_one_side_runs_far_ahead(backend: Backend, who: str) -> None:
    """66,000 messages that the other side has not posted, by reference or waiting for a grant: all arrive. Beyond 65,536 a rank
    took the other one for defective; the job ended in PeerLost, or over TCP lost stream after stream. (The count is of the core,
    which is the same over all media.)"""
    ranks.run(_far_ahead, count=2, args=(backend.name, who, 66_000), env=backend.env, timeout_s=120)


def _block(backend: str) -> str:
    dist.init_process_group(backend, timeout=datetime.timedelta(seconds=3))
    with pytest.raises(penstock.errors.Timeout) as failure:
        for _ in range(400):
            dist.send(torch.zeros(2048), 1 - dist.get_rank())
    dist.destroy_process_group()
    return str(failure.value)


@pytest.mark.parametrize("backend", BACKENDS, ids=str)
def test_ranks_that_block_each_other(backend: Backend) -> None:
    """Two ranks that send to each other before they receive are both named when the time is over, with the cure."""
    for text in ranks.run(_block, count=2, args=(backend.name,), env=backend.env):
        assert "block each other" in text and "isend" in text, text
        assert "rank 0" in text and "rank 1" in text, text


def _disagree(backend: str, sent: int, expected: int) -> str:
    dist.init_process_group(backend, timeout=datetime.timedelta(seconds=30))
    rank = dist.get_rank()
    inputs, outputs = ([4, sent], [4, 4]) if rank == 0 else ([4, 4], [expected, 4])
    with pytest.raises(penstock.errors.Mismatch) as failure:
        dist.all_to_all_single(torch.zeros(sum(outputs), 2), torch.ones(sum(inputs), 2), outputs, inputs)
    dist.destroy_process_group()
    return str(failure.value)


@pytest.mark.parametrize("backend", BACKENDS, ids=str)
@pytest.mark.parametrize(("sent", "expected"), [(5, 0), (0, 5), (500_000, 0)])
def test_all_to_all_that_disagrees(backend: Backend, sent: int, expected: int) -> None:
    """Splits that disagree are an error on both ranks, at once, that names the two; also where one side is empty."""
    for text in ranks.run(_disagree, count=2, args=(backend.name, sent, expected), env=backend.env, timeout_s=20):
        assert f"sends {2 * sent} elements to rank 1" in text and f"expects {2 * expected}." in text, text


def _to_a_stopped_rank(backend: str) -> float:
    """Rank 0 sends to rank 1, which is stopped, and leaves; returns how long leaving took."""
    dist.init_process_group(backend, timeout=datetime.timedelta(seconds=60))
    pids = [None, None]
    dist.all_gather_object(pids, os.getpid())
    if dist.get_rank() == 1:
        ranks.note("ready")
        dist.recv(torch.empty(2048), 0)
        return 0
    ranks.note("ready")
    deadline = time.monotonic() + 20
    while "T (stopped)" not in pathlib.Path(f"/proc/{pids[1]}/status").read_text():
        assert time.monotonic() < deadline
    start = time.monotonic()
    with contextlib.suppress(KeyboardInterrupt):
        for _ in range(3):
            dist.send(torch.zeros(2048), 1)
        start = time.monotonic()
        ranks.note("leaves")
        dist.destroy_process_group()
    return time.monotonic() - start


@pytest.mark.parametrize("interrupt", [False, True])
@pytest.mark.parametrize("backend", BACKENDS, ids=str)
def test_what_is_not_delivered_is_told(backend: Backend, interrupt: bool) -> None:
    """Whoever leaves waits for a rank that has not taken what was sent to it, until that is lost, and says what it was; Ctrl-C
    ends the wait."""
    env = {**backend.env, "PENSTOCK_PEER_TIMEOUT": "30" if interrupt else "2"}
    with ranks.Ranks(_to_a_stopped_rank, count=2, args=(backend.name,), env=env) as job:
        job.await_note("ready", deadline_s=40)
        job.signal(1, signal.SIGSTOP)
        job.await_note("leaves", deadline_s=40, of=[0])
        if interrupt:
            # Once it waits in the engine, whose wait is a loop of short sleeps.
            wchan, deadline, seen = pathlib.Path(f"/proc/{job.pids[0]}/wchan"), time.monotonic() + 20, 0
            while seen < 100:
                assert time.monotonic() < deadline
                seen = seen + 1 if "nanosleep" in wchan.read_text() else 0
            job.signal(0, signal.SIGINT)
        (outcome,) = job.outcomes(timeout_s=25, of=[0])
        assert outcome.ok, outcome
        assert "messages were sent to rank 1" in outcome.output and "send/recv(2048 x float32) #0" in outcome.output, (
            outcome
        )
        assert outcome.value < 20, f"{outcome.value} s"


# ------------------------------------------------------------------------------------------------------- from any source

# Around what leaves at once, by reference (8 KiB) and over sockets (32 KiB); a long one waits for its receiver.
SIZES = [0, 1, 2047, 2048, 2049, 8191, 8192, 8193, 200_000]


def _from_any(backend: str, seed: int) -> None:
    """Rank 0 receives what the others send under three tags, from any source and from named ranks mixed at random, posted before
    or after it has come. Each receive from any source names its sender, and the messages of a sender fill the receives that took
    them in the order in which these were posted."""
    dist.init_process_group(backend, timeout=datetime.timedelta(seconds=30))
    rank, world = dist.get_rank(), dist.get_world_size()
    rng, own = random.Random(seed), random.Random(f"{seed} {rank}")
    when = rng.choice(["before", "after", "both"])
    calls: list[tuple[int, int | None]] = []
    rest: list[int] = []
    messages: dict[tuple[int, int], int] = {}
    # gloo sends no tensors of no elements.
    counts = [max(rng.choice(SIZES), int(backend == "gloo")) for _ in range(3)]
    for tag in range(3):
        # Whatever those from any source take, they leave enough for those that name a rank.
        anys, named = rng.randrange(4), {sender: rng.randrange(3) for sender in range(1, world)}
        if backend == "gloo":  # its receives that name a rank overtake those that do not
            named = dict.fromkeys(named, 0)
        calls += [(tag, None)] * anys + [(tag, sender) for sender in named for _ in range(named[sender])]
        rest += [tag] * (anys * (world - 2))
        messages |= {(sender, tag): named[sender] + anys for sender in named}
    rng.shuffle(calls)
    works, received = [], []

    def send() -> None:
        lines = {tag: 0 for tag in range(3) if messages[rank, tag]}
        while lines:
            tag = own.choice(list(lines))
            works.append(dist.isend(_pattern((rank, tag, lines[tag]), counts[tag]), 0, tag=tag))
            lines[tag] += 1
            if lines[tag] == messages[rank, tag]:
                del lines[tag]

    def receive(part: list[tuple[int, int | None]]) -> None:
        for tag, sender in part:
            tensor = torch.full((counts[tag],), -1.0)
            received.append((tag, sender, tensor, dist.irecv(tensor, sender, tag=tag)))

    part = {"before": len(calls), "after": 0, "both": len(calls) // 2}[when]
    if rank == 0:
        receive(calls[:part])
    dist.barrier()
    if rank != 0:
        send()
    dist.barrier()
    if rank == 0:
        receive(calls[part:])
        waits = [work for *_, work in received]
        rng.shuffle(waits)
        for work in waits:
            work.wait()
        sources = [sender or work._source_rank() for _, sender, _, work in received]
        for tag in rest:
            tensor = torch.empty(counts[tag])
            sources.append(dist.recv(tensor, tag=tag))
            received.append((tag, None, tensor, None))
        turns = dict.fromkeys(messages, 0)
        for source, (tag, *_, tensor, _) in zip(sources, received, strict=True):
            _check(tensor, (source, tag, turns[source, tag]))
            turns[source, tag] += 1
        assert turns == messages
    for work in works:
        work.wait()
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.parametrize("backend", [*BACKENDS, ALL["gloo"]], ids=str)
@pytest.mark.parametrize("seed", range(9))
def test_from_any_source(backend: Backend, seed: int) -> None:
    """Receives from any source take messages in the order in which they come and leave the others in order; gloo agrees."""
    ranks.run(_from_any, count=2 + seed % 3, args=(backend.name, seed), env=backend.env)


def test_named_behind_any_source() -> None:
    """A receive that names a rank leaves that rank's first message to an earlier receive from any source, as in MPI."""
    ranks.run(_named_behind_any, count=2)


def _named_behind_any() -> None:
    dist.init_process_group("penstock", timeout=datetime.timedelta(seconds=30))
    if dist.get_rank() == 0:
        first, second = torch.zeros(3), torch.zeros(3)
        works = [dist.irecv(first), dist.irecv(second, 1)]
        dist.barrier()
        for work in works:
            assert work is not None
            work.wait()
        _check(first, "first")
        _check(second, "second")
    else:
        dist.barrier()
        dist.send(_pattern("first", 3), 0)
        dist.send(_pattern("second", 3), 0)
    dist.destroy_process_group()


def _in_groups(backend: str) -> None:
    """Ranks 1 to 3 are a group, in which rank 1 receives; rank 0 sends it something else under the same tag, in the default
    group."""
    dist.init_process_group(backend, timeout=datetime.timedelta(seconds=30))
    rank, group = dist.get_rank(), dist.new_group([1, 2, 3])
    if rank == 0:
        dist.send(_pattern("default", 5), 1)
    elif rank == 1:
        tensor = torch.empty(5)
        senders = []
        for _ in range(2):
            senders.append(dist.recv(tensor, group=group))
            _check(tensor, senders[-1])
        assert sorted(senders) == [2, 3]
        work = dist.irecv(tensor)
        if backend == "gloo":  # its work does not move by itself
            work.wait()
        while not work.is_completed():
            os.sched_yield()
        assert work.is_success() and work._source_rank() == 0
        _check(tensor, "default")
        pair = torch.empty(3, dtype=torch.complex64)
        assert dist.recv(pair, group=group, tag=1) == 3
        assert torch.equal(pair, torch.full((3,), 1 - 2j))
    else:
        dist.send(_pattern(rank, 5), 1, group=group)
        if rank == 3:
            dist.send(torch.full((3,), 1 - 2j), 1, group=group, tag=1)
    dist.barrier()
    dist.destroy_process_group()


def _fails(backend: str, how: str) -> tuple[str, str]:
    """Rank 0 receives from any source what never comes; returns what its failure and the other ranks' failures are."""
    dist.init_process_group(backend, timeout=datetime.timedelta(seconds=2 if how == "timeout" else 30))
    rank, tensor, works = dist.get_rank(), torch.full((4,), 7.0), []
    if rank == 0:
        # Rank 1 comes with the others, or leaves first: then the receive that names it ends as well.
        works = [dist.irecv(tensor), dist.irecv(torch.empty(4), None if how == "leave" else 1)]
        assert works[0]._source_rank() == -1 and not works[0].is_completed()
        held = penstock.stats()["held"]["operations"]
        assert held == 2, held
        running = [one for one in penstock.flight_record()["operations"] if one["ended_s_ago"] is None]
        assert [one["number"] for one in running] == [None, None] and "any of the other ranks" in running[0][
            "waits_for"
        ]
        assert "waits for a message from any" in penstock.tools.flight.describe([penstock.flight_record()])
    error: BaseException | None = None
    try:
        # A rank that has ended it may go on and fail the group before others have.
        dist.barrier()
    except penstock.errors.PenstockError as raised:
        error = raised
    ranks.note("posted")
    try:
        if how == "destroy" and rank == 0:
            dist.destroy_process_group()
        if how == "mismatch" and rank == 2:
            dist.send(torch.ones(5), 0)
        if how == "leave" and rank > 0:
            dist.destroy_process_group()
        for work in works:
            work.wait()
        if dist.is_initialized():
            dist.recv(torch.empty(4), tag=9)
    except penstock.errors.PenstockError as raised:
        error = error or raised
    if rank == 0:
        assert torch.equal(tensor, torch.full((4,), 7.0)) and works[0].exception() is not None
    if dist.is_initialized():
        dist.destroy_process_group()
    return type(error).__name__, str(error)


@pytest.mark.parametrize("backend", BACKENDS, ids=str)
@pytest.mark.parametrize("how", ["timeout", "mismatch", "leave", "kill", "destroy"])
def test_from_any_source_without_a_message(backend: Backend, how: str) -> None:
    """A receive from any source that gets no message that fits ends with an error that says why; its tensor is as it was."""
    kind, parts, of = {
        "timeout": ("Timeout", ["Timed out after 2.0 s, waiting for a message from any of the other ranks"], [0]),
        "mismatch": ("Mismatch", ["4 x float32", "5 x float32", "rank 0", "rank 2"], [0, 1, 2]),
        "leave": ("PeerLost", ["rank 1 (", "rank 2 (", "left"], [0]),
        "kill": ("PeerLost", ["rank 2 ("], [0, 1]),
        "destroy": ("Closed", ["rank 0 (", "destroyed the group while operations were running"], [0, 1, 2]),
    }[how]
    with ranks.Ranks(_fails, count=3, args=(backend.name, how), env=backend.env) as job:
        job.await_note("posted", deadline_s=40)
        if how == "kill":
            job.signal(2, signal.SIGKILL)
        outcomes = job.outcomes(timeout_s=25, of=[0, 1] if how == "kill" else None)
    for outcome in outcomes:
        assert outcome.ok, outcome
        if outcome.rank in of:
            found, text = outcome.value
            assert found == kind and all(part in text for part in parts), outcome.value


@pytest.mark.parametrize("backend", [*BACKENDS, ALL["gloo"]], ids=str)
def test_from_any_source_in_groups(backend: Backend) -> None:
    """The source that ``recv`` returns is the rank in the job; groups do not take each other's messages; gloo agrees."""
    ranks.run(_in_groups, count=4, args=(backend.name,), env=backend.env)
