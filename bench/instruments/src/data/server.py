"""Test server: answers each HTTP request with two bytes. `SINK N` receives N bytes and answers with one
byte; `SOURCE N` sends N bytes. One thread. usage: server.py PORT [ADDRESS]"""
import select
import socket
import sys

ANSWER = b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nContent-Length: 2\r\n\r\nok"
PIECE = bytes(1 << 20)


def sink(connection, remaining):
    buffer = bytearray(1 << 20)
    while remaining > 0 and (received := connection.recv_into(buffer)):
        remaining -= received
    # The answer confirms that all bytes have arrived, and are not in a buffer in transit.
    connection.sendall(b"." if remaining == 0 else b"!")


def source(connection, remaining):
    while remaining > 0:
        connection.sendall(PIECE[:remaining])
        remaining -= len(PIECE)


def main():
    address = sys.argv[2] if len(sys.argv) > 2 else "127.0.0.1"
    listener = socket.create_server((address, int(sys.argv[1])), backlog=256)
    print("listening on", listener.getsockname()[1], flush=True)
    poll, connections, pending = select.epoll(), {}, {}
    poll.register(listener, select.EPOLLIN)
    while True:
        for number, _ in poll.poll():
            if number == listener.fileno():
                connection, _ = listener.accept()
                # Otherwise an answer would wait for the acknowledgement of the previous one.
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                connections[connection.fileno()] = connection
                pending[connection.fileno()] = b""
                poll.register(connection, select.EPOLLIN)
                continue
            connection = connections[number]
            try:
                data = connection.recv(65536)
            except ConnectionError:
                data = b""
            text = pending[number] + data
            # A stream has the connection for itself, and blocks the server until its end.
            stream = text.startswith((b"SINK ", b"SOURCE ")) and b"\n" in text
            if not data or stream:
                poll.unregister(connection)
                del connections[number], pending[number]
                line, _, rest = text.partition(b"\n")
                if stream and line.startswith(b"SINK"):
                    sink(connection, int(line.split()[1]) - len(rest))
                elif stream:
                    source(connection, int(line.split()[1]))
                connection.close()
                continue
            # A client may send several requests, or a part of one.
            requests = text.count(b"\r\n\r\n")
            pending[number] = text.rpartition(b"\r\n\r\n")[2] if requests else text
            connection.send(ANSWER * requests)


main()
