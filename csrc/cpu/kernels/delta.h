// What the backward knows of a row before it meets a key: its log-sum-exp and
//   delta_i = sum_j P_ij dP_ij - dLSE_i = dO_i . O_i + dW_i . W_i - dLSE_i
// (Dao et al. 2022; dW and dLSE are the gradients that arrive for the returned weights W and the log-sum-exp).
#pragma once

#include "convert.h"

namespace mha_ext::cpu {
namespace {

template <typename T>
struct RowState {
  T logsumexp = kInfinity<T>;  // +inf in rows that are dead or padding, so that their P is 0
  T delta = T(0);
  bool dead = false;  // sees no key
};

// Beyond this |LSE| its rounding shows in P = e^(S - LSE), which is then divided by its sum: at 32 it is 2^-19 in fp32,
// and at 1e9 nothing of log(sum) is left in LSE = max + log(sum), so that a row of such biases would get P = 1 for
// every key.
template <typename T>
bool is_inexact(T logsumexp) {
  return logsumexp < -T(32) || (logsumexp > T(32) && logsumexp != kInfinity<T>);
}

// 1 for rows that sum to nothing: dead ones, and those whose LSE was not that of their scores.
template <typename T>
T inverse_of_sum(T sum) {
  return sum == T(0) ? T(1) : T(1) / sum;
}

// a . b over n elements, n a multiple of kLanes
template <typename T>
T dot(const T* a, const T* b, int64_t n) {
  Vec<T> sum{};
  for (int64_t i = 0; i < n; i += kWidth<T>) sum += load(a + i) * load(b + i);
  return horizontal_sum<T>(sum);
}

// n elements of a row, padded with zeros to a multiple of kLanes: as they lie if possible, else in scratch.
template <typename T>
const T* padded_row(const View& v, int64_t batch, int64_t head, int64_t i, int64_t begin, int64_t n, T* scratch) {
  const T* row = n == padded(n) ? row_in_place<T>(v, batch, head, i, begin) : nullptr;
  if (row) return row;
  load_row(v, batch, head, i, begin, n, T(1), scratch);
  fill(scratch + n, padded(n) - n, T(0));
  return scratch;
}

// dW_i . W_i. A zero weight hides its gradient: that may be a NaN behind a mask.
template <typename T>
T dot_weights(const BackwardParams& p, int64_t batch, int64_t head, int64_t i, int64_t step, T* scratch_a,
              T* scratch_b) {
  Vec<T> sum{};
  for (int64_t begin = 0; begin < p.kv_len; begin += step) {
    const int64_t n = std::min(step, p.kv_len - begin);
    const T* grad = padded_row(p.grad_weights, batch, head, i, begin, n, scratch_a);
    const T* weights = padded_row(p.weights, batch, head, i, begin, n, scratch_b);
    for (int64_t j = 0; j < n; j += kWidth<T>) {
      const Vec<T> weight = load(weights + j);
      sum += weight == T(0) ? Vec<T>{} : load(grad + j) * weight;
    }
  }
  return horizontal_sum<T>(sum);
}

// Query i of a head; grad_output is its dO, padded. The scratch rows hold `step` (a multiple of kLanes) and Dv
// elements.
template <typename T>
RowState<T> row_state(const BackwardParams& p, int64_t batch, int64_t head, int64_t i, const T* grad_output,
                      int64_t step, T* scratch_a, T* scratch_b) {
  RowState<T> row;
  T logsumexp = T(0);
  load_row(p.logsumexp, batch, head, i, 0, 1, T(1), &logsumexp);
  row.dead = logsumexp == -kInfinity<T>;
  if (row.dead) return row;
  row.logsumexp = logsumexp;
  row.delta = dot(grad_output, padded_row(p.output, batch, head, i, 0, p.value_dim, scratch_a), padded(p.value_dim));
  if (p.weights) row.delta += dot_weights(p, batch, head, i, step, scratch_a, scratch_b);
  if (p.grad_logsumexp) {
    T grad = T(0);
    load_row(p.grad_logsumexp, batch, head, i, 0, 1, T(1), &grad);
    row.delta -= grad;
  }
  return row;
}

}  // namespace
}  // namespace mha_ext::cpu
