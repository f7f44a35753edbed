// Which variants of the kernels this processor runs.
#pragma once

#include <vector>

#include "table.hpp"

namespace k3 {

// Best last; the portable variant is always there.
std::vector<const Table*> available_tables();

}  // namespace k3
