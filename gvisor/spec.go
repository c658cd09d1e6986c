package main

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strconv"

	specs "github.com/opencontainers/runtime-spec/specs-go"
)

// sandboxSpec is the specification of a sandbox.
type sandboxSpec struct {
	// Directory of the sandbox. It contains the configuration and the console.
	Directory string `json:"directory"`
	// Base is the EROFS image with the agent. It is the root file system of the first process.
	Base string `json:"base"`
	// Images of the template, lowest first.
	Images []string `json:"images"`
	// Env is the environment of the agent.
	Env []string `json:"env"`
	// Namespace is the network namespace with the sandbox's interface. It is empty without a network.
	Namespace string `json:"namespace,omitempty"`
	// Cgroup is the control group of the sandbox. It is empty if resources are not limited.
	Cgroup string `json:"cgroup,omitempty"`
	// MemoryBytes is the guest's memory, OverheadBytes the additional memory of the sentry, and VCPUs
	// the number of processors.
	MemoryBytes   int64 `json:"memory_bytes"`
	OverheadBytes int64 `json:"overhead_bytes"`
	VCPUs         int64 `json:"vcpus"`
	// Tasks is the maximum number of tasks of the sentry.
	Tasks int64 `json:"tasks"`
}

// agent is the path of the guest agent in the base image.
const agent = "/jiffy-agent"

// period of CPU quotas, in microseconds.
const period = 100_000

// capabilities are all capabilities that the sentry supports. They only apply inside the sandbox.
var capabilities = []string{
	"CAP_AUDIT_CONTROL", "CAP_AUDIT_READ", "CAP_AUDIT_WRITE", "CAP_BLOCK_SUSPEND", "CAP_BPF", "CAP_CHECKPOINT_RESTORE", "CAP_CHOWN",
	"CAP_DAC_OVERRIDE", "CAP_DAC_READ_SEARCH", "CAP_FOWNER", "CAP_FSETID", "CAP_IPC_LOCK", "CAP_IPC_OWNER", "CAP_KILL", "CAP_LEASE",
	"CAP_LINUX_IMMUTABLE", "CAP_MAC_ADMIN", "CAP_MAC_OVERRIDE", "CAP_MKNOD", "CAP_NET_ADMIN", "CAP_NET_BIND_SERVICE",
	"CAP_NET_BROADCAST", "CAP_NET_RAW", "CAP_PERFMON", "CAP_SETFCAP", "CAP_SETGID", "CAP_SETPCAP", "CAP_SETUID", "CAP_SYSLOG",
	"CAP_SYS_ADMIN", "CAP_SYS_BOOT", "CAP_SYS_CHROOT", "CAP_SYS_MODULE", "CAP_SYS_NICE", "CAP_SYS_PACCT", "CAP_SYS_PTRACE",
	"CAP_SYS_RAWIO", "CAP_SYS_RESOURCE", "CAP_SYS_TIME", "CAP_SYS_TTY_CONFIG", "CAP_WAKE_ALARM",
}

// oci returns the OCI runtime specification of the sandbox. The sentry runs as user uid of the
// host.
func (s *sandboxSpec) oci(uid int) *specs.Spec {
	network := specs.LinuxNamespace{Type: specs.NetworkNamespace, Path: s.Namespace}
	spec := &specs.Spec{
		Version: "1.0.2",
		Process: &specs.Process{
			Args: []string{agent, "gvisor"},
			Env:  s.Env,
			Cwd:  "/",
			Capabilities: &specs.LinuxCapabilities{
				Bounding: capabilities, Effective: capabilities, Inheritable: capabilities, Permitted: capabilities,
			},
			Rlimits: []specs.POSIXRlimit{{Type: "RLIMIT_NOFILE", Soft: 1 << 20, Hard: 1 << 20}},
		},
		Root:     &specs.Root{Path: filepath.Join(s.Directory, "root"), Readonly: true},
		Hostname: "sandbox",
		Linux: &specs.Linux{
			CgroupsPath: s.Cgroup,
			Namespaces:  []specs.LinuxNamespace{{Type: specs.PIDNamespace}, network, {Type: specs.MountNamespace}},
		},
		Annotations: map[string]string{
			"dev.gvisor.spec.rootfs.source": s.Base,
			"dev.gvisor.spec.rootfs.type":   "erofs",
			"dev.jiffy.memory":              strconv.FormatInt(s.MemoryBytes, 10),
			"dev.jiffy.vcpus":               strconv.FormatInt(s.VCPUs, 10),
			"dev.jiffy.uid":                 strconv.Itoa(uid),
		},
	}
	for number, image := range s.Images {
		spec.Mounts = append(spec.Mounts, specs.Mount{
			Destination: fmt.Sprintf("/images/%d", number),
			Type:        "erofs",
			Source:      image,
			Options:     []string{"ro"},
		})
	}
	if s.Cgroup != "" {
		quota, every, memory := s.VCPUs*period, uint64(period), s.MemoryBytes+s.OverheadBytes
		spec.Linux.Resources = &specs.LinuxResources{
			Memory: &specs.LinuxMemory{Limit: &memory},
			Pids:   &specs.LinuxPids{Limit: s.Tasks},
			CPU:    &specs.LinuxCPU{Quota: &quota, Period: &every},
		}
	}
	return spec
}

// write writes the configuration to the path that runsc reads.
func (s *sandboxSpec) write(spec *specs.Spec) error {
	if err := os.MkdirAll(spec.Root.Path, 0o755); err != nil {
		return err
	}
	data, err := json.Marshal(spec)
	if err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(s.Directory, "config.json"), data, 0o600)
}
