#if defined(__x86_64__)
#include "headers.h"

#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx512bf16,fma,f16c")
#define ISA_AVX512BF16

namespace avx512bf16 {
#include "isa_body.h"
}
#endif
