package main

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"os"

	"golang.org/x/sys/unix"
)

// firstUID and uids are the range of users, and groups, of processes that isolate sandboxes. It is
// above that of the VMMs, and no distribution or container manager hands it out
// (https://systemd.io/UIDS-GIDS/).
const (
	firstUID = 1_910_000_000
	uids     = 200_000_000
)

// maxUIDTries is how many users are looked at before no free one is assumed.
const maxUIDTries = 64

// newUID returns a user whom no process is. It is chosen at random, so that helpers of other
// daemons, which nothing coordinates, choose another; the kernel is asked before it is taken.
//
// In the user namespace of an ordinary user there are only the users that it maps: of its
// subordinate users one is taken, and where it has none the sandbox's process is that ordinary
// user, in a further namespace and without capabilities.
func newUID() (int, error) {
	users, err := mapped("/proc/self/uid_map")
	if err != nil {
		return 0, err
	}
	groups, err := mapped("/proc/self/gid_map")
	if err != nil {
		return 0, err
	}
	first, count := subordinate(users, groups)
	if count == 0 {
		return 0, nil
	}
	for range maxUIDTries {
		uid := first + rand.IntN(count)
		// getpriority(2): ESRCH, no process of this user was found.
		if _, err := unix.Getpriority(unix.PRIO_USER, uid); errors.Is(err, unix.ESRCH) {
			return uid, nil
		}
	}
	return 0, fmt.Errorf("no user is free between %d and %d", first, first+count)
}

// extent is a range of ids that a user namespace maps.
type extent struct{ first, count int }

// end is the first id beyond it.
func (e extent) end() int { return e.first + e.count }

// mapped reads the extents of a map in /proc (user_namespaces(7)).
func mapped(path string) ([]extent, error) {
	file, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer file.Close()
	var extents []extent
	for {
		var own, outside, count int
		if _, err := fmt.Fscan(file, &own, &outside, &count); err != nil {
			break
		}
		extents = append(extents, extent{own, count})
	}
	return extents, nil
}

// subordinate returns the range that sandboxes' users are taken from: the usual one where all of it
// is mapped, else the longest above 0 that is mapped for users and groups alike; none: count is 0.
func subordinate(users, groups []extent) (first, count int) {
	for _, user := range users {
		for _, group := range groups {
			begin, end := max(user.first, group.first, 1), min(user.end(), group.end())
			if begin <= firstUID && firstUID+uids <= end {
				return firstUID, uids
			}
			if end-begin > count {
				first, count = begin, end-begin
			}
		}
	}
	return first, count
}
