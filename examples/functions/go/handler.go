package main

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
)

// handle answers with the SHA-256 of the body. A request is a line with method and path, headers,
// an empty line and the body; a response begins with its status.
func handle(request []byte) []byte {
	_, body, _ := bytes.Cut(request, []byte("\n\n"))
	sum := sha256.Sum256(body)
	return []byte("200\ncontent-type: text/plain\n\n" + hex.EncodeToString(sum[:]) + "\n")
}
