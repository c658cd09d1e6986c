package main

import (
	"errors"
	"fmt"
	"math/rand/v2"

	"golang.org/x/sys/unix"
)

// firstUID and uids are the range of users, and groups, of processes that isolate sandboxes. It is above that of the VMMs, and no
// distribution or container manager hands it out (https://systemd.io/UIDS-GIDS/).
const (
	firstUID = 1_910_000_000
	uids     = 200_000_000
)

// maxUIDTries is how many users are looked at before no free one is assumed.
const maxUIDTries = 64

// newUID returns a user of the host whom no process is. It is chosen at random, so that helpers of other daemons, which nothing
// coordinates, choose another; the kernel is asked before it is taken.
func newUID() (int, error) {
	for range maxUIDTries {
		uid := firstUID + rand.IntN(uids)
		// getpriority(2): ESRCH, no process of this user was found.
		if _, err := unix.Getpriority(unix.PRIO_USER, uid); errors.Is(err, unix.ESRCH) {
			return uid, nil
		}
	}
	return 0, fmt.Errorf("no user of the host is free between %d and %d", firstUID, firstUID+uids)
}
