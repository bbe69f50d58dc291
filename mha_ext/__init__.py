"""Multi-head attention for PyTorch: one fast engine on the CPU, forward and backward, for every feature.

MultiHeadAttention              a whole layer
attention                       softmax(scale Q K^T + bias) V with masks, dropout, weights and log-sum-exp
scaled_dot_product_attention    the same in place of torch.nn.functional.scaled_dot_product_attention
nn                              the same in place of torch.nn.MultiheadAttention and its functional form

replace_attention               lets the attention of a model that exists run on ours; restore_attention undoes it
patch_sdpa                      sends torch's scaled_dot_product_attention to ours for a while
convert                         weights from one layout of a layer to another
integrations                    Hugging Face Transformers

heads                           what the heads of a model do: recorded, measured, drawn, pruned, made different

info                            versions, instruction set in use, threads
masks                           masks in the polarity of the operators
ops                             the operators as they stand in torch.ops.mha_ext, with types
"""

from ._library import __version__  # isort: skip  (loads the operators, so it comes first)
from . import convert, flops, heads, integrations, masks, nn, ops  # noqa: F401  (flops: registers formulas)
from .functional import attention, scaled_dot_product_attention
from .info import info
from .modules import MultiHeadAttention
from .replace import replace_attention, restore_attention
from .sdpa_patch import patch_sdpa

__all__ = [
    "MultiHeadAttention",
    "__version__",
    "attention",
    "convert",
    "heads",
    "info",
    "integrations",
    "masks",
    "nn",
    "ops",
    "patch_sdpa",
    "replace_attention",
    "restore_attention",
    "scaled_dot_product_attention",
]
