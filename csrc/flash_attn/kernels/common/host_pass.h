// What a launch header includes for the host pass of nvcc, in place of its kernels.
//
// nvcc parses a file once for the device and once for the host. The host pass needs only a kernel's name and
// parameters; with the kernels' headers, CuTe among them, it takes seven seconds longer. It must see the device
// constants of CuTe and its C++ library, which it registers.
#pragma once

#include <cute/int_tuple.hpp>
#include <cute/underscore.hpp>
