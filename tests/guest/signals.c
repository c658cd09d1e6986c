/*
 * Signals: registers survive, faults are reported with the right number, address
 * and error code, and queued signals arrive in order. A process that returns from
 * a handler to an invalid context dies without effect on others.
 */
#include "torture.h"
#include <setjmp.h>
#include <sys/time.h>
#include <ucontext.h>

static sigjmp_buf back;
static volatile int got_signal, got_code, got_trap;
static volatile uint64_t got_address, got_error, got_ip;
static volatile sig_atomic_t storms;

/* Records the details of a fault, and continues after the statement that caused it. */
static void on_fault(int number, siginfo_t *info, void *context)
{
	ucontext_t *uc = context;

	got_signal = number;
	got_code = info->si_code;
	got_address = (uint64_t)info->si_addr;
	got_error = uc->uc_mcontext.gregs[REG_ERR];
	got_trap = uc->uc_mcontext.gregs[REG_TRAPNO];
	got_ip = uc->uc_mcontext.gregs[REG_RIP];
	siglongjmp(back, 1);
}

static void catch(int number, void (*handler)(int, siginfo_t *, void *), int flags)
{
	struct sigaction action = { .sa_sigaction = handler, .sa_flags = SA_SIGINFO | flags };

	CHECK(!sigaction(number, &action, NULL), "sigaction(%d): %s", number, strerror(errno));
}

/* Executes a statement that must cause a signal. A `code_` of 0 accepts any code. */
#define FAULTS(what, statement, signal_, code_) do {				\
	got_signal = 0;								\
	if (!sigsetjmp(back, 1)) { statement; }					\
	CHECK(got_signal == (signal_), "%s gave signal %d, not %d", what,	\
	      got_signal, signal_);						\
	CHECK((code_) == 0 || got_code == (code_), "%s gave code %d, not %d",	\
	      what, got_code, code_);						\
} while (0)

/*
 * Accesses an address, and checks the page fault (trap 14). Bits of `error`: present (1), write
 * (2), user (4), instruction (16).
 */
static void page_fault(const char *what, volatile char *at, int write, int code, uint64_t error)
{
	FAULTS(what, if (write) *at = 1; else (void)*at, SIGSEGV, code);
	CHECK(got_address == (uint64_t)at, "%s at %p reported %#lx", what, at, got_address);
	CHECK(got_trap == 14 && (got_error & 0x17) == error, "%s: trap %d error %#lx, not 14 %#lx",
	      what, got_trap, got_error, error);
}

static void faults(void)
{
	char *rw = mmap(NULL, 3 * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	int file = memfd_create("short", 0);
	volatile char *bus;
	volatile int zero = 0, one = 1;

	rw[0] = rw[PAGE] = rw[2 * PAGE] = 1;
	mprotect(rw + PAGE, PAGE, PROT_READ);
	mprotect(rw + 2 * PAGE, PAGE, PROT_NONE);
	page_fault("write to a read-only page", rw + PAGE + 123, 1, SEGV_ACCERR, 7);
	page_fault("read of an inaccessible page", rw + 2 * PAGE + 5, 0, SEGV_ACCERR, 4);
	page_fault("read of address 8", (char *)8, 0, SEGV_MAPERR, 4);
	page_fault("write of address 16", (char *)16, 1, SEGV_MAPERR, 6);
	FAULTS("execution of data", ((void (*)(void))rw)(), SIGSEGV, SEGV_ACCERR);
	CHECK(got_address == (uint64_t)rw && got_error == 0x15,
	      "execution of data reported %#lx error %#lx", got_address, got_error);
	FAULTS("non-canonical address", *(volatile char *)0x8000000000000000ul, SIGSEGV, SI_KERNEL);
	CHECK(!ftruncate(file, PAGE), "ftruncate: %s", strerror(errno));
	bus = mmap(NULL, 2 * PAGE, PROT_READ, MAP_SHARED, file, 0);
	FAULTS("read beyond the end of a file", bus[PAGE], SIGBUS, BUS_ADRERR);
	FAULTS("ud2", asm volatile("ud2"), SIGILL, ILL_ILLOPN);
	FAULTS("integer division by zero", one = one / zero, SIGFPE, FPE_INTDIV);
	FAULTS("int3", asm volatile("int3"), SIGTRAP, SI_KERNEL);
	FAULTS("kernel reads for us", (void)*(volatile char *)0xffffffff81000000ul, SIGSEGV, 0);
	CHECK(syscall(SYS_write, file, 0xffff888000100000ul, 1ul) == -1 && errno == EFAULT,
	      "write() from a kernel address did not give EFAULT");
	CHECK(syscall(SYS_write, file, 16ul, 1ul) == -1 && errno == EFAULT,
	      "write() from an unmapped address did not give EFAULT");
	munmap(rw, 3 * PAGE);
	munmap((void *)bus, 2 * PAGE);
	close(file);
}

/* Overwrites registers in the handler. */
static void on_storm(int number)
{
	(void)number;
	storms++;
	asm volatile("std; cld; xor %%r8d, %%r8d; xor %%r9d, %%r9d; xor %%r10d, %%r10d"
		     : : : "r8", "r9", "r10", "cc");
}

/* Every register holds a known value while timer signals come in. */
static void registers_survive(double seconds)
{
	struct itimerval every = { { 0, 1000 }, { 0, 1000 } }, never = { 0 };
	double until = now() + seconds;
	uint64_t bad = 0, rounds = 0;

	signal(SIGVTALRM, on_storm);
	setitimer(ITIMER_VIRTUAL, &every, NULL);
	while (now() < until && !bad) {
		asm volatile(
			"push %%rbp\n"
			"mov $0x1111111111111111, %%rax\n mov $0x2222222222222222, %%rbx\n"
			"mov $0x4444444444444444, %%rdx\n mov $0x5555555555555555, %%rsi\n"
			"mov $0x6666666666666666, %%rdi\n mov $0x7777777777777777, %%rbp\n"
			"mov $0x0888888888888888, %%r8\n mov $0x0999999999999999, %%r9\n"
			"mov $0x0aaaaaaaaaaaaaaa, %%r10\n mov $0x0bbbbbbbbbbbbbbb, %%r11\n"
			"mov $0x0ccccccccccccccc, %%r12\n mov $0x0ddddddddddddddd, %%r13\n"
			"mov $0x0eeeeeeeeeeeeeee, %%r14\n mov $0x0fffffffffffffff, %%r15\n"
			"mov $300000, %%ecx\n std\n stc\n"
			"1: lea -1(%%rcx), %%rcx\n jrcxz 2f\n jmp 1b\n"
			"2: setnc %%cl\n pushfq\n cld\n"
			"testl $0x400, (%%rsp)\n jnz 3f\n inc %%rcx\n3: add $8, %%rsp\n"
#define EXPECT(reg, value) "push %%rax\n mov $" value ", %%rax\n cmp %%rax, %%" reg \
			"\n pop %%rax\n je 9f\n inc %%rcx\n9:\n"
			EXPECT("rbx", "0x2222222222222222") EXPECT("rdx", "0x4444444444444444")
			EXPECT("rsi", "0x5555555555555555") EXPECT("rdi", "0x6666666666666666")
			EXPECT("rbp", "0x7777777777777777") EXPECT("r8", "0x0888888888888888")
			EXPECT("r9", "0x0999999999999999") EXPECT("r10", "0x0aaaaaaaaaaaaaaa")
			EXPECT("r11", "0x0bbbbbbbbbbbbbbb") EXPECT("r12", "0x0ccccccccccccccc")
			EXPECT("r13", "0x0ddddddddddddddd") EXPECT("r14", "0x0eeeeeeeeeeeeeee")
			EXPECT("r15", "0x0fffffffffffffff")
			"mov $0x1111111111111111, %%rbx\n cmp %%rax, %%rbx\n je 9f\n inc %%rcx\n9:\n"
			"pop %%rbp\n"
			: "=c"(bad) : : "rax", "rbx", "rdx", "rsi", "rdi", "r8", "r9", "r10",
			  "r11", "r12", "r13", "r14", "r15", "cc", "memory");
		rounds++;
	}
	setitimer(ITIMER_VIRTUAL, &never, NULL);
	CHECK(!bad, "%lu registers or flags changed by a signal (round %lu)", bad, rounds);
	CHECK(storms > 0, "no timer signal arrived in %.1f s of computing", seconds);
}

static volatile int order, next_value;

/*
 * Checks that the values of queued signals arrive in order. `order` is the first other value,
 * plus one.
 */
static void on_queued(int number, siginfo_t *info, void *context)
{
	(void)number;
	(void)context;
	if (info->si_value.sival_int != next_value)
		order = info->si_value.sival_int + 1;
	next_value++;
}

static void queued_in_order(void)
{
	sigset_t set, old;

	catch(SIGRTMIN, on_queued, 0);
	sigemptyset(&set);
	sigaddset(&set, SIGRTMIN);
	next_value = order = 0;
	sigprocmask(SIG_BLOCK, &set, &old);
	for (int i = 0; i < 200; i++) {
		union sigval value = { .sival_int = i };
		CHECK(!sigqueue(getpid(), SIGRTMIN, value), "sigqueue: %s", strerror(errno));
	}
	sigprocmask(SIG_SETMASK, &old, NULL);
	CHECK(next_value == 200 && !order, "%d of 200 queued signals, first out of order: %d",
	      next_value, order - 1);
}

static char alternate[65536];

/* Exits with 0 if the handler runs on the alternate stack. */
static void on_overflow(int number, siginfo_t *info, void *context)
{
	char here;

	(void)number;
	(void)info;
	(void)context;
	_exit(&here >= alternate && &here < alternate + sizeof(alternate) ? 0 : 2);
}

#pragma GCC diagnostic ignored "-Winfinite-recursion"
static __attribute__((noinline)) int recurse(int depth)
{
	volatile char use[4096];

	use[0] = depth;
	return recurse(depth + 1) + use[0];
}

static void stack_overflow(void)
{
	pid_t child = fork();

	if (!child) {
		stack_t stack = { .ss_sp = alternate, .ss_size = sizeof(alternate) };

		sigaltstack(&stack, NULL);
		catch(SIGSEGV, on_overflow, SA_ONSTACK);
		_exit(recurse(0) ? 4 : 3);
	}
	wait_for_success(child, "process that overflows its stack");
}

/* Context to which a handler returns: a register of the frame and an invalid value. */
static const struct evil {
	const char *name;
	int reg;
	uint64_t value;
} evils[] = {
	{ "non-canonical rip", REG_RIP, 0x8000000000000000ul },
	{ "first non-canonical rip", REG_RIP, 0x0000800000000000ul },
	{ "last page rip", REG_RIP, 0x00007ffffffffffful },
	{ "kernel rip", REG_RIP, 0xffffffff81000000ul },
	{ "non-canonical rsp", REG_RSP, 0x8000000000000000ul },
	{ "kernel rsp", REG_RSP, 0xffffffff81800000ul },
	{ "cs 0", REG_CSGSFS, 0x002b000000000000ul },
	{ "cs 0x08", REG_CSGSFS, 0x002b000000000008ul },
	{ "cs 0x10", REG_CSGSFS, 0x002b000000000010ul },
	{ "cs 0x23 (32-bit)", REG_CSGSFS, 0x002b000000000023ul },
	{ "cs 0x2b (data)", REG_CSGSFS, 0x002b00000000002bul },
	{ "cs 0x43", REG_CSGSFS, 0x002b000000000043ul },
	{ "cs 0x07 (LDT)", REG_CSGSFS, 0x002b000000000007ul },
	{ "cs 0xffff", REG_CSGSFS, 0x002b00000000fffful },
	{ "ss 0", REG_CSGSFS, 0x0000000000000033ul },
	{ "ss 0x18", REG_CSGSFS, 0x0018000000000033ul },
	{ "ss 0x33 (code)", REG_CSGSFS, 0x0033000000000033ul },
	{ "ss 0x0f (LDT)", REG_CSGSFS, 0x000f000000000033ul },
	{ "ss 0xffff", REG_CSGSFS, 0xffff000000000033ul },
	{ "all flags", REG_EFL, 0xfffffffffffffffful },
	{ "IOPL 3", REG_EFL, 0x3202 },
	{ "NT", REG_EFL, 0x4202 },
	{ "VM", REG_EFL, 0x20202 },
	{ "TF", REG_EFL, 0x302 },
	{ "no IF", REG_EFL, 0x2 },
};

static const struct evil *evil;

static void on_evil(int number, siginfo_t *info, void *context)
{
	ucontext_t *uc = context;

	(void)number;
	(void)info;
	uc->uc_mcontext.gregs[evil->reg] = evil->value;
	/* Only one attempt: the next signal ends the process. */
	signal(SIGSEGV, SIG_DFL);
	uc->uc_flags &= ~4ul; /* let the frame's SS through as it is */
	uc->uc_flags |= 2;
}

static void returns_to_nowhere(void)
{
	for (size_t i = 0; i < ARRAY_SIZE(evils); i++) {
		double start = now();
		pid_t child = fork();
		int status;

		if (!child) {
			evil = &evils[i];
			alarm(2);
			signal(SIGALRM, SIG_DFL);
			catch(SIGUSR1, on_evil, 0);
			raise(SIGUSR1);
			_exit(42);
		}
		CHECK(waitpid(child, &status, 0) == child, "waitpid: %s", strerror(errno));
		CHECK(!(WIFSIGNALED(status) && WTERMSIG(status) == SIGALRM),
		      "return to %s: process hung for %.1f s", evils[i].name, now() - start);
		if (evils[i].reg == REG_EFL)
			CHECK((WIFEXITED(status) && WEXITSTATUS(status) == 42) ||
			      (WIFSIGNALED(status) && (WTERMSIG(status) == SIGTRAP ||
						       WTERMSIG(status) == SIGBUS)),
			      "return with flags %s: status %#x", evils[i].name, status);
		else
			CHECK(WIFSIGNALED(status) || WEXITSTATUS(status) == 42,
			      "return to %s: status %#x", evils[i].name, status);
		if (evils[i].reg == REG_RIP)
			CHECK(WIFSIGNALED(status) && (WTERMSIG(status) == SIGSEGV ||
						      WTERMSIG(status) == SIGBUS),
			      "return to %s: status %#x, not a segmentation fault",
			      evils[i].name, status);
	}
}

int main(int argc, char **argv)
{
	double seconds = torture_start("signals", argc, argv), until = now() + seconds * 0.5;
	int rounds = 0;

	do {
		catch(SIGSEGV, on_fault, SA_NODEFER);
		catch(SIGBUS, on_fault, SA_NODEFER);
		catch(SIGILL, on_fault, SA_NODEFER);
		catch(SIGFPE, on_fault, SA_NODEFER);
		catch(SIGTRAP, on_fault, SA_NODEFER);
		faults();
		for (int i = SIGHUP; i < SIGRTMIN; i++)
			if (i != SIGALRM)
				signal(i, SIG_DFL);
		queued_in_order();
		stack_overflow();
		returns_to_nowhere();
		rounds++;
	} while (now() < until);
	registers_survive(seconds * 0.4);
	return ok("%d rounds of faults, %d timer signals", rounds, (int)storms);
}
