// Command precompile writes the compiled system call filters of sandboxes, which replace gVisor's
// filter_precompiled.go. Without this file, every sandbox would compile the filters at its start,
// which takes 20 to 30 ms.
package main

import (
	"fmt"
	"os"
	"strings"

	"gvisor.dev/gvisor/runsc/boot/filter/config"
)

// head is the start of the generated file.
const head = `package filter

import "gvisor.dev/gvisor/pkg/seccomp/precompiledseccomp"

// PrecompilationDisabledAtBuildTime states whether this file has no filters.
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

// requiredOptions are the options of the sandboxes that jiffy-gvisor creates.
var requiredOptions = []string{"systrap", "HostNetwork=false", "HostFilesystem=false", "NVProxy=false", "TPUProxy=false", "RDMAProxy=false"}

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
		for _, word := range requiredOptions {
			fits = fits && strings.Contains(program.Name, word)
		}
		if fits {
			fmt.Print(program.Registration("\t", "precompiledseccomp", "precompiledPrograms"))
			seen++
		}
	}
	fmt.Println("}")
	if seen == 0 {
		fmt.Fprintln(os.Stderr, "precompile: gVisor has no filters with the required options")
		os.Exit(1)
	}
}
