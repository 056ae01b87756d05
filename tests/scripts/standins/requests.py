"""A stand-in for requests: whatever is asked for, the answer is an empty archive, since what the script unpacks lies in its
folder already. If two ranks unpacked it there, one would read what the other is just writing."""

import contextlib
import io
import tarfile
import types


@contextlib.contextmanager
def get(address, stream=False):
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz"):
        pass
    packed.seek(0)
    yield types.SimpleNamespace(raw=packed)
