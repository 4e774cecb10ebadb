#include "instantiations/dtypes.h"
#include "kernels/sm90/fwd_listed_launch.h"

FLASH_INSTANTIATE(run_mha_fwd_listed_wgmma_, 256)
