"""Rules for what is trained: it goes into DistributedDataParallel, and is asked for its attributes inside of that."""

from __future__ import annotations

import re
from typing import Any

import libcst as cst

from penstock.convert.base import LIBRARIES, WRAPPER_RETURNS, Refused, constantly, places_reached
from penstock.convert.flow import Function, Place, dotted, words
from penstock.convert.loaders import LoaderRules
from penstock.convert.training import (
    trains,
)


class ModelRules(LoaderRules):
    """Where models are wrapped, with which options, and where the module inside is meant."""

    def wrap_models(self) -> None:
        """Each model that is trained goes into DistributedDataParallel, after the last statement that prepares it."""
        for place in self.places:
            statement = self._last_preparation(place)
            if statement is None:
                continue
            text = self._text(place, statement)
            self.imports.add("from torch.nn.parallel import DistributedDataParallel")
            options = self._wrapper_options(place, text)
            self.edits.after[statement].append(f"{text} = DistributedDataParallel({text}{options})\n")
            self.wrapped_at[place] = statement
            self.tell(statement, "model", f"`{text}` is wrapped in DistributedDataParallel after this statement")
        if not self.wrapped_at:
            # Loaders that are shared out and gradients that are not would be worse than no conversion.
            message = (
                "the model that is trained here cannot be wrapped: no statement was found that makes a module whose "
                "parameters an optimizer gets; give it a name of its own where it is made"
            )
            raise Refused("model", self.module.line(self.training.backwards[0]), message)
        self._drop_data_parallel()

    def _last_preparation(self, place: Place) -> cst.CSTNode | None:
        """The last statement of the block that prepares what is in `place`: makes it, moves it, loads into it."""
        values = [each for each in self.module.definitions[place] if isinstance(each.node, cst.Assign | cst.AnnAssign)]
        if not values:
            node = self.module.definitions[place][0].node if self.module.definitions[place] else self.module.tree
            todo = "bind the model to a name of its own, then convert again"
            self.leave(node, "a model that is made where it is used", "there is no statement to wrap it after", todo)
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
        for each in values:
            if self.module.function_of(each.node) is not function:
                why = "it is bound in several functions, so where it is whole for the last time is not known"
                self.leave(each.node, "the model that is trained", why, "wrap it in DistributedDataParallel here too")
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
        """Whether `statement` starts to use the model: calls it, trains it, or hands it to who does."""
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
                if inner is not None and inner in self.wrapped:
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
        for definition in self.module.definitions[place]:
            for origin in self.module.origins(definition.value):
                made = self.module.callee(origin)
                if not isinstance(made, cst.ClassDef) or not self._is_torch_module(made):
                    continue
                start = self.module.method(made, "__init__")
                if start is None:
                    continue
                layers = {
                    target.target.attr.value
                    for node in self.module.descendants(start)
                    if isinstance(node, cst.Assign) and self._makes_layer(node.value)
                    for target in node.targets
                    if isinstance(target.target, cst.Attribute) and dotted(target.target.value) == "self"
                }
                used = {
                    node.attr.value
                    for node in self.module.descendants(made)
                    if isinstance(node, cst.Attribute) and dotted(node.value) == "self" and not self._is_assigned(node)
                }
                if layers - used and not any(
                    isinstance(node, cst.Name) and node.value in ("getattr", "children", "modules", "_modules")
                    for node in self.module.descendants(made)
                ):
                    return True
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
        if name in WRAPPER_HAS or (name in WRAPPER_RETURNS and name not in ("apply",)):
            return
        self.edits.wrap(node.value, f"{self.name('unwrap')}(_)")
        self.tell(node, "attribute", f"`{self.module.code(node)}` is asked of the module inside the wrapper")
        call = self.module.parent(node)
        if (isinstance(call, cst.Call) and call.func is node and name not in MODULE_METHODS) and (
            trains(self.module, node, self.training) and self._in_step(node) and not self._without_gradient(node)
        ):
            what = f"`{self.module.code(node)}(...)` in code that trains"
            why = "a method does not pass through the wrapper: if a loss comes from it, gradients are not averaged"
            todo = "move what it computes into the module's forward, or average the gradients by hand"
            self.leave(node, what, why, todo)

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
        elif name:
            what = f"`{name}` gets the wrapped model"
            why = "what it does with it stands in another file"
            self.leave(call, what, why, "hand it unwrap(...) if it asks for attributes, or saves the model")

    def _is_own_code(self, node: cst.CSTNode) -> bool:
        """Whether `node` stands in the module class itself, where ``self`` is what is inside the wrapper."""
        owner = self.module.class_of(node)
        return owner is not None and self._is_torch_module(owner)

    def _in_step(self, node: cst.CSTNode) -> bool:
        function = self.module.function_of(node)
        direct = {self.module.function_of(call) for call in self.training.backwards}
        return (function is not None and function in direct) or self._in_batch_loop(node)

    def _without_gradient(self, node: cst.CSTNode) -> bool:
        return any(self._is_no_grad(above) for above in self.module.ancestors(node) if isinstance(above, cst.With))


# What DistributedDataParallel answers as the module inside would (it is a Module itself).
WRAPPER_HAS = words("parameters train eval zero_grad training requires_grad_ no_sync module forward")


# Methods of every torch module: none of them computes a loss.
MODULE_METHODS = words(
    "state_dict load_state_dict named_parameters modules named_modules children named_children buffers named_buffers "
    "apply register_buffer register_parameter add_module extra_repr get_parameter flatten_parameters init_weights "
    "configure_optimizers get_num_params init_hidden estimate_mfu save save_pretrained register_forward_hook"
)
