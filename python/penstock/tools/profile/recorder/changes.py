"""Changes that `penstock profile --apply` makes to a script without touching it."""

from __future__ import annotations

import functools
import inspect
import json
import os
from pathlib import Path
from typing import Any

import torch

from penstock.tools.profile.recorder.collectives import rebind
from penstock.tools.profile.run import CHANGE

__all__ = ["make"]


def make() -> None:
    """Make the changes that the variable names, where the script lets them: what it would have no place for, or has decided
    itself, stays as it is. Each that was made leaves ``.profile-made-NAME`` in the folder. Called once torch is imported."""
    text = os.environ.get(CHANGE)
    if not text or not torch.distributed.is_available():
        return
    change = json.loads(text)
    if "backend" in change:
        _change_backend(change["backend"])
    if "bucket_cap_mb" in change:
        _change_buckets(change["bucket_cap_mb"])
    if change.get("comm_hook") == "float16":
        _change_hook()


def _made(name: str) -> None:
    try:
        (Path(os.environ["PENSTOCK_PROFILE"]) / f".profile-made-{name}").touch()
    except OSError:
        pass


def _change_backend(backend: str) -> None:
    """The script's gloo is another backend: for the default group and new ones."""
    import torch.distributed.distributed_c10d as c10d

    if backend not in c10d.Backend.backend_list:
        import penstock.torch  # noqa: F401  (where torch loads no backends by itself)

    for name in ("init_process_group", "new_group"):
        original = getattr(c10d, name)
        rebind(name, original, _with_backend(original, backend))


def _with_backend(original: Any, backend: str) -> Any:
    parameters = list(inspect.signature(original).parameters)

    @functools.wraps(original)
    def changed(*args: Any, **kwargs: Any) -> Any:
        given = {**dict(zip(parameters, args, strict=False)), **kwargs}.get("backend")
        if isinstance(given, str) and given.lower() == "gloo":
            _made("backend")
            if "backend" in kwargs:
                kwargs["backend"] = backend
            else:
                at = parameters.index("backend")
                args = (*args[:at], backend, *args[at + 1 :])
        return original(*args, **kwargs)

    return changed


def _change_buckets(size_mb: int) -> None:
    from torch.nn.parallel import DistributedDataParallel

    original = DistributedDataParallel.__init__
    signature = inspect.signature(original)

    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        try:
            given = signature.bind(self, *args, **kwargs)
        except TypeError:
            original(self, *args, **kwargs)  # which says what is wrong
            return
        given.arguments["bucket_cap_mb"] = size_mb
        given.arguments.pop("bucket_cap_mb_list", None)
        original(*given.args, **given.kwargs)
        _made("bucket_cap_mb")

    DistributedDataParallel.__init__ = init  # type: ignore[method-assign]


def _change_hook() -> None:
    """At the first forward pass, since there can be one hook, and that of the script goes first."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
    from torch.nn.parallel import DistributedDataParallel

    original = DistributedDataParallel.forward
    asked = "_penstock_profile_asked"

    @functools.wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if asked not in self.__dict__ and not torch.compiler.is_compiling():
            self.__dict__[asked] = True
            if not self._comm_hooks:
                try:
                    self.register_comm_hook(None, default_hooks.fp16_compress_hook)
                    _made("comm_hook")
                except (RuntimeError, TypeError, ValueError):
                    self._comm_hooks.clear()  # one that is built in
        return original(self, *args, **kwargs)

    DistributedDataParallel.forward = forward  # type: ignore[method-assign]
