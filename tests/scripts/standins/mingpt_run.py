"""Ours: trains a tiny GPT with minGPT's own model and trainer, which are in the corpus."""

import torch
from mingpt.model import GPT
from mingpt.trainer import Trainer
from mingpt.utils import set_seed
from torch.utils.data import TensorDataset

set_seed(0)
tokens = torch.randint(0, 7, (64, 9), generator=torch.Generator().manual_seed(3)).sort(dim=1).values
dataset = TensorDataset(tokens[:, :-1], tokens[:, 1:])

model_config = GPT.get_default_config()
model_config.model_type = None
model_config.n_layer, model_config.n_head, model_config.n_embd = 1, 2, 16
model_config.vocab_size, model_config.block_size = 7, 8

config = Trainer.get_default_config()
config.device, config.num_workers, config.batch_size, config.max_iters = "cpu", 0, 16, 6
Trainer(config, GPT(model_config), dataset).run()
