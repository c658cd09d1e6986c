/*
 * Debuggers: single steps land on every instruction and on no other, also over
 * system calls; breakpoints, watchpoints, and registers set from outside work.
 */
#include "torture.h"
#include <stddef.h>
#include <sys/ptrace.h>
#include <sys/user.h>

/* Continues a stopped child, and waits for its next stop. */
static void resume(int request, pid_t child, int *status, const char *what)
{
	CHECK(!ptrace(request, child, NULL, NULL), "%s: %s", what, strerror(errno));
	CHECK(waitpid(child, status, 0) == child, "waitpid: %s", strerror(errno));
}

static struct user_regs_struct registers(pid_t child)
{
	struct user_regs_struct regs;

	CHECK(!ptrace(PTRACE_GETREGS, child, NULL, &regs), "PTRACE_GETREGS: %s", strerror(errno));
	return regs;
}

extern const char loop_start[], loop_syscall[], loop_after[], loop_end[], bad_jump[];
static volatile uint64_t watched;

/* Ten rounds of nine instructions, with a system call in the middle. */
#define ROUNDS 10
asm(".pushsection .text\n"
    ".globl loop, loop_start, loop_syscall, loop_after, loop_end, bad_jump\n"
    "loop:\n"
    "	mov $" "10" ", %rdx\n"
    "loop_start:\n"
    "	nop\n"
    "	mov $110, %eax\n"
    "loop_syscall:\n"
    "	syscall\n"
    "loop_after:\n"
    "	lea 1(%rbx), %rbx\n"
    "	pushfq\n"
    "	popfq\n"
    "	mov %rax, %rsi\n"
    "	dec %rdx\n"
    "	jnz loop_start\n"
    "loop_end:\n"
    "	int3\n"
    "bad_jump:\n"
    "	hlt\n"
    ".popsection\n");
extern void loop(void);

/* Starts a stopped child. It executes the loop, writes to `watched` twice, and exits with 7. */
static pid_t start_child(void)
{
	pid_t child = fork();
	int status;

	CHECK(child >= 0, "fork: %s", strerror(errno));
	if (!child) {
		ptrace(PTRACE_TRACEME, 0, NULL, NULL);
		raise(SIGSTOP);
		asm volatile("xor %%ebx, %%ebx\n call loop" : : : "rax", "rbx", "rcx", "rdx",
			     "rsi", "r11", "memory");
		watched = 1;
		watched = 2;
		_exit(7);
	}
	CHECK(waitpid(child, &status, 0) == child && WIFSTOPPED(status), "child did not stop");
	return child;
}

/* Steps through the loop, and checks each address. Returns the number of steps. */
static int single_steps(void)
{
	pid_t child = start_child();
	int status, steps = 0, in_loop = 0, syscalls = 0;
	uint64_t previous = 0;
	struct user_regs_struct regs;

	do {
		resume(PTRACE_SINGLESTEP, child, &status, "PTRACE_SINGLESTEP");
		CHECK(WIFSTOPPED(status), "child ended (status %#x) after %d steps", status, steps);
		CHECK(WSTOPSIG(status) == SIGTRAP, "step %d stopped by signal %d", steps, WSTOPSIG(status));
		regs = registers(child);
		steps++;
		if (regs.rip >= (uint64_t)loop_start && regs.rip < (uint64_t)loop_end) {
			in_loop++;
			if (previous == (uint64_t)loop_syscall) {
				syscalls++;
				CHECK(regs.rip == (uint64_t)loop_after,
				      "step over syscall went to %#llx", regs.rip);
				CHECK(regs.rax == (uint64_t)getpid(), "getppid under single step gave %lld",
				      regs.rax);
			}
			CHECK(regs.rip != previous, "step stayed at %#llx", regs.rip);
		}
		previous = regs.rip;
	} while (regs.rip != (uint64_t)loop_end && steps < 100000);
	CHECK(in_loop == ROUNDS * 9, "%d steps in a loop of %d instructions", in_loop, ROUNDS * 9);
	CHECK(regs.rbx == ROUNDS && syscalls == ROUNDS, "loop ran %lld times, %d system calls",
	      regs.rbx, syscalls);

	/* A breakpoint, then an address at which no processor can execute. */
	resume(PTRACE_CONT, child, &status, "PTRACE_CONT");
	CHECK(WIFSTOPPED(status) && WSTOPSIG(status) == SIGTRAP, "int3 gave status %#x", status);
	regs = registers(child);
	CHECK(regs.rip == (uint64_t)bad_jump, "int3 stopped at %#llx", regs.rip);
	resume(PTRACE_CONT, child, &status, "PTRACE_CONT");
	CHECK(WIFSTOPPED(status) && WSTOPSIG(status) == SIGSEGV, "hlt gave status %#x", status);
	regs.rip = 0xffff800000000000ul;
	if (!ptrace(PTRACE_SETREGS, child, NULL, &regs)) {
		resume(PTRACE_CONT, child, &status, "PTRACE_CONT");
		CHECK(WIFSTOPPED(status) && (WSTOPSIG(status) == SIGSEGV || WSTOPSIG(status) == SIGBUS),
		      "continuing at %#llx gave status %#x", regs.rip, status);
	}
	kill(child, SIGKILL);
	waitpid(child, &status, 0);
	return steps;
}

/* A hardware watchpoint on a variable, if the machine has debug registers. */
static int watchpoint(void)
{
	pid_t child = start_child();
	size_t dr = offsetof(struct user, u_debugreg);
	int status, hits = 0;
	struct user_regs_struct regs;

	if (ptrace(PTRACE_POKEUSER, child, dr, &watched) ||
	    ptrace(PTRACE_POKEUSER, child, dr + 7 * 8, (void *)(1ul | 1ul << 16 | 3ul << 18)))
		goto out;
	for (;;) {
		resume(PTRACE_CONT, child, &status, "PTRACE_CONT");
		if (!WIFSTOPPED(status))
			break;
		regs = registers(child);
		if (regs.rip == (uint64_t)bad_jump) {
			/* Leave the loop as a return would. */
			errno = 0;
			uint64_t to = ptrace(PTRACE_PEEKDATA, child, regs.rsp, NULL);
			regs.rip = to;
			regs.rsp += 8;
			ptrace(PTRACE_SETREGS, child, NULL, &regs);
			continue;
		}
		CHECK(WSTOPSIG(status) == SIGTRAP, "watchpoint run stopped by signal %d", WSTOPSIG(status));
		CHECK(ptrace(PTRACE_PEEKUSER, child, dr + 6 * 8, NULL) & 1,
		      "stopped at %#llx without a hit in DR6", regs.rip);
		hits++;
	}
	CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 7, "watched child ended with %#x", status);
	CHECK(hits == 2, "watchpoint hit %d times for 2 writes", hits);
	return hits;
out:
	kill(child, SIGKILL);
	waitpid(child, &status, 0);
	return 0;
}

static volatile int traps;

static void on_trap(int number)
{
	(void)number;
	traps++;
}

/* A process that sets its own trap flag. */
static void own_trap_flag(void)
{
	signal(SIGTRAP, on_trap);
	traps = 0;
	asm volatile("pushfq\n orl $0x100, (%%rsp)\n popfq\n nop\n nop\n nop\n nop\n"
		     "pushfq\n andl $~0x100, (%%rsp)\n popfq\n nop\n" : : : "memory", "cc");
	CHECK(traps == 7, "own trap flag gave %d traps for 7 instructions", traps);
	signal(SIGTRAP, SIG_DFL);
}

/* System-call stops, as strace uses them. */
static void syscall_stops(void)
{
	pid_t child = start_child();
	int status, stops = 0;

	ptrace(PTRACE_SETOPTIONS, child, NULL, (void *)PTRACE_O_TRACESYSGOOD);
	for (;;) {
		resume(PTRACE_SYSCALL, child, &status, "PTRACE_SYSCALL");
		CHECK(WIFSTOPPED(status), "traced child ended with %#x", status);
		if (WSTOPSIG(status) != (SIGTRAP | 0x80))
			break;
		CHECK(registers(child).orig_rax == SYS_getppid || stops < 2, "stopped in call %lld",
		      registers(child).orig_rax);
		stops++;
	}
	CHECK(stops >= ROUNDS * 2, "%d stops for %d system calls", stops, ROUNDS);
	kill(child, SIGKILL);
	waitpid(child, &status, 0);
}

int main(int argc, char **argv)
{
	double seconds = torture_start("ptrace_step", argc, argv), until = now() + seconds;
	int steps = 0, hits = 0, rounds = 0;

	do {
		steps += single_steps();
		hits += watchpoint();
		own_trap_flag();
		syscall_stops();
		rounds++;
	} while (now() < until);
	return ok("%d rounds, %d steps, %d watchpoint hits", rounds, steps, hits);
}
