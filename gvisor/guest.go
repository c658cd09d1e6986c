package main

import (
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"
	"gvisor.dev/gvisor/runsc/config"
	"gvisor.dev/gvisor/runsc/container"
	"gvisor.dev/gvisor/runsc/sandbox"
)

// startLimit is the timeout of an agent's start.
const startLimit = 30 * time.Second

// guest is a sandbox that this process created or adopted.
type guest struct {
	container *container.Container
	// box is the container's sandbox. The container drops its reference when it is destroyed.
	box     *sandbox.Sandbox
	conf    *config.Config
	console *console
	// detached is set if the sandbox continues to run after the daemon exits.
	detached bool
	// ended is closed when the first process has ended. exit is its exit status, or signal the signal
	// that killed it. Both are unset for a sandbox that another process created.
	ended  chan struct{}
	exit   *int
	signal int
	// outOfMemory is set if the sandbox ended because the kernel killed a process at the memory limit
	// of its control group.
	outOfMemory bool
	// watching makes sure that only one goroutine waits for the end. An adopted sandbox may not have
	// been started yet.
	watching sync.Once
	// mu serialises changes of the container: runsc's lock of a container excludes other processes,
	// but not other threads of this process.
	mu sync.Mutex
}

func newGuest(c *container.Container, conf *config.Config, output *console, detached bool) *guest {
	return &guest{container: c, box: c.Sandbox, conf: conf, console: output, detached: detached, ended: make(chan struct{})}
}

// watch starts to wait for the end of the sandbox.
func (g *guest) watch() { g.watching.Do(func() { go g.awaitEnd() }) }

// awaitEnd waits for the end of the first process and reaps the sentry.
func (g *guest) awaitEnd() {
	defer close(g.ended)
	if g.box == nil {
		return
	}
	// After the sentry has exited, Wait returns the exit status of the sentry if it is a child of this
	// process. The status is 128 or more if the guest killed its first process. It is a signal only if
	// the sentry itself was killed. For other sentries, Wait returns the status of the guest, or none.
	err := unix.EINTR
	for errors.Is(err, unix.EINTR) {
		err, _ = unix.Waitid(unix.P_PID, g.box.Pid.Load(), nil, unix.WEXITED|unix.WNOWAIT, nil).(unix.Errno)
	}
	isChild := err == 0
	status, failed := g.box.Wait(g.box.ID)
	switch {
	case failed != nil:
	case isChild && status.Signaled():
		g.signal = int(status.Signal())
	default:
		exit := status.ExitStatus()
		g.exit = &exit
	}
	// A first process that the kernel kills exits with 128 plus the number of the signal.
	killed := g.exit == nil || *g.exit == 128+int(unix.SIGKILL)
	g.outOfMemory = killed && memoryKills(g.container.Spec.Linux.CgroupsPath) > 0
}

// memoryKills returns the number of processes that the kernel has killed at the memory limit of a
// control group.
func memoryKills(group string) (kills int) {
	if group == "" {
		return 0
	}
	for _, path := range []string{"/sys/fs/cgroup/memory" + group + "/memory.oom_control", "/sys/fs/cgroup" + group + "/memory.events"} {
		text, _ := os.ReadFile(path)
		for _, line := range strings.Split(string(text), "\n") {
			if count, ok := strings.CutPrefix(line, "oom_kill "); ok {
				n, _ := strconv.Atoi(count)
				kills += n
			}
		}
	}
	return kills
}

// change runs an operation on the container that must not run concurrently with other changes.
func (g *guest) change(operation func() error) error {
	g.mu.Lock()
	defer g.mu.Unlock()
	return operation()
}

// listens waits until the agent accepts connections.
func (g *guest) listens() error {
	select {
	case <-g.console.ready:
		return nil
	case <-g.ended:
		return errors.New("the sandbox ended before its agent accepted connections")
	case <-time.After(startLimit):
		return fmt.Errorf("the guest agent did not accept connections within %v", startLimit)
	}
}
