// Preloaded, it has a program see another x86-64 CPU than the machine's, at the machine's full speed.
//
// Libraries choose their code by what the instruction CPUID says. The kernel can have CPUID fault
// (arch_prctl(ARCH_SET_CPUID, 0), where /proc/cpuinfo has cpuid_fault); a handler then answers in
// its place: the machine's own features without those that the other CPU lacks, and the other's
// vendor, family and caches. It cannot add features that the machine lacks.
//
//   cc -O2 -shared -fPIC -o othercpu.so othercpu.c
//   LD_PRELOAD=./othercpu.so OTHERCPU=haswell python ...

#define _GNU_SOURCE
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <ucontext.h>
#include <unistd.h>

enum { ARCH_SET_CPUID = 0x1012, EAX = 0, EBX, ECX, EDX };

struct cache { uint32_t bytes, ways; };
struct cpu {
    const char *name;
    int amd, avx512, vnni;  // vnni: of AVX-512, with what came beside it
    uint32_t signature;     // family, model, stepping
    struct cache data, second, third;
};

static const struct cpu CPUS[] = {
    {"haswell", 0, 0, 0, 0x306c3, {32 << 10, 8}, {256 << 10, 8}, {8 << 20, 16}},
    {"skylake", 0, 1, 0, 0x50654, {32 << 10, 8}, {1 << 20, 16}, {24 << 20, 11}},
    {"icelake", 0, 1, 1, 0x606a6, {48 << 10, 12}, {1280 << 10, 20}, {48 << 20, 12}},
    {"zen3", 1, 0, 0, 0xa20f10, {32 << 10, 8}, {512 << 10, 8}, {32 << 20, 16}},
    {"zen4", 1, 1, 1, 0xa10f11, {32 << 10, 8}, {1 << 20, 8}, {32 << 20, 16}},
};

static const struct cpu *other;

static void clear(uint32_t *word, const int *bits, int count) {
    for (int i = 0; i < count; i++) *word &= ~(1u << bits[i]);
}

#define CLEAR(word, ...) \
    do { const int bits[] = {__VA_ARGS__}; clear(&(word), bits, sizeof bits / sizeof *bits); } while (0)

// The caches as leaves 4 (Intel) and 0x8000001d (AMD) list them: data, instructions, second, third.
static void describe_cache(uint32_t index, uint32_t r[4]) {
    const struct cache *cache = index == 0 ? &other->data : index == 2 ? &other->second : &other->third;
    if (index == 1 || index > 3) return;
    r[EBX] = (cache->ways - 1) << 22 | 63;  // lines of 64 bytes
    r[ECX] = cache->bytes / (cache->ways * 64) - 1;
}

static void hide_features(uint32_t leaf, uint32_t index, uint32_t r[4]) {
    if (leaf != 7) return;
    if (index == 1) memset(r, 0, 4 * sizeof *r);  // AVX-VNNI, bfloat16, AMX in float16
    if (index != 0) return;
    CLEAR(r[EDX], 8, 22, 23, 24, 25);  // VP2INTERSECT, AMX, AVX-512 in float16
    if (!other->vnni) CLEAR(r[ECX], 1, 6, 8, 9, 10, 11, 12, 14);
    if (!other->avx512) CLEAR(r[EBX], 16, 17, 21, 26, 27, 28, 30, 31);
    else if (!other->vnni) CLEAR(r[EBX], 21);
}

static void as_amd(uint32_t leaf, uint32_t index, uint32_t r[4]) {
    static const uint32_t KINDS[] = {0x121, 0x122, 0x143, 0x163};
    if (leaf == 0 || leaf == 0x80000000) {
        memcpy(&r[EBX], "Auth", 4), memcpy(&r[EDX], "enti", 4), memcpy(&r[ECX], "cAMD", 4);
        if (leaf) r[EAX] = 0x80000021;
    }
    if (leaf == 0x80000001) r[EAX] = other->signature, r[ECX] |= 1u << 22;  // has 0x8000001d
    if (leaf == 4) memset(r, 0, 4 * sizeof *r);
    if (leaf == 0x80000005) r[ECX] = r[EDX] = other->data.bytes >> 10 << 24 | 0x080140;
    if (leaf == 0x80000006) {
        r[ECX] = other->second.bytes >> 10 << 16 | 0x6140;
        r[EDX] = other->third.bytes >> 19 << 18 | 0x9140;
    }
    if (leaf == 0x8000001d) {
        r[EAX] = index < 4 ? KINDS[index] : 0, r[EBX] = r[ECX] = r[EDX] = 0;
        if (index == 1) r[EBX] = 7u << 22 | 63, r[ECX] = 63;
    }
}

static void answer(uint32_t leaf, uint32_t index, uint32_t r[4]) {
    syscall(SYS_arch_prctl, ARCH_SET_CPUID, 1UL);
    __asm__ volatile("cpuid" : "=a"(r[0]), "=b"(r[1]), "=c"(r[2]), "=d"(r[3]) : "a"(leaf), "c"(index));
    syscall(SYS_arch_prctl, ARCH_SET_CPUID, 0UL);
    if (leaf == 1) r[EAX] = other->signature;
    if (leaf == 2) r[EAX] = 0x00feff01, r[EBX] = 0xf0, r[ECX] = r[EDX] = 0;  // see leaf 4
    hide_features(leaf, index, r);
    if (other->amd) as_amd(leaf, index, r);
    if ((leaf == 4 && !other->amd) || leaf == 0x8000001d) describe_cache(index, r);
}

static void on_fault(int number, siginfo_t *info, void *context) {
    greg_t *registers = ((ucontext_t *)context)->uc_mcontext.gregs;
    const uint8_t *instruction = (const uint8_t *)registers[REG_RIP];
    (void)number, (void)info;
    if (instruction[0] != 0x0f || instruction[1] != 0xa2) {  // not CPUID: a fault of the program
        signal(SIGSEGV, SIG_DFL);
        return;
    }
    uint32_t r[4];
    answer((uint32_t)registers[REG_RAX], (uint32_t)registers[REG_RCX], r);
    registers[REG_RAX] = r[EAX], registers[REG_RBX] = r[EBX];
    registers[REG_RCX] = r[ECX], registers[REG_RDX] = r[EDX];
    registers[REG_RIP] += 2;
}

__attribute__((constructor)) static void begin(void) {
    const char *name = getenv("OTHERCPU");
    if (!name || !*name) return;
    for (size_t i = 0; i < sizeof CPUS / sizeof *CPUS; i++)
        if (!strcmp(CPUS[i].name, name)) other = &CPUS[i];
    if (!other) fprintf(stderr, "OTHERCPU=%s: expected haswell, skylake, icelake, zen3 or zen4\n", name), exit(2);
    struct sigaction action = {.sa_sigaction = on_fault, .sa_flags = SA_SIGINFO | SA_NODEFER | SA_ONSTACK};
    sigaction(SIGSEGV, &action, NULL);
    if (syscall(SYS_arch_prctl, ARCH_SET_CPUID, 0UL)) perror("arch_prctl(ARCH_SET_CPUID, 0)"), exit(2);
}
