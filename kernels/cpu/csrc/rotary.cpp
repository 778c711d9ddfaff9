// Norms, rotation and cache write of a step's heads.

#include <cstdint>

#include "rotary.h"

extern "C" {

// Returns a `Result`. Nothing is read or written unless all slots are within the cache.
int folio_rotary_write(const RotaryCall* call) {
  using namespace folio;
  if (const Result result = check(*call)) return result;
  const int64_t elements = int64_t(call->num_tokens) * (call->num_q_heads + call->num_kv_heads) * call->dim;
  with_type(call->dtype, [&](auto type) {
    in_team(elements > kParallelElements, 1, [&](Team& team) { rotary_write<decltype(type)>(team, *call); });
  });
  return kDone;
}

}  // extern "C"
