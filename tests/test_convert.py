"""Proves that `penstock convert` turns scripts of public projects into distributed ones with the same training.

The first half takes small snippets through the pure core, one rule at a time, and what it must leave alone. The second
half runs whole scripts of the corpus (corpus.py) on one rank as they are and on two ranks after conversion.
"""

from __future__ import annotations

import collections
import itertools
import os
import pathlib
import re
import select
import signal
import socket
import subprocess
import sys
import types
from typing import Any

import click.testing
import pytest

import corpus
import forked
import ranks
import translator
from penstock.cli import main
from penstock.tools.convert import helpers
from penstock.tools.convert.base import Options, Refused
from penstock.tools.convert.core import Converted, convert
from penstock.tools.run.cli import parse, torchrun_options
from penstock.tools.run.lines import compile_as, original_lines

# --------------------------------------------------------------------------------------------- the core, rule by rule

# A script with one of everything; tests take the parts that they are about from it, or bring their own.
BASIC = """
import torch
from torch import nn, optim
from torch.utils.data import DataLoader

dataset = make()
loader = DataLoader(dataset, batch_size=32, shuffle=True)
model = nn.Linear(4, 1)
optimizer = optim.SGD(model.parameters(), lr=0.1)
for epoch in range(3):
    for x, y in loader:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
    print(epoch, loss.item())
torch.save(model.state_dict(), "model.pt")
"""


def test_what_changes_in_a_plain_script() -> None:
    """One script, all of its changed lines: the loader, the model, the epoch, the seed, print, metric and save."""
    assert new_lines(BASIC) == [
        "loader = DataLoader(dataset, batch_size=per_rank_batch(32), "
        "sampler=DistributedSampler(dataset, shuffle=True, seed=shared_seed()))",
        "model = DistributedDataParallel(model)",
        "seed_apart()",
        "    loader.sampler.set_epoch(epoch)",
        "    rank_zero_print(epoch, mean_over_ranks(loss))",
        "if RANK == 0:",
        '    torch.save(unwrap(model).state_dict(), "model.pt")',
        "torch.distributed.destroy_process_group()",
    ]


def test_comments_and_layout_stay() -> None:
    """Every line that no rule touches is there as it was, with its comment and its odd spacing."""
    source = BASIC.replace("dataset = make()", "dataset = make( 1,2 )   # odd   spacing")
    source = source.replace("    for x, y in loader:", "    # all batches\n    for x, y in loader:  # once")
    text = convert(source).text
    for line in ("dataset = make( 1,2 )   # odd   spacing", "    # all batches", "    for x, y in loader:  # once"):
        assert line in text.splitlines()


@pytest.mark.parametrize("name", ["RANK", "unwrap", "per_rank_batch"])
def test_names_of_the_script_are_not_taken(name: str) -> None:
    """Where the script has a name that a helper would get, the helper gets another."""
    text = convert(BASIC + f"{name} = 1\n").text
    assert f"penstock_{name}" in text and f"\n{name} = 1\n" in text


def test_the_head_stands_on_its_own() -> None:
    """It imports what it uses, also what the script imports later or by parts, and rebinds no name of the script."""
    imports = "from random import random\nfrom logging import getLogger\nimport numpy as np\n"
    text = convert(imports + BASIC + "import os\n").text
    head = text[: text.index("dataset = make()")]
    assert "\nimport os\n" in head and "\nimport logging\n" in head and "\nimport random" not in head
    assert "    import random\n" in head and "\nimport sys\n" in head and "logging.disable" in head


@pytest.mark.parametrize(
    ("imports", "call"),
    [
        ("import torch.utils.data as D", "D.DataLoader"),
        ("from torch.utils.data import DataLoader as DL", "DL"),
        ("from torch.utils import data", "data.DataLoader"),
        ("import torch.utils.data", "torch.utils.data.DataLoader"),
        ("from torch.utils.data.dataloader import DataLoader", "DataLoader"),
    ],
)
def test_loaders_are_known_under_every_name(imports: str, call: str) -> None:
    """What counts is what was imported, not what it is called."""
    source = BASIC.replace("from torch.utils.data import DataLoader", imports).replace("= DataLoader(", f"= {call}(")
    assert f"loader = {call}(dataset, batch_size=per_rank_batch(32), sampler=Dist" in convert(source).text


def test_a_class_of_the_same_name_is_not_a_loader() -> None:
    """A DataLoader of the script's own is left alone, and the loop over it is reported."""
    source = BASIC.replace("from torch.utils.data import DataLoader", "class DataLoader:\n    pass")
    converted = convert(source)
    assert "DistributedSampler" not in converted.text
    assert "without a DataLoader" in findings(converted)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("dataset, 32, True",
         "dataset, per_rank_batch(32), sampler=DistributedSampler(dataset, shuffle=True, seed=shared_seed())"),
        ("dataset, batch_size=8", "dataset, batch_size=per_rank_batch(8), sampler=DistributedSampler(dataset, shuffle=False)"),
        ("dataset, 8, False, None, None, 2",
         "dataset, per_rank_batch(8), sampler=DistributedSampler(dataset, shuffle=False), batch_sampler=None, num_workers=2"),
        ("dataset, batch_size=n, shuffle=args.shuffle",
         "dataset, batch_size=per_rank_batch(n), sampler=DistributedSampler(dataset, shuffle=args.shuffle, seed=shared_seed())"),
        ("dataset=dataset, shuffle=True, batch_size=8",
         "dataset=dataset, sampler=DistributedSampler(dataset, shuffle=True, seed=shared_seed()), batch_size=per_rank_batch(8)"),
        ("dataset, **options", "dataset, **sharded(dataset, options)"),
        ("dataset, shuffle=True, **options", "dataset, **sharded(dataset, dict(shuffle=True, **options))"),
    ],
)  # fmt: skip
def test_arguments_of_a_loader(arguments: str, expected: str) -> None:
    """Whether it shuffles is kept, whatever way it is said; the rest of its arguments stays."""
    source = BASIC.replace("dataset, batch_size=32, shuffle=True", arguments)
    text = convert(source).text
    assert f"loader = DataLoader({expected})" in text


def test_options_that_are_written_out_are_read() -> None:
    """``**options`` with keys that do not matter leaves the rest of the call as it is."""
    source = BASIC.replace("dataset = make()", "dataset = make()\noptions = {'num_workers': 1} if a else {}")
    source = source.replace("shuffle=True)", "shuffle=True, **options)")
    assert "shuffle=True, seed=shared_seed()), **options)" in convert(source).text


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        ("dataset, batch_size=8, sampler=SubsetRandomSampler(i)", "has a sampler already"),
        ("dataset, batch_sampler=b", "a batch_sampler feeds training"),
        ("Stream(), batch_size=8", "an IterableDataset feeds training"),
        ("*everything", "whose dataset cannot be read"),
        ("dataset, batch_size=None", "batch_size=None"),
    ],
)
def test_loaders_that_are_left_alone(arguments: str, what: str) -> None:
    """Where a rank's share cannot be told, the loader stays as it is and the report says why and what to do."""
    source = BASIC.replace("dataset, batch_size=32, shuffle=True", arguments).replace(
        "dataset = make()",
        "from torch.utils.data import IterableDataset, SubsetRandomSampler\n"
        "class Stream(IterableDataset):\n    pass\ndataset = make()",
    )
    converted = convert(source)
    assert what in findings(converted)
    if "None" not in arguments:
        assert f"DataLoader({arguments})" in converted.text


def test_evaluation_stays_whole() -> None:
    """A loader that only evaluation runs over is not sharded, and its figures are not averaged."""
    source = BASIC.replace(
        "    print(epoch, loss.item())",
        "    with torch.no_grad():\n"
        "        for x, y in DataLoader(make(2), batch_size=8):\n"
        "            total += nn.functional.mse_loss(model(x), y).item()\n",
    )
    text = convert(source).text
    assert "DataLoader(make(2), batch_size=8)" in text
    assert "mse_loss(model(x), y).item()" in text


def test_loaders_and_models_pass_through_functions_and_classes() -> None:
    """What is made in one function, handed to a class and used in its method is found; attributes are unwrapped."""
    source = """
import torch
from torch import nn
from torch.utils.data import DataLoader

class Trainer:
    def __init__(self, model, batches):
        self.model = model.to("cuda:0")
        self.batches = batches
        self.optimizer = torch.optim.Adam(self.model.parameters())

    def fit(self):
        for number in range(2):
            self.epoch(number)
        return self.model.state_dict()

    def epoch(self, number):
        for x in self.batches:
            self.step(x)

    def step(self, x):
        loss = self.model(x).mean()
        loss.backward()
        self.optimizer.step()

def get_loader(dataset, size):
    return DataLoader(dataset, batch_size=size, shuffle=True)

def main():
    Trainer(nn.Linear(2, 2), get_loader(make(), 4)).fit()

if __name__ == "__main__":
    main()
"""
    assert new_lines(source) == [
        '        self.model = model.to("cuda")',
        "        self.model = DistributedDataParallel(self.model)",
        "        seed_apart()",
        "        return unwrap(self.model).state_dict()",
        "        self.batches.sampler.set_epoch(number)",
        "    return DataLoader(dataset, batch_size=per_rank_batch(size), "
        "sampler=DistributedSampler(dataset, shuffle=True, seed=shared_seed()))",
        "    join_ranks()",
        "    torch.distributed.destroy_process_group()",
    ]


@pytest.mark.parametrize(
    ("loop", "expected"),
    [
        ("for i, (x, y) in enumerate(tqdm(loader)):", "for i, (x, y) in enumerate(tqdm(loader, disable=RANK != 0)):"),
        ("for (x, y), z in zip(loader, other):", "loader.sampler.set_epoch(epoch)"),
        ("bar = tqdm(loader, leave=False)\n    for x, y in bar:", "tqdm(loader, leave=False, disable=RANK != 0)"),
    ],
)
def test_loops_look_through_what_wraps_a_loader(loop: str, expected: str) -> None:
    """enumerate, zip and progress bars hide no loader, and a progress bar is shown by rank 0 alone."""
    text = convert("from tqdm import tqdm" + BASIC.replace("for x, y in loader:", loop)).text
    assert "sampler=DistributedSampler" in text and "loader.sampler.set_epoch(epoch)" in text
    assert expected in text


def test_a_while_loop_that_draws_batches() -> None:
    """``next(iter(...))`` in an endless loop trains on the loader; a new iterator is a new epoch."""
    source = BASIC.replace(
        "for epoch in range(3):\n    for x, y in loader:",
        "batches = iter(loader)\nwhile step < 9:\n    if True:\n        try:\n            x, y = next(batches)\n"
        "        except StopIteration:\n            batches = iter(loader)\n            x, y = next(batches)",
    )
    text = convert(source).text
    assert "            loader.sampler.set_epoch(loader.sampler.epoch + 1)\n            batches = iter(loader)" in text


def test_data_parallel_is_dropped() -> None:
    """DataParallel has no place in a rank; with its statement an empty block would be left, so that says pass."""
    source = BASIC.replace("optimizer =", "if many:\n    model = nn.DataParallel(model)\noptimizer =")
    lines = new_lines(source)
    assert "    pass" in lines and "model = DistributedDataParallel(model)" in lines
    assert "nn.DataParallel" not in convert(source).text


def test_several_models_and_optimizers() -> None:
    """In a GAN both networks are wrapped, each after its own preparation, without broadcasts between forward passes."""
    source = """
import torch
from torch import nn
from torch.utils.data import DataLoader
D, G = nn.Linear(2, 1), nn.Linear(3, 2)
D = D.to(device)
G.apply(initialise)
d_optimizer = torch.optim.Adam(D.parameters())
g_optimizer = torch.optim.Adam(G.parameters())
teacher = nn.Linear(1, 1)
for real in DataLoader(make(), batch_size=4):
    fake = G(torch.randn(4, 3))
    loss = D(real).mean() + D(fake.detach()).mean() + teacher(real).mean()
    loss.backward()
    d_optimizer.step()
    (-D(fake).mean()).backward()
    g_optimizer.step()
"""
    lines = new_lines(source)
    assert "D = DistributedDataParallel(D, broadcast_buffers=False)" in lines
    assert "G = DistributedDataParallel(G)" in lines
    assert not any("teacher" in line for line in lines)


# What comes before the training loop of BASIC and, in it, the line of the loss; and why no wrapper would do.
NOT_WRAPPED = {
    "a helper's argument is followed": ("def encode(batch, net):\n    return net(batch)\n", "mse(encode(x, model), y)", None),
    "a method of the model": ("", "mse(model(x), y) + model.penalty(x)", "a loss comes from `model.penalty`"),
    "a method alone": ("", "model.loss(x, y)", "a loss comes from `model.loss`"),
    "a part of the model": ("", "mse(model.encoder(x), y)", "a loss comes from `model.encoder`"),
    "a parameter of its own": (
        "scale = nn.Parameter(torch.ones(1))\noptimizer = optim.SGD([*model.parameters(), scale], lr=0.1)\n",
        "mse(scale * model(x), y)",
        "not all of its parameters are seen to belong to a model",
    ),
    "a list that grows": (
        "weights = list(model.parameters())\nweights.append(other)\noptimizer = optim.SGD(weights, lr=0.1)\n",
        "mse(model(x), y)",
        "not all of its parameters are seen to belong to a model",
    ),
    "a model behind a function that is not seen": (
        "from elsewhere import *\n", "compute(model, x, y)", "a loss comes from `compute`, which gets it",
    ),
    "two backward passes of one forward pass": (
        "", "mse(model(x), y)\n        loss.backward(retain_graph=True)", "two backward passes start from one forward pass",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", NOT_WRAPPED)
def test_every_parameter_is_covered(case: str) -> None:
    """Where a loss may come by another way than the model's own call, its optimizer is averaged after each backward pass; a
    helper of the script is followed, and the model in it is wrapped."""
    before, loss, reason = NOT_WRAPPED[case]
    source = BASIC.replace("for epoch", f"{before}mse = nn.functional.mse_loss\nfor epoch")
    if "optimizer =" in before:
        source = source.replace("optimizer = optim.SGD(model.parameters(), lr=0.1)\n", "", 1)
    converted = convert(source.replace("nn.functional.mse_loss(model(x), y)", loss))
    told = [each.what for each in converted.edits if each.rule == "gradients"]
    if reason is None:
        assert "model = DistributedDataParallel(model)" in converted.text and not told
        return
    assert "DistributedDataParallel(" not in converted.text.split("join_ranks()\n")[-1]
    assert "optimizer = averaged(optim.SGD(" in converted.text
    assert (
        converted.text.count("backward()\n        average_gradients()\n")
        + converted.text.count("retain_graph=True)\n        average_gradients()\n")
        == loss.count("backward") + 1
    )
    assert any(reason in each for each in told), told
    assert "model.state_dict()" in converted.text, "what is not wrapped is not unwrapped"


def test_what_shares_an_optimizer_is_covered_alike() -> None:
    """An optimizer is averaged as a whole, with every other that gets one of its models."""
    source = BASIC.replace(
        "optimizer =",
        "head, tail = nn.Linear(1, 1), nn.Linear(1, 1)\n"
        "both = optim.SGD(list(model.parameters()) + list(head.parameters()), lr=0.1)\n"
        "last = optim.SGD(tail.parameters(), lr=0.1)\noptimizer =",
    ).replace("model(x), y)\n", "tail(head.half_way(model(x))), y)\n")
    text = convert(source).text
    assert "both = averaged(" in text and "optimizer = averaged(" in text
    assert "last = optim.SGD(" in text and "tail = DistributedDataParallel(tail)" in text


def test_imported_functions_are_followed() -> None:
    """A function of a file beside the script gets the wrapper where it only calls the model; else its optimizer is averaged."""
    files = {
        "helpers": "def run(net, x):\n    net.train()\n    return deeper(net, x)\ndef deeper(net, x):\n    return net(x)\n"
        "def look(x, net):\n    return net.encoder(x)\n"
    }
    for imported in ("from helpers import run, look", "from helpers import *"):
        source = BASIC.replace("import torch\n", f"import torch\n{imported}\n", 1)
        followed = convert(source.replace("model(x), y", "run(model, x), y"), read=files.get)
        assert "model = DistributedDataParallel(model)" in followed.text, [each.what for each in followed.edits]
        averaged = convert(source.replace("model(x), y", "look(x, net=model), y"), read=files.get)
        assert "optimizer = averaged(" in averaged.text and "DistributedDataParallel(model" not in averaged.text


def test_parts_of_an_output_that_enter_no_loss() -> None:
    """A model with several heads, of which a step uses one, is averaged: a wrapper waits for the gradients of all."""
    source = BASIC.replace(
        "loss = nn.functional.mse_loss(model(x), y)", "a, {} = model(x)\n        loss = (a - y + {}).mean()"
    )
    assert "model = DistributedDataParallel(model)" in convert(source.replace("{}", "b")).text
    whole = source.replace("a, {} = model(x)\n        loss = (a - y + {}).mean()", "_, loss = model(x, y)")
    assert "model = DistributedDataParallel(model)" in convert(whole).text, "the model's own loss stands for all parts"
    for part in ("_", "b"):
        left = convert(source.replace("a, {}", f"a, {part}").replace("a - y + {}", "a - y"))
        assert "optimizer = averaged(" in left.text
        assert "a part of its output enters no loss" in "".join(each.what for each in left.edits)


def test_a_layer_that_a_pass_may_leave_out() -> None:
    """A layer under a condition may have no gradient in a step, for which a wrapper would wait."""
    module = (
        "class Net(nn.Module):\n    def __init__(self):\n        super().__init__()\n        self.a = nn.Linear(4, 1)\n"
        "    def forward(self, x):\n        {}\nmodel = Net()"
    )
    left_out = convert(
        BASIC.replace("model = nn.Linear(4, 1)", module.format("if self.on: x = self.a(x)\n        return x"))
    )
    assert "optimizer = averaged(" in left_out.text
    used = convert(BASIC.replace("model = nn.Linear(4, 1)", module.format("return self.a(x)")))
    assert "model = DistributedDataParallel(model)" in used.text


@pytest.mark.parametrize(
    ("before", "after", "told"),
    [
        ("optimizer = optim.SGD(model.parameters(), lr=0.1)", "optimizer = things[0]", "no statement here makes the optimizer"),
        ("optimizer = optim.SGD(model.parameters(), lr=0.1)", "opt = elsewhere.opt\nnorm(model.parameters())",
         "no optimizer is made here"),
        ("        optimizer.zero_grad()", "        delta = torch.zeros_like(x)\n        optimizer = optim.SGD([delta], lr=0.1)",
         "`optim.SGD([delta], lr=0.1)` is made anew for a batch"),
        ("        optimizer.step()", "        for p in model.encoder.parameters():\n            p.data -= p.grad",
         "`model.encoder` is updated by hand"),
    ],
)  # fmt: skip
def test_what_cannot_be_covered_is_refused(before: str, after: str, told: str) -> None:
    """The refusal says which optimizer, or which parameters, and where."""
    source = BASIC.replace(before, after)
    assert after in source
    if "opt =" in after:
        source = source.replace("optimizer.", "opt.")
    with pytest.raises(Refused, match=re.escape(told)) as refused:
        convert(source)
    assert refused.value.reason == "model" and refused.value.line > 0


# A class of the script, or of a file beside it, that trains what it gets; and scripts in which `b` is trained by hand.
PLAIN_SGD = """
class PlainSGD:
    def __init__(self, params, lr):
        self.params = list(params)
        self.lr = lr
    def step(self):
        with torch.no_grad():
            for p in self.params:
                {update}
    def zero_grad(self):
        for p in self.params:
            p.grad = None
"""

TWO_MODELS = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
{before}
torch.manual_seed(0)
x = torch.randn(64, 4)
loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=16)
a, b = nn.Linear(4, 1), nn.Linear(4, 1)
scale = torch.ones(1, requires_grad=True)
optimizer = torch.optim.SGD(a.parameters(), lr=0.1)
{made}
for inputs, targets in loader:
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(a(inputs) + scale * b(inputs), targets)
    loss.backward()
    optimizer.step()
{after}
"""

OWN_SGD = "opt_b = PlainSGD(b.parameters(), lr=0.1)"
OWN_STEP = "    opt_b.step()\n    opt_b.zero_grad()"
ADDED = "p.data.add_(p.grad, alpha=-0.1)"


def two_models(before: str = "", made: str = "", after: str = "") -> str:
    return TWO_MODELS.format(before=before, made=made, after=after)


TRAINED_BY_HAND = {
    "a class of the script": two_models(PLAIN_SGD.format(update="p -= self.lr * p.grad"), OWN_SGD, OWN_STEP),
    "by another method": two_models(PLAIN_SGD.format(update="p.data.add_(p.grad, alpha=-self.lr)"), OWN_SGD, OWN_STEP),
    "by a name": two_models(
        PLAIN_SGD.format(update='g = getattr(p, "grad")\n                p.data = p.data - self.lr * g'), OWN_SGD, OWN_STEP
    ),
    "a class that gets the model": two_models(
        PLAIN_SGD.format(update="p -= self.lr * p.grad").replace("list(params)", "list(params.parameters())"),
        OWN_SGD.replace("b.parameters()", "b"), OWN_STEP,
    ),
    "an optimizer of the script": two_models(
        PLAIN_SGD.format(update="p -= self.lr * p.grad").replace("PlainSGD:", "PlainSGD(torch.optim.Optimizer):").replace(
            "list(params)", "list(params); super().__init__(self.params, {})"
        ), OWN_SGD, OWN_STEP,
    ),
    "a class beside it": two_models("from beside import PlainSGD", OWN_SGD, OWN_STEP),
    "a function beside it": two_models("import beside", after="    beside.update(b)\n    b.zero_grad()"),
    "an optimizer beside it": two_models("from beside import Own", OWN_SGD.replace("PlainSGD", "Own"), OWN_STEP),
    "a library's optimizer of any name": two_models(
        "from library import Fancy", OWN_SGD.replace("PlainSGD", "Fancy"), OWN_STEP
    ),
    "a list of gradients": two_models(
        made="params = list(b.parameters())",
        after="    grads = [p.grad for p in params]\n    torch._foreach_add_(params, grads, alpha=-0.1)",
    ),
    "beside what is zipped": two_models(
        made="speed = [torch.zeros_like(p) for p in b.parameters()]",
        after="    for v, p in zip(speed, b.parameters()):\n        v.mul_(0.9).add_(p.grad)\n        p.data.sub_(0.1 * v)",
    ),
}  # fmt: skip

BESIDE = {
    "beside": "import torch\n" + PLAIN_SGD.format(update="p -= self.lr * p.grad")
    + "def update(model):\n    for p in model.parameters():\n        inner(p)\n"
    + f"def inner(p):\n    {ADDED}\n"
    + "class Own(torch.optim.Optimizer):\n    def step(self):\n"
    + f"        for p in self.param_groups[0]['params']:\n            {ADDED}\n"
}  # fmt: skip


@pytest.mark.parametrize("case", TRAINED_BY_HAND)
def test_a_model_that_is_trained_by_hand_beside_an_optimizer_is_wrapped(case: str) -> None:
    """Whoever reads its gradients gets those of all ranks, whatever it is called and wherever it is written."""
    text = convert(TRAINED_BY_HAND[case], read=BESIDE.get).text
    assert "\nb = DistributedDataParallel(b)\n" in text and "\na = DistributedDataParallel(a)\n" in text


@pytest.mark.parametrize(
    ("after", "told"),
    [
        ("    with torch.no_grad():\n        scale -= 0.1 * scale.grad", "`scale` is updated by hand"),
        ("    scale.data.sub_(0.1 * scale.grad)", "`scale` is updated by hand"),
        ("    scale.data -= 0.1 * scale.grad", "`scale` is updated by hand"),
        ("    g = scale.grad.clone()\n    scale.data -= 0.1 * g", "`scale` is updated by hand"),
        ("    scale = (scale - 0.1 * scale.grad).detach().requires_grad_()", "`scale` is updated by hand"),
        ("    for p in [scale]:\n        p.data -= 0.1 * p.grad", "`p` is updated by hand"),
        ("    beside.inner(scale)", "what `beside.inner` gets is updated by hand"),
        ("    for p in unknown:\n        p.data -= 0.1 * p.grad", "what makes it is not seen"),
        (
            "    loss = b.half_way(inputs).sum()\n    loss.backward()\n    b.weight.data -= b.weight.grad",
            "cannot be wrapped",
        ),
    ],
)
def test_what_is_trained_by_hand_and_cannot_be_covered_is_refused(after: str, told: str) -> None:
    """The refusal names it, its line, and what to do."""
    source = two_models("import beside\nfrom library import unknown", after=after)
    with pytest.raises(Refused, match=re.escape(told)) as refused:
        convert(source, read=BESIDE.get)
    read = next(line for line in after.splitlines() if ".grad" in line or "beside" in line)
    assert refused.value.reason == "model" and source.splitlines()[refused.value.line - 1] == read
    assert "give it to an optimizer of torch.optim" in str(refused.value)


@pytest.mark.parametrize(
    "after",
    [
        "    print(scale.grad, scale.grad.norm())",
        "    if scale.grad is not None:\n        scale.grad.zero_()",
        "    scale.grad = None\n    scale.grad = scale.grad / 2\n    scale.grad *= 0.5",
        "    nn.utils.clip_grad_norm_(scale, 1.0)\n    total = sum(p.grad.norm() ** 2 for p in b.parameters())",
        "    x_adv = inputs.clone().requires_grad_()\n    a(x_adv).sum().backward()\n    inputs = inputs + x_adv.grad.sign()",
        "    for p in a.parameters():\n        noise = p.grad + torch.randn_like(p)",
    ],
)
def test_gradients_that_are_only_looked_at_change_nothing(after: str) -> None:
    """Norms, prints and zeros train nothing, and the gradient of a batch's own samples stays that of its rank."""
    text = convert(two_models(after=after)).text
    assert "\na = DistributedDataParallel(a" in text and "DistributedDataParallel(b" not in text


def test_what_an_averaged_optimizer_gets_may_be_read() -> None:
    """The gradients of an optimizer without a wrapper are averaged before anything reads them."""
    source = TRAINED_ASIDE.replace(
        "    optimizer.step()",
        "    for p in [*model.parameters(), scale]:\n        p.data.sub_(0.1 * p.grad)\n    optimizer.step()",
    )
    assert "optimizer = averaged(" in convert(source).text


def test_a_layer_that_is_never_used() -> None:
    """A module of the script with a layer that its forward does not mention is wrapped so that DDP expects that."""
    module = (
        "class Net(nn.Module):\n    def __init__(self):\n        super().__init__()\n        self.a = nn.Linear(4, 1)\n"
        "        self.b = nn.Linear(4, 1)\n    def forward(self, x):\n        return self.a(x){}\nmodel = Net()"
    )
    unused = convert(BASIC.replace("model = nn.Linear(4, 1)", module.format("")))
    used = convert(BASIC.replace("model = nn.Linear(4, 1)", module.format(" + self.b(x)")))
    assert "DistributedDataParallel(model, find_unused_parameters=True)" in unused.text
    assert "DistributedDataParallel(model)" in used.text


@pytest.mark.parametrize(
    ("metric", "expected"),
    [
        ("running += loss.item()", "running += mean_over_ranks(loss)"),
        ("running += loss.detach().item() * len(x)", "running += mean_over_ranks(loss.detach()) * len(x) * WORLD_SIZE"),
        ("running += float(loss)", "running += mean_over_ranks(loss)"),
        ("right += (model(x) == y).sum().item()", "right += sum_over_ranks((model(x) == y).sum())"),
        ("seen += y.size(0)", "seen += y.size(0) * WORLD_SIZE"),
        ("seen += x.shape[0]", "seen += x.shape[0] * WORLD_SIZE"),
        ("rows = torch.zeros(x.size(0))", "rows = torch.zeros(x.size(0))"),
        ("biggest = y.max().item()", "biggest = y.max().item()"),
        ("if epoch % 2 == 0: logs.append(loss.item())", "if epoch % 2 == 0: logs.append(mean_over_ranks(loss))"),
    ],
)
def test_metrics_become_those_of_the_global_batch(metric: str, expected: str) -> None:
    """Means are averaged, sums and sizes added up; what is neither, and what is no metric, stays."""
    text = convert(BASIC.replace("        optimizer.step()", f"        optimizer.step()\n        {metric}")).text
    assert f"        {expected}\n" in text


def test_no_average_where_ranks_may_differ() -> None:
    """Under a condition on the rank's own data a collective would hang: the figure stays the rank's, and is reported."""
    metric = "        if y[0] > 0:\n            print(loss.item())"
    converted = convert(BASIC.replace("        optimizer.step()", f"        optimizer.step()\n{metric}"))
    assert "rank_zero_print(loss.item())" in converted.text
    assert "is the figure of one rank" in findings(converted)


@pytest.mark.parametrize(
    ("loss", "scaled"),
    [
        ("nn.functional.mse_loss(model(x), y, reduction='sum')", True),
        ("nn.MSELoss(reduction='sum')(model(x), y)", None),
        ("((model(x) - y) ** 2).sum()", True),
        ("((model(x) - y) ** 2).sum() / x.size(0)", False),
        ("((model(x) - y) ** 2).mean() * 3", False),
        ("criterion(model(x), y)", None),
    ],
)
def test_sums_are_scaled_back(loss: str, scaled: bool | None) -> None:
    """DDP averages gradients: a loss that is a sum over samples is scaled, a mean is not, the unknown is reported."""
    converted = convert(BASIC.replace("nn.functional.mse_loss(model(x), y)", loss))
    assert ("(loss * WORLD_SIZE).backward()" in converted.text) == bool(scaled)
    assert ("a mean is taken for granted" in findings(converted)) == (scaled is None)


def test_accumulation_exchanges_gradients_once() -> None:
    """Backward passes before the one that an optimizer step follows are put under no_sync."""
    source = BASIC.replace("for x, y in loader:", "for i, (x, y) in enumerate(loader):")
    source = source.replace("        optimizer.step()", "        if (i + 1) % 4 == 0:\n            optimizer.step()")
    text = convert(source).text
    assert (
        "        with contextlib.nullcontext() if (i + 1) % 4 == 0 else model.no_sync():\n"
        "            loss = nn.functional.mse_loss(model(x), y)\n"
        "            loss.backward()\n"
        "        if (i + 1) % 4 == 0:\n"
    ) in text
    late = source.replace("        if (i + 1)", "        i = i + 0\n        if (i + 1)")
    assert "no_sync" not in convert(late).text and "gradients accumulate" in findings(convert(late))


def test_accumulation_in_an_inner_loop() -> None:
    """``for micro in range(n)`` with the step after it exchanges gradients in its last round."""
    source = """
import torch
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
while step < 10:
    for micro in range(4):
        loss = model(torch.rand(8, 2)).mean()
        (loss / 4).backward()
    optimizer.step()
"""
    converted = convert(source)
    assert "        with contextlib.nullcontext() if micro == 4 - 1 else model.no_sync():\n" in converted.text
    assert "where they come from cannot be seen here" in findings(converted)


@pytest.mark.parametrize("source_of_batches", ["rb.sample(32)", "make_loader()", "[torch.rand(8, 4)]"])
def test_samples_that_are_not_shared_out(source_of_batches: str) -> None:
    """Where a loop's samples are not shared out, ranks keep the same random numbers, sums are not scaled, counts not added up,
    and the report says what cannot be seen, not what ranks would see."""
    source = BASIC.replace("for x, y in loader", f"for x, y in {source_of_batches}").replace(
        "nn.functional.mse_loss(model(x), y)", "((model(x) - y) ** 2).sum()\n        right = (x > y).sum().item()"
    )
    converted = convert("from elsewhere import *\n" + source)
    main = converted.text[converted.text.index("dataset = make()") :]
    assert "seed_apart()" not in main and "WORLD_SIZE" not in main and "sum_over_ranks" not in main
    assert "where they come from cannot be seen here" in findings(converted)
    assert "nothing is gained" not in findings(converted)


@pytest.mark.parametrize(
    ("line", "told", "text"),
    [
        ("meter.update(accuracy(model(x), y)[0], x.size(0))", "`accuracy(model(x), y)[0]` is the figure of one rank",
         "meter.update(accuracy(model(x), y)[0], x.size(0))"),
        ("meter.update(loss.item(), x.size(0))", "", "meter.update(mean_over_ranks(loss), x.size(0) * WORLD_SIZE)"),
        ("total += accuracy(model(x), y)", "`accuracy(model(x), y)` is the figure of one rank", "total += accuracy(model(x), y)"),
        ("print(model(x))", "`model(x)` is the figure of one rank", "rank_zero_print(model(x))"),
        ("sys.stdout.write('%f' % loss.item())", "", "rank_zero_write('%f' % mean_over_ranks(loss))"),
    ],
)  # fmt: skip
def test_figures_of_one_rank(line: str, told: str, text: str) -> None:
    """A figure that is not averaged keeps its weight and is listed; what is written goes out once."""
    converted = convert(
        "import sys\n" + BASIC.replace("        optimizer.step()", f"        optimizer.step()\n        {line}")
    )
    assert f"        {text}\n" in converted.text
    assert (told in findings(converted)) if told else not findings(converted)


def test_what_a_part_of_a_batch_changes_is_listed() -> None:
    """Batch normalisation, here or in a file beside the script, and means over other counts on each rank."""
    here = BASIC.replace("nn.Linear(4, 1)", "nn.Sequential(nn.Linear(4, 1), nn.BatchNorm1d(1))")
    assert "batch normalisation: its mean and variance are those of the samples of one rank" in findings(convert(here))
    there = BASIC.replace("nn.Linear(4, 1)", "Net()").replace(
        "import torch\n", "import torch\nfrom net import Net\n", 1
    )
    files = {"net": "from torch import nn\nclass Net(nn.Module):\n    norm = nn.BatchNorm2d\n"}
    assert "batch normalisation in net.py" in findings(convert(there, read=files.get))
    assert "batch normalisation" not in findings(convert(there))
    weighed = BASIC.replace("mse_loss(model(x), y)", "cross_entropy(model(x), y, ignore_index=0)")
    assert "its mean is over the targets that count" in findings(convert(weighed))


@pytest.mark.parametrize(
    ("statement", "expected"),
    [
        ("os.makedirs(out)", "os.makedirs(out, exist_ok=True)"),
        ("os.mkdir('a')", "os.makedirs('a', exist_ok=True)"),
        ("writer = SummaryWriter('logs')", "writer = (SummaryWriter('logs') if RANK == 0 else Silent())"),
        ("np.save('a', b)", "if RANK == 0:\n    np.save('a', b)"),
        ("if done: torch.save(model, 'm')", "if done:\n    if RANK == 0:\n        torch.save(unwrap(model), 'm')"),
        ("a = 1; torch.save(1, 'm')", "a = 1\nif RANK == 0:\n    torch.save(1, 'm')"),
        ("with open('log', 'w') as f:\n    f.write('x')", "if RANK == 0:\n    with open('log', 'w') as f:\n        f.write('x')"),
        ("with open('log') as f:\n    f.read()", "\nwith open('log') as f:\n    f.read()"),
        ("copy.deepcopy(model)", "copy.deepcopy(unwrap(model))"),
        ("state = torch.load('m')", "torch.distributed.barrier()  # what rank 0 saves is whole now\nstate = torch.load('m')"),
        ("device = torch.device('cuda', 0)", "device = torch.device('cuda')"),
        ("x.cuda(0)", "x.cuda()"),
        ("wandb.init(project='p')", "wandb.init(project='p', mode=None if RANK == 0 else \"disabled\")"),
        ("data = CIFAR10(download=True)", "with one_rank_first():\n    data = CIFAR10(download=True)"),
    ],
)  # fmt: skip
def test_files_devices_and_logs(statement: str, expected: str) -> None:
    """What writes is for rank 0, what races is made harmless, what names a device takes the rank's own."""
    imports = (
        "import copy, os, wandb\nimport numpy as np\nfrom torch.utils.tensorboard import SummaryWriter\n"
        "from torchvision.datasets import CIFAR10\n"
    )
    assert f"{expected}\n" in convert(imports + BASIC + "pass\n" + statement + "\n").text


@pytest.mark.parametrize(
    ("statement", "told"),
    [
        ('device = torch.device("cuda:1")', '`"cuda:1"`'),
        ("device = f'cuda:{gpu}'", "`f'cuda:{gpu}'`"),
        ('device = "cuda:%d" % gpu', '`"cuda:%d"`'),
        ('device = "cuda:{}".format(gpu)', '`"cuda:{}"`'),
        ('device = "cuda:" + str(gpu)', '`"cuda:" + str(gpu)`'),
        ("x.cuda(1)", "`x.cuda(1)`"),
        ("x.cuda(args.gpu, non_blocking=True)", "`x.cuda(args.gpu, non_blocking=True)`"),
        ("x.cuda(device=gpu)", "`x.cuda(device=gpu)`"),
        ("x.to(1)", "`x.to(1)`"),
        ("device = torch.device(1)", "`torch.device(1)`"),
        ("with torch.cuda.device(gpu):\n    pass", "`torch.cuda.device(gpu)`"),
    ],
)
def test_devices_with_a_number_are_listed(statement: str, told: str) -> None:
    """A number that a rank would share with the other ranks of its host is named with its line, and is not changed."""
    converted = convert(BASIC + statement + "\n")
    assert f"18: {told}: every rank of a host would use that device" in findings(converted), findings(converted)
    assert statement in converted.text


@pytest.mark.parametrize(
    "statement",
    [
        "x.cuda()",
        "x.cuda(non_blocking=True)",
        "d = torch.device('cuda')\nx.cuda(d)",
        "d = 'cuda' if a else 'cpu'\nx.cuda(d)",
        "if d.startswith('cuda:'):\n    pass",
        "state = torch.load('m', map_location={'cuda:1': 'cuda', 'cuda:0': 'cuda'})",
    ],
)
def test_devices_without_a_number_are_not_listed(statement: str) -> None:
    """What names no device, or says where tensors were when they were saved, stays and is no finding."""
    converted = convert(BASIC + statement + "\n")
    assert findings(converted) == "" and statement in converted.text


def test_early_stopping_is_decided_by_rank_zero() -> None:
    """A break on a measured figure is taken by all ranks or none; one that only counts is left as it is."""
    source = BASIC.replace("    print(epoch, loss.item())", "    score = test()\n    if score > 1:\n        break")
    source = "def test():\n    return 1\n" + source
    assert "    if rank_zero_decides(score > 1):\n        break" in convert(source).text
    counted = BASIC.replace("    print(epoch, loss.item())", "    if epoch > 1:\n        break")
    assert "    if epoch > 1:\n        break" in convert(counted).text


def test_leaving_a_loop_on_own_data_is_reported() -> None:
    """``continue`` on a rank's own data would leave the others waiting in the backward pass."""
    skip = "        if y.sum() > 3:\n            continue\n        loss.backward()"
    converted = convert(BASIC.replace("        loss.backward()", skip))
    assert "one rank may leave and the others wait" in findings(converted)


IN_A_STEP = "        loss.backward()\n"


@pytest.mark.parametrize(
    ("before", "after", "line", "told"),
    [
        # While loops are ends, too: a test on a rank's own tensor, and on a clock in a batch loop.
        ("for epoch in range(3):", "loss = torch.ones(())\nwhile loss > 0.1:", 12, "`while loss > 0.1`: the condition looks at"),
        (IN_A_STEP, IN_A_STEP + "        while loss > 1:\n            loss = model(x).mean()\n            loss.backward()\n",
         16, "`while loss > 1`: the condition looks at a rank's own data"),
        (IN_A_STEP, IN_A_STEP + "        if time.time() - start > 60:\n            break\n", 17,
         "`break` under `if time.time() - start > 60`: ranks read their clocks at different moments"),
        (IN_A_STEP, IN_A_STEP + "        spent = time.perf_counter() - start\n        if spent > 60:\n            break\n", 18,
         "`break` under `if spent > 60`: ranks read their clocks"),
        # Exceptions that one rank catches, in the loop and in the function of a step.
        (IN_A_STEP, "        try:\n            loss.backward()\n        except RuntimeError:\n            continue\n", 17,
         "`except RuntimeError` in code that trains: where one rank has the exception"),
        (IN_A_STEP, "        try:\n            loss.backward()\n        except:\n            pass\n", 17,
         "`except` in code that trains"),
        (IN_A_STEP, "        try:\n            x += f\n        except (OSError, TypeError):\n            continue\n" + IN_A_STEP,
         17, "`except (OSError, TypeError)` in code that trains"),
        # A backward pass, or a step, that only some ranks take.
        (IN_A_STEP, "        if loss > 0.5:\n            loss.backward()\n", 16,
         "`loss.backward()` under `if loss > 0.5`: the condition may differ between ranks"),
        ("        optimizer.step()", "        if y.sum() > 3:\n            optimizer.step()", 17,
         "`optimizer.step()` under `if y.sum() > 3`: the condition may differ between ranks"),
        # Gradients that do not pass through the wrapper.
        (IN_A_STEP, "        inner = torch.autograd.grad(loss, model.parameters(), retain_graph=True)\n" + IN_A_STEP, 15,
         "`torch.autograd.grad` in code that trains: DistributedDataParallel does not see what it returns"),
    ],
)  # fmt: skip
def test_what_parts_ranks_is_listed_with_its_line(before: str, after: str, line: int, told: str) -> None:
    """Each way in which one rank may leave the others in a step, or learn alone, has its finding, at its line."""
    source = BASIC.replace("import torch\n", "import time\nimport torch\n", 1).replace(before, after, 1)
    assert source.count(after) == 1
    assert f"{line}: {told}" in findings(convert(source)), findings(convert(source))


def test_a_return_in_the_function_of_a_step_is_listed() -> None:
    """Where each step is a function, a return on a rank's own data leaves it as a break leaves a loop."""
    body = "def train_step(x, y):\n    loss = nn.functional.mse_loss(model(x), y)\n"
    body += (
        "    if torch.isnan(loss):\n        return None\n    loss.backward()\n    optimizer.step()\n    return loss\n"
    )
    start = BASIC.index("for epoch")
    source = BASIC[:start] + body + "for epoch in range(3):\n    for x, y in loader:\n        train_step(x, y)\n"
    assert "`return None` under `if torch.isnan(loss)`: the condition looks at a rank's own data" in findings(
        convert(source)
    )


def test_ends_that_rank_zero_decides() -> None:
    """A clock, or a figure that was measured, that ends the epochs is looked at by rank 0, in `while` as in `if`."""
    clock = BASIC.replace("for epoch in range(3):", "while time.time() < end:").replace("epoch, ", "")
    clock = clock.replace("import torch\n", "import time\nimport torch\nend = time.time() + 60\n", 1)
    converted = convert(clock)
    assert "\nwhile rank_zero_decides(time.time() < end):\n" in converted.text and findings(converted) == ""
    assert "    rank_zero_print(mean_over_ranks(loss))\n" in converted.text, "the loop is the same for all ranks"
    measured = BASIC.replace("for epoch in range(3):", "score = test()\nwhile(score > 1):").replace(
        "    print(epoch, loss.item())", "    score = test()\n    if (score > 9):\n        print(0)\n        break"
    )
    text = convert("def test():\n    return 1\n" + measured).text
    assert "\nwhile(rank_zero_decides((score > 1))):\n" in text and "    if (rank_zero_decides((score > 9))):\n" in text
    compile(text, "text", "exec")


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("for epoch in range(3):", "epoch = 0\nwhile epoch < 3:\n    epoch += 1"),
        (IN_A_STEP, IN_A_STEP + "        if time.time() - start > 60:\n            print(x.shape)\n"),
        (IN_A_STEP, "        try:\n            loss.backward()\n        except RuntimeError:\n            print(y)\n"
         "            raise\n"),
        (IN_A_STEP, "        try:\n            z = next(more)\n        except StopIteration:\n            break\n" + IN_A_STEP),
        (IN_A_STEP, "        try:\n            import tqdm\n        except ImportError:\n            tqdm = None\n" + IN_A_STEP),
        (IN_A_STEP, "        if epoch > 1:\n            loss.backward()\n        else:\n            (loss * 2).backward()\n"),
        (IN_A_STEP, "        if loss.item() > 3:\n            break\n" + IN_A_STEP),
    ],
)  # fmt: skip
def test_what_ranks_do_alike_is_not_listed(before: str, after: str) -> None:
    """Counters, clocks that only print, exceptions that end the job or come to all, and averaged figures part nobody."""
    source = BASIC.replace("import torch\n", "import time\nimport torch\n", 1).replace(before, after, 1)
    assert source.count(after) == 1
    assert findings(convert(source)) == ""


def test_schedules() -> None:
    """A schedule by a measured figure sees the same on all ranks; others are left alone."""
    plateau = BASIC.replace("    print(epoch, loss.item())", "    scheduler.step(value)\n    other.step()").replace(
        "for epoch",
        "scheduler = optim.lr_scheduler.ReduceLROnPlateau(optimizer)\nother = optim.lr_scheduler.StepLR(optimizer, 1)\nfor epoch",
        1,
    )
    text = convert(plateau).text
    assert "scheduler.step(mean_over_ranks(value))\n    other.step()\n" in text


def test_options() -> None:
    """--batch per-rank leaves batch sizes, --scale-lr multiplies learning rates."""
    text = convert(BASIC, Options(batch="per-rank", scale_lr=True)).text
    assert "batch_size=32, sampler=" in text and "lr=0.1 * WORLD_SIZE" in text and "per_rank_batch" not in text


def test_a_batch_size_that_training_code_uses_is_divided_where_it_is_made() -> None:
    """``x.view(batch_size, -1)`` in the loop must see the batch of a rank."""
    source = BASIC.replace("batch_size=32", "batch_size=batch_size").replace(
        "dataset = make()", "dataset = make()\nbatch_size = 32"
    )
    used = source.replace("model(x)", "model(x.view(batch_size, -1))")
    assert "\nbatch_size = 32\n" in convert(source).text
    assert "\nbatch_size = per_rank_batch(32)\n" in convert(used).text


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("print(1", "syntax"),
        ("print(1)", "nothing"),
        ("import torch\nmodel = torch.nn.Linear(1, 1)\nmodel.eval()\n", "nothing"),
        ("import torch.distributed as dist\ndist.init_process_group('nccl')\n", "distributed"),
        ("from torch.nn.parallel import DistributedDataParallel as DDP\nloss.backward()\n", "distributed"),
        ("from accelerate import Accelerator\nloss.backward()\n", "distributed"),
        ("import lightning as L\n", "distributed"),
        ("import pytorch_lightning as pl\n", "distributed"),
        ("import deepspeed\n", "distributed"),
        ("import penstock.horovod.torch as hvd\nloss.backward()\n", "distributed"),
        ("from penstock import elastic\nloss.backward()\n", "distributed"),
        ("import penstock.jax as pj\n", "distributed"),
        ("import penstock.tensorflow as pt\n", "distributed"),
        ("from penstock.torch import GradientReducer\nloss.backward()\n", "distributed"),
        ("import penstock.torch\npenstock.torch.ddp_hook(model)\nloss.backward()\n", "distributed"),
        ("import horovod.tensorflow as hvd\n", "distributed"),
        ("import torch\ny = torch.ones(1, requires_grad=True)\nfor i in range(3):\n    (y * y).backward()\n", "model"),
    ],
)
def test_what_is_refused(source: str, reason: str) -> None:
    """No Python, nothing that trains, what is distributed already, and no model to wrap are four different answers."""
    with pytest.raises(Refused) as refused:
        convert(source)
    assert refused.value.reason == reason


def test_an_import_of_torch_distributed_alone_is_no_reason_to_refuse() -> None:
    """Many scripts import more than they use."""
    assert "join_ranks()" in convert("import torch.distributed as dist" + BASIC).text


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("import horovod.torch as hvd\nhvd.init()\n", "import penstock.horovod.torch as hvd\nhvd.init()\n"),
        ("from horovod import torch as hvd\n", "from penstock.horovod import torch as hvd\n"),
        ("from horovod.torch import DistributedOptimizer\n", "from penstock.horovod.torch import DistributedOptimizer\n"),
        ("import horovod.torch\nhorovod.torch.init()\n", "import penstock.horovod.torch\npenstock.horovod.torch.init()\n"),
        ("import horovod\nimport horovod.torch as hvd\nhorovod.run(main, np=2)\n",
         "import penstock.horovod as horovod\nimport penstock.horovod.torch as hvd\nhorovod.run(main, np=2)\n"),
        ("import os, horovod as h, horovod.torch as hvd\n", "import os, penstock.horovod as h, penstock.horovod.torch as hvd\n"),
        ("from horovod import run\nfrom horovod.torch import init\n",
         "from penstock.horovod import run\nfrom penstock.horovod.torch import init\n"),
        ("import horovod.torch as hvd\nfrom horovod.common.exceptions import HorovodInternalError\n",
         "import penstock.horovod.torch as hvd\nfrom penstock.horovod.common.exceptions import HorovodInternalError\n"),
    ],
)  # fmt: skip
def test_horovod_scripts_get_another_import(before: str, after: str) -> None:
    """The import is changed, and nothing else, even where the script trains."""
    rest = "loss.backward()  # as it was\n"
    converted = convert(before + rest)
    assert converted.text == after + rest and converted.findings == []


def test_horovod_for_other_frameworks_is_reported() -> None:
    """horovod.tensorflow has no counterpart: it stays and is listed."""
    converted = convert("import horovod.torch as hvd\nimport horovod.tensorflow as tf_hvd\n")
    assert "import horovod.tensorflow" in converted.text and len(converted.findings) == 1


def test_parts_of_horovod_that_are_not_here_are_reported() -> None:
    """Uses of the bare package, and imports from its packages, are listed at their lines; the rest is converted."""
    source = "import horovod\nimport horovod.torch as hvd\nfrom horovod.common import basics\nhorovod.spark.run(main)\n"
    converted = convert(source)
    lines = ["import penstock.horovod as horovod", "import penstock.horovod.torch as hvd", *source.splitlines()[2:]]
    assert converted.text.splitlines() == lines
    assert [each.line for each in converted.findings] == [3, 4] and "`horovod.spark`" in findings(converted)


@pytest.mark.parametrize(
    "name", ["horovod_train.py", "horovod_elastic.py", "elastic_live.py", "elastic_restart.py", "debugging.py"]
)
def test_our_own_examples_are_distributed_already(root: pathlib.Path, name: str) -> None:
    """Scripts that use Penstock's own ways to train on several ranks are not wrapped a second time."""
    with pytest.raises(Refused) as refused:
        convert((root / "examples" / name).read_text())
    assert refused.value.reason == "distributed"


@pytest.mark.parametrize(
    ("size", "ranks_there", "part", "now"), [(32, 4, 8, None), (10, 4, 2, 8), (2, 4, 1, 4), (1, 1, 1, None)]
)
def test_the_part_of_a_batch(
    size: int, ranks_there: int, part: int, now: int | None, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every rank has at least one sample; what a batch that does not divide has now, smaller or larger, is said."""
    names = {"per_rank_batch": "f", "RANK": "0", "WORLD_SIZE": str(ranks_there)}
    namespace: dict[str, Any] = {}
    exec(helpers.write("per_rank_batch", names), namespace)
    assert namespace["f"](size) == part
    said = f"{size} samples a batch do not divide by {ranks_there} ranks: it has {now} now\n" if now else ""
    assert capsys.readouterr().out == said


# --------------------------------------------------------------------------------------------------- the command lines


def test_convert_shows_a_diff_and_writes_nothing_by_itself(tmp_path: pathlib.Path) -> None:
    """Without -o only the difference is shown; with it the file is written, and not over another one."""
    script, output = tmp_path / "train.py", tmp_path / "train_dist.py"
    script.write_text(BASIC)
    shown = run_cli("convert", str(script))
    assert shown.exit_code == 0
    assert f"--- {script}" in shown.stdout and "+model = DistributedDataParallel(model)" in shown.stdout
    assert script.read_text() == BASIC and not output.exists()
    assert run_cli("convert", str(script), "-o", str(output)).exit_code == 0
    assert output.read_text() == convert(BASIC).text
    again = run_cli("convert", str(script), "-o", str(output))
    assert again.exit_code == 1 and "--force" in again.stderr
    assert run_cli("convert", str(script), "-o", str(output), "--force", "--quiet").exit_code == 0


def test_the_page_shows_what_happens(root: pathlib.Path) -> None:
    """The difference that docs/guide/convert.md shows for its script is the one that it gets."""
    page = (root / "docs" / "guide" / "convert.md").read_text()
    script, difference = (page.split(f"```{kind}\n")[1].split("```")[0] for kind in ("python", "diff"))
    lines = convert(script).text.splitlines()
    assert [line for line in difference.splitlines() if line[:1] == "+" and line[1:] not in lines] == []


@pytest.mark.parametrize(
    ("text", "code", "said"),
    [
        ("print(1", 1, "no Python"),
        ("print(1)", 3, "nothing here trains"),
        ("import deepspeed", 4, "distributed already"),
        ("y.backward()", 5, "no optimizer is made here"),
    ],
)
def test_exit_codes(tmp_path: pathlib.Path, text: str, code: int, said: str) -> None:
    """Each reason for converting nothing has its code and says where."""
    script = tmp_path / "train.py"
    script.write_text(text)
    done = run_cli("convert", str(script))
    assert done.exit_code == code and said in done.stderr and str(script) in done.stderr


def test_findings_name_file_and_line(tmp_path: pathlib.Path) -> None:
    """What was left alone stands on standard error as file:line: what: why; what to do."""
    script = tmp_path / "train.py"
    script.write_text(BASIC.replace("nn.functional.mse_loss(model(x), y)", "criterion(model(x), y)"))
    done = run_cli("convert", str(script))
    assert f"{script}:14: the loss `loss`: whether it is a mean" in done.stderr


def test_run_takes_its_command_line_apart() -> None:
    """Our options, torchrun's with their values, and the script's own are told apart by torchrun's own parser."""
    wanted = parse(["--nnodes", "2", "--nproc", "3", "--rdzv-endpoint=a:1", "--keep", "train.py", "--nproc", "9", "-h"])
    assert (wanted.nproc, wanted.keep, wanted.script) == (3, True, "train.py")
    assert wanted.torchrun == ["--nnodes", "2", "--rdzv-endpoint=a:1"]
    assert wanted.arguments == ["--nproc", "9", "-h"]
    assert torchrun_options(wanted, gpus=8) == [
        *("--rdzv-backend=c10d", "--nproc-per-node=3"),
        *("--nnodes", "2", "--rdzv-endpoint=a:1"),
    ]
    numbered = ["--nnodes=2", "--node_rank=1", "--rdzv-endpoint=a:1"]
    assert torchrun_options(parse([*numbered, "t.py"]), gpus=8) == ["--nproc-per-node=8", *numbered]


@pytest.mark.parametrize(("gpus", "ranks_expected"), [(0, 2), (1, 1), (8, 8)])
def test_run_starts_one_rank_for_each_gpu(gpus: int, ranks_expected: int) -> None:
    """Without a GPU there are two; torchrun's own option wins over both."""
    assert torchrun_options(parse(["t.py"]), gpus) == ["--standalone", f"--nproc-per-node={ranks_expected}"]
    assert torchrun_options(parse(["--nproc_per_node", "4", "t.py"]), gpus) == ["--standalone", "--nproc_per_node", "4"]


def test_lines_of_a_converted_script_are_those_of_the_original() -> None:
    """Kept lines map to themselves, changed ones to what they were, added ones to the line before them."""
    before, after = "a\nb\nc\nd\n", "a\nnew\nb\nC\nC2\nd\n"
    assert original_lines(before, after)[1:7] == [1, 1, 2, 3, 3, 4]
    text = convert(BASIC).text
    names = {code.co_name for code in compile_as(BASIC, text, "train.py").co_consts if isinstance(code, types.CodeType)}
    assert "join_ranks" in names


def test_run_trains_and_shows_where_it_fails(tmp_path: pathlib.Path) -> None:
    """`penstock run` on two ranks prints once, and an error names the original file, line and text."""
    script = tmp_path / "train.py"
    source = BASIC.replace("make()", "torch.utils.data.TensorDataset(torch.ones(64, 4), torch.zeros(64, 1))")
    script.write_text(
        source.replace("import torch\n", "import sys\nimport torch\n", 1) + "raise ValueError(sys.argv[1])\n"
    )
    done = forked.run(
        [sys.executable, "-m", "penstock", "run", "--nproc", "2", script, "on purpose"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert done.returncode == 1, done.stderr
    assert [line.split()[0] for line in done.stdout.splitlines()] == ["0", "1", "2"]
    assert f'File "{script}", line 19' in done.stderr and "ValueError: on purpose" in done.stderr
    assert (tmp_path / "model.pt").exists()


def test_run_on_two_hosts(root: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """The guide's command for several hosts, the same on each, makes one job: a rank of each trains, and the first one prints."""
    page = (root / "docs" / "guide" / "convert.md").read_text()
    (tmp_path / "train.py").write_text(page.split("```python\n")[1].split("```")[0])
    [command] = re.findall(r"^penstock (run --nnodes 2 .*)$", page, re.MULTILINE)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    small = command.replace("first:29500", f"127.0.0.1:{port}").replace("--nproc 8", "--nproc 1")
    assert small.count("1:") == 1 and small.count("--nproc 1") == 1
    start = [sys.executable, "-m", "penstock", *small.split()]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "cwd": tmp_path}
    with forked.Popen(start, **pipes) as first, forked.Popen(start, **pipes) as second:
        try:
            ended = [each.communicate(timeout=120) for each in (first, second)]
        finally:
            first.kill()
            second.kill()
    assert [first.returncode, second.returncode] == [0, 0], ended
    assert sorted(line.split()[0] for output, _ in ended for line in output.splitlines()) == ["0", "1", "2"]


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGHUP, signal.SIGTERM])
def test_run_leaves_no_rank_behind(tmp_path: pathlib.Path, number: int) -> None:
    """Whatever ends ``penstock run`` alone, torchrun and its ranks end, too."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT_THAT_WAITS)
    command = [sys.executable, "-m", "penstock", "run", "--nproc", "2", str(script)]
    ignored = signal.signal(
        signal.SIGHUP, signal.SIG_DFL
    )  # this test may run under nohup, which `penstock run` would inherit
    try:
        run = forked.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    finally:
        signal.signal(signal.SIGHUP, ignored)
    with run:
        assert run.stdout is not None
        told = (line for line in iter(run.stdout.readline, "") if line.startswith("rank"))
        handles = [os.pidfd_open(int(line.split()[1])) for line in itertools.islice(told, 2)]
        assert len(handles) == 2
        run.send_signal(number)
        run.wait(30)
        for handle in handles:
            assert select.select([handle], [], [], 30)[0], "a rank is left"
            os.close(handle)


SCRIPT_THAT_WAITS = """
import os, signal, torch

model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = torch.utils.data.TensorDataset(torch.ones(64, 4), torch.zeros(64, 1))
for x, y in torch.utils.data.DataLoader(data, batch_size=32):
    optimizer.zero_grad()
    torch.nn.functional.mse_loss(model(x), y).backward()
    optimizer.step()
os.write(1, b"rank %d\\n" % os.getpid())
signal.pause()
"""


def test_run_refuses_as_convert_does(tmp_path: pathlib.Path) -> None:
    """A script that does not train is not started; messages are those of `penstock run`, also where there is no script."""
    script = tmp_path / "train.py"
    script.write_text("print('started')")
    done = run_cli("run", str(script))
    assert done.exit_code == 3 and "started" not in done.output and done.stderr.startswith("penstock run: ")
    none = run_cli("run", str(tmp_path / "none.py"))
    assert none.exit_code == 1 and none.stderr == f"penstock run: there is no script {tmp_path / 'none.py'}\n"


def test_run_starts_what_is_distributed_as_it_is(root: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """A script on Penstock's Horovod interface is started on two ranks, and nothing is added to it."""
    script = root / "examples" / "horovod_train.py"
    done = forked.run(
        [sys.executable, "-m", "penstock", "run", "--nproc", "2", script, "--steps", "5"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert done.returncode == 0 and "after 5 steps on 2 ranks" in done.stdout, done.stdout + done.stderr
    assert f"{script}: the script is distributed already (penstock.horovod.torch)" in done.stderr


def run_cli(*arguments: str) -> click.testing.Result:
    return click.testing.CliRunner().invoke(main, list(arguments))


def new_lines(source: str) -> list[str]:
    """The lines that a conversion added or changed, without the head of imports and helpers."""
    text = convert(source).text
    head = text.index("# Added by `penstock convert`")
    after = (
        text.index("join_ranks()\n", head + text[head:].index("def join_ranks")) if "\njoin_ranks()\n" in text else 0
    )
    lines = (text[text.index("\njoin_ranks()\n") + 13 :] if after else _without_head(text)).splitlines()
    old = source.splitlines()
    return [line for line in lines if line and line not in old]


def _without_head(text: str) -> str:
    """The text from the first line of the script after its imports on."""
    return text[text.index("class Trainer") :]


def findings(converted: Converted) -> str:
    return "\n".join(f"{each.line}: {each.what}: {each.why}; {each.todo}" for each in converted.findings)


# ------------------------------------------------------------------------------------------- whole scripts, two ranks

TABLE = translator.load()
NEEDS = {True: (), False: (corpus.needed, pytest.mark.release)}  # whether a script is ours


@pytest.mark.slow
@pytest.mark.parametrize(
    "script",
    [pytest.param(row, id=row.path, marks=NEEDS[row.path.startswith("ours/")]) for row in TABLE if row.slice],
)
def test_scripts_end_as_the_table_says(script: translator.Script, tmp_path: pathlib.Path) -> None:
    """Loss, gradient norm, update and weights of two ranks are those of one process at every step; ``python tests/translator.py``
    does the same for all of the corpus."""
    assert translator.check(script, tmp_path) == ""


@corpus.needed
def test_the_table_is_whole() -> None:
    """Every file of the corpus is in the table, and most scripts that train end equal."""
    assert {row.path for row in TABLE if not row.path.startswith("ours/")} == translator.files()
    outcomes = collections.Counter(row.outcome for row in TABLE)
    assert len(TABLE) >= 60 and outcomes["equal"] >= 35, outcomes
    assert not [row.path for row in TABLE if row.outcome == "listed" and not (row.listed and row.without)]


@pytest.mark.slow
@pytest.mark.parametrize(
    "script", [pytest.param(row, id=row.path, marks=NEEDS[row.path.startswith("ours/")]) for row in TABLE if row.slice]
)
def test_no_false_alarms_in_public_scripts(script: translator.Script) -> None:
    """None of them lets ranks part, as their runs on two ranks show; so no finding says that one does. What comes out is valid,
    and is refused when it is converted again."""
    done = translator.converted(script.file)
    assert isinstance(done, Converted), done
    told = findings(done)
    alarms = ("others wait for it", "they wait for it", "may differ between ranks", "use that device")
    assert not [line for line in told.splitlines() if any(alarm in line for alarm in alarms)], told
    compile(done.text, script.path, "exec")
    with pytest.raises(Refused) as again:
        convert(done.text)
    assert again.value.reason == "distributed"


# A model that is trained through a method, and a scale that belongs to no model.
TRAINED_ASIDE = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 1)

    def guess(self, x):
        return self.inner(x)

torch.manual_seed(0)
x = torch.randn(64, 4)
loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=16)
model, scale = Net(), nn.Parameter(torch.ones(1))
optimizer = torch.optim.SGD([*model.parameters(), scale], lr=0.1)
for inputs, targets in loader:
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(scale * model.guess(inputs), targets)
    loss.backward()
    optimizer.step()
"""


def test_gradients_without_a_wrapper_are_those_of_one_process(tmp_path: pathlib.Path) -> None:
    """A method's loss and a parameter of no model: two ranks end with the weights that one process ends with."""
    (alone,) = ranks.run(_weights, count=1, args=(TRAINED_ASIDE,))
    together = ranks.run(_weights, count=2, args=(convert(TRAINED_ASIDE).text,))
    assert together[0] == together[1] == pytest.approx(alone, rel=1e-5)


def test_a_model_that_is_trained_by_hand_is_the_same_on_all_ranks(tmp_path: pathlib.Path) -> None:
    """The weights of `b`, which a class of the script trains, are on two ranks those of one process."""
    source = (
        TRAINED_BY_HAND["a class of the script"] + "\noptimizer.add_param_group({'params': list(b.parameters())})\n"
    )
    (alone,) = ranks.run(_weights, count=1, args=(source,))
    together = ranks.run(_weights, count=2, args=(convert(source).text,))
    assert together[0] == together[1] == pytest.approx(alone, rel=1e-5)


def test_a_gradient_that_is_not_averaged_ends_the_script() -> None:
    """Were a reduction missing, the script itself would say so after its first step, and name the parameter."""
    text = convert(TRAINED_ASIDE).text
    forgotten = text.replace("    loss.backward()\n    average_gradients()\n", "    loss.backward()\n")
    assert forgotten != text
    told = ranks.run(_refusal, count=2, args=(forgotten,))
    assert told[0] == told[1]
    assert (
        "parameter Net.inner.weight of shape (1, 4) is not trained alike on all ranks: after step 1 of SGD its grad"
        in told[0]
    )


def _weights(text: str) -> list[float]:
    import torch

    namespace: dict[str, Any] = {"__name__": "__main__"}
    torch.set_num_threads(1)
    exec(text, namespace)
    parameters = [each for group in namespace["optimizer"].param_groups for each in group["params"]]
    return [value for each in parameters for value in each.detach().flatten().tolist()]


def _refusal(text: str) -> str:
    with pytest.raises(RuntimeError) as raised:
        _weights(text)
    return str(raised.value)
