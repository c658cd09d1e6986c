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

// listening is the message that the agent writes to its console when it accepts connections.
const listening = "jiffy-agent: listening"

// consoleBytes is the maximum size of the console log in bytes.
const consoleBytes = 64 << 10

// console is the console output of a sandbox's first process: a named pipe, which another process
// can continue to read after this process exits.
type console struct {
	path string
	pipe *os.File
	// ready is closed when the agent has reported that it accepts connections.
	ready chan struct{}
	file  *os.File
}

func openConsole(directory string, fresh bool) (*console, error) {
	path := filepath.Join(directory, "console")
	if fresh {
		if err := unix.Mkfifo(path, 0o600); err != nil {
			return nil, fmt.Errorf("cannot create %s: %w", path, err)
		}
	}
	// Open the pipe for reading and writing: opening then does not wait for a writer, and reading does
	// not end when no writer exists.
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

// read stores the end of the output in a file of bounded length.
func (c *console) read() {
	defer c.file.Close()
	lines := bufio.NewReaderSize(c.pipe, 4096)
	isReady, written := false, int64(0)
	if info, err := c.file.Stat(); err == nil {
		written = info.Size()
	}
	for {
		line, err := lines.ReadSlice('\n')
		if !isReady && strings.HasPrefix(string(line), listening) {
			isReady = true
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

// shorten removes the first half of the log.
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
