#if defined(__x86_64__)
#include "headers.h"

#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,fma,f16c")
#define ISA_AVX512

namespace avx512 {
#include "isa_body.h"
}
#endif
