"""Other interfaces over the same engine: Horovod, JAX, TensorFlow."""
