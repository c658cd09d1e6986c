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

// startLimit is the time that an agent has to listen.
const startLimit = 30 * time.Second

// guest is a sandbox that this process made or took over.
type guest struct {
	container *container.Container
	// box is the container's, which it forgets when it is destroyed.
	box     *sandbox.Sandbox
	conf    *config.Config
	console *console
	// kept: it runs on when the daemon is gone.
	kept bool
	// ended is closed when its first process has ended; exit is how, or signal if it was killed; none
	// of both is known of one that another process made.
	ended  chan struct{}
	exit   *int
	signal int
	// outOfMemory: the kernel killed something of it for the limit of its control group, and it ended
	// of that.
	outOfMemory bool
	// watching begins once: a sandbox that was taken over may not have begun to run.
	watching sync.Once
	// turn is held by whoever changes the container: runsc's lock on it is of the process, and not for
	// two of its threads.
	turn sync.Mutex
}

func newGuest(c *container.Container, conf *config.Config, words *console, kept bool) *guest {
	return &guest{container: c, box: c.Sandbox, conf: conf, console: words, kept: kept, ended: make(chan struct{})}
}

// watch has its end noticed from here on.
func (g *guest) watch() { g.watching.Do(func() { go g.awaitEnd() }) }

// awaitEnd waits for the end of its first process, and leaves no zombie.
func (g *guest) awaitEnd() {
	defer close(g.ended)
	if g.box == nil {
		return
	}
	// Once the process that isolates it is gone its status is what Wait tells: 128 and more if the
	// guest's first process was killed by the guest, a signal only if it was itself killed. It is a
	// child if this process made it; otherwise Wait tells of the guest, or nothing.
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
	// A first process that the kernel kills exits with the number of the signal.
	killed := g.exit == nil || *g.exit == 128+int(unix.SIGKILL)
	g.outOfMemory = killed && memoryKills(g.container.Spec.Linux.CgroupsPath) > 0
}

// memoryKills is how many processes of a control group the kernel has killed for its limit of
// memory.
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

// change does something with the container that it does not bear at the same time as something
// else.
func (g *guest) change(what func() error) error {
	g.turn.Lock()
	defer g.turn.Unlock()
	return what()
}

// listens returns when its agent does.
func (g *guest) listens() error {
	select {
	case <-g.console.ready:
		return nil
	case <-g.ended:
		return errors.New("the sandbox ended before its agent listened")
	case <-time.After(startLimit):
		return fmt.Errorf("the guest agent did not listen within %v", startLimit)
	}
}
