/*
 * Process 1 of the test guest: mounts file systems for the torture programs, runs
 * each in order, counts, and restarts the machine, which ends the virtual machine.
 *
 * Kernel command line: torture_seconds=N (default 5) for each program,
 * torture=name,name to run only some, torture_rounds=N to repeat everything.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/reboot.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/utsname.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

static const char *const programs[] = {
	"irq_timer", "signals", "ptrace_step", "fpu_avx", "smp",
	"timekeeping", "isolation", "fork_storm", "mmap_torture",
};

static void mount_on(const char *type, const char *where)
{
	mkdir(where, 0755);
	if (mount(type, where, type, 0, NULL) && errno != EBUSY)
		printf("torture: mount %s: %s\n", where, strerror(errno));
}

/* Modules without dependencies, from the image on the first disk if it exists. */
static void load_modules(const char *release)
{
	static const char *const modules[] = {
		"net/tls/tls", "net/sched/sch_netem", "drivers/net/ifb", "drivers/block/nbd",
	};
	int loaded = 0, unloaded = 0;

	mkdir("/modules", 0755);
	if (mount("/dev/vda", "/modules", "erofs", MS_RDONLY, NULL))
		return;
	for (size_t i = 0; i < sizeof(modules) / sizeof(modules[0]); i++) {
		char path[256];
		int fd;

		snprintf(path, sizeof(path), "/modules/usr/lib/modules/%s/kernel/%s.ko", release,
			 modules[i]);
		fd = open(path, O_RDONLY | O_CLOEXEC);
		if (fd < 0 || syscall(SYS_finit_module, fd, "", 0)) {
			printf("FAIL module %s: %s\n", modules[i], strerror(errno));
			continue;
		}
		close(fd);
		loaded++;
		if (!syscall(SYS_delete_module, strrchr(modules[i], '/') + 1, O_NONBLOCK))
			unloaded++;
	}
	printf("torture: %d modules loaded, %d unloaded\n", loaded, unloaded);
	fflush(stdout);
}

static int run(const char *name, const char *seconds)
{
	char path[64];
	int status;
	pid_t child;

	snprintf(path, sizeof(path), "/%s", name);
	child = fork();
	if (!child) {
		execl(path, name, seconds, NULL);
		printf("FAIL %s: cannot be run: %s\n", name, strerror(errno));
		_exit(1);
	}
	while (waitpid(-1, &status, 0) != child)
		;
	if (WIFSIGNALED(status))
		printf("FAIL %s: killed by signal %d\n", name, WTERMSIG(status));
	fflush(stdout);
	return status == 0;
}

/* Returns whether the kernel command line selects a program. */
static int wanted(const char *name)
{
	const char *list = getenv("torture"), *at;
	size_t length = strlen(name);

	if (!list)
		return 1;
	for (at = strstr(list, name); at; at = strstr(at + 1, name))
		if ((at == list || at[-1] == ',') && (at[length] == 0 || at[length] == ','))
			return 1;
	return 0;
}

int main(void)
{
	const char *seconds = getenv("torture_seconds");
	int rounds = getenv("torture_rounds") ? atoi(getenv("torture_rounds")) : 1;
	int passed = 0, failed = 0;
	struct utsname name;
	struct timespec up;

	mount_on("proc", "/proc");
	mount_on("sysfs", "/sys");
	mount_on("devtmpfs", "/dev");
	mount_on("tmpfs", "/tmp");
	uname(&name);
	clock_gettime(CLOCK_BOOTTIME, &up);
	printf("torture: Linux %s, %ld processors, up %ld.%02ld s\n", name.release,
	       sysconf(_SC_NPROCESSORS_ONLN), (long)up.tv_sec, up.tv_nsec / 10000000);
	fflush(stdout);
	load_modules(name.release);
	while (rounds-- > 0)
		for (size_t i = 0; i < sizeof(programs) / sizeof(programs[0]); i++)
			if (wanted(programs[i])) {
				if (run(programs[i], seconds ? seconds : "5"))
					passed++;
				else
					failed++;
			}
	printf("torture: %d passed, %d failed\n", passed, failed);
	fflush(stdout);
	sync();
	reboot(RB_AUTOBOOT);
	for (;;)
		pause();
}
