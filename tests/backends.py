"""The backends that the tests run on: TEST_BACKENDS, a comma-separated list of the labels below."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping


@dataclasses.dataclass(frozen=True)
class Backend:
    """A backend name of torch, and the environment that selects one of its transports."""

    label: str
    name: str
    env: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def __str__(self) -> str:
        return self.label


ALL = {
    backend.label: backend
    for backend in (
        Backend("gloo", "gloo"),
        Backend("penstock", "penstock"),
        # As many streams as between hosts.
        Backend("penstock-tcp", "penstock", {"PENSTOCK_SHM": "0", "PENSTOCK_STREAMS": "16"}),
    )
}

BACKENDS = [ALL[label] for label in os.environ.get("TEST_BACKENDS", "penstock,penstock-tcp").split(",")]
