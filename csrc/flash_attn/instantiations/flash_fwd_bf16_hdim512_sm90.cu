#include "instantiations/dtypes.h"
#include "kernels/sm90/wide_fwd_launch.h"

FLASH_INSTANTIATE_BF16(run_mha_fwd_wgmma_, 512)
