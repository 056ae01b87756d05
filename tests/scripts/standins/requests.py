"""A stand-in for requests: whatever is asked for, the answer is the folder ``cora`` of the working folder, packed."""

import contextlib
import io
import tarfile
import types


@contextlib.contextmanager
def get(address, stream=False):
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as file:
        file.add("cora")
    packed.seek(0)
    yield types.SimpleNamespace(raw=packed)
