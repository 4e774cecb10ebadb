// Which warp of the wgmma forward does what: a type for each role, with run().
#pragma once

#include <type_traits>

#include "kernels/sm90/fwd_launch_params.h"
#include "kernels/sm90/fwd_producer.h"
#include "kernels/sm90/paged_loader.h"

namespace flash {
namespace sm90 {

template <class Config>
struct NoRole {
  __device__ __forceinline__ NoRole(const FwdLaunch&, FwdStorage<Config>&) {}
  __device__ __forceinline__ void run() const {}
};

// The producer warps of a consumer group: 0 Load, 1 Scheduler, 2 ColumnBits, Bias or PagedK, 3 PagedV with pages and
// Store without. Two consumer groups have warps 0 and 1 each.
template <class Config>
struct FwdRoles {
  static constexpr int kWarps = 4 / Config::kConsumerGroups;
  template <bool kHasRole, class Role>
  using If = std::conditional_t<kHasRole, Role, NoRole<Config>>;

  using Load = FwdProducer<Config>;
  using Scheduler = SchedulerWarp<Config>;
  using ColumnBits = If<Config::kPackedDropout, ColumnBitsWarp<Config>>;
  using Bias = If<(Config::kTile.bias_stages > 0), BiasWarp<Config>>;
  using Store = If<Config::kHasStoreWarp, StoreWarp<Config>>;
  using PagedK = If<Config::kHasPages, PagedLoader<Config, kK>>;
  using PagedV = If<Config::kHasPages, PagedLoader<Config, kV>>;
};

}  // namespace sm90
}  // namespace flash
