#include "handler.h"

static unsigned crc32(const char *bytes, size_t length) {
    unsigned crc = ~0u;
    for (size_t i = 0; i < length; i++) {
        crc ^= (unsigned char)bytes[i];
        for (int bit = 0; bit < 8; bit++)
            crc = (crc >> 1) ^ (0xEDB88320u & (0u - (crc & 1)));
    }
    return ~crc;
}

/// Offset of the body: after the first empty line.
static size_t body(const char *request, size_t length) {
    for (size_t i = 1; i < length; i++)
        if (request[i] == '\n' && request[i - 1] == '\n') return i + 1;
    return length;
}

size_t handle(const char *request, size_t length, char *response) {
    static const char head[] = "200\ncontent-type: text/plain\n\n";
    size_t start = body(request, length), at = 0;
    unsigned crc = crc32(request + start, length - start);
    while (head[at]) {
        response[at] = head[at];
        at++;
    }
    for (int shift = 28; shift >= 0; shift -= 4) response[at++] = "0123456789abcdef"[crc >> shift & 15];
    response[at++] = '\n';
    return at;
}
