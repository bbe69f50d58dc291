"""Multi-head attention for PyTorch: one fast engine on the CPU, forward and backward, for every feature.

MultiHeadAttention              a whole layer
attention                       softmax(scale Q K^T + bias) V with masks, dropout, weights and log-sum-exp
scaled_dot_product_attention    the same in place of torch.nn.functional.scaled_dot_product_attention
info                            versions, instruction set in use, threads
ops                             the operators as they stand in torch.ops.mha_ext, with types
"""

from ._library import __version__  # isort: skip  (loads the operators, so it comes first)
from . import masks, ops
from .functional import attention, scaled_dot_product_attention
from .info import info
from .modules import MultiHeadAttention

__all__ = [
    "MultiHeadAttention",
    "__version__",
    "attention",
    "info",
    "masks",
    "ops",
    "scaled_dot_product_attention",
]
