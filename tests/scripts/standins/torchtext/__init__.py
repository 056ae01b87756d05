"""A stand-in for torchtext: sentences of generated words."""
