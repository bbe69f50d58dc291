"""The same attention in another engine: onnxruntime's operators on the CPU."""

from __future__ import annotations

import numpy as np
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper
from torch import Tensor

import mha_ext

ELEMENT = {
    np.dtype("float32"): TensorProto.FLOAT,
    np.dtype("int32"): TensorProto.INT32,
    np.dtype("bool"): TensorProto.BOOL,
}
BATCH, HEADS, Q_LEN, KV_LEN, HEAD_DIM, VALUE_DIM = 2, 4, 5, 7, 8, 6
LENGTHS = torch.tensor([7, 3])


def onnx_operator(name: str, *inputs: Tensor | None, domain: str = "", outputs: int = 1, **attributes) -> Tensor:
    """The first output of one operator of ONNX or, with its domain, of onnxruntime. None leaves an input out."""
    feeds = {f"input_{i}": x.numpy() for i, x in enumerate(inputs) if x is not None}
    names = [f"input_{i}" if x is not None else "" for i, x in enumerate(inputs)]
    results = [f"output_{i}" for i in range(outputs)]
    graph = helper.make_graph(
        [helper.make_node(name, names, results, domain=domain, **attributes)],
        name,
        [helper.make_tensor_value_info(key, ELEMENT[x.dtype], x.shape) for key, x in feeds.items()],
        [helper.make_tensor_value_info(results[0], TensorProto.FLOAT, None)],
    )
    opsets = [helper.make_opsetid("", 23), *([helper.make_opsetid(domain, 1)] if domain else [])]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return torch.from_numpy(session.run(results[:1], feeds)[0])


def heads(kv_heads: int = HEADS, q_len: int = Q_LEN, kv_len: int = KV_LEN, value_dim: int = VALUE_DIM) -> list[Tensor]:
    """query, key and value of shape (B, H, L, D)."""
    shapes = ((HEADS, q_len, HEAD_DIM), (kv_heads, kv_len, HEAD_DIM), (kv_heads, kv_len, value_dim))
    return [torch.randn(BATCH, *shape) for shape in shapes]


def merged(x: Tensor) -> Tensor:
    """(B, H, L, D) -> (B, L, H * D)"""
    return x.transpose(1, 2).flatten(2)


def contrib_operator(query: Tensor, key: Tensor, value: Tensor, *, bias=None, key_lengths=None, **options) -> Tensor:
    """onnxruntime's MultiHeadAttention."""
    padding = None if key_lengths is None else (torch.arange(key.shape[2]) < key_lengths[:, None]).int()
    inputs = (merged(query), merged(key), merged(value), None, padding, bias)
    attributes = {"num_heads": HEADS, "unidirectional": int(options.pop("is_causal", False)), **options}
    return onnx_operator("MultiHeadAttention", *inputs, domain="com.microsoft", **attributes)


def standard_operator(query: Tensor, key: Tensor, value: Tensor, *, bias=None, mask=None, **options) -> Tensor:
    """ONNX's Attention."""
    attributes = {"is_causal": int(options.pop("is_causal", False)), **options}
    return merged(onnx_operator("Attention", query, key, value, bias if mask is None else mask, **attributes))


def grouped_operator(query: Tensor, key: Tensor, value: Tensor, *, key_lengths: Tensor, **options) -> Tensor:
    """onnxruntime's GroupQueryAttention, which is causal."""
    last, longest = (key_lengths - 1).int(), torch.tensor(key.shape[2], dtype=torch.int32)
    attributes = {"num_heads": HEADS, "kv_num_heads": key.shape[1], **options}
    inputs = (merged(query), merged(key), merged(value), None, None, last, longest)
    return onnx_operator("GroupQueryAttention", *inputs, domain="com.microsoft", outputs=3, **attributes)


SELF = {"q_len": KV_LEN}
KEEP = torch.rand(BATCH, 1, Q_LEN, KV_LEN, generator=torch.Generator().manual_seed(0)) < 0.7


@pytest.mark.parametrize(
    ("operator", "sizes", "options"),
    (
        (contrib_operator, SELF, {}),
        (contrib_operator, {}, {}),
        (contrib_operator, {}, {"scale": 0.3}),
        (contrib_operator, SELF, {"is_causal": True}),
        (contrib_operator, {}, {"key_lengths": LENGTHS}),
        (contrib_operator, SELF, {"key_lengths": LENGTHS, "is_causal": True}),
        (contrib_operator, {}, {"bias": torch.randn(1, HEADS, Q_LEN, KV_LEN)}),
        (contrib_operator, {}, {"bias": torch.randn(BATCH, 1, Q_LEN, KV_LEN), "key_lengths": LENGTHS}),
        (standard_operator, SELF, {}),
        (standard_operator, {}, {"scale": 0.3}),
        (standard_operator, SELF, {"is_causal": True}),
        (standard_operator, {}, {"is_causal": True}),
        (standard_operator, {}, {"mask": KEEP}),
        (standard_operator, {}, {"bias": torch.randn(Q_LEN, KV_LEN)}),
        (standard_operator, {}, {"bias": torch.randn(BATCH, HEADS, Q_LEN, KV_LEN)}),
        (standard_operator, {}, {"softcap": 0.7}),
        (standard_operator, {"kv_heads": 2}, {}),
        (standard_operator, {"kv_heads": 1}, {"mask": KEEP}),
        (grouped_operator, {"q_len": KV_LEN, "kv_heads": 2, "value_dim": HEAD_DIM}, {"key_lengths": LENGTHS}),
        (grouped_operator, {"q_len": KV_LEN, "kv_heads": 1, "value_dim": HEAD_DIM}, {"key_lengths": LENGTHS}),
    ),
)
def test_agrees_with_onnxruntime(operator, sizes, options):
    query, key, value = heads(**sizes)
    expected = operator(query, key, value, **options)
    if operator is grouped_operator:
        options = {**options, "is_causal": True}
    torch.testing.assert_close(merged(mha_ext.attention(query, key, value, **options)), expected)
