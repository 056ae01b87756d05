"""Changes that `penstock profile --apply` makes to a script without touching it."""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from penstock.tools.profile.recorder.collectives import rebind
from penstock.tools.profile.run import CHANGE, MARKS

__all__ = ["has_gradient_reducer", "make", "make_in_reducers"]

_has_reducer = False
_change: dict[str, Any] = {}
_marks: Path | None = None


def has_gradient_reducer() -> bool:
    """Whether the script has built one: as DDP it has buckets, and sends in another dtype if asked to."""
    return _has_reducer


def make(given: Mapping[str, str]) -> None:
    """Make the changes that a variable names, also where the script gives another bucket size, or gloo. Hooks, dtypes on the wire
    and other backends of its own stay. Each that was made leaves ``made-NAME`` among the marks. Called once torch is imported.

    Args:
        given: the environment, as the process began with it.
    """
    global _change, _marks
    _change, _marks = json.loads(given.get(CHANGE) or "{}"), Path(given[MARKS]) if MARKS in given else None
    change = _change
    if not change or not torch.distributed.is_available():
        return
    if "backend" in change:
        _change_backend(change["backend"])
    if "bucket_cap_mb" in change:
        _change_buckets(change["bucket_cap_mb"])
    if change.get("comm_hook") == "float16":
        _change_hook()


def make_in_reducers(module: types.ModuleType) -> None:
    """The same in GradientReducers, once their module is imported; also without a change, to know whether there is one."""
    change = _change
    original = module.GradientReducer.__init__

    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        global _has_reducer
        made = []
        if "bucket_cap_mb" in change:
            kwargs["bucket_bytes"] = change["bucket_cap_mb"] << 20
            made.append("bucket_cap_mb")
        if change.get("comm_hook") == "float16" and kwargs.get("wire") is None:
            kwargs["wire"] = torch.float16
            made.append("comm_hook")
        original(self, *args, **kwargs)
        _has_reducer = True
        for name in made:
            _made(name)

    module.GradientReducer.__init__ = init


def _made(name: str) -> None:
    if _marks is not None:
        with contextlib.suppress(OSError):
            (_marks / f"made-{name}").touch()


def _change_backend(backend: str) -> None:
    """The script's gloo is another backend: for the default group and new ones. So is torch's choice for the CPU, which is gloo;
    what is named for other devices stays."""
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
        other = _instead(given, backend, is_default=original.__name__ == "init_process_group")
        if other is not None:
            _made("backend")
            at = parameters.index("backend")
            if at < len(args):
                args = (*args[:at], other, *args[at + 1 :])
            else:
                kwargs["backend"] = other
        return original(*args, **kwargs)

    return changed


def _instead(given: Any, backend: str, *, is_default: bool) -> str | None:
    """What takes the place of a backend as the script has given it, if that is gloo for tensors of the CPU.

    Args:
        is_default: where none is given, torch chooses; else it is the default group's, which is changed already.
    """
    if given is None:
        if not is_default:
            return None
        others = {
            device: name
            for device, name in torch.distributed.Backend.default_device_backend_map.items()
            if device != "cpu"
        }
        here = {
            device: name
            for device, name in others.items()
            if getattr(torch, device, None) and getattr(torch, device).is_available()
        }
        return ",".join(f"{device}:{name}" for device, name in {"cpu": backend, **here}.items())
    if not isinstance(given, str):
        return None
    named = [part.strip().lower() for part in given.split(",")]
    if named == ["gloo"]:
        return backend
    if "cpu:gloo" in named:
        return ",".join(f"cpu:{backend}" if part == "cpu:gloo" else part for part in named)
    return None


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
