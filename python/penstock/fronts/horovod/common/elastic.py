"""State that survives a failure, and the loop that goes on with it.

``run`` wraps a training function. When a rank is lost or ranks disagree, operations raise `HorovodInternalError` on the ranks
that live: state goes back to its last commit, Horovod is started again, the state of rank 0 is given to all, and the function is
called again. When hosts have changed (`notification_manager`), the same happens without going back.
"""

from __future__ import annotations

import copy
import functools
import queue
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from penstock.fronts.horovod.common.exceptions import HorovodInternalError, HostsUpdatedInterrupt

__all__ = ["HostUpdateResult", "ObjectState", "State", "notification_manager", "run_fn"]


class HostUpdateResult:
    """What has happened to the hosts; a bit each."""

    no_update = 0
    removed = 1
    added = 2
    mixed = removed | added


class NotificationManager:
    """Passes news about hosts on to states. The code that watches the hosts calls `handle_hosts_updated`, from any thread of one
    rank or of all."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._listeners: weakref.WeakSet[State] = weakref.WeakSet()

    def init(self) -> None:
        """Nothing to do; Horovod connects to its driver here."""

    def register_listener(self, listener: State) -> None:
        with self._lock:
            self._listeners.add(listener)

    def remove_listener(self, listener: State) -> None:
        with self._lock:
            self._listeners.discard(listener)

    def handle_hosts_updated(self, timestamp: float | None = None, update_res: int = HostUpdateResult.mixed) -> None:
        """Hosts have come or gone: at its next commit, every rank raises `HostsUpdatedInterrupt`."""
        with self._lock:
            listeners = list(self._listeners)
        for listener in listeners:
            listener.on_hosts_updated(time.time() if timestamp is None else timestamp, update_res)


notification_manager = NotificationManager()


class State:
    """What training needs to go on; derive from it and say how to `save`, `restore` and `sync`.

    Args:
        bcast_object: gives rank 0's object to all ranks.
        get_rank: this process's rank.
    """

    def __init__(self, bcast_object: Callable[[Any], Any], get_rank: Callable[[], int]) -> None:
        self._bcast_object = bcast_object
        self._rank = get_rank
        self._host_messages: queue.Queue[tuple[float, int]] = queue.Queue()
        self._last_updated_timestamp: float = 0
        self._reset_callbacks: list[Callable[[], None]] = []

    def register_reset_callbacks(self, callbacks: Sequence[Callable[[], None]]) -> None:
        """Call these after each reset, when the new number of ranks is known and before states are synchronised."""
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """Horovod was started again."""
        self._host_messages = queue.Queue()
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def on_hosts_updated(self, timestamp: float, update_res: int) -> None:
        """News about hosts; any thread may call it."""
        self._host_messages.put((timestamp, update_res))

    def commit(self) -> None:
        """Save the state in memory, to come back to after a failure, and look for news about hosts.

        Raises:
            HostsUpdatedInterrupt: there is some.

        Cost: a copy of the state, and a broadcast.
        """
        self.save()
        self.check_host_updates()

    def check_host_updates(self) -> None:
        """Raise `HostsUpdatedInterrupt`, on all ranks, if rank 0 has learnt that hosts have changed. Cost: a broadcast."""
        before = newest = self._last_updated_timestamp
        update = HostUpdateResult.no_update
        while not self._host_messages.empty():
            timestamp, one = self._host_messages.get()
            if timestamp > newest:
                newest = timestamp
                update |= one
        before, self._last_updated_timestamp, update = self._bcast_object((before, newest, update))
        if self._last_updated_timestamp > before:
            raise HostsUpdatedInterrupt(update == HostUpdateResult.removed)

    def save(self) -> None:
        """Keep a copy in memory."""
        raise NotImplementedError(f"{type(self).__name__} must say how to save")

    def restore(self) -> None:
        """Go back to the last copy."""
        raise NotImplementedError(f"{type(self).__name__} must say how to restore")

    def sync(self) -> None:
        """Give rank 0's state to all ranks."""
        raise NotImplementedError(f"{type(self).__name__} must say how to synchronise")

    def reset(self) -> None:
        """Adapt to the new number of ranks; before `sync`."""


class ObjectState(State):
    """Python objects as attributes.

    Args:
        bcast_object, get_rank: those of `State`.
        kwargs: the attributes and their first values.
    """

    def __init__(self, bcast_object: Callable[[Any], Any], get_rank: Callable[[], int], **kwargs: Any) -> None:
        self._names = list(kwargs)
        self._set_attrs(kwargs)
        self._saved_state = copy.deepcopy(kwargs)
        super().__init__(bcast_object=bcast_object, get_rank=get_rank)

    def save(self) -> None:
        # Copies: an object that changes in place, such as a list, must come back as it was.
        self._saved_state = copy.deepcopy(self._attrs())

    def restore(self) -> None:
        self._set_attrs(copy.deepcopy(self._saved_state))

    def sync(self) -> None:
        if self._names:
            # What they are now, as models are synchronised: news about hosts do not go back to the last commit.
            self._set_attrs(self._bcast_object(self._attrs()))
            self._saved_state = copy.deepcopy(self._attrs())

    def _attrs(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self._names}

    def _set_attrs(self, values: dict[str, Any]) -> None:
        for name, value in values.items():
            setattr(self, name, value)


def run_fn(func: Callable[..., Any], reset: Callable[[], None]) -> Callable[..., Any]:
    """Wrap ``func(state, ...)`` so that it is called until it returns; ``reset`` starts Horovod again."""

    @functools.wraps(func)
    def wrapper(state: State, *args: Any, **kwargs: Any) -> Any:
        notification_manager.init()
        notification_manager.register_listener(state)
        skip_sync = False
        try:
            while True:
                try:
                    if not skip_sync:
                        state.sync()
                    return func(state, *args, **kwargs)
                except HorovodInternalError:
                    state.restore()
                    skip_sync = False
                except HostsUpdatedInterrupt as interrupt:
                    skip_sync = interrupt.skip_sync
                reset()
                state.on_reset()
        finally:
            notification_manager.remove_listener(state)

    return wrapper
