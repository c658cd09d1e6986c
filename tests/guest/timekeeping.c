/*
 * Clocks: never run backwards, not even between CPUs; all have the same rate;
 * the vDSO agrees with the kernel; sleeps have the requested duration.
 */
#include "torture.h"
#include <pthread.h>
#include <stdatomic.h>

static const struct { clockid_t id; const char *name; } clocks[] = {
	{ CLOCK_MONOTONIC, "CLOCK_MONOTONIC" },
	{ CLOCK_MONOTONIC_RAW, "CLOCK_MONOTONIC_RAW" },
	{ CLOCK_BOOTTIME, "CLOCK_BOOTTIME" },
	{ CLOCK_REALTIME, "CLOCK_REALTIME" },
};

static atomic_long latest[ARRAY_SIZE(clocks)][8]; /* one per cache line */
static double until;
static atomic_long readings;

static long nanoseconds(clockid_t clock)
{
	struct timespec t;

	clock_gettime(clock, &t);
	return t.tv_sec * 1000000000l + t.tv_nsec;
}

static long kernel_nanoseconds(clockid_t clock)
{
	struct timespec t;

	syscall(SYS_clock_gettime, clock, &t);
	return t.tv_sec * 1000000000l + t.tv_nsec;
}

/* A time published by any CPU must not be in this CPU's future. */
static void *reader(void *argument)
{
	int cpu = pin_to((int)(long)argument);
	long count = 0;

	while (now() < until)
		for (size_t i = 0; i < ARRAY_SIZE(clocks); i++)
			for (int j = 0; j < 50; j++, count++) {
				long seen = atomic_load(&latest[i][0]);
				long mine = j % 10 ? nanoseconds(clocks[i].id)
						   : kernel_nanoseconds(clocks[i].id);

				CHECK(mine >= seen, "%s went back by %ld ns as seen by CPU %d",
				      clocks[i].name, seen - mine, cpu);
				while (mine > seen &&
				       !atomic_compare_exchange_weak(&latest[i][0], &seen, mine))
					;
			}
	atomic_fetch_add(&readings, count);
	return NULL;
}

static uint64_t rdtsc(void)
{
	uint32_t lo, hi;

	asm volatile("lfence; rdtsc" : "=a"(lo), "=d"(hi));
	return (uint64_t)hi << 32 | lo;
}

/* Times of all clocks, read directly after each other. */
struct sample {
	long mono, raw, boot, real;
	uint64_t tsc;
};

/* Returns the sample of 200 that took the least time. */
static struct sample take(void)
{
	struct sample best = { 0 }, s;
	long width = 1000000000;

	for (int i = 0; i < 200; i++) {
		long end;

		s.mono = nanoseconds(CLOCK_MONOTONIC);
		s.raw = nanoseconds(CLOCK_MONOTONIC_RAW);
		s.boot = nanoseconds(CLOCK_BOOTTIME);
		s.real = nanoseconds(CLOCK_REALTIME);
		s.tsc = rdtsc();
		end = nanoseconds(CLOCK_MONOTONIC);
		if (end - s.mono < width) {
			width = end - s.mono;
			best = s;
		}
	}
	return best;
}

/*
 * Compares the progress of a clock with the progress of CLOCK_MONOTONIC. Fails if the ratio
 * differs too much.
 */
static void same_rate(const char *name, double passed, double reference, double tolerance)
{
	CHECK(passed / reference > 1 - tolerance && passed / reference < 1 + tolerance,
	      "%s advanced %.0f us while CLOCK_MONOTONIC advanced %.0f us",
	      name, passed / 1e3, reference / 1e3);
}

/* Compares the rates of all clocks on an idle and on a busy CPU. Returns the MHz of the TSC. */
static double rates(double seconds)
{
	struct timespec pause = { (time_t)seconds, (long)((seconds - (time_t)seconds) * 1e9) };
	struct sample a = take(), middle, b;
	/* A clock that counts jiffies (no TSC to trust) is only that exact. */
	double first, second, reference, tolerance = 0.01 + 0.02 / seconds;

	nanosleep(&pause, NULL);
	middle = take();
	while (nanoseconds(CLOCK_MONOTONIC) < middle.mono + seconds * 1e9)
		;
	b = take();
	reference = b.mono - a.mono;
	same_rate("CLOCK_MONOTONIC_RAW", b.raw - a.raw, reference, 2e-3);
	same_rate("CLOCK_BOOTTIME", b.boot - a.boot, reference, 1e-3);
	same_rate("CLOCK_REALTIME", b.real - a.real, reference, 2e-3);
	/* The time-stamp counter has the same rate on an idle and on a busy CPU. */
	first = (double)(middle.tsc - a.tsc) / (middle.mono - a.mono);
	second = (double)(b.tsc - middle.tsc) / (b.mono - middle.mono);
	CHECK(first / second > 1 - tolerance && first / second < 1 + tolerance,
	      "TSC at %.1f MHz while asleep, at %.1f MHz while busy", first * 1e3, second * 1e3);
	return second * 1e3;
}

static int compare_double(const void *a, const void *b)
{
	double x = *(const double *)a, y = *(const double *)b;

	return x < y ? -1 : x > y;
}

/* Sleeps by relative and absolute time; the median shows the timer's accuracy. */
static double sleeps(double deadline)
{
	static double late[4096];
	int count = 0;

	while (now() < deadline && count < 4096) {
		long ns = 50000 + random64() % 2000000;
		struct timespec t = { 0, ns };
		long start = nanoseconds(CLOCK_MONOTONIC), end;

		if (count % 2) {
			t.tv_sec = (start + ns) / 1000000000;
			t.tv_nsec = (start + ns) % 1000000000;
			clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &t, NULL);
		} else {
			nanosleep(&t, NULL);
		}
		end = nanoseconds(CLOCK_MONOTONIC);
		CHECK(end - start >= ns, "slept %ld ns instead of at least %ld", end - start, ns);
		late[count++] = (end - start - ns) / 1e3;
	}
	qsort(late, count, sizeof(late[0]), compare_double);
	CHECK(late[count / 2] < 20000, "sleeps end %.0f us late (median)", late[count / 2]);
	return late[count / 2];
}

static void processor_time(void)
{
	double wall = now(), cpu = clock_seconds(CLOCK_PROCESS_CPUTIME_ID);

	while (now() < wall + 0.2)
		;
	wall = now() - wall;
	cpu = clock_seconds(CLOCK_PROCESS_CPUTIME_ID) - cpu;
	CHECK(cpu <= wall * 1.05 + 0.02, "one thread used %.3f s of processor in %.3f s", cpu, wall);
	CHECK(cpu > wall * 0.02, "a busy thread was charged only %.3f s of %.3f s", cpu, wall);
}

int main(int argc, char **argv)
{
	double seconds = torture_start("timekeeping", argc, argv), late, mhz;
	int cpus = cpu_count(), threads = cpus * 2;
	pthread_t thread[2 * CPU_SETSIZE];

	pin_to(0);
	until = now() + seconds * 0.5;
	for (long i = 0; i < threads; i++)
		pthread_create(&thread[i], NULL, reader, (void *)i);
	for (int i = 0; i < threads; i++)
		pthread_join(thread[i], NULL);
	mhz = rates(seconds * 0.1 > 0.2 ? seconds * 0.1 : 0.2);
	processor_time();
	late = sleeps(now() + seconds * 0.3);
	return ok("%ld readings on %d CPUs, TSC %.0f MHz, sleeps %.0f us late (median)",
		  (long)readings, cpus, mhz, late);
}
