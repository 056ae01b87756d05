"""Horovod's names, where Horovod has them (docs/guide/horovod.md). `penstock.fronts.horovod.common` defines them."""

from __future__ import annotations

from penstock.horovod.common import elastic as elastic
from penstock.horovod.common import exceptions as exceptions
from penstock.horovod.common import process_sets as process_sets
from penstock.horovod.common import util as util
