"""What can go wrong, as exceptions that a caller can act on.

Every exception says in its text what happened, where (operation, sequence number, rank, address), and what to do.
``error.group_lives`` tells whether the process group can still be used; after an operation has failed it cannot, and
nothing of Penstock touches the operation's tensors any more.
"""

from __future__ import annotations

__all__ = [
    "Bug",
    "Closed",
    "Config",
    "Diverged",
    "HandlerFailed",
    "Mismatch",
    "MissingExtra",
    "NotFinite",
    "PeerLost",
    "PenstockError",
    "Refused",
    "Timeout",
]


class PenstockError(RuntimeError):
    """Base of all of Penstock's exceptions."""

    group_lives: bool = False


class Mismatch(PenstockError):
    """Ranks issued different operations, sizes, dtypes or roots: mend the script."""


class Diverged(Mismatch):
    """Ranks hold other bits where they must hold the same, and PENSTOCK_CHECK=mismatch or `penstock.torch.check_alike` asked to
    be told: the text names the first parameter and the ranks. The group can be used, for instance to broadcast what is right."""


class PeerLost(PenstockError, ConnectionError):
    """A rank died, stopped or became unreachable: rebuild the group without it, or restart the job."""


class Timeout(PenstockError, TimeoutError):
    """An operation took longer than its time-out although every rank answers."""


class Refused(PenstockError, ConnectionError):
    """A peer did not accept us, or we did not accept it (secret, version, job): mend the deployment."""


class Config(PenstockError, ValueError):
    """A setting, an argument or the machine is not as needed; nothing was sent."""


class MissingExtra(Config):
    """A package that an extra of the wheel installs is missing: the text names the package and the command that installs it."""


class NotFinite(PenstockError, FloatingPointError):
    """A gradient holds NaN or infinity, which PENSTOCK_CHECK=nan checks: the text names the gradient, the rank and the step."""


class HandlerFailed(PenstockError):
    """The handler of an endpoint's server (`penstock.endpoint`) has raised: the text is that of its exception. The connection
    can be used."""


class Closed(PenstockError):
    """The group was destroyed, aborted or left behind by a fork before the operation ended."""


class Bug(PenstockError):
    """A defect of Penstock itself: please report it."""
