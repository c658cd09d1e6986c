/*
 * Memory maps: random mmap, munmap, mprotect, mremap, madvise, fork and system
 * calls over a region, compared with a model of each page's content and
 * protection. Uses small, 64 KiB and 2 MiB pages.
 */
#include "torture.h"
#include <setjmp.h>

#define SPAN (8ul << 20)
#define PAGES (SPAN / PAGE)

/* Protection of a page in the model. */
enum { READ = 1, WRITE = 2, MAPPED = 4 };

static char *region;
static uint32_t seed[PAGES];   /* content of each page; 0: zeroes */
static uint8_t access_of[PAGES];
static sigjmp_buf back;
static volatile int got;

static void on_fault(int number)
{
	got = number;
	siglongjmp(back, 1);
}

/* Returns word `i` of a page whose content has the seed `s`. */
static uint64_t word(uint32_t s, int i)
{
	return s ? (s * 0x9e3779b97f4a7c15ull) ^ ((uint64_t)i << 32 | i) : 0;
}

static void fill(size_t page, uint32_t s)
{
	uint64_t *at = (uint64_t *)(region + page * PAGE);

	/* Check only some words, to touch more pages in the same time. */
	for (int i = 0; i < 512; i += 37)
		at[i] = word(s, i);
	seed[page] = s;
}

/* Checks content and protection of a page. `after` names the preceding operation. */
static void verify(size_t page, const char *after)
{
	volatile uint64_t *at = (uint64_t *)(region + page * PAGE);

	got = 0;
	if (!(access_of[page] & READ)) {
		if (!sigsetjmp(back, 1))
			(void)at[0];
		CHECK(got == SIGSEGV, "page %zu readable after %s", page, after);
		return;
	}
	for (int i = 0; i < 512; i += 37)
		CHECK(at[i] == word(seed[page], i), "page %zu word %d is %#lx, not %#lx, after %s",
		      page, i, at[i], word(seed[page], i), after);
	if (!(access_of[page] & WRITE)) {
		if (!sigsetjmp(back, 1))
			at[1] = 1;
		CHECK(got == SIGSEGV, "page %zu writable after %s", page, after);
	}
}

static void verify_some(size_t first, size_t count, const char *after)
{
	size_t step = count > 64 ? count / 64 : 1;

	for (size_t i = 0; i < count; i += step)
		verify(first + i, after);
	/* The operation must not have changed the neighbours. */
	if (first)
		verify(first - 1, after);
	if (first + count < PAGES)
		verify(first + count, after);
	for (int i = 0; i < 8; i++)
		verify(random64() % PAGES, after);
}

/* Changes the model of a range of pages. */
static void set_range(size_t first, size_t count, int access, int keep_content)
{
	for (size_t i = first; i < first + count; i++) {
		access_of[i] = access;
		if (!keep_content)
			seed[i] = 0;
	}
}

static int all_mapped(size_t first, size_t count)
{
	for (size_t i = first; i < first + count; i++)
		if (!(access_of[i] & MAPPED))
			return 0;
	return 1;
}

static void write_range(size_t first, size_t count)
{
	for (size_t i = first; i < first + count; i++)
		if (access_of[i] & WRITE)
			fill(i, (uint32_t)random64() | 1);
}

/* Moves pages to another address and back with mremap. */
static void move(size_t first, size_t count)
{
	void *at = region + first * PAGE, *elsewhere, *moved;

	/* mremap fails if the range has several mappings: replace them by one. */
	if (mprotect(at, count * PAGE, PROT_READ | PROT_WRITE))
		return;
	set_range(first, count, READ | WRITE | MAPPED, 1);
	elsewhere = mmap(NULL, count * PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	moved = mremap(at, count * PAGE, count * PAGE, MREMAP_MAYMOVE | MREMAP_FIXED, elsewhere);
	if (moved == MAP_FAILED) {
		munmap(elsewhere, count * PAGE);
		return;
	}
	for (size_t i = 0; i < count; i++) {
		uint64_t *page = (uint64_t *)((char *)moved + i * PAGE);
		CHECK(page[0] == word(seed[first + i], 0) && page[481] == word(seed[first + i], 481),
		      "page %zu changed while it was moved away", first + i);
	}
	CHECK(mremap(moved, count * PAGE, count * PAGE, MREMAP_MAYMOVE | MREMAP_FIXED, at) == at,
	      "mremap back: %s", strerror(errno));
}

/* The child checks the inherited pages and changes them. The parent must not see the changes. */
static void fork_and_change(size_t first, size_t count)
{
	pid_t child = fork();

	CHECK(child >= 0, "fork: %s", strerror(errno));
	if (!child) {
		verify_some(first, count, "fork (child)");
		write_range(first, count);
		verify_some(first, count, "fork (child, after writing)");
		_exit(0);
	}
	write_range(first, count / 2);
	verify_some(first, count, "fork (parent)");
	wait_for_success(child, "forked child");
}

/* System calls access user memory through the kernel's mappings. */
static void through_kernel(size_t page, int pipe_ends[2])
{
	char *at = region + page * PAGE;
	uint64_t copy[512];

	if (access_of[page] & READ) {
		CHECK(write(pipe_ends[1], at, PAGE) == (ssize_t)PAGE, "write: %s", strerror(errno));
		CHECK(read(pipe_ends[0], copy, PAGE) == (ssize_t)PAGE, "read: %s", strerror(errno));
		for (int i = 0; i < 512; i += 37)
			CHECK(copy[i] == word(seed[page], i), "the kernel read page %zu wrongly", page);
	} else {
		CHECK(write(pipe_ends[1], at, PAGE) == -1 && errno == EFAULT,
		      "the kernel read inaccessible page %zu", page);
	}
	if (access_of[page] & WRITE) {
		uint32_t s = (uint32_t)random64() | 1;
		for (int i = 0; i < 512; i++)
			copy[i] = i % 37 ? 0 : word(s, i);
		CHECK(write(pipe_ends[1], copy, PAGE) == (ssize_t)PAGE, "write: %s", strerror(errno));
		CHECK(read(pipe_ends[0], at, PAGE) == (ssize_t)PAGE, "read: %s", strerror(errno));
		seed[page] = s;
	} else {
		char left;
		CHECK(write(pipe_ends[1], copy, 1) == 1, "write: %s", strerror(errno));
		CHECK(read(pipe_ends[0], at, 1) == -1 && errno == EFAULT,
		      "the kernel wrote to read-only page %zu", page);
		if (read(pipe_ends[0], &left, 1) < 0)
			fail("read: %s", strerror(errno));
	}
	verify(page, "a system call");
}

int main(int argc, char **argv)
{
	double seconds = torture_start("mmap_torture", argc, argv), until = now() + seconds;
	struct sigaction action = { .sa_handler = on_fault, .sa_flags = SA_NODEFER };
	unsigned long operations = 0;
	int pipe_ends[2];

	sigaction(SIGSEGV, &action, NULL);
	CHECK(!pipe(pipe_ends), "pipe: %s", strerror(errno));
	region = mmap(NULL, SPAN + (2ul << 20), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	CHECK(region != MAP_FAILED, "mmap: %s", strerror(errno));
	region = (char *)(((uintptr_t)region + (2ul << 20) - 1) & ~((2ul << 20) - 1));
	set_range(0, PAGES, READ | WRITE | MAPPED, 0);

	while (now() < until) {
		size_t big = random64() % 4 == 0 ? 1024 : 40;
		size_t count = 1 + random64() % big, first = random64() % (PAGES - count);
		void *at = region + first * PAGE;
		size_t bytes = count * PAGE;

		if (random64() % 16 == 0) {
			first &= ~511ul;
			count = 512;
			at = region + first * PAGE;
			bytes = count * PAGE;
		}
		operations++;
		switch (random64() % 12) {
		case 0:
			CHECK(mmap(at, bytes, PROT_READ | PROT_WRITE,
				   MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == at,
			      "mmap: %s", strerror(errno));
			set_range(first, count, READ | WRITE | MAPPED, 0);
			verify_some(first, count, "mmap");
			break;
		case 1:
			CHECK(!munmap(at, bytes), "munmap: %s", strerror(errno));
			set_range(first, count, 0, 0);
			verify_some(first, count, "munmap");
			/* Fill the hole, so that no other mapping is placed there. */
			CHECK(mmap(at, bytes, PROT_READ | PROT_WRITE,
				   MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == at,
			      "mmap: %s", strerror(errno));
			set_range(first, count, READ | WRITE | MAPPED, 0);
			break;
		case 2:
			CHECK(!mprotect(at, bytes, PROT_READ), "mprotect: %s", strerror(errno));
			set_range(first, count, READ | MAPPED, 1);
			verify_some(first, count, "mprotect(PROT_READ)");
			break;
		case 3:
			CHECK(!mprotect(at, bytes, PROT_NONE), "mprotect: %s", strerror(errno));
			set_range(first, count, MAPPED, 1);
			verify_some(first, count, "mprotect(PROT_NONE)");
			/* fall through */
		case 4:
			CHECK(!mprotect(at, bytes, PROT_READ | PROT_WRITE), "mprotect: %s", strerror(errno));
			set_range(first, count, READ | WRITE | MAPPED, 1);
			verify_some(first, count, "mprotect(PROT_READ | PROT_WRITE)");
			break;
		case 5:
			CHECK(!madvise(at, bytes, MADV_DONTNEED), "madvise: %s", strerror(errno));
			for (size_t i = first; i < first + count; i++)
				seed[i] = 0;
			verify_some(first, count, "madvise(MADV_DONTNEED)");
			break;
		case 6:
			madvise(at, bytes, MADV_HUGEPAGE);
			write_range(first, count);
			madvise(at, bytes, 25 /* MADV_COLLAPSE */);
			verify_some(first, count, "madvise(MADV_COLLAPSE)");
			break;
		case 7:
			madvise(at, bytes, MADV_NOHUGEPAGE);
			write_range(first, count);
			verify_some(first, count, "madvise(MADV_NOHUGEPAGE)");
			break;
		case 8:
			if (all_mapped(first, count))
				move(first, count);
			verify_some(first, count, "mremap");
			break;
		case 9:
			fork_and_change(first, count);
			break;
		case 10:
			through_kernel(first, pipe_ends);
			break;
		case 11:
			write_range(first, count);
			verify_some(first, count, "writing");
			break;
		}
	}
	for (size_t page = 0; page < PAGES; page++)
		verify(page, "everything");
	return ok("%lu operations on %lu pages", operations, PAGES);
}
