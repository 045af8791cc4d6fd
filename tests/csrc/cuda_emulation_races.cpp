// Who touched what: finds reads and writes of one word that nothing orders. Defines the hooks of
// -fsanitize=thread, without which it is compiled.
#include "cuda_emulation_state.h"

namespace cuda_emulation {
namespace {

bool is_before_now(const Touch& touch, const Thread& now, bool in_shared) {
  if (touch.block < (in_shared ? machine.serial : machine.first_serial)) return true;
  if (touch.block != machine.serial) return false;
  if (touch.thread == now.number || touch.epoch < machine.epoch) return true;
  return touch.thread / 32 == now.warp && touch.clock <= now.clock[touch.thread % 32];
}

void check_race(const Touch& earlier, const Touch& now, const char* was, const char* is,
                bool in_shared, const void* at) {
  if (!(earlier.bytes & now.bytes) || (earlier.is_atomic && now.is_atomic)) return;
  if (is_before_now(earlier, *machine.current, in_shared)) return;
  const std::string whose = earlier.block == machine.serial
                                ? "thread " + std::to_string(earlier.thread) + " of the same block"
                                : "another block";
  fail("race in " + std::string(in_shared ? "shared" : "global") + " memory: " +
           place(*machine.current) + is + " what " + whose + was + " with no barrier between",
       at);
}

Word* words_of_page(uintptr_t page) {
  if (page != machine.last_page || !machine.last_words) {
    auto& words = machine.pages[page];
    if (!words) words.reset(new Word[1024]);
    machine.last_page = page;
    machine.last_words = words.get();
  }
  return machine.last_words;
}

void touch_word(Word& word, uint8_t bytes, bool in_shared, Access access, const void* at) {
  const Thread& t = *machine.current;
  const bool is_atomic = access == Access::kAtomic;
  const Touch now{machine.serial,  machine.epoch, t.clock[t.lane],
                  static_cast<uint16_t>(t.number), bytes, is_atomic};
  const uint8_t filled = word.filled_block == machine.serial ? word.filled : 0;
  if (access != Access::kWrite && in_shared && (bytes & ~filled)) {
    fail("read of shared memory that the block has not written, by " + place(t), at);
  }
  if (access == Access::kConstantRead && word.write.block >= machine.first_serial) {
    fail("__ldg of what the same launch writes, by " + place(t), at);
  }
  const bool is_write = access == Access::kWrite || is_atomic;
  check_race(word.write, now, " wrote", is_write ? " writes" : " reads", in_shared, at);
  if (!is_write) {
    const bool is_beside = word.read.block == now.block && word.read.thread / 32 == now.thread / 32;
    if (!is_beside) {
      word.other_warp = word.read;
    } else if (word.read.thread != now.thread) {
      word.other_lane = word.read;
    }
    word.read = now;
    return;
  }
  for (const Touch* read : {&word.read, &word.other_lane, &word.other_warp}) {
    check_race(*read, now, " read", " writes", in_shared, at);
  }
  word.write = now;
  word.filled_block = machine.serial;
  word.filled = filled | bytes;
}

void touch(const void* address, size_t bytes, Access access, const void* at) {
  if (!machine.current) return;
  const auto* from = static_cast<const char*>(address);
  if (machine.is_private(from)) return;
  const bool in_shared = from >= machine.shared && from < machine.shared + kSharedBytes;
  const auto shared = reinterpret_cast<uintptr_t>(machine.shared);
  const auto begin = reinterpret_cast<uintptr_t>(from), end = begin + bytes;
  for (uintptr_t word = begin & ~uintptr_t{3}; word < end; word += 4) {
    uint8_t mask = 15;
    if (word < begin) mask &= static_cast<uint8_t>(15 << (begin - word));
    if (word + 4 > end) mask &= static_cast<uint8_t>(15 >> (word + 4 - end));
    Word& record = in_shared ? machine.shared_words[(word - shared) / 4]
                             : words_of_page(word >> 12)[(word >> 2) & 1023];
    touch_word(record, mask, in_shared, access, at);
  }
}

}  // namespace

void note_access(const void* address, size_t bytes, Access access) {
  touch(address, bytes, access, __builtin_return_address(0));
}

void copy_unseen(void* to, const void* from, size_t bytes) { std::memcpy(to, from, bytes); }

}  // namespace cuda_emulation

// The hooks of -fsanitize=thread.
#define TT_HOOK_(name, bytes, access)                                                            \
  extern "C" void __tsan_##name(void* address) {                                                 \
    cuda_emulation::touch(address, bytes, cuda_emulation::Access::access,                        \
                          __builtin_return_address(0));                                          \
  }
#define TT_HOOKS_(bytes)                                                                         \
  TT_HOOK_(read##bytes, bytes, kRead)                                                            \
  TT_HOOK_(write##bytes, bytes, kWrite)
TT_HOOKS_(1)
TT_HOOKS_(2)
TT_HOOKS_(4)
TT_HOOKS_(8)
TT_HOOKS_(16)
extern "C" {
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_vptr_update(void*, void*) {}
void __tsan_vptr_read(void*) {}
void __tsan_read_range(void* address, size_t bytes) {
  cuda_emulation::touch(address, bytes, cuda_emulation::Access::kRead, __builtin_return_address(0));
}
void __tsan_write_range(void* address, size_t bytes) {
  cuda_emulation::touch(address, bytes, cuda_emulation::Access::kWrite,
                        __builtin_return_address(0));
}
}
