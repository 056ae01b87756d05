"""A stand-in for tqdm: says on standard error that it is shown, unless it is disabled."""

import sys


class tqdm:
    def __init__(self, iterable=None, disable=False, **options):
        self.iterable = iterable
        if not disable:
            print("progress is shown", file=sys.stderr)

    def __iter__(self):
        return iter(self.iterable)

    def set_postfix(self, **values):
        pass


def trange(count, **options):
    return tqdm(range(count), **options)
