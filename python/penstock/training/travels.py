"""How the gradients of a reducer travel: the setting in force, and who may change it."""

from __future__ import annotations

import dataclasses

from penstock import _core, renamed
from penstock.errors import Config as ConfigError
from penstock.training import tuning
from penstock.training.tune import Setting, Tuner

__all__ = ["Travels"]


class Travels:
    """The part of a reducer that scripts change between steps. ``self._reducer`` is the engine's."""

    _reducer: _core.Reducer
    _setting: Setting
    _tuning: tuning.Tuning | None

    def synchronise(self) -> None:
        """Wait for what is under way."""
        raise NotImplementedError

    @property
    def setting(self) -> Setting:
        """The setting in force. Algorithm ``auto``: the planner chooses, by size and hosts."""
        return self._setting if self._tuning is None else self._tuning.setting

    @property
    def tuner(self) -> Tuner | None:
        """The tuner, which tries settings or holds one (`penstock.tune.Tuner`): ``tuner.explain()`` describes the trials and the
        choice, ``tuner.record()`` has all of them. None without ``tune``."""
        return None if self._tuning is None else self._tuning.tuner

    def apply(self, setting: Setting) -> None:
        """Put a setting in force, on all ranks between the same two steps. Its streams are those to each rank, for everything
        that this process sends there; a number above those that are open means all of them. Does not
        block, but for what ``optimizer`` has put off.

        Raises:
            penstock.errors.Bug: a pass is under way. Nothing has changed.
            penstock.errors.Config: the gradients or the group do not support the setting; a tuner is in charge.
        """
        if self._tuning is not None:
            raise ConfigError("a tuner is in charge of this; make the reducer without tune")
        self.synchronise()
        tuning.apply(self._reducer, setting)
        self._setting = setting

    def set_bucket_bytes(self, bucket_bytes: int) -> None:
        """`apply` of the setting with another bucket size."""
        self.apply(dataclasses.replace(self.setting, bucket_bytes=bucket_bytes))

    def set_unit_bytes(self, unit_bytes: int) -> None:
        """The old name of `set_bucket_bytes`."""
        renamed.warn("set_unit_bytes", "set_bucket_bytes")
        self.set_bucket_bytes(unit_bytes)

    def exclude_pause(self) -> None:
        """Tell the tuner that the time since the last step was not all training: call it after an evaluation, a checkpoint or
        any other pause, on any rank. The step that is under way is then not timed, on no rank. Costs nothing."""
        if self._tuning is not None:
            self._tuning.exclude_pause()
