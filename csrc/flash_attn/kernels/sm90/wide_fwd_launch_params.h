// Kernel parameters of the wgmma forward of head dims above 256.
#pragma once

#include <cuda.h>

#include "core/fast_div.h"
#include "params/flash.h"
#include "plan/work_tile_order.h"

namespace flash {
namespace sm90 {

struct WideFwdLaunch {
  plan::WorkTileOrder order;
  FastDiv heads_of_batch;  // query heads of a sequence
  FastDiv group;           // query heads per K/V head
  Flash_fwd_params params;
  CUtensorMap q_map, k_map, v_map, o_map;
};

}  // namespace sm90
}  // namespace flash
