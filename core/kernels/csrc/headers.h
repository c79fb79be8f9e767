// What every isa_*.cpp includes before it raises its target.
#pragma once

#include <float.h>
#include <math.h>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <type_traits>

#include <omp.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "args.h"
#include "team.h"
