"""The state that survives deaths: a copy of the last committed step, which ranks can send to each other."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from penstock.errors import Config as ConfigError
from penstock.training.elastic.sampler import ElasticSampler

__all__ = ["MembershipChanged", "State"]


class MembershipChanged(BaseException):
    """Leaves ``train`` from `State.commit` when a newcomer waits; `run` catches it. Nothing is lost: the step is committed.

    It is no Exception, so that an ``except Exception`` around a step does not swallow it.
    """


class State:
    """A training job's state. What it is made of becomes its attributes.

    Args:
        step: steps committed so far.
        things: anything with ``state_dict`` and ``load_state_dict`` (modules, optimizers, schedules, an `ElasticSampler`
            named ``sampler``), and plain values (numbers, texts, lists of them), which may be assigned to later. The model
            is the bare module: wrap it in DistributedDataParallel inside ``train``, anew in every generation.

    Raises `penstock.errors.Config` for what would not survive: an attribute that is not among ``things`` (names that begin with
    an underscore are yours), a parameter as a value, and an object in the place of a value.

    Memory: two more copies of all tensors, the last commit and the one that is being written. `commit` costs one copy of them
    in memory, and `run` a broadcast of them a rebuild.
    """

    def __init__(self, *, step: int = 0, **things: Any) -> None:
        taken = [name for name in things if name.startswith("_") or hasattr(type(self), name)]
        if taken:
            raise ConfigError(f"State uses the name(s) {', '.join(taken)} itself; choose others")
        self._objects = {name: thing for name, thing in things.items() if hasattr(thing, "load_state_dict")}
        self._values = [name for name in things if name not in self._objects]
        self.step = step
        self._after_commit: Callable[[], None] | None = None
        self._seed = torch.initial_seed()
        for name in self._values:
            self._check_value(name, things[name])
        self.__dict__.update(things)
        self._saved: Any = None
        self._spare: Any = None
        self._save()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # asked for before __init__, by copy.copy for one
            raise AttributeError(name)
        # Called only for missing attributes: the error lists those that exist, and mypy learns that attributes are the user's.
        raise AttributeError(f"this State has no {name!r}, only step, {', '.join([*self._objects, *self._values])}")

    def __setattr__(self, name: str, value: Any) -> None:
        # What is not copied would be lost in the next change of membership, without a word.
        if name in self.__dict__.get("_objects", ()):
            if not hasattr(value, "load_state_dict"):
                raise ConfigError(
                    f"state.{name} has a state_dict, and so must have what takes its place: {_kind(value)} has none"
                )
            self._objects[name] = value
        elif not name.startswith("_") and name != "step":
            if name not in self.__dict__.get("_values", ()):
                raise ConfigError(
                    f"state.{name} would not be kept: give {name}=... to State(...), or call it _{name} if it need not survive"
                )
            self._check_value(name, value)
        super().__setattr__(name, value)

    @staticmethod
    def _check_value(name: str, value: Any) -> None:
        """Raise for a value that would come back as something else than it was."""
        if hasattr(value, "load_state_dict"):
            raise ConfigError(
                f"state.{name} began as a plain value, and {_kind(value)} has a state_dict, which would be copied whole, away "
                "from what it refers to: make it before the State, and give it to State(...)"
            )
        _mapped(value, lambda tensor: _refuse_parameter(name, tensor))

    def commit(self, batches: int = 1) -> None:
        """One step is done: count it, advance the sampler, and keep everything as it is now. To be called after
        ``optimizer.step()`` on all ranks, and after whatever else belongs to the step (a schedule's step, for instance).

        Args:
            batches: how many of the sampler's batches the step has taken, on all ranks alike: more than one with gradient
                accumulation. The last step of an epoch may take fewer; more than are left count as those that are.

        Inside `run` every ``check_every``-th call also asks, over the network, whether a newcomer waits.

        What interrupts it (Ctrl-C, no memory) leaves the last commit or this one, each as a whole: `restore` goes there.

        Raises:
            MembershipChanged: (inside `run`) one does; let it pass.
            penstock.errors.PeerLost: (inside `run`) a rank is gone; let it pass too. The step is committed all the same.
        """
        if batches < 1:
            raise ConfigError(f"a step takes a batch or more, not {batches}")
        self.step += 1
        sampler = self._objects.get("sampler")
        if sampler is not None and hasattr(sampler, "advance"):
            # A sampler of the script's own may know of no batches.
            sampler.advance(*([] if batches == 1 else [batches]))
        self._save()
        if self._after_commit is not None:
            self._after_commit()

    def restore(self) -> None:
        """Restore the last commit, and drop all gradients. Local, does not block."""
        saved = _copied(self._saved, None)
        for name, thing in self._objects.items():
            if name not in saved["objects"]:
                raise ConfigError(
                    f"the state that arrived has no {name!r}, only {', '.join(saved['objects'])}: all workers must make "
                    "their State of the same things"
                )
            thing.load_state_dict(saved["objects"][name])
            if isinstance(thing, torch.nn.Module):
                thing.zero_grad(set_to_none=True)
        self.__dict__.update(saved["values"])
        self.step = saved["step"]

    def share(self, donor: int) -> None:
        """Give all ranks of the default group the last commit of rank ``donor``. All call it; it blocks.

        Its structure is sent as a pickled object, so all members of the group must be trusted; tensors are sent as they are. This
        rank's state changes only when everything has arrived: an error leaves the last commit as it was.

        Afterwards torch's random numbers follow from the donor's seed, the step and the rank: they differ between ranks.

        Raises:
            penstock.errors.Config: this rank's State is made of other things than the donor's, or its sampler shares out
                batches otherwise.
        """
        self._replace(_broadcast(self._saved if dist.get_rank() == donor else None, donor), self._check_donor)
        torch.manual_seed((self._seed + self.step * _STEPS + dist.get_rank()) % (1 << 63))

    def snapshot(self) -> Any:
        """The last commit, as a tree of dicts, lists, tensors and values. Not a copy: later commits write over it."""
        return self._saved

    def adopt(self, tree: Any) -> None:
        """Copy a snapshot, of this rank or another, into the last commit, and restore it. If it does not fit, this raises what
        ``load_state_dict`` raised, and everything is as in the last commit."""
        taken = _copied(tree, None)
        # A checkpoint of an earlier script may lack a value, which then stays as it is, or have one more.
        own = self._saved["values"]
        taken["values"] = {name: taken["values"].get(name, own[name]) for name in self._values}
        taken["objects"] = {name: thing for name, thing in taken["objects"].items() if name in self._objects}
        self._replace(taken)
        # What the tree says and ``load_state_dict`` leaves as it is here, such as a sampler's batch size, is this state's own.
        self._save()

    def _check_donor(self, tree: Any) -> None:
        """Raise if this rank would go on otherwise than the donor of the tree."""
        for what, own, theirs in (
            ("objects", set(self._objects), set(tree["objects"])),
            ("values", set(self._values), set(tree["values"])),
        ):
            if own != theirs:
                raise ConfigError(
                    f"the state that arrived has other {what} than this worker's: only it has {_names(theirs - own)}, only this "
                    f"worker {_names(own - theirs)}. All workers must make their State of the same things"
                )
        sampler = self._objects.get("sampler")
        if isinstance(sampler, ElasticSampler):
            sampler.check_alike(tree["objects"]["sampler"])

    def _replace(self, tree: Any, check: Callable[[Any], None] | None = None) -> None:
        """Restore this tree, which becomes the last commit; or the last commit, if the tree does not fit."""
        before, self._saved = self._saved, tree
        try:
            if check is not None:
                check(tree)
            self.restore()
            self._seed = tree["seed"]
        except BaseException:
            self._saved = before
            self.restore()
            raise

    def _save(self) -> None:
        live = {
            "step": self.step,
            "seed": self._seed,
            "values": {name: self.__dict__[name] for name in self._values},
            "objects": {name: thing.state_dict() for name, thing in self._objects.items()},
        }
        # Written into the spare copy, which then replaces the last commit: an interruption leaves one complete commit.
        spare, self._spare = self._spare, None
        saved = _copied(live, spare)
        spare, self._saved = self._saved, saved
        self._spare = spare


@dataclass(frozen=True)
class _Place:
    """A placeholder for a tensor in the structure that is sent as an object."""

    shape: torch.Size
    dtype: torch.dtype
    device: str


def _broadcast(tree: Any, donor: int) -> Any:
    tensors: list[torch.Tensor] = []
    box = [_mapped(tree, lambda tensor: _taken(tensor, tensors)) if dist.get_rank() == donor else None]
    dist.broadcast_object_list(box, src=donor, device=torch.device("cpu"))
    if dist.get_rank() == donor:
        arrived = tree
    else:
        arrived = _mapped(box[0], lambda place: _made(place, tensors))
    for work in [dist.broadcast(tensor, src=donor, async_op=True) for tensor in tensors]:
        work.wait()
    return arrived


def _taken(tensor: torch.Tensor, into: list[torch.Tensor]) -> _Place:
    into.append(tensor)
    return _Place(tensor.shape, tensor.dtype, tensor.device.type)


def _made(place: _Place, into: list[torch.Tensor]) -> torch.Tensor:
    into.append(torch.empty(place.shape, dtype=place.dtype, device=place.device))
    return into[-1]


def _refuse_parameter(name: str, tensor: torch.Tensor) -> None:
    if tensor.is_leaf and tensor.requires_grad:
        raise ConfigError(
            f"state.{name} holds a parameter: what comes back in its place would be another tensor, which no optimizer steps. "
            "Keep it in a module (torch.nn.ParameterList, for one)"
        )


def _names(names: set[str]) -> str:
    return ", ".join(sorted(names)) or "nothing"


def _kind(value: Any) -> str:
    return f"a {type(value).__name__}"


def _mapped(tree: Any, function: Callable[[Any], Any]) -> Any:
    """The tree with every tensor (or placeholder) replaced by ``function`` of it, from left to right."""
    if isinstance(tree, (torch.Tensor, _Place)):
        return function(tree)
    if isinstance(tree, dict):
        return _like(tree, {key: _mapped(value, function) for key, value in tree.items()})
    if type(tree) in (list, tuple):
        return type(tree)(_mapped(value, function) for value in tree)
    return tree


def _copied(tree: Any, into: Any) -> Any:
    """A copy of the tree, written into the tensors of ``into`` where they fit: a step allocates nothing."""
    if isinstance(tree, torch.Tensor):
        tensor = tree.detach()
        if isinstance(into, torch.Tensor) and _alike(tensor, into):
            return into.copy_(tensor)
        return tensor.clone(memory_format=torch.contiguous_format)
    if isinstance(tree, dict):
        old = into if isinstance(into, dict) else {}
        return _like(tree, {key: _copied(value, old.get(key)) for key, value in tree.items()})
    if type(tree) in (list, tuple):
        olds = into if type(into) is type(tree) and len(into) == len(tree) else [None] * len(tree)
        return type(tree)(_copied(value, old) for value, old in zip(tree, olds, strict=True))
    return copy.deepcopy(tree)


def _like(tree: dict[Any, Any], content: dict[Any, Any]) -> dict[Any, Any]:
    """The content as a dict of the tree's class, with what an object of that class has besides: the factory of a defaultdict, the
    versions that a module's state_dict carries as ``_metadata``."""
    if type(tree) is dict:
        return content
    made = copy.copy(tree)
    for key, value in content.items():
        made[key] = value
    return made


def _alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype and one.device == other.device


# A prime larger than any world, so that (step, rank) do not meet in one seed.
_STEPS = 1_000_003
