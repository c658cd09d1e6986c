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

// groupParent is the control group that holds those of all sandboxes.
const groupParent = "jiffy-gvisor"

// clearLimit is the time in which what was killed has left its control groups.
const clearLimit = 10 * time.Second

// clearInterval is the time between two looks at what is leaving.
const clearInterval = 5 * time.Millisecond

// sandboxProcess is the first argument of each process that isolates a sandbox.
const sandboxProcess = "runsc-sandbox"

// sweepGroups removes control groups of sandboxes whose daemon and helper were killed and never
// came back. The kernel refuses where anything is in one; one that is being made is young.
func sweepGroups() {
	for _, group := range groupsOf("*") {
		if info, err := os.Stat(group); err == nil && info.IsDir() && time.Since(info.ModTime()) > time.Minute {
			_ = unix.Rmdir(group)
		}
	}
}

// groupsOf returns the control groups of a sandbox, one of each hierarchy.
func groupsOf(id string) []string {
	groups, _ := filepath.Glob("/sys/fs/cgroup/*/" + groupParent + "/" + id)
	unified, _ := filepath.Glob("/sys/fs/cgroup/" + groupParent + "/" + id)
	return append(groups, unified...)
}

// clear removes what the making of a sandbox left that failed, or whose helper was killed: runsc
// has no record of it. Its processes are killed, its control groups removed when they have left.
func (s *server) clear(id string) error {
	end := time.Now().Add(clearLimit)
	for {
		left := killProcesses(id)
		for _, group := range groupsOf(id) {
			// One that just begins is not known by its arguments yet. It ends by itself, as it
			// finds nobody to tell that it is there.
			if err := unix.Rmdir(group); err != nil && err != unix.ENOENT {
				left = fmt.Errorf("removing the control group %s: %w", group, err)
			}
		}
		if left == nil {
			break
		}
		if time.Now().After(end) {
			return fmt.Errorf("sandbox %s is not gone after %v: %w", id, clearLimit, left)
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

// stateOf returns the path of runsc's record of a sandbox, without the ending of its name.
func (s *server) stateOf(id string) string {
	return filepath.Join(s.conf.RootDir, id+"_sandbox:"+id)
}

// killProcesses kills the processes that isolate sandbox id. An error says that there was one.
func killProcesses(id string) (left error) {
	entries, err := os.ReadDir("/proc")
	if err != nil {
		return err
	}
	for _, entry := range entries {
		pid, err := strconv.Atoi(entry.Name())
		if err != nil || !isolates(pid, id) {
			continue
		}
		// The number may be another's by now, which its arguments tell once it is held.
		process, err := unix.PidfdOpen(pid, 0)
		if err != nil {
			continue
		}
		if isolates(pid, id) {
			_ = unix.PidfdSendSignal(process, unix.SIGKILL, nil, 0)
			left = fmt.Errorf("process %d is ending", pid)
		}
		unix.Close(process)
	}
	return left
}

// isolates tells if process pid isolates sandbox id, which is its last argument. A zombie has none.
func isolates(pid int, id string) bool {
	line, err := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
	return err == nil && bytes.HasPrefix(line, []byte(sandboxProcess+"\x00")) && bytes.HasSuffix(line, []byte("\x00"+id+"\x00"))
}
