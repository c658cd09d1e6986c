/*
 * Process 1 of a guest that is snapshotted. It writes checksummed records to
 * memory and to /dev/vda and verifies them continuously. It greets the host on vsock port 1024
 * like the agent and answers commands on vsock port 5000.
 *
 * One line per command: status | verify | dirty MIB | free | mark WORD | marks
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <immintrin.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>
#include <linux/vm_sockets.h>

/* Ports on vsock: of the host for the greeting, and of this guest for commands. */
#define HELLO_PORT 1024
#define COMMAND_PORT 5000
/* Number of records, bytes of each, and offset of the mark after them on the disk. */
#define RECORDS 512
#define RECORD 4096
#define MARK_AT ((off_t)RECORDS * RECORD)

/* Record with a sequence number, data that it determines, and their sum. */
struct record {
	uint64_t sequence;
	uint64_t data[RECORD / 8 - 2];
	uint64_t sum;
};

static struct record memory[RECORDS] __attribute__((aligned(4096)));
static uint64_t on_disk[RECORDS];
static pthread_mutex_t writing = PTHREAD_MUTEX_INITIALIZER;
static volatile uint64_t sequence, loops[8], failures, greetings;
static char failure[256];
static char mark[64] = "none";
static int disk = -1;
static char *dirt;
static size_t dirt_bytes;

/* Counts a failure, and stores its text for the answer to `verify`. */
static void fail(const char *what, uint64_t number)
{
	snprintf(failure, sizeof(failure), "%s %llu", what, (unsigned long long)number);
	printf("snapshot: FAIL %s\n", failure);
	fflush(stdout);
	failures++;
}

static uint64_t mix(uint64_t x)
{
	x ^= x >> 33;
	x *= 0xff51afd7ed558ccdull;
	x ^= x >> 33;
	return x;
}

static void fill(struct record *record, uint64_t number)
{
	uint64_t sum = number;

	record->sequence = number;
	for (size_t i = 0; i < sizeof(record->data) / 8; i++) {
		record->data[i] = mix(number * 1000 + i);
		sum += record->data[i];
	}
	record->sum = sum;
}

/* Returns whether a record has this sequence number and a valid sum. */
static int sound(const struct record *record, uint64_t number)
{
	uint64_t sum = record->sequence;

	for (size_t i = 0; i < sizeof(record->data) / 8; i++)
		sum += record->data[i];
	return record->sequence == number && record->sum == sum;
}

/* Reads record `at` back from the disk, past the page cache. */
static void check(size_t at)
{
	static struct record back __attribute__((aligned(4096)));

	if (!on_disk[at])
		return;
	if (!sound(&memory[at], on_disk[at]))
		fail("memory record", at);
	if (pread(disk, &back, RECORD, (off_t)at * RECORD) != RECORD)
		fail("disk read", at);
	else if (!sound(&back, on_disk[at]))
		fail("disk record", at);
}

/* Writes records to random places in memory and on the disk, and checks others. */
static void *writer(void *unused)
{
	(void)unused;
	for (uint64_t number = 1;; number++) {
		size_t at = mix(number) % RECORDS;

		pthread_mutex_lock(&writing);
		fill(&memory[at], number);
		if (pwrite(disk, &memory[at], RECORD, (off_t)at * RECORD) != RECORD)
			fail("disk write", number);
		on_disk[at] = number;
		sequence = number;
		check(mix(number + 7) % RECORDS);
		pthread_mutex_unlock(&writing);
		usleep(500);
	}
	return NULL;
}

/* Holds a pattern in all vector registers and counts in general ones; both must survive. */
__attribute__((target("avx"))) static int hold_avx(uint64_t seed)
{
	uint64_t in[4] __attribute__((aligned(32))) = { seed, mix(seed), ~seed, seed << 1 };
	uint64_t out[16][4] __attribute__((aligned(32)));
	uint64_t count = 200000, total = 0;

	asm volatile(
		"vmovdqa (%[in]), %%ymm0\n vmovdqa %%ymm0, %%ymm1\n vmovdqa %%ymm0, %%ymm2\n"
		"vmovdqa %%ymm0, %%ymm3\n vmovdqa %%ymm0, %%ymm4\n vmovdqa %%ymm0, %%ymm5\n"
		"vmovdqa %%ymm0, %%ymm6\n vmovdqa %%ymm0, %%ymm7\n vmovdqa %%ymm0, %%ymm8\n"
		"vmovdqa %%ymm0, %%ymm9\n vmovdqa %%ymm0, %%ymm10\n vmovdqa %%ymm0, %%ymm11\n"
		"vmovdqa %%ymm0, %%ymm12\n vmovdqa %%ymm0, %%ymm13\n vmovdqa %%ymm0, %%ymm14\n"
		"vmovdqa %%ymm0, %%ymm15\n"
		"1: add $3, %[total]\n dec %[count]\n jnz 1b\n"
		"vmovdqa %%ymm0, (%[out])\n vmovdqa %%ymm1, 32(%[out])\n vmovdqa %%ymm2, 64(%[out])\n"
		"vmovdqa %%ymm3, 96(%[out])\n vmovdqa %%ymm4, 128(%[out])\n vmovdqa %%ymm5, 160(%[out])\n"
		"vmovdqa %%ymm6, 192(%[out])\n vmovdqa %%ymm7, 224(%[out])\n vmovdqa %%ymm8, 256(%[out])\n"
		"vmovdqa %%ymm9, 288(%[out])\n vmovdqa %%ymm10, 320(%[out])\n vmovdqa %%ymm11, 352(%[out])\n"
		"vmovdqa %%ymm12, 384(%[out])\n vmovdqa %%ymm13, 416(%[out])\n vmovdqa %%ymm14, 448(%[out])\n"
		"vmovdqa %%ymm15, 480(%[out])\n vzeroupper\n"
		: [count] "+r"(count), [total] "+r"(total)
		: [in] "r"(in), [out] "r"(out)
		: "memory", "cc", "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7",
		  "xmm8", "xmm9", "xmm10", "xmm11", "xmm12", "xmm13", "xmm14", "xmm15");
	for (int i = 0; i < 16; i++)
		if (memcmp(out[i], in, sizeof(in)))
			return 0;
	return total == 600000;
}

/* Computes with vector registers and floating point, and checks the results. */
static void *computer(void *argument)
{
	size_t me = (size_t)argument;
	volatile double sum = 0;

	for (uint64_t n = 1;; n++) {
		if (__builtin_cpu_supports("avx") && !hold_avx(mix(n + me)))
			fail("registers of computer", me);
		sum = 0;
		for (int i = 1; i <= 1000; i++)
			sum += 1.0 / i;
		if (sum < 7.485470860550 || sum > 7.485470860551)
			fail("floating point of computer", me);
		loops[me] = n;
		usleep(1000);
	}
	return NULL;
}

/*
 * Greets the host as the agent does: sends a hello, receives a line, sends the time of
 * readiness. The connection ends when the guest is snapshotted or restored.
 */
static int greet(void)
{
	struct sockaddr_vm host = { .svm_family = AF_VSOCK, .svm_cid = VMADDR_CID_HOST, .svm_port = HELLO_PORT };
	int fd = socket(AF_VSOCK, SOCK_STREAM, 0);
	char line[65536];
	struct timespec now;

	if (fd < 0 || connect(fd, (struct sockaddr *)&host, sizeof(host)))
		goto out;
	clock_gettime(CLOCK_BOOTTIME, &now);
	long long us = now.tv_sec * 1000000ll + now.tv_nsec / 1000;
	dprintf(fd, "{\"version\":\"test\",\"kernel\":\"test\",\"init_us\":%lld,\"hello_us\":%lld}\n", us, us);
	for (size_t have = 0;;) {
		ssize_t got = read(fd, line + have, sizeof(line) - have);

		if (got <= 0)
			goto out;
		have += got;
		if (line[have - 1] == '\n')
			break;
	}
	greetings++;
	dprintf(fd, "{\"ready_us\":%lld}\n", us);
	while (read(fd, line, sizeof(line)) > 0)
		;
out:
	if (fd >= 0)
		close(fd);
	return 0;
}

static void *greeter(void *unused)
{
	(void)unused;
	for (;;) {
		greet();
		usleep(1000);
	}
	return NULL;
}

/*
 * Checks all records and dirty pages. Answers the result, the last sequence number, and the last
 * failure.
 */
static void verify(int fd)
{
	uint64_t before = failures;

	pthread_mutex_lock(&writing);
	for (size_t i = 0; i < RECORDS; i++)
		check(i);
	for (size_t i = 0; i < dirt_bytes; i += 4096)
		if (*(uint64_t *)(dirt + i) != mix(i)) {
			fail("dirty page", i / 4096);
			break;
		}
	dprintf(fd, "%s %llu %s\n", failures == before ? "verified" : "WRONG", (unsigned long long)sequence, failure);
	pthread_mutex_unlock(&writing);
}

/* Replaces the dirty memory by `mib` MiB with a known word in each page. */
static void dirty(size_t mib)
{
	if (dirt_bytes)
		munmap(dirt, dirt_bytes);
	dirt_bytes = mib << 20;
	if (!mib)
		return;
	dirt = mmap(NULL, dirt_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	if (dirt == MAP_FAILED) {
		dirt_bytes = 0;
		fail("mmap", mib);
		return;
	}
	for (size_t i = 0; i < dirt_bytes; i += 4096)
		*(uint64_t *)(dirt + i) = mix(i);
}

/* Stores a word in memory and on the disk. A rollback must restore both. */
static void set_mark(const char *word)
{
	static char block[4096] __attribute__((aligned(4096)));

	snprintf(mark, sizeof(mark), "%s", word);
	snprintf(block, sizeof(block), "%s", word);
	if (pwrite(disk, block, sizeof(block), MARK_AT) != sizeof(block))
		fail("mark", 0);
}

static void marks(int fd)
{
	static char block[4096] __attribute__((aligned(4096)));

	if (pread(disk, block, sizeof(block), MARK_AT) != sizeof(block))
		fail("mark", 1);
	block[60] = 0;
	dprintf(fd, "%s %s\n", mark, block);
}

static void *serve(void *argument)
{
	int fd = (int)(size_t)argument;
	FILE *in = fdopen(fd, "r");
	char line[60];

	while (in && fgets(line, sizeof(line), in)) {
		line[strcspn(line, "\n")] = 0;
		if (!strcmp(line, "status"))
			dprintf(fd, "%llu %llu %llu %llu %llu\n", (unsigned long long)failures,
				(unsigned long long)sequence, (unsigned long long)loops[0],
				(unsigned long long)loops[1], (unsigned long long)greetings);
		else if (!strcmp(line, "verify"))
			verify(fd);
		else if (!strncmp(line, "dirty ", 6)) {
			dirty(atoi(line + 6));
			dprintf(fd, "ok\n");
		} else if (!strncmp(line, "mark ", 5)) {
			set_mark(line + 5);
			dprintf(fd, "ok\n");
		} else if (!strcmp(line, "marks"))
			marks(fd);
		else
			dprintf(fd, "what?\n");
	}
	if (in)
		fclose(in);
	return NULL;
}

int main(void)
{
	struct sockaddr_vm any = { .svm_family = AF_VSOCK, .svm_cid = VMADDR_CID_ANY, .svm_port = COMMAND_PORT };
	pthread_t thread;

	mkdir("/dev", 0755);
	mount("devtmpfs", "/dev", "devtmpfs", 0, NULL);
	disk = open("/dev/vda", O_RDWR | O_DIRECT);
	if (disk < 0)
		fail("no disk", errno);
	int listener = socket(AF_VSOCK, SOCK_STREAM, 0);
	if (bind(listener, (struct sockaddr *)&any, sizeof(any)) || listen(listener, 8))
		fail("listen", errno);
	if (getenv("quiet_guest") == NULL) {
		long processors = sysconf(_SC_NPROCESSORS_ONLN);

		pthread_create(&thread, NULL, writer, NULL);
		for (long i = 0; i < processors && i < 2; i++)
			pthread_create(&thread, NULL, computer, (void *)i);
	}
	pthread_create(&thread, NULL, greeter, NULL);
	printf("snapshot: up\n");
	fflush(stdout);
	for (;;) {
		int fd = accept(listener, NULL, NULL);

		if (fd >= 0 && pthread_create(&thread, NULL, serve, (void *)(size_t)fd) == 0)
			pthread_detach(thread);
	}
}
