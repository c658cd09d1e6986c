// Interface jiffy-core/1: request and response are messages in memory, see docs/functions.md.
#include "handler.h"

#define EXPORT(name) __attribute__((export_name(name)))

static char request[10 << 20], response[RESPONSE_BYTES];

EXPORT("jiffy_buf") char *buf(unsigned length) {
    if (length > sizeof request) __builtin_trap();
    return request;
}

EXPORT("jiffy_handle") unsigned handle_request(const char *at, unsigned length) {
    return handle(at, length, response);
}

EXPORT("jiffy_out") const char *out(void) { return response; }
