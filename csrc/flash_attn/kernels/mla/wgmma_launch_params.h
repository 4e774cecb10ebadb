// Kernel parameters of the wgmma MLA decode kernel.
#pragma once

#include <cuda.h>

#include "params/mla.h"

namespace flash {
namespace mla {

struct MlaWgmmaLaunch {
  Flash_mla_params params;
  CUtensorMap latent_map, rope_map;  // of pages; unused without box_rows
};

}  // namespace mla
}  // namespace flash
