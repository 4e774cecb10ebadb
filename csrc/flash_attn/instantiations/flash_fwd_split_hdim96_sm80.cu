#include "instantiations/dtypes.h"
#include "kernels/decode/launch.h"

FLASH_INSTANTIATE(run_mha_fwd_split_, 96)
