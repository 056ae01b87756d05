"""A stand-in for gymnasium: worlds with linear laws, the same in every process, that end after some steps."""

import types

import numpy as np


class Space:
    def __init__(self, shape, dtype):
        self.shape, self.dtype = shape, dtype
        self.seed(3)

    def seed(self, seed):
        self._random = np.random.default_rng(seed)


class Discrete(Space):
    def __init__(self, n):
        super().__init__((), np.int64)
        self.n = n

    def sample(self):
        return int(self._random.integers(self.n))


class Box(Space):
    def __init__(self, low, high, shape, dtype=np.float32):
        super().__init__(shape, dtype)
        self.low, self.high = np.full(shape, low, dtype), np.full(shape, high, dtype)

    def sample(self):
        return self._random.uniform(self.low, self.high).astype(self.dtype)


class Env:
    def __init__(self, name):
        self.observation_space = Box(-1, 1, (4,))
        continuous = not name.startswith("CartPole")
        self.action_space = Box(-1, 1, (2,)) if continuous else Discrete(2)
        self.spec = types.SimpleNamespace(reward_threshold=475)
        self._random = np.random.default_rng(1)
        self._law = 0.3 * np.random.default_rng(2).normal(size=(4, 5))

    def reset(self, seed=None, options=None):
        if seed is not None:
            self._random = np.random.default_rng(seed)
        self.steps, self.state = 0, self._random.uniform(-0.1, 0.1, 4)
        return self.state.astype(np.float32), {}

    def step(self, action):
        self.steps += 1
        force = float(np.sum(action)) - (0.5 if isinstance(self.action_space, Discrete) else 0)
        self.state = np.tanh(self._law @ np.append(self.state, force)) + 0.5 * self.state
        reward = 1.0 - float(np.abs(self.state).mean())
        return self.state.astype(np.float32), reward, self.steps >= 12, False, {}

    def render(self):
        pass

    def close(self):
        pass


class Wrapper:
    """What wraps a world, and here passes everything on."""

    def __init__(self, env, *arguments, **options):
        self.env = env

    def reset(self, *arguments, **options):
        return self.env.reset(*arguments, **options)

    def step(self, action):
        return self.env.step(action)

    def __getattr__(self, name):
        return getattr(self.env, name)


def make(name, **options):
    return Env(name)


class _Vector:
    def __init__(self, makers, **options):
        self.envs = [maker() for maker in makers]
        self.num_envs = len(self.envs)
        self.single_observation_space = self.envs[0].observation_space
        self.single_action_space = self.envs[0].action_space

    def reset(self, seed=None):
        return np.stack([env.reset(seed)[0] for env in self.envs]), {}

    def step(self, actions):
        rows = [env.step(action) for env, action in zip(self.envs, actions, strict=True)]
        seen = [env.reset()[0] if row[2] else row[0] for env, row in zip(self.envs, rows, strict=True)]
        infos = {"final_observation": [row[0] for row in rows]}
        return np.stack(seen), *(np.array([row[index] for row in rows]) for index in (1, 2, 3)), infos

    def close(self):
        pass


spaces = types.SimpleNamespace(Discrete=Discrete, Box=Box)
vector = types.SimpleNamespace(SyncVectorEnv=_Vector)
wrappers = types.SimpleNamespace()
for _name in (
    "RecordEpisodeStatistics", "RecordVideo", "FlattenObservation", "ClipAction", "NormalizeObservation",
    "TransformObservation", "NormalizeReward", "TransformReward",
):  # fmt: skip
    setattr(wrappers, _name, Wrapper)
