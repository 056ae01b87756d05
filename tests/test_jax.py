"""Proves that pytrees are reduced, broadcast and gathered as arithmetic says, and that failures are Penstock's own.

A rank imports and compiles for seconds: so a launch holds many cases, and ends with a death.
"""

from __future__ import annotations

import importlib.util
import os
import pathlib
import signal
import time
from typing import Any

import numpy as np
import pytest

import ranks

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("jax") is None, reason="jax is not installed (pip install 'penstock[jax]')"
)

# As for torch's groups (tests/test_faults.py), and some for JAX itself.
DEATH_KNOWN_S = 5.0
# XLA is not on trial: let it compile in less time.
QUICK = {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}


def test_two_ranks_and_a_death(root: pathlib.Path) -> None:
    """Refusals; every collective outside `jax.jit` and inside; the example, whose two ranks end at the loss of one rank with
    whole batches. Then SIGKILL of rank 1 while compiled functions reduce: rank 0 raises PeerLost within seconds."""
    example = str(root / "examples" / "jax_classifier.py")
    with ranks.Ranks(_two_ranks, count=2, args=(example,), env=QUICK) as job:
        one, two = job.await_note("losses", deadline_s=180)[0]
        assert two == pytest.approx(one, rel=1e-4)
        _kill_and_watch(job, of=[0])


def test_three_ranks_and_a_death() -> None:
    """Every collective among three. Trees that differ in names, shapes or dtypes, though not in bytes: Mismatch on all ranks,
    and the job lives; another call than that of the others: Mismatch too, not a wrong result. Then SIGKILL of rank 1 while
    the others reduce."""
    with ranks.Ranks(_three_ranks, count=3, env=QUICK) as job:
        for *texts, last in job.await_note("differed", deadline_s=180):
            assert len(texts) == 4
            for text in texts:
                assert "rank(s) 2 pass another structure than rank 0" in text, text
            assert "Every rank must issue the same operations" in last, last
        _kill_and_watch(job, of=[0, 2])


def _kill_and_watch(job: ranks.Ranks, of: list[int]) -> None:
    job.await_note("running", deadline_s=60)
    killed_s = job.signal(1, signal.SIGKILL)
    for outcome in job.outcomes(of=of, timeout_s=30, grace_s=None):
        assert outcome.raised is not None and outcome.raised.is_a("penstock.errors.PeerLost"), str(outcome)
        assert "rank 1" in outcome.raised.text
        assert outcome.ended_s - killed_s < DEATH_KNOWN_S


# ------------------------------------------------------------------------------------------------------ on the ranks


def _two_ranks(example: str) -> None:
    _refuse()
    _trees()
    _inside_jit()
    ranks.note("losses", ranks.losses_of_example(example))
    _reduce_for_ever(compiled=True)


def _three_ranks() -> None:
    _trees()
    ranks.note("differed", _differ())
    _reduce_for_ever(compiled=False)


def _trees() -> None:
    import jax
    import jax.numpy as jnp

    import penstock.jax as pj

    pj.init()
    pj.init()
    rank, size = pj.rank(), pj.size()
    assert (rank, size) == (int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))

    def tree_of(rank: int) -> dict[str, Any]:
        def ramp(shape: tuple[int, ...], dtype: Any) -> np.ndarray[Any, Any]:
            return (np.arange(np.prod(shape, dtype=int)) % 13 + 10 * rank).astype(dtype).reshape(shape)

        return {
            "floats": {
                name: jax.device_put(ramp((5, 3), name)) for name in ("float32", "float16", "bfloat16", "complex64")
            },
            "numpy": [ramp((7,), "float64"), np.float32(rank), ramp((4, 6), "float32").T],
            # Below, at and above a bucket of 4 MiB, and many that share one.
            "large": (jax.device_put(ramp((1 << 20,), "float32")), jax.device_put(ramp((1_500_001,), "float32"))),
            "many": [jax.device_put(ramp((n,), "float32")) for n in range(60)],
            "scalar": jnp.float32(rank),
            "number": float(rank),
            "none": None,
            "empty": jnp.zeros((0, 3)),
        }

    integers = {name: jnp.asarray([rank, 2 * rank + 1], name) for name in ("int8", "int32", "uint8", "uint32")} | {
        "wide": np.asarray([rank, 1 << 40])
    }

    def expect(given: Any, of_all: Any) -> None:
        flat, treedef = jax.tree.flatten(given)
        wanted, structure = jax.tree.flatten(of_all)
        assert treedef == structure
        for one, other in zip(flat, wanted, strict=True):
            np.testing.assert_array_equal(np.asarray(one, np.complex128), np.asarray(other, np.complex128))

    def over(function: Any, trees: list[Any]) -> Any:
        return jax.tree.map(
            lambda *leaves: function(np.stack([np.asarray(leaf, np.complex128) for leaf in leaves])), *trees
        )

    tree, trees = tree_of(rank), [tree_of(other) for other in range(size)]
    total = pj.all_reduce(tree)
    expect(total, over(lambda leaf: leaf.sum(0), trees))
    for before, after in zip(jax.tree.leaves(tree), jax.tree.leaves(total), strict=True):
        assert isinstance(after, np.ndarray if isinstance(before, (np.ndarray, np.generic)) else jax.Array)
        assert getattr(before, "dtype", after.dtype) == after.dtype
        assert getattr(before, "shape", ()) == after.shape
    # 3 ranks: the mean of these numbers is a whole one, which every dtype has.
    expect(pj.average_gradients(tree), over(lambda leaf: leaf.mean(0), trees))
    expect(pj.all_reduce(integers), _sums_of_integers(size))
    for op, function in (("max", np.max), ("min", np.min)):
        got = pj.all_reduce({"x": jnp.asarray([rank, -rank])}, op)
        expect(got, {"x": function([[r, -r] for r in range(size)], 0)})
    expect(pj.broadcast_parameters(tree, root=size - 1), tree_of(size - 1))
    expect(pj.all_gather(tree), over(lambda leaf: leaf, trees))

    # Keys of random numbers, float8, and gradients of integers.
    key = pj.broadcast_parameters({"key": jax.random.key(rank)})["key"]
    assert (jax.random.key_data(key) == jax.random.key_data(jax.random.key(0))).all()
    eighth = pj.broadcast_parameters(jnp.full((3,), rank + 1, jnp.float8_e4m3fn))
    assert eighth.dtype == jnp.float8_e4m3fn and float(eighth[0].astype(jnp.float32)) == 1
    zero = np.zeros((2,), jax.dtypes.float0)
    assert pj.average_gradients({"integer": zero})["integer"] is zero

    # JAX takes the memory of the results as it is.
    large = pj.all_reduce(jnp.ones((1 << 20,), jnp.bfloat16))
    assert np.asarray(large).base is not None and large.unsafe_buffer_pointer() % 64 == 0
    pj.barrier()
    pj.shutdown()


def _sums_of_integers(size: int) -> dict[str, Any]:
    ramp, odd = sum(range(size)), sum(2 * rank + 1 for rank in range(size))
    return {name: np.asarray([ramp, odd]) for name in ("int8", "int32", "uint8", "uint32")} | {
        "wide": np.asarray([ramp, size << 40])
    }


def _inside_jit() -> None:
    import jax
    import jax.numpy as jnp

    import penstock.jax as pj

    pj.init()
    rank, size = pj.rank(), pj.size()

    @jax.jit
    def step(tree: Any, key: Any) -> Any:
        doubled = jax.tree.map(lambda leaf: leaf * 2, tree)
        pj.barrier()
        mean = pj.average_gradients(doubled)
        first = pj.broadcast_parameters({"tree": mean, "own": jnp.float32(pj.rank()), "key": key}, root=1)
        return pj.all_gather(rank + first["own"]), first["tree"], first["key"]

    for n in (1, 1000, 3_000_000):
        tree = {
            "w": jnp.full((n,), rank, jnp.float32),
            "b": jnp.full((3,), rank, jnp.bfloat16),
            "none": jnp.zeros((0,)),
        }
        gathered, mean, key = step(tree, jax.random.key(rank))
        assert gathered.tolist() == [1.0 + other for other in range(size)]
        assert mean["w"].shape == (n,) and (mean["w"] == size - 1).all() and (mean["b"] == size - 1).all()
        assert (jax.random.key_data(key) == jax.random.key_data(jax.random.key(1))).all()
    # Compiled once, and run again with other values.
    other = {"w": jnp.full((1,), 5.0 * rank), "b": jnp.zeros((3,), jnp.bfloat16), "none": jnp.zeros((0,))}
    assert float(step(other, key)[1]["w"][0]) == 5.0
    pj.shutdown()


def _differ() -> list[str]:
    import jax.numpy as jnp

    import penstock.jax as pj
    from penstock.errors import Mismatch

    pj.init()
    odd = pj.rank() == 2
    two, three = jnp.zeros((2,)), jnp.zeros((3,))
    pairs: list[tuple[Any, Any]] = [
        ({"a": two, "b": three}, {"a": three, "b": two}),
        ({"a": two}, {"b": two}),
        ([two], [two.astype(jnp.int32)]),
        ([two, None], [two, jnp.zeros((0,))]),
    ]
    texts = []
    for usual, other in pairs:
        with pytest.raises(Mismatch) as caught:
            pj.all_reduce(other if odd else usual)
        assert caught.value.group_lives
        texts.append(str(caught.value))
    assert pj.all_reduce(jnp.float32(1)) == 3
    # All have agreed on both structures, so that nothing but the operations themselves can differ.
    small = jnp.zeros((16,), jnp.uint8)
    pj.all_reduce(small)
    with pytest.raises(Mismatch) as caught:
        # It may still be under way here when another rank has ended it and notices the mismatch of the next one.
        pj.all_reduce(two)
        pj.all_reduce(two if odd else small)
    pj.shutdown()
    return [*texts, str(caught.value)]


def _reduce_for_ever(compiled: bool) -> None:
    import jax
    import jax.numpy as jnp

    import penstock.jax as pj

    pj.init()
    reduce = jax.jit(pj.all_reduce) if compiled else pj.all_reduce
    value = jnp.zeros((1 << 20,))
    with pj.own_errors():
        jax.block_until_ready(reduce(value))
        ranks.note("running")
        deadline_s = time.monotonic() + 60
        while time.monotonic() < deadline_s:
            value = jax.block_until_ready(reduce(value))


def _refuse() -> None:
    import jax
    import jax.numpy as jnp

    import penstock.jax as pj
    from penstock.errors import Closed
    from penstock.errors import Config as ConfigError

    with pytest.raises(Closed, match=r"call init\(\) first"):
        pj.rank()
    pj.shutdown()
    for _ in range(2):
        pj.init(timeout_s=60)
        assert pj.is_initialized()
        for tree, op in (
            (jnp.ones((2,), jnp.int32), "mean"),
            (jnp.ones((2,), jnp.complex64), "max"),
            (jnp.ones((2,), jnp.float8_e4m3fn), "sum"),
            (jax.random.key(0), "sum"),
        ):
            with pytest.raises(ConfigError, match="Nothing was sent"):
                pj.all_reduce(tree, op)
        with pytest.raises(ConfigError, match="one of sum, mean"):
            pj.all_reduce(1.0, "average")
        with pytest.raises(ConfigError, match="there is no rank 2"):
            pj.broadcast_parameters(1.0, root=2)
        # An error that is not Penstock's passes as it is.
        with pytest.raises(ZeroDivisionError):
            with pj.own_errors():
                raise ZeroDivisionError
        pj.shutdown()
        assert not pj.is_initialized()
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("MASTER_ADDR")
        with pytest.raises(ConfigError, match="MASTER_ADDR is not set"):
            pj.init()
