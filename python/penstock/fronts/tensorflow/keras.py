"""What Keras 3 (with its TensorFlow backend) needs: an optimizer that averages, and two callbacks."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from penstock.errors import Config as ConfigError
from penstock.fronts.tensorflow import tensors

__all__ = ["AverageMetrics", "BroadcastVariables", "DistributedOptimizer"]


def DistributedOptimizer(optimizer: Any) -> Any:
    """Make a Keras optimizer average its gradients over all ranks before it applies them.

    The optimizer itself is changed and returned, with the state that it has; it is saved, and shown, as what it was. Compile the
    model with ``jit_compile=False``: Keras asks XLA otherwise, which cannot call back.

    Raises:
        penstock.errors.Config: not an optimizer of Keras 3, or Keras runs on another backend than TensorFlow.
    """
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise ConfigError(f"DistributedOptimizer takes an optimizer of Keras 3, not {type(optimizer).__name__}")
    if keras.backend.backend() != "tensorflow":
        raise ConfigError(
            f"Keras runs on {keras.backend.backend()}: set KERAS_BACKEND=tensorflow before it is imported"
        )
    plain = type(optimizer)
    if not getattr(plain, "_penstock_averages", False):

        def apply(self: Any, grads: Any, trainable_variables: Any = None) -> Any:
            return plain.apply(self, tensors.average_gradients(list(grads)), trainable_variables)

        # Keras saves a class by its name and module.
        members = {"apply": apply, "_penstock_averages": True, "__module__": plain.__module__}
        optimizer.__class__ = type(plain.__name__, (plain,), members)
    return optimizer


class BroadcastVariables(keras.callbacks.Callback):  # type: ignore[misc]
    """At the start of training, give all ranks the model's and the optimizer's variables of rank ``root``.

    Raises (from ``fit``):
        penstock.errors.Config: Keras has not built the model before training; call ``model.build`` first.
    """

    def __init__(self, root: int = 0) -> None:
        super().__init__()
        self._root = root

    def on_train_begin(self, logs: Any = None) -> None:
        """Keras calls it once a ``fit``."""
        if not self.model.built:
            raise ConfigError("the model has no variables yet: call model.build(input_shape) before fit")
        self.model.optimizer.build(self.model.trainable_variables)
        tensors.broadcast_variables(
            [variable.value for variable in (*self.model.variables, *self.model.optimizer.variables)], self._root
        )


class AverageMetrics(keras.callbacks.Callback):  # type: ignore[misc]
    """At the end of an epoch, replace its figures by their means over all ranks: so ranks that look at them decide alike.

    Put it before callbacks that read them. Shares of equal size are assumed.
    """

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Keras calls it once an epoch."""
        if logs:
            means = tensors.all_reduce(
                {name: tf.constant(float(logs[name]), tf.float64) for name in sorted(logs)}, "mean"
            )
            logs.update({name: float(mean) for name, mean in means.items()})
