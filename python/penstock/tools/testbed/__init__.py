"""Emulated clusters on one machine: real processes, real kernel TCP, links as slow and as lossy as you say.

A `Testbed` is N hosts, each a network namespace with one interface, joined by a switch (a bridge in a namespace of its
own). The machine's own network is never touched, nothing gets a name in ``/run/netns``, and the kernel frees
everything when the processes that hold it are gone, however they went (`keeper`).

- `link`: what a link is like, and the ``tc`` commands that make it so. Pure.
- `topology`: clusters from counts of hosts, racks and servers. Pure.
- `wiring`: how a cluster becomes namespaces, bridges and links. Pure.
- `routing`: how switches route, where several ways lead through a cluster. Pure.
- `carry`: a deployment's routes on a testbed.
- `bed`: processes on hosts and their end; and `Loopback`, which has the same face and no network.
- `cluster`: namespaces, wires, counters, faults: `Testbed`.
- `kept`: the testbeds that stay up, by name.
- `system`: rights, tools, and what the kernel says of a network.
- `launch`: ranks over hosts, their output, their end: `CompletedRun`.
- `namespace`, `keeper`, `rank`, `relay`: the parts that run in other threads or processes.
- `cli`: ``penstock testbed up | run | down | show | links | route | write``.
"""

from penstock.tools.testbed.bed import Loopback
from penstock.tools.testbed.cli import command
from penstock.tools.testbed.cluster import Testbed
from penstock.tools.testbed.launch import CompletedRun
from penstock.tools.testbed.link import FlowClass, LinkSpec, flow_class
from penstock.tools.testbed.system import TestbedUnavailable
from penstock.tools.testbed.topology import LinkTraffic, Topology

__all__ = [
    "CompletedRun",
    "FlowClass",
    "LinkSpec",
    "LinkTraffic",
    "Loopback",
    "Testbed",
    "TestbedUnavailable",
    "Topology",
    "command",
    "flow_class",
]
