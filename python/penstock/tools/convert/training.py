"""What trains in a module: backward passes, the loops around them, loaders, models, optimizers.

All of it is read from the tree by what is *done*, not by names: a training loop is one that a ``.backward()`` happens
in, a training loader is what such a loop runs over, a model is what has its parameters handed to an optimizer.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass, field
from typing import TypeAlias

import libcst as cst

from penstock.tools.convert.flow import Function, Module, Origin, Place
from penstock.tools.convert.gradients import Read, Reads, parameters_of, subclasses_optimizer
from penstock.tools.convert.neighbours import Neighbours

Loop: TypeAlias = "cst.For | cst.While"


@dataclass
class BatchLoop:
    """A loop that runs over batches of a DataLoader and trains on each."""

    node: cst.CSTNode  # the loop, or the statement with the `iter(...)` that a loop draws from by `next`
    iterable: cst.BaseExpression
    loaders: list[cst.Call]
    outer: list[Loop]  # the loops around it, innermost first; those of callers included


@dataclass
class Training:
    """Everything that the rules want to know about the training in a module."""

    backwards: list[cst.Call] = field(default_factory=list)
    steps: list[cst.Call] = field(default_factory=list)
    optimizers: list[cst.Call] = field(default_factory=list)
    chains: list[list[Loop]] = field(default_factory=list)  # a backward's loops, innermost first
    batch_loops: list[BatchLoop] = field(default_factory=list)
    bare_loops: list[Loop] = field(default_factory=list)  # training loops that run over no DataLoader
    loaders: list[cst.Call] = field(default_factory=list)  # those that feed training
    other_loaders: list[cst.Call] = field(default_factory=list)
    models: list[Origin] = field(default_factory=list)  # what makes what is trained
    inner_loops: list[Loop] = field(default_factory=list)  # those that take a batch in each turn
    reads: list[Read] = field(default_factory=list)  # where the script reads gradients, as updates by hand do
    functions: set[Function] = field(default_factory=set)  # those a backward is in, or that call one that has it


def find_training(module: Module, neighbours: Neighbours) -> Training:
    """Everything that trains in `module`; `backwards` is empty where nothing does."""
    found = Training()
    found.backwards = [call for call in module.calls if is_backward(module, call)]
    driven = _is_driven(module)
    found.optimizers = [call for call in module.calls if is_optimizer(module, call, neighbours, driven)]
    found.steps = [call for call in module.calls if is_step(module, call, found.optimizers)]
    found.functions = _functions_that_train(module, found.backwards)
    for call in found.backwards:
        for chain in loops_around(module, call):
            if chain not in found.chains:
                found.chains.append(chain)
    for chain in found.chains:
        _find_batches(module, chain, found)
    outer = [loop for chain in found.chains for loop in chain]
    inner = [*found.inner_loops, *found.bare_loops]
    found.reads = Reads(
        module, neighbours, found.optimizers, lambda node: loops_around(module, node), inner, outer
    ).all()
    every = [call for call in module.calls if is_loader(module, call)]
    fed = {loader for loop in found.batch_loops for loader in loop.loaders}
    found.loaders = [call for call in every if call in fed]
    found.other_loaders = [call for call in every if call not in fed]
    found.models = _find_models(module, found)
    return found


def is_backward(module: Module, call: cst.Call) -> bool:
    if module.call_name(call) == "torch.autograd.backward":
        return True
    return isinstance(call.func, cst.Attribute) and call.func.attr.value == "backward" and not module.call_name(call)


def is_loader(module: Module, call: cst.Call) -> bool:
    return module.call_name(call) in LOADERS


def is_optimizer(module: Module, call: cst.Call, neighbours: Neighbours, driven: set[Origin]) -> bool:
    """Whether `call` makes an optimizer: a class of ``torch.optim``, one that builds on such, one that is called like those of
    libraries, or what gets parameters, is among `driven`, and has no text here that would show what it does."""
    name = module.call_name(call)
    made = module.callee(call)
    if isinstance(made, cst.ClassDef):
        return subclasses_optimizer(module, made)
    beside = neighbours.named(module, call.func)
    if beside is not None and isinstance(beside[1], ast.ClassDef) and neighbours.is_optimizer(beside[0], beside[1]):
        return True
    other = beside is None and not name.startswith("torch.") and "ema" not in name.lower()
    given = (node for argument in call.args for node in module.descendants(argument))
    if call in driven and other and any(parameters_of(node) is not None for node in given):
        return True
    if name.startswith("torch.optim.") and not name.startswith(("torch.optim.lr_scheduler.", "torch.optim.swa_utils.")):
        return name.rsplit(".", 1)[1][:1].isupper()
    return name.rsplit(".", 1)[-1] in OTHER_OPTIMIZERS


def _is_driven(module: Module) -> set[Origin]:
    """What makes the objects whose ``step()`` is called without arguments."""
    steps = [
        call.func
        for call in module.calls
        if isinstance(call.func, cst.Attribute) and call.func.attr.value == "step" and not call.args
    ]
    # What is called an optimizer is one for `is_step`, wherever it is made.
    unnamed = [func.value for func in steps if "optim" not in module.code(func.value).lower()]
    return {origin for value in unnamed for origin in module.origins(value)}


def is_step(module: Module, call: cst.Call, optimizers: list[cst.Call]) -> bool:
    """Whether `call` is ``optimizer.step()`` or ``scaler.step(optimizer)``, not that of a schedule."""
    if not (isinstance(call.func, cst.Attribute) and call.func.attr.value == "step") or module.call_name(call):
        return False
    origins = module.origins(call.func.value)
    names = [module.call_name(origin) for origin in origins]
    if any("lr_scheduler" in name or "Profiler" in name or "profile" in name for name in names):
        return False
    if any(origin in optimizers for origin in origins) or any(name.endswith("GradScaler") for name in names):
        return True
    return "optim" in module.code(call.func.value).lower()


def loops_around(module: Module, node: cst.CSTNode, seen: tuple[Function, ...] = ()) -> list[list[Loop]]:
    """The loops that `node` runs in, innermost first, once for every way in which its function is called."""
    loops: list[Loop] = []
    below = node
    for above in module.ancestors(node):
        if isinstance(above, cst.For | cst.While) and below is above.body:
            loops.append(above)
        if isinstance(above, cst.FunctionDef) and below is above.body:
            if above in seen or not module.call_sites.get(above):
                return [loops]
            ways: list[list[Loop]] = []
            for site in module.call_sites[above]:
                for outer in loops_around(module, site, (*seen, above)):
                    if [*loops, *outer] not in ways:
                        ways.append([*loops, *outer])
            return ways
        below = above
    return [loops]


def strip_iterable(module: Module, node: cst.BaseExpression) -> list[cst.BaseExpression]:
    """What a loop really runs over: ``enumerate(tqdm(loader))`` is ``loader``, ``zip(a, b)`` is both."""
    if isinstance(node, cst.Call) and node.args:
        name = module.call_name(node)
        if name == "builtins.zip":
            return [each for argument in node.args for each in strip_iterable(module, argument.value)]
        if name in TRANSPARENT_ITERABLES or is_progress_bar(name):
            first = next((each for each in node.args if each.keyword is None), None)
            first = first or next(
                (each for each in node.args if each.keyword and each.keyword.value == "iterable"), None
            )
            return strip_iterable(module, first.value) if first is not None else [node]
    elif isinstance(node, cst.Name):
        # `bar = tqdm(loader)` and then `for batch in bar`.
        place = module.place(node)
        definitions = module.definitions.get(place, []) if place is not None else []
        if len(definitions) == 1 and isinstance(definitions[0].value, cst.Call) and not definitions[0].path:
            inner = definitions[0].value
            if is_progress_bar(module.call_name(inner)) or module.call_name(inner) == "builtins.enumerate":
                return strip_iterable(module, inner)
    return [node]


def is_progress_bar(name: str) -> bool:
    return name.startswith("tqdm") and name.rsplit(".", 1)[-1] in ("tqdm", "trange", "tqdm_notebook")


def _functions_that_train(module: Module, backwards: list[cst.Call]) -> set[Function]:
    found: set[Function] = set()
    todo: list[cst.CSTNode] = list(backwards)
    while todo:
        function = module.function_of(todo.pop())
        if function is not None and function not in found:
            found.add(function)
            todo += module.call_sites.get(function, [])
            todo.append(function)  # the function that a closure is written in
    return found


def _find_batches(module: Module, chain: list[Loop], found: Training) -> None:
    for index, loop in enumerate(chain):
        drawn = _drawn_iterables(module, loop)
        sources = [(loop, each) for each in strip_iterable(module, loop.iter)] if isinstance(loop, cst.For) else []
        loops = []
        for node, iterable in [*sources, *drawn]:
            origins = module.origins(iterable)
            loaders = [each for each in origins if isinstance(each, cst.Call) and is_loader(module, each)]
            if loaders:
                outer = chain[index + 1 :] if node is loop else chain[index:]
                loops.append(BatchLoop(node, iterable, loaders, outer))
        if loops:
            known = [(each.node, each.iterable) for each in found.batch_loops]
            found.batch_loops += [each for each in loops if (each.node, each.iterable) not in known]
            found.inner_loops.append(loop)
            return
    if chain and chain[0] not in found.bare_loops:
        found.bare_loops.append(chain[0])


def drawn_from(module: Module, loop: Loop) -> list[cst.CSTNode]:
    """The statements that start the iterators which the body of `loop` draws from by ``next``."""
    return [node for node, _ in _drawn_iterables(module, loop)]


def _drawn_iterables(module: Module, loop: Loop) -> list[tuple[cst.CSTNode, cst.BaseExpression]]:
    """The statements with ``iter(loader)`` whose result the body of `loop` draws from by ``next``."""
    found: list[tuple[cst.CSTNode, cst.BaseExpression]] = []
    for call in module.descendants(loop.body, into_functions=False):
        if isinstance(call, cst.Call) and module.call_name(call) == "builtins.next" and call.args:
            drawn = call.args[0].value
            place = module.place(drawn)
            for each in module.definitions.get(place, []) if place is not None else []:
                if isinstance(each.value, cst.Call) and module.call_name(each.value) == "builtins.iter":
                    found += [(module.statement_of(each.node), e) for e in strip_iterable(module, each.value)]
                elif isinstance(each.value, cst.Call) and isinstance(module.callee(each.value), cst.FunctionDef):
                    # A generator of this module: the loop that yields stands in it.
                    generator = module.callee(each.value)
                    for node in module.nodes:
                        if isinstance(node, cst.For) and module.function_of(node) is generator:
                            found += [(node, e) for e in strip_iterable(module, node.iter)]
    return found


def _find_models(module: Module, found: Training) -> list[Origin]:
    """What makes the modules whose parameters an optimizer gets, or a loop updates by hand."""
    made: dict[Origin, None] = {}

    def add(owner: cst.BaseExpression) -> None:
        for origin in module.origins(owner):
            made[origin] = None

    every = [
        call
        for call in module.calls
        if isinstance(call.func, cst.Attribute) and call.func.attr.value in ("parameters", "named_parameters")
    ]
    for call in every:
        assert isinstance(call.func, cst.Attribute)
        if _reaches_optimizer(module, call, found):
            add(call.func.value)
    for read in found.reads:
        made.update(dict.fromkeys(read.models))
    for step in found.steps:
        assert isinstance(step.func, cst.Attribute)
        for origin in module.origins(step.func.value):
            # `optimizer = model.configure_optimizers(...)`: the model makes its optimizer.
            if isinstance(origin, cst.Call) and isinstance(origin.func, cst.Attribute) and not module.call_name(origin):
                add(origin.func.value)
    if not made:
        for call in every:
            assert isinstance(call.func, cst.Attribute)
            add(call.func.value)
    return sorted(made, key=module.line)


def _reaches_optimizer(module: Module, call: cst.Call, found: Training) -> bool:
    if module.within(call, *found.optimizers):
        return True
    # `params = [p for p in model.parameters() if p.requires_grad]`, then `Adam(params)`; also through a function.
    handed = [node for each in found.optimizers for node in module.descendants(each)]
    for node in handed:
        place = module.place(node) if isinstance(node, cst.Name | cst.Attribute) else None
        for definition in module.definitions.get(place, []) if place is not None else []:
            if module.within(call, definition.value):
                return True
        if (isinstance(node, cst.Call) and isinstance(module.callee(node), cst.FunctionDef)) and (
            module.function_of(call) is module.callee(node)
        ):
            return True
    return False


def is_model(module: Module, node: cst.BaseExpression, models: list[Origin]) -> bool:
    return any(origin in models for origin in module.origins(node))


def trains(module: Module, call: cst.CSTNode, found: Training) -> bool:
    """Whether `call` is in code that a training loop runs: a loop with a backward in it, or a function that has one."""
    function = module.function_of(call)
    if function is not None and function in found.functions:
        return True
    return any(module.within(call, loop) for chain in found.chains for loop in chain)


def first_places(module: Module, place: Place, seen: set[Place] | None = None) -> list[Place]:
    """The places where what is in `place` is made: copies and arguments are followed back.

    A model may go through arguments and attributes on its way to the loop. The first place that gets its value from a call
    is where it is made, or moved to its device, for the last time.
    """
    seen = set() if seen is None else seen
    if place in seen:
        return []
    seen.add(place)
    sources: list[Place] = []
    for definition in module.definitions.get(place, []):
        value = definition.value
        # A tuple on the right was taken apart when it was bound; what a function returns is made there.
        inner = module.place(value) if not definition.path else None
        if inner is None or inner == place:
            if inner != place:
                return [place]
            continue
        sources += first_places(module, inner, seen)
    return sources or [place]


LOADERS = frozenset(["torch.utils.data.DataLoader", "torch.utils.data.dataloader.DataLoader"])

TRANSPARENT_ITERABLES = frozenset(
    [
        "builtins.enumerate",
        "builtins.iter",
        "itertools.islice",
        "rich.progress.track",
        "itertools.cycle",
        "builtins.reversed",
    ]
)

# Optimizers of other libraries, by class name: those that scripts import most. A guess at what is in use.
OTHER_OPTIMIZERS = frozenset(
    ["AdamW8bit", "Adam8bit", "Lion", "Lamb", "LAMB", "Adafactor", "Ranger", "RAdam", "AdaBelief", "Lookahead", "SAM"]
)
