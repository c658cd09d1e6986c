package main

import (
	"strings"
	"testing"
)

func TestAnswersWithTheDigestOfTheBody(t *testing.T) {
	response := string(handle([]byte("POST / HTTP/1.1\nhost: f\n\nabc")))
	expected := "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad\n"
	if !strings.HasPrefix(response, "200\n") || !strings.HasSuffix(response, "\n\n"+expected) {
		t.Fatal(response)
	}
}
