"""Self-tuning: streams, bucket size, algorithm and compression, found during the first steps of training.

- `space`: settings, and which of them may be tried.
- `searchers`: plug-ins that propose settings. `bandit`: which of them proposes next.
- `session`: one tuning, from the first trial to the choice. `tuner`: sessions, and the watch between them.
- `graphs`, `memory`: settings of earlier jobs, and which of these jobs is most similar.
- `explain`, `cli`: records as text, and ``penstock tune``.

Everything is a pure function of a seed and the costs that are handed in, but for the two files that `memory` and
records live in. Nothing here imports torch. ``docs/design/tuner.md`` has the ideas and the figures.
"""

from penstock.training.tune.graphs import Graph, model_graph, parameter_graph, topology_graph
from penstock.training.tune.memory import Entry, Match, Memory
from penstock.training.tune.searchers import SEARCHERS, Searcher
from penstock.training.tune.session import Options, Session
from penstock.training.tune.space import Axis, Setting, Space
from penstock.training.tune.tuner import Applies, Drift, State, Tuner, load_record, save_record, verify

__all__ = [
    "SEARCHERS",
    "Applies",
    "Axis",
    "Drift",
    "Entry",
    "Graph",
    "Match",
    "Memory",
    "Options",
    "Searcher",
    "Session",
    "Setting",
    "Space",
    "State",
    "Tuner",
    "load_record",
    "model_graph",
    "parameter_graph",
    "save_record",
    "topology_graph",
    "verify",
]
