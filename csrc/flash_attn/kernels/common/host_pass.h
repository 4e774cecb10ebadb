// What a launch header includes for the host pass of nvcc, in place of its kernels.
//
// nvcc parses a file once for the device and once for the host. The host pass needs a kernel's name and parameters
// alone; with the kernels' headers, CuTe among them, it takes seven seconds longer. It registers the device constants
// that CuTe and its C++ library define, so it has to see these.
#pragma once

#include <cute/int_tuple.hpp>
#include <cute/underscore.hpp>
