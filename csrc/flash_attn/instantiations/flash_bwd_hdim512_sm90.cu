#include "instantiations/dtypes.h"
#include "kernels/sm90/wide_bwd/launch.h"

FLASH_INSTANTIATE(run_mha_bwd_wgmma_, 512)
