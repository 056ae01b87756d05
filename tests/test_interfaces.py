"""Proves that streams use the interfaces that they are told to, all of them, over IPv4 and over IPv6."""

from __future__ import annotations

import collections
import contextlib
import re

import psutil
import pytest
import torch
import torch.distributed as dist

import penstock
import ranks
from backends import ALL

TCP = ALL["penstock-tcp"]


@pytest.mark.parametrize(
    ("setting", "interfaces", "expected"),
    [
        ("PENSTOCK_INTERFACE", "127.0.0.1,::1", {"127.0.0.1": 3, "::1": 3}),
        ("PENSTOCK_INTERFACE", "::1", {"::1": 6}),
        ("NCCL_SOCKET_IFNAME", "l", {"127.0.0.1": 6}),
    ],
)
def test_streams_take_turns(setting: str, interfaces: str, expected: dict[str, int]) -> None:
    """Six streams of a pair are spread over the interfaces evenly, and all of them carry."""
    if "::1" in expected and not ranks.has_ipv6():
        pytest.skip("no IPv6 here")
    env = {**TCP.env, "PENSTOCK_STREAMS": "6", "GLOO_SOCKET_IFNAME": None, setting: interfaces}
    values = ranks.run(count_streams, count=2, env=env)
    listening = {tuple(address) for value in values for address in value["listening"]}
    assert collections.Counter(ip for ip, port in listening) == dict.fromkeys(expected, 2), listening
    remotes = [remote for value in values for remote in value["remotes"] if tuple(remote) in listening]
    assert collections.Counter(ip for ip, port in remotes) == expected, remotes
    for value in values:
        assert len(value["sent_bytes"]) == 6 and all(value["sent_bytes"]), value


def test_one_stream_within_a_host() -> None:
    """Two ranks at addresses of one host have one stream where PENSTOCK_STREAMS is not set, and those of two hosts sixteen. (That
    the number is kept where it is set: above.)"""
    from penstock.tools import testbed

    env = {**TCP.env, "PENSTOCK_STREAMS": None}
    for value in ranks.run(count_streams, count=2, env=env):
        assert len(value["sent_bytes"]) == 1, value
    with testbed.Testbed(hosts=2) as bed:
        for value in ranks.run(count_streams, count=2, env=env, bed=bed):
            assert len(value["sent_bytes"]) == 16, value


ASKED = ["PENSTOCK_INTERFACE", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"]


@pytest.mark.parametrize("first", range(len(ASKED)), ids=ASKED)
def test_the_first_variable_that_is_set_decides(first: int) -> None:
    """What a later one names does not even have to exist; the log says which variable it was."""
    env = {**TCP.env, "PENSTOCK_LOG": "info", **dict.fromkeys(ASKED[:first]), **dict.fromkeys(ASKED[first:], "nosuch0")}
    with ranks.Ranks(count_streams, count=2, env={**env, ASKED[first]: "lo"}) as job:
        outcomes = job.outcomes(timeout_s=60)
    assert all(outcome.ok for outcome in outcomes), "\n".join(map(str, outcomes))
    assert {ip for outcome in outcomes for ip, _ in outcome.value["listening"]} <= {"127.0.0.1", "::1"}
    assert any(re.search(rf"over lo .*\({ASKED[first]}\b", outcome.output) for outcome in outcomes), str(outcomes[0])
    with ranks.Ranks(count_streams, count=2, env=env) as job:
        for outcome in job.outcomes(timeout_s=60, grace_s=20):
            assert outcome.raised is not None and ASKED[first] in outcome.raised.text, str(outcome)


def test_two_addresses_of_two_hosts() -> None:
    """The same between hosts: an IPv4 and an IPv6 address each, and streams leave from the address that is told."""
    from penstock.tools import testbed

    with contextlib.ExitStack() as stack:
        bed = stack.enter_context(testbed.Testbed(hosts=2))
        addresses = [[bed.address(host, family) for family in (4, 6)] for host in range(2)]
        own = {rank: {"PENSTOCK_INTERFACE": ",".join(both)} for rank, both in enumerate(addresses)}
        values = ranks.run(count_streams, count=2, env={"PENSTOCK_STREAMS": "6"}, env_of_rank=own, bed=bed)
    listening = {tuple(address) for value in values for address in value["listening"]}
    assert {ip for ip, port in listening} >= {ip for host in addresses for ip in host}
    streams = [
        (local[0], remote[0])
        for value in values
        for local, remote in zip(value["locals"], value["remotes"], strict=True)
        if tuple(remote) in listening and remote[0] != local[0] and tuple(remote)[1] != value["master_port"]
    ]
    (zero_v4, zero_v6), (one_v4, one_v6) = addresses
    counts = collections.Counter(tuple(sorted(pair)) for pair in streams)
    assert counts == {tuple(sorted((zero_v4, one_v4))): 3, tuple(sorted((zero_v6, one_v6))): 3}, streams
    for value in values:
        assert len(value["sent_bytes"]) == 6 and all(value["sent_bytes"]), value


def count_streams() -> dict[str, list]:
    """What a rank listens on, the two ends of its connections, and the bytes that each of its streams has sent."""
    import os

    dist.init_process_group("penstock")
    tensor = torch.full((1 << 22,), dist.get_rank() + 1.0)
    dist.all_reduce(tensor)
    assert tensor.eq(3.0).all(), tensor
    (peer,) = penstock.stats()["peers"]
    connections = psutil.Process().net_connections(kind="tcp")
    listening = [tuple(c.laddr) for c in connections if c.status == psutil.CONN_LISTEN]
    established = [c for c in connections if c.status == psutil.CONN_ESTABLISHED]
    dist.barrier()
    dist.destroy_process_group()
    return {
        "listening": listening,
        "locals": [tuple(c.laddr) for c in established],
        "remotes": [tuple(c.raddr) for c in established],
        "sent_bytes": [stream["sent_bytes"] for stream in peer["streams"]],
        "master_port": int(os.environ["MASTER_PORT"]),
    }
