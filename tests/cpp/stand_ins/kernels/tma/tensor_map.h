#pragma once

#include "kernels/tma/tile_copy.h"
