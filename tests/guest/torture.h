/* Shared parts of the torture programs: a result line, a clock, a time limit. */
#ifndef TORTURE_H
#define TORTURE_H
#define _GNU_SOURCE
#include <errno.h>
#include <sched.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define PAGE 4096ul
#define ARRAY_SIZE(a) (sizeof(a) / sizeof((a)[0]))

static const char *torture_name;

/* Prints the one result line of a failed program and ends the process. */
__attribute__((noreturn, format(printf, 1, 2), unused))
static void fail(const char *format, ...)
{
	char line[512];
	va_list args;
	int n = snprintf(line, sizeof(line), "FAIL %s: ", torture_name);

	va_start(args, format);
	n += vsnprintf(line + n, sizeof(line) - n - 1, format, args);
	va_end(args);
	if (n > (int)sizeof(line) - 2)
		n = sizeof(line) - 2;
	line[n++] = '\n';
	if (write(1, line, n) < 0)
		_exit(2);
	_exit(1);
}

#define CHECK(condition, ...) do { if (!(condition)) fail(__VA_ARGS__); } while (0)

__attribute__((format(printf, 1, 2), unused))
static int ok(const char *format, ...)
{
	va_list args;

	printf("ok %s ", torture_name);
	va_start(args, format);
	vprintf(format, args);
	va_end(args);
	printf("\n");
	fflush(stdout);
	return 0;
}

__attribute__((unused))
static double clock_seconds(clockid_t clock)
{
	struct timespec t;

	clock_gettime(clock, &t);
	return t.tv_sec + t.tv_nsec / 1e9;
}

__attribute__((unused))
static double now(void)
{
	return clock_seconds(CLOCK_MONOTONIC);
}

static void torture_hung(int signal)
{
	(void)signal;
	fail("hung: no progress within the time limit");
}

/* Name, duration in seconds (first argument, default 5) and a watchdog. */
__attribute__((unused))
static double torture_start(const char *name, int argc, char **argv)
{
	double seconds = argc > 1 ? atof(argv[1]) : 5;

	torture_name = name;
	signal(SIGALRM, torture_hung);
	alarm((unsigned)(seconds * 4) + 60);
	return seconds;
}

__attribute__((unused))
static int cpu_count(void)
{
	cpu_set_t set;

	if (sched_getaffinity(0, sizeof(set), &set))
		fail("sched_getaffinity: %s", strerror(errno));
	return CPU_COUNT(&set);
}

/* Pins the calling thread to the nth CPU it may use, modulo their number. */
__attribute__((unused))
static int pin_to(int nth)
{
	static cpu_set_t all;
	static int known;
	cpu_set_t one;
	int cpu, left;

	if (!known) {
		sched_getaffinity(getpid(), sizeof(all), &all);
		known = 1;
	}
	left = nth % CPU_COUNT(&all);
	for (cpu = 0; cpu < CPU_SETSIZE; cpu++)
		if (CPU_ISSET(cpu, &all) && left-- == 0)
			break;
	CPU_ZERO(&one);
	CPU_SET(cpu, &one);
	if (sched_setaffinity(0, sizeof(one), &one))
		fail("sched_setaffinity(cpu %d): %s", cpu, strerror(errno));
	return cpu;
}

/* xorshift: the tests need variety, not quality. */
__attribute__((unused))
static uint64_t random64(void)
{
	static __thread uint64_t state;

	if (!state)
		state = 0x9e3779b97f4a7c15ull * (uint64_t)(syscall(SYS_gettid) + 1);
	state ^= state << 13;
	state ^= state >> 7;
	state ^= state << 17;
	return state;
}

/* Waits for a child that must have returned 0 from its own checks. */
__attribute__((unused))
static void wait_for_success(pid_t child, const char *what)
{
	int status;

	if (waitpid(child, &status, 0) != child)
		fail("waitpid of %s: %s", what, strerror(errno));
	if (WIFSIGNALED(status))
		fail("%s killed by signal %d", what, WTERMSIG(status));
	if (WEXITSTATUS(status) == 1)
		_exit(1); /* the child has printed the reason */
	if (WEXITSTATUS(status))
		fail("%s exited with %d", what, WEXITSTATUS(status));
}

#endif
