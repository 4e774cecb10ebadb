#include "instantiations/dtypes.h"
#include "kernels/mla/wgmma_launch.h"

FLASH_INSTANTIATE(run_mha_mla_wgmma_, 64, 512)
