"""Name server of the tests: all names below the domain have the address of the daemon. Other names do not exist.

usage: name_server.py ADDRESS DOMAIN
"""

import socket
import struct
import sys

HEADER = struct.Struct(">6H")
A_RECORD = 1
# Flags of a response: authoritative, and whether the name exists.
FOUND, NOT_FOUND = 0x8400, 0x8403


def question(packet):
    """Returns the name of the question, its type and its end in the packet."""
    labels, at = [], HEADER.size
    while length := packet[at]:
        labels.append(packet[at + 1 : at + 1 + length].decode())
        at += 1 + length
    (kind,) = struct.unpack_from(">H", packet, at + 1)
    return ".".join(labels).lower(), kind, at + 5


def answer(packet, address, domain):
    name, kind, end = question(packet)
    exists = name == domain or name.endswith(f".{domain}")
    records = b""
    if exists and kind == A_RECORD:
        # The name is a pointer to the question. Valid for a second.
        records = struct.pack(">3HIH", 0xC000 | HEADER.size, A_RECORD, 1, 1, 4) + socket.inet_aton(address)
    (number,) = struct.unpack_from(">H", packet)
    header = HEADER.pack(number, FOUND if exists else NOT_FOUND, 1, 1 if records else 0, 0, 0)
    return header + packet[HEADER.size : end] + records


def main(address, domain):
    server = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    server.bind((address, 53))
    while True:
        packet, client = server.recvfrom(4096)
        try:
            server.sendto(answer(packet, address, domain), client)
        except (IndexError, UnicodeDecodeError, struct.error):
            # Ignore an invalid packet.
            continue


if __name__ == "__main__":
    main(*sys.argv[1:])
