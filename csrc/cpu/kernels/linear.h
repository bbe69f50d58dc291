// Projections and their gradients as tile products. Operands are read as they lie, except those that are stored
// transposed: a task copies its one block of them.
#pragma once

#include "convert.h"
#include "gemm.h"
#include "linear_params.h"
#include "workspace.h"

#include <algorithm>

namespace mha_ext::cpu {
namespace {

// Not a power of two: rows 2048 bytes apart would share few sets of the L1 cache.
constexpr int64_t kDepthStride = kLinearDepth + kLanes;

struct LinearScratch {
  float* block;     // of the operand that is copied transposed: (kLinearRows, depth) or (depth, kLinearColumns)
  float* result_t;  // (kLinearColumns, kFewLinearRows)

  explicit LinearScratch(Workspace& w) {
    block = w.take<float>(std::max(kLinearRows * kDepthStride, kLinearDepth * kLinearColumns));
    result_t = w.take<float>(kLinearColumns * kFewLinearRows);
  }
};

// How many of `rest` rows of an input a tile product takes. Lengths that change from call to call meet few distinct
// sizes that way: oneDNN compiles a kernel for each and keeps it, 0.3 MB of memory.
inline int64_t piece_of(int64_t rest, int64_t block) {
  return rest >= block ? block : rest >= kLanes ? rest / kLanes * kLanes : rest;
}

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
    for (int64_t c = r < whole_rows ? whole_columns : 0; c < columns; ++c)
      dst[c * ld_dst + r] = src.data[r * src.ld + c];
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

// For few rows the copy of w^T would take longer than the product: y^T = w x^T reads w in place and copies x^T. Each
// element is summed in the same order as otherwise: how many rows there are does not show in them.
inline void few_rows_forward(const LinearProduct& p, const LinearTask& t, LinearScratch& s) {
  const LinearTerm& term = p.terms[0];
  const int64_t columns = t.last_column - t.first_column, lanes = padded(p.rows);
  for (int64_t k = 0; k < term.depth; k += kLinearDepth) {
    const int64_t depth = std::min(kLinearDepth, term.depth - k);
    transpose_any({term.a.data + k, term.a.ld}, p.rows, depth, s.block, lanes);
    for (int64_t i = 0; i < depth; ++i) fill(s.block + i * lanes + p.rows, lanes - p.rows, 0.f);
    brgemm_f32(columns, lanes, depth, term.b.data + t.first_column * term.b.ld + k, term.b.ld, s.block, lanes,
               s.result_t, lanes, k > 0);
  }
  float* c = p.result + t.first_column;
  transpose_any({s.result_t, lanes}, columns, p.rows, c, p.columns);
  if (p.bias) add_bias(p.bias + t.first_column, p.rows, columns, c, p.columns);
}

// C (+)= one stretch of the depth
inline void add_stretch(const LinearProduct& p, const LinearTask& t, const Rows& a, const Rows& b, int64_t depth,
                        bool first, bool last) {
  for (int64_t j = t.first_column; j < t.last_column; j += kLinearColumns) {
    const int64_t columns = std::min(kLinearColumns, t.last_column - j);
    for (int64_t r = t.first_row, rows = 0; r < t.last_row; r += rows) {
      rows = piece_of(t.last_row - r, kLinearRows);
      float* c = p.result + r * p.columns + j;
      brgemm_f32(rows, columns, depth, a.data + (r - t.first_row) * a.ld, a.ld, b.data + (j - t.first_column), b.ld, c,
                 p.columns, !first);
      if (last && p.bias) add_bias(p.bias + j, rows, columns, c, p.columns);
    }
  }
}

inline int64_t depth_of(const LinearProduct& p, int64_t rest) {
  return p.kind == LinearKind::grad_weight ? piece_of(rest, kLinearDepth) : std::min(rest, kLinearDepth);
}

inline void linear_task(const LinearProduct& p, const LinearTask& t, LinearScratch& s) {
  if (p.kind == LinearKind::forward && p.rows <= kFewLinearRows) return few_rows_forward(p, t, s);
  const int64_t rows = t.last_row - t.first_row, columns = t.last_column - t.first_column;
  bool first = true;
  for (int64_t i = 0; i < p.term_count; ++i) {
    const LinearTerm& term = p.terms[i];
    for (int64_t k = 0, depth = 0; k < term.depth; k += depth) {
      depth = depth_of(p, term.depth - k);
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
