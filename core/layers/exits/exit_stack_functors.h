// Steps of exit_stack's backward pass that all devices run, or CUDA alone. Pointers are to the
// device's memory; a place is b * tokens + t, of token t of a segment of batch row b.
#ifndef TFB_CORE_LAYERS_EXITS_EXIT_STACK_FUNCTORS_H_
#define TFB_CORE_LAYERS_EXITS_EXIT_STACK_FUNCTORS_H_

#include <stdint.h>

#include "core/cuda/functor.h"

namespace tfb::layers {

// The part that a layer has for a token.
enum class Role : uint8_t {
  kGone,    // the token left before it
  kStays,   // it goes through the layer, and on
  kLeaves,  // it leaves after the layer
};

// The roles of a layer, [batch, total], and the tokens of a Run that are a segment's.
struct RolesOfSegment {
  Role* roles;
  int64_t total;
  int64_t begin;
  int64_t tokens;

  TFB_HOST_DEVICE int64_t TokenAt(int64_t place) const {
    return place / tokens * total + begin + place % tokens;
  }
  TFB_HOST_DEVICE Role At(int64_t place) const { return roles[TokenAt(place)]; }
};

// Writes the roles that a layer, which has run, has for the places of a segment.
struct WriteRoles {
  RolesOfSegment of;
  const int32_t* row_of_token;  // CPU: below 0 for a token that has left; else null
  const uint8_t* stays;         // CUDA: 0 for such a token
  const int32_t* exits;         // [batch, total], of the tokens that have left
  int32_t layer;

  TFB_HOST_DEVICE void operator()(int64_t place) const {
    const int64_t token = of.TokenAt(place);
    const bool is_there = row_of_token != nullptr ? row_of_token[place] >= 0 : stays[place] != 0;
    of.roles[token] = is_there ? Role::kStays : exits[token] == layer ? Role::kLeaves : Role::kGone;
  }
};

// Writes 1 for the places of tokens that are there in the layer, and 0 for the others.
struct TellsThere {
  RolesOfSegment of;
  uint8_t* is_there;  // [places]

  TFB_HOST_DEVICE void operator()(int64_t place) const {
    is_there[place] = of.At(place) == Role::kGone ? 0 : 1;
  }
};

// Writes the gradients of the outputs of tokens that leave after the layer, and 0 for the others.
struct GradientsOfLeaving {
  RolesOfSegment of;
  DeviceView from;  // [batch, tokens, channels]
  float* to;        // [places, channels]
  int64_t channels;

  template <class Piece>
  TFB_HOST_DEVICE void operator()(int64_t place, const Piece& piece) const {
    const int64_t offset = Offset(from, place / of.tokens, place % of.tokens, 0);
    float x[Piece::kMost];
    if (of.At(place) == Role::kLeaves) {
      piece.Load(from, offset, from.strides[2], x);
    } else {
      for (int i = 0; i < piece.count(); ++i) x[i] = 0;
    }
    float* const row = to + place * channels + piece.first();
    for (int i = 0; i < piece.count(); ++i) row[i] = x[i];
  }
};

// Moves the gradients of tokens that left before the layer to `passing`, so that they are 0 for the
// layer.
struct HoldBackGone {
  RolesOfSegment of;
  DeviceView gradient;  // f32 [batch, tokens, channels]
  float* passing;       // [places, channels], of which their rows are written
  int64_t channels;

  template <class Piece>
  TFB_HOST_DEVICE void operator()(int64_t place, const Piece& piece) const {
    if (of.At(place) != Role::kGone) return;
    const int64_t offset = Offset(gradient, place / of.tokens, place % of.tokens, 0);
    float x[Piece::kMost];
    piece.Load(gradient, offset, gradient.strides[2], x);
    float* const row = passing + place * channels + piece.first();
    for (int i = 0; i < piece.count(); ++i) {
      row[i] = x[i];
      x[i] = 0;
    }
    piece.Store(x, gradient, offset, gradient.strides[2]);
  }
};

// Adds them, behind the layer, to what such tokens have as keys of it.
struct LetGonePass {
  RolesOfSegment of;
  DeviceView gradient;
  const float* passing;
  int64_t channels;

  template <class Piece>
  TFB_HOST_DEVICE void operator()(int64_t place, const Piece& piece) const {
    if (of.At(place) != Role::kGone) return;
    const int64_t offset = Offset(gradient, place / of.tokens, place % of.tokens, 0);
    float x[Piece::kMost];
    piece.Load(gradient, offset, gradient.strides[2], x);
    const float* const row = passing + place * channels + piece.first();
    for (int i = 0; i < piece.count(); ++i) x[i] += row[i];
    piece.Store(x, gradient, offset, gradient.strides[2]);
  }
};

}  // namespace tfb::layers

#endif  // TFB_CORE_LAYERS_EXITS_EXIT_STACK_FUNCTORS_H_
