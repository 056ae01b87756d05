"""A stand-in for tyro: the fields of a dataclass from ``--name value``."""

import sys


def cli(kind):
    wanted = kind()
    words = sys.argv[1:]
    for name, value in zip(words[::2], words[1::2], strict=True):
        name = name.removeprefix("--").replace("-", "_")
        setattr(wanted, name, type(getattr(wanted, name))(float(value)) if value[0].isdigit() else value == "True")
    return wanted
