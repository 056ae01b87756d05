"""A stand-in for torchvision, written for these tests: small generated data instead of downloads, transforms that do
what training needs and no more. Nothing in it is torchvision's code."""

from . import datasets, models, transforms, utils

__all__ = ["datasets", "models", "transforms", "utils"]
