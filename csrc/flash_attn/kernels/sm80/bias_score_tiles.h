// Which tiles of scores a thread block of the gradients of biases adds.
#pragma once

#include "core/bias_tiles.h"
#include "kernels/common/mask.h"
#include "kernels/common/origin.h"
#include "kernels/common/sequence.h"
#include "params/bias.h"

namespace flash {
namespace sm80 {

// One after the other. By all lanes of a warp together.
struct ScoreTiles {
  static constexpr int kBlockM = BiasTiles::kBlockM, kBlockN = BiasTiles::kBlockN;

  const BiasGradientParams& params;
  const BiasTiles::Owner owner;
  int64_t item, end;
  WorkTile at;
  int key_begin = 0, key_end = 0;  // of the tile; where tiles of the item no longer begin
  bool done = false;

  __device__ ScoreTiles(const BiasGradientParams& params_, const BiasTiles::Owner& owner_, int64_t chunk)
      : params(params_),
        owner(owner_),
        item(params_.tiles.first_item(chunk) - 1),
        end(params_.tiles.first_item(chunk + 1)) {
    next();
  }

  __device__ static WorkTile rows_of(const BiasGradientParams& params, const BiasTiles::Owner& at) {
    const Flash_bwd_params& call = params.call;
    const int m_block = static_cast<int>(at.m_block), head = static_cast<int>(at.head);
    if (call.is_varlen()) return varlen_work_tile(call, kBlockM, head, m_block);
    const int from_last = static_cast<int>(params.tiles.m_blocks) - 1 - m_block;
    return equal_work_tile(call, kBlockM, static_cast<int>(at.batch), head, from_last);
  }

  __device__ Visibility window() const { return {at.seqlen_q, at.seqlen_k, params.call.window}; }
  __device__ int diagonal() const { return alibi_diagonal(params.call, at.batch, window(), at.row_begin); }

  __device__ void open() {
    const BiasTiles::Owner where = params.tiles.item(owner, item);
    at = rows_of(params, where);
    key_begin = static_cast<int>(where.n_block) * kBlockN;
    key_end = min(key_begin + 1, at.seqlen_k);
    if (params.tiles.of_table) {
      const BiasTiles::Keys keys = params.tiles.keys_of_class(where.n_block, diagonal(), at.seqlen_k);
      key_begin = keys.begin;
      key_end = keys.end;
    }
    if (at.empty()) key_end = key_begin;
  }

  __device__ bool is_visible() const {
    const Visibility mask = window();
    return mask.key_end(at.row_end - 1) > key_begin && mask.key_begin(at.row_begin) < key_begin + kBlockN;
  }

  __device__ void next() {
    do {
      key_begin += kBlockN;
      while (key_begin >= key_end) {
        if (++item >= end) {
          done = true;
          return;
        }
        open();
      }
    } while (!is_visible());
  }
};

}  // namespace sm80
}  // namespace flash
