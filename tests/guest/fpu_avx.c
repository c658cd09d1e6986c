/*
 * Floating point and vector state: x87, MXCSR and all xmm/ymm/zmm registers
 * must survive preemption by contexts with other values, fork, system calls,
 * and signal handlers that overwrite them.
 */
#include "torture.h"
#include <cpuid.h>
#include <pthread.h>
#include <sys/time.h>
#include <ucontext.h>

/* Bytes of a vector register: SSE, AVX, AVX-512. */
enum { XMM = 16, YMM = 32, ZMM = 64 };

/* Values of all vector registers. */
struct vectors {
	uint8_t reg[32][64] __attribute__((aligned(64)));
};

static int width = XMM; /* bytes of the widest usable register */
static int registers = 16;
static uint64_t xcr0;
static volatile sig_atomic_t signals;

#define EACH16(op) op(0) op(1) op(2) op(3) op(4) op(5) op(6) op(7) \
	op(8) op(9) op(10) op(11) op(12) op(13) op(14) op(15)
#define UPPER16(op) op(16) op(17) op(18) op(19) op(20) op(21) op(22) op(23) \
	op(24) op(25) op(26) op(27) op(28) op(29) op(30) op(31)
#define STRING(x) #x
#define LOAD_X(n) "movups " STRING(n) "*64(%0), %%xmm" STRING(n) "\n"
#define LOAD_Y(n) "vmovups " STRING(n) "*64(%0), %%ymm" STRING(n) "\n"
#define LOAD_Z(n) "vmovups " STRING(n) "*64(%0), %%zmm" STRING(n) "\n"
#define SAVE_X(n) "movups %%xmm" STRING(n) ", " STRING(n) "*64(%1)\n"
#define SAVE_Y(n) "vmovups %%ymm" STRING(n) ", " STRING(n) "*64(%1)\n"
#define SAVE_Z(n) "vmovups %%zmm" STRING(n) ", " STRING(n) "*64(%1)\n"

/* Action while the registers hold values: spin in user mode, or enter the kernel. */
#define SPIN "mov %2, %%rcx\n1: pause\n dec %%rcx\n jnz 1b\n"
#define CALL "mov %2, %%rax\n syscall\n"
#define CLOBBERS "rax", "rcx", "r11", "memory", "cc", \
	"xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", \
	"xmm8", "xmm9", "xmm10", "xmm11", "xmm12", "xmm13", "xmm14", "xmm15"

/* Returns the result of the system call, so that registers can be checked across fork. */
#define KEEP(load, save, how) \
	asm volatile(load how save "mov %%rax, %3" \
		     : : "r"(in), "r"(out), "r"(argument), "m"(result) : CLOBBERS)

static __attribute__((noinline))
long keep(const struct vectors *in, struct vectors *out, int call, long argument)
{
	volatile long result = 0;

	if (width == ZMM) {
		if (call)
			KEEP(EACH16(LOAD_Z) UPPER16(LOAD_Z), EACH16(SAVE_Z) UPPER16(SAVE_Z), CALL);
		else
			KEEP(EACH16(LOAD_Z) UPPER16(LOAD_Z), EACH16(SAVE_Z) UPPER16(SAVE_Z), SPIN);
	} else if (width == YMM) {
		if (call)
			KEEP(EACH16(LOAD_Y), EACH16(SAVE_Y), CALL);
		else
			KEEP(EACH16(LOAD_Y), EACH16(SAVE_Y), SPIN);
	} else {
		if (call)
			KEEP(EACH16(LOAD_X), EACH16(SAVE_X), CALL);
		else
			KEEP(EACH16(LOAD_X), EACH16(SAVE_X), SPIN);
	}
	return result;
}

/* Fills registers with random values. */
static void fill(struct vectors *v)
{
	for (int i = 0; i < 32; i++)
		for (int j = 0; j < 64; j += 8) {
			uint64_t r = random64();
			memcpy(&v->reg[i][j], &r, 8);
		}
}

static void compare(const struct vectors *in, const struct vectors *out, const char *what)
{
	for (int i = 0; i < registers; i++)
		for (int j = 0; j < width; j++)
			CHECK(in->reg[i][j] == out->reg[i][j],
			      "register %d byte %d of %d changed %s", i, j, width, what);
}

/* Sets the control registers of x87 and of SSE. */
static void set_modes(uint16_t control, uint32_t mxcsr)
{
	asm volatile("fldcw %0; ldmxcsr %1" : : "m"(control), "m"(mxcsr));
}

static void check_modes(uint16_t control, uint32_t mxcsr)
{
	uint16_t c;
	uint32_t m;

	asm volatile("fnstcw %0; stmxcsr %1" : "=m"(c), "=m"(m));
	CHECK(c == control, "x87 control word %#x became %#x", control, c);
	CHECK((m & ~0x3fu) == (mxcsr & ~0x3fu), "MXCSR %#x became %#x", mxcsr, m);
}

/* x87, SSE, AVX and AVX-512. XCR0 may contain further components that this program does not use: AMX tiles require
 * arch_prctl(ARCH_REQ_XCOMP_PERM), and the kernel may not use protection keys. */
#define VECTORS 0xe7ul

/* The handler overwrites all registers. The frame must describe exactly the components that exist. */
static void on_signal(int number, siginfo_t *info, void *context)
{
	ucontext_t *uc = context;
	uint32_t *software = (uint32_t *)((char *)uc->uc_mcontext.fpregs + 464);
	uint64_t features;
	struct vectors junk, back;

	(void)number;
	(void)info;
	signals++;
	memset(&junk, 0xa5, sizeof(junk));
	keep(&junk, &back, 0, 10);
	if (xcr0) {
		CHECK(software[0] == 0x46505853, "signal frame carries no extended state, "
		      "but XCR0 is %#lx: the kernel does not save it", xcr0);
		memcpy(&features, &software[2], 8);
		CHECK((features & VECTORS) == (xcr0 & VECTORS) && !(features & ~xcr0),
		      "signal frame saves state components %#lx of %#lx", features, xcr0);
	}
}

/* Checks registers over spinning and system calls. The modes differ in rounding and precision. */
static void one_context(double until, int with_modes)
{
	static const uint16_t control[] = { 0x37f, 0x27f, 0x7f, 0xf7f };
	static const uint32_t mxcsr[] = { 0x1f80, 0x3f80, 0x5f80, 0x9f80 };
	struct vectors in, out;
	int round = 0;

	while (now() < until) {
		int m = random64() % 4;

		fill(&in);
		if (with_modes)
			set_modes(control[m], mxcsr[m]);
		keep(&in, &out, 0, 1000 + random64() % 100000);
		compare(&in, &out, "while spinning");
		keep(&in, &out, 1, ++round % 8 ? SYS_getppid : SYS_sched_yield);
		compare(&in, &out, "across a system call");
		if (with_modes)
			check_modes(control[m], mxcsr[m]);
		set_modes(0x37f, 0x1f80);
	}
}

static void fork_inherits(void)
{
	struct vectors in, out;
	long child;

	fill(&in);
	memset(&out, 0, sizeof(out));
	child = keep(&in, &out, 1, SYS_fork);
	CHECK(child >= 0, "fork failed with %ld", child);
	compare(&in, &out, child ? "in the parent of a fork" : "in the child of a fork");
	if (!child)
		_exit(0);
	wait_for_success(child, "forked child");
}

static void *thread(void *until)
{
	one_context(*(double *)until, 1);
	return NULL;
}

int main(int argc, char **argv)
{
	double seconds = torture_start("fpu_avx", argc, argv), until;
	int count = cpu_count() * 2 + 1;
	struct sigaction action = { .sa_sigaction = on_signal, .sa_flags = SA_SIGINFO | SA_RESTART };
	struct itimerval every = { { 0, 2000 }, { 0, 2000 } }, never = { 0 };
	unsigned a, b, c, d;
	pthread_t threads[64];
	pid_t children[64];

	if (count > 64)
		count = 64;
	__cpuid(1, a, b, c, d);
	if (c & bit_OSXSAVE) {
		uint32_t lo, hi;

		asm volatile("xgetbv" : "=a"(lo), "=d"(hi) : "c"(0));
		xcr0 = (uint64_t)hi << 32 | lo;
		if ((c & bit_AVX) && (xcr0 & 6) == 6) {
			width = YMM;
			__cpuid_count(7, 0, a, b, c, d);
			if ((b & bit_AVX512F) && (xcr0 & 0xe6) == 0xe6) {
				width = ZMM;
				registers = 32;
			}
		}
	}

	/* Processes with a signal storm, then threads, then fork. */
	sigaction(SIGVTALRM, &action, NULL);
	until = now() + seconds / 2;
	for (int i = 0; i < count; i++) {
		children[i] = fork();
		if (!children[i]) {
			setitimer(ITIMER_VIRTUAL, &every, NULL);
			one_context(until, 1);
			setitimer(ITIMER_VIRTUAL, &never, NULL);
			CHECK(signals || seconds < 0.5, "no virtual timer signal arrived");
			_exit(0);
		}
	}
	for (int i = 0; i < count; i++)
		wait_for_success(children[i], "vector process");
	until = now() + seconds / 4;
	for (int i = 0; i < count; i++)
		pthread_create(&threads[i], NULL, thread, &until);
	for (int i = 0; i < count; i++)
		pthread_join(threads[i], NULL);
	until = now() + seconds / 4;
	do
		fork_inherits();
	while (now() < until);
	return ok("%d-bit registers, XCR0 %#lx, %d contexts", width * 8, xcr0, count);
}
