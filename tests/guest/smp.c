/*
 * Several CPUs: page-table changes must reach every CPU before the system call
 * that made them returns; futexes, atomics, membarrier and migration must hold.
 */
#include "torture.h"
#include <elf.h>
#include <linux/futex.h>
#include <linux/membarrier.h>
#include <pthread.h>
#include <setjmp.h>
#include <stdatomic.h>
#include <sys/auxv.h>

static double until;
static volatile char *target;
static atomic_int stop;
static atomic_ulong writes, faults;

static __thread sigjmp_buf fault_jump;
static __thread volatile int expecting;

static void on_fault(int number)
{
	if (!expecting)
		fail("unexpected signal %d", number);
	expecting = 0;
	siglongjmp(fault_jump, 1);
}

/* Accesses the target continuously, so that its CPU caches the translation, and writes if permitted. */
static void *writer(void *argument)
{
	pin_to((int)(long)argument);
	while (!atomic_load_explicit(&stop, memory_order_relaxed)) {
		if (sigsetjmp(fault_jump, 1)) {
			atomic_fetch_add(&faults, 1);
			continue;
		}
		expecting = 1;
		for (int i = 0; i < 1000 && !stop; i++) {
			target[0]++;
			target[64]++;
		}
		expecting = 0;
		atomic_fetch_add(&writes, 1);
	}
	return NULL;
}

/* After mprotect, munmap, or replacement, no other CPU may write. */
static int shootdown(double deadline, int cpus)
{
	pthread_t threads[CPU_SETSIZE];
	int rounds = 0;
	char *page = mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

	target = page;
	stop = 0;
	for (long i = 1; i < cpus; i++)
		pthread_create(&threads[i], NULL, writer, (void *)i);
	pin_to(0);
	while (now() < deadline) {
		char before[2];
		int kind = rounds++ % 4;

		page[0] = 1;
		switch (kind) {
		case 0:
			mprotect(page, PAGE, PROT_READ);
			before[0] = target[0];
			before[1] = target[64];
			for (volatile int i = 0; i < 3000; i++)
				;
			CHECK(before[0] == target[0] && before[1] == target[64],
			      "another CPU wrote to a page after mprotect(PROT_READ)");
			mprotect(page, PAGE, PROT_READ | PROT_WRITE);
			break;
		case 1: {
			/* The old page, reachable through a second mapping, must stay as it is. */
			int fd = memfd_create("page", 0);
			volatile char *alias;

			CHECK(!ftruncate(fd, PAGE), "ftruncate: %s", strerror(errno));
			alias = mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
			mmap(page, PAGE, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd, 0);
			for (volatile int i = 0; i < 3000; i++)
				;
			mmap(page, PAGE, PROT_READ | PROT_WRITE,
			     MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
			before[0] = alias[0];
			before[1] = alias[64];
			for (volatile int i = 0; i < 3000; i++)
				;
			CHECK(before[0] == alias[0] && before[1] == alias[64],
			      "another CPU wrote to a page after it was unmapped");
			munmap((void *)alias, PAGE);
			close(fd);
			break;
		}
		case 2: {
			pid_t child = fork();
			int status;

			/* Copy on write: the child's page must not see our other threads. */
			if (!child) {
				before[0] = target[0];
				before[1] = target[64];
				for (volatile int i = 0; i < 3000; i++)
					;
				_exit(before[0] == target[0] && before[1] == target[64] ? 0 : 2);
			}
			CHECK(waitpid(child, &status, 0) == child && status == 0,
			      "another CPU wrote to a forked child's page (status %#x)", status);
			break;
		}
		case 3:
			mprotect(page, PAGE, PROT_NONE);
			mprotect(page, PAGE, PROT_READ | PROT_WRITE);
			madvise(page, PAGE, MADV_DONTNEED);
			break;
		}
	}
	stop = 1;
	for (int i = 1; i < cpus; i++)
		pthread_join(threads[i], NULL);
	munmap(page, PAGE);
	return rounds;
}

static atomic_int futex_word;
static unsigned long counter;

/* Lock with three states: 0 free, 1 locked, 2 locked with waiting threads. */
static void futex_lock(void)
{
	int free = 0;

	if (atomic_compare_exchange_strong(&futex_word, &free, 1))
		return;
	while (atomic_exchange(&futex_word, 2))
		syscall(SYS_futex, &futex_word, FUTEX_WAIT_PRIVATE, 2, NULL, NULL, 0);
}

static void futex_unlock(void)
{
	if (atomic_exchange(&futex_word, 0) == 2)
		syscall(SYS_futex, &futex_word, FUTEX_WAKE_PRIVATE, 1, NULL, NULL, 0);
}

/* Increments the counter under the lock. Returns the number of its increments. */
static void *futex_thread(void *argument)
{
	unsigned long mine = 0;

	pin_to((int)(long)argument);
	while (now() < until) {
		futex_lock();
		counter++;
		if (mine % 64 == 0)
			sched_yield();
		futex_unlock();
		mine++;
	}
	return (void *)mine;
}

static unsigned long futexes(double deadline, int cpus)
{
	pthread_t threads[CPU_SETSIZE];
	unsigned long sum = 0;

	until = deadline;
	for (long i = 0; i < cpus * 2; i++)
		pthread_create(&threads[i], NULL, futex_thread, (void *)i);
	for (int i = 0; i < cpus * 2; i++) {
		void *mine;
		pthread_join(threads[i], &mine);
		sum += (unsigned long)mine;
	}
	CHECK(sum == counter, "futex: %lu increments, counter %lu", sum, counter);
	return sum;
}

/* Dekker's algorithm without fences on one side; membarrier provides them. */
static atomic_int slow_flag, fast_flag, inside;

static void *fast_side(void *argument)
{
	pin_to((int)(long)argument);
	while (!atomic_load_explicit(&stop, memory_order_relaxed)) {
		atomic_store_explicit(&fast_flag, 1, memory_order_relaxed);
		atomic_signal_fence(memory_order_seq_cst);
		if (!atomic_load_explicit(&slow_flag, memory_order_relaxed)) {
			int others = atomic_fetch_add(&inside, 1);
			CHECK(!others, "membarrier: both sides are in the critical section");
			atomic_fetch_sub(&inside, 1);
		}
		atomic_store_explicit(&fast_flag, 0, memory_order_release);
	}
	return NULL;
}

static int membarriers(double deadline)
{
	pthread_t thread;
	int rounds = 0;

	if (syscall(SYS_membarrier, MEMBARRIER_CMD_REGISTER_PRIVATE_EXPEDITED, 0, 0))
		fail("membarrier: %s", strerror(errno));
	stop = 0;
	pthread_create(&thread, NULL, fast_side, (void *)1);
	pin_to(0);
	while (now() < deadline) {
		atomic_store_explicit(&slow_flag, 1, memory_order_relaxed);
		CHECK(!syscall(SYS_membarrier, MEMBARRIER_CMD_PRIVATE_EXPEDITED, 0, 0),
		      "membarrier: %s", strerror(errno));
		if (!atomic_load_explicit(&fast_flag, memory_order_relaxed)) {
			int others = atomic_fetch_add(&inside, 1);
			CHECK(!others, "membarrier: both sides are in the critical section");
			atomic_fetch_sub(&inside, 1);
		}
		atomic_store_explicit(&slow_flag, 0, memory_order_release);
		rounds++;
	}
	stop = 1;
	pthread_join(thread, NULL);
	return rounds;
}

typedef long (*getcpu_function)(unsigned *cpu, unsigned *node, void *unused);

/* The vDSO's getcpu, which libc may not use but programs do. */
static getcpu_function vdso_getcpu(void)
{
	char *base = (char *)getauxval(AT_SYSINFO_EHDR);
	Elf64_Ehdr *header = (Elf64_Ehdr *)base;
	Elf64_Dyn *dynamic = NULL;
	Elf64_Sym *symbols = NULL;
	char *names = NULL;
	uint32_t *hash = NULL, count;

	if (!base)
		return NULL;
	for (int i = 0; i < header->e_phnum; i++) {
		Elf64_Phdr *part = (Elf64_Phdr *)(base + header->e_phoff + i * sizeof(*part));
		if (part->p_type == PT_DYNAMIC)
			dynamic = (Elf64_Dyn *)(base + part->p_vaddr);
	}
	for (; dynamic && dynamic->d_tag; dynamic++) {
		void *at = base + dynamic->d_un.d_ptr;
		if (dynamic->d_tag == DT_SYMTAB)
			symbols = at;
		if (dynamic->d_tag == DT_STRTAB)
			names = at;
		if (dynamic->d_tag == DT_HASH)
			hash = at;
	}
	if (!symbols || !names)
		return NULL;
	count = hash ? hash[1] : 16;
	for (uint32_t i = 0; i < count; i++)
		if (!strcmp(names + symbols[i].st_name, "__vdso_getcpu"))
			return (getcpu_function)(base + symbols[i].st_value);
	return NULL;
}

/* Moves between CPUs. All ways to read the CPU's number must give the new one. */
static int migrations(double deadline, int cpus)
{
	getcpu_function getcpu_fast = vdso_getcpu();
	int rounds = 0;

	while (now() < deadline) {
		int cpu = pin_to(rounds++ % cpus);
		unsigned seen = 9999, node;

		CHECK(!syscall(SYS_getcpu, &seen, &node, NULL) && (int)seen == cpu,
		      "pinned to CPU %d, getcpu says %u", cpu, seen);
		CHECK(sched_getcpu() == cpu, "pinned to CPU %d, sched_getcpu says %d", cpu, sched_getcpu());
		if (getcpu_fast) {
			getcpu_fast(&seen, &node, NULL);
			CHECK((int)seen == cpu, "pinned to CPU %d, the vDSO says %u", cpu, seen);
		}
	}
	return rounds;
}

int main(int argc, char **argv)
{
	double seconds = torture_start("smp", argc, argv);
	int cpus = cpu_count(), shoot = 0, barriers = 0, moves;
	unsigned long locks;

	pin_to(0);
	signal(SIGSEGV, on_fault);
	struct sigaction action = { .sa_handler = on_fault, .sa_flags = SA_NODEFER };
	sigaction(SIGSEGV, &action, NULL);
	if (cpus > 1) {
		shoot = shootdown(now() + seconds * 0.4, cpus);
		CHECK(writes > 0 || seconds < 0.5, "the other CPUs never ran");
		barriers = membarriers(now() + seconds * 0.2);
	}
	locks = futexes(now() + seconds * 0.2, cpus);
	moves = migrations(now() + seconds * 0.2, cpus);
	return ok("%d CPUs, %d shootdowns (%lu faults), %d membarriers, %lu locks, %d migrations",
		  cpus, shoot, (unsigned long)faults, barriers, locks, moves);
}
