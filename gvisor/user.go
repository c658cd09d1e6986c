package main

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"os"

	"golang.org/x/sys/unix"
)

// firstUID and uids are the range of users and groups of sentry processes. The range is above the
// range of VMMs, and no distribution or container manager assigns ids of it
// (https://systemd.io/UIDS-GIDS/).
const (
	firstUID = 1_910_000_000
	uids     = 200_000_000
)

// maxUIDTries is the maximum number of users that are tried.
const maxUIDTries = 64

// newUID returns a user without processes. The user is chosen at random, so that helpers of other
// daemons probably choose other users. The kernel is queried whether the user has processes.
//
// In the user namespace of an unprivileged user, only mapped users are available, so a subordinate
// user is chosen. If the user has no subordinate users, newUID returns 0: the sentry then runs as
// this user, in a nested namespace and without capabilities.
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
	return 0, fmt.Errorf("no unused user id between %d and %d", first, first+count)
}

// extent is a range of ids that a user namespace maps.
type extent struct{ first, count int }

// end returns the first id after the range.
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

// subordinate returns the range from which users of sandboxes are chosen. It is the default range
// if that is fully mapped, or else the longest range above 0 that is mapped for both users and
// groups. count is 0 if there is no such range.
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
