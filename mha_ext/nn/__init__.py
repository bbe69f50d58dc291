"""In place of parts of torch.nn: the same names, arguments and meaning, on the engine.

MultiheadAttention                          torch.nn.MultiheadAttention
functional.multi_head_attention_forward     torch.nn.functional.multi_head_attention_forward
"""

from . import functional
from .attention import MultiheadAttention

__all__ = ["MultiheadAttention", "functional"]
