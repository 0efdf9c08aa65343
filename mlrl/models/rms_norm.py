"""RMSNorm as one autograd function: y = w·x/rms(x), of (…, D), while w is frozen.

Autograd goes back through the square, the mean, the root and two products in a dozen passes over (…, D). With
r = (mean(x²) + ε)^(−½) the gradient is r·g·w − x·r³·mean(g·w·x), four passes; x and r are kept, as before.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.mistral.modeling_mistral import MistralRMSNorm
from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

_NORMS = (LlamaRMSNorm, MistralRMSNorm, Qwen2RMSNorm, Qwen3RMSNorm)


def shorten_norms(model: nn.Module) -> None:
    """Sets the norms of a model up for it; their values stay the same. A second time does nothing."""
    for module in model.modules():
        if type(module) in _NORMS and "forward" not in vars(module):
            module.forward = NormForward(module)


class NormForward:
    """Forward of one norm, set on the instance; in float32 under a frozen weight, else as its class has it."""

    def __init__(self, norm: nn.Module):
        self.norm = norm

    def __call__(self, x: Tensor) -> Tensor:
        weight = self.norm.weight
        float32 = x.dtype == weight.dtype == torch.float32
        differentiates = torch.is_grad_enabled() and x.requires_grad and not weight.requires_grad
        if float32 and differentiates and not hasattr(weight, "ds_tensor"):  # which ZeRO-3 fetches
            return _RMSNorm.apply(x, weight, self.norm.variance_epsilon)
        return type(self.norm).forward(self.norm, x)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, epsilon):
        inverse_rms = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + epsilon)
        ctx.save_for_backward(x, inverse_rms, weight)
        return (x * inverse_rms).mul_(weight)

    @staticmethod
    @once_differentiable
    def backward(ctx, upstream):
        x, inverse_rms, weight = ctx.saved_tensors
        scaled = upstream * weight
        along_x = torch.linalg.vecdot(scaled, x)[..., None].mul_(inverse_rms.pow(3)).mul_(-1 / x.shape[-1])
        return scaled.mul_(inverse_rms).addcmul_(x, along_x), None, None
