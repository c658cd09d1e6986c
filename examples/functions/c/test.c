#include "handler.h"
#include <assert.h>
#include <string.h>

int main(void) {
    static const char request[] = "POST / HTTP/1.1\nhost: f\n\n123456789";
    static const char expected[] = "200\ncontent-type: text/plain\n\ncbf43926\n";
    char response[RESPONSE_BYTES];
    size_t length = handle(request, strlen(request), response);
    assert(length == strlen(expected) && memcmp(response, expected, length) == 0);
}
