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

// The producer warps of a consumer group. Two consumer groups have a load and a scheduler warp each.
template <class Config>
struct FwdRoles {
  static constexpr int kWarps = 4 / Config::kConsumerGroups;
  template <bool kHasRole, class Role>
  using If = std::conditional_t<kHasRole, Role, NoRole<Config>>;

  using Load = FwdProducer<Config>;
  using Scheduler = SchedulerWarp<Config>;
  using ColumnBits = If<Config::kPackedDropout, ColumnBitsWarp<Config>>;
  using Store = If<Config::kHasStoreWarp, StoreWarp<Config>>;
  using PagedK = If<Config::kHasPages, PagedLoader<Config, kK>>;
  using PagedV = If<Config::kHasPages, PagedLoader<Config, kV>>;

  // Separate tests, each with a load of is_paged(): nested ones, or one load, change how ptxas orders the loops.
  __device__ __forceinline__ static void run(const FwdLaunch& launch, FwdStorage<Config>& storage, int consumer_group,
                                             int warp) {
    if (warp == kLoadWarp) Load{launch, storage}.run();
    if (warp == kSchedulerWarp) Scheduler{launch, storage, consumer_group}.run();
    if (warp == 2) ColumnBits{launch, storage}.run();
    if (!launch.params.is_paged() && warp == 3) Store{launch, storage}.run();
    if (launch.params.is_paged() && warp == 2) PagedK{launch, storage}.run();
    if (launch.params.is_paged() && warp == 3) PagedV{launch, storage}.run();
  }
};

}  // namespace sm90
}  // namespace flash
