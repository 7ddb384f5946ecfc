// SPDX-License-Identifier: Apache-2.0
//
// A small head's greedy rollout in float32; see native.py.
//
// Shapes: B requests, K drafts, G GRU, E bottleneck, V vocabulary. Weights are laid out
// in tiles of kTile outputs, (tiles, in, kTile), so that a product reads straight on.

#include <ATen/cpu/vec/functional.h>
#include <ATen/cpu/vec/vec.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

namespace {

using Vec = at::vec::Vectorized<float>;
constexpr int64_t kLanes = Vec::size();
constexpr int64_t kTile = 64;
constexpr int64_t kParts = kTile / kLanes;
// Requests whose sums fit in a core's registers together.
constexpr int64_t kTogether = 4;
constexpr float kLowest = -std::numeric_limits<float>::infinity();

struct Head {
  const float* gates;   // (V, 3 G) W_ih times each token's embedding
  const float* joint;   // W_hh, and the part of W1 that multiplies the state
  const float* vocab;   // W2
  int64_t gru;
  int64_t bottleneck;
  int64_t vocab_size;
  int64_t prefix;       // leading drafts that keep their base logits
};

template <int R>
using Sums = Vec[R][kParts];

// One tile of R requests' products: inputs (R, width).
template <int R>
inline void multiply(
    const float* inputs, int64_t width, const float* weight, Sums<R>& sums) {
  for (int r = 0; r < R; ++r)
    for (int p = 0; p < kParts; ++p) sums[r][p] = Vec(0.f);
  for (int64_t i = 0; i < width; ++i) {
    Vec row[kParts];
    for (int p = 0; p < kParts; ++p)
      row[p] = Vec::loadu(weight + i * kTile + p * kLanes);
    for (int r = 0; r < R; ++r) {
      const Vec input(inputs[r * width + i]);
      for (int p = 0; p < kParts; ++p)
        sums[r][p] = at::vec::fmadd(input, row[p], sums[r][p]);
    }
  }
}

inline Vec sigmoid(const Vec& x) { return Vec(1.f) / (Vec(1.f) + x.neg().exp()); }

// The GRU's cell. gates: W_ih x; recurrent: W_hh h; state: h, replaced.
inline void advance(
    const float* gates, const float* recurrent, float* state, int64_t gru) {
  for (int64_t j = 0; j < gru; j += kLanes) {
    const auto at = [j](const float* from) { return Vec::loadu(from + j); };
    const Vec reset = sigmoid(at(recurrent) + at(gates));
    const Vec update = sigmoid(at(recurrent + gru) + at(gates + gru));
    const Vec fresh =
        (at(gates + 2 * gru) + at(recurrent + 2 * gru) * reset).tanh();
    ((at(state) - fresh) * update + fresh).store(state + j);
  }
}

struct Best {
  float score = kLowest;
  int64_t token = 0;

  // Takes in `count` tokens from `first` on. Of equals the first wins, and what is not
  // a number wins over all, as in torch.
  void take(const float* scores, int64_t count, int64_t first, const Vec& largest) {
    const float most = at::vec::vec_reduce_all<float>(
        [](const Vec& a, const Vec& b) { return at::vec::maximum(a, b); }, largest,
        kLanes);
    if (most <= score || std::isnan(score)) return;
    for (int64_t i = 0; i < count; ++i) {
      if (scores[i] == most || std::isnan(scores[i])) {
        score = scores[i];
        token = first + i;
        return;
      }
    }
  }
};

// Adds a tile's base logits, of which the last tile has fewer, and takes its best in.
inline void compare(
    Vec (&sums)[kParts], const float* base, int64_t count, int64_t first, Best& best) {
  alignas(64) float scores[kTile];
  if (count < kTile) {
    std::fill(scores, scores + kTile, kLowest);
    std::copy(base, base + count, scores);
    base = scores;
  }
  Vec largest(kLowest);
  for (int p = 0; p < kParts; ++p) {
    sums[p] = sums[p] + Vec::loadu(base + p * kLanes);
    sums[p].store(scores + p * kLanes);
    largest = at::vec::maximum(largest, sums[p]);
  }
  best.take(scores, count, first, largest);
}

// Drafts R blocks. projected: (R, K, E); base: (R, K, V); bonus: (R,); drafts: (R, K).
template <int R>
void draft_together(
    const Head& head, int64_t num_drafts, const float* projected, const float* base,
    const int64_t* bonus, int64_t* drafts) {
  const int64_t gru = head.gru, width = head.bottleneck;
  // In whole tiles.
  const int64_t joint_width = (3 * gru + width + kTile - 1) / kTile * kTile;
  std::vector<float> states(R * gru), joint(R * joint_width), inner(R * width);
  Sums<R> sums;
  for (int64_t i = 0; i < num_drafts; ++i) {
    for (int r = 0; r < R; ++r) {
      const int64_t token = i ? drafts[r * num_drafts + i - 1] : bonus[r];
      advance(
          head.gates + token * 3 * gru, &joint[r * joint_width], &states[r * gru], gru);
    }
    for (int64_t first = 0; first < joint_width; first += kTile) {
      multiply<R>(states.data(), gru, head.joint + first * gru, sums);
      for (int r = 0; r < R; ++r)
        for (int p = 0; p < kParts; ++p)
          sums[r][p].store(&joint[r * joint_width + first + p * kLanes]);
    }
    for (int r = 0; r < R; ++r) {
      for (int64_t j = 0; j < width; j += kLanes) {
        const Vec x = Vec::loadu(projected + (r * num_drafts + i) * width + j) +
            Vec::loadu(&joint[r * joint_width + 3 * gru + j]);
        (x * sigmoid(x)).store(&inner[r * width + j]);
      }
    }
    Best best[R];
    for (int64_t first = 0; first < head.vocab_size; first += kTile) {
      // No correction is a correction by nothing.
      const int64_t inputs = i < head.prefix ? 0 : width;
      multiply<R>(inner.data(), inputs, head.vocab + first * width, sums);
      const int64_t count = std::min(kTile, head.vocab_size - first);
      for (int r = 0; r < R; ++r) {
        const int64_t row = r * num_drafts + i;
        compare(
            sums[r], base + row * head.vocab_size + first, count, first, best[r]);
      }
    }
    for (int r = 0; r < R; ++r) drafts[r * num_drafts + i] = best[r].token;
  }
}

}  // namespace

extern "C" {

int64_t lanes() { return kLanes; }
int64_t tile() { return kTile; }

void draft(
    const Head* head, int64_t num_reqs, int64_t num_drafts, const float* projected,
    const float* base, const int64_t* bonus, int64_t* drafts) {
#pragma omp parallel for if (num_reqs > kTogether)
  for (int64_t first = 0; first < num_reqs; first += kTogether) {
    const int64_t count = std::min(kTogether, num_reqs - first);
    const auto together = count == 4 ? draft_together<4>
        : count == 3                 ? draft_together<3>
        : count == 2                 ? draft_together<2>
                                     : draft_together<1>;
    together(
        *head, num_drafts, projected + first * num_drafts * head->bottleneck,
        base + first * num_drafts * head->vocab_size, bonus + first,
        drafts + first * num_drafts);
  }
}

}  // extern "C"
