// Kernel parameters of the wgmma backward.
#pragma once

#include <cuda.h>

#include "core/bwd_schedule.h"
#include "kernels/common/sequence.h"
#include "params/flash.h"

namespace flash {
namespace sm90 {

struct BwdLaunch {
  Flash_bwd_params params;
  BwdGrid grid;
  // null: static scheduler. With bands: [0] the next work tile; [band] groups of threads that are done with the band;
  // [bands.count] the next share.
  int* tile_count_semaphore;
  CUtensorMap q_map, do_map, k_map, v_map, dk_map, dv_map;
  CUtensorMap dq_map;            // for DqLocation::kShared
  MaskParams mask;               // of kListed
  CUtensorMap bias_map, ds_map;  // of kBiased
  bool stores_ds;                // by ds_map
  ScoreGradients float_ds;       // null: not stored
  BwdBands bands;
  int preparing_shares;     // of the work of preparing them; 0: softmax_d_kernel() prepares everything
  bool prepares_softmax_d;  // false: softmax_d_kernel() computes all of it
  HeadTiles dq_tiles;
  CUtensorMap o_map;
};

// For either kernel of the two-pass backward.
struct BwdTwoPassLaunch {
  Flash_bwd_params params;
  BwdGrid grid;               // of the dK and dV kernel
  int num_tiles;              // work tiles of the kernel
  int* tile_count_semaphore;  // null: static scheduler
  CUtensorMap q_map, do_map, k_map, v_map;
  MaskParams mask;    // of kListed
  ScoreGradients ds;  // likewise, of the dQ kernel
};

}  // namespace sm90
}  // namespace flash
