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

// A stretch of the depth of few rows.
struct FewRows {
  const float* data = nullptr;
  int64_t ld = 0, rows = 0, depth = 0;

  bool operator==(const FewRows&) const = default;
};

struct LinearScratch {
  float* block;  // of the operand that is copied transposed: (kLinearRows, depth) or (depth, kLinearColumns)
  float *result_t, *stretch_t;  // y^T of few rows, (kLinearColumns, kFewLinearRows), and what one stretch adds to it
  FewRows few;                  // what few_rows_forward() left in the block

  explicit LinearScratch(Workspace& w) {
    block = w.take<float>(std::max(kLinearRows * kDepthStride, kLinearDepth * kLinearColumns));
    result_t = w.take<float>(kLinearColumns * kFewLinearRows);
    stretch_t = w.take<float>(kLinearColumns * kFewLinearRows);
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

inline void add_to_rows(const float* bias, int64_t rows, int64_t columns, float* c, int64_t ldc) {
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t j = 0; j < columns; ++j) c[r * ldc + j] += bias[j];
  }
}

// Few rows are padded to multiples of this: half a vector of AVX-512 takes half as long where it has two such units.
constexpr int64_t kFewLanes = 8;
using FewLanes = BlockRow<float>::type;

// C (Rows x lanes) = A (Rows x depth) B (depth x lanes) for A that is read once, from memory: while some of its rows
// are multiplied the next ones are on their way.
template <int Rows>
inline void stream_rows(int64_t depth, const float* a, int64_t lda, const float* b, int64_t lanes, float* c) {
  constexpr int64_t stretch = 64, line = 16;
  for (int64_t k = 0; k < depth; k += stretch) {
    const int64_t n = std::min(stretch, depth - k);
    for (int r = 0; r < Rows; ++r) {
      for (int64_t i = 0; i < n; i += line) __builtin_prefetch(a + (Rows + r) * lda + k + i, 0, 2);
    }
    int64_t j = 0;
    for (; j + 2 * kWidth<float> <= lanes; j += 2 * kWidth<float>) {
      register_tile<Rows, 2, Storage::plain>(n, a + k, lda, b + k * lanes + j, lanes, c + j, lanes, k > 0);
    }
    for (; j + kWidth<float> <= lanes; j += kWidth<float>) {
      register_tile<Rows, 1, Storage::plain>(n, a + k, lda, b + k * lanes + j, lanes, c + j, lanes, k > 0);
    }
    for (; j < lanes; j += kFewLanes) {
      register_tile<Rows, 1, Storage::plain, float, FewLanes>(n, a + k, lda, b + k * lanes + j, lanes, c + j, lanes,
                                                              k > 0);
    }
  }
}

// As brgemm does.
#if defined(__FMA__) || defined(__AVX512F__)
constexpr bool kFusesMultiplyAdd = true;
#else
constexpr bool kFusesMultiplyAdd = false;
#endif

// For few rows the copy of w^T would take longer than the product: y^T = w x^T reads w in place and copies x^T. Each
// element is summed in the same order as otherwise: how many rows there are does not show in them.
inline void few_rows_forward(const LinearProduct& p, const LinearTask& t, LinearScratch& s) {
  const LinearTerm& term = p.terms[0];
  const int64_t columns = t.last_column - t.first_column, lanes = (p.rows + kFewLanes - 1) / kFewLanes * kFewLanes;
  for (int64_t k = 0; k < term.depth; k += kLinearDepth) {
    const int64_t depth = std::min(kLinearDepth, term.depth - k);
    const FewRows few = {term.a.data + k, term.a.ld, p.rows, depth};
    if (s.few != few) {  // query, key and value are often one tensor
      transpose_any({term.a.data + k, term.a.ld}, p.rows, depth, s.block, lanes);
      for (int64_t i = 0; i < depth; ++i) fill(s.block + i * lanes + p.rows, lanes - p.rows, 0.f);
      s.few = few;
    }
    float* sum = k == 0 ? s.result_t : s.stretch_t;
    int64_t row = 0;
    const auto stream = [&]<int Rows>(std::integral_constant<int, Rows>) {
      for (; row + Rows <= columns; row += Rows) {
        stream_rows<Rows>(depth, term.b.data + (t.first_column + row) * term.b.ld + k, term.b.ld, s.block, lanes,
                          sum + row * lanes);
      }
    };
    stream(std::integral_constant<int, kRegisterRows>());
    stream(std::integral_constant<int, 4>());
    stream(std::integral_constant<int, 1>());
    // As brgemm adds to what is there.
    for (int64_t i = 0; k > 0 && i < columns * lanes; ++i) s.result_t[i] += sum[i];
  }
  float* c = p.result + t.first_column;
  transpose_any({s.result_t, lanes}, columns, p.rows, c, p.columns);
  if (p.bias) add_to_rows(p.bias + t.first_column, p.rows, columns, c, p.columns);
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
      if (last && p.bias) add_to_rows(p.bias + j, rows, columns, c, p.columns);
    }
  }
}

inline int64_t depth_of(const LinearProduct& p, int64_t rest) {
  return p.kind == LinearKind::grad_weight ? piece_of(rest, kLinearDepth) : std::min(rest, kLinearDepth);
}

inline void linear_task(const LinearProduct& p, const LinearTask& t, LinearScratch& s) {
  if (kFusesMultiplyAdd && p.kind == LinearKind::forward && p.rows <= kFewLinearRows) return few_rows_forward(p, t, s);
  s.few = {};
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
