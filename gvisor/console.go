package main

import (
	"bufio"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"
)

// listening is what the agent writes to its console when it can be reached.
const listening = "jiffy-agent: listening"

// consoleBytes is how much of a console is kept.
const consoleBytes = 64 << 10

// console is what a sandbox's first process writes: a named pipe, which another process can read on
// when this one is gone.
type console struct {
	path string
	pipe *os.File
	// ready is closed when the agent said that it listens.
	ready chan struct{}
	file  *os.File
}

func openConsole(directory string, fresh bool) (*console, error) {
	path := filepath.Join(directory, "console")
	if fresh {
		if err := unix.Mkfifo(path, 0o600); err != nil {
			return nil, fmt.Errorf("making %s: %w", path, err)
		}
	}
	// Both ways, so that it neither waits for a writer nor ends without one.
	pipe, err := os.OpenFile(path, os.O_RDWR|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil, err
	}
	file, err := os.OpenFile(filepath.Join(directory, "console.log"), os.O_CREATE|os.O_RDWR|os.O_APPEND, 0o600)
	if err != nil {
		pipe.Close()
		return nil, err
	}
	c := &console{path: path, pipe: pipe, file: file, ready: make(chan struct{})}
	go c.read()
	return c, nil
}

// read keeps the last words in a file of bounded length.
func (c *console) read() {
	defer c.file.Close()
	lines := bufio.NewReaderSize(c.pipe, 4096)
	said, written := false, int64(0)
	if info, err := c.file.Stat(); err == nil {
		written = info.Size()
	}
	for {
		line, err := lines.ReadSlice('\n')
		if !said && strings.HasPrefix(string(line), listening) {
			said = true
			close(c.ready)
		} else if len(line) > 0 {
			if written > 2*consoleBytes {
				written = c.shorten()
			}
			n, _ := c.file.Write(line)
			written += int64(n)
		}
		if err != nil && !errors.Is(err, bufio.ErrBufferFull) {
			return
		}
	}
}

// shorten leaves the second half of what was written.
func (c *console) shorten() int64 {
	last := make([]byte, consoleBytes)
	info, err := c.file.Stat()
	if err != nil {
		return 0
	}
	n, _ := c.file.ReadAt(last, max(0, info.Size()-consoleBytes))
	_ = c.file.Truncate(0)
	n, _ = c.file.Write(last[:n])
	return int64(n)
}

func (c *console) close() { c.pipe.Close() }
