// One instruction set's functions: included once for each, with BODY (its namespace) and TARGET (its attribute) set.
#define FUNCTION TARGET static
#define FUNCTION_OF_CLASS TARGET
#define INLINE TARGET static inline __attribute__((always_inline))

namespace BODY {
#include "conversions.h"
#include "sums.h"
#include "updates.h"

static const Bodies bodies = {update, ordered_sum, squares_of_block, sum_of_blocks};
}  // namespace BODY

#undef FUNCTION
#undef FUNCTION_OF_CLASS
#undef INLINE
#undef BODY
#undef TARGET
