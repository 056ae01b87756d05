"""Transforms of pictures that are tensors already. What would change a picture at random leaves it as it is."""


class Compose:
    def __init__(self, steps):
        self.steps = steps

    def __call__(self, picture):
        for step in self.steps:
            picture = step(picture)
        return picture


class Normalize:
    def __init__(self, mean, std):
        self.mean, self.std = mean[0], std[0]

    def __call__(self, picture):
        return (picture - self.mean) / self.std


class _Same:
    def __init__(self, *arguments, **options):
        pass

    def __call__(self, picture):
        return picture


ToTensor = Resize = CenterCrop = RandomCrop = RandomHorizontalFlip = _Same
