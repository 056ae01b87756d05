"""A stand-in for x_transformers: one small network that gives its loss, under the name in use."""

import torch
from torch import nn


class XTransformer(nn.Module):
    def __init__(self, dim, enc_num_tokens, **options):
        super().__init__()
        self.embed = nn.Embedding(enc_num_tokens, dim)
        self.mix = nn.GRU(dim, dim, batch_first=True)
        self.out = nn.Linear(dim, enc_num_tokens)

    def forward(self, source, target, mask=None):
        hidden = self.mix(self.embed(torch.cat((source, target[:, :-1]), 1)))[0]
        logits = self.out(hidden[:, source.shape[1] :])
        return nn.functional.cross_entropy(logits.transpose(1, 2), target[:, 1:])
