// Included before the binding, so that a compiler of a newer system makes a module that runs with glibc 2.28 too.
// auditwheel checks every wheel: what a compiler takes in beyond this, the wheel's tag says.
#pragma once

#ifdef __x86_64__
__asm__(".symver pow, pow@GLIBC_2.2.5");  // the one of glibc 2.29 differs in errno alone
#endif

extern "C" {
// Of glibc 2.32. While it is set libstdc++ counts references without atomic operations; ours never is.
__attribute__((visibility("hidden"))) char __libc_single_threaded = 0;
}
