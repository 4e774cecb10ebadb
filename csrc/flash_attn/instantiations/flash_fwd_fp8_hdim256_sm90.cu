#include "instantiations/dtypes.h"
#include "kernels/sm90/fp8_fwd_launch.h"

FLASH_INSTANTIATE(run_mha_fwd_fp8_wgmma_, 256)
