#include "headers.h"

namespace portable {
#include "isa_body.h"
}
