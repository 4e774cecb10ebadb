#include "instantiations/dtypes.h"
#include "kernels/sm90/bwd_launch.h"

FLASH_INSTANTIATE(run_mha_bwd_wgmma_, 128)
