// One product of a projection, forward or backward, and a task of it; raw pointers, no Tensor.
#pragma once

#include <cstdint>

namespace mha_ext::cpu {

// fp32 rows, each dense.
struct Rows {
  const float* data;
  int64_t ld;
};

// op(A) op(B): A is (rows, depth), stored transposed as (depth, rows) in a gradient of weights; B is (depth, columns),
// stored transposed as (columns, depth) in a forward.
struct LinearTerm {
  Rows a, b;
  int64_t depth;
};

enum class LinearKind : uint8_t {
  forward,      // y = x w^T + b
  grad_input,   // dx = dy w, summed over the projections of one input
  grad_weight,  // dw = dy^T x, db = column sums of dy
};

constexpr int64_t kLinearTerms = 3;  // query, key and value

// C (rows, columns) = the sum of the terms, + bias
struct LinearProduct {
  LinearKind kind;
  int64_t rows, columns;
  LinearTerm terms[kLinearTerms];
  int64_t term_count = 0;
  const float* bias = nullptr;  // (columns)
  float* result = nullptr;      // dense; null where only row_sums are wanted
  float* row_sums = nullptr;    // of op(A), (rows)
};

// Rows and columns of one product. A task has one block of whichever operand is stored transposed.
struct LinearTask {
  int64_t product, first_row, last_row, first_column, last_column;
};

}  // namespace mha_ext::cpu
