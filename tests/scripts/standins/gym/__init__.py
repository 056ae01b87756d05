"""A stand-in for gym, by that for gymnasium."""

from gymnasium import Wrapper, spaces

__all__ = ["Wrapper", "spaces"]
