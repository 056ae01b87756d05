"""Source text in, changed text with edits and findings out. Nothing here reads files, clocks or the environment."""

from __future__ import annotations

from dataclasses import dataclass

import libcst as cst

from penstock.tools.convert.base import Edit, Finding, Options, Refused
from penstock.tools.convert.edits import Edits
from penstock.tools.convert.flow import Module, dotted
from penstock.tools.convert.neighbours import Neighbours, Reader
from penstock.tools.convert.rules import Conversion
from penstock.tools.convert.training import find_training


@dataclass(frozen=True)
class Converted:
    """A script that was converted: its new text, what was changed, what was left alone. Both lists are by line."""

    text: str
    edits: list[Edit]
    findings: list[Finding]


def convert(source: str, options: Options | None = None, read: Reader | None = None) -> Converted:
    """Convert the text of a script.

    Args:
        source: a whole module.
        options: see `Options`; the default keeps the global batch and the learning rate.
        read: gives the text of a module beside the script by its name, or None; what it imports from there is followed.
    Returns: the new text. The old text is a line-by-line part of it but for the lines that `edits` names.
    Raises:
        Refused: see there.
    Cost: seconds for a script of some hundred lines; it is parsed and resolved as a whole.
    """
    try:
        module = Module(source)
    except cst.ParserSyntaxError as error:
        raise Refused("syntax", error.raw_line, f"this is no Python that can be read: {error.message}") from error
    horovod = _horovod(module)
    if horovod is not None:
        return horovod
    already = _distributed_already(module)
    if already is not None:
        line, what = already
        raise Refused(
            "distributed", line, f"the script is distributed already ({what}): start it as it is, with torchrun"
        )
    neighbours = Neighbours(read)
    training = find_training(module, neighbours)
    if not training.backwards:
        hint = (
            "convert the file that has the training loop" if training.optimizers or training.steps else "no .backward()"
        )
        raise Refused("nothing", 0, f"nothing here trains a model: {hint}")
    conversion = Conversion(module, training, options or Options(), neighbours)
    tree = conversion.run()
    return Converted(tree.code, sorted(conversion.done), sorted(conversion.findings))


def _distributed_already(module: Module) -> tuple[int, str] | None:
    """The line that shows that a script starts or joins a group of ranks itself."""
    for node in module.nodes:
        if isinstance(node, cst.Import | cst.ImportFrom):
            for name in _imported_by(node):
                if any(_is_under(name, each) for each in FRAMEWORKS):
                    return module.line(node), name
        elif isinstance(node, cst.Call):
            name = module.call_name(node)
            if name in DISTRIBUTED or name.rsplit(".", 1)[-1] in ("init_process_group", "init_rpc"):
                return module.line(node), name
    return None


def _imported_by(node: cst.Import | cst.ImportFrom) -> list[str]:
    if isinstance(node, cst.Import):
        return [dotted(each.name) for each in node.names]
    base = dotted(node.module) if node.module is not None else ""
    if node.relative or isinstance(node.names, cst.ImportStar):
        return [] if node.relative else [base]
    return [base, *(f"{base}.{dotted(each.name)}" for each in node.names)]


def _horovod(module: Module) -> Converted | None:
    """A Horovod script needs one thing: to import our implementation of Horovod's interface."""
    imports = [node for node in module.nodes if isinstance(node, cst.Import | cst.ImportFrom)]
    if not any(_is_under(name, "horovod.torch") for node in imports for name in _imported_by(node)):
        return None
    edits, found, findings = Edits(), list[Edit](), list[Finding]()
    rename = False

    def take(node: cst.CSTNode, path: cst.CSTNode, name: str) -> None:
        root = next(each for each in module.descendants(path) if isinstance(each, cst.Name) and each.value == "horovod")
        edits.replace(root, "penstock.horovod")
        found.append(Edit(module.line(node), "horovod", f"the import is that of penstock.{name}"))

    def leave(node: cst.CSTNode) -> None:
        todo = "see the documentation of Horovod's interface for what there is"
        why = "only horovod.torch, horovod.run and parts of horovod.common have a counterpart here"
        findings.append(Finding(module.line(node), f"`{module.code(node)}`", why, todo))

    for node in imports:
        if isinstance(node, cst.Import):
            for alias in node.names:
                name = dotted(alias.name)
                if not _is_under(name, "horovod"):
                    continue
                if not _has_counterpart(name):
                    leave(node)
                    continue
                take(node, alias.name, name)
                if alias.asname is None and name == "horovod":
                    edits.change(alias, lambda each: each.with_changes(asname=cst.AsName(cst.Name("horovod"))))
                elif alias.asname is None:
                    rename = True
        elif not node.relative and node.module is not None and _is_under(dotted(node.module), "horovod"):
            base, *names = _imported_by(node)
            wanted = names if base in PACKAGES and names else [base]
            if all(_has_counterpart(name) for name in wanted):
                take(node, node.module, base)
            else:
                leave(node)
    for each in module.nodes:
        full = (module.qualified(each) or "") if isinstance(each, cst.Attribute) else ""
        if not isinstance(each, cst.Attribute) or full.count(".") != 1 or not full.startswith("horovod."):
            continue
        if module.within(each, *imports):
            continue
        if not _has_counterpart(full):
            leave(each)
        elif rename and dotted(each) == full:
            edits.replace(each.value, "penstock.horovod")
    return Converted(edits.apply(module.tree).code, sorted(found), sorted(set(findings)))


def _is_under(name: str, package: str) -> bool:
    return name == package or name.startswith(f"{package}.")


def _has_counterpart(name: str) -> bool:
    return name in COUNTERPARTS or _is_under(name, "horovod.torch")


# What of Horovod is here under the same name, besides all that is below horovod.torch.
COUNTERPARTS = frozenset(
    [
        "horovod", "horovod.run", "horovod.runner", "horovod.runner.run", "horovod.torch", "horovod.common",
        "horovod.common.elastic", "horovod.common.exceptions", "horovod.common.process_sets", "horovod.common.util",
    ]
)  # fmt: skip

# Of these only parts are here: what is imported from them decides.
PACKAGES = frozenset(["horovod", "horovod.common", "horovod.runner"])

# Libraries whose scripts are distributed by the library, and how a job of theirs is started is its affair.
FRAMEWORKS = (
    "accelerate", "lightning", "pytorch_lightning", "lightning_fabric", "deepspeed", "fairscale", "colossalai",
    "megatron", "torchtitan", "ray.train", "composer", "ignite.distributed", "transformers.Trainer",
    "torch.distributed.fsdp", "torch.distributed.rpc", "torch.distributed.tensor", "torch.distributed._tensor",
    "torch.distributed.device_mesh", "torch.nn.parallel.DistributedDataParallel",
    "torch.utils.data.distributed", "torch.utils.data.DistributedSampler", "horovod",
    "penstock.horovod", "penstock.jax", "penstock.tensorflow", "penstock.fronts.arrays", "penstock.elastic",
    "penstock.torch.GradientReducer", "penstock.torch.ddp_hook", "penstock.torch.in_turn",
)  # fmt: skip

# Calls that only a distributed script makes.
DISTRIBUTED = (
    "torch.nn.parallel.DistributedDataParallel", "torch.nn.parallel.distributed.DistributedDataParallel",
    "torch.utils.data.distributed.DistributedSampler", "torch.distributed.init_process_group",
    "torch.distributed.init_device_mesh", "torch.distributed.fsdp.fully_shard",
    "penstock.torch.GradientReducer", "penstock.torch.ddp_hook", "penstock.torch.in_turn",
)  # fmt: skip
