//go:build wasip1

package main

import "unsafe"

// Interface jiffy-core/1: request and response are messages in memory, see docs/functions.md.

var request, response []byte

//go:wasmexport jiffy_buf
func jiffyBuf(length uint32) unsafe.Pointer {
	request = make([]byte, length+1)
	return unsafe.Pointer(&request[0])
}

//go:wasmexport jiffy_handle
func jiffyHandle(_, length uint32) uint32 {
	response = handle(request[:length])
	return uint32(len(response))
}

//go:wasmexport jiffy_out
func jiffyOut() unsafe.Pointer {
	return unsafe.Pointer(&response[0])
}
