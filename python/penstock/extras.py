"""The extras of the wheel: packages that only some commands need, and that `pip install penstock` therefore leaves out."""

from __future__ import annotations

import importlib.util

from penstock.errors import MissingExtra

__all__ = ["EXTRAS", "installed", "need"]

EXTRAS = {"libcst": "convert", "matplotlib": "report", "scipy": "tune"}
"""Each optional package, and the extra of pyproject.toml that installs it."""


def need(what: str, *packages: str) -> None:
    """Check that optional packages are installed, without importing them: matplotlib and scipy take tenths of a second.

    Args:
        what: the command or feature that needs them, as the error names it.

    Raises:
        penstock.errors.MissingExtra: names all packages that are missing, and the command that installs them.
    """
    missing = [package for package in packages if not installed(package)]
    if missing:
        extras = ",".join(EXTRAS[package] for package in missing)
        raise MissingExtra(f"{what} needs {' and '.join(missing)}: pip install 'penstock[{extras}]'")


def installed(package: str) -> bool:
    """Whether a package can be imported, as far as that is known without importing it."""
    return importlib.util.find_spec(package) is not None
