"""Pairs of sentences of different lengths."""

import types

multi30k = types.SimpleNamespace(URL={})


def Multi30k(split, language_pair):
    words = [f"w{(index * index) % 13}" for index in range(200)]
    return [
        (" ".join(words[start : start + 3 + start % 4]), " ".join(words[start + 1 : start + 5 + start % 3]))
        for start in range(64 if split == "train" else 16)
    ]
