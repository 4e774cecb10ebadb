#include "instantiations/dtypes.h"
#include "kernels/decode/launch.h"

FLASH_INSTANTIATE_8BIT(run_mha_fwd_split_, 128)
