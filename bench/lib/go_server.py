"""The server in Go that measurements of the gateway send requests to."""
import os, socket, subprocess, time

PORT = 8000
SOURCE = """package main
import "net/http"
func main() {
    answer := []byte("hello, gateway")
    http.HandleFunc("/", func(w http.ResponseWriter, r *http.Request) { w.Write(answer) })
    panic(http.ListenAndServe(":%d", nil))
}
""" % PORT


def build(directory):
    """Builds the server in `directory`. Returns its path."""
    source, program = directory / "server.go", directory / "server"
    source.write_text(SOURCE)
    environment = {**os.environ, "CGO_ENABLED": "0", "GOFLAGS": "-mod=mod", "GO111MODULE": "off"}
    subprocess.run(["go", "build", "-o", program, source], check=True, env=environment)
    return program


def start_in(daemon, sandbox, program):
    """Starts the server in a sandbox. Returns the headers that select it at the API's address."""
    daemon.jiffy("cp", program, f"{sandbox[0]}:/tmp/server")
    daemon.exec(sandbox, "sh", "-c", "chmod +x /tmp/server; setsid /tmp/server > /dev/null 2>&1 & sleep 1")
    return f"e2b-sandbox-id: {sandbox[0]}", f"e2b-sandbox-port: {PORT}"


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def wait_for(port):
    """Waits until a program of this host listens on `port`."""
    for _ in range(200):
        try:
            with socket.create_connection(("127.0.0.1", port)):
                return
        except OSError:
            time.sleep(0.05)
    raise SystemExit(f"nothing listens on port {port} after 10 s")
