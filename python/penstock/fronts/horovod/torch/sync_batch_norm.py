"""Batch normalisation over the batches of all ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from penstock.fronts.horovod.torch.mpi_ops import Sum, allreduce, size

__all__ = ["SyncBatchNorm"]


class SyncBatchNorm(_BatchNorm):
    """``torch.nn.BatchNorm*d`` with mean and variance of all ranks' batches together, in training; also on the CPU.

    Ranks' batches may differ in size. Statistics are summed in at least float32.

    Args:
        num_features, eps, momentum, affine, track_running_stats: those of ``torch.nn.BatchNorm1d``.

    Cost: two all-reduces of num_features numbers in the forward pass, and one of twice as many in the backward pass.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats)

    def _check_input_dim(self, input: torch.Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected at least 2D input (got {input.dim()}D input)")

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        self._check_input_dim(input)
        synced = self.training or not self.track_running_stats
        if not synced or size() == 1:
            return self._alone(input)
        if self.training and self.track_running_stats and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
        output, mean, variance, count = _SyncBatchNorm.apply(input, self.weight, self.bias, self.eps)
        if self.training and self.track_running_stats:
            share = self.momentum if self.momentum is not None else 1.0 / float(self.num_batches_tracked)
            unbiased = variance * (count / (count - 1).clamp(min=1))
            with torch.no_grad():
                self.running_mean.lerp_(mean.to(self.running_mean.dtype), share)
                self.running_var.lerp_(unbiased.to(self.running_var.dtype), share)
        return output

    def _alone(self, input: torch.Tensor) -> torch.Tensor:
        share = self.momentum
        if self.training and self.track_running_stats and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            share = share if share is not None else 1.0 / float(self.num_batches_tracked)
        return torch.nn.functional.batch_norm(
            input,
            self.running_mean,
            self.running_var,
            self.weight,
            self.bias,
            self.training or not self.track_running_stats,
            share if share is not None else 0.0,
            self.eps,
        )


class _SyncBatchNorm(torch.autograd.Function):
    """Input of shape (batch, channel, ...); statistics are of shape (channel,)."""

    @staticmethod
    def forward(ctx: Any, input: torch.Tensor, weight: Any, bias: Any, eps: float) -> Any:
        values = input.to(_at_least_float32(input.dtype))
        dims = [dim for dim in range(input.dim()) if dim != 1]
        shape = [1, -1] + [1] * (input.dim() - 2)
        own = torch.cat([values.sum(dims), values.new_tensor([input.numel() / input.shape[1]])])
        total = allreduce(own, op=Sum, name="sync_batch_norm.forward")
        count = total[-1]
        mean = total[:-1] / count
        # The variance is taken about the common mean, in a second all-reduce: E[x^2] - E[x]^2 would save it and lose digits.
        centred = values - mean.view(shape)
        variance = allreduce(centred.square().sum(dims), op=Sum, name="sync_batch_norm.variance") / count
        inverse = torch.rsqrt(variance + eps)
        normal = centred * inverse.view(shape)
        ctx.save_for_backward(normal, weight, inverse, count)
        ctx.has_bias = bias is not None
        output = normal
        if weight is not None:
            output = output * weight.view(shape)
        if bias is not None:
            output = output + bias.view(shape)
        ctx.mark_non_differentiable(mean, variance, count)
        return output.to(input.dtype), mean, variance, count

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor, *_: Any) -> Any:
        normal, weight, inverse, count = ctx.saved_tensors
        dims = [dim for dim in range(normal.dim()) if dim != 1]
        shape = [1, -1] + [1] * (normal.dim() - 2)
        gradient = grad_output.to(normal.dtype)
        by_bias, by_weight = gradient.sum(dims), (gradient * normal).sum(dims)
        by_input = None
        if ctx.needs_input_grad[0]:
            own = torch.cat([by_bias, by_weight])
            means = allreduce(own, op=Sum, name="sync_batch_norm.backward") / count
            mean_grad, mean_product = means.chunk(2)
            by_input = (gradient - mean_grad.view(shape) - normal * mean_product.view(shape)) * inverse.view(shape)
            if weight is not None:
                by_input = by_input * weight.view(shape)
            by_input = by_input.to(grad_output.dtype)
        # Gradients of parameters are reduced with all others.
        return (
            by_input,
            by_weight.to(weight.dtype) if weight is not None and ctx.needs_input_grad[1] else None,
            by_bias.to(grad_output.dtype) if ctx.has_bias and ctx.needs_input_grad[2] else None,
            None,
        )


def _at_least_float32(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
