"""`save_image` leaves a file that says who wrote it."""

import os


def save_image(picture, path, **options):
    with open(path, "a") as file:
        file.write(f"rank {os.environ.get('RANK', '0')}: {tuple(picture.shape)}\n")


def make_grid(pictures, **options):
    return pictures[0]
