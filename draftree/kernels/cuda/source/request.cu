// A request's words; kernels/cuda/request.py says where each lies and defines the names.
DEV u64 word_pair(const int* words, int at) {
  return static_cast<u64>(static_cast<u32>(words[at + 1])) << 32 | static_cast<u32>(words[at]);
}

DEV double word_double(const int* words, int at) { return __longlong_as_double(word_pair(words, at)); }

DEV float temperature_of(const int* words) { return __int_as_float(words[TEMPERATURE]); }

DEV bool is_running(const int* words) { return words[ENDED] == ENDED_BY_RUNNING; }
