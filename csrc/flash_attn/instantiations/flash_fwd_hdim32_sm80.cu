#include "instantiations/dtypes.h"
#include "kernels/sm80/fwd_launch.h"

FLASH_INSTANTIATE(run_mha_fwd_, 32)
