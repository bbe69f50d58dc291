"""Whether calling a linear layer does nothing but x W^T + b, so that its parameters may be used without calling it."""

from __future__ import annotations

from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.nn.modules import module as _nn_module
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

# The second is the first under a name that dynamic quantisation passes over; torch.nn.MultiheadAttention has it.
_PLAIN_LAYERS = (nn.Linear, NonDynamicallyQuantizableLinear)
# The last two stand for plain ones where there are no values: while a graph is recorded.
_PLAIN_TENSORS = (nn.Parameter, Tensor, FakeTensor, FunctionalTensor)
_linear_forward = nn.Linear.forward
_module_call = nn.Module.__call__
_module_call_impl = nn.Module._call_impl
_functional_linear = nn.functional.linear


def modules_are_called_plainly() -> bool:
    """Whether no hook for all modules is registered and nobody has replaced how modules are called."""
    return not (
        _nn_module._global_forward_hooks
        or _nn_module._global_forward_pre_hooks
        or _nn_module._global_backward_hooks
        or _nn_module._global_backward_pre_hooks
        or nn.Linear.forward is not _linear_forward
        or NonDynamicallyQuantizableLinear.forward is not _linear_forward
        or (nn.Module.__call__ is not _module_call and not _is_only_traced())
        or nn.Module._call_impl is not _module_call_impl
        or nn.functional.linear is not _functional_linear
        or "__call__" in nn.Linear.__dict__
        or "__call__" in NonDynamicallyQuantizableLinear.__dict__
    )


def _is_only_traced() -> bool:
    """Whether modules are called otherwise only because torch.export or make_fx records what they compute.

    fx.symbolic_trace replaces the same call, but to make nodes of modules, and has no proxy mode.
    """
    return getattr(nn.Module.__call__, "__wrapped__", None) is _module_call and get_proxy_mode() is not None


def plain_parameters(module: nn.Module | None) -> tuple[Tensor, Tensor | None] | None:
    """(weight, bias) if calling the module does nothing but x W^T + b with them, else None.

    None for a subclass or another module, for one with a hook, a parametrisation or a forward of its own, and where a
    parameter is a tensor subclass.
    """
    if (
        module is None
        or type(module) not in _PLAIN_LAYERS
        or has_hooks(module)
        or "forward" in module.__dict__
        or "_call_impl" in module.__dict__
        or "weight" in module.__dict__
        or "bias" in module.__dict__
    ):
        return None
    parameters = module._parameters
    if "bias" not in parameters:
        return None
    weight, bias = parameters.get("weight"), parameters["bias"]
    if weight is None or not is_plain(weight) or not (bias is None or is_plain(bias)):
        return None
    return weight, bias


def is_conv1d(module: nn.Module) -> bool:
    """Whether it is Transformers' Conv1D, a linear layer whose weight is (in, out)."""
    cls = type(module)
    return (cls.__module__, cls.__qualname__) == ("transformers.pytorch_utils", "Conv1D")


def has_hooks(module: nn.Module) -> bool:
    """Whether calling the module calls hooks of its own."""
    return bool(
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    )


def is_plain(tensor: Tensor) -> bool:
    """Whether the tensor is of no subclass, which might compute otherwise (quantised weights do)."""
    return type(tensor) in _PLAIN_TENSORS
