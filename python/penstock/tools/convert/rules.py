"""The rules: what a conversion changes in a script, and what it leaves alone and reports.

Each rule reads the module and what was found about its training, and asks `Edits` for changes. None writes text by
hand, so formatting and comments stay. Where a rule cannot tell that a change is right, it reports a `Finding`. The
rules of each kind are a class that builds on the one before, in the order in which they lean on each other: `base`,
`loaders`, `models`, `metrics`, `steps`, `output`.
"""

from __future__ import annotations

import re

import libcst as cst

from penstock.tools.convert import helpers
from penstock.tools.convert.base import LIBRARIES, WRITERS, is_named, is_none
from penstock.tools.convert.flow import dotted
from penstock.tools.convert.output import OutputRules
from penstock.tools.convert.training import trains


class Conversion(OutputRules):
    """All rules on one module that trains on a single device."""

    def run(self) -> cst.Module:
        self.cover()
        self.find_writers()
        self.shard_loaders()
        self.advance_epochs()
        self.wrap_models()
        self.unwrap_attributes()
        self.average_metrics()
        self.report_own_figures()
        self.agree_on_ends()
        self.report_caught()
        self.report_conditional()
        self.scale_sums()
        self.accumulate()
        self.quieten()
        self.choose_devices()
        self.guard_files()
        self.scale_learning_rates()
        self.report_rest()
        self.write_head()
        return self.edits.apply(self.module.tree)

    # --------------------------------------------------------------------------------------------------- what is left

    def report_rest(self) -> None:
        for loop in self.training.bare_loops:
            why = (
                "its samples are not shared out, and where they come from cannot be seen here. All ranks keep the same random "
                "numbers: a rank that draws its samples from those, or reads them in order, sees what one device sees, which is "
                "right and no faster; from another source each rank gets samples of its own, and the global batch grows"
            )
            todo = (
                "compare a batch of two ranks; to gain, let each rank take its part, batch[RANK::WORLD_SIZE] for a loss that "
                "is a mean over the batch"
            )
            self.leave(loop, "a training loop without a DataLoader that is made here", why, todo)
        self._report_batch_statistics()
        for call in self.module.calls:
            name = self.module.call_name(call)
            if (
                self.shared
                and WEIGHTED.fullmatch(name)
                and any(
                    is_named(each, "ignore_index") or (is_named(each, "weight") and not is_none(each.value))
                    for each in call.args
                )
            ):
                why = (
                    "its mean is over the targets that count, or their weights, of one rank's part of a batch; where these "
                    "differ between ranks, the mean over ranks is not that of the whole batch"
                )
                todo = "nothing where each part has about as many; else sum, and divide by the count of all ranks"
                self.leave(call, f"`{self.module.code(call.func)}` with weights or an ignored class", why, todo)
            if name.endswith(".LBFGS") and self.training.batch_loops:
                why = "it searches along a line by a rank's own loss, and ranks may take different ways"
                self.leave(
                    call, "LBFGS", why, "return mean_over_ranks(loss) from the closure, or use another optimizer"
                )
            elif name in OTHER_GRADIENTS and trains(self.module, call, self.training):
                why = "DistributedDataParallel does not see what it returns: gradients of this rank's samples alone"
                todo = (
                    "nothing for gradients of inputs, as in a penalty; those of parameters, average over ranks by hand"
                )
                self.leave(call, f"`{name}` in code that trains", why, todo)
            elif self._may_show(call):
                why = "it stands in another file, and every rank calls it"
                self.leave(call, f"`{name}`", why, "put it under `if RANK == 0:` if it prints, draws or writes")
            elif name in ("builtins.input",):
                self.leave(call, "input()", "only rank 0 may have a terminal", "take it from the command line")
            elif name.startswith("torch.multiprocessing.") and name.rsplit(".", 1)[-1] in ("spawn", "Process"):
                self.leave(call, f"`{name}`", "the script starts processes itself", "let torchrun start them all")

    def _report_batch_statistics(self) -> None:
        """Batch normalisation looks at the samples of one rank, in the script or in files beside it."""
        if not self.shared:
            return
        told: set[object] = set()
        for call in self.module.calls:
            name, found = self.module.call_name(call), self.elsewhere(call.func)
            home = found[0] if found is not None else ""
            if home and home not in told and self.neighbours.mentions(home, "BatchNorm"):
                told.add(home)
                where = f"batch normalisation in {home}.py"
            elif name.startswith("torch.nn.") and "BatchNorm" in name and self.module.class_of(call) not in told:
                told.add(self.module.class_of(call))
                where = "batch normalisation"
            elif name.startswith("torchvision.models.") and name not in told:
                told.add(name)
                where = f"batch normalisation, if `{name}` has it"
            else:
                continue
            why = "its mean and variance are those of the samples of one rank, fewer than one device sees in a batch"
            todo = "nothing where a rank's batch is large; else --batch per-rank, or torch.nn.SyncBatchNorm on GPUs"
            self.leave(call, where, why, todo)

    def _may_show(self, call: cst.Call) -> bool:
        """Whether `call` is a statement of its own that by its name shows something, and comes from a user's file."""
        name = self.module.call_name(call)
        if (
            not name
            or name in (*WRITERS, "sys.stdout.write")
            or name.split(".")[0] in (*LIBRARIES, "builtins", "matplotlib", "logging", "tqdm")
        ):
            return False
        shows = re.search(r"print|progress|plot|save|display|show|write", name.rsplit(".", 1)[-1].lower())
        return shows is not None and isinstance(self.module.parent(call), cst.Expr)

    # --------------------------------------------------------------------------------------------------- head and end

    def write_head(self) -> None:
        """Imports and helpers after the script's own imports, the start where training code begins, the end after it."""
        outermost = {id(chain[-1]): chain[-1] for chain in self.training.chains if self.is_shared(chain)}
        for loop in outermost.values():
            self.edits.before[loop].append(f"{self.name('seed_apart')}()\n")
        guard = self._main_guard()
        start = f"{self.names['join_ranks']}()\n"
        end = "torch.distributed.destroy_process_group()\n"
        used = helpers.close(self.used)
        names = dict(self.names)
        divided = f', "batch_size": {names["per_rank_batch"]}(options.get("batch_size", 1))'
        names["sharded_batch"] = divided if self.options.batch == "global" else ""
        if self.options.batch == "per-rank" and "per_rank_batch" in used:
            used.remove("per_rank_batch")
        imports = {"import os", "import torch", "import torch.distributed", *self.imports}
        logs = any(name.split(".")[0] == "logging" for name in self.module.imported())
        imports |= {"import logging"} if logs else set()
        imports |= {line for name in used for line in helpers.IMPORTS.get(name, [])}
        imports = {line for line in imports if not self._has_import(line)}
        head = "".join(f"{line}\n" for line in sorted(imports, key=lambda line: (line.startswith("from"), line)))
        head += helpers.write("constants", names) + "".join(helpers.write(name, names) for name in used)
        if logs:
            head += f"\n\nif {self.names['RANK']} != 0:\n    logging.disable(logging.WARNING)  # errors are told by every rank\n"
        if guard is not None:
            self.edits.starts[guard.body].append(start)
            self.edits.ends[guard.body].append(end)
        else:
            head += f"\n\n{start}"
            if any(self.module.function_of(each) is None for each in self.training.backwards) or self._runs_at_top():
                self.edits.ends[self.module.tree].append(f"\n{end}")
        last = self._last_import()
        if last is None:
            self.edits.starts[self.module.tree].append(head)
        else:
            self.edits.after[last].append(head)

    def _has_import(self, line: str) -> bool:
        """Whether the script has `line` before the place where the head is put."""
        last = self._last_import()
        body: list[cst.CSTNode] = list(self.module.tree.body)
        for node in body[: body.index(last) + 1] if last is not None else []:
            if isinstance(node, cst.SimpleStatementLine):
                for small in node.body:
                    if (isinstance(small, cst.Import) and line.startswith("import ")) and (
                        any(dotted(each.name) == line[7:] and each.asname is None for each in small.names)
                    ):
                        return True
        return False

    def _last_import(self) -> cst.CSTNode | None:
        last: cst.CSTNode | None = None
        for index, node in enumerate(self.module.tree.body):
            if isinstance(node, cst.SimpleStatementLine) and any(
                isinstance(small, cst.Import | cst.ImportFrom) for small in node.body
            ):
                last = node
            elif index == 0 and isinstance(node, cst.SimpleStatementLine) and isinstance(node.body[0], cst.Expr):
                last = node  # the docstring
            elif isinstance(node, cst.FunctionDef | cst.ClassDef | cst.For | cst.While | cst.With | cst.If):
                break
        return last

    def _main_guard(self) -> cst.If | None:
        """The ``if __name__ == "__main__":`` of a script whose other top-level statements do no work of a rank."""
        guard = None
        for node in self.module.tree.body:
            if isinstance(node, cst.If) and "__name__" in self.module.code(node.test):
                guard = node
            elif not isinstance(node, cst.FunctionDef | cst.ClassDef):
                touched = any(
                    each in self.edits.before or each in self.edits.after or each in self.edits.guards
                    for each in self.module.descendants(node, into_functions=False)
                )
                calls = [
                    each
                    for each in self.module.descendants(node, into_functions=False)
                    if isinstance(each, cst.Call)
                    and (
                        self.module.callee(each) is not None
                        or each in self.sharded
                        or each in self.wrapping.averaged_optimizers
                    )
                ]
                if touched or calls:
                    return None
        return guard

    def _runs_at_top(self) -> bool:
        """Whether the module's own statements call a function that trains."""
        return any(
            self.module.function_of(site) is None and self.module.class_of(site) is None
            for function in self.training.functions
            for site in self.module.call_sites.get(function, [])
        )


# What gives gradients without a backward pass into parameters.
OTHER_GRADIENTS = frozenset(["torch.autograd.grad", "torch.func.grad", "torch.func.grad_and_value"])

# Losses that divide by the weights of their targets.
WEIGHTED = re.compile(r"torch\.nn\.(modules\.loss\.|functional\.)?(CrossEntropyLoss|NLLLoss\w*|cross_entropy|nll_loss)")
