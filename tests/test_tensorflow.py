"""Proves that TensorFlow's tensors and Keras's models are reduced and broadcast as arithmetic says, eager and in graphs.

Importing TensorFlow takes each rank several seconds: so one launch of two ranks holds all cases.
"""

from __future__ import annotations

import importlib.util
import pathlib
import signal
import time
from typing import Any

import numpy as np
import pytest

import ranks

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("tensorflow") is None,
    reason="tensorflow is not installed (pip install 'penstock[tensorflow]')",
)

# As for torch's groups (tests/test_faults.py).
DEATH_KNOWN_S = 5.0
FLOATS = ("float32", "bfloat16", "complex64", "large", "list")
QUIET = {"TF_CPP_MIN_LOG_LEVEL": "2"}


def test_two_ranks_and_a_death(root: pathlib.Path) -> None:
    """Every collective, eager and in tf.function; the tape, the optimizer and the callbacks; refusals and differences; the
    example, whose two ranks end at the loss of one rank with whole batches. Then SIGKILL of rank 1 in the middle of a
    tf.function: rank 0 raises PeerLost within seconds."""
    example = str(root / "examples" / "tensorflow_classifier.py")
    with ranks.Ranks(_two_ranks, count=2, args=(example,), env=QUIET) as job:
        for text in job.await_note("differed", deadline_s=150):
            assert "rank(s) 1 pass another structure than rank 0" in text, text
        one, two = job.await_note("losses", deadline_s=60)[0]
        assert two == pytest.approx(one, rel=1e-4)
        job.await_note("running", deadline_s=60)
        killed_s = job.signal(1, signal.SIGKILL)
        (outcome,) = job.outcomes(of=[0], timeout_s=30, grace_s=None)
        assert outcome.raised is not None and outcome.raised.is_a("penstock.errors.PeerLost"), str(outcome)
        assert "rank 1" in outcome.raised.text
        assert outcome.ended_s - killed_s < DEATH_KNOWN_S


# ------------------------------------------------------------------------------------------------------ on the ranks


def _two_ranks(example: str) -> None:
    import tensorflow as tf

    import penstock.tensorflow as pt
    from penstock.errors import Closed, Mismatch
    from penstock.errors import Config as ConfigError

    with pytest.raises(Closed, match=r"call init\(\) first"):
        pt.rank()
    pt.init()
    _collectives()
    _training()

    with pytest.raises(ConfigError, match="Nothing was sent"):
        pt.all_reduce(tf.ones((2,), tf.int32), "mean")
    with pytest.raises(ConfigError, match="an optimizer of Keras 3"):
        pt.DistributedOptimizer("sgd")
    with pytest.raises(Mismatch) as caught:
        pt.average_gradients([tf.ones((2,)), None] if pt.rank() else [None, tf.ones((2,))])
    assert caught.value.group_lives
    ranks.note("differed", str(caught.value))
    pt.barrier()
    pt.shutdown()
    ranks.note("losses", ranks.losses_of_example(example))
    _reduce_for_ever()


def _collectives() -> None:
    import tensorflow as tf

    import penstock.tensorflow as pt
    from penstock.fronts import arrays
    from penstock.fronts.tensorflow.tensors import to_tensor

    rank = pt.rank()

    def tensors_of(rank: int) -> dict[str, Any]:
        dtypes = (tf.float32, tf.float64, tf.float16, tf.bfloat16, tf.int32, tf.int64, tf.uint8, tf.complex64)
        return {
            **{dtype.name: tf.cast(tf.reshape(tf.range(12) + 10 * rank, (3, 4)), dtype) for dtype in dtypes},
            # More than a bucket of 4 MiB.
            "large": tf.cast(tf.range(1_500_001) % 13 + rank, tf.float32),
            "list": [tf.zeros((0, 3)), tf.constant(float(rank)), None],
        }

    def expect(got: Any, wanted: Any) -> None:
        tf.nest.assert_same_structure(got, wanted)
        for one, other in zip(tf.nest.flatten(got), tf.nest.flatten(wanted), strict=True):
            if other is not None:
                assert one.dtype == other.dtype and one.shape == other.shape
                np.testing.assert_array_equal(one.numpy(), other.numpy())

    def over(function: Any) -> Any:
        return tf.nest.map_structure(lambda a, b: None if a is None else function(a, b), tensors_of(0), tensors_of(1))

    def everything(tensors: Any) -> Any:
        floats = {name: tensors[name] for name in FLOATS}
        total = pt.all_reduce(tensors)
        pt.barrier()
        return total, pt.average_gradients(floats), pt.broadcast(tensors, 1), pt.all_gather(tensors)

    compiled = tf.function(everything)
    own = tensors_of(rank)
    total_of = over(lambda a, b: a + b)
    half = tf.nest.map_structure(
        lambda a: None if a is None else a / tf.cast(2, a.dtype), {name: total_of[name] for name in FLOATS}
    )
    for _ in range(2):
        for total, mean, first, gathered in (everything(own), compiled(own)):
            expect(total, total_of)
            expect(mean, half)
            expect(first, tensors_of(1))
            expect(gathered, over(lambda a, b: tf.stack([a, b])))
    expect(pt.all_reduce(tf.Variable(float(rank)), "max"), tf.constant(1.0))

    # TensorFlow takes the memory of the results as it is.
    (array,) = arrays.job().all_reduce([np.ones((64,), np.float32)], op="sum")
    tensor = to_tensor(array)
    assert np.from_dlpack(tensor).ctypes.data == array.ctypes.data


def _training() -> None:
    import keras
    import tensorflow as tf

    import penstock.tensorflow as pt

    rank = pt.rank()
    # The gradient of rank 0 is 1, of rank 1 it is 3; one of rows comes as IndexedSlices.
    weight, table = tf.Variable(tf.ones((2,))), tf.Variable(tf.ones((3, 2)))

    @tf.function
    def gradients() -> Any:
        with pt.DistributedGradientTape(tf.GradientTape()) as tape:
            loss = tf.reduce_sum(weight) * (1.0 + 2.0 * rank) + tf.reduce_sum(tf.gather(table, [rank]))
        return tape.gradient(loss, [weight, table])

    dense, rows = gradients()
    assert dense.numpy().tolist() == [2.0, 2.0]
    assert tf.convert_to_tensor(rows).numpy().tolist() == [[0.5, 0.5], [0.5, 0.5], [0.0, 0.0]]

    variables = [tf.Variable([float(rank)]), keras.Variable([float(rank)])]
    pt.broadcast_variables(variables, root=1)
    assert [float(variable.numpy()[0]) for variable in variables] == [1.0, 1.0]

    # A momentum that only rank 0 has reaches rank 1; an optimizer keeps its name and its state.
    keras.utils.set_random_seed(rank)
    model = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(1)])
    optimizer = keras.optimizers.Adam(0.01)
    optimizer.build(model.trainable_variables)
    optimizer.variables[2].assign(optimizer.variables[2] + float(rank == 0))
    assert pt.DistributedOptimizer(pt.DistributedOptimizer(optimizer)) is optimizer
    assert keras.optimizers.serialize(optimizer)["class_name"] == "Adam"
    model.compile(optimizer, "mse", jit_compile=False)
    x = np.random.default_rng(rank).normal(size=(8, 3)).astype("float32")
    history = model.fit(
        x, x[:, :1], batch_size=4, epochs=2, verbose=0, callbacks=[pt.BroadcastVariables(), pt.AverageMetrics()]
    )
    same = pt.all_gather([tf.convert_to_tensor(v) for v in (*model.variables, *optimizer.variables)])
    for values in same:
        np.testing.assert_array_equal(values[0].numpy(), values[1].numpy())
    losses = pt.all_gather(tf.constant(history.history["loss"]))
    np.testing.assert_array_equal(losses[0].numpy(), losses[1].numpy())


def _reduce_for_ever() -> None:
    import tensorflow as tf

    import penstock.tensorflow as pt

    pt.init()
    reduce = tf.function(pt.all_reduce)
    value = tf.zeros((1 << 20,))
    with pt.own_errors():
        reduce(value)
        ranks.note("running")
        deadline_s = time.monotonic() + 60
        while time.monotonic() < deadline_s:
            value = reduce(value)
