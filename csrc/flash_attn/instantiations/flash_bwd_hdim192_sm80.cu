#include "instantiations/dtypes.h"
#include "kernels/sm80/bwd_launch.h"

FLASH_INSTANTIATE(run_mha_bwd_, 192)
