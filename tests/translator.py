"""Converts every script of the corpus, runs it on one process as it is and on two ranks as converted, and compares each step.

``corpus.toml`` says of every file how it must end, and there is no other way:

- *equal*: loss, gradient norm, update and weights of the two ranks are those of one process, at every optimizer step;
- *listed*: they would differ for a reason that the conversion tells at its line. The run takes that reason out (`without`) on
  both sides, and then all must be equal: so nothing else differs;
- *import*: a script for Horovod, of which nothing changes but the import;
- *refused*: nothing is converted, for the reason that stands there.

    python tests/translator.py              all of them; the exit code says whether each ended as it must
    python tests/translator.py gan mnist    those whose path holds one of these words

Shuffling and dropout are off, and noise is the same for every sample where `noise` says so, because two ranks draw other
numbers than one. Data are generated, and packages that are not installed are stood in for (``standins``).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import pathlib
import random
import sys
import tempfile
import types
import warnings
from collections.abc import Callable
from typing import Any

import corpus
import ranks
from penstock.tools.convert.base import Options, Refused
from penstock.tools.convert.cli import beside
from penstock.tools.convert.core import Converted, convert
from penstock.tools.run.lines import compile_as

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # pytest brings it there

HERE = pathlib.Path(__file__).resolve().parent / "scripts"


@dataclasses.dataclass(frozen=True)
class Script:
    """A file of the corpus (or ours), how to start it, and how it must end."""

    path: str
    outcome: str  # "equal", "listed", "import" or "refused"
    reason: str = ""  # part of the refusal
    listed: list[str] = dataclasses.field(default_factory=list)  # parts of findings that there must be
    without: list[str] = dataclasses.field(default_factory=list)  # see `_WITHOUT`
    arguments: str = ""
    samples: int = 64
    steps: int = 6  # of optimizers, or backward passes where there are none
    beside: str = ""  # a folder of stand-ins for modules of the project
    noise: bool = False
    by_sample: bool = False  # what a dataset draws at random for a sample is made to depend on the sample alone
    own_draws: bool = False  # a RandomSampler with replacement gives each rank others of the samples
    relative: float = 1e-4  # of losses; of gradients and updates ten times that
    main: str = ""  # a program of ours that uses the converted file as a module
    module: str = ""  # ... under this name
    before: str = ""  # what is done in the process before the script starts
    files: dict[str, str] = dataclasses.field(default_factory=dict)  # written where it starts
    slice: bool = False  # whether the normal suite runs it

    @property
    def file(self) -> pathlib.Path:
        return HERE / self.path if (HERE / self.path).exists() else corpus.CORPUS / self.path


def load() -> list[Script]:
    """The table, in its order."""
    table = tomllib.loads((HERE / "corpus.toml").read_text(encoding="utf-8"))
    return [Script(path=path, **row) for path, row in table.items()]


def files() -> set[str]:
    """Every file of the corpus that is Python."""
    return {str(path.relative_to(corpus.CORPUS)) for path in corpus.CORPUS.rglob("*.py")}


@functools.cache
def converted(path: pathlib.Path, options: Options = Options()) -> Converted | Refused:  # noqa: B008  (it is frozen)
    """The script, converted, or why not; converting takes seconds, and several tests want it."""
    try:
        return convert(path.read_text(encoding="utf-8"), options, beside(path))
    except Refused as refusal:
        return refusal


def check(script: Script, folder: pathlib.Path) -> str:
    """What is wrong with how `script` ends, "" where nothing is. Blocks for as long as three processes run it."""
    result = converted(script.file, Options(batch="per-rank" if "parts" in script.without else "global"))
    if script.outcome == "refused":
        said = f"{result.reason}: {result}" if isinstance(result, Refused) else "it was converted"
        return "" if isinstance(result, Refused) and script.reason and script.reason in said else f"refused: {said}"
    if isinstance(result, Refused):
        return f"line {result.line}: {result.reason}: {result}"
    if script.outcome == "import":
        changed = [
            (before, after)
            for before, after in zip(script.file.read_text().splitlines(), result.text.splitlines(), strict=True)
            if before != after
        ]
        known = all(
            after.replace("penstock.horovod", "horovod").replace(" as horovod", "") == before
            for before, after in changed
        )
        return "" if changed and known else f"changed: {changed[:3]}"
    told = "\n".join(f"{each.line}: {each.what}: {each.why}" for each in result.findings)
    for each in script.listed:
        if each not in told:
            return f"{each!r} is not listed:\n{told}"
    if script.outcome == "listed" and not script.listed:
        return "the row names nothing that is listed"
    alone, together = folder / "alone", folder / "together"
    for each in (alone, together):
        _furnish(each, script)
    program = (script, str(script.file), str(HERE))
    main = str(HERE / script.main) if script.main else ""
    (one,) = ranks.run(drive, count=1, args=(*program, main, str(alone), None), timeout_s=150)
    two = ranks.run(drive, count=2, args=(*program, main, str(together), result.text), timeout_s=150)
    return compare(script, one, two, folder)


def compare(script: Script, one: dict[str, Any], two: list[dict[str, Any]], folder: pathlib.Path) -> str:
    """The first difference between one process and two ranks, "" where there is none."""
    if len(one["losses"]) < 2:
        return f"it took {len(one['losses'])} steps, too few to show anything: {one['output'][-300:]}"
    for name in ("losses", "steps"):
        lengths = [len(each[name]) for each in (one, *two)]
        if len(set(lengths)) > 1:
            return f"{name}: {lengths} on one process and on two ranks"
    for step, (alone, *parts) in enumerate(zip(one["losses"], *(each["losses"] for each in two), strict=True)):
        if not near(sum(parts) / len(parts), alone, script.relative):
            return f"loss {step}: {alone:.9g} on one process, {parts} on two ranks"
    for step, (alone, *parts) in enumerate(zip(one["steps"], *(each["steps"] for each in two), strict=True)):
        for name, mine, *theirs in zip(("gradient", "update", "weights"), alone, *parts, strict=True):
            if len(set(theirs)) > 1:
                return f"{name} after step {step} differs between the ranks: {theirs}"
            if not near(theirs[0], mine, 10 * script.relative):
                return f"{name} after step {step}: {mine:.9g} on one process, {theirs[0]:.9g} on two ranks"
    # What the script leaves behind, it leaves once: the same files, and none written by rank 1.
    left = [
        {str(path.relative_to(folder / each)) for path in (folder / each).rglob("*") if path.is_file()}
        for each in ("alone", "together")
    ]
    if left[0] != left[1]:
        return f"files: {sorted(left[0] ^ left[1])} are there on one side only"
    if "progress is shown" in two[1]["output"]:
        return "rank 1 shows progress"
    if two[1]["output"].strip() and not script.main:
        return f"rank 1 prints: {two[1]['output'][:200]!r}"
    return ""


def near(value: float, expected: float, relative: float) -> bool:
    return abs(value - expected) <= relative * abs(expected) + 1e-7


def drive(script: Script, file: str, here: str, main: str, folder: str, text: str | None) -> dict[str, Any]:
    """Run the script, or its converted text, as the main program of this rank; what it trained and printed."""
    import io

    import torch

    os.chdir(pathlib.Path(folder) / "in" / "it")
    os.environ["STANDIN_SAMPLES"] = str(script.samples)
    os.environ["TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"] = "1"  # time_sequence_prediction keeps its data as a NumPy array
    own = pathlib.Path(main or file)
    places = [str(own.parent), *([f"{here}/{script.beside}"] if script.beside else []), f"{here}/standins"]
    sys.path[:0] = [*places, str(pathlib.Path(file).parent.parent)] if main else places
    sys.argv = [str(own), *script.arguments.split()]
    torch.set_num_threads(1)
    record = _tame(script)
    warnings.simplefilter("ignore")
    exec(script.before, {})
    source = pathlib.Path(file).read_text(encoding="utf-8")
    if main:
        taught = types.ModuleType(script.module)
        sys.modules[script.module] = taught
        exec(compile_as(source, text or source, file), taught.__dict__)
        source = text = own.read_text(encoding="utf-8")
    module = types.ModuleType("__main__")
    module.__file__ = str(own)
    sys.modules["__main__"] = module
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output), contextlib.suppress(_Enough):
        exec(compile_as(source, text or source, str(own)), module.__dict__)
    return {**record, "output": output.getvalue()}


class _Enough(BaseException):
    """The script has taken its steps."""


def _furnish(folder: pathlib.Path, script: Script) -> None:
    """What scripts expect to find in the folder that they run in, and in the data folder two above."""
    start = folder / "in" / "it"
    for name in ("results", "samples", "text", "data"):
        (start / name).mkdir(parents=True)
    words = [f"word{(index * index) % 13}" for index in range(2000)]
    text = "\n".join(" ".join(words[at : at + 10]) for at in range(0, len(words), 10))
    for name in ("text/train.txt", "text/valid.txt", "text/test.txt", "data/train.txt"):
        (start / name).write_text(text + "\n")
    for name, what in script.files.items():
        path = start / name
        path.parent.mkdir(parents=True, exist_ok=True)
        make = _MAKE.get(what)
        if make is None:
            path.write_text(what)
        else:
            make(path)


def _waves(path: pathlib.Path) -> None:
    import numpy as np
    import torch

    torch.save(np.sin((np.arange(24) + np.arange(6).reshape(-1, 1)) / 3.0), path)


def _pictures(path: pathlib.Path) -> None:
    """Pairs of pictures side by side, in ``path/train`` and beside it, as PNG files."""
    import numpy as np
    from PIL import Image

    drawn = np.random.default_rng(8)
    for part in ("train", "val", "test"):
        (path / part).mkdir(parents=True)
        for index in range(8):
            pixels = drawn.integers(0, 255, (64, 128, 3)).astype(np.uint8)
            Image.fromarray(pixels).save(path / part / f"{index}.png")


def _cora(path: pathlib.Path) -> None:
    """Papers with words and a class, and who cites whom."""
    drawn = random.Random(9)
    rows = [[str(paper), *(str(drawn.randrange(2)) for _ in range(20)), f"class{paper % 7}"] for paper in range(1700)]
    path.mkdir()
    (path / "cora.content").write_text("\n".join("\t".join(row) for row in rows))
    (path / "cora.cites").write_text(
        "\n".join(f"{drawn.randrange(1700)}\t{drawn.randrange(1700)}" for _ in range(3000))
    )


def _verdict(path: pathlib.Path) -> None:
    path.write_text("Every effort moves you, and many words more. " * 300)


_MAKE: dict[str, Callable[[pathlib.Path], Any]] = {
    "*verdict": _verdict,
    "*waves": _waves,
    "*pictures": _pictures,
    "*cora": _cora,
}


def _tame(script: Script) -> dict[str, Any]:
    """Take out what two ranks draw otherwise than one, and record losses at backward passes and the rest at steps."""
    import itertools

    import numpy as np
    import torch
    from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
    from torch.utils.data import DataLoader, DistributedSampler, RandomSampler

    record: dict[str, Any] = {"losses": [], "steps": []}
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    torch.seed = lambda: 0  # what converted scripts seed all ranks with
    backward, begun = torch.Tensor.backward, dict[int, list[Any]]()

    def recording(self: Any, *arguments: Any, **options: Any) -> None:
        if len(record["losses"]) >= 8 * script.steps or (len(record["losses"]) >= script.steps and not begun):
            raise _Enough
        record["losses"].append(self.sum().item())
        backward(self, *arguments, **options)

    def before(optimizer: Any, *_: Any) -> None:
        parameters = [each for group in optimizer.param_groups for each in group["params"]]
        begun.setdefault(id(optimizer), [each.detach().clone() for each in parameters])

    def after(optimizer: Any, *_: Any) -> None:
        parameters = [each for group in optimizer.param_groups for each in group["params"]]

        def norm(tensors: list[Any]) -> float:
            dense = [(each.to_dense() if each.is_sparse else each).double() for each in tensors]
            return float(torch.stack([each.pow(2).sum() for each in dense]).sum().sqrt()) if dense else 0.0

        with torch.no_grad():
            moved = [each - start for each, start in zip(parameters, begun[id(optimizer)], strict=True)]
            gradients = [each.grad for each in parameters if each.grad is not None]
            record["steps"].append((norm(gradients), norm(moved), norm(parameters)))
        if len(record["steps"]) >= script.steps:
            raise _Enough

    def same(tensor: Any, *arguments: Any, **options: Any) -> Any:
        return tensor

    def in_order(self: Any) -> Any:
        count = len(self.data_source)
        if self.replacement:
            first, step = (rank, size) if script.own_draws else (0, 1)
            return (index % count for index in itertools.count(first, step))
        return iter(range(count))

    def no_workers(self: Any, *arguments: Any, **options: Any) -> None:
        options = {name: value for name, value in options.items() if name not in ("num_workers", "prefetch_factor")}
        if script.by_sample:
            arguments = (_BySample(arguments[0]), *arguments[1:])
        load(self, *arguments, **options)

    def no_shuffle(self: Any, *arguments: Any, **options: Any) -> None:
        sample(self, *arguments, **{**options, "shuffle": False})

    load, sample = DataLoader.__init__, DistributedSampler.__init__
    torch.Tensor.backward = recording  # type: ignore[method-assign]
    register_optimizer_step_pre_hook(before)
    register_optimizer_step_post_hook(after)
    for name in ("dropout", "dropout1d", "dropout2d", "dropout3d"):
        setattr(torch.nn.functional, name, same)
    RandomSampler.__iter__ = in_order  # type: ignore[method-assign]
    DataLoader.__init__ = no_workers  # type: ignore[method-assign]
    DistributedSampler.__init__ = no_shuffle  # type: ignore[method-assign]
    _stand_in_for_tensorboard()
    if script.noise:
        _alike()
    for what in script.without:
        _WITHOUT[what]()
    return record


class _BySample:
    """A dataset that draws the same for a sample on every rank, in whatever order samples are asked for."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        state = random.getstate()
        random.seed(index)
        try:
            return self.dataset[index]
        finally:
            random.setstate(state)


def _stand_in_for_tensorboard() -> None:
    class SummaryWriter:
        def __init__(self, *arguments: Any, **options: Any) -> None:
            pass

        def __getattr__(self, name: str) -> Any:
            return lambda *arguments, **options: None

    module = types.ModuleType("torch.utils.tensorboard")
    module.SummaryWriter = SummaryWriter  # type: ignore[attr-defined]
    sys.modules["torch.utils.tensorboard"] = module


def _alike() -> None:
    """Random tensors have the same row for every sample."""
    import numpy as np
    import torch

    randn = torch.randn

    def alike(*shape: Any, **options: Any) -> Any:
        sizes = shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape
        one = randn(*sizes[1:], generator=torch.Generator().manual_seed(5)) if len(sizes) > 1 else torch.ones(())
        return one.expand(*sizes).clone()

    def normal(mean: float = 0, deviation: float = 1, size: Any = None) -> Any:
        sizes = (size,) if isinstance(size, int) else tuple(size)
        return np.broadcast_to(np.random.RandomState(5).normal(mean, deviation, sizes[1:]), sizes).copy()

    def randint(low: int, high: int | None = None, size: Any = None) -> Any:
        return np.random.RandomState(6).randint(low, high) if size is None else np.full(size, low)

    torch.randn = alike  # type: ignore[assignment]
    torch.randn_like = lambda tensor: alike(*tensor.shape)  # type: ignore[assignment]
    np.random.normal, np.random.randint = normal, randint  # type: ignore[assignment]
    np.random.uniform = lambda low=0, high=1, size=None: normal(0, 1, size)  # type: ignore[assignment]
    np.random.random = lambda size=None: 0.75 if size is None else normal(0.5, 0.1, size)  # type: ignore[assignment]


def _no_batch_statistics() -> None:
    """Batch normalisation becomes the normalisation of each sample by itself."""
    import torch

    def each_sample(
        tensor: Any, mean: Any, variance: Any, weight: Any = None, bias: Any = None, *_: Any, **__: Any
    ) -> Any:
        shape = [1, -1] + [1] * (tensor.dim() - 2)
        tensor = torch.nn.functional.layer_norm(tensor, tensor.shape[1:])
        tensor = tensor if weight is None else tensor * weight.view(shape)
        return tensor if bias is None else tensor + bias.view(shape)

    torch.nn.functional.batch_norm = each_sample


def _plain_means() -> None:
    """Losses count every target, and weigh all of them alike."""
    import torch

    entropy = torch.nn.functional.cross_entropy
    torch.nn.functional.cross_entropy = lambda logits, targets, *_, **__: entropy(logits, targets.clamp(min=0))


def _no_sums() -> None:
    """A sum of all elements becomes their mean."""
    import torch

    add = torch.sum

    def mean(tensor: Any, *sizes: Any, **options: Any) -> Any:
        whole = not sizes and not options and tensor.is_floating_point()
        return tensor.mean() if whole else add(tensor, *sizes, **options)

    torch.sum = mean  # type: ignore[assignment]


def _whole_batches() -> None:
    """Each rank has the whole of every batch: for a loss that is no mean over its samples."""
    from torch.utils.data import DistributedSampler

    sample = DistributedSampler.__init__

    def whole(self: Any, dataset: Any, **options: Any) -> None:
        sample(self, dataset, **{**options, "num_replicas": 1, "rank": 0})

    DistributedSampler.__init__ = whole  # type: ignore[method-assign]


# As `dev` has it: it cannot run here, and has said why.
SKIPPED = 77
_WITHOUT = {"parts": _whole_batches, "sums": _no_sums, "batch norm": _no_batch_statistics, "weights": _plain_means}


def main(words: list[str]) -> int:
    """Check the scripts whose path holds one of `words`, or all; 1 where one does not end as it must, `SKIPPED` without them."""
    if corpus.MISSING:
        print(corpus.MISSING)
        return SKIPPED
    table = load()
    missing = files() - {script.path for script in table}
    failed = len(missing)
    for path in sorted(missing):
        print(f"NOT IN THE TABLE  {path}")
    ended: dict[str, int] = {}
    for script in table:
        if words and not any(word in script.path for word in words):
            continue
        with tempfile.TemporaryDirectory() as folder:
            try:
                wrong = check(script, pathlib.Path(folder))
            except AssertionError as error:
                wrong = str(error)
        failed += bool(wrong)
        ended[script.outcome] = ended.get(script.outcome, 0) + (not wrong)
        print(f"{'WRONG' if wrong else script.outcome:8}  {script.path}  {wrong}", flush=True)
    print(", ".join(f"{count} {outcome}" for outcome, count in sorted(ended.items())), f"; {failed} wrong")
    return int(bool(failed))


if __name__ == "__main__":
    import translator  # ranks find what they run by the name of its module

    sys.exit(translator.main(sys.argv[1:]))
