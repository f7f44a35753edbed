#include "cpu.hpp"

namespace k3 {

std::vector<const Table*> available_tables() {
  std::vector<const Table*> tables{scalar_table()};
#ifdef K3_X86
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
    tables.push_back(avx2_table());
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
      tables.push_back(avx512_table());
  }
#endif
  return tables;
}

}  // namespace k3
