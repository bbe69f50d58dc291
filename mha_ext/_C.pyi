"""What libmha_ext uses on this machine, and its settings for tests and tuning."""

from typing import Literal

def cpu_capability() -> str:
    """The kernels in use: 'default', 'avx2' or 'avx512'."""

def brgemm_available() -> bool:
    """Whether float32 tile products run in oneDNN's batch-reduce GEMM; otherwise in the kernels' own."""

def linear_backends() -> dict[str, str]:
    """'tiles', 'onednn' or 'blas' for the projections' products 'forward', 'grad_input' and 'grad_weight'."""

def kept_memory() -> tuple[int, int]:
    """Bytes of freed tensors that are kept for later calls, and at most (see MHA_EXT_KEEP_MB)."""

def release_kept_memory() -> None:
    """Gives the memory that is kept for later calls back to the system."""

def multiply_add(iterations: int) -> float:
    """Multiplies and adds float32 numbers in the registers of all threads; returns how many operations that were."""

def tile_size() -> tuple[int, int, int, int]:
    """Rows and columns of the score tile: forward queries and keys, then backward's."""

def work_list(
    backward: bool, batch: int, heads: int, kv_heads: int, q_len: int, kv_len: int, is_causal: bool, threads: int
) -> list[tuple[int, int, int, int, int, int]]:
    """The tasks of a call in the order in which threads take them.

    Each is a tuple of batch, key head, first and last (excluded) row of those that share the key head, first and last
    key.
    """

def linear_work_list(
    kind: Literal["forward", "grad_input", "grad_weight"], rows: int, columns: int, depth: int, threads: int
) -> list[tuple[int, int, int, int]]:
    """The tasks of a projection's product in tiles, of that kind, in the order in which threads take them.

    Each is a tuple of first and last (excluded) row and column of the result (rows, columns).
    """

def set_fused_on_cpu(on: bool) -> None:
    """Lets the composite kernels use PyTorch's fused attention for tensors of the CPU as they do for other devices'."""

def set_tile_size(forward_queries: int, forward_keys: int, backward_queries: int, backward_keys: int) -> None:
    """Sets what tile_size gives; not while another thread runs an operator.

    Raises:
        ValueError: a number that is not a multiple of 16 from 16 to 4096.
    """
