#include "instantiations/dtypes.h"
#include "kernels/sm90/fwd_modified_launch.h"

FLASH_INSTANTIATE(run_mha_fwd_modified_wgmma_, 128)
