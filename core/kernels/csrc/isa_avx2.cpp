#if defined(__x86_64__)
#include "headers.h"

#pragma GCC target("avx2,fma,f16c")
#define ISA_AVX2

namespace avx2 {
#include "isa_body.h"
}
#endif
