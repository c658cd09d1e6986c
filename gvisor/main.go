// Command jiffy-gvisor runs the sandboxes of Jiffy's engine gvisor.
//
// It is gVisor's runsc with one additional command. If runsc starts it, it is a sentry process.
// `jiffy-gvisor serve DIRECTORY` creates and manages sandboxes as requested by a Jiffy daemon over
// the socket at descriptor 3. `jiffy-gvisor serve-brief DIRECTORY` also removes the directory at
// exit.
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
