"""S3 server in memory (`memory_s3.py`) as a process of a measurement."""
import http.client, json, socket, subprocess, sys, time

from daemon import ROOT


class Store:
    """Process of the S3 server."""

    def __init__(self):
        with socket.socket() as found:
            found.bind(("127.0.0.1", 0))
            self.port = found.getsockname()[1]
        self.process = subprocess.Popen([sys.executable, ROOT / "bench/lib/memory_s3.py", str(self.port)])
        end = time.monotonic() + 10
        while socket.socket().connect_ex(("127.0.0.1", self.port)) and time.monotonic() < end:
            time.sleep(0.05)
        self.environment = {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.port}", "AWS_ALLOW_HTTP": "true", "AWS_REGION": "us-east-1",
            "AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "testsecret"}

    def send(self, name, body=None):
        """Sends a control request of `memory_s3.py`."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port)
        connection.request("POST", f"/-/{name}", json.dumps(body))
        return connection.getresponse().read()

    def set(self, **state):
        """Sets the delay, or the keys that are hidden."""
        self.send("set", state)

    def log(self):
        """Returns the requests since the last call."""
        return json.loads(self.send("log"))
