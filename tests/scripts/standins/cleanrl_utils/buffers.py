"""A stand-in for the replay buffer of CleanRL: the last steps, sampled by NumPy's generator."""

import types

import numpy as np
import torch


class ReplayBuffer:
    def __init__(self, size, observation_space, action_space, device, n_envs=1, **options):
        self.rows = []

    def add(self, observations, next_observations, actions, rewards, dones, infos):
        self.rows += zip(observations, next_observations, actions, rewards, dones, strict=True)

    def sample(self, count):
        chosen = [self.rows[index] for index in np.random.randint(0, len(self.rows), count)]
        columns = [torch.as_tensor(np.stack(column)) for column in zip(*chosen, strict=True)]
        observations, next_observations, actions, rewards, dones = columns
        return types.SimpleNamespace(
            observations=observations.float(),
            next_observations=next_observations.float(),
            actions=actions.view(count, -1),
            rewards=rewards.float().view(-1, 1),
            dones=dones.float().view(-1, 1),
        )
