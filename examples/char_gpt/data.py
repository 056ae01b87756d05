"""Tiny Shakespeare as numbers: one integer a character, the first 90 % to learn from, the rest to be judged on."""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

TEXT = Path(__file__).with_name("input.txt")
TRAIN_SHARE = 0.9


@dataclass(frozen=True)
class CharData:
    """The text as int64 character indices, and the characters that they stand for."""

    characters: str  # characters[i] is what index i means
    train: Tensor
    validation: Tensor

    @classmethod
    def load(cls, path: Path = TEXT) -> "CharData":
        """Read a text file; raises ``FileNotFoundError`` when it is not there."""
        text = path.read_text(encoding="utf-8")
        characters = "".join(sorted(set(text)))
        index = {character: i for i, character in enumerate(characters)}
        data = torch.tensor([index[character] for character in text])
        cut = int(TRAIN_SHARE * len(data))
        return cls(characters, train=data[:cut], validation=data[cut:])


def random_batch(data: Tensor, batch: int, context: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Cut ``batch`` windows at random places.

    Returns: tokens and targets, both int64 of shape (batch, context); the targets are the tokens one place later.
    """
    starts = torch.randint(len(data) - context, (batch,), generator=generator).tolist()
    windows = torch.stack([data[start : start + context + 1] for start in starts])
    return windows[:, :-1], windows[:, 1:]
