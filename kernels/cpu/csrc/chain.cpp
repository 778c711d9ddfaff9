// Prefix hashing: a chain of BLAKE2b digests (RFC 7693, 16 bytes), each of the digest before and a unit's tokens.

#include <algorithm>
#include <cstdint>
#include <cstring>

extern "C" {
// Of CPython, which loads this library; declared here because its headers may be missing. Failures set an exception.
void* PyList_GetItem(void* list, intptr_t index);
long PyLong_AsLong(void* number);
void* PyErr_Occurred();
}

namespace {

constexpr int64_t kDigest = 16, kBlock = 128;
constexpr uint64_t kInitial[8] = {0x6a09e667f3bcc908, 0xbb67ae8584caa73b, 0x3c6ef372fe94f82b, 0xa54ff53a5f1d36f1,
                                  0x510e527fade682d1, 0x9b05688c2b3e6c1f, 0x1f83d9abfb41bd6b, 0x5be0cd19137e2179};
constexpr uint8_t kOrder[10][16] = {{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15},
                                    {14, 10, 4, 8, 9, 15, 13, 6, 1, 12, 0, 2, 11, 7, 5, 3},
                                    {11, 8, 12, 0, 5, 2, 15, 13, 10, 14, 3, 6, 7, 1, 9, 4},
                                    {7, 9, 3, 1, 13, 12, 11, 14, 2, 6, 5, 10, 4, 0, 15, 8},
                                    {9, 0, 5, 7, 2, 4, 10, 15, 14, 1, 11, 12, 6, 8, 3, 13},
                                    {2, 12, 6, 10, 0, 11, 8, 3, 4, 13, 7, 5, 15, 14, 1, 9},
                                    {12, 5, 1, 15, 14, 13, 4, 10, 0, 7, 6, 3, 9, 2, 8, 11},
                                    {13, 11, 7, 14, 12, 1, 3, 9, 5, 0, 15, 4, 8, 6, 2, 10},
                                    {6, 15, 14, 9, 11, 3, 0, 8, 12, 2, 13, 7, 1, 4, 10, 5},
                                    {10, 2, 8, 4, 7, 6, 1, 5, 15, 11, 9, 14, 3, 12, 13, 0}};

inline uint64_t rotated(uint64_t x, int bits) { return x >> bits | x << (64 - bits); }

inline void mix(uint64_t* v, int a, int b, int c, int d, uint64_t x, uint64_t y) {
  v[a] += v[b] + x;
  v[d] = rotated(v[d] ^ v[a], 32);
  v[c] += v[d];
  v[b] = rotated(v[b] ^ v[c], 24);
  v[a] += v[b] + y;
  v[d] = rotated(v[d] ^ v[a], 16);
  v[c] += v[d];
  v[b] = rotated(v[b] ^ v[c], 63);
}

// Compress one block of at most 128 bytes; `count` bytes of the message end with it.
void compress(uint64_t* state, const uint8_t* block, uint64_t count, bool last) {
  uint64_t m[16], v[16];
  std::memcpy(m, block, kBlock);
  for (int i = 0; i < 8; i++) v[i] = state[i], v[i + 8] = kInitial[i];
  v[12] ^= count;
  if (last) v[14] = ~v[14];
#pragma GCC unroll 12
  for (int round = 0; round < 12; round++) {
    const uint8_t* s = kOrder[round % 10];
    mix(v, 0, 4, 8, 12, m[s[0]], m[s[1]]);
    mix(v, 1, 5, 9, 13, m[s[2]], m[s[3]]);
    mix(v, 2, 6, 10, 14, m[s[4]], m[s[5]]);
    mix(v, 3, 7, 11, 15, m[s[6]], m[s[7]]);
    mix(v, 0, 5, 10, 15, m[s[8]], m[s[9]]);
    mix(v, 1, 6, 11, 12, m[s[10]], m[s[11]]);
    mix(v, 2, 7, 8, 13, m[s[12]], m[s[13]]);
    mix(v, 3, 4, 9, 14, m[s[14]], m[s[15]]);
  }
  for (int i = 0; i < 8; i++) state[i] ^= v[i] ^ v[i + 8];
}

}  // namespace

extern "C" {

// token_ids: a Python list of at least units * unit_tokens numbers. The caller holds the interpreter's lock.
// digest: in, of the tokens before the first unit; out, of the last unit.
// names: [units][name_bytes], the beginnings of the digests.
// Returns the index of the first token that is not an integer of 32 bits, or -1.
int64_t folio_hash_chain(void* token_ids, int64_t units, int64_t unit_tokens, uint8_t* digest, uint8_t* names,
                         int64_t name_bytes) {
  for (int64_t unit = 0; unit < units; unit++) {
    uint64_t state[8];
    std::memcpy(state, kInitial, sizeof state);
    state[0] ^= 0x01010000 ^ kDigest;
    uint8_t block[kBlock] = {};
    std::memcpy(block, digest, kDigest);
    int64_t filled = kDigest, count = 0;
    for (int64_t at = unit * unit_tokens; at < (unit + 1) * unit_tokens; at++) {
      if (filled == kBlock) {
        compress(state, block, count += kBlock, false);
        std::memset(block, 0, kBlock);
        filled = 0;
      }
      void* item = PyList_GetItem(token_ids, at);
      const int64_t token = item ? PyLong_AsLong(item) : -1;
      if (token != static_cast<int32_t>(token) || (token == -1 && PyErr_Occurred())) return at;
      const int32_t number = static_cast<int32_t>(token);
      std::memcpy(block + filled, &number, sizeof number);
      filled += sizeof number;
    }
    compress(state, block, count + filled, true);
    std::memcpy(digest, state, kDigest);
    std::memcpy(names + unit * name_bytes, digest, name_bytes);
  }
  return -1;
}

}  // extern "C"
