"""S3 server in memory that counts and delays requests. It does not check signatures.

Objects, listings (version 2), ranges, conditional writes and removals are supported. `POST /-/set` with
a JSON object changes the delay of each request in milliseconds (`delay`), and the text whose presence
in a key hides an object from reads (`hide`). `POST /-/log` returns the requests since the last call as a
JSON list: [method, key or prefix, start, end, bytes of the body], times in seconds of a monotonic clock.

usage: memory_s3.py PORT
"""
import email.utils, hashlib, http.server, json, re, sys, threading, time, urllib.parse
from xml.sax.saxutils import escape

# Objects by bucket and key: content, ETag and time of the last change.
BUCKETS, LOCK = {}, threading.Lock()
STATE, LOG = {"delay": 0, "hide": ""}, []


class Server(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = -1
    disable_nagle_algorithm = True

    def log_message(self, *_):
        pass

    def answer(self, status, body=b"", headers=(), length=None):
        """Sends a response. `length` is the announced length of a response without a body."""
        self.send_response(status)
        for name, value in headers:
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body) if length is None else length))
        self.end_headers()
        self.sent = len(body)
        self.wfile.write(body)
        self.wfile.flush()

    def fail(self, status, code):
        self.answer(status, f"<Error><Code>{code}</Code></Error>".encode())

    def serve(self):
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        url = urllib.parse.urlsplit(self.path)
        query = dict(urllib.parse.parse_qsl(url.query, keep_blank_values=True))
        bucket, _, key = urllib.parse.unquote(url.path).lstrip("/").partition("/")
        if bucket == "-":
            return self.control(key, body)
        start = time.monotonic()
        time.sleep(STATE["delay"] / 1e3)
        if key:
            self.object(BUCKETS.setdefault(bucket, {}), key, body)
        elif "delete" in query:
            with LOCK:
                names = re.findall(r"<Key>(.*?)</Key>", body.decode())
                for name in names:
                    BUCKETS.setdefault(bucket, {}).pop(name, None)
            key = " ".join(names)
            done = "".join(f"<Deleted><Key>{name}</Key></Deleted>" for name in names)
            self.answer(200, f"<DeleteResult>{done}</DeleteResult>".encode())
        else:
            key = query.get("prefix", "")
            self.list(BUCKETS.setdefault(bucket, {}), key, query)
        LOG.append([self.command, key, start, time.monotonic(), len(body) or self.sent])

    def control(self, name, body):
        """Handles a request to `/-/`, which changes the settings or returns the log."""
        if name == "set":
            STATE.update(json.loads(body))
            return self.answer(200)
        taken = LOG[:]
        del LOG[:len(taken)]
        self.answer(200, json.dumps(taken).encode())

    def list(self, objects, prefix, query):
        """Lists the keys with a prefix, at most 1000 in one response."""
        after = query.get("continuation-token") or query.get("start-after") or ""
        with LOCK:
            names = sorted(name for name in objects if name.startswith(prefix) and name > after)
            page = [(name, objects[name]) for name in names[:1000]]
        more = len(names) > len(page)
        entries = "".join(
            f"<Contents><Key>{escape(name)}</Key><LastModified>{time.strftime('%Y-%m-%dT%H:%M:%S.000Z', time.gmtime(at))}"
            f"</LastModified><ETag>\"{tag}\"</ETag><Size>{len(data)}</Size></Contents>"
            for name, (data, tag, at) in page)
        token = f"<NextContinuationToken>{escape(page[-1][0])}</NextContinuationToken>" if more else ""
        text = f"<ListBucketResult><IsTruncated>{str(more).lower()}</IsTruncated>{entries}{token}</ListBucketResult>"
        self.answer(200, text.encode())

    def object(self, objects, key, body):
        """Reads, writes or removes an object."""
        with LOCK:
            found = objects.get(key)
            if self.command == "DELETE":
                objects.pop(key, None)
            if self.command == "PUT":
                wanted = self.headers.get("If-Match")
                if self.headers.get("If-None-Match") == "*" and found or wanted and (
                        not found or wanted.strip('"') != found[1]):
                    found = None
                else:
                    tag = hashlib.md5(body + str(time.monotonic_ns()).encode()).hexdigest()
                    objects[key] = found = (body, tag, time.time())
        if self.command == "DELETE":
            return self.answer(204)
        if self.command == "PUT":
            return self.answer(200, headers=[("ETag", f'"{found[1]}"')]) if found else self.fail(412, "PreconditionFailed")
        if not found or STATE["hide"] and STATE["hide"] in key:
            return self.fail(404, "NoSuchKey")
        data, tag, at = found
        headers = [("ETag", f'"{tag}"'), ("Last-Modified", email.utils.formatdate(at, usegmt=True))]
        asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range") or "")
        if asked and self.command == "GET":
            first, last = int(asked[1]), min(int(asked[2]), len(data) - 1)
            headers.append(("Content-Range", f"bytes {first}-{last}/{len(data)}"))
            return self.answer(206, data[first:last + 1], headers)
        self.answer(200, b"" if self.command == "HEAD" else data, headers, len(data))

    do_GET = do_HEAD = do_PUT = do_DELETE = do_POST = serve


if __name__ == "__main__":
    http.server.ThreadingHTTPServer.request_queue_size = 128
    http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Server).serve_forever()
