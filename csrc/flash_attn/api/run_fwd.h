// Which family of kernels runs a forward, and its launch.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/cuda/CUDAStream.h>

#include <algorithm>
#include <cstdlib>
#include <optional>
#include <string>

#include "api/allocate.h"
#include "api/launch_check.h"
#include "api/prepare.h"
#include "core/static_switch.h"
#include "params/flash.h"
#include "plan/family.h"
#include "plan/fwd_shape.h"
#include "plan/grid.h"
#include "plan/tiles.h"

namespace flash {

// Whether the choice hands out work tiles by a semaphore.
inline bool uses_dynamic_scheduler(const Flash_fwd_params& params, const plan::FamilyChoice& choice) {
  const bool uneven = params.window.right != kUnbounded || params.keys_packed();
  const int64_t tiles = params.h * plan::m_blocks(params.is_varlen(), params.b, params.seqlen_q, 128);
  return choice.family == plan::Family::kWgmma &&
         plan::sm90_dynamic_scheduler(params.max_head_dim(), uneven, choice.num_splits * tiles, params.multiprocessors);
}

// Dropout takes the keys as they are.
inline bool may_split_kv(const Flash_fwd_params& params) {
  const plan::FwdVariant variant = params.has_score_mod ? plan::FwdVariant::kScoreMod : plan::FwdVariant::kOneWave;
  const plan::Sm90FwdTile tile = plan::sm90_fwd_tile(plan::wgmma_head_dim(params.max_head_dim()), variant);
  const bool reads_keys = !params.is_paged() || plan::sm90_reads_pages(tile, variant);
  return !params.has_dropout && reads_keys && fwd_shape(params).all_rows() <= kMaxLength;
}

// The kernels of the KV cache have neither of these, and count packed rows in 32 bits.
inline bool may_use_decode_kernels(const Flash_fwd_params& params) {
  const int64_t rows = static_cast<int64_t>(params.is_varlen() ? 1 : params.b) * params.seqlen_q;
  return !params.has_dropout && params.sinks_ptr == nullptr && params.max_logit_ptr == nullptr &&
         rows * params.h_h_k_ratio <= kMaxLength;
}

// FLASH_ATTN_FAMILY for the call of this thread. Reads the environment where it is made, which has to be under the GIL:
// os.environ changes the environment under it, and other threads' calls run without it. Copied, for a change frees it.
class ForcedFamily {
 public:
  ForcedFamily() {
    if (const char* value = std::getenv("FLASH_ATTN_FAMILY")) value_ = value;
    current_ = this;
  }
  ~ForcedFamily() { current_ = nullptr; }
  ForcedFamily(const ForcedFamily&) = delete;
  ForcedFamily& operator=(const ForcedFamily&) = delete;

  // Null: not set.
  static const char* current() { return current_ != nullptr && current_->value_ ? current_->value_->c_str() : nullptr; }

 private:
  std::optional<std::string> value_;
  static inline thread_local const ForcedFamily* current_ = nullptr;
};

inline const char* forced_family() { return ForcedFamily::current(); }

inline plan::FamilyChoice choose_family(const Flash_fwd_params& params) {
  const plan::FamilyQuery query = plan::family_query(fwd_shape(params), compute_capability(params.device),
                                                     may_use_decode_kernels(params), may_split_kv(params));
  return plan::choose_family(query, forced_family());
}

// What the wgmma family takes: `workspace` holds the results of the shares, if there are several.
inline Flash_fwd_split_params set_splits(const Flash_fwd_params& params, const plan::FamilyChoice& choice,
                                         const at::Tensor& q, at::Tensor& workspace) {
  Flash_fwd_split_params shared;
  static_cast<Flash_fwd_params&>(shared) = params;
  shared.is_one_wave = choice.is_one_wave;
  shared.follows_prepare = params.is_varlen() || params.tile_count_semaphore != nullptr;
  KvSplits& splits = shared.splits;
  const int count = choice.num_splits;
  splits.count = count;
  if (count == 1) return shared;
  splits.rows = fwd_shape(params).all_rows();
  const int64_t results = count * splits.rows;
  workspace = new_empty(q, {results * (params.d_v + 1)}, at::kFloat);
  splits.out_ptr = workspace.mutable_data_ptr<float>();
  splits.lse_ptr = splits.out_ptr + results * params.d_v;
  return shared;
}

template <Dtype kDtype, int kHeadDim>
cudaError_t run_mha_fwd_wgmma(const Flash_fwd_split_params& params, cudaStream_t stream) {
  constexpr plan::Sm90FwdTile kPair = plan::kSm90ValueDimTile;
  if constexpr (kHeadDim == kPair.head_dim) {
    if (plan::is_value_dim_pair(params.d, params.d_v)) {
      const cudaError_t status = run_mha_fwd_wgmma_<kDtype, kPair.head_dim, kPair.value_dim()>(params, stream);
      if (status != cudaErrorNotSupported) return status;
    }
  }
  return run_mha_fwd_wgmma_<kDtype, plan::wgmma_head_dim(kHeadDim)>(params, stream);
}

template <Dtype kDtype, int kHeadDim>
cudaError_t run_mha_fwd_family(const plan::FamilyChoice& choice, const Flash_fwd_params& params, const at::Tensor& q,
                               cudaStream_t stream) {
  if (choice.family == plan::Family::kWgmma) {
    at::Tensor workspace;
    const Flash_fwd_split_params shared = set_splits(params, choice, q, workspace);
    cudaError_t status = run_mha_fwd_wgmma<kDtype, kHeadDim>(shared, stream);
    if (status == cudaSuccess && shared.splits.count > 1) status = run_fwd_combine_<kDtype>(shared, stream);
    if (status != cudaErrorNotSupported) return status;
  }
  return params.d == params.d_v ? run_mha_fwd_<kDtype, kHeadDim>(params, stream) : cudaErrorNotSupported;
}

// False: the head dims differ and the family does not serve them; nothing was launched.
inline bool run_mha_fwd(const plan::FamilyChoice& choice, Flash_fwd_params& params, const at::Tensor& q) {
  const cudaStream_t stream = c10::cuda::getCurrentCUDAStream().stream();
  at::Tensor workspace;
  check_launch(prepare(params, uses_dynamic_scheduler(params, choice), q, workspace), "prepare_kernel", q);
  const bool is_fp16 = q.scalar_type() == at::kHalf;
  const cudaError_t status = FP16_SWITCH(is_fp16, [&] {
    return HEADDIM_SWITCH(params.max_head_dim(),
                          [&] { return run_mha_fwd_family<kDtype, kHeadDim>(choice, params, q, stream); });
  });
  if (status == cudaErrorNotSupported && params.d != params.d_v) return false;
  check_launch(status, "flash_fwd_kernel", q);
  if (params.p_ptr != nullptr) {
    check_launch(FP16_SWITCH(is_fp16, [&] { return run_dropout_probs_<kDtype>(params, stream); }),
                 "dropout_probs_kernel", q);
  }
  return true;
}

}  // namespace flash
