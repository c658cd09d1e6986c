/*
 * Isolation: user code can neither read nor write kernel memory, nor use
 * privileged instructions, hypercalls or software interrupts. Each attempt
 * runs in a separate process, gets the right signal, and affects no other process.
 */
#include "torture.h"
#include <setjmp.h>
#include <sys/prctl.h>

static sigjmp_buf back;
static volatile int got;

/* Records the signal of a fault, and continues after the attempt. */
static void on_fault(int number)
{
	got = number;
	siglongjmp(back, 1);
}

static void catch_faults(void)
{
	static const int all[] = { SIGSEGV, SIGBUS, SIGILL, SIGFPE, SIGTRAP };

	for (size_t i = 0; i < ARRAY_SIZE(all); i++) {
		struct sigaction action = { .sa_handler = on_fault, .sa_flags = SA_NODEFER };
		sigaction(all[i], &action, NULL);
	}
}

/*
 * Addresses of a kernel on x86-64: code, fixed mappings, all physical memory, stacks, per-CPU
 * areas, modules.
 */
static const uint64_t kernel_addresses[] = {
	0xffffffff81000000, 0xffffffff81000040, 0xffffffff81200000, 0xffffffff81600000,
	0xffffffff81800000, 0xffffffff81a00000, 0xffffffff81c00000, 0xffffffff82000000,
	0xffffffffff5fe000, 0xffffffffff5ff000, 0xffffffffff5fc000, 0xffffffffff600000,
	0xffff888000000000, 0xffff888000001000, 0xffff888000100000, 0xffff888001000000,
	0xffff88800f000000, 0xffffc90000000000, 0xffffc90000004000, 0xffffea0000000000,
	0xfffffe0000000000, 0xfffffe0000001000, 0xfffffe0000002000, 0xfffffe0000003000,
	0xfffffe0000006000, 0xfffffe000003b000, 0xffffff0000000000, 0xffff800000000000,
	0xffffc80000000000, 0xffffa00000000000, 0xffffffffa0000000, 0xfffffffffffff000,
};

static void kernel_memory(void)
{
	catch_faults();
	for (volatile size_t i = 0; i < ARRAY_SIZE(kernel_addresses); i++) {
		volatile uint64_t *at = (uint64_t *)kernel_addresses[i];

		got = 0;
		if (!sigsetjmp(back, 1))
			(void)*at;
		CHECK(got == SIGSEGV, "reading %p gave signal %d", at, got);
		got = 0;
		if (!sigsetjmp(back, 1))
			((void (*)(void))at)();
		CHECK(got == SIGSEGV, "calling %p gave signal %d", at, got);
		got = 0;
		/* Like a write to the page table, but changes nothing if it works. */
		if (!sigsetjmp(back, 1))
			asm volatile("lock orq $0, (%0)" : : "r"(at) : "memory");
		CHECK(got == SIGSEGV, "writing %p gave signal %d", at, got);
	}
}

/* Runs in a child; reports whether `code` returned, and otherwise the signal. */
#define ATTEMPT(code) do {						\
	got = 0;							\
	if (!sigsetjmp(back, 1)) { code; }				\
} while (0)

#define PRIVILEGED(name, code) do {					\
	ATTEMPT(code);							\
	CHECK(got == SIGSEGV, "%s gave signal %d, not SIGSEGV", name, got); \
} while (0)

/* MSRs: 0xc0000082 is LSTAR, the entry of system calls; 0x4b564d10 controls a PVM guest. */
static void privileged_instructions(void)
{
	uint64_t value = 0;
	uint8_t table[10] = { 0 };

	catch_faults();
	PRIVILEGED("cli", asm volatile("cli"));
	PRIVILEGED("sti", asm volatile("sti"));
	PRIVILEGED("hlt", asm volatile("hlt"));
	PRIVILEGED("mov cr0", asm volatile("mov %%cr0, %0" : "=r"(value)));
	PRIVILEGED("mov cr2", asm volatile("mov %%cr2, %0" : "=r"(value)));
	PRIVILEGED("mov cr3", asm volatile("mov %%cr3, %0" : "=r"(value)));
	PRIVILEGED("mov to cr3", asm volatile("mov %0, %%cr3" : : "r"(0ul)));
	PRIVILEGED("mov to cr4", asm volatile("mov %0, %%cr4" : : "r"(0ul)));
	PRIVILEGED("mov dr7", asm volatile("mov %%dr7, %0" : "=r"(value)));
	PRIVILEGED("rdmsr", asm volatile("rdmsr" : "=A"(value) : "c"(0xc0000082) : "rdx"));
	PRIVILEGED("rdmsr of the PVM control", asm volatile("rdmsr" : "=A"(value) : "c"(0x4b564d10) : "rdx"));
	PRIVILEGED("wrmsr", asm volatile("wrmsr" : : "c"(0xc0000082), "a"(0), "d"(0)));
	PRIVILEGED("wrmsr of the PVM control", asm volatile("wrmsr" : : "c"(0x4b564d10), "a"(0), "d"(0)));
	PRIVILEGED("lgdt", asm volatile("lgdt %0" : : "m"(table)));
	PRIVILEGED("lidt", asm volatile("lidt %0" : : "m"(table)));
	PRIVILEGED("lldt", asm volatile("lldt %0" : : "r"((uint16_t)0)));
	PRIVILEGED("ltr", asm volatile("ltr %0" : : "r"((uint16_t)0x40)));
	PRIVILEGED("invlpg", asm volatile("invlpg (%0)" : : "r"(table)));
	PRIVILEGED("invd", asm volatile("invd"));
	PRIVILEGED("wbinvd", asm volatile("wbinvd"));
	PRIVILEGED("clts", asm volatile("clts"));
	PRIVILEGED("swapgs", asm volatile("swapgs"));
	PRIVILEGED("xsetbv", asm volatile("xsetbv" : : "c"(0), "a"(1), "d"(0)));
	PRIVILEGED("in", asm volatile("inb $0x80, %%al" : : : "rax"));
	PRIVILEGED("out", asm volatile("outb %%al, $0x80" : : "a"(0)));
	PRIVILEGED("out to the console", asm volatile("outb %%al, %%dx" : : "a"('!'), "d"(0x3f8)));
	PRIVILEGED("iret to kernel code", asm volatile(
		"mov %%rsp, %%rax\n push $0x18\n push %%rax\n pushfq\n push $0x10\n"
		"lea 1f(%%rip), %%rcx\n push %%rcx\n iretq\n1:" : : : "rax", "rcx", "memory"));
	PRIVILEGED("far return to kernel code", asm volatile(
		"push $0x10\n lea 1f(%%rip), %%rcx\n push %%rcx\n lretq\n1:" : : : "rcx", "memory"));
	PRIVILEGED("sysret", asm volatile("lea 1f(%%rip), %%rcx\n pushfq\n pop %%r11\n sysretq\n1:"
		: : : "rcx", "r11", "memory"));
}

/* `int n` for every n: a table of eight-byte entries that all end at 9. */
static void software_interrupt(unsigned vector)
{
	asm volatile(
		"lea 1f(%%rip), %%rax\n lea (%%rax, %0, 8), %%rax\n"
		"mov $0x1001, %%ebx\n xchg %%rax, %%rbx\n xor %%ecx, %%ecx\n xor %%edx, %%edx\n"
		"jmp *%%rbx\n .balign 8\n"
		"1:\n .set vector, 0\n .rept 256\n .byte 0xcd, vector\n jmp 9f\n .balign 8\n"
		".set vector, vector + 1\n .endr\n9:\n"
		: : "r"((uint64_t)vector)
		: "rax", "rbx", "rcx", "rdx", "rsi", "rdi", "r8", "r9", "r10", "r11", "memory", "cc");
}

/* The only instruction that may return: CPUID, which a PVM host offers to all programs. */
#define PVM_CPUID_VECTOR 0x1a

/* Checks the signal of an interrupt: `int 3` is a breakpoint, and 0x1b the hypercall of PVM. */
static void software_interrupts(unsigned vector)
{
	catch_faults();
	ATTEMPT(software_interrupt(vector));
	if (vector == PVM_CPUID_VECTOR && !got)
		return;
	if (vector == 3)
		CHECK(got == SIGTRAP, "int %#x gave signal %d, not SIGTRAP", vector, got);
	else if (vector == 0x1b)
		CHECK(got == SIGSEGV || got == SIGILL, "int %#x gave signal %d", vector, got);
	else
		CHECK(got == SIGSEGV, "int %#x gave signal %d, not SIGSEGV", vector, got);
}

/* Every hypercall number a PVM host knows, and some around them. */
static void hypercalls(void)
{
	static uint64_t frame[16];

	catch_faults();
	for (volatile uint64_t number = 0xfff; number < 0x1020; number++) {
		volatile uint64_t result = number;

		ATTEMPT(asm volatile("int $0x1b" : "+a"(result) : "b"(frame), "c"(0), "d"(0) : "memory"));
		CHECK(got == SIGSEGV || got == SIGILL, "hypercall %#lx from user code gave "
		      "signal %d, result %#lx", number, got, result);
	}
	for (volatile uint64_t number = 0; number < 16; number++) {
		volatile int64_t result = number;

		/* Ordinary KVM returns an error, other machines send a signal. */
		ATTEMPT(asm volatile("vmcall" : "+a"(result) : "b"(0), "c"(0), "d"(0), "S"(0) : "memory"));
		CHECK(got || result < 0, "vmcall %lu from user code returned %ld", number, result);
		result = number;
		ATTEMPT(asm volatile("vmmcall" : "+a"(result) : "b"(0), "c"(0), "d"(0), "S"(0) : "memory"));
		CHECK(got || result < 0, "vmmcall %lu from user code returned %ld", number, result);
	}
}

/*
 * Executes 32-bit code, which this kernel does not support, in a 64-bit process. Places it at a low
 * address, and jumps to it with the selector of 32-bit user code (0x23).
 */
static void compat_mode(int variant)
{
	static const uint8_t codes[][8] = {
		{ 0xcd, 0x80, 0xf4 },       /* int $0x80; hlt */
		{ 0x0f, 0x05, 0xf4 },       /* syscall */
		{ 0x0f, 0x34, 0xf4 },       /* sysenter */
		{ 0x0f, 0x0b, 0xf4 },       /* ud2 */
		{ 0xcd, 0x1b, 0xf4 },       /* PVM hypercall */
		{ 0xcd, 0x17, 0xf4 },       /* PVM return to user */
		{ 0xa1, 0, 0, 0, 0, 0xf4 }, /* read of address 0 */
		{ 0xcc, 0xf4 },             /* int3 */
	};
	uint8_t *low = mmap((void *)0x10000000, 4 * PAGE, PROT_READ | PROT_WRITE | PROT_EXEC,
			    MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
	struct { uint32_t offset; uint16_t selector; } __attribute__((packed)) target = { 0x10000000, 0x23 };

	CHECK(low == (void *)0x10000000, "mmap of low memory: %s", strerror(errno));
	memcpy(low, codes[variant % ARRAY_SIZE(codes)], 8);
	asm volatile("mov %1, %%rsp\n ljmpl *%0" : : "m"(target), "r"(low + 3 * PAGE) : "memory");
	__builtin_unreachable();
}

static void segments(void)
{
	catch_faults();
	for (volatile unsigned selector = 0; selector < 0x100; selector++) {
		/* Loading may fault or not; it must give no access and no crash. */
		ATTEMPT(asm volatile("mov %0, %%ds\n mov %0, %%es" : : "r"(selector)));
		ATTEMPT(asm volatile("mov %0, %%gs\n mov %%gs:0xffffffff81000000 - 0x100000000, %%al"
				     : : "r"(selector) : "rax"));
		CHECK(got, "gs selector %#x gives access below the zero page", selector);
		ATTEMPT(asm volatile("mov %0, %%gs" : : "r"(0)));
		syscall(SYS_sched_yield);
	}
}

/* Expected end of a child: a signal of a fault, or the exit code 0. */
enum { DIED = -1, SUCCEEDS = 0 };

/* Runs one attack in a child. */
static void attack(const char *name, void (*one)(void), void (*numbered)(int), int number, int outcome)
{
	pid_t child = fork();
	int status;

	CHECK(child >= 0, "fork: %s", strerror(errno));
	if (!child) {
		alarm(10);
		signal(SIGALRM, SIG_DFL);
		if (one)
			one();
		else
			numbered(number);
		_exit(0);
	}
	if (outcome == SUCCEEDS) {
		wait_for_success(child, name);
		return;
	}
	CHECK(waitpid(child, &status, 0) == child, "waitpid: %s", strerror(errno));
	CHECK(WIFSIGNALED(status) && WTERMSIG(status) != SIGALRM && WTERMSIG(status) != SIGKILL,
	      "%s %d: status %#x, not killed by a fault", name, number, status);
}

int main(int argc, char **argv)
{
	double seconds = torture_start("isolation", argc, argv), until = now() + seconds;
	int rounds = 0;

	do {
		attack("kernel memory", kernel_memory, NULL, 0, SUCCEEDS);
		attack("privileged instructions", privileged_instructions, NULL, 0, SUCCEEDS);
		attack("hypercalls", hypercalls, NULL, 0, SUCCEEDS);
		attack("segment selectors", segments, NULL, 0, SUCCEEDS);
		for (int vector = 0; vector < 256; vector++)
			attack("software interrupt", NULL, (void (*)(int))software_interrupts, vector, SUCCEEDS);
		for (int variant = 0; variant < 8; variant++)
			attack("32-bit code", NULL, compat_mode, variant, DIED);
		rounds++;
	} while (now() < until);
	return ok("%d rounds of attacks, %zu kernel addresses", rounds, ARRAY_SIZE(kernel_addresses));
}
