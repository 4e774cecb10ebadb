#include "instantiations/dtypes.h"
#include "kernels/decode/wgmma_launch.h"

FLASH_INSTANTIATE(run_mha_fwd_split_wgmma_, 64)
