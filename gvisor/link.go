package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"sync"

	"golang.org/x/sys/unix"
)

// controlFD is the socket to the daemon.
const controlFD = 3

// maxMessage is the longest message in bytes, in both directions.
const maxMessage = 64 << 10

// request is what the daemon asks. Which fields mean something depends on Op.
type request struct {
	// Number by which the answer is told from others.
	Number uint64 `json:"number"`
	// Op is what is to be done: version, create, start, restore, checkpoint, connect, load, keep,
	// ended, destroy.
	Op string `json:"op"`
	// ID of the sandbox.
	ID string `json:"id"`
	// Sandbox to be made.
	Sandbox *sandboxSpec `json:"sandbox,omitempty"`
	// Image is the directory of a checkpoint.
	Image string `json:"image,omitempty"`
	// Resume: the sandbox runs on after its checkpoint.
	Resume bool `json:"resume,omitempty"`
	// Port of the agent to connect to.
	Port uint16 `json:"port,omitempty"`
}

// reply answers a request. A connection comes with its descriptor.
type reply struct {
	Number uint64 `json:"number"`
	// Error in words; empty: it was done.
	Error string `json:"error,omitempty"`
	// Pid of the process that isolates the sandbox.
	Pid int `json:"pid,omitempty"`
	// StoppedUs is how long the sandbox stood still for a checkpoint, in microseconds.
	StoppedUs int64 `json:"stopped_us,omitempty"`
	// Version of gVisor.
	Version string `json:"version,omitempty"`
	// Exit is how the first process of a sandbox ended; nil: it was killed, or that is not known.
	Exit *int `json:"exit,omitempty"`
	// Signal that killed it.
	Signal int `json:"signal,omitempty"`
	// OutOfMemory: the kernel ended it, as it needed more memory than it may use.
	OutOfMemory bool `json:"out_of_memory,omitempty"`
	// Unknown: there is no such sandbox here.
	Unknown bool `json:"unknown,omitempty"`
}

// link is the socket to the daemon. Each message is one packet.
type link struct {
	mu sync.Mutex
}

// receive waits for the next request; io.EOF: the daemon is gone, be it with answers unread.
func (l *link) receive() (request, error) {
	buffer := make([]byte, maxMessage)
	for {
		n, err := unix.Read(controlFD, buffer)
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if err != nil && !errors.Is(err, unix.ECONNRESET) {
			return request{}, fmt.Errorf("reading from the daemon: %w", err)
		}
		if err != nil || n == 0 {
			return request{}, io.EOF
		}
		var asked request
		if err := json.Unmarshal(buffer[:n], &asked); err != nil {
			return request{}, fmt.Errorf("the daemon said something that is not a request: %w", err)
		}
		return asked, nil
	}
}

// send answers, handing over descriptors.
func (l *link) send(r reply, fds ...int) error {
	words, err := json.Marshal(r)
	if err != nil {
		return err
	}
	var rights []byte
	if len(fds) > 0 {
		rights = unix.UnixRights(fds...)
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	return unix.Sendmsg(controlFD, words, rights, nil, unix.MSG_NOSIGNAL)
}
