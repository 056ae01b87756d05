"""Source text in, changed text with edits and findings out. Nothing here reads files, clocks or the environment."""

from __future__ import annotations

from dataclasses import dataclass

import libcst as cst

from penstock.convert.base import Edit, Finding, Options, Refused
from penstock.convert.edits import Edits
from penstock.convert.flow import Module, dotted
from penstock.convert.rules import Conversion
from penstock.convert.training import find_training


@dataclass(frozen=True)
class Converted:
    """A script that was converted: its new text, what was changed, what was left alone. Both lists are by line."""

    text: str
    edits: list[Edit]
    findings: list[Finding]


def convert(source: str, options: Options | None = None) -> Converted:
    """Convert the text of a script.

    Args:
        source: a whole module.
        options: see `Options`; the default keeps the global batch and the learning rate.
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
    training = find_training(module)
    if not training.backwards:
        hint = (
            "convert the file that has the training loop" if training.optimizers or training.steps else "no .backward()"
        )
        raise Refused("nothing", 0, f"nothing here trains a model: {hint}")
    conversion = Conversion(module, training, options or Options())
    tree = conversion.run()
    return Converted(tree.code, sorted(conversion.done), sorted(conversion.findings))


def _distributed_already(module: Module) -> tuple[int, str] | None:
    """The line that shows that a script starts or joins a group of ranks itself."""
    for node in module.nodes:
        if isinstance(node, cst.Import | cst.ImportFrom):
            for name in _imported_by(node):
                if any(name == each or name.startswith(f"{each}.") for each in FRAMEWORKS):
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
    edits, found, findings = Edits(), list[Edit](), list[Finding]()
    renamed = False
    for node in module.nodes:
        if isinstance(node, cst.ImportFrom) and not node.relative and node.module is not None:
            base = dotted(node.module)
            names = [] if isinstance(node.names, cst.ImportStar) else [dotted(each.name) for each in node.names]
            ours = (
                base == "horovod.torch"
                or base.startswith("horovod.torch.")
                or (base == "horovod" and names == ["torch"])
            )
        elif isinstance(node, cst.Import):
            base = next((dotted(each.name) for each in node.names if dotted(each.name).startswith("horovod")), "")
            ours = base == "horovod.torch" or base.startswith("horovod.torch.")
            renamed = renamed or (
                ours and any(dotted(each.name) == base and each.asname is None for each in node.names)
            )
        else:
            continue
        if base.split(".")[0] != "horovod":
            continue
        if not ours:
            what = f"`{module.code(node)}`"
            todo = "see the documentation of Horovod's interface for what there is"
            findings.append(Finding(module.line(node), what, "only horovod.torch has a counterpart here", todo))
            continue
        for each in module.descendants(node):
            if isinstance(each, cst.Name) and each.value == "horovod":
                edits.replace(each, "penstock.horovod")
        found.append(Edit(module.line(node), "horovod", "the import is that of penstock.horovod.torch"))
    if not found:
        return None
    if renamed:
        for node in module.nodes:
            if isinstance(node, cst.Name) and node.value == "horovod" and node not in edits.changes:
                above = module.parent(node)
                if isinstance(above, cst.Attribute) and above.value is node:
                    edits.replace(node, "penstock.horovod")
    return Converted(edits.apply(module.tree).code, found, findings)


# Libraries whose scripts are distributed by the library, and how a job of theirs is started is its affair.
FRAMEWORKS = (
    "accelerate", "lightning", "pytorch_lightning", "lightning_fabric", "deepspeed", "fairscale", "colossalai",
    "megatron", "torchtitan", "ray.train", "composer", "ignite.distributed", "transformers.Trainer",
    "torch.distributed.fsdp", "torch.distributed.rpc", "torch.distributed.tensor", "torch.distributed._tensor",
    "torch.distributed.device_mesh", "torch.nn.parallel.DistributedDataParallel",
    "torch.utils.data.distributed", "torch.utils.data.DistributedSampler",
)  # fmt: skip

# Calls of torch that only a distributed script makes.
DISTRIBUTED = (
    "torch.nn.parallel.DistributedDataParallel", "torch.nn.parallel.distributed.DistributedDataParallel",
    "torch.utils.data.distributed.DistributedSampler", "torch.distributed.init_process_group",
    "torch.distributed.init_device_mesh", "torch.distributed.fsdp.fully_shard",
)  # fmt: skip
