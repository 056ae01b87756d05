"""Rules for what leaves a rank or is its own: output, files, devices, learning rates."""

from __future__ import annotations

import re

import libcst as cst

from penstock.tools.convert.base import WRITERS, adding, constant_text, is_boolean, is_named, is_none
from penstock.tools.convert.flow import constant, words
from penstock.tools.convert.steps import StepRules
from penstock.tools.convert.training import is_progress_bar


class OutputRules(StepRules):
    """What rank 0 does alone, what ranks of a host must not do at once, which device is whose."""

    def find_writers(self) -> None:
        """Statements that write files: only rank 0 runs them."""
        for node in self.module.nodes:
            if isinstance(node, cst.Expr) and isinstance(node.value, cst.Call) and self._writes(node.value):
                above = next((each for each in self.module.ancestors(node) if isinstance(each, cst.With)), None)
                if above is not None and self._opens_for_writing(above):
                    continue
                self.rank_zero.append(node)
                self.edits.guard(node, f"if {self.name('RANK')} == 0:")
                self.tell(node, "rank 0", f"only rank 0 calls `{self.module.code(node.value.func)}`")
            elif isinstance(node, cst.With) and self._opens_for_writing(node):
                self._guard_with(node)

    def _writes(self, call: cst.Call) -> bool:
        name = self.module.call_name(call)
        method = call.func.attr.value if isinstance(call.func, cst.Attribute) else ""
        return name in WRITERS or name.startswith(("mlflow.",)) or (not name and method in WRITING_METHODS)

    def _opens_for_writing(self, node: cst.With) -> bool:
        for item in node.items:
            if isinstance(item.item, cst.Call) and self.module.call_name(item.item) in ("builtins.open", "gzip.open"):
                arguments = [each for each in item.item.args if each.keyword is None or each.keyword.value == "mode"]
                mode = constant(arguments[-1].value) if len(arguments) > 1 else None
                if isinstance(mode, str) and set(mode) & set("wax+"):
                    return True
        return False

    def _guard_with(self, node: cst.With) -> None:
        bound = [each for each in self.module.descendants(node.body) if isinstance(each, cst.Assign | cst.NamedExpr)]
        if bound or any(call in self.training.backwards for call in self.module.descendants(node.body)):
            why = "what it computes may be needed on every rank"
            self.leave(node, "a file is opened for writing", why, "let only rank 0 write: if RANK == 0")
            return
        self.rank_zero.append(node)
        self.edits.guard(node, f"if {self.name('RANK')} == 0:")
        self.tell(node, "rank 0", "only rank 0 writes this file")

    def quieten(self) -> None:
        """Only rank 0 prints, logs and shows progress."""
        for node in self.module.nodes:
            if isinstance(node, cst.Name) and self.module.qualified(node) == "builtins.print":
                if not isinstance(self.module.parent(node), cst.Attribute):
                    self.edits.replace(node, self.name("rank_zero_print"))
                    self.tell(node, "rank 0", "only rank 0 prints")
            elif isinstance(node, cst.Call):
                name = self.module.call_name(node)
                if is_progress_bar(name):
                    self._quieten_progress(node)
                elif name == "sys.stdout.write":
                    self.edits.replace(node.func, self.name("rank_zero_write"))
                    self.tell(node, "rank 0", "only rank 0 writes to standard output")
                elif name.rsplit(".", 1)[-1] == "SummaryWriter":
                    template = f"(_ if {self.name('RANK')} == 0 else {self.name('Silent')}())"
                    self.edits.wrap(node, template)
                    self.tell(node, "rank 0", "only rank 0 has a SummaryWriter")
                elif name == "wandb.init" and not any(is_named(each, "mode") for each in node.args):
                    mode = f'None if {self.name("RANK")} == 0 else "disabled"'
                    self.edits.change(node, adding("mode", mode))
                    self.tell(node, "rank 0", "only rank 0 reports to wandb")

    def _quieten_progress(self, node: cst.Call) -> None:
        rank = self.name("RANK")
        given = next((each for each in node.args if is_named(each, "disable")), None)
        if given is not None:
            self.edits.wrap(given.value, f"(_) or {rank} != 0")
        else:
            self.edits.change(node, adding("disable", f"{rank} != 0"))
        self.tell(node, "rank 0", "only rank 0 shows progress")

    def choose_devices(self) -> None:
        """Every rank has chosen its device at the start: "cuda" without a number is that one."""
        for node in self.module.nodes:
            if isinstance(node, cst.SimpleString | cst.FormattedString):
                self._choose_name(node)
            elif isinstance(node, cst.Call):
                self._choose_device(node)
            elif (isinstance(node, cst.Subscript) and constant_text(node) == "CUDA_VISIBLE_DEVICES") and (
                isinstance(self.module.parent(node), cst.AssignTarget)
            ):
                why = "ranks that see one device share it"
                self.leave(node, "CUDA_VISIBLE_DEVICES is set", why, "set it outside, for all ranks of the host")

    def _choose_name(self, node: cst.SimpleString | cst.FormattedString) -> None:
        above = self.module.parent(node)
        if isinstance(above, cst.DictElement) and above.key is node:
            return  # as in map_location: where tensors were, not where they go
        if constant(node) == "cuda:0":
            self.edits.replace(node, self.module.code(node).replace("cuda:0", "cuda"))
            self.tell(node, "device", '"cuda:0" becomes "cuda", the device that the rank has chosen')
        elif constant(node) == "cuda:" and isinstance(above, cst.BinaryOperation):
            self._leave_device(above)
        elif re.fullmatch(r"[a-zA-Z]*(['\"]+)cuda:(\d+|%[ds]|\{.*\})\1", self.module.code(node)):
            self._leave_device(node)

    def _leave_device(self, node: cst.CSTNode) -> None:
        why = "every rank of a host would use that device"
        self.leave(node, f"`{self.module.code(node)}`", why, 'write "cuda" without a number: the device of the rank')

    def _choose_device(self, call: cst.Call) -> None:
        name = self.module.call_name(call)
        if name == "torch.cuda.set_device":
            self.edits.replace(call, "None")
            self.tell(call, "device", "the rank has chosen its device already")
        elif name == "torch.device" and len(call.args) == 2 and constant(call.args[0].value) == "cuda":
            self.edits.change(
                call, lambda node: node.with_changes(args=[node.args[0].with_changes(comma=cst.MaybeSentinel.DEFAULT)])
            )
            self.tell(call, "device", "the number of the device is dropped")
        elif isinstance(call.func, cst.Attribute) and call.func.attr.value == "cuda" and not name:
            given = next((each for each in call.args if each.keyword is None or is_named(each, "device")), None)
            if given is not None and constant(given.value) == 0 and not is_boolean(given.value):
                dropped = call.args.index(given)
                self.edits.change(
                    call, lambda node: node.with_changes(args=[*node.args[:dropped], *node.args[dropped + 1 :]])
                )
                self.tell(call, "device", "the number of the device is dropped")
            elif given is not None and not self._names_device(given.value):
                self._leave_device(call)
        elif isinstance(call.func, cst.Attribute) and call.func.attr.value == "to" and call.args and not name:
            if isinstance(call.args[0].value, cst.Integer):
                self._leave_device(call)
        elif name == "torch.cuda.device" or (
            name == "torch.device" and call.args and isinstance(call.args[0].value, cst.Integer)
        ):
            self._leave_device(call)

    def _names_device(self, node: cst.BaseExpression) -> bool:
        """Whether `node` is a device that is made, or named, elsewhere in the script, where it is looked at."""
        if is_boolean(node) or is_none(node) or isinstance(node, cst.SimpleString | cst.FormattedString):
            return True
        place = self.module.place(node)
        values = [each.value for each in self.module.definitions.get(place, [])] if place is not None else []
        return any(
            str(constant(inner)).startswith("cuda") for value in values for inner in self.module.descendants(value)
        ) or any(self.module.call_name(each) == "torch.device" for each in self.module.origins(node))

    def guard_files(self) -> None:
        """Ranks of a host start together: folders may be there already, and a download happens once."""
        for call in self.module.calls:
            name = self.module.call_name(call)
            if name in ("os.makedirs", "os.mkdir") and not any(is_named(each, "exist_ok") for each in call.args):
                if name == "os.mkdir":
                    self.edits.replace(call.func, self.module.code(call.func).replace("mkdir", "makedirs"))
                self.edits.change(call, adding("exist_ok", "True"))
                self.tell(call, "files", "another rank may have made the folder already")
            if self._downloads(call) and not self.module.within(call, *self.hoisted):
                statement = self.module.statement_of(call)
                if isinstance(statement, cst.SimpleStatementLine):
                    self.edits.guard(statement, f"with {self.name('one_rank_first')}():")
                    self.tell(call, "files", "one rank of each host downloads, the others wait for it")
        self._wait_for_files()

    def _wait_for_files(self) -> None:
        """What rank 0 saved may be loaded by all: not before it is written."""
        saved = [each for each in self.module.calls if self.module.call_name(each) == "torch.save"]
        for call in self.module.calls:
            if self.module.call_name(call) != "torch.load" or not saved or self._is_in_dataset(call):
                continue
            statement = self.module.statement_of(call)
            for above in self.module.ancestors(call):
                if isinstance(above, cst.With) and any("open(" in self.module.code(each.item) for each in above.items):
                    statement = above
            if self._runs_alike(statement) and not self.module.within(statement, *self.rank_zero):
                line = "torch.distributed.barrier()  # what rank 0 saves is whole now\n"
                if line not in self.edits.before[statement]:
                    self.edits.before[statement].append(line)
                self.tell(call, "files", "waits until rank 0 has written what is loaded")

    def _is_in_dataset(self, node: cst.CSTNode) -> bool:
        owner = self.module.class_of(node)
        return owner is not None and self.module.method(owner, "__getitem__") is not None

    def scale_learning_rates(self) -> None:
        if not self.options.scale_lr:
            return
        for call in self.training.optimizers:
            given = next((each for each in call.args if is_named(each, "lr")), None)
            if given is None and len(call.args) > 1 and call.args[1].keyword is None:
                given = call.args[1]
            if given is None:
                self.leave(call, "an optimizer with its default learning rate", "there is no number here", "give lr=")
                continue
            self.edits.wrap(given.value, f"(_) * {self.name('WORLD_SIZE')}")
            self.tell(call, "learning rate", "multiplied by the number of ranks")


WRITING_METHODS = words("savefig to_csv to_parquet to_json to_pickle save_pretrained write_text write_bytes")
