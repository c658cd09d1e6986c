/*
 * Interrupts and timers: none may be lost. Tests the three windows in which
 * interrupts can be lost: halting, returning to user mode, and enabling
 * interrupts; on every CPU, with wakeups from timers and from other CPUs.
 */
#include "torture.h"
#include <pthread.h>
#include <poll.h>
#include <sys/time.h>
#include <sys/timerfd.h>

/* A lost interrupt stays lost until another event; an interrupt on a busy host is only late. */
#define LATE 1.5

static volatile sig_atomic_t fired;
static volatile double fired_at;
static double worst;

static void on_timer(int number)
{
	(void)number;
	fired_at = now();
	fired = 1;
}

/* Checks the delay of an event in seconds, and records the longest. */
static void note(double lateness, const char *what)
{
	CHECK(lateness > -1e-4, "%s came %.0f us early", what, -lateness * 1e6);
	CHECK(lateness < LATE, "%s came %.0f ms late: interrupt lost", what, lateness * 1e3);
	if (lateness > worst)
		worst = lateness;
}

/* Short sleeps on an otherwise idle CPU race the timer against the halt. */
static int sleep_race(double until)
{
	int rounds = 0;

	while (now() < until) {
		long ns = 1000 + random64() % (++rounds % 4 ? 60000 : 3000000);
		struct timespec t = { 0, ns };
		double start = now();

		CHECK(!nanosleep(&t, NULL), "nanosleep: %s", strerror(errno));
		note(now() - start - ns / 1e9, "a nanosleep");
	}
	return rounds;
}

/*
 * A timer signal that fires near system call returns. User code then spins
 * without entering the kernel, so only the interrupt itself can deliver it.
 */
static int return_race(double until)
{
	struct sigevent event = { .sigev_notify = SIGEV_SIGNAL, .sigev_signo = SIGUSR1 };
	timer_t timer;
	int rounds = 0;

	signal(SIGUSR1, on_timer);
	CHECK(!timer_create(CLOCK_MONOTONIC, &event, &timer), "timer_create: %s", strerror(errno));
	while (now() < until) {
		long ns = 2000 + random64() % 200000;
		struct itimerspec spec = { .it_value = { 0, ns } };
		double start = now(), expected = start + ns / 1e9;

		fired = 0;
		timer_settime(timer, 0, &spec, NULL);
		while (now() < expected && !fired)
			syscall(SYS_getppid);
		while (!fired)
			CHECK(now() < expected + LATE, "timer signal lost on return to user mode");
		note(fired_at - expected, "a timer signal");
		rounds++;
	}
	timer_delete(timer);
	return rounds;
}

struct pingpong {
	int to[2], from[2];
};

static void *echo(void *argument)
{
	struct pingpong *p = argument;
	char c;

	pin_to(1);
	while (read(p->to[0], &c, 1) == 1 && c != 'q')
		if (write(p->from[1], &c, 1) != 1)
			break;
	return NULL;
}

/* Both sides sleep in turn, so each round needs two wakeups between CPUs. */
static int wakeup_race(double until)
{
	struct pingpong p;
	pthread_t peer;
	char c = 'x';
	int rounds = 0;

	CHECK(!pipe(p.to) && !pipe(p.from), "pipe: %s", strerror(errno));
	pin_to(0);
	pthread_create(&peer, NULL, echo, &p);
	while (now() < until) {
		struct pollfd poll_one = { .fd = p.from[0], .events = POLLIN };
		double start = now();

		CHECK(write(p.to[1], &c, 1) == 1, "write: %s", strerror(errno));
		CHECK(poll(&poll_one, 1, (int)(LATE * 2000)) == 1, "wakeup of another CPU lost");
		CHECK(read(p.from[0], &c, 1) == 1, "read: %s", strerror(errno));
		note(now() - start, "a wakeup of another CPU");
		rounds++;
		if (rounds % 16 == 0) {
			struct timespec t = { 0, 200000 };
			nanosleep(&t, NULL);
		}
	}
	c = 'q';
	CHECK(write(p.to[1], &c, 1) == 1, "write: %s", strerror(errno));
	pthread_join(peer, NULL);
	for (int i = 0; i < 2; i++) {
		close(p.to[i]);
		close(p.from[i]);
	}
	return rounds;
}

/* A periodic timer must report every period, served or overrun. */
static void periods(double seconds)
{
	struct itimerspec spec = { { 0, 2000000 }, { 0, 2000000 } };
	int fd = timerfd_create(CLOCK_MONOTONIC, 0);
	double start = now(), passed;
	uint64_t total = 0, count;

	timerfd_settime(fd, 0, &spec, NULL);
	while (now() < start + seconds) {
		CHECK(read(fd, &count, 8) == 8, "read of timerfd: %s", strerror(errno));
		total += count;
	}
	passed = now() - start;
	CHECK(total * 0.002 <= passed + 0.001, "timerfd counted %lu periods of 2 ms in %.3f s",
	      total, passed);
	CHECK(total * 0.002 > passed - LATE, "timerfd counted only %lu periods of 2 ms in %.3f s",
	      total, passed);
	close(fd);
}

int main(int argc, char **argv)
{
	double seconds = torture_start("irq_timer", argc, argv);
	int cpus = cpu_count(), sleeps = 0, returns = 0, wakeups;
	struct { int sleeps, returns; double worst; } *shared;
	pid_t child[CPU_SETSIZE];

	shared = mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	for (int phase = 0; phase < 2; phase++) {
		double until = now() + seconds * 0.35;

		for (int cpu = 0; cpu < cpus; cpu++)
			if (!(child[cpu] = fork())) {
				pin_to(cpu);
				if (phase == 0)
					shared[cpu].sleeps = sleep_race(until);
				else
					shared[cpu].returns = return_race(until);
				if (worst > shared[cpu].worst)
					shared[cpu].worst = worst;
				_exit(0);
			}
		for (int cpu = 0; cpu < cpus; cpu++)
			wait_for_success(child[cpu], "per-CPU process");
	}
	wakeups = wakeup_race(now() + seconds * 0.2);
	periods(seconds * 0.1);
	for (int cpu = 0; cpu < cpus; cpu++) {
		sleeps += shared[cpu].sleeps;
		returns += shared[cpu].returns;
		if (shared[cpu].worst > worst)
			worst = shared[cpu].worst;
	}
	return ok("%d sleeps, %d timer signals, %d wakeups, latest %.1f ms",
		  sleeps, returns, wakeups, worst * 1e3);
}
