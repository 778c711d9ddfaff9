// Block copies between two tensors, or within one, in one pass.

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "team.h"

extern "C" {

// Mirrored field by field in kernels/blocks.py.
struct CopyCall {
  const char* source;
  char* target;
  const int64_t *source_rows, *target_rows;  // [count]
  int64_t source_stride, target_stride, row_bytes, count;  // bytes
};

void folio_copy_blocks(const CopyCall* call) {
  constexpr int64_t kPiece = 1 << 16;  // bytes; a few long blocks are split between all processors
  const int64_t pieces = (call->row_bytes + kPiece - 1) / kPiece, total = call->count * pieces;
  folio::for_each(call->count * call->row_bytes > 4 * kPiece, total, [&](int64_t i) {
    const int64_t row = i / pieces, at = i % pieces * kPiece;
    std::memcpy(call->target + call->target_rows[row] * call->target_stride + at,
                call->source + call->source_rows[row] * call->source_stride + at,
                std::min(kPiece, call->row_bytes - at));
  });
}

}  // extern "C"
