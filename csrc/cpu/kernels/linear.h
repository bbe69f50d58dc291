// Projections and their gradients as tile products. Operands are read as they lie, except those that are stored
// transposed: a task copies its one block of them.
#pragma once

#include "convert.h"
#include "few_rows.h"
#include "linear_params.h"
#include "workspace.h"

#include <algorithm>

namespace mha_ext::cpu {
namespace {

// Not a power of two: rows 2048 bytes apart would share few sets of the L1 cache.
constexpr int64_t kDepthStride = kLinearDepth + kLanes;

struct LinearScratch {
  float* block;  // of the operand that is stored transposed: (kLinearRows, depth) or (depth, kLinearColumns)

  explicit LinearScratch(Workspace& w) {
    block = w.take<float>(std::max(kLinearRows * kDepthStride, kLinearDepth * kLinearColumns));
  }
};

// dst (columns x rows) = src (rows x columns)^T, any sizes
inline void transpose_any(const Rows& src, int64_t rows, int64_t columns, float* dst, int64_t ld_dst) {
  constexpr int64_t step = 8;
  const int64_t whole_rows = rows / step * step, whole_columns = columns / step * step;
  for (int64_t r = 0; r < whole_rows; r += step) {
    for (int64_t c = 0; c < whole_columns; c += step) {
      transpose_block(src.data + r * src.ld + c, src.ld, dst + c * ld_dst + r, ld_dst);
    }
  }
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t c = r < whole_rows ? whole_columns : 0; c < columns; ++c) dst[c * ld_dst + r] = src.data[r * src.ld + c];
  }
}

inline void add_row_sums(const Rows& a, int64_t rows, int64_t depth, bool first, float* sums) {
  for (int64_t r = 0; r < rows; ++r) {
    const float* row = a.data + r * a.ld;
    Vec<float> sum{};
    int64_t i = 0;
    for (; i + kWidth<float> <= depth; i += kWidth<float>) sum += load(row + i);
    float total = horizontal_sum<float>(sum);
    for (; i < depth; ++i) total += row[i];
    sums[r] = first ? total : sums[r] + total;
  }
}

inline void add_bias(const float* bias, int64_t rows, int64_t columns, float* c, int64_t ldc) {
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t j = 0; j < columns; ++j) c[r * ldc + j] += bias[j];
  }
}

// For few rows of x the copy of w would take longer than the product: both are read in place.
inline bool reads_in_place(const LinearProduct& p, const LinearTask& t) {
  return p.kind == LinearKind::forward && p.rows <= kFewLinearRows && p.terms[0].depth % kLanes == 0 &&
         (t.last_column - t.first_column) % kLanes == 0;
}

inline void in_place_forward(const LinearProduct& p, const LinearTask& t) {
  const LinearTerm& x_w = p.terms[0];
  float* c = p.result + t.first_row * p.columns + t.first_column;
  const int64_t rows = t.last_row - t.first_row, columns = t.last_column - t.first_column;
  few_rows_matmul_transposed(rows, columns, x_w.depth, x_w.a.data + t.first_row * x_w.a.ld, x_w.a.ld,
                             x_w.b.data + t.first_column * x_w.b.ld, x_w.b.ld, c, p.columns);
  if (p.bias) add_bias(p.bias + t.first_column, rows, columns, c, p.columns);
}

// C (+)= one stretch of the depth
inline void add_stretch(const LinearProduct& p, const LinearTask& t, const Rows& a, const Rows& b, int64_t depth,
                        bool first, bool last) {
  for (int64_t j = t.first_column; j < t.last_column; j += kLinearColumns) {
    const int64_t columns = std::min(kLinearColumns, t.last_column - j);
    for (int64_t r = t.first_row; r < t.last_row; r += kLinearRows) {
      const int64_t rows = std::min(kLinearRows, t.last_row - r);
      float* c = p.result + r * p.columns + j;
      brgemm_f32(rows, columns, depth, a.data + (r - t.first_row) * a.ld, a.ld, b.data + (j - t.first_column), b.ld, c,
                 p.columns, !first);
      if (last && p.bias) add_bias(p.bias + j, rows, columns, c, p.columns);
    }
  }
}

inline void linear_task(const LinearProduct& p, const LinearTask& t, LinearScratch& s) {
  if (reads_in_place(p, t)) return in_place_forward(p, t);
  const int64_t rows = t.last_row - t.first_row, columns = t.last_column - t.first_column;
  bool first = true;
  for (int64_t i = 0; i < p.term_count; ++i) {
    const LinearTerm& term = p.terms[i];
    for (int64_t k = 0; k < term.depth; k += kLinearDepth) {
      const int64_t depth = std::min(kLinearDepth, term.depth - k);
      Rows a = {term.a.data + t.first_row * term.a.ld + k, term.a.ld};
      Rows b = {term.b.data + k * term.b.ld + t.first_column, term.b.ld};
      if (p.kind == LinearKind::grad_weight) {
        transpose_any({term.a.data + k * term.a.ld + t.first_row, term.a.ld}, depth, rows, s.block, kDepthStride);
        a = {s.block, kDepthStride};
        if (p.row_sums && t.first_column == 0) add_row_sums(a, rows, depth, first, p.row_sums + t.first_row);
      } else if (p.kind == LinearKind::forward) {
        transpose_any({term.b.data + t.first_column * term.b.ld + k, term.b.ld}, columns, depth, s.block,
                      kLinearColumns);
        b = {s.block, kLinearColumns};
      }
      const bool last = i + 1 == p.term_count && k + depth == term.depth;
      if (p.result) add_stretch(p, t, a, b, depth, first, last);
      first = false;
    }
  }
}

}  // namespace
}  // namespace mha_ext::cpu
