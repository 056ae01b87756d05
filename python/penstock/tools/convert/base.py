"""What all rules share: what they report, what they know about the script, and how they ask for changes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import libcst as cst

from penstock.tools.convert import helpers
from penstock.tools.convert.coverage import Flow
from penstock.tools.convert.edits import Change, Edits
from penstock.tools.convert.flow import Module, Place, constant, words
from penstock.tools.convert.neighbours import Definition, Neighbours
from penstock.tools.convert.training import Loop, Training, drawn_from, is_model, loops_around


@dataclass(frozen=True, order=True)
class Edit:
    """One change, in words: the line in the original, the rule, what it did."""

    line: int
    rule: str
    what: str


@dataclass(frozen=True, order=True)
class Finding:
    """Something that was left alone: `what` stands at `line`, `why` it was left, what `todo` about it."""

    line: int
    what: str
    why: str
    todo: str


@dataclass(frozen=True)
class Options:
    """How to convert.

    Args:
        batch: "global" divides the batch size by the number of ranks, so that a step sees as many samples as before;
            "per-rank" leaves it, so that a step sees that many on each rank.
        scale_lr: multiply learning rates by the number of ranks.
    """

    batch: Literal["global", "per-rank"] = "global"
    scale_lr: bool = False


class Refused(Exception):
    """A script is not converted, and nothing of it was changed.

    Attributes:
        reason: "syntax" (it is not Python), "nothing" (nothing in it trains), "distributed" (it is distributed
            already, and can be started as it is) or "model" (for a parameter that it trains neither a wrapper nor an
            average can be seen to be right).
        line: where that shows, 0 for the whole file.
    """

    def __init__(self, reason: Literal["syntax", "nothing", "distributed", "model"], line: int, message: str) -> None:
        super().__init__(message)
        self.reason = reason
        self.line = line


@dataclass
class Wrapping:
    """Which models get a wrapper, and where."""

    places: list[Place] = field(default_factory=list)
    """The places whose models are wrapped."""
    reached: set[Place] = field(default_factory=set)
    """These places, and those that get one of their models."""
    statements: dict[Place, cst.CSTNode] = field(default_factory=dict)
    """By place: the statement after which its model is wrapped."""
    averaged_optimizers: set[cst.Call] = field(default_factory=set)
    """The calls that make the optimizers whose gradients are averaged without a wrapper."""
    flows: dict[cst.Call, Flow] = field(default_factory=dict)
    """By call of `backward`: what its loss may be made of."""


@dataclass
class Figures:
    """Numbers of a rank's part of a batch."""

    averaged: set[cst.CSTNode] = field(default_factory=set)
    """Those that are the same on all ranks in the converted script."""
    own: set[cst.Call] = field(default_factory=set)
    """Those that stay a rank's own, and are reported."""


class Rules:
    """The base of rules: queries of the script, and findings. The rules are in the classes that derive from this one."""

    def __init__(self, module: Module, training: Training, options: Options, neighbours: Neighbours) -> None:
        self.module = module
        self.neighbours = neighbours
        self.training = training
        self.options = options
        self.edits = Edits()
        self.done: set[Edit] = set()
        self.findings: set[Finding] = set()
        self.used: set[str] = {"join_ranks", "compare_ranks"}
        self.imports: set[str] = set()
        taken = {node.value for node in module.nodes if isinstance(node, cst.Name)}
        self.names = {name: free_name(name, taken) for name in helpers.every_name()}
        self.wrapping = Wrapping()
        self.hoisted: list[cst.BaseExpression] = []
        self.sharded: list[cst.Call] = []
        self.shared: set[cst.Call] = set()  # the loaders whose batches are shared out among the ranks
        self.figures = Figures()
        self.rank_zero: list[cst.CSTNode] = []  # statements that only rank 0 runs: no rank waits for another in there

    def name(self, helper: str) -> str:
        """The name of `helper` in the script, which gets it."""
        if helper not in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
            self.used.add(helper)
        return self.names[helper]

    def tell(self, node: cst.CSTNode, rule: str, what: str) -> None:
        self.done.add(Edit(self.module.line(node), rule, what))

    def leave(self, node: cst.CSTNode, what: str, why: str, todo: str) -> None:
        self.findings.add(Finding(self.module.line(node), what, why, todo))

    def is_wrapped(self, node: cst.BaseExpression) -> bool:
        """Whether `node` may be a model in its wrapper."""
        if isinstance(node, cst.Call) and isinstance(node.func, cst.Attribute):
            return node.func.attr.value in WRAPPER_RETURNS and self.is_wrapped(node.func.value)
        place = self.module.place(node)
        return place is not None and place in self.wrapping.reached and not self._before_wrap(node, place)

    def _before_wrap(self, node: cst.CSTNode, place: Place) -> bool:
        """Whether `node` stands in a statement that runs before what is in `place` is wrapped."""
        statement = self.wrapping.statements.get(place)
        block = self.module.parent(statement) if statement is not None else None
        body = list(getattr(block, "body", []))
        for above in (node, *self.module.ancestors(node)):
            if above in body and not isinstance(above, cst.FunctionDef | cst.ClassDef):
                return statement is not None and body.index(above) <= body.index(statement)
        return False

    def shares(self, node: cst.CSTNode) -> bool:
        """Whether `node` runs in a loop over batches of which each rank has its part; in all others, ranks do the same."""
        return any(self.is_shared(chain) for chain in loops_around(self.module, node))

    def is_shared(self, chain: list[Loop]) -> bool:
        loops = [loop.node for loop in self.training.batch_loops if self.shared & set(loop.loaders)]
        return any(loop in loops or any(node in loops for node in drawn_from(self.module, loop)) for loop in chain)

    def elsewhere(self, func: cst.BaseExpression) -> tuple[str, Definition] | None:
        """The function or class that `func` names, where a file beside the script has it, and that file's module name."""
        return self.neighbours.named(self.module, func)

    def _in_batch_loop(self, node: cst.CSTNode) -> bool:
        return any(self.module.within(node, loop.node) for loop in self.training.batch_loops)

    def _downloads(self, call: cst.Call) -> bool:
        download = next((each for each in call.args if is_named(each, "download")), None)
        return download is not None and constant(download.value) is not False and self.module.callee(call) is None

    def _is_no_grad(self, node: cst.With) -> bool:
        names = [self.module.call_name(item.item) if isinstance(item.item, cst.Call) else "" for item in node.items]
        return any(name in ("torch.no_grad", "torch.inference_mode") for name in names)

    def _is_forward(self, call: cst.Call) -> bool:
        func = call.func
        return isinstance(func, cst.Name | cst.Attribute | cst.Subscript) and is_model(
            self.module, func, self.training.models
        )


def places_reached(module: Module, places: list[Place]) -> set[Place]:
    """All places that get, by copies and arguments, what is in `places`."""
    found = set(places)
    grown = True
    while grown:
        grown = False
        for place, definitions in list(module.definitions.items()):
            if place in found:
                continue
            for each in definitions:
                source = None if each.path else copied_place(module, each.value)
                if source in found:
                    found.add(place)
                    grown = True
    return found


def copied_place(module: Module, value: cst.BaseExpression) -> Place | None:
    if (
        isinstance(value, cst.Call)
        and isinstance(value.func, cst.Attribute)
        and value.func.attr.value in WRAPPER_RETURNS
    ):
        return copied_place(module, value.func.value)
    return module.place(value)


def free_name(name: str, taken: set[str]) -> str:
    while name in taken:
        name = f"penstock_{name}"
    return name


def as_keyword(argument: cst.Arg, name: str, value: cst.BaseExpression) -> cst.Arg:
    equal = argument.equal
    if argument.keyword is None:
        equal = cst.AssignEqual(cst.SimpleWhitespace(""), cst.SimpleWhitespace(""))
    return argument.with_changes(keyword=cst.Name(name), equal=equal, value=value)


def with_argument(arguments: list[cst.Arg], name: str, value: str) -> list[cst.Arg]:
    """`arguments` and one more, before any ``**options``."""
    equal = cst.AssignEqual(cst.SimpleWhitespace(""), cst.SimpleWhitespace(""))
    new = cst.Arg(cst.parse_expression(value), keyword=cst.Name(name), equal=equal)
    index = next((index for index, each in enumerate(arguments) if each.star == "**"), len(arguments))
    comma = cst.Comma(whitespace_after=cst.SimpleWhitespace(" "))
    if index < len(arguments):
        return [*arguments[:index], new.with_changes(comma=comma), *arguments[index:]]
    if arguments:
        last = arguments[-1]
        new = new.with_changes(whitespace_after_arg=last.whitespace_after_arg, comma=last.comma)
        separator = arguments[-2].comma if len(arguments) > 1 else comma
        if not isinstance(separator, cst.Comma):
            separator = comma
        last = last.with_changes(whitespace_after_arg=cst.SimpleWhitespace(""), comma=separator)
        arguments = [*arguments[:-1], last]
    return [*arguments, new]


def constantly(value: Any) -> Change:
    """A change that puts `value` in place of whatever there is."""
    return lambda _: value


def adding(name: str, value: str) -> Change:
    """A change that gives a call one argument more."""
    return lambda call: call.with_changes(args=with_argument(list(call.args), name, value))


def is_named(argument: cst.Arg, name: str) -> bool:
    return argument.keyword is not None and argument.keyword.value == name


def is_none(node: cst.BaseExpression) -> bool:
    return isinstance(node, cst.Name) and node.value == "None"


def is_boolean(node: cst.BaseExpression) -> bool:
    return isinstance(node, cst.Name) and node.value in ("True", "False")


def all_below(node: cst.CSTNode) -> list[cst.CSTNode]:
    return [each for child in node.children for each in (child, *all_below(child))]


def constant_text(node: cst.Subscript) -> object:
    index = node.slice[0].slice
    return constant(index.value) if isinstance(index, cst.Index) else None


# Methods of a wrapped model that return the wrapper.
WRAPPER_RETURNS = words("to cuda cpu xpu double float half bfloat16 train eval requires_grad_ apply")


# Beginnings of the names of functions that draw random numbers.
RANDOM = (
    "torch.rand", "torch.normal", "torch.bernoulli", "torch.multinomial", "numpy.random.", "random.",
)  # fmt: skip


# Libraries whose functions want a module as it is, not its wrapper.
LIBRARIES = words("torch copy torchsummary torchinfo thop ptflops torchviz pickle safetensors timm wandb joblib")


# Functions that write a file or send something away, and return nothing that a script goes on with.
WRITERS = frozenset(
    [
        "torch.save", "torch.onnx.export", "torch.jit.save", "torchvision.utils.save_image", "torchaudio.save",
        "matplotlib.pyplot.savefig", "matplotlib.pyplot.show", "numpy.save", "numpy.savez", "numpy.savetxt",
        "numpy.savez_compressed", "json.dump", "pickle.dump", "yaml.dump", "joblib.dump", "safetensors.torch.save_file",
        "safetensors.torch.save_model", "shutil.copy", "shutil.copyfile", "shutil.copy2", "shutil.move", "shutil.rmtree",
        "os.remove", "os.unlink", "os.rename", "os.replace", "imageio.imwrite", "imageio.imsave", "imageio.mimsave",
        "cv2.imwrite", "wandb.log", "wandb.save", "wandb.finish", "wandb.watch",
    ]
)  # fmt: skip
