// Command precompile writes the system call filters of sandboxes as instructions, in the place of
// gVisor's filter_precompiled.go. Without that file each sandbox would compile them anew when it
// starts, which takes 20 to 30 ms.
package main

import (
	"fmt"
	"os"
	"strings"

	"gvisor.dev/gvisor/runsc/boot/filter/config"
)

// head is the rest of the file that is replaced.
const head = `package filter

import "gvisor.dev/gvisor/pkg/seccomp/precompiledseccomp"

// PrecompilationDisabledAtBuildTime says that there is nothing here.
const PrecompilationDisabledAtBuildTime = false

// GetPrecompiled returns the filter of that name.
func GetPrecompiled(name string) (precompiledseccomp.Program, bool) {
	program, ok := precompiledPrograms[name]
	return program, ok
}

// ListPrecompiled returns the names of all filters.
func ListPrecompiled() []string {
	var names []string
	for name := range precompiledPrograms {
		names = append(names, name)
	}
	return names
}

var precompiledPrograms = map[string]precompiledseccomp.Program{}

func init() {
`

// wanted are the options of sandboxes as jiffy-gvisor makes them.
var wanted = []string{"systrap", "HostNetwork=false", "HostFilesystem=false", "NVProxy=false", "TPUProxy=false", "RDMAProxy=false"}

func main() {
	programs, err := config.PrecompiledPrograms()
	if err != nil {
		fmt.Fprintf(os.Stderr, "precompile: %v\n", err)
		os.Exit(1)
	}
	fmt.Print(head)
	seen := 0
	for _, program := range programs {
		fits := true
		for _, word := range wanted {
			fits = fits && strings.Contains(program.Name, word)
		}
		if fits {
			fmt.Print(program.Registration("\t", "precompiledseccomp", "precompiledPrograms"))
			seen++
		}
	}
	fmt.Println("}")
	if seen == 0 {
		fmt.Fprintln(os.Stderr, "precompile: gVisor has no filters of these options")
		os.Exit(1)
	}
}
