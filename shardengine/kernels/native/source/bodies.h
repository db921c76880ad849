// One instruction set's functions: included once for each, with BODY (its namespace) and TARGET (its attribute) set.
#define FUNCTION TARGET static
#define APART TARGET static __attribute__((noinline))  // one copy: half of the time to compile
#define INLINE TARGET static inline __attribute__((always_inline))

namespace BODY {
#include "conversions.h"
#include "moments.h"
#include "sums.h"
#include "updates.h"
#include "factored.h"
#include "copies.h"
#include "compressing.h"

static const Bodies bodies = {
    update, ordered_sum, squares_of_block, sum_of_blocks, squares_of_rows, squares_of_columns, exact_squares, direction_of_rows,
    flatten, compress_floats, compress_blocks, decompress_floats, decompress_blocks,
};
}  // namespace BODY

#undef FUNCTION
#undef APART
#undef INLINE
#undef BODY
#undef TARGET
