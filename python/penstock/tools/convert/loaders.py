"""Rules for what feeds training: each rank reads its share, in another order every epoch."""

from __future__ import annotations

import libcst as cst

from penstock.tools.convert.base import Rules, as_keyword, free_name, is_none, with_argument
from penstock.tools.convert.flow import constant
from penstock.tools.convert.training import BatchLoop


class LoaderRules(Rules):
    """DataLoaders, their samplers, their batch sizes, their epochs."""

    def shard_loaders(self) -> None:
        """Every loader that feeds training reads this rank's share; those for evaluation stay whole on every rank."""
        for call in self.training.loaders:
            if self._shard(call):
                self.sharded.append(call)
                self.shared.add(call)
        if self.sharded and self.training.other_loaders:
            for call in self.training.other_loaders:
                self.tell(call, "evaluation", "not sharded: every rank evaluates all of it and gets the same figures")

    def _shard(self, call: cst.Call) -> bool:
        arguments = loader_arguments(call)
        dataset = arguments.get("dataset")
        if dataset is None:
            self.leave(call, "a DataLoader whose dataset cannot be read", "its arguments are not written here", SHARD)
            return False
        if self._is_iterable_dataset(dataset.value):
            why = "an IterableDataset decides itself what it yields, and every rank would read all of it"
            todo = "skip in its __iter__ what belongs to other ranks: itertools.islice(samples, RANK, None, WORLD_SIZE)"
            self.leave(call, "an IterableDataset feeds training", why, todo)
            return False
        if "batch_sampler" in arguments and not is_none(arguments["batch_sampler"].value):
            self.leave(call, "a batch_sampler feeds training", "which ranks get which batches is its affair", SHARD)
            return False
        if "sampler" in arguments and not is_none(arguments["sampler"].value):
            return self._keep_sampler(call, arguments)
        open_ended = [each for each in call.args if each.star == "**"]
        if open_ended and not self._harmless(open_ended, arguments):
            self._shard_open(call, dataset)
            return True
        name, change_dataset = self._name_dataset(call, dataset)
        shuffle = arguments.get("shuffle")
        wanted = "False" if shuffle is None else self.module.code(shuffle.value)
        seed = "" if wanted == "False" else f", seed={self.name('shared_seed')}()"
        sampler = f"DistributedSampler({name}, shuffle={wanted}{seed})"
        self.imports.add("from torch.utils.data.distributed import DistributedSampler")
        if change_dataset:
            self.edits.wrap(dataset.value, change_dataset)
        self._divide_batch(call, arguments)
        drop = arguments.get("sampler")
        order = ["dataset", "batch_size"]

        def change(node: cst.Call) -> cst.Call:
            kept: list[cst.Arg] = []
            for index, (before, argument) in enumerate(zip(call.args, node.args, strict=True)):
                if before is drop:
                    continue
                if before is shuffle:
                    argument = as_keyword(argument, "sampler", cst.parse_expression(sampler))
                elif before.keyword is None and not before.star and index >= len(order):
                    argument = as_keyword(argument, LOADER_PARAMETERS[index], argument.value)
                kept.append(argument)
            if shuffle is None:
                kept = with_argument(kept, "sampler", sampler)
            return node.with_changes(args=kept)

        self.edits.change(call, change)
        self.tell(call, "loader", f"a DistributedSampler gives each rank its share, shuffle={wanted}")
        return True

    def _keep_sampler(self, call: cst.Call, arguments: dict[str, cst.Arg]) -> bool:
        made = self.module.origins(arguments["sampler"].value)
        names = [self.module.call_name(each).rsplit(".", 1)[-1] for each in made]
        replacement = any(
            each.keyword is not None and each.keyword.value == "replacement" and constant(each.value) is True
            for origin in made
            if isinstance(origin, cst.Call)
            for each in origin.args
        )
        if names == ["RandomSampler"] and replacement:
            self._divide_batch(call, arguments)
            self.shared.add(call)
            what = "RandomSampler with replacement is kept: each rank draws on its own"
            self.tell(call, "loader", what)
            return False
        kind = names[0] if names and names[0] else "sampler"
        why = "in which order it draws, and what of it a rank may leave out, is not known here"
        todo = "give each rank its share by hand; a DistributedSampler on a Subset does what most samplers do"
        self.leave(call, f"the training loader has a sampler already ({kind})", why, todo)
        return False

    def _is_iterable_dataset(self, node: cst.BaseExpression) -> bool:
        for origin in self.module.origins(node):
            made = self.module.callee(origin)
            names = self.module.bases(made) if isinstance(made, cst.ClassDef) else {self.module.call_name(origin)}
            if any(name.rsplit(".", 1)[-1] in ("IterableDataset", "IterDataPipe", "ChainDataset") for name in names):
                return True
        return False

    def _harmless(self, stars: list[cst.Arg], arguments: dict[str, cst.Arg]) -> bool:
        """Whether what ``**options`` holds is written in this module and says nothing about order or batches."""
        for star in stars:
            place = self.module.place(star.value)
            definitions = self.module.definitions.get(place, []) if place is not None else []
            literals = [
                each
                for definition in definitions
                for each in self.module.descendants(definition.value)
                if isinstance(each, cst.Dict)
            ]
            keys = {
                constant(entry.key) if isinstance(entry, cst.DictElement) else None
                for literal in literals
                for entry in literal.elements
            }
            changed = any(
                isinstance(call.func, cst.Attribute) and self.module.place(call.func.value) == place
                for call in self.module.calls
            )
            known = bool(literals) and not changed and None not in keys
            explicit = {"shuffle", "batch_size"} <= set(arguments)
            if not (known and not keys & {"shuffle", "sampler", "batch_sampler", "batch_size"}) and not explicit:
                return False
        return True

    def _shard_open(self, call: cst.Call, dataset: cst.Arg) -> None:
        name, change_dataset = self._name_dataset(call, dataset)
        if change_dataset:
            self.edits.wrap(dataset.value, change_dataset)
        helper = self.name("sharded")

        def change(node: cst.Call) -> cst.Call:
            rest = [after for before, after in zip(call.args, node.args, strict=True) if before is not dataset]
            first = next(after for before, after in zip(call.args, node.args, strict=True) if before is dataset)
            rest = [
                as_keyword(each, LOADER_PARAMETERS[index + 1], each.value)
                if each.keyword is None and not each.star
                else each
                for index, each in enumerate(rest)
            ]
            if len(rest) == 1 and rest[0].star == "**":
                options: cst.BaseExpression = rest[0].value
            else:
                rest[-1] = rest[-1].with_changes(comma=cst.MaybeSentinel.DEFAULT)
                options = cst.Call(cst.Name("dict"), rest)
            value = cst.Call(cst.Name(helper), [cst.Arg(cst.parse_expression(name)), cst.Arg(options)])
            comma = cst.Comma(whitespace_after=cst.SimpleWhitespace(" "))
            return node.with_changes(args=[first.with_changes(comma=comma), cst.Arg(value, star="**")])

        self.edits.change(call, change)
        self.tell(call, "loader", "its options are changed when it runs: a DistributedSampler in place of a shuffle")

    def _name_dataset(self, call: cst.Call, dataset: cst.Arg) -> tuple[str, str]:
        """A name for the dataset, and what must become of the expression so that it has this name."""
        if isinstance(dataset.value, cst.Name | cst.Attribute):
            return self.module.code(dataset.value), ""
        taken = {node.value for node in self.module.nodes if isinstance(node, cst.Name)} | set(self.names.values())
        name = free_name("train_dataset", taken | {f"train_dataset_{index}" for index in range(len(self.hoisted))})
        statement = self.module.statement_of(call)
        if not isinstance(statement, cst.SimpleStatementLine):
            return name, f"({name} := _)"
        # A statement of its own: a download in it must be over before the ranks agree on a seed in the next one.
        line = f"{name} = {self.module.code(dataset.value)}\n"
        inside = [each for each in self.module.descendants(dataset.value) if isinstance(each, cst.Call)]
        if any(self._downloads(each) for each in inside):
            line = f"with {self.name('one_rank_first')}():\n    {line}"
        self.edits.before[statement].append(line)
        self.hoisted.append(dataset.value)
        self.tell(call, "loader", f"its dataset gets the name `{name}`")
        return name, name

    def _divide_batch(self, call: cst.Call, arguments: dict[str, cst.Arg]) -> None:
        size = arguments.get("batch_size")
        if self.options.batch == "per-rank":
            self.tell(call, "batch", "batch_size stands for each rank: the global batch grows with the ranks")
            return
        if size is None:
            if not any(each.star for each in call.args):
                why = "a batch of one sample cannot be divided, so the global batch is one sample for each rank"
                self.leave(call, "a training loader without batch_size", why, "say the batch size of one rank")
            return
        if is_none(size.value):
            self.leave(call, "batch_size=None", "the dataset makes the batches", "let it make this rank's part of each")
            return
        helper = self.name("per_rank_batch")
        definition = self._batch_definition(size.value)
        if definition is not None:
            if definition not in self.figures.averaged:
                self.edits.wrap(definition, f"{helper}(_)")
                self.figures.averaged.add(definition)
                self.tell(definition, "batch", "divided by the number of ranks here, because training code uses it too")
            return
        self.edits.wrap(size.value, f"{helper}(_)")
        self.tell(call, "batch", "batch_size is divided by the number of ranks: the global batch stays the same")

    def _batch_definition(self, size: cst.BaseExpression) -> cst.BaseExpression | None:
        """The value of the variable `size`, where code that trains uses it as the size of its batches."""
        place = self.module.place(size)
        if place is None:
            text = self.module.code(size)
            if isinstance(size, cst.Attribute):
                for node in self.module.nodes:
                    if isinstance(node, cst.Attribute) and self.module.code(node) == text and self._in_batch_loop(node):
                        why = "a rank's batch is smaller than that"
                        todo = f"take the size from the batch itself, or divide {text} by WORLD_SIZE"
                        self.leave(node, f"`{text}` in code that trains", why, todo)
            return None
        used = [
            node
            for node in self.module.nodes
            if isinstance(node, cst.Name) and self.module.place(node) == place and self._in_batch_loop(node)
        ]
        definitions = self.module.definitions.get(place, [])
        if not used:
            return None
        if len(definitions) == 1 and not definitions[0].path and isinstance(definitions[0].node, cst.Assign):
            return definitions[0].value
        for node in used:
            what = f"`{self.module.code(node)}` in code that trains"
            self.leave(node, what, "a rank's batch is smaller than that", "take the size from the batch itself")
        return None

    def advance_epochs(self) -> None:
        """A sampler shuffles by its epoch: tell it each, before the loop over the batches."""
        for loop in self.training.batch_loops:
            ours = [each for each in loop.loaders if each in self.sharded]
            if not ours or not loop.outer:
                continue
            if self.module.place(loop.iterable) is None:
                why = "a new loader with a new sampler starts at epoch 0 each time, so each epoch has one order"
                self.leave(loop.node, "a DataLoader made inside the epoch loop", why, "make it once, before the loop")
                continue
            text = self.module.code(loop.iterable)
            epoch = self._epoch_variable(loop)
            if len(ours) < len(loop.loaders):
                line = f"{self.name('next_epoch')}({text})"
            elif epoch is not None:
                line = f"{text}.sampler.set_epoch({epoch})"
            else:
                line = f"{text}.sampler.set_epoch({text}.sampler.epoch + 1)"
            self.edits.before[self.module.statement_of(loop.node)].append(f"{line}\n")
            self.tell(loop.node, "epoch", f"{line} lets every epoch have its own order")

    def _epoch_variable(self, loop: BatchLoop) -> str | None:
        """The name that counts epochs, as the code around `loop` sees it."""
        outer = loop.outer[0]
        if not isinstance(outer, cst.For) or not isinstance(outer.target, cst.Name):
            return None
        if not isinstance(outer.iter, cst.Call) or not counts_up(self.module.call_name(outer.iter)):
            return None
        if self.module.within(loop.node, outer):
            return outer.target.value
        function = self.module.function_of(loop.node)
        for site in self.module.call_sites.get(function, []) if function is not None else []:
            if isinstance(site, cst.Call) and function is not None and self.module.within(site, outer):
                for parameter, value in self.module.arguments(site, function):
                    if isinstance(value, cst.Name) and value.value == outer.target.value:
                        return parameter.name.value
        return None


def loader_arguments(call: cst.Call) -> dict[str, cst.Arg]:
    found: dict[str, cst.Arg] = {}
    for index, argument in enumerate(call.args):
        if argument.star == "*":
            return {}
        if argument.star:
            continue
        found[argument.keyword.value if argument.keyword else LOADER_PARAMETERS[index]] = argument
    return found


def counts_up(name: str) -> bool:
    return name in ("builtins.range", "itertools.count") or name.rsplit(".", 1)[-1] == "trange"


SHARD = "give each rank its share by hand, for instance by a DistributedSampler"


# The parameters of torch.utils.data.DataLoader, in its order.
LOADER_PARAMETERS = (
    "dataset", "batch_size", "shuffle", "sampler", "batch_sampler", "num_workers", "collate_fn", "pin_memory",
    "drop_last", "timeout", "worker_init_fn", "multiprocessing_context", "generator",
)  # fmt: skip
