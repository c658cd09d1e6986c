// Command jiffy-gvisor runs the sandboxes of Jiffy's engine gvisor.
//
// It is gVisor's runsc with one command more. Called as runsc calls itself it is the process that
// isolates a sandbox; called as `jiffy-gvisor serve DIRECTORY` it makes sandboxes, and does with
// them what a Jiffy daemon asks over the socket at descriptor 3. Called as
// `jiffy-gvisor serve-brief DIRECTORY` it removes the directory at its end.
package main

import (
	"fmt"
	"os"

	"gvisor.dev/gvisor/runsc/cli/maincli"
	"gvisor.dev/gvisor/runsc/version"
)

func main() {
	switch {
	case len(os.Args) == 3 && (os.Args[1] == "serve" || os.Args[1] == "serve-brief"):
		if err := serve(os.Args[2], os.Args[1] == "serve-brief"); err != nil {
			fmt.Fprintf(os.Stderr, "jiffy-gvisor: %v\n", err)
			os.Exit(1)
		}
	case len(os.Args) == 2 && os.Args[1] == "version":
		fmt.Println(version.Version())
	default:
		maincli.Main()
	}
}
