#include "instantiations/dtypes.h"
#include "kernels/sm90/jvp_fwd_launch.h"

FLASH_INSTANTIATE(run_mha_fwd_jvp_wgmma_, 128)
