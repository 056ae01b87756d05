"""Train a small Keras classifier on generated data, with gradients averaged by Penstock.

    python examples/tensorflow_classifier.py                            # one rank, whole batches
    torchrun --nproc-per-node=2 examples/tensorflow_classifier.py       # two ranks, half of each batch each: the same loss

Every rank makes the same data and takes its share of each batch; so the mean of the ranks' gradients is the gradient of the
batch.
"""

import argparse

import keras
import numpy as np

import penstock.tensorflow as pt


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch", type=int, default=64, help="over all ranks")
    arguments = parser.parse_args()

    pt.init()
    share = arguments.batch // pt.size()
    x_ND, label_N = data()
    # Every batch of all ranks is cut into shares; this rank's follow each other.
    own = np.arange(len(x_ND)).reshape(-1, pt.size(), share)[:, pt.rank()].reshape(-1)

    # Each rank begins with parameters of its own seed, and all go on with those of rank 0.
    keras.utils.set_random_seed(pt.rank())
    model = keras.Sequential([keras.layers.Dense(HIDDEN, "tanh"), keras.layers.Dense(CLASSES)])
    model.build((None, DIM))
    model.compile(
        pt.DistributedOptimizer(keras.optimizers.SGD(0.2, momentum=0.9)),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        jit_compile=False,
    )
    history = model.fit(
        x_ND[own],
        label_N[own],
        batch_size=share,
        epochs=arguments.epochs,
        shuffle=False,
        verbose=0,
        callbacks=[pt.BroadcastVariables(), pt.AverageMetrics()],
    )
    if pt.rank() == 0:
        print(f"{pt.size()} rank(s): loss {history.history['loss'][-1]:.6f}", flush=True)
    pt.shutdown()


def data() -> tuple[np.ndarray, np.ndarray]:
    """Points around a centre a class, alike on every rank."""
    random = np.random.default_rng(1)
    centre_CD = random.normal(size=(CLASSES, DIM))
    label_N = random.integers(0, CLASSES, COUNT)
    return (centre_CD[label_N] + random.normal(size=(COUNT, DIM))).astype("float32"), label_N


# N: points, D: dimensions, C: classes. Small enough for a loss in a second, not so small that it is 0.
COUNT, DIM, HIDDEN, CLASSES = 1024, 16, 32, 5

if __name__ == "__main__":
    main()
