#include "instantiations/dtypes.h"
#include "kernels/sm90/fwd_launch.h"

FLASH_INSTANTIATE(run_mha_fwd_wgmma_, 96)
