package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"sync"

	"golang.org/x/sys/unix"
)

// controlFD is the descriptor of the socket to the daemon.
const controlFD = 3

// maxMessage is the maximum size of a message in bytes, in both directions.
const maxMessage = 64 << 10

// request is a request of the daemon. Op determines which fields are used.
type request struct {
	// Number identifies the reply to this request.
	Number uint64 `json:"number"`
	// Op is the operation: version, create, start, restore, checkpoint, resume, connect, load, keep,
	// ended, destroy.
	Op string `json:"op"`
	// ID of the sandbox.
	ID string `json:"id"`
	// Sandbox to create.
	Sandbox *sandboxSpec `json:"sandbox,omitempty"`
	// Image is the directory of a checkpoint.
	Image string `json:"image,omitempty"`
	// Resume is set if the sandbox continues to run after its checkpoint.
	Resume bool `json:"resume,omitempty"`
	// Port of the agent to which to connect.
	Port uint16 `json:"port,omitempty"`
}

// reply is the reply to a request. A connection is returned as a descriptor.
type reply struct {
	Number uint64 `json:"number"`
	// Error is the error message, or empty if the request succeeded.
	Error string `json:"error,omitempty"`
	// Pid of the sentry process.
	Pid int `json:"pid,omitempty"`
	// StoppedUs is the time for which the sandbox was paused by a checkpoint, in microseconds.
	StoppedUs int64 `json:"stopped_us,omitempty"`
	// Version of gVisor.
	Version string `json:"version,omitempty"`
	// Exit is the exit status of the sandbox's first process. It is nil if the process was killed or
	// if the status is unknown.
	Exit *int `json:"exit,omitempty"`
	// Signal that killed the process.
	Signal int `json:"signal,omitempty"`
	// OutOfMemory is set if the kernel killed the sandbox because it exceeded its memory limit.
	OutOfMemory bool `json:"out_of_memory,omitempty"`
	// Unknown is set if this process does not know the sandbox.
	Unknown bool `json:"unknown,omitempty"`
}

// link is the socket to the daemon. Each message is one packet.
type link struct {
	mu sync.Mutex
}

// receive waits for the next request. It returns io.EOF if the daemon has exited, even if the
// daemon has not read all replies.
func (l *link) receive() (request, error) {
	buffer := make([]byte, maxMessage)
	for {
		n, err := unix.Read(controlFD, buffer)
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if err != nil && !errors.Is(err, unix.ECONNRESET) {
			return request{}, fmt.Errorf("cannot read from the daemon: %w", err)
		}
		if err != nil || n == 0 {
			return request{}, io.EOF
		}
		var req request
		if err := json.Unmarshal(buffer[:n], &req); err != nil {
			return request{}, fmt.Errorf("the daemon sent an invalid request: %w", err)
		}
		return req, nil
	}
}

// send sends a reply with descriptors.
func (l *link) send(r reply, fds ...int) error {
	data, err := json.Marshal(r)
	if err != nil {
		return err
	}
	var rights []byte
	if len(fds) > 0 {
		rights = unix.UnixRights(fds...)
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	return unix.Sendmsg(controlFD, data, rights, nil, unix.MSG_NOSIGNAL)
}
