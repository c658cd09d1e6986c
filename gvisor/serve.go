package main

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"sync"
	"time"

	specs "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"
	"gvisor.dev/gvisor/pkg/log"
	"gvisor.dev/gvisor/pkg/sentry/control"
	"gvisor.dev/gvisor/pkg/state/statefile"
	"gvisor.dev/gvisor/runsc/boot"
	"gvisor.dev/gvisor/runsc/config"
	"gvisor.dev/gvisor/runsc/container"
	"gvisor.dev/gvisor/runsc/flag"
	"gvisor.dev/gvisor/runsc/sandbox"
	"gvisor.dev/gvisor/runsc/version"
)

// errUnknown is returned for a sandbox that this process neither created nor adopted.
var errUnknown = errors.New("the sandbox does not exist")

// server handles the requests of the daemon.
type server struct {
	link link
	conf *config.Config
	// directory contains one directory per sandbox.
	directory string
	// creation is held while a sandbox is created: runsc passes its standard streams to the sandbox,
	// and these are global to the process.
	creation sync.Mutex
	// changes counts the sandboxes that are being created or removed.
	changes sync.WaitGroup
	// stops is read-locked while a sandbox is paused or resumed. The exit of this process locks it
	// permanently. No sandbox is therefore paused while the next helper runs, and no record is
	// incomplete.
	stops sync.RWMutex

	mu     sync.Mutex
	guests map[string]*guest
}

// configuration returns the runsc configuration for sandboxes whose state is stored in directory.
func configuration(directory string, groups bool) (*config.Config, error) {
	flags := flag.NewFlagSet("jiffy-gvisor", flag.ContinueOnError)
	config.RegisterFlags(flags)
	// directfs is off because the sentry runs as a user of its own without capabilities.
	arguments := []string{
		"--root=" + filepath.Join(directory, "state"), "--platform=systrap", "--network=sandbox", "--directfs=false",
		"--overlay2=none", "--net-raw=true", "--host-settings=ignore",
		"--restore-spec-validation=ignore", "--allow-suid=true",
		"--sidecar-usage-policy=LEGACY_DEPRECATED_SLOW_EMBEDDED_FALLBACK",
		fmt.Sprintf("--ignore-cgroups=%v", !groups),
	}
	if place := os.Getenv("JIFFY_GVISOR_LOG"); place != "" {
		arguments = append(arguments, "--debug", "--debug-log="+place)
	} else {
		// Errors are reported in the replies.
		log.SetTarget(&log.MultiEmitter{})
	}
	if err := flags.Parse(arguments); err != nil {
		return nil, err
	}
	return config.NewFromFlags(flags)
}

// serve handles requests until the daemon exits. Then it terminates all sandboxes that are not
// detached. If brief is set, it also removes the directory, which must not be used by another
// process.
func serve(directory string, brief bool) error {
	if brief {
		defer os.RemoveAll(directory)
	}
	conf, err := configuration(directory, os.Getenv("JIFFY_CGROUPS") != "")
	if err != nil {
		return err
	}
	// Sentry processes must not inherit the socket.
	unix.CloseOnExec(controlFD)
	go sweepGroups()
	s := &server{conf: conf, directory: directory, guests: map[string]*guest{}}
	defer s.destroyAttached()
	for {
		req, err := s.link.receive()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		if req.changes() {
			s.changes.Add(1)
		}
		go s.answer(req)
	}
}

// changes returns whether the request creates or removes a sandbox. Such a request is never
// interrupted.
func (r request) changes() bool {
	return r.Op == "create" || r.Op == "destroy"
}

func (s *server) answer(req request) {
	answer, fds, err := s.perform(req)
	if req.changes() {
		s.changes.Done()
	}
	answer.Number = req.Number
	if err != nil {
		answer.Error, answer.Unknown = err.Error(), errors.Is(err, errUnknown)
	}
	if err := s.link.send(answer, fds...); err != nil && !errors.Is(err, unix.EPIPE) {
		log.Warningf("cannot reply to the daemon: %v", err)
	}
	for _, fd := range fds {
		unix.Close(fd)
	}
}

func (s *server) perform(req request) (answer reply, fds []int, err error) {
	// runsc panics if a request needs the sandbox of a container that is being removed.
	defer func() {
		if reason := recover(); reason != nil {
			answer, fds, err = reply{}, nil, fmt.Errorf("the sandbox is being removed (%v)", reason)
		}
	}()
	switch req.Op {
	case "version":
		return reply{Version: version.Version()}, nil, nil
	case "create":
		return s.create(req)
	case "load":
		return s.load(req)
	case "destroy":
		return reply{}, nil, s.remove(req.ID)
	}
	g, err := s.guest(req.ID)
	if err != nil {
		return reply{}, nil, err
	}
	switch req.Op {
	case "start":
		if err := g.change(func() error { return g.container.Start(g.conf) }); err != nil {
			return reply{}, nil, err
		}
		g.watch()
		return reply{}, nil, g.listens()
	case "restore":
		if err := g.change(func() error { return g.container.Restore(g.conf, req.Image, false, true, nil) }); err != nil {
			return reply{}, nil, err
		}
		g.watch()
		return reply{}, nil, nil
	case "checkpoint":
		return s.checkpoint(g, req)
	case "resume":
		return reply{}, nil, s.resume(g)
	case "connect":
		return s.connect(g, req)
	case "keep":
		s.mu.Lock()
		defer s.mu.Unlock()
		g.detached = true
		return reply{}, nil, nil
	case "ended":
		<-g.ended
		return reply{Exit: g.exit, Signal: g.signal, OutOfMemory: g.outOfMemory}, nil, nil
	}
	return reply{}, nil, fmt.Errorf("unknown operation %q", req.Op)
}

func (s *server) guest(id string) (*guest, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if g, ok := s.guests[id]; ok {
		return g, nil
	}
	return nil, errUnknown
}

func (s *server) enter(id string, g *guest) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.guests[id] = g
}

// configuration returns the configuration of one sandbox. Without a network namespace, the sandbox
// has only its own loopback interface.
func (s *server) configuration(spec *specs.Spec) *config.Config {
	conf := *s.conf
	for _, namespace := range spec.Linux.Namespaces {
		if namespace.Type == specs.NetworkNamespace && namespace.Path == "" {
			conf.Network = config.NetworkNone
		}
	}
	return &conf
}

// create creates a sandbox that is not started yet.
func (s *server) create(req request) (reply, []int, error) {
	requested := req.Sandbox
	if requested == nil {
		return reply{}, nil, errors.New("the request has no sandbox specification")
	}
	uid, err := newUID()
	if err != nil {
		return reply{}, nil, err
	}
	spec := requested.oci(uid)
	if err := requested.write(spec); err != nil {
		return reply{}, nil, err
	}
	output, err := openConsole(requested.Directory, true)
	if err != nil {
		return reply{}, nil, err
	}
	conf := s.configuration(spec)
	args := container.Args{ID: req.ID, Spec: spec, BundleDir: requested.Directory}
	created, err := s.newContainer(conf, output, args)
	if err != nil {
		// The sentry exited before any process of the sandbox ran, so a retry is safe. runsc leaves the
		// control groups of a sandbox that it could not create. It considers existing groups foreign, and
		// never removes them.
		err = s.clear(req.ID)
		if err == nil {
			created, err = s.newContainer(conf, output, args)
		}
	}
	if err != nil {
		output.close()
		return reply{}, nil, errors.Join(err, s.clear(req.ID))
	}
	hold(created.SandboxPid(), requested.Images)
	s.enter(req.ID, newGuest(created, conf, output, false))
	return reply{Pid: created.SandboxPid()}, nil, nil
}

// newContainer creates a container whose standard streams are the sandbox's console. The streams of
// this process are not passed on.
func (s *server) newContainer(conf *config.Config, output *console, args container.Args) (*container.Container, error) {
	// Standard input is a closed pipe: runsc gives the streams to the sandbox's user, which must not
	// own a file of the host.
	nothing, end, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	defer nothing.Close()
	end.Close()
	guestEnd, err := os.OpenFile(output.path, os.O_WRONLY, 0)
	if err != nil {
		return nil, err
	}
	defer guestEnd.Close()
	s.creation.Lock()
	defer s.creation.Unlock()
	in, out, bad := os.Stdin, os.Stdout, os.Stderr
	defer func() { os.Stdin, os.Stdout, os.Stderr = in, out, bad }()
	os.Stdin, os.Stdout, os.Stderr = nothing, guestEnd, guestEnd
	return container.New(conf, args)
}

// hold locks the images through the sandbox's open files for as long as the sandbox has them open.
// No process then removes them, even after the daemon has exited. The daemon holds the images until
// this function returns.
func hold(pid int, images []string) {
	process, err := unix.PidfdOpen(pid, 0)
	if err != nil {
		return
	}
	defer unix.Close(process)
	fds := fmt.Sprintf("/proc/%d/fd", pid)
	entries, err := os.ReadDir(fds)
	if err != nil {
		return
	}
	var places []string
	for _, image := range images {
		if place, err := filepath.EvalSymlinks(image); err == nil {
			places = append(places, place)
		}
	}
	for _, entry := range entries {
		path, err := os.Readlink(filepath.Join(fds, entry.Name()))
		if err != nil || !slices.Contains(places, path) {
			continue
		}
		number, err := strconv.Atoi(entry.Name())
		if err != nil {
			continue
		}
		file, err := unix.PidfdGetfd(process, number, 0)
		if err != nil {
			continue
		}
		// The lock belongs to the open file description, which both processes share.
		_ = unix.Flock(file, unix.LOCK_SH|unix.LOCK_NB)
		unix.Close(file)
	}
}

// load adopts a sandbox that an earlier process detached.
func (s *server) load(req request) (reply, []int, error) {
	// Loading a container that does not exist would create a lock file.
	if _, err := os.Stat(s.stateOf(req.ID) + ".state"); err != nil {
		return reply{}, nil, errUnknown
	}
	full := container.FullID{SandboxID: req.ID, ContainerID: req.ID}
	loaded, err := container.Load(s.conf.RootDir, full, container.LoadOpts{Exact: true})
	if err != nil {
		return reply{}, nil, err
	}
	// If the sandbox has ended, its process id may have been reused.
	if !isolates(loaded.Sandbox.Getpid(), req.ID) {
		loaded.Sandbox.Pid.Store(0)
	}
	output, err := openConsole(loaded.BundleDir, false)
	if err != nil {
		return reply{}, nil, err
	}
	// The sandbox is paused if its last snapshot was not completed.
	if loaded.Status == container.Paused {
		if err := loaded.Resume(); err != nil {
			output.close()
			return reply{}, nil, err
		}
	}
	g := newGuest(loaded, s.configuration(loaded.Spec), output, true)
	s.enter(req.ID, g)
	if loaded.Status != container.Created {
		g.watch()
	}
	return reply{Pid: loaded.Sandbox.Getpid()}, nil, nil
}

func (s *server) pause(g *guest) error {
	s.stops.RLock()
	defer s.stops.RUnlock()
	return g.container.Pause()
}

func (s *server) resume(g *guest) error {
	s.stops.RLock()
	defer s.stops.RUnlock()
	return g.container.Resume()
}

// checkpoint writes a checkpoint of a sandbox. If the sandbox is not to be resumed, it remains
// paused, so that it can be resumed if the snapshot cannot be published.
func (s *server) checkpoint(g *guest, req request) (reply, []int, error) {
	began := time.Now()
	err := g.change(func() error {
		if !req.Resume {
			if err := s.pause(g); err != nil {
				return err
			}
		}
		err := g.container.Checkpoint(g.conf, req.Image, sandbox.CheckpointOpts{
			Compression:               statefile.CompressionLevelNone,
			Resume:                    true,
			ExcludeCommittedZeroPages: true,
			SaveRestoreExecTimeout:    control.DefaultSaveRestoreExecTimeout,
		})
		if err != nil && !req.Resume {
			err = errors.Join(err, s.resume(g))
		}
		return err
	})
	return reply{StoppedUs: time.Since(began).Microseconds()}, nil, err
}

// connect opens a stream to a port of the agent.
func (s *server) connect(g *guest, req request) (reply, []int, error) {
	ends, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return reply{}, nil, err
	}
	theirs := os.NewFile(uintptr(ends[0]), "stream")
	defer theirs.Close()
	opts := boot.PortForwardOpts{ContainerID: g.container.ID, Port: req.Port}
	opts.Files = []*os.File{theirs}
	if err := g.container.PortForward(&opts); err != nil {
		unix.Close(ends[1])
		return reply{}, nil, err
	}
	return reply{}, []int{ends[1]}, nil
}

// remove terminates a sandbox and removes its resources, even if its creation was interrupted.
func (s *server) remove(id string) error {
	g, err := s.guest(id)
	if err != nil {
		if _, _, err = s.load(request{ID: id}); err == nil {
			g, err = s.guest(id)
		}
	}
	if err == nil {
		return s.destroy(id, g)
	}
	return errors.Join(s.clear(id), os.RemoveAll(filepath.Join(s.directory, id)))
}

func (s *server) destroy(id string, g *guest) error {
	s.mu.Lock()
	delete(s.guests, id)
	s.mu.Unlock()
	if !g.mu.TryLock() {
		// An operation in progress fails as soon as the sandbox is killed. Without a sandbox, the pid is
		// -1, which would signal all processes.
		if pid := g.container.SandboxPid(); pid > 1 {
			_ = unix.Kill(pid, unix.SIGKILL)
		}
		g.mu.Lock()
	}
	defer g.mu.Unlock()
	err := g.container.Destroy()
	// runsc never removes groups that it considers foreign, such as the groups of an interrupted
	// creation.
	if err != nil || len(groupsOf(id)) > 0 {
		err = s.clear(id)
	}
	g.console.close()
	return errors.Join(err, os.RemoveAll(g.container.BundleDir))
}

// destroyAttached removes all sandboxes that are not detached.
func (s *server) destroyAttached() {
	// Do not wait longer for a sandbox that hangs.
	for end := time.Now().Add(clearLimit); !s.stops.TryLock() && time.Now().Before(end); {
		time.Sleep(clearInterval)
	}
	// Wait for removals as well: their sandboxes are no longer in the list.
	s.changes.Wait()
	s.mu.Lock()
	var attached []string
	for id, g := range s.guests {
		if !g.detached {
			attached = append(attached, id)
		}
	}
	s.mu.Unlock()
	for _, id := range attached {
		if g, err := s.guest(id); err == nil {
			_ = s.destroy(id, g)
		}
	}
}
