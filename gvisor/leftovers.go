package main

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"time"

	"golang.org/x/sys/unix"
)

// groupParent is the control group that contains the groups of all sandboxes.
const groupParent = "jiffy-gvisor"

// clearLimit is the timeout for killed processes to leave their control groups.
const clearLimit = 10 * time.Second

// clearInterval is the interval between two attempts to remove control groups.
const clearInterval = 5 * time.Millisecond

// sandboxProcess is the first argument of every sentry process.
const sandboxProcess = "runsc-sandbox"

// sweepGroups removes control groups of sandboxes whose daemon and helper were killed and not
// restarted. The kernel does not remove a group with processes. A group that is being created is
// young.
func sweepGroups() {
	for _, group := range groupsOf("*") {
		if info, err := os.Stat(group); err == nil && info.IsDir() && time.Since(info.ModTime()) > time.Minute {
			_ = unix.Rmdir(group)
		}
	}
}

// groupsOf returns the control groups of a sandbox, one per hierarchy.
func groupsOf(id string) []string {
	groups, _ := filepath.Glob("/sys/fs/cgroup/*/" + groupParent + "/" + id)
	unified, _ := filepath.Glob("/sys/fs/cgroup/" + groupParent + "/" + id)
	return append(groups, unified...)
}

// clear removes the remains of a sandbox that could not be created, or whose helper was killed.
// runsc has no record of such a sandbox. Its processes are killed, and its control groups are
// removed when the processes have left.
func (s *server) clear(id string) error {
	end := time.Now().Add(clearLimit)
	for {
		remaining := killProcesses(id)
		for _, group := range groupsOf(id) {
			// A process that is starting cannot be identified by its arguments yet. It exits by itself
			// because it cannot report its start.
			if err := unix.Rmdir(group); err != nil && err != unix.ENOENT {
				remaining = fmt.Errorf("cannot remove the control group %s: %w", group, err)
			}
		}
		if remaining == nil {
			break
		}
		if time.Now().After(end) {
			return fmt.Errorf("sandbox %s still exists after %v: %w", id, clearLimit, remaining)
		}
		time.Sleep(clearInterval)
	}
	state := s.stateOf(id)
	for _, path := range []string{state + ".state", state + ".lock", filepath.Join(s.conf.RootDir, "runsc-"+id+".sock")} {
		if err := os.Remove(path); err != nil && !os.IsNotExist(err) {
			return err
		}
	}
	return nil
}

// stateOf returns the path of runsc's record of a sandbox, without the file name extension.
func (s *server) stateOf(id string) string {
	return filepath.Join(s.conf.RootDir, id+"_sandbox:"+id)
}

// killProcesses kills the sentry processes of sandbox id. It returns an error if such a process
// exists.
func killProcesses(id string) (remaining error) {
	entries, err := os.ReadDir("/proc")
	if err != nil {
		return err
	}
	for _, entry := range entries {
		pid, err := strconv.Atoi(entry.Name())
		if err != nil || !isolates(pid, id) {
			continue
		}
		// The process id may have been reused: check the arguments after opening the pidfd.
		process, err := unix.PidfdOpen(pid, 0)
		if err != nil {
			continue
		}
		if isolates(pid, id) {
			_ = unix.PidfdSendSignal(process, unix.SIGKILL, nil, 0)
			remaining = fmt.Errorf("process %d is exiting", pid)
		}
		unix.Close(process)
	}
	return remaining
}

// isolates returns whether process pid is the sentry of sandbox id, which is its last argument. A
// zombie has no arguments.
func isolates(pid int, id string) bool {
	line, err := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
	return err == nil && bytes.HasPrefix(line, []byte(sandboxProcess+"\x00")) && bytes.HasSuffix(line, []byte("\x00"+id+"\x00"))
}
