#if defined(__x86_64__)
#include "headers.h"

#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,fma,f16c")
#define ISA_AVX512VNNI

namespace avx512vnni {
#include "isa_body.h"
}
#endif
