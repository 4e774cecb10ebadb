#pragma once

#include <cute/tensor.hpp>
