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

// errUnknown is of a sandbox that this process neither made nor took over.
var errUnknown = errors.New("there is no such sandbox")

// server does what the daemon asks.
type server struct {
	link link
	conf *config.Config
	// directory has one of each sandbox in it.
	directory string
	// making is held while a sandbox is made: runsc hands its own standard streams on, and those are
	// of the whole process.
	making sync.Mutex
	// changes are sandboxes that are being made or removed.
	changes sync.WaitGroup
	// stops is held shared while a sandbox is stopped or let go on, and for good by the end of this
	// process: nothing is stopped behind the back of the next helper, and no record is half written.
	stops sync.RWMutex

	mu     sync.Mutex
	guests map[string]*guest
}

// configuration of runsc for sandboxes whose state is in directory.
func configuration(directory string, groups bool) (*config.Config, error) {
	flags := flag.NewFlagSet("jiffy-gvisor", flag.ContinueOnError)
	config.RegisterFlags(flags)
	// directfs off: the process that isolates a sandbox runs as a user of its own and without
	// capabilities.
	words := []string{
		"--root=" + filepath.Join(directory, "state"), "--platform=systrap", "--network=sandbox", "--directfs=false",
		"--overlay2=none", "--net-raw=true", "--host-settings=ignore",
		"--restore-spec-validation=ignore", "--allow-suid=true",
		"--sidecar-usage-policy=LEGACY_DEPRECATED_SLOW_EMBEDDED_FALLBACK",
		fmt.Sprintf("--ignore-cgroups=%v", !groups),
	}
	if place := os.Getenv("JIFFY_GVISOR_LOG"); place != "" {
		words = append(words, "--debug", "--debug-log="+place)
	} else {
		// Its errors are in the answers.
		log.SetTarget(&log.MultiEmitter{})
	}
	if err := flags.Parse(words); err != nil {
		return nil, err
	}
	return config.NewFromFlags(flags)
}

// serve does what the daemon asks until it is gone, and then ends all sandboxes that are not kept.
// With brief set the directory, which is of nobody else's, goes as well.
func serve(directory string, brief bool) error {
	if brief {
		defer os.RemoveAll(directory)
	}
	conf, err := configuration(directory, os.Getenv("JIFFY_CGROUPS") != "")
	if err != nil {
		return err
	}
	// Not to be inherited by what isolates a sandbox.
	unix.CloseOnExec(controlFD)
	go sweepGroups()
	s := &server{conf: conf, directory: directory, guests: map[string]*guest{}}
	defer s.endUnkept()
	for {
		asked, err := s.link.receive()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		if asked.changes() {
			s.changes.Add(1)
		}
		go s.answer(asked)
	}
}

// changes is true for a request that makes or removes a sandbox: none is cut off halfway.
func (r request) changes() bool {
	return r.Op == "create" || r.Op == "destroy"
}

func (s *server) answer(asked request) {
	answer, fds, err := s.perform(asked)
	if asked.changes() {
		s.changes.Done()
	}
	answer.Number = asked.Number
	if err != nil {
		answer.Error, answer.Unknown = err.Error(), errors.Is(err, errUnknown)
	}
	if err := s.link.send(answer, fds...); err != nil && !errors.Is(err, unix.EPIPE) {
		log.Warningf("answering the daemon: %v", err)
	}
	for _, fd := range fds {
		unix.Close(fd)
	}
}

func (s *server) perform(asked request) (answer reply, fds []int, err error) {
	// A request during the removal of a container finds no sandbox, which runsc does not expect.
	defer func() {
		if reason := recover(); reason != nil {
			answer, fds, err = reply{}, nil, fmt.Errorf("the sandbox is being removed (%v)", reason)
		}
	}()
	switch asked.Op {
	case "version":
		return reply{Version: version.Version()}, nil, nil
	case "create":
		return s.create(asked)
	case "load":
		return s.load(asked)
	case "destroy":
		return reply{}, nil, s.remove(asked.ID)
	}
	g, err := s.guest(asked.ID)
	if err != nil {
		return reply{}, nil, err
	}
	switch asked.Op {
	case "start":
		if err := g.change(func() error { return g.container.Start(g.conf) }); err != nil {
			return reply{}, nil, err
		}
		g.watch()
		return reply{}, nil, g.listens()
	case "restore":
		if err := g.change(func() error { return g.container.Restore(g.conf, asked.Image, false, true, nil) }); err != nil {
			return reply{}, nil, err
		}
		g.watch()
		return reply{}, nil, nil
	case "checkpoint":
		return s.checkpoint(g, asked)
	case "resume":
		return reply{}, nil, s.resume(g)
	case "connect":
		return s.connect(g, asked)
	case "keep":
		s.mu.Lock()
		defer s.mu.Unlock()
		g.kept = true
		return reply{}, nil, nil
	case "ended":
		<-g.ended
		return reply{Exit: g.exit, Signal: g.signal, OutOfMemory: g.outOfMemory}, nil, nil
	}
	return reply{}, nil, fmt.Errorf("%q is nothing that can be asked", asked.Op)
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

// configuration of one sandbox: without a namespace that holds its card it has no network but its
// own loopback.
func (s *server) configuration(spec *specs.Spec) *config.Config {
	conf := *s.conf
	for _, namespace := range spec.Linux.Namespaces {
		if namespace.Type == specs.NetworkNamespace && namespace.Path == "" {
			conf.Network = config.NetworkNone
		}
	}
	return &conf
}

// create makes a sandbox that has not begun to run.
func (s *server) create(asked request) (reply, []int, error) {
	wanted := asked.Sandbox
	if wanted == nil {
		return reply{}, nil, errors.New("a sandbox is made of something")
	}
	uid, err := newUID()
	if err != nil {
		return reply{}, nil, err
	}
	spec := wanted.oci(uid)
	if err := wanted.write(spec); err != nil {
		return reply{}, nil, err
	}
	words, err := openConsole(wanted.Directory, true)
	if err != nil {
		return reply{}, nil, err
	}
	conf := s.configuration(spec)
	args := container.Args{ID: asked.ID, Spec: spec, BundleDir: wanted.Directory}
	made, err := s.make(conf, words, args)
	if err != nil {
		// It ended before anything of the sandbox had run: once more costs nothing but time. runsc
		// leaves the control groups of one that it could not make, and takes groups that it finds
		// for another's, which it never removes.
		err = s.clear(asked.ID)
		if err == nil {
			made, err = s.make(conf, words, args)
		}
	}
	if err != nil {
		words.close()
		return reply{}, nil, errors.Join(err, s.clear(asked.ID))
	}
	hold(made.SandboxPid(), wanted.Images)
	s.enter(asked.ID, newGuest(made, conf, words, false))
	return reply{Pid: made.SandboxPid()}, nil, nil
}

// make hands the sandbox its console in the place of this process's own streams.
func (s *server) make(conf *config.Config, words *console, args container.Args) (*container.Container, error) {
	// A pipe that has ended: its streams become the sandbox's user's, which no file of the host is to
	// be.
	nothing, end, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	defer nothing.Close()
	end.Close()
	guestEnd, err := os.OpenFile(words.path, os.O_WRONLY, 0)
	if err != nil {
		return nil, err
	}
	defer guestEnd.Close()
	s.making.Lock()
	defer s.making.Unlock()
	in, out, bad := os.Stdin, os.Stdout, os.Stderr
	defer func() { os.Stdin, os.Stdout, os.Stderr = in, out, bad }()
	os.Stdin, os.Stdout, os.Stderr = nothing, guestEnd, guestEnd
	return container.New(conf, args)
}

// hold locks the images as the sandbox has them open, for as long as it has: so nobody removes
// them, whoever else has gone by then. The daemon holds them until this is done.
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
		// The lock is that of the open file, which both have.
		_ = unix.Flock(file, unix.LOCK_SH|unix.LOCK_NB)
		unix.Close(file)
	}
}

// load takes over a sandbox that an earlier process kept.
func (s *server) load(asked request) (reply, []int, error) {
	// A look at what is not there would leave a lock.
	if _, err := os.Stat(s.stateOf(asked.ID) + ".state"); err != nil {
		return reply{}, nil, errUnknown
	}
	full := container.FullID{SandboxID: asked.ID, ContainerID: asked.ID}
	found, err := container.Load(s.conf.RootDir, full, container.LoadOpts{Exact: true})
	if err != nil {
		return reply{}, nil, err
	}
	// The number of one that has ended may be that of any other process by now.
	if !isolates(found.Sandbox.Getpid(), asked.ID) {
		found.Sandbox.Pid.Store(0)
	}
	words, err := openConsole(found.BundleDir, false)
	if err != nil {
		return reply{}, nil, err
	}
	// Of a snapshot that nobody finished.
	if found.Status == container.Paused {
		if err := found.Resume(); err != nil {
			words.close()
			return reply{}, nil, err
		}
	}
	g := newGuest(found, s.configuration(found.Spec), words, true)
	s.enter(asked.ID, g)
	if found.Status != container.Created {
		g.watch()
	}
	return reply{Pid: found.Sandbox.Getpid()}, nil, nil
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

// checkpoint writes a sandbox down. One that is not to go on stands still afterwards, so that it
// can, if its snapshot comes to nothing.
func (s *server) checkpoint(g *guest, asked request) (reply, []int, error) {
	began := time.Now()
	err := g.change(func() error {
		if !asked.Resume {
			if err := s.pause(g); err != nil {
				return err
			}
		}
		err := g.container.Checkpoint(g.conf, asked.Image, sandbox.CheckpointOpts{
			Compression:               statefile.CompressionLevelNone,
			Resume:                    true,
			ExcludeCommittedZeroPages: true,
			SaveRestoreExecTimeout:    control.DefaultSaveRestoreExecTimeout,
		})
		if err != nil && !asked.Resume {
			err = errors.Join(err, s.resume(g))
		}
		return err
	})
	return reply{StoppedUs: time.Since(began).Microseconds()}, nil, err
}

// connect opens a stream to a port of the agent.
func (s *server) connect(g *guest, asked request) (reply, []int, error) {
	ends, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return reply{}, nil, err
	}
	theirs := os.NewFile(uintptr(ends[0]), "stream")
	defer theirs.Close()
	opts := boot.PortForwardOpts{ContainerID: g.container.ID, Port: asked.Port}
	opts.Files = []*os.File{theirs}
	if err := g.container.PortForward(&opts); err != nil {
		unix.Close(ends[1])
		return reply{}, nil, err
	}
	return reply{}, []int{ends[1]}, nil
}

// remove ends a sandbox and removes all of it, also where its making was cut off.
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
	if !g.turn.TryLock() {
		// An operation under way fails at once when the sandbox is gone. Without a sandbox the pid is -1,
		// which would signal all processes.
		if pid := g.container.SandboxPid(); pid > 1 {
			_ = unix.Kill(pid, unix.SIGKILL)
		}
		g.turn.Lock()
	}
	defer g.turn.Unlock()
	err := g.container.Destroy()
	// runsc never removes groups that it takes for another's, as those of a making that was cut off.
	if err != nil || len(groupsOf(id)) > 0 {
		err = s.clear(id)
	}
	g.console.close()
	return errors.Join(err, os.RemoveAll(g.container.BundleDir))
}

// endUnkept ends what is nobody's any more.
func (s *server) endUnkept() {
	// A sandbox that hangs does not keep this process.
	for end := time.Now().Add(clearLimit); !s.stops.TryLock() && time.Now().Before(end); {
		time.Sleep(clearInterval)
	}
	// Also removals: what they have begun with is not in the list any more.
	s.changes.Wait()
	s.mu.Lock()
	var left []string
	for id, g := range s.guests {
		if !g.kept {
			left = append(left, id)
		}
	}
	s.mu.Unlock()
	for _, id := range left {
		if g, err := s.guest(id); err == nil {
			_ = s.destroy(id, g)
		}
	}
}
