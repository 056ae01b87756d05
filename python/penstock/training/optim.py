"""An optimizer that begins as Adam and ends as SGD, and a learning rate that falls along a line.

The paper behind Penstock (AIACC-Training, section IV) says of its optimizer one sentence, "It implements a new optimizer
by combining Adaptive Moment Estimation (Adam) and Stochastic Gradient Descent (SGD)", and of its schedule another, "It
uses linear decay to adjust the learning rate rather than the commonly used step decay". How the two are combined it does
not say. What stands here is our reading; docs/design/optim.md gives the formulas, where each part was published, and a
comparison on the character GPT.

Both are ordinary classes of torch and need nothing else of Penstock::

    optimizer = AdamSGD(model.parameters(), lr=1e-3, adam_steps=1000, mix_steps=1000)
    schedule = LinearDecay(optimizer, total_steps=5000, warmup_steps=100)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

__all__ = ["AdamSGD", "LinearDecay"]


class AdamSGD(Optimizer):
    """Adam first, then over ``mix_steps`` steps a mean of both, then SGD with momentum.

    With m and v Adam's bias-corrected moments, each parameter tensor moves by

        -lr * ((1 - w) * m / (sqrt(v) + eps)  +  w * s * m)

    where the weight w rises from 0 to 1, and s is one number a tensor: SGD's step size over lr. It is what makes the two
    terms equally long along the direction of Adam's, measured while Adam runs and then kept.

    Why so: the weighted sum of both directions is MAS (Landro, Gallo, La Grassa 2020), the hand-over and the rule for s
    are SWATS (Keskar and Socher 2017, section 3), with the averaged gradient m in place of the last one, which makes s
    positive and calm. *Why not AdaBound*, which narrows Adam's step sizes down to one? Its proof of convergence does not
    hold as published (Savarese 2019), and it reaches SGD only in the limit. Here w is 1 after finitely many steps: from then
    on the method *is* SGD with momentum, with a constant step size for each tensor, and what is proven for that holds (Liu,
    Gao, Yin 2020, theorem 1), whatever Adam did before. While w < 1 nothing is claimed beyond what is known of Adam.

    Args:
        params: real, dense floating-point tensors, or param groups; every option may differ between groups. One that comes
            twice in a group (a tied weight) counts once.
        lr: step size. A schedule scales both terms. A float or a tensor with one element.
        betas: decay of m and of v. The first is also SGD's momentum (in torch's terms with as much dampening).
        eps: added to sqrt(v). Tensors whose gradients are of its size or below get small steps.
        weight_decay: decoupled as in AdamW, in all phases: a step first multiplies the parameter by 1 - lr * weight_decay.
        adam_steps: steps of pure Adam. The default is AdaBound's 1 / gamma, which is no more than an order of magnitude;
            about a fifth of the run is a better start. Too few show as a loss that stops falling where Adam's goes on.
        mix_steps: steps from there until w = 1; 0 switches at once. Too few show as a jump of the loss.
        maximize: climb instead.

    Steps are counted for each parameter, in those that it had a gradient in: one that is unfrozen late gets its Adam
    phase then. A tensor that has only seen gradients of zero stays with Adam until it has an s.

    Memory: two tensors a parameter; one after the hand-over, when v is dropped. Cost: under Adam two sums over a tensor
    more than Adam. Blocks once a parameter, at its hand-over, when s is read from the device; else never.

    State a parameter: ``step`` (int), ``mean`` (m without its bias correction), ``square`` (v likewise, until the
    hand-over), ``scale`` (s, one element). All tensors have the parameter's dtype, as torch.optim's have: train float16
    through autocast on float32 parameters. A loaded ``state_dict`` continues with the same bits.

    Raises:
        ValueError: an option out of its range, or a parameter that is complex. Nothing was changed.
        RuntimeError (from ``step``): a sparse gradient. Parameters before it in its group have moved.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        adam_steps: int = 1000,
        mix_steps: int = 1000,
        maximize: bool = False,
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "adam_steps": adam_steps,
            "mix_steps": mix_steps,
            "maximize": maximize,
        }
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, with options of their own where given. They begin with Adam. Raises as the constructor does."""
        _check_options({**self.defaults, **param_group})
        if not isinstance(param_group["params"], (Tensor, set)):
            # A tied weight that comes twice must not move twice.
            param_group["params"] = list(dict.fromkeys(param_group["params"]))
        super().add_param_group(param_group)
        added = self.param_groups[-1]["params"]
        if any(parameter.is_complex() for parameter in added):
            self.param_groups.pop()
            raise ValueError("AdamSGD takes real parameters; view a complex one with torch.view_as_real")

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Move every parameter that has a gradient.

        Args:
            closure: evaluates the model again, with gradients, and returns the loss; called once, before the step.
        Returns: what the closure returned, else None.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._move(parameter, group)
        return loss

    def _move(self, parameter: Tensor, group: dict[str, Any]) -> None:
        gradient = -parameter.grad if group["maximize"] else parameter.grad
        if gradient.is_sparse:
            raise RuntimeError("AdamSGD does not take sparse gradients; build the embedding with sparse=False")
        state = self.state[parameter]
        if not state:
            state["step"] = 0
            state["mean"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
            state["square"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
            state["scale"] = torch.zeros((), dtype=parameter.dtype, device=parameter.device)
        state["step"] += 1
        lr, (beta1, beta2) = group["lr"], group["betas"]
        weight = mixing_weight(state["step"], group["adam_steps"], group["mix_steps"])

        if group["weight_decay"]:
            parameter.mul_(1 - lr * group["weight_decay"])
        mean = state["mean"].lerp_(gradient, 1 - beta1)
        unbiased = mean / (1 - beta1 ** state["step"])
        if "square" in state:
            square = state["square"].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
            denominator = (square / (1 - beta2 ** state["step"])).sqrt_().add_(group["eps"])
            adam = unbiased / denominator
            if weight < 1 or not state["scale"].item():
                _measure_scale(state["scale"], adam, unbiased)
            if weight < 1:
                unbiased.mul_(weight * state["scale"]).add_(adam, alpha=1 - weight)
            elif state["scale"].item():
                del state["square"]
                unbiased.mul_(state["scale"])
            else:
                unbiased = adam
        else:
            unbiased.mul_(state["scale"])
        parameter.sub_(unbiased.mul_(lr))


class LinearDecay(LRScheduler):
    """The learning rate rises along a line for ``warmup_steps`` steps, then falls along a line until ``total_steps``.

    With base the learning rate that each group had when the schedule was made, and k the number of ``step()`` calls:

        k < warmup_steps:   base * (k + 1) / (warmup_steps + 1)
        else:               base * (1 - (1 - end_factor) * min(1, (k - warmup_steps) / (total_steps - warmup_steps)))

    So the optimizer's first step already moves, step ``warmup_steps`` has the whole base, and after ``total_steps`` calls
    the rate is base * end_factor and stays. *Why not torch's LinearLR?* It knows one line, so that a warm-up needs a
    SequentialLR around two of it; and each value is the last one times a ratio, so that rounding adds up and the rate after
    a resume depends on the way there. Here it depends on k alone.

    Args:
        optimizer: any; groups that are added later join with the learning rate that they come with as their base.
        total_steps: calls of ``step()`` until the end, the warm-up included.
        warmup_steps: 0 to begin with base.
        end_factor: the last learning rate over base, 0 to 1.
        last_epoch: as in torch: -1 to begin, else the call to resume after; ``load_state_dict`` is the plainer way.
    Raises:
        ValueError: ``warmup_steps`` not below ``total_steps``, or a factor outside 0 to 1.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        total_steps: int,
        *,
        warmup_steps: int = 0,
        end_factor: float = 0.0,
        last_epoch: int = -1,
    ) -> None:
        if not 0 <= warmup_steps < total_steps:
            raise ValueError(f"need 0 <= warmup_steps < total_steps, not {warmup_steps} and {total_steps}")
        if not 0 <= end_factor <= 1:
            raise ValueError(f"end_factor must be from 0 to 1, not {end_factor}")
        self.total_steps = total_steps
        self.warmup_steps = warmup_steps
        self.end_factor = end_factor
        super().__init__(optimizer, last_epoch)

    def factor(self, calls: int) -> float:
        """The learning rate over its base after so many calls of ``step()``."""
        if calls < self.warmup_steps:
            return (calls + 1) / (self.warmup_steps + 1)
        done = min(1.0, (calls - self.warmup_steps) / (self.total_steps - self.warmup_steps))
        return 1 - (1 - self.end_factor) * done

    def get_lr(self) -> list[Any]:
        """The learning rate of each group for the optimizer's next step; torch calls it from ``step()``."""
        factor = self.factor(self.last_epoch)
        return [group.setdefault("initial_lr", group["lr"]) * factor for group in self.optimizer.param_groups]


def mixing_weight(step: int, adam_steps: int, mix_steps: int) -> float:
    """SGD's share in a parameter's ``step``-th step, counted from 1: half a period of a cosine, so without a corner."""
    if step <= adam_steps:
        return 0.0
    if step > adam_steps + mix_steps:
        return 1.0
    return (1 - math.cos(math.pi * (step - adam_steps) / (mix_steps + 1))) / 2


def _measure_scale(scale: Tensor, adam: Tensor, unbiased: Tensor) -> None:
    # SWATS asks for the multiple of the gradient whose projection on Adam's step is that step: (a . a) / (a . m). The
    # sums are taken in float32 at least, for 16-bit tensors have too few digits for them. Without any gradient so far
    # both sums are 0, and so is the scale: "not known".
    wide = torch.promote_types(adam.dtype, torch.float32)
    adam_wide = adam.to(wide)
    projection = (adam_wide * unbiased).sum()
    scale.copy_(torch.where(projection > 0, adam_wide.square().sum() / projection, 0.0))


def _check_options(options: dict[str, Any]) -> None:
    if options["lr"] < 0:
        raise ValueError(f"lr must not be negative: {options['lr']}")
    if not all(0 <= beta < 1 for beta in options["betas"]):
        raise ValueError(f"betas must be from 0 to below 1: {options['betas']}")
    for name in ("eps", "weight_decay", "adam_steps", "mix_steps"):
        if options[name] < 0:
            raise ValueError(f"{name} must not be negative: {options[name]}")
