"""Horovod's own tests are run by tests/test_horovod.py, on several ranks; pytest itself is not to collect them."""

collect_ignore = ["pinned"]
