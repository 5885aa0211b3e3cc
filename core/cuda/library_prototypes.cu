// Holds our declarations of the functions of libraries that are opened at run time against the
// libraries' own headers, where the toolkit has them. That it compiles is the test.
#include <stdint.h>

#include <type_traits>

#include "core/cuda/cublas_functions.h"

namespace tfb {
namespace {

// Passed alike: pointers as pointers, enumerations and integers of the same size.
template <class A, class B>
constexpr bool kPassedAlike =
    sizeof(A) == sizeof(B) && std::is_pointer<A>::value
                                  == std::is_pointer<B>::value&& std::is_floating_point<A>::value
                                  == std::is_floating_point<B>::value;

template <class A, class B>
struct Alike : std::false_type {};  // different numbers of parameters
template <class A, class B>
struct Alike<A (*)(), B (*)()> : std::bool_constant<kPassedAlike<A, B>> {};
template <class A, class FirstA, class... RestA, class B, class FirstB, class... RestB>
struct Alike<A (*)(FirstA, RestA...), B (*)(FirstB, RestB...)>
    : std::bool_constant<kPassedAlike<FirstA, FirstB> &&
                         Alike<A (*)(RestA...), B (*)(RestB...)>::value> {};

// A pointer to a function of ours, and the library's function.
template <class Ours, class Theirs>
constexpr bool kSameCall = Alike<Ours, Theirs*>::value;

}  // namespace
}  // namespace tfb

#if __has_include(<cublas_v2.h>)
#include <cublas_v2.h>

namespace tfb {

using Cublas = CublasFunctions;
static_assert(kCublasSuccess == CUBLAS_STATUS_SUCCESS);
static_assert(kCublasNoTranspose == CUBLAS_OP_N);
static_assert(kSameCall<decltype(Cublas::create), decltype(cublasCreate_v2)>);
static_assert(kSameCall<decltype(Cublas::get_version), decltype(cublasGetVersion_v2)>);
static_assert(kSameCall<decltype(Cublas::set_stream), decltype(cublasSetStream_v2)>);
static_assert(kSameCall<decltype(Cublas::set_workspace), decltype(cublasSetWorkspace_v2)>);
static_assert(kSameCall<decltype(Cublas::status_string), decltype(cublasGetStatusString)>);
static_assert(kSameCall<decltype(Cublas::sgemm), decltype(cublasSgemm_v2_64)>);
// The check itself: a parameter more, or of another size, is another call.
static_assert(!kSameCall<decltype(Cublas::create), decltype(cublasGetVersion_v2)>);
static_assert(!kSameCall<decltype(Cublas::sgemm), decltype(cublasSgemm_v2)>);

}  // namespace tfb
#endif
