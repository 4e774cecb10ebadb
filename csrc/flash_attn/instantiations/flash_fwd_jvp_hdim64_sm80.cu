#include "instantiations/dtypes.h"
#include "kernels/sm80/jvp_fwd_launch.h"

FLASH_INSTANTIATE(run_mha_fwd_jvp_, 64)
