"""Rules for what is trained: every parameter that an optimizer gets is covered, or the script is refused.

A model whose forward passes the text shows, each as a call of the model itself, goes into DistributedDataParallel, and is
asked for its attributes inside of that. Where a loss may come from it in another way (a method, a part of its output, a
function of another file, a parameter that belongs to no model), the gradients of the whole optimizer are averaged after
each backward pass instead: slower, for nothing leaves before the last gradient is there, and right for every program.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Any

import libcst as cst

from penstock.tools.convert.base import LIBRARIES, WRAPPER_RETURNS, Refused, constantly, places_reached
from penstock.tools.convert.coverage import Flow, Flows, exclusive, loss_of, parameter_owners, stepped
from penstock.tools.convert.flow import PASSES_FIRST_ARGUMENT, Function, Origin, Place, dotted, words
from penstock.tools.convert.gradients import Read
from penstock.tools.convert.loaders import LoaderRules
from penstock.tools.convert.neighbours import ANSWERS
from penstock.tools.convert.training import first_places, is_model, trains


class ModelRules(LoaderRules):
    """Where models are wrapped, with which options, and where the module inside is meant."""

    def cover(self) -> None:
        """Decide for every optimizer, and for every model, how its gradients become those of all ranks."""
        flows = Flows(self.module)
        self.wrapping.flows = {call: flows.into(loss_of(self.module, call)) for call in self.training.backwards}
        forwards = self._forwards()
        self.wrapping.places = list(dict.fromkeys(place for places in forwards.values() for place in places))
        self.wrapping.reached = places_reached(self.module, self.wrapping.places)
        unfit = self._unfit(forwards)
        optimizers = {call: parameter_owners(self.module, call) for call in self.training.optimizers}
        optimizers |= self._made_elsewhere()
        models = {call: self._models_of(call, owners, flows) for call, owners in optimizers.items()}
        grown = True
        while grown:  # an optimizer is averaged as a whole, and so are all others that get one of its models
            grown = False
            for call, owners in optimizers.items():
                known = owners is not None and all(self.module.origins(owner) for owner in owners)
                if not known or any(each in unfit or each not in forwards for each in models[call]):
                    grown = (
                        grown
                        or call not in self.wrapping.averaged_optimizers
                        or any(each not in unfit for each in models[call])
                    )
                    self.wrapping.averaged_optimizers.add(call)
                    for origin in models[call]:
                        unfit.setdefault(origin, SHARES if origin in forwards else UNSEEN)
            bare = {
                place for origin in unfit for place in forwards.get(origin, [])
            }  # what is not wrapped, for one of its models
            for origin, places in forwards.items():
                if origin not in unfit and bare & set(places):
                    unfit[origin], grown = SHARES, True
        self.wrapping.places = [place for place in self.wrapping.places if place not in bare]
        self.wrapping.reached = places_reached(self.module, self.wrapping.places)
        self._refuse_uncovered(unfit, forwards, models, flows)
        for call in sorted(self.wrapping.averaged_optimizers, key=self.module.line):
            reasons = [unfit[each] for each in models[call] if unfit[each] != SHARES]
            self._average(call, reasons[0] if reasons else SHARES if optimizers[call] else ANYTHING)

    def _models_of(self, call: cst.Call, owners: list[cst.BaseExpression] | None, flows: Flows) -> list[Origin]:
        """What makes the models whose parameters the optimizer of `call` gets, as far as they are seen."""
        asked = [each.func for each in flows.into(call).calls if isinstance(each.func, cst.Attribute)]
        found = [func.value for func in asked if func.attr.value in ("parameters", "named_parameters")]
        return list(dict.fromkeys(origin for owner in owners or found for origin in self.module.origins(owner)))

    def _average(self, call: cst.Call, reason: str) -> None:
        self.edits.wrap(call, f"{self.name('averaged')}(_)")
        self.tell(call, "gradients", f"averaged over ranks after each backward pass, without a wrapper: {reason}")
        for backward in self.training.backwards:
            statement = self.module.statement_of(backward)
            line = f"{self.name('average_gradients')}()\n"
            if line not in self.edits.after[statement]:
                self.edits.after[statement].append(line)

    def _forwards(self) -> dict[Origin, list[Place]]:
        """The models that are called, as a loss is computed, and the places that each is called from."""
        found: dict[Origin, list[Place]] = {}
        for call in sorted(
            {each for flow in self.wrapping.flows.values() for each in flow.calls}, key=self.module.line
        ):
            called: list[cst.BaseExpression] = [call.func]
            called += [argument.value for argument in call.args if self._only_calls(call, argument)]
            for func in called:
                place = self.module.place(func) if isinstance(func, cst.Name | cst.Attribute | cst.Subscript) else None
                if place is not None and is_model(self.module, func, self.training.models):
                    for origin in self.module.origins(func):
                        places = found.setdefault(origin, [])
                        places += [each for each in first_places(self.module, place) if each not in places]
        return found

    def _unfit(self, forwards: dict[Origin, list[Place]]) -> dict[Origin, str]:
        """The models that cannot go into a wrapper, each with the reason."""
        unfit: dict[Origin, str] = {}

        def mark(node: cst.BaseExpression, reason: str) -> None:
            for origin in self.module.origins(node):
                if origin in self.training.models:
                    unfit.setdefault(origin, reason)

        for flow in self.wrapping.flows.values():
            for call in flow.calls:
                self._mark_bypasses(call, mark)
        for call in self.module.calls:
            for argument in call.args:
                if self._is_handed_over(call, argument):
                    mark(
                        argument.value,
                        f"`{self.module.code(call.func)}` gets it, and what that does with it is not seen",
                    )
        for node in self.module.nodes:
            if isinstance(node, cst.Assign) and isinstance(node.value, cst.Call) and self._drops_a_part(node):
                mark(node.value.func, "a part of its output enters no loss")
        for backward, flow in self.wrapping.flows.items():
            if self._goes_again(backward, flow):
                for call in flow.calls:
                    mark(call.func, "two backward passes start from one forward pass")
        for origin, places in forwards.items():
            for place in places:
                reason = self._no_place_to_wrap(place)
                if reason:
                    unfit.setdefault(origin, reason)
        return unfit

    def _mark_bypasses(self, call: cst.Call, mark: Any) -> None:
        """Find a method of a model, or of a part of one, that a loss comes from, and a library that calls the model."""
        if isinstance(call.func, cst.Attribute) and call.func.attr.value not in NO_LOSS:
            base: cst.BaseExpression = call.func.value
            while True:
                if isinstance(base, cst.Name | cst.Attribute | cst.Subscript | cst.Call):
                    mark(
                        base,
                        f"a loss comes from `{self.module.code(call.func)}`, which does not pass through a wrapper",
                    )
                if not isinstance(base, cst.Attribute | cst.Subscript):
                    break
                base = base.value
        name = self.module.call_name(call)
        if self.module.callee(call) is None and name not in PASSES_FIRST_ARGUMENT and not name.startswith("builtins."):
            for argument in call.args:
                if not self._only_calls(call, argument):
                    mark(argument.value, f"a loss comes from `{self.module.code(call.func)}`, which gets it")

    def _is_handed_over(self, call: cst.Call, argument: cst.Arg) -> bool:
        """Whether `call` gets the model `argument`, and neither is its text seen nor is it a library that wants the module."""
        if self.module.callee(call) is not None or not isinstance(
            argument.value, cst.Name | cst.Attribute | cst.Subscript
        ):
            return False
        if not is_model(self.module, argument.value, self.training.models):
            return False
        name = self.module.call_name(call)
        known = name in PASSES_FIRST_ARGUMENT or name.split(".")[0] in (*LIBRARIES, "builtins")
        return not known and not self._only_calls(call, argument)

    def _only_calls(self, call: cst.Call, argument: cst.Arg) -> bool:
        """Whether a function of a file beside the script, which gets `argument`, does nothing with a model but call it."""
        found = self.elsewhere(call.func)
        if found is None or argument.star:
            return False
        parameter = argument.keyword.value if argument.keyword else call.args.index(argument)
        return self.neighbours.only_calls(*found, parameter)

    def _drops_a_part(self, node: cst.Assign) -> bool:
        """Whether `node` takes apart what a model returns, and a part of it enters no loss."""
        starts = [self.module.place(loss_of(self.module, backward)) for backward in self.training.backwards]
        for target in node.targets:
            if isinstance(target.target, cst.Tuple | cst.List) and not self._without_gradient(node):
                places = [self.module.place(each.value) for each in target.target.elements]
                if any(place in places for place in starts if place is not None):
                    return False  # `logits, loss = model(x, y)`: the model computes its loss from all that it returns
                entered = [any(place in flow.places for flow in self.wrapping.flows.values()) for place in places]
                if any(entered) and not all(entered):
                    return True
                # Each backward pass needs all parts: of one that enters another loss, this one knows nothing.
                for flow in self.wrapping.flows.values():
                    inside = [place in flow.places for place in places]
                    if node.value in flow.calls and any(inside) and not all(inside):
                        return True
        return False

    def _goes_again(self, backward: cst.Call, flow: Flow) -> bool:
        """Whether a later backward pass starts from a forward pass that `backward` starts from, or may."""
        if any(each.keyword is not None and each.keyword.value == "retain_graph" for each in backward.args):
            return True
        for other, later in self.wrapping.flows.items():
            if other is backward or self.module.function_of(other) is not self.module.function_of(backward):
                continue
            if self.module.line(other) <= self.module.line(backward) or exclusive(self.module, other, backward):
                continue
            for call in flow.calls & later.calls:
                if self._is_forward(call) and self.module.line(call) < self.module.line(backward):
                    origins = set(self.module.origins(call.func))
                    between = [
                        each
                        for each in later.calls
                        if self.module.line(backward) < self.module.line(each) < self.module.line(other)
                        and self._is_forward(each)
                        and origins & set(self.module.origins(each.func))
                    ]
                    if not between:
                        return True
        return False

    def _no_place_to_wrap(self, place: Place) -> str:
        if self._last_preparation(place) is None:
            return "it is made where it is used"
        values = [each for each in self.module.definitions[place] if isinstance(each.node, cst.Assign | cst.AnnAssign)]
        if len({self.module.function_of(each.node) for each in values}) > 1:
            return "it is made in several functions"
        if self._has_unused_layers(place) and self._calls_in_step(place) > 1:
            return "it has a layer that is not used, and a step calls it several times"
        if any(layers & sometimes for layers, _, sometimes in self._layers(place)) or self._comes_incomplete(place):
            return "it has a layer that a forward pass may leave out"
        return ""

    def _comes_incomplete(self, place: Place) -> bool:
        """Whether the file beside the script that the model's class is from has a layer that a forward pass may leave out."""
        origins = [each for value in self.module.definitions[place] for each in self.module.origins(value.value)]
        found = [self.elsewhere(each.func) for each in origins if isinstance(each, cst.Call)]
        return any(self.neighbours.may_leave_out(each[0]) for each in found if each is not None)

    def _made_elsewhere(self) -> dict[cst.Call, list[cst.BaseExpression] | None]:
        """The calls that give optimizers made by a method of the model, with that model, or in another file."""
        found: dict[cst.Call, list[cst.BaseExpression] | None] = {}
        for step in self.training.steps:
            receiver = stepped(self.module, step)
            origins = self.module.origins(receiver)
            for origin in origins:
                if not isinstance(origin, cst.Call) or origin in self.training.optimizers:
                    continue
                if self.module.callee(origin) is not None:
                    continue  # a class of the script around an optimizer, whose own step is seen
                found[origin] = None
                made = origin.func
                if isinstance(made, cst.Attribute) and is_model(self.module, made.value, self.training.models):
                    found[origin] = [made.value]
            if not any(isinstance(origin, cst.Call) for origin in origins):
                what = self.module.code(receiver)
                message = f"no statement here makes the optimizer `{what}`, so whether its gradients are averaged is not known"
                raise Refused(
                    "model", self.module.line(step), f"{message}: convert the file that makes it, with this one's loop"
                )
        return found

    def _refuse_uncovered(
        self,
        unfit: dict[Origin, str],
        forwards: dict[Origin, list[Place]],
        models: dict[cst.Call, list[Origin]],
        flows: Flows,
    ) -> None:
        """Loaders that are shared out and gradients that are not would be worse than no conversion."""
        for call in self.wrapping.averaged_optimizers:
            if self._in_batch_loop(call) and parameter_owners(self.module, call) is None:
                message = (
                    f"`{self.module.code(call)}` is made anew for a batch: whether its parameters belong to the batch of one "
                    "rank, or are those of all ranks, is not known; make it before the loop"
                )
                raise Refused("model", self.module.line(call), message)
        if not models and not self.training.reads:
            message = "no optimizer is made here, so whether what it gets is covered is not known: convert the file that makes it"
            raise Refused("model", self.module.line(self.training.backwards[0]), message)
        averaged: set[cst.CSTNode] = {each for call in self.wrapping.averaged_optimizers for each in models[call]}
        averaged |= {each for call in self.wrapping.averaged_optimizers for each in flows.into(call).calls}
        for read in self.training.reads:
            self._refuse_read(read, unfit, {each for each in forwards if each not in unfit} | averaged)
        if not self.wrapping.averaged_optimizers and not self.wrapping.places:
            message = (
                "the model that is trained here cannot be wrapped: no statement was found that makes a module whose "
                "parameters an optimizer gets; give it a name of its own where it is made"
            )
            raise Refused("model", self.module.line(self.training.backwards[0]), message)

    def _refuse_read(self, read: Read, unfit: dict[Origin, str], covered: Collection[cst.CSTNode]) -> None:
        """An update that is written by hand must find the gradients of all ranks."""
        reasons = [unfit.get(each, UNSEEN) for each in read.models if each not in covered]
        if reasons:
            reasons = [f"is updated by hand, and cannot be wrapped: {reasons[0]}"]
        elif any(each not in covered for each in read.others):
            reasons = ["is updated by hand, and belongs to no model that is wrapped"]
        elif not read.certain:
            reasons = ["is updated by hand, by a gradient that is read here: what makes it is not seen"]
        if reasons:
            what = f"{read.text} {reasons[0]}; give it to an optimizer of torch.optim, whose gradients are averaged over ranks"
            raise Refused("model", self.module.line(read.node), what)

    def wrap_models(self) -> None:
        """Each model that can be wrapped goes into DistributedDataParallel, after the last statement that prepares it."""
        for place in self.wrapping.places:
            statement = self._last_preparation(place)
            assert statement is not None, "it has one, or it would not be among `places`"
            text = self._text(place, statement)
            self.imports.add("from torch.nn.parallel import DistributedDataParallel")
            options = self._wrapper_options(place, text)
            self.edits.after[statement].append(f"{text} = DistributedDataParallel({text}{options})\n")
            self.wrapping.statements[place] = statement
            self.tell(statement, "model", f"`{text}` is wrapped in DistributedDataParallel after this statement")
        self._drop_data_parallel()

    def _last_preparation(self, place: Place) -> cst.CSTNode | None:
        """The last statement of the block that prepares what is in `place`: makes it, moves it, loads into it."""
        values = [each for each in self.module.definitions[place] if isinstance(each.node, cst.Assign | cst.AnnAssign)]
        if not values:
            return None
        first = values[0].node
        function = self.module.function_of(first)
        mentions = [
            node
            for node in self.module.nodes
            if isinstance(node, cst.Name | cst.Attribute)
            and self.module.place(node) == place
            and self.module.function_of(node) is function
        ]
        _block, body = self._common_block([*mentions, first])
        last = None
        for statement in body:
            inside = [node for node in mentions if self.module.within(node, statement)]
            if isinstance(statement, cst.FunctionDef | cst.ClassDef):
                continue
            if last is not None and self._consumes(statement, place):
                break
            if inside and not all(self._only_looks(node) for node in inside):
                last = statement
        return last

    def _common_block(self, nodes: list[Any]) -> tuple[cst.CSTNode, list[cst.CSTNode]]:
        """The innermost block that holds all of `nodes`."""
        chains = [
            [each for each in self.module.ancestors(node) if isinstance(each, cst.IndentedBlock | cst.Module)]
            for node in nodes
        ]
        for block in chains[0]:
            if all(block in chain for chain in chains[1:]):
                return block, list(block.body)
        return self.module.tree, list(self.module.tree.body)

    def _consumes(self, statement: cst.CSTNode, place: Place) -> bool:
        """Whether `statement` starts to use the model: calls it, trains it, or passes it to a function that does."""
        for node in self.module.descendants(statement, into_functions=False):
            if node in self.training.backwards:
                return True
            if isinstance(node, cst.Call):
                func = node.func
                if isinstance(func, cst.Name | cst.Attribute | cst.Subscript) and self.module.place(func) == place:
                    return True
                made = self.module.callee(node)
                handed = any(self.module.place(argument.value) == place for argument in node.args)
                if made is not None and (made in self.training.functions or handed):
                    return not self._is_preparation(made, node, place)
        return False

    def _is_preparation(self, made: Function | cst.ClassDef, call: cst.Call, place: Place) -> bool:
        """Whether a function of this module that gets the model neither calls nor trains it."""
        if made in self.training.functions or isinstance(made, cst.ClassDef):
            return False
        for node in self.module.descendants(made):
            if isinstance(node, cst.Call) and isinstance(node.func, cst.Name | cst.Attribute):
                inner = self.module.place(node.func)
                if inner is not None and inner in self.wrapping.reached:
                    return False
        return True

    def _only_looks(self, node: cst.CSTNode) -> bool:
        """Whether `node`, a mention of the model, leaves it as it is: its parameters for an optimizer, a print."""
        above = self.module.parent(node)
        statement = self.module.statement_of(node)
        if isinstance(statement, cst.For | cst.With | cst.While):
            return False
        if isinstance(above, cst.Attribute) and above.attr.value in ("parameters", "named_parameters", "state_dict"):
            return True
        if isinstance(above, cst.Attribute) and above.attr.value in ("train", "eval", "zero_grad"):
            return True
        if isinstance(above, cst.Arg):
            call = self.module.parent(above)
            return isinstance(call, cst.Call) and self.module.call_name(call) == "builtins.print"
        return False

    def _text(self, place: Place, statement: cst.CSTNode) -> str:
        kind, _owner, name = place
        if kind == "name":
            return str(name)
        if kind == "attribute":
            return f"self.{name}"
        for node in self.module.descendants(statement):
            if isinstance(node, cst.Subscript) and self.module.place(node) == place:
                return self.module.code(node)
        return str(name)

    def _wrapper_options(self, place: Place, text: str) -> str:
        options = ""
        if self._calls_in_step(place) > 1:
            # A second forward pass before the backward pass would find that the first one's buffers were overwritten
            # by the broadcast, and autograd refuses that.
            options += ", broadcast_buffers=False"
        if self._has_unused_layers(place):
            options += ", find_unused_parameters=True"
        return options

    def _calls_in_step(self, place: Place) -> int:
        """How often the code of one step calls the model: in a batch loop's body, or in the function of a step."""
        reach = places_reached(self.module, [place])
        where: dict[object, cst.CSTNode] = {}
        for call in self.module.calls:
            if (isinstance(call.func, cst.Name | cst.Attribute) and self.module.place(call.func) in reach) and (
                trains(self.module, call, self.training)
            ):
                function = self.module.function_of(call)
                where[function] = function if function is not None else self.module.tree
        return max((self._most_calls(each, reach) for each in where.values()), default=0)

    def _most_calls(self, node: cst.CSTNode, reach: set[Place]) -> int:
        """How many calls of what is in `reach` one pass through `node` makes at most, loops counted once."""
        if isinstance(node, cst.If):
            ways = [self._most_calls(node.body, reach)]
            ways += [self._most_calls(node.orelse, reach)] if node.orelse is not None else []
            return self._most_calls(node.test, reach) + max(ways)
        own = 0
        if isinstance(node, cst.Call) and isinstance(node.func, cst.Name | cst.Attribute):
            own = int(self.module.place(node.func) in reach and trains(self.module, node, self.training))
        inner = (each for each in node.children if not isinstance(each, cst.FunctionDef | cst.ClassDef))
        return own + sum(self._most_calls(each, reach) for each in inner)

    def _has_unused_layers(self, place: Place) -> bool:
        """Whether the model's class, if it is written here, makes a layer that no other method of it mentions."""
        return any(layers - used for layers, used, _ in self._layers(place))

    def _layers(self, place: Place) -> list[tuple[set[str], set[str], set[str]]]:
        """For each class, written here, of what is in `place`: its layers, which of its attributes it uses, and which of these
        only under a condition or in a loop."""
        found = []
        for definition in self.module.definitions[place]:
            for origin in self.module.origins(definition.value):
                made = self.module.callee(origin)
                start = self.module.method(made, "__init__") if isinstance(made, cst.ClassDef) else None
                if not isinstance(made, cst.ClassDef) or not self._is_torch_module(made) or start is None:
                    continue
                below = list(self.module.descendants(made))
                if any(
                    isinstance(node, cst.Name) and node.value in ("getattr", "children", "modules", "_modules")
                    for node in below
                ):
                    continue
                layers = {
                    target.target.attr.value
                    for node in self.module.descendants(start)
                    if isinstance(node, cst.Assign) and self._makes_layer(node.value)
                    for target in node.targets
                    if isinstance(target.target, cst.Attribute) and dotted(target.target.value) == "self"
                }
                uses = [
                    node
                    for node in below
                    if isinstance(node, cst.Attribute) and dotted(node.value) == "self" and not self._is_assigned(node)
                ]
                uses = [node for node in uses if not self.module.within(node, start)]
                always = {node.attr.value for node in uses if not self._is_optional(node)}
                used = {node.attr.value for node in uses}
                found.append((layers, used, used - always))
        return found

    def _is_optional(self, node: cst.CSTNode) -> bool:
        """Whether the function that `node` stands in may end without having come by it."""
        below = node
        for above in self.module.ancestors(node):
            if isinstance(above, cst.FunctionDef):
                return False
            if isinstance(above, cst.If | cst.For | cst.While) and below in (above.body, above.orelse):
                return True
            below = above
        return False

    def _is_torch_module(self, owner: cst.ClassDef) -> bool:
        return any(name.startswith("torch.nn.") for name in self.module.bases(owner))

    def _makes_layer(self, value: cst.BaseExpression) -> bool:
        return isinstance(value, cst.Call) and bool(
            re.match(
                r"torch\.nn\.(modules\.\w+\.)?(Linear|Conv|Embedding|LSTM|GRU|RNN|Bilinear|\w*Norm)",
                self.module.call_name(value),
            )
        )

    def _is_assigned(self, node: cst.CSTNode) -> bool:
        return isinstance(self.module.parent(node), cst.AssignTarget)

    def _drop_data_parallel(self) -> None:
        for call in self.module.calls:
            if self.module.call_name(call) in ("torch.nn.DataParallel", "torch.nn.parallel.DataParallel") and call.args:
                inner = call.args[0]
                statement = self.module.statement_of(call)
                self.edits.change(call, lambda node: node.args[0].value)
                if (
                    self.module.code(statement)
                    .strip()
                    .startswith(f"{self.module.code(inner.value)} = {self.module.code(call)}")
                ):
                    # What is left would say `model = model`.
                    block = self.module.parent(statement)
                    alone = len(getattr(block, "body", [])) == 1
                    rest = cst.SimpleStatementLine([cst.Pass()]) if alone else cst.RemoveFromParent()
                    self.edits.change(statement, constantly(rest))
                self.tell(call, "model", f"DataParallel around `{self.module.code(inner.value)}` is dropped")

    def unwrap_attributes(self) -> None:
        """Where the script asks a wrapped model for more than a forward pass, it asks the module inside."""
        for node in self.module.nodes:
            if isinstance(node, cst.Attribute) and self.is_wrapped(node.value) and not self._is_own_code(node):
                self._unwrap_attribute(node)
            elif isinstance(node, cst.Arg) and self.is_wrapped(node.value):
                self._unwrap_argument(node)

    def _unwrap_attribute(self, node: cst.Attribute) -> None:
        name = node.attr.value
        if name in ANSWERS or (name in WRAPPER_RETURNS and name not in ("apply",)):
            return
        self.edits.wrap(node.value, f"{self.name('unwrap')}(_)")
        self.tell(node, "attribute", f"`{self.module.code(node)}` is asked of the module inside the wrapper")

    def _unwrap_argument(self, node: cst.Arg) -> None:
        call = self.module.parent(node)
        if not isinstance(call, cst.Call) or self.module.callee(call) is not None:
            return
        name = self.module.call_name(call)
        if name in ("builtins.isinstance",):
            self.leave(call, self.module.code(call), "the model is in a wrapper by then", "ask about unwrap(...)")
            return
        if not name and not isinstance(call.func, cst.Attribute):
            return
        if name.split(".")[0] in LIBRARIES or name.startswith("builtins."):
            if name in ("builtins.next", "builtins.iter"):
                return
            self.edits.wrap(node.value, f"{self.name('unwrap')}(_)")
            self.tell(node, "attribute", f"`{name}` gets the module inside the wrapper")

    def _is_own_code(self, node: cst.CSTNode) -> bool:
        """Whether `node` stands in the module class itself, where ``self`` is what is inside the wrapper."""
        owner = self.module.class_of(node)
        return owner is not None and self._is_torch_module(owner)

    def _without_gradient(self, node: cst.CSTNode) -> bool:
        return any(self._is_no_grad(above) for above in self.module.ancestors(node) if isinstance(above, cst.With))


# Methods of every torch module: none of them computes a loss.
MODULE_METHODS = words(
    "state_dict load_state_dict named_parameters modules named_modules children named_children buffers named_buffers "
    "apply register_buffer register_parameter add_module extra_repr get_parameter flatten_parameters init_weights "
    "configure_optimizers get_num_params init_hidden estimate_mfu save save_pretrained register_forward_hook"
)


# Methods of a module that a loss may be traced to and that do not compute one: what a wrapper answers, and what asks for a
# part or the state.
NO_LOSS = ANSWERS | WRAPPER_RETURNS | MODULE_METHODS

# Why an optimizer is averaged where its own models would not ask for it.
SHARES = "it shares an optimizer with what cannot be wrapped"
UNSEEN = "no loss is seen to come from a call of it"
ANYTHING = "not all of its parameters are seen to belong to a model"
