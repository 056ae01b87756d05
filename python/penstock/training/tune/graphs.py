"""The paper's two graphs, what the job computes and what it runs on, and how far two of either are apart. Pure.

Graph edit distance is NP-hard. What is computed here is an upper bound that is tight where graphs are alike: the cost of
the edits that a bipartite assignment of nodes implies (Riesen and Bunke 2009). It is deterministic, which a search with
a time limit is not, and takes O(n^3): under a second at `MAX_NODES`; larger model graphs are folded to that many first.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

__all__ = ["Graph", "distance", "least_distance", "model_graph", "parameter_graph", "topology_graph"]


@dataclass(frozen=True)
class Graph:
    """Labelled nodes and edges.

    Edits cost: 1 to insert or delete a node or an edge; 1 to make a node of another kind of it; else, for a node, log2 of
    the ratio of both sizes over 4, at most 1 (so a factor of 16 is another node), and for an edge, log2 of the ratio of
    both weights, at most 1 (so half the bandwidth is another edge).
    """

    nodes: tuple[tuple[str, float], ...]
    """(kind, size), in an order that means something: equal graphs have their nodes in equal order."""
    edges: tuple[tuple[int, int, float], ...]
    """(from, to, weight above 0), each pair once."""
    directed: bool

    @property
    def size(self) -> int:
        """What it costs to delete everything."""
        return len(self.nodes) + len(self.edges)

    def to_json(self) -> dict[str, Any]:
        return {
            "nodes": [list(n) for n in self.nodes],
            "edges": [list(e) for e in self.edges],
            "directed": self.directed,
        }

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Graph:
        """Raises ValueError, TypeError or KeyError where the document is not one of `to_json`."""
        nodes = tuple((str(kind), float(size)) for kind, size in document["nodes"])
        edges = tuple((int(a), int(b), float(weight)) for a, b, weight in document["edges"])
        pairs = {(a, b) for a, b, _ in edges}
        if len(nodes) > MAX_NODES or len(pairs) != len(edges):
            raise ValueError("too many nodes, or an edge twice")
        if not all(0 <= a < len(nodes) and 0 <= b < len(nodes) and a != b and w > 0 for a, b, w in edges):
            raise ValueError("an edge without its nodes, or without a positive weight")
        return cls(nodes, edges, bool(document["directed"]))


def model_graph(model: Any) -> Graph:
    """The graph of a torch.nn.Module: a DAG whose nodes are its modules, with their class and their own parameters.

    Edges lead from a module to those that it contains, and from each module with parameters to the next one in
    registration order, which in most models is the order of the forward pass. The data flow itself is not traced: that
    would run the model, and fail on some. Models of more than `MAX_NODES` modules are folded: the deepest modules count
    as part of those that contain them.
    """
    modules: dict[str, tuple[str, int, bool]] = {}
    for name, module in model.named_modules():
        own = sum(parameter.numel() for parameter in module.parameters(recurse=False))
        modules[name] = (type(module).__name__, own, own > 0)
    while len(modules) > MAX_NODES:
        deepest = max(name.count(".") for name in modules if name)
        folded: dict[str, tuple[str, int, bool]] = {}
        for name, (kind, own, _) in modules.items():
            keep = name if name.count(".") < deepest or not name else name.rpartition(".")[0]
            before = folded.get(keep, (kind, 0, False))
            folded[keep] = (before[0], before[1] + own, before[1] + own > 0)
        if len(folded) == len(modules) or deepest == 0:
            folded = dict(list(modules.items())[:MAX_NODES])
        modules = folded
    index = {name: position for position, name in enumerate(modules)}
    edges: dict[tuple[int, int], float] = {}
    for name, position in index.items():
        parent = name.rpartition(".")[0]
        if name and parent in index:
            edges[index[parent], position] = 1.0
    flow = [index[name] for name, (_, _, has) in modules.items() if has]
    for before_, after in itertools.pairwise(flow):
        edges.setdefault((before_, after), 1.0)
    nodes = tuple((kind, float(own)) for kind, own, _ in modules.values())
    return Graph(nodes, tuple((a, b, weight) for (a, b), weight in sorted(edges.items())), directed=True)


def parameter_graph(sizes: Sequence[int]) -> Graph:
    """The graph of a model of which only its parameters' sizes are known: a chain. More than `MAX_NODES` are merged evenly."""
    if len(sizes) > MAX_NODES:
        cuts = [round(k * len(sizes) / MAX_NODES) for k in range(MAX_NODES + 1)]
        sizes = [sum(sizes[a:b]) for a, b in itertools.pairwise(cuts)]
    edges = tuple((k, k + 1, 1.0) for k in range(len(sizes) - 1))
    return Graph(tuple(("parameter", float(size)) for size in sizes), edges, directed=True)


def topology_graph(hosts: Sequence[tuple[str, int]], bandwidths: Mapping[tuple[int, int], float]) -> Graph:
    """The graph of a cluster: undirected, nodes are hosts, edges the bandwidth between two.

    Args:
        hosts: (kind, ranks on it) of each, in rank order. The kind names what a host is, say its device.
        bandwidths: bytes a second for pairs of indices into `hosts`; either order of a pair. Pairs that are left out have
            no edge. Round measured ones: the distance takes every difference for one.
    """
    edges = {(min(pair), max(pair)): float(bandwidth) for pair, bandwidth in bandwidths.items()}
    nodes = tuple((kind, float(ranks)) for kind, ranks in hosts)
    return Graph(nodes, tuple((a, b, weight) for (a, b), weight in sorted(edges.items())), directed=False)


def distance(one: Graph, other: Graph) -> float:
    """An upper bound of the graph edit distance over the cost of deleting one and inserting the other: from 0, equal, to 1.

    Raises:
        ValueError: one graph is directed, the other is not.
    """
    if one.directed != other.directed:
        raise ValueError("a directed and an undirected graph cannot be compared")
    if one == other:
        return 0.0
    return edits(one, other) / (one.size + other.size)


def least_distance(one: Graph, other: Graph) -> float:
    """A lower bound of `distance` in linear time: nodes matched by kind alone, edges by their number."""
    kinds: dict[str, list[int]] = {}
    for side, graph in enumerate((one, other)):
        for kind, _ in graph.nodes:
            kinds.setdefault(kind, [0, 0])[side] += 1
    common = sum(min(counts) for counts in kinds.values())
    nodes = max(len(one.nodes), len(other.nodes)) - common
    total = one.size + other.size
    return (nodes + abs(len(one.edges) - len(other.edges))) / total if total else 0.0


def edits(one: Graph, other: Graph) -> float:
    """What it costs to edit one graph into the other along an assignment of nodes. At least the graph edit distance.

    The assignment minimises, over pairs of nodes, their own difference plus half that of their edges (an edge has two ends),
    with insertion and deletion as further choices. Where several are as good, the one that keeps the nodes' order wins:
    else equal layers of a model would be matched crosswise, and equal graphs be far apart.
    """
    # scipy is an extra, and takes a tenth of a second to import; only a start from memory needs it.
    from scipy.optimize import linear_sum_assignment

    n, m = len(one.nodes), len(other.nodes)
    if n == 0 or m == 0:
        return float(one.size + other.size)
    nodes_NM = _node_costs(one, other)
    weights_NN, weights_MM = _weights(one), _weights(other)
    local_NM = nodes_NM + 0.5 * _edge_profile_costs(weights_NN, weights_MM, one.directed)
    place_NM = np.abs(np.arange(n)[:, None] / n - np.arange(m)[None, :] / m)
    costs = np.full((n + m, n + m), FORBIDDEN)
    costs[:n, :m] = local_NM + TIE * place_NM
    costs[range(n), range(m, m + n)] = 1 + 0.5 * _degrees(weights_NN, one.directed)
    costs[range(n, n + m), range(m)] = 1 + 0.5 * _degrees(weights_MM, other.directed)
    costs[n:, m:] = 0.0
    rows, columns = linear_sum_assignment(costs)

    matched = [(i, j) for i, j in zip(rows.tolist(), columns.tolist(), strict=True) if i < n and j < m]
    left = np.array([i for i, _ in matched], dtype=int)
    right = np.array([j for _, j in matched], dtype=int)
    node_cost = float(nodes_NM[left, right].sum()) + (n - len(matched)) + (m - len(matched))
    a, b = weights_NN[np.ix_(left, left)], weights_MM[np.ix_(right, right)]
    both = (a > 0) & (b > 0)
    ratio = np.abs(np.log2(np.where(both, a, 1.0)) - np.log2(np.where(both, b, 1.0)))
    # Edges between matched nodes are kept, changed, inserted or deleted; all others are inserted or deleted.
    inside = np.minimum(1.0, ratio).sum() + ((a > 0) != (b > 0)).sum()
    outside = (weights_NN > 0).sum() - (a > 0).sum() + (weights_MM > 0).sum() - (b > 0).sum()
    return node_cost + float(inside + outside) / (1 if one.directed else 2)


def _node_costs(one: Graph, other: Graph) -> Any:
    kinds = sorted({kind for kind, _ in (*one.nodes, *other.nodes)})
    kind_N, kind_M = (np.array([kinds.index(kind) for kind, _ in graph.nodes]) for graph in (one, other))
    size_N, size_M = (np.array([math.log2(1 + size) for _, size in graph.nodes]) for graph in (one, other))
    sizes_NM = np.minimum(1.0, np.abs(size_N[:, None] - size_M[None, :]) / 4)
    return np.where(kind_N[:, None] != kind_M[None, :], 1.0, sizes_NM)


def _weights(graph: Graph) -> Any:
    weights = np.zeros((len(graph.nodes), len(graph.nodes)))
    for a, b, weight in graph.edges:
        weights[a, b] = weight
        if not graph.directed:
            weights[b, a] = weight
    return weights


def _degrees(weights: Any, directed: bool) -> Any:
    out = (weights > 0).sum(axis=1)
    return out + (weights > 0).sum(axis=0) if directed else out


def _edge_profile_costs(weights_NN: Any, weights_MM: Any, directed: bool) -> Any:
    """What the edges of each pair of nodes differ by at least: both sorted by weight, and compared in that order."""
    total = _profile_costs(weights_NN, weights_MM)
    return total + _profile_costs(weights_NN.T, weights_MM.T) if directed else total


def _profile_costs(weights_NN: Any, weights_MM: Any) -> Any:
    depth = int(max((weights_NN > 0).sum(axis=1).max(), (weights_MM > 0).sum(axis=1).max()))
    costs = np.zeros((len(weights_NN), len(weights_MM)))
    sorted_N, sorted_M = (
        np.pad(-np.sort(-w, axis=1), ((0, 0), (0, depth)))[:, :depth] for w in (weights_NN, weights_MM)
    )
    for k in range(depth):
        a, b = sorted_N[:, k, None], sorted_M[None, :, k]
        both = (a > 0) & (b > 0)
        ratio = np.abs(np.log2(np.where(a > 0, a, 1.0)) - np.log2(np.where(b > 0, b, 1.0)))
        costs += np.where(both, np.minimum(1.0, ratio), ((a > 0) != (b > 0)).astype(float))
    return costs


# The paper wants more than 100 nodes. At 400 an assignment takes a fifth of a second on one core.
MAX_NODES = 400

# What no assignment may take; far above any sum of edits, yet small enough that sums keep their digits.
FORBIDDEN = 1e7

# Far below the smallest difference that means something, far above rounding.
TIE = 1e-6
