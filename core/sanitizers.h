// Tells with which sanitizers this is compiled, by g++ or clang++: 0 or 1 for #if, and a constant for the rest.
#ifndef TFB_CORE_SANITIZERS_H_
#define TFB_CORE_SANITIZERS_H_

#if defined(__has_feature)  // clang's
#define TFB_HAS_FEATURE(feature) __has_feature(feature)
#else
#define TFB_HAS_FEATURE(feature) 0
#endif

#if defined(__SANITIZE_ADDRESS__) || TFB_HAS_FEATURE(address_sanitizer)
#define TFB_ADDRESS_SANITIZER 1
#else
#define TFB_ADDRESS_SANITIZER 0
#endif

#if defined(__SANITIZE_THREAD__) || TFB_HAS_FEATURE(thread_sanitizer)
#define TFB_THREAD_SANITIZER 1
#else
#define TFB_THREAD_SANITIZER 0
#endif

#undef TFB_HAS_FEATURE

namespace tfb {

// A sanitizer has memory of its own: shadows and freed blocks that it keeps, which no limit has room for. It ends the
// process where an allocation fails that would throw.
constexpr bool kIsSanitized = TFB_ADDRESS_SANITIZER != 0 || TFB_THREAD_SANITIZER != 0;

}  // namespace tfb

#endif  // TFB_CORE_SANITIZERS_H_
