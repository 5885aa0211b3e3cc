// Memberships as marks [batch, heads, tokens, groups]. Every pointer is to the device's memory.
#ifndef TFB_ATTENTION_ROUTING_ROUTING_FUNCTORS_H_
#define TFB_ATTENTION_ROUTING_ROUTING_FUNCTORS_H_

#include <stdint.h>

#include "core/cuda/functor.h"

namespace tfb::routing {

// Groups first to first + clusters - 1 of the marks, for the heads from first_head on, and what
// they stand for.
struct RoutingMarks {
  uint8_t* marks;
  int64_t strides[4];
  int64_t first;
  int64_t first_head;
  float* scores;     // [batch][heads][clusters][stride]
  int32_t* members;  // [batch][heads][clusters][size], ascending
  int64_t heads;     // heads that have clusters
  int64_t clusters;
  int64_t stride;
  int64_t size;

  TFB_HOST_DEVICE uint8_t& At(int64_t b, int64_t h, int64_t token, int64_t cluster) const {
    return marks[b * strides[0] + h * strides[1] + token * strides[2] +
                 (first + cluster) * strides[3]];
  }
};

// Computes scores of 0 and 1 from marks. Row (b * heads + h) * clusters + cluster has the tokens as
// columns.
struct ScoresFromMarks {
  RoutingMarks a;

  template <class Piece>
  TFB_HOST_DEVICE void operator()(int64_t row, const Piece& piece) const {
    const int64_t head = row / a.clusters, h = a.first_head + head % a.heads;
    for (int64_t i = piece.first(); i < piece.end(); ++i) {
      a.scores[row * a.stride + i] = a.At(head / a.heads, h, i, row % a.clusters) != 0 ? 1 : 0;
    }
  }
};

// Computes marks from members, for all heads: rows are as above, with first_head + heads heads.
struct MarksOfMembers {
  RoutingMarks a;

  template <class Piece>
  TFB_HOST_DEVICE void operator()(int64_t row, const Piece& piece) const {
    const int64_t all_heads = a.first_head + a.heads, cluster = row % a.clusters;
    const int64_t b = row / a.clusters / all_heads, h = row / a.clusters % all_heads;
    const int64_t own = (b * a.heads + h - a.first_head) * a.clusters + cluster;
    const int32_t* members = a.members + own * a.size;
    // `next` is the first member that is not below the token.
    int64_t next = 0, end = h < a.first_head ? 0 : a.size;
    for (int64_t above = end; next < above;) {
      const int64_t middle = (next + above) / 2;
      if (members[middle] < piece.first()) {
        next = middle + 1;
      } else {
        above = middle;
      }
    }
    for (int64_t i = piece.first(); i < piece.end(); ++i) {
      const bool found = next < end && members[next] == i;
      a.At(b, h, i, cluster) = found ? 1 : 0;
      next += found;
    }
  }
};

}  // namespace tfb::routing

#endif  // TFB_ATTENTION_ROUTING_ROUTING_FUNCTORS_H_
