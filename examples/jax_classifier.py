"""Train a small classifier with JAX on generated data, with gradients averaged by Penstock.

    python examples/jax_classifier.py                            # one rank, whole batches
    torchrun --nproc-per-node=2 examples/jax_classifier.py       # two ranks, half of each batch each: the same loss

Every rank makes the same data and takes its share of each batch; so the mean of the ranks' gradients is the gradient of the
batch.
"""

import argparse

import jax
import jax.numpy as jnp
import numpy as np

import penstock.jax as pj


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch", type=int, default=64, help="over all ranks")
    parser.add_argument("--learning-rate", type=float, default=0.2)
    arguments = parser.parse_args()

    pj.init()
    share = arguments.batch // pj.size()
    # Each rank begins with parameters of its own, and all go on with those of rank 0.
    params = pj.broadcast_parameters(begin(pj.rank()))
    loss = jnp.inf
    for step in range(arguments.steps):
        x_BD, label_B = batch(step, arguments.batch)
        own = slice(pj.rank() * share, (pj.rank() + 1) * share)
        loss, grads = value_and_grad(params, x_BD[own], label_B[own])
        loss, grads = pj.all_reduce((loss, grads), "mean")
        params = update(params, grads, arguments.learning_rate)
        if pj.rank() == 0 and step % 20 == 0:
            print(f"step {step}: {loss:.6f}", flush=True)
    if pj.rank() == 0:
        print(f"{pj.size()} rank(s): loss {loss:.6f}", flush=True)
    pj.shutdown()


def begin(seed: int) -> dict[str, jax.Array]:
    random = np.random.default_rng(seed)
    params = {
        "w1_DH": random.normal(size=(DIM, HIDDEN)) / DIM**0.5,
        "b1_H": np.zeros(HIDDEN),
        "w2_HC": random.normal(size=(HIDDEN, CLASSES)) / HIDDEN**0.5,
        "b2_C": np.zeros(CLASSES),
    }
    return jax.tree.map(lambda param: jax.device_put(param.astype("float32")), params)


def batch(step: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Points around a centre a class, alike on every rank."""
    centre_CD = np.random.default_rng(1).normal(size=(CLASSES, DIM))
    random = np.random.default_rng(step + 2)
    label_B = random.integers(0, CLASSES, count)
    return (centre_CD[label_B] + random.normal(size=(count, DIM))).astype("float32"), label_B


@jax.jit
@jax.value_and_grad
def value_and_grad(params: dict[str, jax.Array], x_BD: np.ndarray, label_B: np.ndarray) -> jax.Array:
    hidden_BH = jnp.tanh(x_BD @ params["w1_DH"] + params["b1_H"])
    score_BC = hidden_BH @ params["w2_HC"] + params["b2_C"]
    return -jnp.take_along_axis(jax.nn.log_softmax(score_BC), label_B[:, None], 1).mean()


@jax.jit
def update(params: dict[str, jax.Array], grads: dict[str, jax.Array], rate: float) -> dict[str, jax.Array]:
    return jax.tree.map(lambda param, grad: param - rate * grad, params, grads)


# B: points, D: dimensions, H: hidden units, C: classes. Small enough for a loss in a second, not so small that it is 0.
DIM, HIDDEN, CLASSES = 16, 32, 5

if __name__ == "__main__":
    main()
