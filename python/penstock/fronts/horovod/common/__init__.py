"""What Horovod keeps under ``horovod.common``."""
