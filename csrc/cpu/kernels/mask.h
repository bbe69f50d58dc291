// What hides keys from queries: boolean mask, key lengths, causal limit, and -inf in an additive bias. A new kind of
// mask needs its part in classify() (which tiles it empties or leaves whole) and in hide() (one row of a partial tile).
#pragma once

#include "convert.h"

#include <algorithm>

namespace mha_ext::cpu {
namespace {

// A rectangle of the score matrix of one head.
struct Tile {
  int64_t batch, head;
  int64_t query, queries;  // first row, rows
  int64_t key, keys;       // first column, columns
  int64_t row = 0;         // where its first row lies in scratch that rows of several heads share
};

// What a tile will read of a (B, H, Lq, Lk) operand is on its way into the cache while the first product runs: its rows
// lie far apart, which hides from the processor what comes next.
inline void prefetch_tile(const View& v, const Tile& t) {
  if (!v || v.stride[3] > 1) return;
  const int64_t size = size_of(v.dtype), rows = v.stride[2] == 0 ? 1 : t.queries;
  for (int64_t r = 0; r < rows; ++r) {
    const char* row = static_cast<const char*>(v.data) + v.offset(t.batch, t.head, t.query + r, t.key) * size;
    for (int64_t i = 0; i < t.keys * size * v.stride[3]; i += 64) __builtin_prefetch(row + i, 0, 2);
  }
}

// empty: nothing visible, skip it. full: nothing hidden or added, test nothing. biased: as full but for a bias, which
// may hide by -inf. partial: bias and masks row by row.
enum class TileKind { empty, full, biased, partial };

// First key that length and causal limit hide from query i.
inline int64_t visible_keys(const AttentionParams& p, int64_t b, int64_t i) {
  const int64_t limit = p.key_limit(b);
  return p.is_causal ? std::clamp<int64_t>(i + p.causal_offset + 1, 0, limit) : limit;
}

inline const uint8_t* mask_row(const View& mask, int64_t b, int64_t h, int64_t row, int64_t column) {
  return static_cast<const uint8_t*>(mask.data) + mask.offset(b, h, row, column);
}

inline int64_t count_visible(const uint8_t* row, int64_t stride, int64_t n) {
  int64_t visible = 0;
  if (stride == 1) {
    // Partial counts that fit a byte let the loop run on byte vectors.
    for (int64_t begin = 0; begin < n; begin += 128) {
      uint8_t part = 0;
      for (int64_t j = begin; j < std::min(n, begin + 128); ++j) part += row[j] != 0;
      visible += part;
    }
  } else {
    for (int64_t j = 0; j < n; ++j) visible += row[j * stride] != 0;
  }
  return visible;
}

inline TileKind classify_mask(const View& mask, const Tile& t) {
  const int64_t rows = mask.stride[2] == 0 ? 1 : t.queries;
  const int64_t columns = mask.stride[3] == 0 ? 1 : t.keys;
  bool any = false, all = true;
  for (int64_t r = 0; r < rows && !(any && !all); ++r) {
    const int64_t visible = count_visible(mask_row(mask, t.batch, t.head, t.query + r, t.key), mask.stride[3], columns);
    any |= visible > 0;
    all &= visible == columns;
  }
  return !any ? TileKind::empty : all ? TileKind::full : TileKind::partial;
}

inline TileKind classify(const AttentionParams& p, const Tile& t) {
  // The last row sees the most, the first the least.
  const int64_t most = visible_keys(p, t.batch, t.query + t.queries - 1);
  if (t.key >= most) return TileKind::empty;
  const TileKind by_mask = p.mask ? classify_mask(p.mask, t) : TileKind::full;
  if (by_mask != TileKind::full) return by_mask;
  if (t.key + t.keys > visible_keys(p, t.batch, t.query)) return TileKind::partial;
  return p.bias ? TileKind::biased : TileKind::full;
}

// One more than the last column of a tile that the mask shows to any row.
inline int64_t last_visible(const View& mask, const Tile& t) {
  if (mask.stride[3] != 1) return t.keys;
  const int64_t rows = mask.stride[2] == 0 ? 1 : t.queries;
  int64_t last = 0;
  for (int64_t r = 0; r < rows; ++r) {
    const uint8_t* row = mask_row(mask, t.batch, t.head, t.query + r, t.key);
    int64_t end = t.keys;
    for (uint64_t eight = 0; end - 8 >= last; end -= 8) {
      std::memcpy(&eight, row + end - 8, 8);
      if (eight != 0) break;
    }
    while (end > last && row[end - 1] == 0) --end;
    last = end;
    if (last == t.keys) break;
  }
  return last;
}

// Points tiles of several heads at the same keys.
inline void point_at(Tile* tiles, int64_t count, int64_t key, int64_t keys) {
  for (int64_t i = 0; i < count; ++i) {
    tiles[i].key = key;
    tiles[i].keys = keys;
  }
}

// What tiles of several heads are as one: what each is if they agree.
inline TileKind classify_all(const AttentionParams& p, const Tile* tiles, int64_t count) {
  const TileKind first = classify(p, tiles[0]);
  for (int64_t i = 1; i < count; ++i) {
    if (classify(p, tiles[i]) != first) return TileKind::partial;
  }
  return first;
}

// The same, pointed at those of `keys` keys that come before the last that any query may see. Fewer keys than these
// were pointed at if that hides some: `keys` tells.
inline TileKind select_keys(const AttentionParams& p, Tile* tiles, int64_t count, int64_t key, int64_t keys) {
  point_at(tiles, count, key, keys);
  if (!p.hides_anything()) return TileKind::full;
  const TileKind kind = classify_all(p, tiles, count);
  if (kind != TileKind::partial) return kind;
  int64_t reach = 0;
  for (const Tile* t = tiles; t < tiles + count; ++t) {
    const int64_t most = std::min(keys, visible_keys(p, t->batch, t->query + t->queries - 1) - key);
    reach = std::max(reach, p.mask ? std::min(most, last_visible(p.mask, *t)) : most);
  }
  if (reach == keys) return kind;
  point_at(tiles, count, key, reach);
  return classify_all(p, tiles, count);
}

// score + added, -inf where added is: selected, so that a NaN behind a mask is gone
template <typename T>
inline Vec<T> add_or_hide(Vec<T> score, Vec<T> added) {
  return added == -kInfinity<T> ? added : score + added;
}

// scores[0:n] of tile row r <- scores + bias, -inf where the bias is. bias_row is scratch for n elements.
template <typename T>
void add_bias(const AttentionParams& p, const Tile& t, int64_t r, int64_t n, T* bias_row, T* scores) {
  const T* bias = row_in_place<T>(p.bias, t.batch, t.head, t.query + r, t.key);
  if (!bias) {
    load_row(p.bias, t.batch, t.head, t.query + r, t.key, n, T(1), bias_row);
    bias = bias_row;
  }
  // Rows of a bias lie far apart, which hides from the processor what comes next: a few rows ahead, as softmax takes
  // long.
  const T* later = bias + 4 * p.bias.stride[2];
  int64_t j = 0;
  for (; j + kWidth<T> <= n; j += kWidth<T>) {
    __builtin_prefetch(later + j);
    store(scores + j, add_or_hide<T>(load(scores + j), load(bias + j)));
  }
  for (; j < n; ++j) scores[j] = bias[j] == -kInfinity<T> ? -kInfinity<T> : scores[j] + bias[j];
}

// scores[0:t.keys] of tile row r <- scores + bias, -inf where hidden. Selected, not added: a NaN behind a mask is gone.
// bias_row is scratch for t.keys elements.
template <typename T>
void hide(const AttentionParams& p, const Tile& t, int64_t r, T* bias_row, T* scores) {
  const int64_t query = t.query + r;
  const int64_t visible = std::clamp<int64_t>(visible_keys(p, t.batch, query) - t.key, 0, t.keys);
  if (p.bias) add_bias(p, t, r, visible, bias_row, scores);
  if (p.mask) {
    const uint8_t* keep = mask_row(p.mask, t.batch, t.head, query, t.key);
    const int64_t stride = p.mask.stride[3];
    if (stride == 1) {
      for (int64_t j = 0; j < visible; ++j) scores[j] = keep[j] ? scores[j] : -kInfinity<T>;
    } else {
      for (int64_t j = 0; j < visible; ++j) scores[j] = keep[j * stride] ? scores[j] : -kInfinity<T>;
    }
  }
  fill(scores + visible, t.keys - visible, -kInfinity<T>);
}

// scores of tile row r, padded(t.keys) of them, as the kind of the tile wants them: bias added, hidden keys and padding
// -inf.
template <typename T>
void apply_masks(const AttentionParams& p, const Tile& t, TileKind kind, int64_t r, T* bias_row, T* scores) {
  if (kind == TileKind::partial) hide(p, t, r, bias_row, scores);
  if (kind == TileKind::biased) add_bias(p, t, r, t.keys, bias_row, scores);
  fill(scores + t.keys, padded(t.keys) - t.keys, -kInfinity<T>);
}

}  // namespace
}  // namespace mha_ext::cpu
