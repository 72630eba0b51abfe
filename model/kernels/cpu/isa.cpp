// Which instruction sets this process may use: 0 none, 1 AVX2 + FMA, 2 AVX-512 (F, BW, VL, DQ), 3 AMX (bf16 tiles).
// Compiled without any of them.
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdint>

namespace {

struct Cpuid {
  unsigned a = 0, b = 0, c = 0, d = 0;
  Cpuid(unsigned leaf, unsigned subleaf) {
    if (__get_cpuid_max(0, nullptr) >= leaf) __cpuid_count(leaf, subleaf, a, b, c, d);
  }
};

bool has(unsigned word, int bit) { return (word >> bit) & 1u; }

uint64_t saved_registers() {  // XCR0: what the operating system saves when it switches threads
  unsigned low, high;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (uint64_t(high) << 32) | low;
}

bool tiles_granted() {
  constexpr long kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILE_DATA
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

}  // namespace

extern "C" int isa_level() {
  const Cpuid one(1, 0), seven(7, 0), more(7, 1);
  const bool saves = has(one.c, 27);  // OSXSAVE
  if (!saves) return 0;
  const uint64_t saved = saved_registers();
  const bool ymm = (saved & 0x6) == 0x6, zmm = (saved & 0xE6) == 0xE6, tiles = (saved & 0x60000) == 0x60000;
  if (!(ymm && has(one.c, 12) && has(one.c, 29) && has(seven.b, 5) && has(seven.b, 8))) return 0;  // FMA F16C AVX2 BMI2
  if (!(zmm && has(seven.b, 16) && has(seven.b, 17) && has(seven.b, 30) && has(seven.b, 31))) return 1;  // F DQ BW VL
  const bool amx = tiles && has(seven.c, 1) && has(more.a, 5) && has(seven.d, 22) && has(seven.d, 24);  // VBMI BF16
  return amx && tiles_granted() ? 3 : 2;
}
