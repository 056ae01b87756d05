"""What all simulators ask of a cluster file."""

from __future__ import annotations

from collections.abc import Collection

import click
from click.core import ParameterSource

from penstock.cluster import file
from penstock.cluster.network import Cluster, Job

__all__ = ["check_links", "load", "only_job", "refuse_others"]


def load(path: str, fixes: Collection[str]) -> Cluster:
    """The cluster of `--cluster`, which takes the place of these options.

    Raises:
        click.UsageError: one of them is given as well.
        penstock.errors.Config: the file describes no cluster.
    """
    context = click.get_current_context()
    for option in context.command.params:
        if option.name in fixes and context.get_parameter_source(option.name) is not ParameterSource.DEFAULT:
            raise click.UsageError(
                f"--cluster {path} says what the network is, and so does {option.opts[0]}: leave out one of them"
            )
    return file.load(path, f"--cluster {path}")


def only_job(cluster: Cluster) -> Job:
    if len(cluster.jobs) != 1:
        raise cluster.wrong("jobs", f"the simulator takes one, here are {len(cluster.jobs)}")
    return cluster.jobs[0]


def check_links(cluster: Cluster) -> None:
    if not cluster.links:
        raise cluster.wrong(
            "hosts", "the simulator needs to know what joins them: describe it in `switches:` and `links:`"
        )


def refuse_others(cluster: Cluster, number: int) -> None:
    """Raises penstock.errors.Config for what no simulator has and a link does."""
    if cluster.links[number].flow_caps_bit_s:
        raise cluster.wrong(
            f"links[{number}].flow_cap", "the simulator has no limit per flow: leave it out, or measure on a testbed"
        )
    if cluster.links[number].background_bit_s:
        raise cluster.wrong(
            f"links[{number}].background",
            "the simulator has no traffic of others: leave it out, and take it off the `rate`",
        )
