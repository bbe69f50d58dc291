"""The two documents' classes, as they stand there: what MultiHeadAttention and its from_numpy must reproduce.

The NumPy class multiplies from the right (x @ W), has no biases and hides where its mask is 1, by adding -1e9 to the
score. The PyTorch class hides where `mask == 0`, by putting -1e9 in the place of the score: a row in which everything
is hidden sees all keys alike.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn


class NumpyMultiHeadAttention:
    def __init__(self, d_model: int, num_heads: int) -> None:
        assert d_model % num_heads == 0, "d_model must be divisible by num_heads"
        self.d_model = d_model
        self.num_heads = num_heads
        self.depth = d_model // num_heads
        self.W_q = np.random.randn(d_model, d_model) * np.sqrt(1 / d_model)
        self.W_k = np.random.randn(d_model, d_model) * np.sqrt(1 / d_model)
        self.W_v = np.random.randn(d_model, d_model) * np.sqrt(1 / d_model)
        self.W_o = np.random.randn(d_model, d_model) * np.sqrt(1 / d_model)

    def _scaled_dot_product_attention(self, q_h, k_h, v_h, mask=None):
        # The document writes transpose(0, 2, 1) and notes that it is to be adapted to a heads dimension, as here.
        matmul_qk = np.matmul(q_h, np.swapaxes(k_h, -1, -2))
        scaled_attention_logits = matmul_qk / np.sqrt(k_h.shape[-1])
        if mask is not None:
            scaled_attention_logits += mask * -1e9
        stabilized = scaled_attention_logits - np.max(scaled_attention_logits, axis=-1, keepdims=True)
        attention_weights = np.exp(stabilized)
        attention_weights /= np.sum(attention_weights, axis=-1, keepdims=True)
        return np.matmul(attention_weights, v_h), attention_weights

    def _split_heads(self, x: np.ndarray, batch_size: int) -> np.ndarray:
        x = np.reshape(x, (batch_size, x.shape[1], self.num_heads, self.depth))
        return x.transpose(0, 2, 1, 3)

    def call(self, q_in: np.ndarray, k_in: np.ndarray, v_in: np.ndarray, mask=None) -> tuple[np.ndarray, np.ndarray]:
        batch_size = q_in.shape[0]
        q = self._split_heads(np.dot(q_in, self.W_q), batch_size)
        k = self._split_heads(np.dot(k_in, self.W_k), batch_size)
        v = self._split_heads(np.dot(v_in, self.W_v), batch_size)
        attention, attention_weights = self._scaled_dot_product_attention(q, k, v, mask)
        concatenated = np.reshape(attention.transpose(0, 2, 1, 3), (batch_size, q_in.shape[1], self.d_model))
        return np.dot(concatenated, self.W_o), attention_weights


class MultiHeadAttention(nn.Module):
    def __init__(self, d_model: int = 512, num_heads: int = 8) -> None:
        super().__init__()
        self.d_model = d_model
        self.num_heads = num_heads
        assert d_model % num_heads == 0, "d_model must be divisible by num_heads"
        self.d_k = d_model // num_heads
        self.W_q = nn.Linear(d_model, d_model)
        self.W_k = nn.Linear(d_model, d_model)
        self.W_v = nn.Linear(d_model, d_model)
        self.W_o = nn.Linear(d_model, d_model)

    def split_heads(self, x: Tensor, batch_size: int) -> Tensor:
        x = x.view(batch_size, -1, self.num_heads, self.d_k)
        return x.transpose(1, 2)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        batch_size = query.size(0)
        Q = self.split_heads(self.W_q(query), batch_size)
        K = self.split_heads(self.W_k(key), batch_size)
        V = self.split_heads(self.W_v(value), batch_size)
        scores = torch.matmul(Q, K.transpose(-2, -1)) / (self.d_k**0.5)
        if mask is not None:
            scores = scores.masked_fill(mask == 0, -1e9)
        attn_weights = F.softmax(scores, dim=-1)
        context = torch.matmul(attn_weights, V)
        context = context.transpose(1, 2).contiguous().view(batch_size, -1, self.d_model)
        output = self.W_o(context)
        return output, attn_weights
