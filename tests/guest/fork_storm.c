/*
 * Process creation: 400 processes per second of duration (2,000 by default),
 * many alive at once. Each must see its parent's memory as it was at the fork,
 * keep its own writes to itself, and deliver its exit status.
 */
#include "torture.h"

/* Pages of memory that each process checks, and processes that exist at once. */
#define PAGES 64
#define ALIVE 200

static uint64_t memory[PAGES][PAGE / 8] __attribute__((aligned(4096)));

/* A generation is the number of a process. Its memory contains a value for each page. */
static uint64_t expected(int generation, int page)
{
	return (uint64_t)generation * 1000003 + page;
}

static void set_all(int generation)
{
	for (int page = 0; page < PAGES; page++)
		memory[page][0] = memory[page][511] = expected(generation, page);
}

static void check_all(int generation, const char *who)
{
	for (int page = 0; page < PAGES; page++)
		CHECK(memory[page][0] == expected(generation, page) &&
		      memory[page][511] == expected(generation, page),
		      "%s: page %d holds %#lx instead of generation %d", who, page,
		      memory[page][0], generation);
}

static void child(int number, int hold)
{
	char c;

	check_all(number, "child before writing");
	set_all(-number);
	if (number % 7 == 0) {
		pid_t grandchild = fork();

		CHECK(grandchild >= 0, "fork of a grandchild: %s", strerror(errno));
		if (!grandchild) {
			check_all(-number, "grandchild");
			_exit(0);
		}
		wait_for_success(grandchild, "grandchild");
	}
	sched_yield();
	/* End of file on this pipe means that the whole group may go. */
	if (read(hold, &c, 1) != 0)
		_exit(2);
	check_all(-number, "child after writing");
	_exit(3 + number % 97);
}

int main(int argc, char **argv)
{
	double seconds = torture_start("fork_storm", argc, argv), start = now();
	int total = (int)(400 * seconds), number = 0;
	pid_t children[ALIVE];

	while (number < total) {
		int hold[2], group = total - number < ALIVE ? total - number : ALIVE;
		int first = number;

		CHECK(!pipe(hold), "pipe: %s", strerror(errno));
		for (int i = 0; i < group; i++, number++) {
			set_all(number);
			children[i] = fork();
			CHECK(children[i] >= 0, "fork %d: %s", number, strerror(errno));
			if (!children[i]) {
				close(hold[1]);
				child(number, hold[0]);
			}
		}
		check_all(number - 1, "parent");
		close(hold[1]);
		close(hold[0]);
		for (int i = 0; i < group; i++) {
			int status;

			CHECK(waitpid(children[i], &status, 0) == children[i],
			      "waitpid: %s", strerror(errno));
			if (WIFEXITED(status) && WEXITSTATUS(status) == 1)
				_exit(1);
			CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 3 + (first + i) % 97,
			      "child %d ended with status %#x", first + i, status);
		}
	}
	return ok("%d processes, %.0f us each", total, (now() - start) / total * 1e6);
}
